# SPDX-License-Identifier: Apache-2.0
"""Octavo under the names of FlashAttention 3's module flash_attn_interface, in its order of
arguments.

The same functions as octavo.compat.flash_attn, which see for shapes and results. Here
return_attn_probs gives (out, LSE), and out alone otherwise. Forward only.
"""

from __future__ import annotations

from ._blame import DTYPE, WHOLE, array, names_arguments
from .flash_attn import flash_attn_interface as _fa2

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_NO_WINDOW = (-1, -1)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=_NO_WINDOW,
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
    *,
    alibi_slopes=None,
    sinks=None,
    learnable_sink=None,
):
    """octavo.compat.flash_attn.flash_attn_with_kvcache in FlashAttention 3's order of arguments."""
    return _fa2.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        None,
        softmax_scale,
        causal,
        window_size,
        softcap,
        rotary_interleaved,
        alibi_slopes,
        num_splits,
        return_softmax_lse,
        page_table=page_table,
        qv=qv,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        scheduler_metadata=scheduler_metadata,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        sinks=sinks,
        learnable_sink=learnable_sink,
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=_NO_WINDOW,
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
    *,
    page_table=None,
    alibi_slopes=None,
    sinks=None,
    learnable_sink=None,
):
    """octavo.compat.flash_attn.flash_attn_varlen_func in FlashAttention 3's order of arguments."""
    result = _fa2.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        page_table=page_table,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        sinks=sinks,
        learnable_sink=learnable_sink,
    )
    return result[:2] if return_attn_probs else result


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=_NO_WINDOW,
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
    *,
    alibi_slopes=None,
    sinks=None,
    learnable_sink=None,
):
    """octavo.compat.flash_attn.flash_attn_func in FlashAttention 3's order of arguments."""
    result = _fa2.flash_attn_func(
        q,
        k,
        v,
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        sinks=sinks,
        learnable_sink=learnable_sink,
    )
    return result[:2] if return_attn_probs else result


@names_arguments(qkv=array(4, 5), num_heads_q=WHOLE | None)
def flash_attn_qkvpacked_func(
    qkv,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=_NO_WINDOW,
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
):
    """flash_attn_func for qkv [B, L, 3, H, D], or [B, L, Hq + 2 Hk, D] with num_heads_q."""
    if len(qkv.shape) == 5:
        q, k, v = (qkv[:, :, i] for i in range(3))
    else:
        if num_heads_q is None:
            raise ValueError("num_heads_q: wanted it for qkv of four axes, got None")
        num_heads_k = (qkv.shape[2] - num_heads_q) // 2
        if num_heads_k < 1 or num_heads_q + 2 * num_heads_k != qkv.shape[2]:
            raise ValueError(
                f"num_heads_q: wanted it to leave as many heads for k as for v, got {num_heads_q}"
            )
        q = qkv[:, :, :num_heads_q]
        k = qkv[:, :, num_heads_q : num_heads_q + num_heads_k]
        v = qkv[:, :, num_heads_q + num_heads_k :]
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


@names_arguments(
    out_partial=array(4, 5), lse_partial=array(3, 4), out=array(3, 4) | None, out_dtype=DTYPE | None
)
def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merges partial results: out_partial float32 [S, B, L, H, D], lse_partial [S, B, L, H].

    Without the batch axis for ragged results: [S, T, H, D] and [S, T, H]. Returns (out, LSE [B, L,
    H]).
    """
    from .flash_attn import _calls

    return _calls.combine(out_partial, lse_partial, out, out_dtype)


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype=None,
    headdim_v=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    cache_leftpad=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=_NO_WINDOW,
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    **more,
):
    """None, whatever a version adds: Octavo plans a call from its lengths; nothing to prepare."""
    return None
