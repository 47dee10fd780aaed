# SPDX-License-Identifier: Apache-2.0
"""What FlashInfer's wrappers keep on a GPU: plans, and the fixed places of their graph mode."""

from __future__ import annotations

import numpy as np
import pytest
from flashinfer_case import Case, ends, workspace
from gpu_frames import captured, counted, on_gpus

from octavo.compat import _gpu, flashinfer

pytestmark = on_gpus
CALLS_ONCE = True


def fixed_wrapper(frame, batch, pages):
    return flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(frame),
        frame.ints(np.zeros(batch + 1)),
        frame.ints(np.zeros(pages)),
        frame.ints(np.zeros(batch)),
    )


def case_of(frame, seed, kv_lens):
    case = Case(seed, frame, decode=True)
    case.mode, case.softcap, case.scales, case.sinks, case.q_len = "NONE", None, {}, None, 1
    case.layout, case.page_size, case.hk, case.hq, case.dim, case.dim_v = "NHD", 4, 2, 4, 16, 16
    case.batch, case.causal, case.window, case.scale, case.as_pair = 3, False, -1, None, True
    case.kv_lens, case.q_lens = np.array(kv_lens), np.ones(3, int)
    return case


def plan(wrapper, case, **words):
    arrays = case.make_pages()
    wrapper.plan(*arrays, case.hq, case.hk, case.dim, case.page_size, **case.types(), **words)
    return arrays


def test_graph_mode_plans_into_fixed_places(frame, monkeypatch):
    wrapper = fixed_wrapper(frame, 3, 24)
    planned = counted(monkeypatch, "plan")
    places = set()
    for seed, lens in ((0, [5, 0, 9]), (3, [1, 20, 2]), (6, [16, 4, 4])):
        case = case_of(frame, seed, lens)
        arrays = plan(wrapper, case)
        buffer = wrapper._buffers["paged_kv_indptr_buffer"]
        assert np.array_equal(frame.read(buffer), frame.read(arrays[0]))
        inner = wrapper._device_plan
        places.add(tuple(x.data_ptr() for x in (inner._lens, inner._offsets, inner._table)))
        case.check(*wrapper.run(case.make_queries(), case.cache, return_lse=True))
    assert len(places) == 1
    assert len(planned) >= 3


def test_plans_within_inference_mode_and_without_share_the_places(frame):
    wrapper = fixed_wrapper(frame, 3, 24)
    for within in (True, False):
        case = case_of(frame, 3, [1, 20, 2])
        with frame.torch.inference_mode(within):
            plan(wrapper, case)
            out = wrapper.run(case.make_queries(), case.cache)
        case.check(out)


def test_graph_mode_plans_again_without_a_run(frame, monkeypatch):
    wrapper = fixed_wrapper(frame, 3, 24)
    case = case_of(frame, 0, [5, 0, 9])
    plan(wrapper, case)
    planned = counted(monkeypatch, "plan")
    q = case.make_queries()
    wrapper.run(q, case.cache)
    wrapper.run(q, case.cache)
    assert len(planned) == 1, "one for all layers"
    plan(wrapper, case_of(frame, 0, [6, 1, 10]))
    assert len(planned) == 2, "for the graphs that hold the layers"


def test_graph_mode_is_bounded_by_its_buffers(frame):
    wrapper = fixed_wrapper(frame, 3, 4)
    with pytest.raises(ValueError, match="paged_kv_indices_buffer"):
        plan(wrapper, case_of(frame, 0, [5, 0, 16]))


def test_graph_mode_can_be_bounded_by_block_tables(frame):
    wrapper = fixed_wrapper(frame, 3, 24)
    case = case_of(frame, 0, [5, 3, 8])
    indptr, indices, last = case.make_pages()
    table = np.zeros((3, 2), np.int32)
    for b in range(3):
        mine = case.indices[case.indptr[b] : case.indptr[b + 1]]
        table[b, : len(mine)] = mine
    words = {"block_tables": frame.ints(table), "seq_lens": frame.ints(case.kv_lens)}
    sizes = case.hq, case.hk, case.dim, case.page_size
    wrapper.plan(indptr, indices, last, *sizes, **case.types(), **words)
    case.check(wrapper.run(case.make_queries(), case.cache))
    assert wrapper._device_plan._table.shape[1] == 2
    with pytest.raises(ValueError, match="at most 2 pages"):
        plan(wrapper, case_of(frame, 0, [5, 3, 9]))
    with pytest.raises(RuntimeError, match=r"plan\(\) before"):
        wrapper.run(case.make_queries(), case.cache)


def test_graph_mode_is_bounded_by_the_pool(frame):
    wrapper = fixed_wrapper(frame, 3, 1000)
    case = case_of(frame, 0, [5, 3, 8])
    plan(wrapper, case)
    case.check(wrapper.run(case.make_queries(), case.cache))
    pages = case.cache[0].shape[0]
    ((_, planned),) = wrapper._device_plan._spaces.values()
    assert planned[0].max_kv_len == 4 * pages
    with pytest.raises(ValueError, match=f"at most {4 * pages}, which the cache's pages hold"):
        plan(wrapper, case_of(frame, 0, [4 * pages + 1, 3, 8]))


def test_a_plain_wrapper_is_refused_in_a_capture(frame, monkeypatch):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame))
    case = case_of(frame, 0, [5, 0, 9])
    plan(wrapper, case)
    q = case.make_queries()
    for _ in range(2):
        with monkeypatch.context() as capture:
            capture.setattr(_gpu, "capturing", lambda: True)
            with pytest.raises(RuntimeError, match="use_cuda_graph"):
                wrapper.run(q, case.cache)
        wrapper.run(q, case.cache)


def test_layers_share_a_wrappers_plan(frame, monkeypatch):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame))
    case = case_of(frame, 0, [5, 2, 9])
    planned, made = counted(monkeypatch, "plan"), counted(monkeypatch, "__init__")
    for _ in range(2):
        plan(wrapper, case)
        q = case.make_queries()
        for _ in range(3):
            case.check(wrapper.run(q, case.cache))
    assert len(planned) == 2
    assert len(made) == 1


def test_graph_mode_over_ragged_keys_is_refused_by_name(frame):
    indptr = frame.ints(ends(np.array([2, 3])))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(frame), use_cuda_graph=True, qo_indptr_buf=indptr, kv_indptr_buf=indptr
    )
    with pytest.raises(NotImplementedError, match="ragged keys on a GPU"):
        wrapper.plan(indptr, indptr, 2, 1, 8)


def test_tokens_beyond_their_pages_are_left_out(frame):
    cache = frame.make(np.zeros((2, 2, 4, 1, 8)), "f16")
    x = frame.make(np.ones((3, 1, 8)), "f16")
    flashinfer.append_paged_kv_cache(
        x,
        x,
        frame.ints([0, 0, 1]),
        frame.ints([3, 4, 0]),
        cache,
        frame.ints([1]),
        frame.ints([0, 1]),
        frame.ints([4]),
    )
    written = frame.read(cache)[..., 0, 0]
    assert written[1, :, 3].tolist() == [1.0, 1.0]
    assert written.sum() == 2.0


def append_step(frame):
    """What appends three tokens of two sequences, and the arrays that say where."""
    random = np.random.default_rng(7)
    k, v = (frame.make(random.standard_normal((3, 2, 8)), "f16") for _ in range(2))
    cache = [frame.make(np.zeros((4, 4, 2, 8)), "f16") for _ in range(2)]
    words = {
        "batch_indices": frame.ints([0, 1, 1]),
        "positions": frame.ints([2, 0, 1]),
        "kv_indices": frame.ints([3, 1, 0]),
        "kv_indptr": frame.ints([0, 2, 3]),
        "kv_last_page_len": frame.ints([4, 4]),
    }
    return (k, v), cache, words


def appended(frame, tensors, cache, places):
    """Where tokens are to lie: [(page, slot)], None for those that are left out."""
    for x, pages in zip(tensors, cache, strict=True):
        want = np.zeros((4, 4, 2, 8))
        for i, place in enumerate(places):
            if place is not None:
                want[place] = frame.read(x)[i]
        assert np.array_equal(frame.read(pages), want)


def test_a_captured_append_serves_other_places(frame):
    tensors, cache, words = append_step(frame)
    graph, _ = captured(
        frame, lambda: flashinfer.append_paged_kv_cache(*tensors, paged_kv_cache=cache, **words)
    )
    for pages in cache:
        pages.zero_()
    words["positions"].copy_(frame.ints([7, 3, 4]))
    words["kv_indices"].copy_(frame.ints([3, 2, 0]))
    graph.replay()
    appended(frame, tensors, cache, [(2, 3), (0, 3), None])


def test_an_append_like_an_earlier_one_is_not_looked_at_anew(frame, monkeypatch):
    tensors, cache, words = append_step(frame)
    flashinfer.append_paged_kv_cache(*tensors, paged_kv_cache=cache, **words)
    appended(frame, tensors, cache, [(3, 2), (0, 0), (0, 1)])
    looked = []
    checked = _gpu.checked
    monkeypatch.setattr(_gpu, "checked", lambda *a, **k: looked.append(k) or checked(*a, **k))
    for pages in cache:
        pages.zero_()
    words["positions"] = frame.ints([5, -1, 3])
    words["batch_indices"] = frame.ints([0, 1, 2])
    flashinfer.append_paged_kv_cache(*tensors, paged_kv_cache=cache, **words)
    assert not looked
    appended(frame, tensors, cache, [(1, 1), None, None])
    with pytest.raises(ValueError, match="positions: wanted shape"):
        flashinfer.append_paged_kv_cache(
            *tensors, paged_kv_cache=cache, **{**words, "positions": frame.ints([5, 2])}
        )
    assert looked


def test_a_captured_run_serves_other_plans(frame):
    wrapper = fixed_wrapper(frame, 3, 24)
    case = case_of(frame, 0, [5, 1, 9])
    plan(wrapper, case)
    q = case.make_queries()
    graph, (out, lse) = captured(frame, lambda: wrapper.run(q, case.cache, return_lse=True))
    pages = case.indices[[3, 4, 0, 2]]  # the first three are full
    arrays = (frame.ints(x) for x in ([0, 1, 3, 4], pages, [2, 1, 1]))
    wrapper.plan(*arrays, case.hq, case.hk, case.dim, case.page_size, **case.types())
    graph.replay()
    case.rows = [
        [frame.read(x)[mine].reshape(-1, *x.shape[2:])[:n] for x in case.cache]
        for mine, n in ((pages[:1], 2), (pages[1:3], 5), (pages[3:], 1))
    ]
    case.check(out, lse)


def test_a_captured_prefill_serves_other_shares_of_its_rows(frame):
    if frame.name == "cuda":
        pytest.skip("the stand-in's part")
    buffers = [frame.ints(np.zeros(n)) for n in (4, 4, 24, 3)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(frame), "NHD", True, *buffers
    )
    for q_lens in ([2, 2, 2], [6, 0, 0], [1, 4, 1]):
        case = case_of(frame, 0, [7, 4, 9])
        case.q_lens, case.causal = np.array(q_lens), True
        arrays = case.make_pages()
        sizes = case.hq, case.hk, case.dim, case.page_size
        wrapper.plan(frame.ints(ends(case.q_lens)), *arrays, *sizes, causal=True, **case.types())
        case.check(wrapper.run(case.make_queries(), case.cache))
    assert len(wrapper._device_plan._spaces) == 1
