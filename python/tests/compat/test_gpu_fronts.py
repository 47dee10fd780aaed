# SPDX-License-Identifier: Apache-2.0
"""What the fronts keep between calls on a GPU: workspaces, plans, and what a capture takes."""

from __future__ import annotations

import numpy as np
import pytest
from flashinfer_case import Case, ends, workspace
from gpu_frames import on_gpus

import octavo
from octavo.compat import _gpu, flash_attn, flashinfer

pytestmark = on_gpus


def counted(monkeypatch, name):
    """How often a method of the fronts' spaces is called."""
    calls = []
    method = getattr(_gpu.Space, name)

    def count(self, *arguments):
        calls.append(self)
        return method(self, *arguments)

    monkeypatch.setattr(_gpu.Space, name, count)
    return calls


def decode_step(frame, lens):
    random = np.random.default_rng(1)
    cache = [frame.make(random.standard_normal((6, 4, 2, 8)), "f16") for _ in range(2)]
    q, k, v = (frame.make(random.standard_normal((2, 1, h, 8)), "f16") for h in (4, 2, 2))
    table = frame.ints([[0, 1, 2], [3, 4, 5]])
    return (q, *cache, k, v), {
        "cache_seqlens": frame.ints(lens),
        "block_table": table,
        "causal": True,
    }


def test_calls_alike_share_a_workspace_and_plan_once_each(frame, monkeypatch):
    made, planned = counted(monkeypatch, "__init__"), counted(monkeypatch, "plan")
    for lens in ([3, 7], [4, 8]):
        tensors, words = decode_step(frame, lens)
        flash_attn.flash_attn_with_kvcache(*tensors, **words)
    assert len(made) == 1
    assert len(planned) == 2, "the plan of the new tokens serves the queries"
    flash_attn.flash_attn_with_kvcache(*tensors, **words, softcap=2.0)
    assert len(made) == 2


def test_few_workspaces_are_kept(frame, monkeypatch):
    monkeypatch.setattr(_gpu, "_KEPT", 2)
    monkeypatch.setattr(_gpu, "spaces", _gpu.Spaces())
    x = frame.make(np.ones((1, 9, 1, 8)))
    for n in range(1, 6):
        flash_attn.flash_attn_func(x[:, :n], x, x)
    assert len(_gpu.spaces._ready) == 2


def test_a_capture_takes_a_workspace_that_was_made_before(frame, monkeypatch):
    tensors, words = decode_step(frame, [3, 7])
    spaces = _gpu.Spaces()
    monkeypatch.setattr(_gpu, "spaces", spaces)
    flash_attn.flash_attn_with_kvcache(*tensors, **words)
    (before,) = spaces._ready.values()
    monkeypatch.setattr(_gpu, "capturing", lambda: True)
    monkeypatch.setattr(_gpu, "stream_address", lambda device: 5)
    if frame.name == "cuda":
        pytest.skip("nothing is captured: the stand-in's part")
    for _ in range(2):
        flash_attn.flash_attn_with_kvcache(*tensors, **words)
    assert not spaces._ready, "an eager call must not use the graph's"
    assert list(spaces._captured.values()) == [before]
    with pytest.raises(RuntimeError, match="before the capture"):
        flash_attn.flash_attn_with_kvcache(*tensors, **words, softcap=2.0)


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
    monkeypatch.setattr(_gpu, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="use_cuda_graph"):
        wrapper.run(case.make_queries(), case.cache)


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


@pytest.mark.parametrize("name", ["q", "k_cache"])
def test_dtypes_that_are_not_covered_are_named(frame, name):
    (q, k_cache, v_cache, *_), words = decode_step(frame, [3, 7])
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    tensors[name] = tensors[name].to(frame.torch.float64)
    with pytest.raises(NotImplementedError, match=f"{name} of dtype"):
        flash_attn.flash_attn_with_kvcache(**tensors, **words)


def test_merging_on_a_gpu_is_refused_by_name(frame):
    if frame.name != "cuda":
        pytest.skip("the stand-in's tensors are the host's")
    v, s = frame.make(np.zeros((1, 1, 4))), frame.make(np.zeros((1, 1)))
    with pytest.raises(NotImplementedError, match="on cuda:0"):
        flashinfer.merge_state(v, s, v, s)


class Again:
    """The stand-in's graph: makes the call anew, its results at the old places."""

    def __init__(self, call):
        self.call, self.results = call, call()

    def replay(self):
        results = self.results if isinstance(self.results, tuple) else (self.results,)
        again = self.call()
        for mine, new in zip(results, again if isinstance(again, tuple) else (again,), strict=True):
            mine.copy_(new)


def captured(frame, call):
    """A graph of `call`, after one outside of it."""
    if frame.name != "cuda":
        graph = Again(call)
        return graph, graph.results
    torch = frame.torch
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def test_a_captured_call_serves_other_lengths(frame):
    tensors, words = decode_step(frame, [3, 7])
    call = lambda: flash_attn.flash_attn_with_kvcache(*tensors, **words)  # noqa: E731
    graph, out = captured(frame, call)
    words["cache_seqlens"].copy_(frame.ints([10, 1]))
    graph.replay()
    got = frame.read(out).copy()
    assert np.array_equal(got, frame.read(call()))


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


def test_a_length_that_the_host_knows_is_checked(frame):
    (q, *tensors), words = decode_step(frame, [3, 7])
    words["cache_seqlens"] = 12
    with pytest.raises(ValueError, match="at most 12 with new tokens, got 13"):
        flash_attn.flash_attn_with_kvcache(q, *tensors, **words)


@pytest.mark.parametrize(
    "change",
    [
        {"cache_batch_idx": [0, 2]},
        {"block_table": [[0, 1, 2], [3, 6, 5]]},
        {"cache_leftpad": [-1, 0]},
    ],
    ids=str,
)
def test_left_padding_hides_no_fault(frame, change):
    """What is wrong with rows, pages and padding is a page outside of the pool to the planning."""
    (q, k_cache, v_cache, *_), words = decode_step(frame, [3, 7])
    words |= {"cache_leftpad": frame.ints([1, 1])} | {n: frame.ints(x) for n, x in change.items()}
    if frame.name == "stand-in":  # which refuses what a GPU leaves out
        with pytest.raises(octavo.InvalidArgument, match="page_table"):
            flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **words)
        return
    out = frame.read(flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **words))
    wrong = 0 if "cache_leftpad" in change else 1
    assert not out[wrong].any()
    assert out[1 - wrong].any()


@pytest.mark.parametrize("change", [{"seqused_q": [3, 2]}, {"seqused_k": [4, 5]}], ids=str)
def test_no_sequence_uses_anothers_tokens(frame, change):
    random = np.random.default_rng(1)
    q, k, v = (frame.make(random.standard_normal((n, 2, 8)), "f16") for n in (4, 8, 8))
    words = {n: frame.ints(x) for n, x in change.items()}
    arrays = frame.ints([0, 2, 4]), frame.ints([0, 3, 8]), 2, 5
    call = lambda: flash_attn.flash_attn_varlen_func(q, k, v, *arrays, **words)  # noqa: E731
    if frame.name == "stand-in":  # which refuses what a GPU leaves out
        with pytest.raises((octavo.InvalidArgument, AssertionError)):
            call()
        return
    out = frame.read(call())
    assert not out[:2].any()
    assert ("seqused_k" in change) == bool(out[2:].any())
