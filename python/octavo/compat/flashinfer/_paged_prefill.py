# SPDX-License-Identifier: Apache-2.0
"""Prefill of a batch over pages."""

from __future__ import annotations

import functools

from .._arrays import not_covered
from .._blame import names_arguments
from . import _gpu
from ._batch import PagedBatch
from ._common import check_backend, check_layout, paged_keys, refuse
from ._prefill_checks import LseForm, Prefill, longest, query_ends
from ._wanted import FORWARD, PAGED_PLAN, PAGED_RUN, WRAPPER


class BatchPrefillWithPagedKVCacheWrapper(Prefill, PagedBatch):
    """plan() once for a batch, run() for each layer: q [qo_indptr[-1], Hq, D] over pages.

    The workspace buffer says the device and is not written: Octavo's own workspace suffices.
    """

    @names_arguments(**WRAPPER)
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
        max_total_num_rows=None,
    ):
        check_layout(kv_layout)
        check_backend(backend, jit_args)
        refuse(
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
            jit_kwargs=jit_kwargs,
            variant_owns_mask=variant_owns_mask,
        )
        self._max_rows = max_total_num_rows
        self._set_up(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            {
                "qo_indptr_buf": qo_indptr_buf,
                "paged_kv_indptr_buf": paged_kv_indptr_buf,
                "paged_kv_indices_buf": paged_kv_indices_buf,
                "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
            },
        )

    @names_arguments(**PAGED_PLAN)
    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
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
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
        use_token_head_sf=False,
    ):
        """Checks and keeps a batch of queries qo_indptr and pages, the last of each partly filled.

        seq_lens_q, uniform_q_len, max_token_per_sequence and max_sequence_kv repeat what the arrays
        say, and non_blocking and use_fp16_qk_reduction are allowances: none of them changes a
        result.
        """
        refuse(
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr,
            use_token_head_sf=use_token_head_sf,
        )
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len = map(
            _gpu.on_host, given
        )
        seq_lens, block_tables = _gpu.on_host(seq_lens), _gpu.on_host(block_tables)
        keys = paged_keys(
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            page_size,
            seq_lens,
            block_tables,
        )
        ends = query_ends(qo_indptr, len(keys.kv_lens))
        self._check_rows(ends, uniform_q_len)
        self._keep_buffers(
            len(keys.kv_lens),
            {
                "qo_indptr_buf": qo_indptr,
                "paged_kv_indptr_buf": paged_kv_indptr,
                "paged_kv_indices_buf": paged_kv_indices,
                "paged_kv_last_page_len_buf": paged_kv_last_page_len,
            },
        )
        keys, ends = self._each_for_itself(keys, ends, causal, pos_encoding_mode, window_left)
        self._keep_plan(
            keys,
            ends,
            page_size,
            (
                num_qo_heads,
                num_kv_heads,
                head_dim_qk,
                head_dim_qk if head_dim_vo is None else head_dim_vo,
            ),
            (q_data_type, kv_data_type, o_data_type),
            {
                "causal": causal,
                "q_lens": longest(ends),
                "pos_encoding_mode": pos_encoding_mode,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "sm_scale": sm_scale,
                "rope_scale": rope_scale,
                "rope_theta": rope_theta,
                "batch_invariant": disable_split_kv or fixed_split_size is not None,
            },
        )
        # In graph mode a later plan may share out the rows in another way.
        self._plan_on_gpu(0 if self._use_cuda_graph else longest(ends), block_tables)

    begin_forward = plan

    @names_arguments(**PAGED_RUN)
    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        """out [T, Hq, Dv], or (out, LSE float32 [T, Hq], base 2), of one layer's pages.

        lse_base "ln": natural log. lse_layout "HN": [Hq, T]. use_fp16_softmax and uses_spcompress
        are for one of FlashInfer's kernels.
        """
        refuse(
            args=args,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
        )
        self._check_run(window_left)
        self._check_q(q)
        if sinks is not None and self._single:
            raise not_covered("sinks with pos_encoding_mode ALIBI without causal")
        form = LseForm.of(lse_base, lse_layout)
        lse = form.taken(lse)
        result = self._attend(
            q, paged_kv_cache, out, lse, return_lse, (q_scale, k_scale, v_scale), sinks
        )
        return form.given(result) if return_lse else result

    run_return_lse = functools.partialmethod(run, return_lse=True)

    @names_arguments(**FORWARD)
    def forward(
        self,
        q,
        paged_kv_cache,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        k_scale=None,
        v_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        *,
        return_lse=False,
    ):
        """run() with the arithmetic given here instead of in plan()."""
        return self._forward(
            (q, paged_kv_cache),
            causal,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            sm_scale,
            rope_scale,
            rope_theta,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
        )

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
