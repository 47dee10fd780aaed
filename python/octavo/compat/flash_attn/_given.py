# SPDX-License-Identifier: Apache-2.0
"""What a call was given, as the caller said it: handed on whole to where the tensors lie."""

from __future__ import annotations

from typing import Any, NamedTuple


class Arithmetic(NamedTuple):
    """What all three calls have in common."""

    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    alibi_slopes: Any
    sinks: Any
    descales: Any  # of q, k and v, or None
    want_lse: Any


class CacheCall(NamedTuple):
    """flash_attn_with_kvcache."""

    q: Any
    k_cache: Any
    v_cache: Any
    k: Any
    v: Any
    rotary_cos: Any
    rotary_sin: Any
    rotary_interleaved: Any
    rotary_seqlens: Any
    cache_seqlens: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    page_table: Any
    cu_seqlens_q: Any
    cu_seqlens_k_new: Any
    max_seqlen_q: Any
    arithmetic: Arithmetic


class RaggedCall(NamedTuple):
    """flash_attn_varlen_func."""

    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    seqused_q: Any
    seqused_k: Any
    page_table: Any
    arithmetic: Arithmetic
