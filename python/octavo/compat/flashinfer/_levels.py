# SPDX-License-Identifier: Apache-2.0
"""Keys in levels: what several sequences share is attended for all of them at once, and merged with
what each has for itself.
"""

from __future__ import annotations

import functools

from .._blame import names_arguments
from ._merge import merge_state
from ._paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from ._wanted import WRAPPER
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import single_prefill_with_kv_cache

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
]


def _over_all(parts):
    """The output over the keys of all parts (out, LSE)."""
    return functools.reduce(lambda a, b: merge_state(*a, *b), parts)[0]


class MultiLevelCascadeAttentionWrapper:
    """Levels of pages, from what all share to what each sequence has alone.

    plan() takes of each level what BatchPrefillWithPagedKVCacheWrapper takes: which queries see its
    sequences, and their pages. causal is for the last level; the others are in front of all
    queries. run(q, paged_kv_cache) gives out [T, Hq, D].
    """

    @names_arguments(**WRAPPER)
    def __init__(
        self,
        num_levels,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf_arr=None,
        paged_kv_indptr_buf_arr=None,
        paged_kv_indices_buf_arr=None,
        paged_kv_last_page_len_buf_arr=None,
    ):
        arrays = {
            "qo_indptr_buf": qo_indptr_buf_arr,
            "paged_kv_indptr_buf": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf_arr,
        }
        if not use_cuda_graph:
            arrays = {}
        for name, given in arrays.items():
            self._check_levels(f"{name}_arr", given, num_levels)
        self._use_cuda_graph = bool(use_cuda_graph)
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph,
                **{name: given[i] for name, given in arrays.items()},
            )
            for i in range(num_levels)
        ]

    @staticmethod
    def _check_levels(name, given, num_levels):
        if not isinstance(given, (list, tuple)) or len(given) != num_levels:
            got = len(given) if isinstance(given, (list, tuple)) else type(given).__name__
            raise ValueError(f"{name}: wanted a list of {num_levels} arrays, got {got}")

    @property
    def is_cuda_graph_enabled(self):
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffers=None):
        """Keeps the new buffer; Octavo writes to none."""
        for level in self._levels:
            level.reset_workspace_buffer(float_workspace_buffer)

    def plan(
        self,
        qo_indptr_arr,
        paged_kv_indptr_arr,
        paged_kv_indices_arr,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        """Plans every level; each of the first four arguments is a list with an array of each."""
        given = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for name, arrays in given.items():
            self._check_levels(name, arrays, len(self._levels))
        for i, level in enumerate(self._levels):
            level.plan(
                *(arrays[i] for arrays in given.values()),
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and i + 1 == len(self._levels),
                pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q, paged_kv_cache):
        """out [T, Hq, D] over the keys of all levels."""
        return _over_all(level.run(q, paged_kv_cache, return_lse=True) for level in self._levels)

    forward = run

    def end_forward(self):
        """Nothing to do."""


class _SharedPrefix:
    """One prefix [L, Hk, D] (HND: [Hk, L, D]) in front of pages that each sequence has alone."""

    _wrapper_type = None

    @names_arguments(**WRAPPER)
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        self._kv_layout = kv_layout
        self._own = self._wrapper_type(float_workspace_buffer, kv_layout)

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer=None):
        """Keeps the new buffer; Octavo writes to none."""
        self._own.reset_workspace_buffer(float_workspace_buffer)

    def _merged(self, q, k_shared, v_shared, own, **maths):
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, return_lse=True, **maths
        )
        return _over_all((shared, own))

    def end_forward(self):
        """Nothing to do."""


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """begin_forward() once for a batch, forward() for each layer: q [B, Hq, D]."""

    _wrapper_type = BatchDecodeWithPagedKVCacheWrapper

    def begin_forward(
        self,
        unique_kv_indptr,
        unique_kv_indices,
        unique_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        data_type="float16",
    ):
        """Plans the sequences' own pages."""
        self._own.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=data_type,
        )

    def forward(self, q, k_shared, v_shared, unique_kv_cache):
        """out [B, Hq, D] over the prefix and each sequence's own keys."""
        own = self._own.run(q, unique_kv_cache, return_lse=True)
        return self._merged(q, k_shared, v_shared, own)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """begin_forward() once for a batch, forward() for each layer: q [qo_indptr[-1], Hq, D]."""

    _wrapper_type = BatchPrefillWithPagedKVCacheWrapper

    def begin_forward(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        q_data_type="float16",
    ):
        """Plans the sequences' own pages."""
        self._own.plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=q_data_type,
        )

    def forward(
        self,
        q,
        k_shared,
        v_shared,
        unique_kv_cache,
        causal=False,
        use_fp16_qk_reduction=False,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
    ):
        """out [T, Hq, D]; causal is for each sequence's own keys, the prefix is before them."""
        own = self._own.forward(
            q, unique_kv_cache, causal=causal, sm_scale=sm_scale, return_lse=True
        )
        return self._merged(q, k_shared, v_shared, own, sm_scale=sm_scale)
