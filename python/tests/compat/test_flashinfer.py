# SPDX-License-Identifier: Apache-2.0
"""The front flashinfer against the definition, over FlashInfer's own parameters."""

from __future__ import annotations

import numpy as np
import pytest
from definition import attention, check_close
from flashinfer_case import LN2, Case, ends, run_and_check, workspace
from gpu_frames import everywhere

from octavo.compat import flashinfer


@everywhere
@pytest.mark.parametrize("seed", range(60))
def test_decode_over_pages(frame, seed):
    case = Case(seed, frame, decode=True)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(frame), case.layout, use_tensor_cores=True
    )
    arrays = case.make_pages()
    wrapper.plan(
        *arrays,
        case.hq,
        case.hk,
        case.dim,
        case.page_size,
        q_len_per_req=case.q_len,
        **case.maths(),
        **case.types(),
    )
    q = case.make_queries()
    sinks = None if case.sinks is None else frame.make(case.sinks)
    run_and_check(case, lambda **k: wrapper.run(q, case.cache, sinks=sinks, **k))


@everywhere
@pytest.mark.parametrize("seed", range(100, 160))
def test_prefill_over_pages(frame, seed):
    case = Case(seed, frame)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(frame), case.layout)
    arrays = case.make_pages()
    wrapper.plan(
        frame.ints(ends(case.q_lens)),
        *arrays,
        case.hq,
        case.hk,
        case.dim,
        case.page_size,
        case.dim_v,
        causal=case.causal,
        **case.maths(),
        **case.types(),
    )
    q = case.make_queries()
    sinks = None if case.sinks is None else frame.make(case.sinks)
    run_and_check(case, lambda **k: wrapper.run(q, case.cache, sinks=sinks, **k))


@everywhere
@pytest.mark.parametrize("seed", range(200, 250))
def test_prefill_over_ragged_keys(frame, seed):
    case = Case(seed, frame)
    case.layout, case.sinks = "NHD", None
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(frame))
    k, v = case.make_ragged()
    wrapper.plan(
        frame.ints(ends(case.q_lens)),
        frame.ints(ends(case.kv_lens)),
        case.hq,
        case.hk,
        case.dim,
        case.dim_v,
        causal=case.causal,
        **case.maths(),
        **case.types(),
    )
    q = case.make_queries()
    run_and_check(case, lambda **kw: wrapper.run(q, k, v, **kw))


@everywhere
@pytest.mark.parametrize("seed", range(300, 330))
def test_single_prefill(frame, seed):
    case = Case(seed, frame)
    case.batch, case.sinks = 1, None
    case.kv_lens, case.q_lens = case.kv_lens[:1], case.q_lens[:1]
    case.scales = {k: v for k, v in case.scales.items() if k != "q_scale"}
    k, v = case.make_ragged()
    if case.layout == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    q = case.make_queries()
    run_and_check(
        case,
        lambda **kw: flashinfer.single_prefill_with_kv_cache(
            q, k, v, causal=case.causal, kv_layout=case.layout, **case.maths(), **kw
        ),
    )


@everywhere
@pytest.mark.parametrize("seed", range(400, 420))
def test_single_decode(frame, seed):
    case = Case(seed, frame, decode=True)
    case.batch, case.sinks, case.causal = 1, None, False
    case.kv_lens, case.q_lens = case.kv_lens[:1], np.array([1])
    k, v = case.make_ragged()
    if case.layout == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    q = case.make_queries()

    def run(return_lse=False, **kw):
        result = flashinfer.single_decode_with_kv_cache(
            q[0], k, v, case.layout, **case.maths(), return_lse=return_lse, **kw
        )
        if not return_lse:
            assert tuple(result.shape) == (case.hq, case.dim)
            return result[None]
        assert tuple(result[0].shape) == (case.hq, case.dim)
        assert tuple(result[1].shape) == (case.hq,)
        return result[0][None], result[1][None]

    run_and_check(case, run)


@everywhere
def test_deprecated_names_give_the_same(frame):
    case = Case(17, frame, decode=True)
    case.mode, case.softcap, case.scales, case.sinks, case.q_len = "NONE", None, {}, None, 1
    case.q_lens, case.causal = np.ones(case.batch, int), False
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame), case.layout)
    arrays = case.make_pages()
    assert wrapper.workspace_size(*arrays, case.hq, case.hk, case.dim, case.page_size) == (0, 0)
    wrapper.begin_forward(*arrays, case.hq, case.hk, case.dim, case.page_size, **case.types())
    q = case.make_queries()
    case.check(wrapper.forward(q, case.cache, window_left=case.window, sm_scale=case.scale))
    case.check(
        *wrapper.forward_return_lse(q, case.cache, window_left=case.window, sm_scale=case.scale)
    )
    case.check(*wrapper.run_return_lse(q, case.cache))
    wrapper.end_forward()


@everywhere
def test_results_go_to_given_arrays(frame):
    case = Case(21, frame, decode=True)
    case.mode, case.sinks, case.scales = "NONE", None, {}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(frame), case.layout, use_tensor_cores=True
    )
    arrays = case.make_pages()
    wrapper.plan(
        *arrays,
        case.hq,
        case.hk,
        case.dim,
        case.page_size,
        q_len_per_req=case.q_len,
        **case.maths(),
        **case.types(),
    )
    q = case.make_queries()
    out = frame.make(np.full((len(q), case.hq, case.dim), 7.0), case.dtype)
    lse = frame.make(np.full((len(q), case.hq), 7.0))
    got = wrapper.run(q, case.cache, out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    case.check(out, lse)


@everywhere
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5])
def test_append_writes_tokens_and_nothing_else(frame, layout, page_size):
    r = np.random.default_rng(4)
    kv_lens, new = np.array([7, 0, 5, 12]), np.array([3, 0, 5, 1])
    counts = -(-kv_lens // page_size)
    indices = r.permutation(counts.sum() + 1)[: counts.sum()]
    indptr, last = ends(counts), np.where(counts > 0, kv_lens - (counts - 1) * page_size, 0)
    shape = (counts.sum() + 1, 2) + ((page_size, 2) if layout == "NHD" else (2, page_size)) + (8,)
    cache = frame.make(r.standard_normal(shape), "f16")
    want = frame.read(cache).copy()
    k, v = (frame.make(r.standard_normal((new.sum() + 2, 2, 8)), "f16") for _ in range(2))
    arrays = frame.ints(indptr), frame.ints(indices), frame.ints(last)
    lens = flashinfer.get_seq_lens(arrays[0], arrays[2], page_size)
    batch, positions = flashinfer.get_batch_indices_positions(
        frame.ints(ends(new)), lens, int(new.sum()) + 2
    )
    assert frame.read(batch).tolist() == [0, 0, 0, 2, 2, 2, 2, 2, 3, -1, -1]
    assert frame.read(positions).tolist() == [4, 5, 6, 0, 1, 2, 3, 4, 11, -1, -1]
    flashinfer.append_paged_kv_cache(
        k, v, batch, positions, cache, arrays[1], arrays[0], arrays[2], layout
    )
    for i in range(new.sum()):
        b, p = int(batch[i]), int(positions[i])
        page, slot = indices[indptr[b] + p // page_size], p % page_size
        for half, x in enumerate((k, v)):
            target = want[page, half, slot] if layout == "NHD" else want[page, half, :, slot]
            target[...] = frame.read(x)[i]
    assert np.array_equal(frame.read(cache), want)


def test_append_beyond_the_pages_is_an_error_and_writes_nothing(frame):
    cache = frame.make(np.zeros((2, 2, 4, 1, 8)))
    x = frame.make(np.ones((2, 1, 8)))
    with pytest.raises(ValueError, match="positions"):
        flashinfer.append_paged_kv_cache(
            x,
            x,
            frame.ints([0, 0]),
            frame.ints([3, 4]),
            cache,
            frame.ints([1]),
            frame.ints([0, 1]),
            frame.ints([4]),
        )
    assert (frame.read(cache) == 0).all()


@everywhere
def test_merge_gives_attention_over_all_keys(frame):
    r = np.random.default_rng(2)
    q, k, v = (r.standard_normal(s) for s in ((5, 2, 8), (9, 2, 8), (9, 2, 8)))
    parts = [attention(q, k[s], v[s]) for s in (slice(0, 3), slice(3, 4), slice(4, 9))]
    parts.append((np.zeros((5, 2, 8)), np.full((5, 2), -np.inf)))
    want, want_lse = attention(q, k, v)
    outs, lses = zip(*((frame.make(o), frame.make(s / LN2)) for o, s in parts), strict=True)
    stack = (
        frame.make(np.stack([frame.read(o) for o in outs], 1)),
        frame.make(np.stack([frame.read(s) for s in lses], 1)),
    )
    out, lse = flashinfer.merge_states(*stack)
    check_close(frame.read(out), want, "f32", 8.0)
    check_close(frame.read(lse), want_lse / LN2, "f32", 16.0)
    out, lse = flashinfer.merge_state(outs[0], lses[0], outs[1], lses[1])
    out, lse = flashinfer.merge_state(out, lse, outs[3], lses[3])
    flashinfer.merge_state_in_place(out, lse, outs[2], lses[2])
    check_close(frame.read(out), want, "f32", 8.0)
    check_close(frame.read(lse), want_lse / LN2, "f32", 16.0)


@everywhere
def test_merge_in_place_leaves_masked_rows(frame):
    v, s = frame.make(np.zeros((3, 1, 4))), frame.make(np.zeros((3, 1)))
    other, other_s = frame.make(np.ones((3, 1, 4))), frame.make(np.zeros((3, 1)))
    mask = frame.make([1, 0, 1]) > 0
    flashinfer.merge_state_in_place(v, s, other, other_s, mask)
    np.testing.assert_allclose(frame.read(v)[:, 0, 0], [0.5, 0.0, 0.5])
    np.testing.assert_allclose(frame.read(s)[:, 0], [1.0, 0.0, 1.0])


@everywhere
def test_merge_of_nothing_is_nothing(frame):
    v, s = frame.make(np.zeros((1, 1, 4))), frame.make(np.full((1, 1), -np.inf))
    out, lse = flashinfer.merge_state(v, s, v, s)
    assert (frame.read(out) == 0).all()
    assert (frame.read(lse) == -np.inf).all()
