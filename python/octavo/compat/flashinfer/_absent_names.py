# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's names for attention and its caches that the front has not, in whichever module."""

NAMES = frozenset(
    (
        "BatchAttention",
        "BatchAttentionWithAttentionSinkWrapper",
        "BatchDecodeMlaWithPagedKVCacheWrapper",
        "BatchMLAPagedAttentionWrapper",
        "BatchPODWithPagedKVCacheWrapper",
        "BlockSparseAttentionWrapper",
        "PODWithPagedKVCacheWrapper",
        "VariableBlockSparseAttentionWrapper",
        "append_paged_mla_kv_cache",
        "apply_llama31_rope",
        "apply_llama31_rope_inplace",
        "apply_llama31_rope_pos_ids",
        "apply_llama31_rope_pos_ids_inplace",
        "apply_rope",
        "apply_rope_inplace",
        "apply_rope_pos_ids",
        "apply_rope_pos_ids_inplace",
        "apply_rope_with_cos_sin_cache",
        "apply_rope_with_cos_sin_cache_inplace",
        "cudnn_batch_decode_with_kv_cache",
        "cudnn_batch_prefill_with_kv_cache",
        "packbits",
        "segment_packbits",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache_mla",
        "xqa",
        "xqa_mla",
    )
)
