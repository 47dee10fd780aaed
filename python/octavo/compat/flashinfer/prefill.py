# SPDX-License-Identifier: Apache-2.0
"""Many new queries for each sequence, over pages, ragged keys or one sequence's keys."""

from __future__ import annotations

import functools

import numpy as np

from .. import _gpu as gpu
from .._absent import absent
from .._arrays import dtype_name, framework
from .._blame import names_arguments
from . import _gpu
from ._absent_names import NAMES
from ._common import (
    Keys,
    Maths,
    answer,
    attend,
    check_backend,
    check_layout,
    each_for_itself,
    refuse,
)
from ._paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from ._ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper
from ._wanted import SINGLE

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]

__getattr__ = absent(__name__, NAMES)


@names_arguments(**SINGLE)
def single_prefill_with_kv_cache(
    q,
    k,
    v,
    scale_q=None,
    scale_k=None,
    scale_v=None,
    o_dtype=None,
    custom_mask=None,
    packed_custom_mask=None,
    causal=False,
    kv_layout="NHD",
    pos_encoding_mode="NONE",
    use_fp16_qk_reduction=False,
    sm_scale=None,
    window_left=-1,
    logits_soft_cap=None,
    rope_scale=None,
    rope_theta=None,
    backend="auto",
    return_lse=False,
    kv_cache_sf=None,
    k_scale=None,
    v_scale=None,
):
    """Attention of q [n, Hq, D] over k [L, Hk, D] and v [L, Hk, Dv] (HND: [Hk, L, ..]).

    Returns out [n, Hq, Dv], or (out, LSE float32 [n, Hq], base 2). causal is bottom-right aligned.
    use_fp16_qk_reduction allows less precision than is used here.
    """
    check_layout(kv_layout)
    check_backend(backend, None)
    refuse(
        scale_q=scale_q,
        scale_k=scale_k,
        scale_v=scale_v,
        custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
        kv_cache_sf=kv_cache_sf,
    )
    wide = o_dtype is not None and dtype_name(o_dtype) != dtype_name(q.dtype)
    if wide and dtype_name(o_dtype) != "f32":
        refuse(o_dtype=o_dtype)
    single = each_for_itself(causal, pos_encoding_mode, window_left, q.shape[0])
    maths = Maths(
        q.shape[1],
        q.shape[2],
        causal=causal,
        q_lens=1 if single else q.shape[0],
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
    )
    scales = (None, k_scale, v_scale)
    if gpu.on_gpu(q):
        if kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        result = _gpu.attend_rows(
            "single_prefill_with_kv_cache",
            q,
            k,
            v,
            maths,
            want_lse=return_lse,
            scales=scales,
            out_dtype=gpu.torch().float32 if wide else None,
            single=single,
        )
        return answer(result, return_lse)
    frame = framework(q)
    host = frame.host(q, "q")
    hk, hv = frame.host(k, "k"), frame.host(v, "v")
    if kv_layout == "HND":
        hk, hv = hk.swapaxes(0, 1), hv.swapaxes(0, 1)
    keys, offsets = Keys(np.array([hk.shape[0]], np.int32), rows=np.zeros(1, np.int32)), None
    if single:
        keys, offsets = keys.repeated(len(host)), np.arange(len(host) + 1, dtype=np.int32)
    result = attend(
        frame,
        q,
        host,
        hk[None],
        hv[None],
        keys,
        offsets,
        maths,
        out=None,
        lse=None,
        want_lse=return_lse,
        scales=scales,
        sinks=None,
        out_dtype=frame.float32 if wide else None,
    )
    return answer(result, return_lse)


single_prefill_with_kv_cache_return_lse = functools.partial(
    single_prefill_with_kv_cache, return_lse=True
)
