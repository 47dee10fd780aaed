# SPDX-License-Identifier: Apache-2.0
"""Memory stays where it is over 10 000 steps of every front, refused calls among them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from octavo.compat import flash_attn, flashinfer
from octavo.compat import transformer_engine as engine

STATM = Path("/proc/self/statm")


def resident_bytes():
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="reads /proc")
def test_ten_thousand_steps_keep_no_memory():
    q, cache = np.ones((2, 1, 2, 16), np.float32), np.ones((2, 8, 2, 16), np.float32)
    ends, packed, keys = np.array([0, 1, 2], np.int32), q[:, 0], cache.reshape(16, 2, 16)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    params = engine.InferenceParams(4, 64, 2, 16, np.float32, is_paged=True, page_size=4)
    params.allocate_memory(1)
    module = engine.DotProductAttention(
        2, 16, qkv_format="bshd", attn_mask_type="padding_causal"
    ).eval()

    def step(i):
        flash_attn.flash_attn_with_kvcache(
            q, cache, cache, q, q, cache_seqlens=3, cache_leftpad=ends[:2], return_softmax_lse=True
        )
        flash_attn.flash_attn_varlen_func(packed, keys, keys, ends, ends, 1, 1)
        with contextlib.suppress(ValueError):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=9)
        decode.plan(
            *([0, 1, 2], [0, 1], [3, 4], 2, 2, 16, 8),
            q_data_type="float32",
            pos_encoding_mode="ROPE_LLAMA",
            rope_scale=2.0,
        )
        out, lse = decode.run(packed, (cache, cache), return_lse=True)
        flashinfer.merge_state(out, lse, packed, lse)
        params.pre_step({i: 1, i + 1: 1})
        module(q, q, q, inference_params=params)

    for i in range(1000):
        step(i)
    # One lost object of 104 bytes a step would show in each of the turns; what an allocator takes
    # once, for whatever ran before, doesn't.
    grown = []
    for _ in range(3):
        before = resident_bytes()
        for i in range(10_000):
            step(i)
        grown.append(resident_bytes() - before)
        if grown[-1] < 1 << 20:
            return
    raise AssertionError(f"grew by {grown} bytes in turns of 10 000 steps")
