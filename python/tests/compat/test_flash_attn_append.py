# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache with new keys and values: what it writes, rotates and then sees."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from definition import rope_tables
from gpu_frames import everywhere, on_gpus
from kvcache_case import Call, draw

import octavo
from octavo.compat import flash_attn

SEEDS = [seed for seed in range(160) if draw(seed, ["f32"]).new_len]


@everywhere
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_definition(frame, seed):
    call = Call(draw(seed, frame.dtypes), frame)
    call.check(*call.run())


@everywhere
@pytest.mark.parametrize("rows", [8, 9])
def test_rotary_tables_serve_the_positions_there_are(frame, rows):
    """A row of pages may hold more than the tables have rows: here 32 tokens."""
    random = np.random.default_rng(3)
    make = lambda *shape: frame.make(random.standard_normal(shape), "f16")  # noqa: E731
    cos, sin = (frame.make(table[:rows]) for table in rope_tables(9, 8))
    tensors = make(1, 1, 2, 8), make(2, 16, 1, 8), make(2, 16, 1, 8), make(1, 1, 1, 8)
    words = {"rotary_cos": cos, "rotary_sin": sin, "block_table": frame.ints([[1, 0]])}
    call = lambda past: flash_attn.flash_attn_with_kvcache(  # noqa: E731
        *tensors, tensors[-1], cache_seqlens=past, causal=True, **words
    )
    if rows < 9:
        with pytest.raises(ValueError, match=r"rotary_cos: wanted rows|num_table_positions"):
            call(8)
        return
    want = frame.read(call(8)).copy()
    assert want.any()
    assert np.array_equal(frame.read(call(frame.ints([8]))), want)
    if frame.name == "cuda":  # where the host doesn't see that it is too long
        assert not frame.read(call(frame.ints([9]))).any()


@everywhere
def test_the_cache_is_not_copied(frame):
    call = Call(dataclasses.replace(draw(11, ["f32"]), new_len=2, rotary=""), frame)
    before = frame.address(call.k_cache), frame.address(call.v_cache)
    call.check(*call.run())
    assert (frame.address(call.k_cache), frame.address(call.v_cache)) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": None}, "k and v"),
        ({"cache_seqlens": None}, "cache_seqlens"),
        ({"cache_seqlens": 4}, "kv_lens"),
        ({"rotary_cos": 1}, "rotary_cos and rotary_sin"),
        ({"num_splits": -1}, "num_splits"),
        ({"page_table": 1, "block_table": 1}, "block_table and page_table"),
        ({"q": np.ones((1, 1, 3, 8))}, "q: wanted a multiple of 2 heads of 8"),
        ({"q": np.ones((1, 1, 2, 4))}, "q: wanted a multiple of 2 heads of 8"),
        ({"q": np.ones((2, 1, 2, 8)), "cache_seqlens": [1, 2]}, "row of sequence 1"),
        ({"sinks": np.ones(3)}, "sinks"),
        ({"alibi_slopes": np.ones(3)}, "alibi_slopes"),
        ({"k_descale": np.ones((2, 2))}, "k_descale"),
        ({"v_descale": np.ones((1, 1))}, "v_descale"),
        ({"cache_leftpad": [-1]}, "cache_leftpad"),
        ({"cache_batch_idx": [1]}, "row"),
        ({"block_table": np.array([[1]])}, "page_table"),
        ({"block_table": np.array([0])}, "page_table: wanted two axes"),
        (
            {
                "block_table": np.array([[0]]),
                "cache_leftpad": np.array([1]),
                "cache_batch_idx": np.array([-1]),
            },
            "cache_batch_idx",
        ),
        ({"cache_seqlens": [2**32 + 3]}, "cache_seqlens: wanted 32 bits, got 4294967299"),
        ({"block_table": [[2**32]]}, "page_table: wanted 32 bits, got 4294967296"),
        ({"softcap": -1.0}, "softcap"),
        ({"softmax_scale": float("nan")}, "softmax_scale"),
        ({"q": np.ones((1, 1, 2, 8), np.int32)}, r"q\.dtype: wanted f32, f16 or bf16"),
        ({"q": np.ones((2, 2, 8)), "cu_seqlens_q": np.array([1, 2])}, r"token_offsets\[0\]"),
        ({"q": np.ones((2, 2, 8)), "cu_seqlens_q": np.array([0, 9])}, r"q\.shape: wanted \[>= 9"),
        (
            {
                "q": np.ones((1, 3, 2, 8)),
                "rotary_cos": np.ones((5, 4)),
                "rotary_sin": np.ones((5, 4)),
                "causal": True,
            },
            "position of a new token: wanted 0 … 4",
        ),
    ],
)
def test_wrong_input_is_an_error_and_changes_nothing(frame, change, message):
    cache = frame.make(np.ones((1, 4, 2, 8)))
    arguments = {
        "q": frame.make(np.ones((1, 1, 2, 8))),
        "k": frame.make(np.full((1, 1, 2, 8), 2.0)),
        "v": frame.make(np.full((1, 1, 2, 8), 2.0)),
        "cache_seqlens": 3,
    }
    for name, value in change.items():
        if isinstance(value, np.ndarray):
            value = frame.make(value) if value.dtype == np.float64 else frame.ints(value)
        arguments[name] = value
    with pytest.raises(ValueError, match=message):
        flash_attn.flash_attn_with_kvcache(k_cache=cache, v_cache=cache, **arguments)
    assert (frame.read(cache) == 1).all()


@everywhere
@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
def test_a_backend_that_refuses_leaves_the_cache_as_it_was(frame, known, monkeypatch):
    """known: a call of its kind was there before, and succeeded."""
    make = lambda *shape: frame.make(np.ones(shape))  # noqa: E731
    q, new, cache = make(2, 1, 2, 8), make(2, 1, 2, 8), frame.make(np.zeros((2, 4, 2, 8)))
    again = frame.make(np.zeros((2, 4, 2, 8)))
    call = lambda k_cache: flash_attn.flash_attn_with_kvcache(  # noqa: E731
        q, k_cache, k_cache, new, new, cache_seqlens=frame.ints([1, 2]), causal=known
    )
    if known:
        call(cache)
    monkeypatch.setenv("OCTAVO_BACKEND", "fused")  # which has no float32
    with pytest.raises((octavo.Unsupported, octavo.NotCompiled), match="fused"):
        call(again)
    assert not frame.read(again).any()
    monkeypatch.delenv("OCTAVO_BACKEND")
    call(again)
    assert frame.read(again)[[0, 1], [1, 2]].all()


@on_gpus
@pytest.mark.parametrize("first_within", [False, True])
def test_calls_within_inference_mode_and_without_share_what_is_kept(frame, first_within):
    q = frame.make(np.ones((2, 1, 2, 8)))
    lens = [frame.ints([1, 2]), frame.ints([2, 3])]
    cache, wanted = (frame.make(np.zeros((2, 4, 2, 8))) for _ in range(2))
    for past, within in zip(lens, (first_within, not first_within), strict=True):
        with frame.torch.inference_mode(within):
            out, lse = flash_attn.flash_attn_with_kvcache(
                q, cache, cache, q, q, cache_seqlens=past, return_softmax_lse=True
            )
    assert lse.is_contiguous()
    assert tuple(lse.shape) == (2, 2, 1)
    for past in lens:
        for b, position in enumerate(past.tolist()):
            wanted[b, position] = 1
    assert np.array_equal(frame.read(cache), frame.read(wanted))
    assert frame.read(out).any()
