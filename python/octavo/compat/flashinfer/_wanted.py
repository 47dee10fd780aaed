# SPDX-License-Identifier: Apache-2.0
"""What kinds of arguments the FlashInfer fronts take."""

from __future__ import annotations

from .._blame import FLAG, NUMBER, TEXT, WHOLE, array, having, ints, pages

_ARITHMETIC = {
    "causal": FLAG,
    "kv_layout": TEXT,
    "pos_encoding_mode": TEXT,
    "window_left": WHOLE | None,
    "logits_soft_cap": NUMBER | None,
    "sm_scale": NUMBER | None,
    "rope_scale": NUMBER | None,
    "rope_theta": NUMBER | None,
}
_SCALES = {"q_scale": NUMBER | None, "k_scale": NUMBER | None, "v_scale": NUMBER | None}
_SIZES = {
    "num_qo_heads": WHOLE,
    "num_kv_heads": WHOLE,
    "head_dim": WHOLE,
    "head_dim_qk": WHOLE,
    "head_dim_vo": WHOLE | None,
    "page_size": WHOLE,
}
SINGLE = {"q": array(3), "k": array(3), "v": array(3), **_ARITHMETIC, **_SCALES}
SINGLE_DECODE = SINGLE | {"q": array(2)}
PAGED_PLAN = {
    "qo_indptr": ints(),
    "indptr": ints(),
    "indices": ints(),
    "last_page_len": ints(),
    "paged_kv_indptr": ints(),
    "paged_kv_indices": ints(),
    "paged_kv_last_page_len": ints(),
    "block_tables": ints(2) | None,
    "q_len_per_req": WHOLE,
    **_SIZES,
    **_ARITHMETIC,
}
RAGGED_PLAN = {"qo_indptr": ints(), "kv_indptr": ints(), **_SIZES, **_ARITHMETIC}
_RUN = {"out": array(3) | None, "lse": array(2) | None, "sinks": array(1) | None, **_SCALES}
PAGED_RUN = {
    "q": array(3),
    "paged_kv_cache": pages(5),
    "return_lse": FLAG,
    "window_left": WHOLE | None,
    **_RUN,
}
RAGGED_RUN = {"q": array(3), "k": array(3), "v": array(3), "return_lse": FLAG, **_RUN}
APPEND = {
    "append_key": array(3),
    "append_value": array(3),
    "batch_indices": ints(),
    "positions": ints(),
    "paged_kv_cache": pages(5),
    "kv_indices": ints(),
    "kv_indptr": ints(),
    "kv_last_page_len": ints(),
}
PLACES = {
    "append_indptr": ints(),
    "seq_lens": ints(),
    "nnz": WHOLE,
    "batch_indices": ints() | None,
    "positions": ints() | None,
}
SEQ_LENS = {"kv_indptr": ints(), "kv_last_page_len": ints(), "page_size": WHOLE}
FORWARD = _ARITHMETIC | _SCALES
_BUFFERS = (
    "paged_kv_indptr_buffer paged_kv_indices_buffer paged_kv_last_page_len_buffer qo_indptr_buf "
    "paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf kv_indptr_buf "
    "indptr_buffer indices_buffer last_page_len_buffer"
)
WRAPPER = {
    "num_levels": WHOLE,
    "kv_layout": TEXT,
    "backend": TEXT,
    "use_cuda_graph": FLAG,
    "max_total_num_rows": WHOLE | None,
    **{name: ints() | None for name in _BUFFERS.split()},
}
FAST_PLAN = {"self": having("plan", "a wrapper for decode"), **PAGED_PLAN}
MERGE = {"v_a": array(3), "s_a": array(2), "v_b": array(3), "s_b": array(2)}
MERGE_IN_PLACE = {
    "v": array(3),
    "s": array(2),
    "v_other": array(3),
    "s_other": array(2),
    "mask": array(1) | None,
}
MERGE_ALL = {"v": array(4), "s": array(3)}
