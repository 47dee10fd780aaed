# SPDX-License-Identifier: Apache-2.0
"""One or a few new queries for each sequence, over pages or one sequence's keys."""

from __future__ import annotations

import functools
import warnings

import numpy as np

from .. import _gpu as gpu
from .._absent import absent
from .._arrays import framework
from .._blame import names_arguments
from . import _gpu
from ._absent_names import NAMES
from ._batch import PagedBatch
from ._common import Keys, Maths, attend, check_backend, check_layout, paged_keys, refuse
from ._wanted import FAST_PLAN, FORWARD, PAGED_PLAN, PAGED_RUN, SINGLE_DECODE, WRAPPER

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
]

__getattr__ = absent(__name__, NAMES)


@names_arguments(**SINGLE_DECODE)
def single_decode_with_kv_cache(
    q,
    k,
    v,
    kv_layout="NHD",
    pos_encoding_mode="NONE",
    use_tensor_cores=False,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    window_left=-1,
    logits_soft_cap=None,
    sm_scale=None,
    rope_scale=None,
    rope_theta=None,
    return_lse=False,
):
    """Attention of q [Hq, D] over k [L, Hk, D] and v (HND: [Hk, L, D]): out [Hq, Dv], or (out, LSE
    [Hq]).
    """
    check_layout(kv_layout)
    maths = Maths(
        q.shape[0],
        q.shape[1],
        causal=False,
        q_lens=1,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
    )
    scales = (q_scale, k_scale, v_scale)
    if gpu.on_gpu(q):
        if kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        out, lse = _gpu.attend_rows(
            "single_decode_with_kv_cache", q[None], k, v, maths, want_lse=return_lse, scales=scales
        )
        return (out[0], lse[0]) if return_lse else out[0]
    frame = framework(q)
    host = frame.host(q, "q")
    hk, hv = frame.host(k, "k"), frame.host(v, "v")
    if kv_layout == "HND":
        hk, hv = hk.swapaxes(0, 1), hv.swapaxes(0, 1)
    out, lse = attend(
        frame,
        q,
        host[None],
        hk[None],
        hv[None],
        Keys(np.array([hk.shape[0]], np.int32)),
        None,
        maths,
        out=None,
        lse=None,
        want_lse=return_lse,
        scales=scales,
        sinks=None,
    )
    return (out[0], lse[0]) if return_lse else out[0]


class BatchDecodeWithPagedKVCacheWrapper(PagedBatch):
    """plan() once for a batch, run() for each layer: q [B, Hq, D] over each sequence's pages.

    The workspace buffer says the device and is not written: Octavo's own workspace suffices.
    """

    @names_arguments(**WRAPPER)
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        check_layout(kv_layout)
        check_backend(backend, jit_args)
        refuse(jit_kwargs=jit_kwargs)
        self._use_tensor_cores = use_tensor_cores
        self._set_up(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            {
                "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
                "paged_kv_indices_buffer": paged_kv_indices_buffer,
                "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
            },
        )

    @property
    def use_tensor_cores(self):
        return self._use_tensor_cores

    @names_arguments(**PAGED_PLAN)
    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
        *,
        window_right=0,
        use_token_head_sf=False,
    ):
        """Checks and keeps a batch: pages indices[indptr[b]:indptr[b + 1]], the last with
        last_page_len[b].
        """
        refuse(window_right=window_right, use_token_head_sf=use_token_head_sf)
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req: wanted at least 1, got {q_len_per_req}")
        if q_data_type is None:
            q_data_type = "float16" if data_type is None else data_type
        if kv_data_type is None:
            kv_data_type = data_type if data_type is not None else q_data_type
        given = (indptr, indices, last_page_len, seq_lens, block_tables)
        indptr, indices, last_page_len, seq_lens, block_tables = map(_gpu.on_host, given)
        keys = paged_keys(indptr, indices, last_page_len, page_size, seq_lens, block_tables)
        if q_len_per_req > 1 and keys.kv_lens.size and keys.kv_lens.min() < q_len_per_req:
            raise ValueError(
                f"q_len_per_req: wanted at most {keys.kv_lens.min()}, the shortest sequence, "
                f"got {q_len_per_req}"
            )
        self._keep_buffers(
            len(keys.kv_lens),
            {
                "paged_kv_indptr_buffer": indptr,
                "paged_kv_indices_buffer": indices,
                "paged_kv_last_page_len_buffer": last_page_len,
            },
        )
        self._keep_plan(
            keys,
            None,
            page_size,
            (num_qo_heads, num_kv_heads, head_dim, head_dim),
            (q_data_type, kv_data_type, o_data_type),
            {
                "causal": q_len_per_req > 1,
                "q_lens": q_len_per_req,
                "pos_encoding_mode": pos_encoding_mode,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "sm_scale": sm_scale,
                "rope_scale": rope_scale,
                "rope_theta": rope_theta,
                "batch_invariant": disable_split_kv or fixed_split_size is not None,
            },
        )
        self._q_len = q_len_per_req
        self._plan_on_gpu(q_len_per_req, block_tables)

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
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        """out [B * q_len, Hq, Dv], or (out, LSE [B * q_len, Hq], base 2), of one layer's pages."""
        refuse(
            args=args,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
        )
        if q_len_per_req is not None:
            warnings.warn("q_len_per_req belongs to plan()", DeprecationWarning, stacklevel=2)
        self._check_run(window_left)
        expected = len(self._keys.kv_lens) * self._q_len
        if q.shape[0] != expected or q_len_per_req not in (None, self._q_len):
            raise ValueError(
                f"q: wanted {expected} rows, {self._q_len} a sequence as planned, got {q.shape[0]}"
            )
        return self._attend(
            q, paged_kv_cache, out, lse, return_lse, (q_scale, k_scale, v_scale), sinks
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    @names_arguments(**FORWARD)
    def forward(
        self,
        q,
        paged_kv_cache,
        pos_encoding_mode="NONE",
        q_scale=None,
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
        self._change_maths(
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(
            q,
            paged_kv_cache,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
        )

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


@names_arguments(**FAST_PLAN)
def fast_decode_plan(
    self,
    indptr,
    indices,
    last_page_len,
    num_qo_heads,
    num_kv_heads,
    head_dim,
    page_size,
    pos_encoding_mode="NONE",
    window_left=-1,
    logits_soft_cap=None,
    q_data_type=None,
    kv_data_type=None,
    data_type=None,
    sm_scale=None,
    rope_scale=None,
    rope_theta=None,
    non_blocking=True,
    fixed_split_size=None,
    disable_split_kv=False,
    q_len_per_req=1,
    global_override_indptr_cpu=None,
):
    """plan() of a decode wrapper, in whose place engines put it.

    global_override_indptr_cpu: indptr on the host, so that it is not waited for.
    """
    type(self).plan(
        self,
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        None,
        data_type,
        sm_scale,
        rope_scale,
        rope_theta,
        non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper with the buffers of CUDA graph mode."""

    @names_arguments(**WRAPPER)
    def __init__(
        self,
        workspace_buffer,
        indptr_buffer,
        indices_buffer,
        last_page_len_buffer,
        kv_layout="NHD",
        use_tensor_cores=False,
    ):
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )
