# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 2's functions, forward only; FlashAttention 3's options follow by keyword."""

from __future__ import annotations

from .._blame import WHOLE, array, ints, name_argument, names_arguments
from . import _calls
from ._core import check_tuning, one_of, refuse
from ._given import Arithmetic, CacheCall, RaggedCall
from ._wanted import DENSE, KVCACHE, VARLEN

_NO_WINDOW = (-1, -1)


def _given(q_descale, k_descale, v_descale):
    if q_descale is None and k_descale is None and v_descale is None:
        return None
    return q_descale, k_descale, v_descale


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=_NO_WINDOW,
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    *,
    page_table=None,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    attention_chunk=0,
    scheduler_metadata=None,
    pack_gqa=None,
    sm_margin=0,
    sinks=None,
    learnable_sink=None,
):
    """Attention of new queries over a cache, after writing new keys and values into it in place.

    q [B, Lq, Hq, D], or [T, Hq, D] with cu_seqlens_q [B + 1]. k_cache [B_cache, S, Hk, D] and
    v_cache [.., Dv], or, with block_table (also called page_table) [B, M], [N, P, Hk, D]: any P
    from 1. k, v [B, L_new, Hk, ..] ([T_new, ..] with cu_seqlens_k_new) go to positions
    cache_seqlens ...; with rotary_cos and rotary_sin [positions, rotary_dim / 2] they and q are
    rotated first. causal and window_size are aligned to the bottom right. sinks (learnable_sink)
    [Hq] join the denominator.

    Returns out [B, Lq, Hq, Dv] ([T, Hq, Dv]), and with return_softmax_lse also the float32 LSE
    [B, Hq, Lq] ([Hq, T]), natural log, sinks left out; -inf where a query sees no key.

    num_splits, pack_gqa and max_seqlen_q are hints; here speed follows from the lengths themselves.
    """
    try:
        if qv is not None or attention_chunk or scheduler_metadata is not None or sm_margin:
            refuse(
                qv=qv,
                attention_chunk=attention_chunk,
                scheduler_metadata=scheduler_metadata,
                sm_margin=sm_margin,
            )
        if num_splits or pack_gqa is not None:
            check_tuning(num_splits, pack_gqa)
        arithmetic = Arithmetic(
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            sinks if learnable_sink is None else one_of(sinks=sinks, learnable_sink=learnable_sink),
            _given(q_descale, k_descale, v_descale),
            return_softmax_lse,
        )
        table = block_table
        if page_table is not None:
            table = one_of(block_table=block_table, page_table=page_table)
        call = CacheCall(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos,
            rotary_sin,
            rotary_interleaved,
            rotary_seqlens,
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            table,
            cu_seqlens_q,
            cu_seqlens_k_new,
            max_seqlen_q,
            arithmetic,
        )
        return _calls.with_kvcache(call)
    except Exception as error:
        name_argument(error, KVCACHE, locals())
        raise


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=_NO_WINDOW,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    *,
    page_table=None,
    seqused_q=None,
    seqused_k=None,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    attention_chunk=0,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
    sinks=None,
    learnable_sink=None,
):
    """Attention over ragged sequences: q [T, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv] packed end to
    end.

    With block_table [B, M], k and v are pages [N, P, Hk, ..]. seqused_q and seqused_k [B] say how
    many of each sequence's tokens count. Returns out [T, Hq, Dv], or with return_attn_probs (out,
    LSE float32 [Hq, T], an empty array: without dropout FlashAttention keeps no probabilities
    either).
    """
    try:
        if dropout_p or qv is not None or attention_chunk or sm_margin:
            refuse(dropout_p=dropout_p, qv=qv, attention_chunk=attention_chunk, sm_margin=sm_margin)
        if num_splits != 1 or pack_gqa is not None:
            check_tuning(num_splits, pack_gqa)
        table = block_table
        if page_table is not None:
            table = one_of(block_table=block_table, page_table=page_table)
        arithmetic = Arithmetic(
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            sinks if learnable_sink is None else one_of(sinks=sinks, learnable_sink=learnable_sink),
            _given(q_descale, k_descale, v_descale),
            return_attn_probs,
        )
        call = RaggedCall(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q,
            seqused_k,
            table,
            arithmetic,
        )
        out, lse = _calls.varlen(call)
        return (out, lse, _calls.no_probs(q)) if return_attn_probs else out
    except Exception as error:
        name_argument(error, VARLEN, locals())
        raise


@names_arguments(**DENSE)
def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=_NO_WINDOW,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    attention_chunk=0,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
    sinks=None,
    learnable_sink=None,
):
    """Attention of q [B, Lq, Hq, D] over k [B, Lk, Hk, D] and v [B, Lk, Hk, Dv].

    Returns out [B, Lq, Hq, Dv], or with return_attn_probs (out, LSE float32 [B, Hq, Lq], an empty
    array).
    """
    refuse(dropout_p=dropout_p, qv=qv, attention_chunk=attention_chunk, sm_margin=sm_margin)
    check_tuning(num_splits, pack_gqa)
    out, lse = _calls.dense(
        q,
        k,
        v,
        Arithmetic(
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            sinks if learnable_sink is None else one_of(sinks=sinks, learnable_sink=learnable_sink),
            _given(q_descale, k_descale, v_descale),
            return_attn_probs,
        ),
    )
    return (out, lse, _calls.no_probs(q)) if return_attn_probs else out


@names_arguments(qkv=array(5))
def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=_NO_WINDOW,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    **more,
):
    """flash_attn_func for qkv [B, L, 3, H, D]; the further arguments are the same."""
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **more,
    )


@names_arguments(q=array(4), kv=array(5))
def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=_NO_WINDOW,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    **more,
):
    """flash_attn_func for kv [B, Lk, 2, Hk, D]; the further arguments are the same."""
    k, v = kv[:, :, 0], kv[:, :, 1]
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **more,
    )


@names_arguments(qkv=array(4), cu_seqlens=ints(), max_seqlen=WHOLE | None)
def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=_NO_WINDOW,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    **more,
):
    """flash_attn_varlen_func for qkv [T, 3, H, D]; the further arguments are the same."""
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **more,
    )


@names_arguments(q=array(3), kv=array(4))
def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=_NO_WINDOW,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    **more,
):
    """flash_attn_varlen_func for kv [Tk, 2, Hk, D]; the further arguments are the same."""
    k, v = kv[:, 0], kv[:, 1]
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **more,
    )
