# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention without a cache, make_graphed_callables, and the front without PyTorch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from definition import attention, check_close, weighed
from gpu_frames import everywhere

from octavo.compat import transformer_engine as engine

HEADS, GROUPS, DIM = 4, 2, 16


def ends(lens):
    return np.concatenate([[0], np.cumsum(lens)])


def layout(rows, fmt, longest):
    """[[n, h, d], ...] in a format, NaN in the padding."""
    if fmt == "thd":
        return np.concatenate(rows)
    whole = np.full((len(rows), longest, *rows[0].shape[1:]), np.nan)
    for b, x in enumerate(rows):
        whole[b, : len(x)] = x
    return whole.swapaxes(0, 1) if fmt == "sbhd" else whole


def row_of(x, fmt, b, n, start):
    if fmt == "thd":
        return x[start : start + n]
    return x[b, :n] if fmt == "bshd" else x[:n, b]


@everywhere
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize(
    ("mask", "window", "q_lens", "kv_lens"),
    [
        ("no_mask", None, (6, 6), (6, 6)),
        ("causal", None, (6, 6), (6, 6)),
        ("causal", None, (4, 4), (6, 6)),
        ("causal", (2, 0), (4, 4), (6, 6)),
        ("causal_bottom_right", None, (4, 4), (6, 6)),
        ("causal_bottom_right", (2, 0), (6, 6), (4, 4)),
        ("no_mask", (2, 1), (6, 6), (6, 6)),
        ("padding", None, (3, 6), (5, 2)),
        ("padding_causal", None, (3, 6), (3, 6)),
        ("padding_causal", None, (3, 2), (6, 2)),
        ("padding_causal_bottom_right", None, (3, 6), (5, 6)),
    ],
)
def test_equals_the_definition(frame, fmt, mask, window, q_lens, kv_lens):
    if fmt == "thd" and "padding" not in mask and len(set(q_lens + kv_lens)) > 1:
        pytest.skip("thd sequences of one length need no other mask")
    r = np.random.default_rng(1)
    dtype = frame.dtypes[-1]
    q, k, v = (
        [r.standard_normal((n, h, DIM)) for n in lens]
        for lens, h in ((q_lens, HEADS), (kv_lens, GROUPS), (kv_lens, GROUPS))
    )
    arrays = [
        frame.make(layout(x, fmt, 6 if "padding" in mask else len(x[0])), dtype) for x in (q, k, v)
    ]
    module = engine.DotProductAttention(
        HEADS, DIM, GROUPS, qkv_format=fmt, attn_mask_type=mask
    ).eval()
    lengths = {}
    if "padding" in mask or fmt == "thd":
        lengths["cu_seqlens_q"] = lengths["cu_seqlens_kv"] = frame.ints(ends(q_lens))
        if q_lens != kv_lens:
            lengths["cu_seqlens_kv"] = frame.ints(ends(kv_lens))
    out = module(*arrays, window_size=window, **lengths)
    got = frame.read(out)
    assert got.shape == (*frame.read(arrays[0]).shape[:-2], HEADS * DIM)
    for b, (n, length) in enumerate(zip(q_lens, kv_lens, strict=True)):
        starts = int(ends(q_lens)[b]), int(ends(kv_lens)[b])
        mine = [
            row_of(frame.read(x), fmt, b, m, s)
            for x, m, s in zip(
                arrays, (n, length, length), (starts[0], starts[1], starts[1]), strict=True
            )
        ]
        causal = "causal" in mask
        if (
            causal and "bottom_right" not in mask
        ):  # the top left: keys beyond the queries are never seen
            mine[1:] = [x[:n] for x in mine[1:]]
        maths = {"causal": causal, "window": window or (-1, -1)}
        want, _ = attention(*mine, **maths)
        check_close(
            row_of(got, fmt, b, n, starts[0]),
            want.reshape(n, -1),
            dtype,
            4.0,
            f"sequence {b}",
            frame.products(dtype),
            weighed(*mine, **maths).reshape(n, -1),
        )


def test_more_queries_than_keys_aligned_to_the_top_left_is_named(frame):
    x = frame.make(np.ones((1, 4, HEADS, DIM)))
    module = engine.DotProductAttention(HEADS, DIM, qkv_format="bshd").eval()
    with pytest.raises(NotImplementedError, match="top left"):
        module(x, x[:, :2], x[:, :2])


def test_backward_is_refused_by_name():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.ones(1, 2, HEADS, DIM, requires_grad=True)
    module = engine.DotProductAttention(HEADS, DIM, qkv_format="bshd").eval()
    assert isinstance(module, torch.nn.Module)
    with pytest.raises(NotImplementedError, match="backward"):
        module(x, x, x)
    with torch.no_grad():
        assert tuple(module(x, x, x).shape) == (1, 2, HEADS * DIM)


def test_dropout_in_training_is_refused_by_name(frame):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    module = engine.DotProductAttention(HEADS, DIM, qkv_format="bshd", attention_dropout=0.1)
    x = torch.ones(1, 2, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="attention_dropout"):
        module.train()(x, x, x)
    assert module.eval()(x, x, x).shape == (1, 2, HEADS * DIM)


@pytest.mark.parametrize(
    "option",
    [{"cp_group": 1}, {"tp_group": 1}, {"return_max_logit": True}],
    ids=lambda o: next(iter(o)),
)
def test_constructor_names_what_it_does_not_cover(option):
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        engine.DotProductAttention(HEADS, DIM, **option)


class Switch:
    """A module as far as make_graphed_callables looks at modes."""

    def __init__(self, training):
        self.training = training


def test_graphed_modules_must_be_in_one_mode():
    with pytest.raises(
        ValueError,
        match=r"modules\[1\] \(Switch\) in training.*modules\[0\] \(Switch\), modules\[2\]",
    ):
        engine.make_graphed_callables((Switch(False), Switch(True), Switch(False)), ((), (), ()))


def test_graphed_modules_in_training_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="training"):
        engine.make_graphed_callables((Switch(True), Switch(True)), ((), ()))


def test_graphs_without_a_gpu_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="GPU"):
        engine.make_graphed_callables(Switch(False), (np.ones(3),))


@pytest.mark.parametrize(
    "option", ["fp8_enabled", "fp8_calibrating", "fp8_weight_caching", "_order"]
)
def test_graph_options_that_are_not_covered_are_named(option):
    with pytest.raises(NotImplementedError, match=option):
        engine.make_graphed_callables(Switch(False), (np.ones(3),), **{option: True})


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_pytorch_numpy_arrays_go_through_plain_classes():
    run(
        """
import sys
sys.modules["torch"] = None  # as where it is not installed
import numpy as np
from octavo.compat.transformer_engine.pytorch import InferenceParams
from octavo.compat.transformer_engine.pytorch.attention import DotProductAttention
params = InferenceParams(2, 8, 1, 8, np.float32)
params.allocate_memory(1)
params.pre_step({3: 2})
x = np.ones((1, 2, 1, 8), np.float32)
module = DotProductAttention(1, 8, qkv_format="bshd", attn_mask_type="padding_causal").eval()
out = module(x, x, x, inference_params=params)
assert out.shape == (1, 2, 8) and (out == 1).all() and not module.training
"""
    )


def test_no_front_but_transformer_engine_imports_pytorch():
    run(
        """
import sys
import octavo.compat.flash_attn, octavo.compat.flash_attn_interface, octavo.compat.flashinfer
assert "torch" not in sys.modules and "jax" not in sys.modules
"""
    )
