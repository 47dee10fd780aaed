# SPDX-License-Identifier: Apache-2.0
"""What kinds of arguments TransformerEngine's front takes."""

from __future__ import annotations

from .._blame import (
    DEVICE,
    DIMS,
    FLAG,
    NUMBER,
    PAIR,
    SEQUENCE,
    STEP,
    TEXT,
    WHOLE,
    Want,
    array,
    ints,
)


def _params_error(x):
    return None if hasattr(x, "pre_step") else TypeError


PARAMS = {
    "max_batch_size": WHOLE,
    "max_sequence_length": WHOLE,
    "num_heads_kv": WHOLE,
    "head_dim_k": WHOLE,
    "head_dim_v": WHOLE | None,
    "is_paged": FLAG,
    "total_num_pages": WHOLE | None,
    "page_size": WHOLE | None,
    "max_ctx_len": WHOLE | None,
    "qkv_format": TEXT,
    "device": DEVICE | None,
}
PRE_STEP = {"step_dict": STEP}
LAYER = {"layer_number": WHOLE}
STEP_OF_LAYER = LAYER | {"new_k": array(3, 4), "new_v": array(3, 4), "qkv_format": TEXT}
GRAPHED = {"sample_args": SEQUENCE, "num_warmup_iters": WHOLE}
MODULE = {
    "num_attention_heads": WHOLE,
    "kv_channels": DIMS,
    "num_gqa_groups": WHOLE | None,
    "qkv_format": TEXT,
    "attn_mask_type": TEXT,
    "window_size": PAIR | None,
    "tp_size": WHOLE,
    "layer_number": WHOLE | None,
    "softmax_scale": NUMBER | None,
    "softmax_type": TEXT,
}
FORWARD = {
    "query_layer": array(3, 4),
    "key_layer": array(3, 4),
    "value_layer": array(3, 4),
    "qkv_format": TEXT | None,
    "cu_seqlens_q": ints() | None,
    "cu_seqlens_kv": ints() | None,
    "max_seqlen_q": WHOLE | None,
    "max_seqlen_kv": WHOLE | None,
    "attn_mask_type": TEXT | None,
    "window_size": PAIR | None,
    "alibi_slopes": array(1, 2) | None,
    "inference_params": Want("InferenceParams", _params_error) | None,
}
