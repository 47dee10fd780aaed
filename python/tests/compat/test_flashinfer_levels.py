# SPDX-License-Identifier: Apache-2.0
"""Keys that sequences share and keys of their own, against attention over both."""

from __future__ import annotations

import numpy as np
import pytest
from definition import attention, check_close
from flashinfer_case import ends, workspace
from gpu_frames import everywhere

from octavo.compat import flashinfer

HEADS, GROUPS, DIM, PAGE = 4, 2, 16, 4
SHARED, OWN = 10, [5, 1, 8]


class Levels:
    """A prefix on pages 0 … 2, each sequence's own keys behind it."""

    def __init__(self, frame, q_lens):
        r = np.random.default_rng(8)
        self.frame, self.q_lens = frame, np.array(q_lens)
        counts = -(-np.array(OWN) // PAGE)
        pages = r.standard_normal((3 + counts.sum(), 2, PAGE, GROUPS, DIM))
        self.pages = frame.make(pages, "f16")
        pages = frame.read(self.pages)
        shared = pages[:3].swapaxes(0, 1).reshape(2, -1, GROUPS, DIM)[:, :SHARED]
        self.shared = [frame.make(x, "f16") for x in shared]
        self.q = frame.make(r.standard_normal((self.q_lens.sum(), HEADS, DIM)), "f16")
        starts = 3 + ends(counts)
        self.keys = []
        for b, n in enumerate(OWN):
            own = pages[starts[b] : starts[b + 1]].swapaxes(0, 1).reshape(2, -1, GROUPS, DIM)
            self.keys.append(np.concatenate([shared, own[:, :n]], 1))
        lasts = np.array(OWN) - (counts - 1) * PAGE
        ints = frame.ints
        self.first = [ints(x) for x in ([0, 3], range(3), [SHARED - 2 * PAGE])]
        self.last = [ints(x) for x in (ends(counts), 3 + np.arange(counts.sum()), lasts)]
        self.sizes = (HEADS, GROUPS, DIM, PAGE)

    def check(self, out, causal):
        got, at = self.frame.read(out), ends(self.q_lens)
        assert self.frame.is_one(out)
        q = self.frame.read(self.q)
        for b, (k, v) in enumerate(self.keys):
            rows = slice(at[b], at[b + 1])
            want, _ = attention(q[rows], k, v, causal=causal)
            # Each level's output is rounded to the dtype before they are merged.
            check_close(got[rows], want, "f16", 8.0, f"sequence {b}", "f16", np.abs(v).max() * 2)


@everywhere
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [5, 1, 3]])
def test_levels_are_merged(frame, q_lens, causal):
    case = Levels(frame, q_lens)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(frame))
    offsets = [frame.ints([0, sum(q_lens)]), frame.ints(ends(q_lens))]
    lists = [list(pair) for pair in zip(case.first, case.last, strict=True)]
    wrapper.plan(offsets, *lists, *case.sizes, causal=causal)
    case.check(wrapper.run(case.q, case.pages), causal)


@everywhere
def test_a_shared_prefix_comes_before_decodes(frame):
    case = Levels(frame, [1, 1, 1])
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(frame))
    wrapper.begin_forward(*case.last, *case.sizes)
    case.check(wrapper.forward(case.q, *case.shared, case.pages), False)


@everywhere
@pytest.mark.parametrize("causal", [False, True])
def test_a_shared_prefix_comes_before_prompts(frame, causal):
    case = Levels(frame, [4, 1, 7])
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(frame))
    wrapper.begin_forward(frame.ints(ends(case.q_lens)), *case.last, *case.sizes)
    case.check(wrapper.forward(case.q, *case.shared, case.pages, causal=causal), causal)


def test_levels_are_counted(frame):
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(frame))
    one = [frame.ints([0, 1])]
    with pytest.raises(ValueError, match="qo_indptr_arr: wanted a list of 2 arrays, got 1"):
        wrapper.plan(one, one, one, one, 1, 1, 8, 4)
    with pytest.raises(ValueError, match="qo_indptr_buf_arr: wanted a list of 2"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(frame), use_cuda_graph=True)
