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
