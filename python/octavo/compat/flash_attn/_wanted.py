# SPDX-License-Identifier: Apache-2.0
"""What kinds of arguments the FlashAttention fronts take."""

from __future__ import annotations

from .._blame import FLAG, LENGTHS, NUMBER, PAIR, WHOLE, array, ints

_ARITHMETIC = {
    "softmax_scale": NUMBER | None,
    "causal": FLAG | None,
    "window_size": PAIR,
    "softcap": NUMBER | None,
    "alibi_slopes": array(1, 2) | None,
    "num_splits": WHOLE | None,
    "sinks": array(1) | None,
    "learnable_sink": array(1) | None,
    "q_descale": array(2) | None,
    "k_descale": array(2) | None,
    "v_descale": array(2) | None,
}
KVCACHE = {
    "q": array(3, 4),
    "k_cache": array(4),
    "v_cache": array(4),
    "k": array(3, 4) | None,
    "v": array(3, 4) | None,
    "rotary_cos": array(2) | None,
    "rotary_sin": array(2) | None,
    "rotary_interleaved": FLAG,
    "rotary_seqlens": ints() | None,
    "cache_seqlens": LENGTHS | None,
    "cache_batch_idx": ints() | None,
    "cache_leftpad": ints() | None,
    "block_table": ints(2) | None,
    "page_table": ints(2) | None,
    "cu_seqlens_q": ints() | None,
    "cu_seqlens_k_new": ints() | None,
    "max_seqlen_q": WHOLE | None,
    **_ARITHMETIC,
}
VARLEN = {
    "q": array(3),
    "k": array(3, 4),
    "v": array(3, 4),
    "cu_seqlens_q": ints(),
    "cu_seqlens_k": ints() | None,
    "max_seqlen_q": WHOLE | None,
    "max_seqlen_k": WHOLE | None,
    "seqused_q": ints() | None,
    "seqused_k": ints() | None,
    "block_table": ints(2) | None,
    "page_table": ints(2) | None,
    **_ARITHMETIC,
}
DENSE = {"q": array(4), "k": array(4), "v": array(4), **_ARITHMETIC}
