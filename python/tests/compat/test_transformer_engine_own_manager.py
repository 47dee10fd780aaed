# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention over the cache of a manager of the caller's own."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from arrivals import Stream, make_module, make_params
from gpu_frames import everywhere

from octavo.compat import transformer_engine as engine

pytestmark = everywhere
STEPS = ({5: 3, 2: 4}, {2: 1, 5: 2})


class OwnManager(engine.KVCacheManager):
    """A contiguous cache kept in plain arrays: row i for the i-th sequence ever seen."""

    frame = None

    def __init__(self, max_batch_size, max_seqlen, num_heads, head_dim_k, dtype, head_dim_v):
        super().__init__()
        self.shape = (max_batch_size, max_seqlen, num_heads, head_dim_k)
        self.rows = {}

    def allocate_memory(self, layer_number):
        self.cache[layer_number] = tuple(self.frame.make(np.zeros(self.shape)) for _ in range(2))

    def pre_step(self, step_dict):
        for sequence in step_dict:
            self.rows.setdefault(sequence, len(self.rows))
        self.sequences = OrderedDict(
            (s, self.sequences.get(s, 0) + n) for s, n in step_dict.items()
        )
        self.step_lens = step_dict
        self.show(list(step_dict))
        return self.sequences

    def show(self, order):
        self.batch_indices_post_step = self.frame.ints([self.rows[s] for s in order])

    def step(self, layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format):
        assert qkv_format == "bshd"
        for cache, new in zip(self.cache[layer_number], (new_k, new_v), strict=True):
            for b, (sequence, n) in enumerate(self.step_lens.items()):
                end = self.sequences[sequence]
                cache[self.rows[sequence], end - n : end] = new[b, :n]
        return self.cache[layer_number]


class OwnPages(OwnManager):
    """The same in pages of 4: sequence i has every third one from i on."""

    PAGE = 4

    def __init__(self, *, page_size, total_num_pages, **sizes):
        assert (page_size, total_num_pages) == (self.PAGE, 24)
        super().__init__(**sizes)
        self.pages = np.arange(24).reshape(8, 3).T

    def allocate_memory(self, layer_number):
        shape = (24, self.PAGE, *self.shape[2:])
        self.cache[layer_number] = tuple(self.frame.make(np.zeros(shape)) for _ in range(2))

    def show(self, order):
        table = np.zeros((3, 8), np.int32)
        for i, sequence in enumerate(order):
            table[i] = self.pages[self.rows[sequence]]
        self.page_table = self.frame.ints(table)

    def step(self, layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format):
        for cache, new in zip(self.cache[layer_number], (new_k, new_v), strict=True):
            for b, (sequence, n) in enumerate(self.step_lens.items()):
                for i in range(n):
                    place = self.sequences[sequence] - n + i
                    page = self.pages[self.rows[sequence]][place // self.PAGE]
                    cache[int(page), place % self.PAGE] = new[b, i]
        return self.cache[layer_number]


@pytest.mark.parametrize("manager", [OwnManager, OwnPages])
@pytest.mark.parametrize("batch", [0, 3], ids=["as many rows as sequences", "more rows"])
def test_equals_the_definition(frame, manager, batch):
    OwnManager.frame = frame
    paged = manager is OwnPages
    params = make_params(frame, paged=paged, custom_cache_manager=manager)
    stream, module = Stream(frame, "f32", 6), make_module()
    params.allocate_memory(1)
    for step in STEPS:
        params.pre_step(step)
        arrays = stream.arrays(step, "bshd", batch=batch)
        stream.check(module(*arrays, inference_params=params), step, "bshd")


@pytest.mark.parametrize("wrong", ["heads", "axes", "integers", "NVTE_FLASH_ATTN"])
def test_a_call_that_must_fail_leaves_the_managers_cache_as_it_was(frame, wrong, monkeypatch):
    OwnManager.frame = frame
    params = make_params(frame, paged=False, custom_cache_manager=OwnManager)
    params.allocate_memory(1)
    params.pre_step(STEPS[0])
    q, k, v = Stream(frame, "f32", 6).arrays(STEPS[0], "bshd")
    if wrong == "heads":
        q = q[:, :, :1]
    elif wrong == "axes":
        q = q[0]
    elif wrong == "integers":
        q = frame.ints(np.ones(tuple(q.shape)))
    else:
        monkeypatch.setenv(wrong, "yes")
    errors = (ValueError, TypeError, NotImplementedError)
    with pytest.raises(errors, match=r"query_layer|wanted 0 or 1|dtype"):
        make_module()(q, k, v, inference_params=params)
    for cache in params.cache_manager.cache[1]:
        assert not frame.read(cache).any()
