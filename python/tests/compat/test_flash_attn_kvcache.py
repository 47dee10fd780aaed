# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache over what a cache holds; with new keys see test_flash_attn_append.py."""

from __future__ import annotations

import numpy as np
import pytest
from definition import attention, check_close
from gpu_frames import everywhere
from kvcache_case import Call, draw

from octavo.compat import flash_attn, flash_attn_interface

SEEDS = [seed for seed in range(160) if not draw(seed, ["f32"]).new_len]


@everywhere
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_definition(frame, seed):
    call = Call(draw(seed, frame.dtypes), frame)
    call.check(*call.run())


@everywhere
@pytest.mark.parametrize("seed", range(160, 176))
def test_fa3_module_gives_the_same(frame, seed):
    call = Call(draw(seed, frame.dtypes), frame)
    call.kwargs["page_table"] = call.kwargs.pop("block_table", None)
    call.check(*call.run(flash_attn_interface.flash_attn_with_kvcache))


@everywhere
def test_returns_out_alone_without_lse(frame):
    q, cache = frame.make(np.ones((1, 1, 2, 8))), frame.make(np.ones((1, 4, 2, 8)))
    out = flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3)
    assert frame.is_one(out)
    assert tuple(out.shape) == (1, 1, 2, 8)
    np.testing.assert_allclose(frame.read(out), 1.0)


@everywhere
def test_without_lengths_the_whole_cache_counts(frame):
    r = np.random.default_rng(3)
    q, k, v = (r.standard_normal(s) for s in ((2, 1, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8)))
    out = flash_attn.flash_attn_with_kvcache(frame.make(q), frame.make(k), frame.make(v))
    for b in range(2):
        want, _ = attention(*(x[b].astype(np.float32) for x in (q, k, v)))
        check_close(frame.read(out)[b], want, "f32", 4.0)


@everywhere
def test_empty_sequences_give_zero_and_minus_infinity(frame):
    q, cache = frame.make(np.ones((2, 1, 2, 8))), frame.make(np.ones((2, 4, 2, 8)))
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=frame.ints([0, 2]), return_softmax_lse=True
    )
    assert (frame.read(out)[0] == 0).all()
    assert (frame.read(lse)[0] == -np.inf).all()
    np.testing.assert_allclose(frame.read(out)[1], 1.0)


@everywhere
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_descales_multiply_queries_keys_and_values(frame, dtype, ragged):
    if dtype not in frame.dtypes:
        pytest.skip(f"{frame.name} has no {dtype} here")
    r = np.random.default_rng(5)
    q, k, v = (
        frame.make(r.standard_normal(s), dtype) for s in ((2, 3, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    )
    scales = {
        n: r.choice([0.75, 1.0, 1.5, 2.0], (2, 2)).astype(np.float32) for n in ("q", "k", "v")
    }
    ends = {"cu_seqlens_q": frame.ints([0, 3, 6]), "max_seqlen_q": 3} if ragged else {}
    out = flash_attn.flash_attn_with_kvcache(
        q.reshape(6, 4, 8) if ragged else q,
        k,
        v,
        cache_seqlens=6,
        causal=True,
        **ends,
        **{f"{n}_descale": frame.make(s) for n, s in scales.items()},
    )
    got = frame.read(out).reshape(2, 3, 4, 8)
    for b in range(2):
        # The queries take both scales of the logits, and are rounded with them.
        both = np.repeat(scales["q"][b] * scales["k"][b], 2)[None, :, None]
        scaled = frame.read(frame.make(frame.read(q)[b] * both, dtype))
        want, _ = attention(scaled, frame.read(k)[b], frame.read(v)[b], causal=True)
        want *= np.repeat(scales["v"][b], 2)[None, :, None]
        # The answer is rounded before v's scale and after it.
        check_close(got[b], want, dtype, 8.0, f"{dtype} {b}", frame.products(dtype))


@everywhere
def test_num_splits_and_packing_change_nothing(frame):
    call = Call(draw(7, ["f32"]), frame)
    first = [frame.read(x).copy() for x in call.run()]
    call = Call(draw(7, ["f32"]), frame)
    call.kwargs.update(num_splits=3, pack_gqa=True)
    for a, b in zip(first, (frame.read(x) for x in call.run()), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(
    "option",
    [
        {"softmax_scale": 0.0},
        {"qv": 1.5},
        {"attention_chunk": 4},
        {"scheduler_metadata": object()},
        {"sm_margin": 2},
    ],
    ids=lambda o: next(iter(o)),
)
def test_what_is_not_covered_is_named(frame, option):
    q, cache = frame.make(np.ones((1, 1, 2, 8))), frame.make(np.ones((1, 4, 2, 8)))
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3, **option)


def test_lengths_and_windows_may_be_scalars_of_the_framework(frame):
    """FlashAttention's own tests draw a window as a tensor."""
    r = np.random.default_rng(8)
    q, k, v = (
        r.standard_normal(s).astype(np.float32) for s in ((1, 3, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    )
    out = flash_attn.flash_attn_with_kvcache(
        *(frame.make(x) for x in (q, k, v)),
        cache_seqlens=np.int64(7),
        window_size=frame.ints([2, 1], np.int64),
    )
    want, _ = attention(q[0], k[0, :7], v[0, :7], window=(2, 1))
    check_close(frame.read(out)[0], want, "f32", 4.0)
