# SPDX-License-Identifier: Apache-2.0
"""What newer versions of FlashInfer added to the wrappers, and names that the front has not."""

from __future__ import annotations

import numpy as np
import pytest
from flashinfer_case import LN2, Case, ends, workspace
from gpu_frames import everywhere, on_gpus

from octavo.compat import flashinfer


def planned(frame, **options):
    case = Case(101, frame)
    case.mode, case.sinks, case.scales, case.softcap = "NONE", None, {}, None
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(frame), case.layout)
    wrapper.plan(
        frame.ints(ends(case.q_lens)),
        *case.make_pages(),
        case.hq,
        case.hk,
        case.dim,
        case.page_size,
        case.dim_v,
        causal=case.causal,
        **case.maths(),
        **case.types(),
        **options,
    )
    case.make_queries()
    return case, wrapper


@everywhere
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("layout", ["NH", "HN"])
@pytest.mark.parametrize("base", ["log2", "ln"])
def test_the_lse_comes_in_the_form_that_is_asked_for(frame, base, layout, given):
    case, wrapper = planned(frame)
    shape = (len(case.q), case.hq)
    into = frame.make(np.zeros(shape if layout == "NH" else shape[::-1])) if given else None
    out, lse = wrapper.run(
        case.q, case.cache, return_lse=True, lse=into, lse_base=base, lse_layout=layout
    )
    read = frame.read(lse)
    if given:
        assert np.array_equal(frame.read(into), read)
    usual = read if layout == "NH" else read.T
    case.check(out, frame.make(usual / LN2 if base == "ln" else usual))


def test_unknown_forms_of_the_lse_are_named(frame):
    case, wrapper = planned(frame)
    with pytest.raises(ValueError, match="lse_base"):
        wrapper.run(case.q, case.cache, return_lse=True, lse_base="log10")
    with pytest.raises(ValueError, match="lse_layout"):
        wrapper.run(case.q, case.cache, return_lse=True, lse_layout="TH")


def test_uniform_q_len_is_held_to_the_offsets(frame):
    case = Case(101, frame)
    case.q_lens = np.full(case.batch, 3)
    arrays = (frame.ints(ends(case.q_lens)), *case.make_pages())
    sizes = (case.hq, case.hk, case.dim, case.page_size, case.dim_v)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(frame), case.layout)
    wrapper.plan(*arrays, *sizes, **case.types(), uniform_q_len=3)
    with pytest.raises(ValueError, match="uniform_q_len"):
        wrapper.plan(*arrays, *sizes, **case.types(), uniform_q_len=2)


def test_max_total_num_rows_lets_later_plans_have_more_rows(frame):
    def wrapper(**options):
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        buffers = {
            f"{n}_buf": frame.ints(np.zeros(size))
            for n, size in zip(names, (2, 2, 4, 1), strict=True)
        }
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace(frame), use_cuda_graph=True, **buffers, **options
        )

    def plan(of, rows):
        arrays = [frame.ints(x) for x in ([0, rows], [0, 1], [0], [4])]
        of.plan(*arrays, 1, 1, 8, 4)

    bounded = wrapper(max_total_num_rows=3)
    plan(bounded, 1)
    plan(bounded, 3)
    for of in (bounded, wrapper()):
        plan(of, 1)
        with pytest.raises(ValueError, match="qo_indptr"):
            plan(of, 4)


def test_ragged_offsets_on_the_host_come_first(frame):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(frame))
    nonsense, real = frame.ints([5, 4]), frame.ints([0, 2])
    wrapper.plan(
        nonsense,
        nonsense,
        1,
        1,
        8,
        q_data_type="float32",
        qo_indptr_cpu=real,
        kv_indptr_cpu=real,
    )
    x = frame.make(np.ones((2, 1, 8)))
    assert frame.read(wrapper.run(x, x, x)).shape == (2, 1, 8)


@everywhere
def test_fast_decode_plan_stands_in_for_plan(frame):
    case = Case(21, frame, decode=True)
    case.mode, case.sinks, case.scales, case.q_len, case.softcap = "NONE", None, {}, 1, None
    case.q_lens, case.causal = np.ones(case.batch, int), False
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame), case.layout)
    indptr, indices, last = case.make_pages()
    flashinfer.fast_decode_plan(
        wrapper,
        None,
        indices,
        last,
        case.hq,
        case.hk,
        case.dim,
        case.page_size,
        **case.maths(),
        **case.types(),
        global_override_indptr_cpu=indptr,
    )
    case.check(wrapper.run(case.make_queries(), case.cache))


@everywhere
def test_places_of_tokens_go_to_given_arrays(frame):
    given = [frame.ints([7, 7, 7]) for _ in range(2)]
    made = flashinfer.get_batch_indices_positions(
        frame.ints([0, 0, 2]), frame.ints([4, 5]), 3, *given
    )
    assert made[0] is given[0]
    assert made[1] is given[1]
    assert [frame.read(x).tolist() for x in given] == [[1, 1, -1], [3, 4, -1]]


def test_a_workspace_size_wants_the_arguments_of_plan(frame):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame))
    arrays = [frame.ints(x) for x in ([0, 1], [0], [1])]
    assert wrapper.workspace_size(*arrays, 1, 1, 8, 4, q_data_type="float32") == (0, 0)
    with pytest.raises(TypeError, match="page_size"):
        wrapper.workspace_size(*arrays, 1, 1, 8)


@on_gpus
def test_keys_are_turned_for_the_plan_at_hand(frame):
    """A plan anew, and arithmetic anew, turn by themselves."""
    for seed, theta in ((33, None), (34, 5e4)):
        case = Case(seed, frame, decode=True)
        case.mode, case.sinks, case.scales, case.softcap = "ROPE_LLAMA", None, {}, None
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame), case.layout)
        arrays = case.make_pages()
        for mode in ("NONE", "ROPE_LLAMA"):
            case.mode, case.theta = mode, theta
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
            case.check(*wrapper.run(case.make_queries(), case.cache, return_lse=True))
