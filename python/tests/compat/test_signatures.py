# SPDX-License-Identifier: Apache-2.0
"""The fronts take the libraries' arguments, in their order; what is more follows by keyword."""

from __future__ import annotations

import inspect

import pytest

from octavo.compat import flash_attn, flash_attn_interface, flashinfer
from octavo.compat import transformer_engine as engine

_MATHS = "softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
_MATHS3 = (
    "window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin "
    "return_attn_probs"
)
_POSITIONS = "pos_encoding_mode window_left logits_soft_cap"
_ROPE = "sm_scale rope_scale rope_theta"
_DTYPES = "q_data_type kv_data_type o_data_type"
_ITEMS = "prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr"
_PAGES = "paged_kv_indptr paged_kv_indices paged_kv_last_page_len"

FUNCTIONS = {
    flash_attn.flash_attn_func: f"q k v dropout_p {_MATHS}",
    flash_attn.flash_attn_qkvpacked_func: f"qkv dropout_p {_MATHS}",
    flash_attn.flash_attn_kvpacked_func: f"q kv dropout_p {_MATHS}",
    flash_attn.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    f"dropout_p {_MATHS} block_table",
    flash_attn.flash_attn_varlen_qkvpacked_func: f"qkv cu_seqlens max_seqlen dropout_p {_MATHS}",
    flash_attn.flash_attn_varlen_kvpacked_func: "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q "
    f"max_seqlen_k dropout_p {_MATHS}",
    flash_attn.flash_attn_with_kvcache: "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap "
    "rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    flash_attn_interface.flash_attn_func: "q k v softmax_scale causal qv q_descale k_descale "
    f"v_descale {_MATHS3}",
    flash_attn_interface.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q "
    "max_seqlen_k seqused_q seqused_k softmax_scale causal qv q_descale k_descale v_descale "
    f"{_MATHS3}",
    flash_attn_interface.flash_attn_with_kvcache: "q k_cache v_cache k v qv rotary_cos rotary_sin "
    "cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new "
    "max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal window_size "
    "attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
    "return_softmax_lse",
    flash_attn_interface.flash_attn_combine: "out_partial lse_partial out out_dtype",
    flash_attn_interface.get_scheduler_metadata: "batch_size max_seqlen_q max_seqlen_k num_heads_q "
    "num_heads_kv headdim cache_seqlens qkv_dtype headdim_v cu_seqlens_q cu_seqlens_k_new "
    "cache_leftpad page_size max_seqlen_k_new causal window_size attention_chunk has_softcap "
    "num_splits pack_gqa sm_margin",
    flashinfer.single_decode_with_kv_cache: "q k v kv_layout pos_encoding_mode use_tensor_cores "
    f"q_scale k_scale v_scale window_left logits_soft_cap {_ROPE} return_lse",
    flashinfer.single_prefill_with_kv_cache: "q k v scale_q scale_k scale_v o_dtype custom_mask "
    "packed_custom_mask causal kv_layout pos_encoding_mode use_fp16_qk_reduction sm_scale "
    "window_left logits_soft_cap rope_scale rope_theta backend return_lse kv_cache_sf k_scale "
    "v_scale",
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.__init__: "self float_workspace_buffer kv_layout "
    "use_cuda_graph use_tensor_cores paged_kv_indptr_buffer paged_kv_indices_buffer "
    "paged_kv_last_page_len_buffer backend jit_args jit_kwargs",
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan: "self indptr indices last_page_len "
    f"num_qo_heads num_kv_heads head_dim page_size {_POSITIONS} {_DTYPES} data_type {_ROPE} "
    "non_blocking block_tables seq_lens fixed_split_size disable_split_kv q_len_per_req",
    flashinfer.fast_decode_plan: "self indptr indices last_page_len num_qo_heads num_kv_heads "
    f"head_dim page_size {_POSITIONS} q_data_type kv_data_type data_type {_ROPE} non_blocking "
    "fixed_split_size disable_split_kv q_len_per_req global_override_indptr_cpu",
    flashinfer.BatchPrefillWithPagedKVCacheWrapper.__init__: "self float_workspace_buffer "
    "kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
    "paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs "
    "variant_owns_mask max_total_num_rows",
    flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan: f"self qo_indptr {_PAGES} num_qo_heads "
    "num_kv_heads head_dim_qk page_size head_dim_vo custom_mask packed_custom_mask causal "
    "pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale "
    f"rope_theta {_DTYPES} non_blocking {_ITEMS} seq_lens seq_lens_q block_tables "
    "max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv uniform_q_len "
    "use_token_head_sf",
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper.__init__: "self float_workspace_buffer "
    "kv_layout use_cuda_graph qo_indptr_buf kv_indptr_buf custom_mask_buf mask_indptr_buf backend "
    "jit_args jit_kwargs variant_owns_mask",
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper.plan: "self qo_indptr kv_indptr num_qo_heads "
    "num_kv_heads head_dim_qk head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode "
    f"use_fp16_qk_reduction window_left logits_soft_cap {_ROPE} {_DTYPES} non_blocking {_ITEMS} "
    "fixed_split_size disable_split_kv seq_lens seq_lens_q max_token_per_sequence max_sequence_kv "
    "v_indptr o_indptr qo_indptr_cpu kv_indptr_cpu uniform_q_len use_token_head_sf",
    flashinfer.append_paged_kv_cache: "append_key append_value batch_indices positions "
    "paged_kv_cache kv_indices kv_indptr kv_last_page_len kv_layout",
    flashinfer.get_batch_indices_positions: "append_indptr seq_lens nnz batch_indices positions",
    flashinfer.get_seq_lens: "kv_indptr kv_last_page_len page_size",
    flashinfer.merge_state: "v_a s_a v_b s_b",
    flashinfer.merge_state_in_place: "v s v_other s_other mask",
    flashinfer.merge_states: "v s",
    engine.InferenceParams.__init__: "self max_batch_size max_sequence_length num_heads_kv "
    "head_dim_k dtype head_dim_v is_paged total_num_pages page_size max_ctx_len qkv_format "
    "custom_cache_manager",
    engine.InferenceParams.allocate_memory: "self layer_number",
    engine.InferenceParams.pre_step: "self step_dict",
    engine.InferenceParams.step: "self layer_number new_k new_v qkv_format",
    engine.InferenceParams.get_seqlens_pre_step: "self",
    engine.InferenceParams.convert_paged_to_nonpaged: "self layer_number",
    engine.InferenceParams.reset: "self",
    engine.DotProductAttention.__init__: "self num_attention_heads kv_channels num_gqa_groups "
    "attention_dropout qkv_format attn_mask_type window_size bottom_right_diagonal "
    "sequence_parallel tp_size get_rng_state_tracker tp_group layer_number attention_type cp_group "
    "cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit",
    engine.DotProductAttention.forward: "self query_layer key_layer value_layer attention_mask "
    "qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q "
    "max_seqlen_kv attn_mask_type window_size bottom_right_diagonal checkpoint_core_attention "
    "core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill inference_params "
    "pad_between_seqs fp8_output num_splits",
}
KEYWORDS = {
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.run: "q_scale k_scale v_scale out lse return_lse "
    "enable_pdl window_left sinks q_len_per_req skip_softmax_threshold_scale_factor kv_cache_sf",
    flashinfer.BatchPrefillWithPagedKVCacheWrapper.run: "q_scale k_scale v_scale out lse "
    "return_lse lse_base lse_layout enable_pdl window_left sinks kv_cache_sf "
    "skip_softmax_threshold_scale_factor use_fp16_softmax uses_spcompress",
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run: "q_scale k_scale v_scale o_scale out lse "
    "return_lse lse_base lse_layout enable_pdl kv_cache_sf",
}
_NONE_LEFT = {"causal": False, "window_size": (-1, -1), "softcap": 0.0}
_MATHS_SET = {**_NONE_LEFT, "deterministic": False, "return_attn_probs": False}
_MATHS3_SET = {**_MATHS_SET, "attention_chunk": 0, "num_splits": 1, "sm_margin": 0}
_KVCACHE_SET = {
    **_NONE_LEFT,
    "rotary_interleaved": True,
    "num_splits": 0,
    "return_softmax_lse": False,
}
_LAYOUT_SET = {"kv_layout": "NHD"}
_WRAPPER_SET = {**_LAYOUT_SET, "use_cuda_graph": False, "backend": "auto"}
_POSITIONS_SET = {"pos_encoding_mode": "NONE", "window_left": -1}
_DECODE_PLAN_SET = {
    **_POSITIONS_SET,
    "q_data_type": "float16",
    "non_blocking": True,
    "disable_split_kv": False,
    "q_len_per_req": 1,
}
_PREFILL_PLAN_SET = {
    **_POSITIONS_SET,
    "causal": False,
    "use_fp16_qk_reduction": False,
    "q_data_type": "float16",
    "non_blocking": True,
    "token_pos_in_items_len": 0,
    "disable_split_kv": False,
    "use_token_head_sf": False,
}
# How many arguments have no default, and the defaults that are not None.
DEFAULTS = {
    flash_attn.flash_attn_func: (3, {"dropout_p": 0.0, **_MATHS_SET}),
    flash_attn.flash_attn_qkvpacked_func: (1, {"dropout_p": 0.0, **_MATHS_SET}),
    flash_attn.flash_attn_kvpacked_func: (2, {"dropout_p": 0.0, **_MATHS_SET}),
    flash_attn.flash_attn_varlen_func: (7, {"dropout_p": 0.0, **_MATHS_SET}),
    flash_attn.flash_attn_varlen_qkvpacked_func: (3, {"dropout_p": 0.0, **_MATHS_SET}),
    flash_attn.flash_attn_varlen_kvpacked_func: (6, {"dropout_p": 0.0, **_MATHS_SET}),
    flash_attn.flash_attn_with_kvcache: (3, _KVCACHE_SET),
    flash_attn_interface.flash_attn_func: (3, _MATHS3_SET),
    flash_attn_interface.flash_attn_varlen_func: (7, _MATHS3_SET),
    flash_attn_interface.flash_attn_with_kvcache: (
        3,
        {**_KVCACHE_SET, "attention_chunk": 0, "sm_margin": 0},
    ),
    flash_attn_interface.flash_attn_combine: (2, {}),
    flashinfer.single_decode_with_kv_cache: (
        3,
        {**_LAYOUT_SET, **_POSITIONS_SET, "use_tensor_cores": False, "return_lse": False},
    ),
    flashinfer.single_prefill_with_kv_cache: (
        3,
        {
            **_LAYOUT_SET,
            **_POSITIONS_SET,
            "causal": False,
            "use_fp16_qk_reduction": False,
            "backend": "auto",
            "return_lse": False,
        },
    ),
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.__init__: (
        2,
        {**_WRAPPER_SET, "use_tensor_cores": False},
    ),
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan: (8, _DECODE_PLAN_SET),
    flashinfer.BatchPrefillWithPagedKVCacheWrapper.__init__: (
        2,
        {**_WRAPPER_SET, "variant_owns_mask": False},
    ),
    flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan: (9, _PREFILL_PLAN_SET),
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper.__init__: (
        2,
        {**_WRAPPER_SET, "variant_owns_mask": False},
    ),
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper.plan: (6, _PREFILL_PLAN_SET),
    flashinfer.append_paged_kv_cache: (8, _LAYOUT_SET),
    flashinfer.merge_state: (4, {}),
    flashinfer.merge_state_in_place: (4, {}),
    flashinfer.merge_states: (2, {}),
    engine.InferenceParams.__init__: (3, {"is_paged": False, "qkv_format": "bshd"}),
    engine.InferenceParams.allocate_memory: (2, {}),
    engine.InferenceParams.pre_step: (2, {}),
    engine.InferenceParams.step: (5, {}),
    engine.InferenceParams.get_seqlens_pre_step: (1, {}),
    engine.InferenceParams.convert_paged_to_nonpaged: (2, {}),
    engine.InferenceParams.reset: (1, {}),
    engine.DotProductAttention.__init__: (
        3,
        {
            "attention_dropout": 0.0,
            "qkv_format": "sbhd",
            "attn_mask_type": "causal",
            "sequence_parallel": False,
            "tp_size": 1,
            "attention_type": "self",
            "cp_comm_type": "p2p",
            "softmax_type": "vanilla",
            "return_max_logit": False,
        },
    ),
    engine.DotProductAttention.forward: (
        4,
        {
            "checkpoint_core_attention": False,
            "core_attention_bias_type": "no_bias",
            "fast_zero_fill": True,
            "fp8_output": False,
            "num_splits": 1,
        },
    ),
}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def name_of(function):
    return f"{function.__module__.removeprefix('octavo.compat.')}.{function.__qualname__}"


@pytest.mark.parametrize("function", FUNCTIONS, ids=name_of)
def test_positional_arguments_are_the_librarys(function):
    parameters = inspect.signature(function).parameters.values()
    wanted = FUNCTIONS[function].split()
    names = [p.name for p in parameters if p.kind in POSITIONAL]
    assert names[: len(wanted)] == wanted


@pytest.mark.parametrize("function", KEYWORDS, ids=name_of)
def test_keywords_are_the_librarys(function):
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert names == KEYWORDS[function].split()


@pytest.mark.parametrize("function", DEFAULTS, ids=name_of)
def test_defaults_are_the_librarys(function):
    parameters = inspect.signature(function).parameters
    names = FUNCTIONS[function].split()
    num_required, wanted = DEFAULTS[function]
    given = {name: parameters[name].default for name in names}
    no_default = [name for name in names if given[name] is inspect.Parameter.empty]
    assert no_default == names[:num_required]
    set_ones = {n: given[n] for n in names[num_required:] if given[n] is not None}
    assert set_ones == wanted
