# SPDX-License-Identifier: Apache-2.0
"""InferenceParams and DotProductAttention against the definition, over arrivals of sequences."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from arrivals import DIM, FORMATS, GROUPS, HEADS, Stream, arrivals, make_module, make_params
from gpu_frames import hosts_and_cuda

pytestmark = hosts_and_cuda


@pytest.mark.parametrize("backend", ["", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_arrivals_equal_the_definition(frame, monkeypatch, dtype, fmt, paged, backend):
    if dtype not in frame.dtypes:
        pytest.skip(f"{frame.name} has no {dtype} here")
    if frame.name == "cuda" and backend == "NVTE_FLASH_ATTN" and dtype == "f32":
        pytest.skip("the GPU's FlashAttention kernels read no float32")
    if backend:
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            monkeypatch.setenv(name, str(int(name == backend)))
    params = make_params(frame, dtype, paged=paged, batch=4, length=40, page_size=3, qkv_format=fmt)
    modules = [make_module(fmt, layer_number=i) for i in (1, 2)]
    streams = [Stream(frame, dtype, seed) for seed in (1, 2)]
    for layer in (1, 2):
        params.allocate_memory(layer)
    for step in arrivals(7, 4, 40):
        gone = [s for s in params.sequences if s not in step]
        for stream in streams:
            for sequence in gone:
                stream.past.pop(sequence, None)
        params.pre_step(step)
        for module, stream in zip(modules, streams, strict=True):
            out = module(*stream.arrays(step, fmt), inference_params=params)
            stream.check(out, step, fmt)


@pytest.mark.parametrize(
    ("options", "maths"),
    [
        ({"mask": "padding"}, {"causal": False}),
        ({"mask": "padding_causal_bottom_right"}, {}),
        ({"mask": "causal,padding"}, {}),
        ({"window_size": (3, 0)}, {"window": (3, 0)}),
        ({"mask": "padding", "window_size": (3, 2)}, {"causal": False, "window": (3, 2)}),
        ({"softmax_scale": 0.3}, {"scale": 0.3}),
        ({"softmax_type": "off-by-one"}, {"sinks": np.zeros(HEADS)}),
        ({"softmax_type": "learnable"}, {"sinks": np.arange(HEADS) / 2.0}),
    ],
    ids=[
        "full",
        "bottom_right",
        "spelled",
        "window",
        "full_window",
        "scale",
        "off_by_one",
        "learnable",
    ],
)
@pytest.mark.parametrize("paged", [False, True])
def test_options_equal_the_definition(frame, paged, options, maths):
    module = frame.place(make_module(**options))
    if options.get("softmax_type") == "learnable":
        offset = getattr(module.softmax_offset, "data", module.softmax_offset)
        for head, sink in enumerate(maths["sinks"]):
            offset[head] = float(sink)
    params, stream = make_params(frame, paged=paged), Stream(frame, "f32", 3)
    params.allocate_memory(1)
    for step in ({4: 6, 2: 3}, {2: 1, 4: 2}):
        params.pre_step(step)
        stream.check(
            module(*stream.arrays(step, "bshd"), inference_params=params), step, "bshd", **maths
        )


def test_alibi_equals_the_definition(frame):
    slopes = np.array([0.1, 0.3, 0.2, 0.7])
    for given in (slopes, np.stack([slopes, slopes]), None):
        params, stream, module = make_params(frame), Stream(frame, "f32", 3), make_module()
        params.allocate_memory(1)
        step = {1: 5, 2: 3}
        params.pre_step(step)
        out = module(
            *stream.arrays(step, "bshd"),
            inference_params=params,
            core_attention_bias_type="alibi",
            alibi_slopes=None if given is None else frame.make(given),
        )
        stream.check(
            out,
            step,
            "bshd",
            slopes=slopes if given is not None else 2.0 ** (-2.0 * np.arange(1, 5)),
        )


def test_values_may_have_another_width(frame):
    params = make_params(frame, paged=True, head_dim_v=8)
    params.allocate_memory(1)
    module, stream = make_module(kv_channels=(DIM, 8)), Stream(frame, "f32", 5, dim_v=8)
    for step in ({1: 5}, {1: 1}):
        params.pre_step(step)
        stream.check(module(*stream.arrays(step, "bshd"), inference_params=params), step, "bshd")


def test_steps_go_on_outside_of_inference_mode(frame):
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        params = make_params(frame, paged=True)
        params.allocate_memory(1)
        params.pre_step({1: 2, 8: 5})
    params.pre_step({1: 1, 8: 3})
    assert frame.read(params.cu_seqlens_q).tolist() == [0, 1, 4, 4]
    assert frame.read(params.cu_seqlens_kv).tolist() == [0, 3, 11, 11]


def test_what_a_step_shows(frame):
    params = make_params(frame, paged=True)
    params.allocate_memory(1)
    addresses = [
        frame.address(x)
        for x in (params.cu_seqlens_q, params.cu_seqlens_kv, params.pre_step_seqlens)
    ]
    params.pre_step(OrderedDict([(1, 2), (8, 5)]))
    params.pre_step(OrderedDict([(8, 3), (1, 1)]))
    assert frame.read(params.cu_seqlens_q).tolist() == [0, 3, 4, 4]
    assert frame.read(params.cu_seqlens_kv).tolist() == [0, 8, 11, 11]
    assert frame.read(params.get_seqlens_pre_step()).tolist() == [5, 2, 0]
    assert list(params.sequences.items()) == [(8, 8), (1, 3)]
    assert list(params.sequences_pre_step.items()) == [(8, 5), (1, 2)]
    assert params.batch_size == 2
    table = frame.read(params.cache_manager.page_table)
    assert table.shape == (3, 8)
    assert table[0, :2].tolist() == params.cache_manager.get_page_list(8)
    assert table[1, :1].tolist() == params.cache_manager.get_page_list(1)
    assert params.cache_manager.get_page_count(8) == 2
    assert params.cache_manager.get_sequence_count() == 2
    params.cache_manager.print_cache()
    assert [
        frame.address(x)
        for x in (params.cu_seqlens_q, params.cu_seqlens_kv, params.pre_step_seqlens)
    ] == addresses
    params.reset()
    assert not params.sequences
    assert params.batch_size == 0
    assert not frame.read(params.cu_seqlens_kv).any()
    assert not frame.read(params.pre_step_seqlens).any()
    assert params.cache_manager.has_free_page()
    assert "page_size=4" in repr(params)
    assert "is_paged=True" in repr(params)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_step_and_conversion_show_the_tokens(frame, fmt, paged):
    params, stream = make_params(frame, paged=paged), Stream(frame, "f32", 9)
    params.allocate_memory(3)
    for step in ({4: 6, 2: 3}, {2: 2, 7: 1}):
        params.pre_step(step)
        for sequence in [s for s in stream.past if s not in step]:
            del stream.past[sequence]
        _, k, v = stream.arrays(step, fmt)
        result = params.step(3, k, v, fmt)
        assert len(result) == 6
        assert result[2] is params.cu_seqlens_q
        assert result[3] is params.cu_seqlens_kv
        assert result[4:] == (32, "bshd" if fmt == "bshd" else f"{fmt}_2bshd")
    assert frame.is_one(result[0])
    assert tuple(result[0].shape) == ((24, 4, 2, 16) if paged else (3, 32, 2, 16))
    rows = [frame.read(x) for x in params.convert_paged_to_nonpaged(3)]
    for got, want in zip(rows, (1, 2), strict=True):
        assert got.shape == (2, 32, GROUPS, DIM)
        for b, sequence in enumerate(step):
            kept = stream.past[sequence][want]
            assert np.array_equal(got[b, : len(kept)], kept)
            assert not got[b, len(kept) :].any()


def test_rows_of_a_contiguous_cache_stay_and_are_shown(frame):
    params, stream = make_params(frame), Stream(frame, "f32", 9)
    params.allocate_memory(1)
    for step in ({4: 2, 2: 0, 9: 3}, {9: 1, 2: 4}, {7: 2, 2: 1, 9: 1}):
        params.pre_step(step)
        for sequence in [s for s in stream.past if s not in step]:
            del stream.past[sequence]
        k_cache, v_cache, *_ = params.step(1, *stream.arrays(step, "bshd")[1:], "bshd")
        rows = frame.read(params.cache_manager.batch_indices_post_step).astype(int)
        for row, sequence in zip(rows, step, strict=False):
            for cache, past in zip((k_cache, v_cache), stream.past[sequence][1:], strict=True):
                assert np.array_equal(frame.read(cache)[row, : len(past)], past)
    assert rows.shape == (3,)


def test_tables_that_differ_between_layers_are_not_shown_as_one(frame):
    params = make_params(frame, paged=True)
    params.allocate_memory(1)
    params.pre_step({1: 5, 2: 5})
    params.pre_step({2: 1})
    params.pre_step({3: 9})
    params.allocate_memory(2)
    assert tuple(params.cache_manager.cache[2][0].shape) == (24, 4, GROUPS, DIM)
    with pytest.raises(NotImplementedError, match="one page table for layers"):
        _ = params.cache_manager.page_table


def test_the_pool_may_be_smaller_than_the_worst_case(frame):
    params = make_params(frame, paged=True, pages=4)
    params.allocate_memory(1)
    params.pre_step({1: 8, 2: 4})
    with pytest.raises(RuntimeError, match="KV cache is full!"):
        params.pre_step({1: 5, 2: 1})
    assert dict(params.sequences) == {1: 8, 2: 4}, "as before"
    params.pre_step({1: 8})
    assert dict(params.sequences) == {1: 16}


def test_layers_may_be_allocated_in_the_first_pass(frame):
    params = make_params(frame, paged=True)
    streams = [Stream(frame, "f32", s) for s in (1, 2)]
    for step in ({5: 3}, {5: 1, 6: 4}):
        params.pre_step(step)
        for layer, stream in enumerate(streams, 1):
            if layer not in params.cache_manager.cache:
                params.allocate_memory(layer)
            out = make_module(layer_number=layer)(
                *stream.arrays(step, "bshd"), inference_params=params
            )
            stream.check(out, step, "bshd")
    with pytest.raises(ValueError, match="before its sequences' first step"):
        params.allocate_memory(3)
    with pytest.raises(ValueError, match="allocated"):
        make_module(layer_number=3)(*streams[0].arrays(step, "bshd"), inference_params=params)


def test_batches_padded_to_the_maximum(frame):
    """As in TransformerEngine's graphs: rows beyond the step's sequences, and longer rows."""
    params, stream, module = make_params(frame, paged=True), Stream(frame, "f32", 4), make_module()
    params.allocate_memory(1)
    for step in ({5: 3}, {5: 1, 6: 4}):
        params.pre_step(step)
        arrays = stream.arrays(step, "bshd", batch=3, longest=8)
        ends = np.zeros(4)
        ends[1 : len(step) + 1] = np.cumsum(list(step.values()))
        out = module(
            *arrays,
            cu_seqlens_q=frame.ints(ends),
            cu_seqlens_kv=frame.ints(ends),
            max_seqlen_q=8,
            max_seqlen_kv=32,
            inference_params=params,
        )
        stream.check(out, step, "bshd")
