# SPDX-License-Identifier: Apache-2.0
"""Prefill of a batch over keys that lie packed end to end."""

from __future__ import annotations

import functools

import numpy as np

from .. import _gpu as gpu
from .._arrays import framework, ints, not_covered, sliding_rows
from .._blame import names_arguments
from . import _gpu
from ._batch import Batch
from ._common import Keys, check_backend, check_layout, refuse
from ._prefill_checks import LseForm, Prefill, longest, query_ends
from ._wanted import FORWARD, RAGGED_PLAN, RAGGED_RUN, WRAPPER


class BatchPrefillWithRaggedKVCacheWrapper(Prefill, Batch):
    """plan() once for a batch, run() for each layer: q, k and v packed by their indptr."""

    @names_arguments(**WRAPPER)
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        kv_indptr_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
    ):
        check_layout(kv_layout)
        check_backend(backend, jit_args)
        refuse(
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
            jit_kwargs=jit_kwargs,
            variant_owns_mask=variant_owns_mask,
        )
        self._set_up(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf},
        )

    @names_arguments(**RAGGED_PLAN)
    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        window_left=-1,
        logits_soft_cap=None,
        sm_scale=None,
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
        fixed_split_size=None,
        disable_split_kv=False,
        seq_lens=None,
        seq_lens_q=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        v_indptr=None,
        o_indptr=None,
        qo_indptr_cpu=None,
        kv_indptr_cpu=None,
        uniform_q_len=None,
        use_token_head_sf=False,
    ):
        """Checks and keeps a batch: sequence b has queries and keys from indptr[b] to indptr[b +
        1].

        qo_indptr_cpu and kv_indptr_cpu: the same on the host, so that they are not waited for.
        """
        refuse(
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr,
            v_indptr=v_indptr,
            o_indptr=o_indptr,
            use_token_head_sf=use_token_head_sf,
        )
        qo_indptr = _gpu.on_host(qo_indptr if qo_indptr_cpu is None else qo_indptr_cpu)
        kv_indptr = _gpu.on_host(kv_indptr if kv_indptr_cpu is None else kv_indptr_cpu)
        if self._on_gpu and self._use_cuda_graph:
            raise not_covered("CUDA graph mode over ragged keys on a GPU", "over pages it is")
        kv_ends = ints(kv_indptr, "kv_indptr")
        lens = np.diff(kv_ends)
        if kv_ends.shape[0] < 1 or kv_ends[0] < 0 or (lens < 0).any():
            raise ValueError(f"kv_indptr: wanted rising from 0, got {kv_ends.tolist()}")
        ends = query_ends(qo_indptr, lens.shape[0])
        self._check_rows(ends, uniform_q_len)
        self._keep_buffers(lens.shape[0], {"qo_indptr_buf": qo_indptr, "kv_indptr_buf": kv_indptr})
        self._kv_end = int(kv_ends[-1])
        keys = Keys(lens, rows=kv_ends[:-1])
        keys, ends = self._each_for_itself(keys, ends, causal, pos_encoding_mode, window_left)
        self._keep_plan(
            keys,
            ends,
            None,
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
        self._plan_on_gpu(longest(ends))

    begin_forward = plan

    @names_arguments(**RAGGED_RUN)
    def run(
        self,
        q,
        k,
        v,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        o_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        kv_cache_sf=None,
    ):
        """out [T, Hq, Dv], or (out, LSE float32 [T, Hq], base 2), of k [Tk, Hk, D] and v [Tk, Hk,
        Dv]. lse_base "ln": natural log. lse_layout "HN": [Hq, T].
        """
        refuse(args=args, kv_cache_sf=kv_cache_sf, o_scale=None if o_scale == 1.0 else o_scale)
        self._check_q(q)
        form = LseForm.of(lse_base, lse_layout)
        result = self._over_rows(
            q, k, v, out, form.taken(lse), return_lse, (q_scale, k_scale, v_scale)
        )
        return form.given(result) if return_lse else result

    def _over_rows(self, q, k, v, out, lse, return_lse, scales):
        if self._on_gpu or gpu.on_gpu(q):
            self._check_place(q)
            frame, host, hk, hv = None, q, k, v
        else:
            frame = framework(q)
            host, hk, hv = (frame.host(x, n) for n, x in (("q", q), ("k", k), ("v", v)))
        if self._kv_layout == "HND":
            hk, hv = hk.swapaxes(0, 1), hv.swapaxes(0, 1)
        if hk.shape[0] < self._kv_end or hv.shape[0] != hk.shape[0]:
            raise ValueError(
                f"k and v: wanted at least {self._kv_end} rows (kv_indptr's end), "
                f"got {hk.shape[0]} and {hv.shape[0]}"
            )
        self._check_arrays(q, k, host, hk, hv)
        if frame is None:
            pages = hk[:, None], hv[:, None]
            return self._attend_on_gpu(q, *pages, out, lse, return_lse, scales, None)
        longest_row = max(self._keys.longest, 1)
        rows = [sliding_rows(x, x.shape[0], longest_row) for x in (hk, hv)]
        return self._attend_keys(
            frame, q, host, *rows, self._keys, out, lse, return_lse, scales, sinks=None
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    @names_arguments(**FORWARD)
    def forward(
        self,
        q,
        k,
        v,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
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
            (q, k, v),
            causal,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            sm_scale,
            rope_scale,
            rope_theta,
            return_lse=return_lse,
        )

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
