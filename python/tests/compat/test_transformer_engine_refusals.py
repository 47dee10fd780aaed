# SPDX-License-Identifier: Apache-2.0
"""What TransformerEngine's front refuses, and that a refused step changes nothing."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from arrivals import Stream, make_module, make_params

from octavo.compat import transformer_engine as engine


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({1: 30}, "max_sequence_length"),
        ({1: 1, 2: 1, 3: 1, 4: 1}, "max_batch_size"),
        ({1: -1}, "at least 0"),
    ],
)
def test_a_step_beyond_the_maxima_changes_nothing(frame, paged, step, message):
    params, stream, module = make_params(frame, paged=paged), Stream(frame, "f32", 2), make_module()
    params.allocate_memory(1)
    first = {1: 4, 9: 2}
    params.pre_step(first)
    module(*stream.arrays(first, "bshd"), inference_params=params)
    with pytest.raises(ValueError, match=message):
        params.pre_step(step)
    assert dict(params.sequences) == {1: 4, 9: 2}
    params.pre_step({9: 1, 1: 1})
    stream.check(
        module(*stream.arrays({9: 1, 1: 1}, "bshd"), inference_params=params), {9: 1, 1: 1}, "bshd"
    )


def test_backends_are_chosen_by_the_environment(frame, monkeypatch):
    params, stream, module = make_params(frame), Stream(frame, "f32", 8), make_module()
    params.allocate_memory(1)
    params.pre_step({1: 2})
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(ValueError, match=r"No dot product attention backend.*NVTE_FLASH_ATTN=0"):
        module(*stream.arrays({1: 2}, "bshd"), inference_params=params)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "yes")
    params.pre_step({1: 1})  # a step reads them once
    with pytest.raises(ValueError, match="NVTE_FLASH_ATTN: wanted 0 or 1"):
        module(*stream.arrays({1: 1}, "bshd"), inference_params=params)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attn_mask_type": "causal"}, ValueError, "padding"),
        ({"attn_mask_type": "arbitrary"}, NotImplementedError, "arbitrary"),
        ({"attn_mask_type": "other"}, ValueError, "attn_mask_type"),
        ({"attention_mask": 1}, NotImplementedError, "attention_mask"),
        ({"core_attention_bias_type": "post_scale_bias"}, NotImplementedError, "post_scale_bias"),
        ({"pad_between_seqs": True}, NotImplementedError, "pad_between_seqs"),
        ({"fp8_output": True}, NotImplementedError, "fp8_output"),
        ({"cu_seqlens_q_padded": 1}, NotImplementedError, "cu_seqlens_q_padded"),
        ({"cu_seqlens_q": np.array([0, 1, 2], np.int32)}, ValueError, "cu_seqlens_q"),
        ({"window_size": (2, 1)}, ValueError, "window_size"),
    ],
)
def test_what_is_wrong_or_not_covered_is_named(frame, change, error, message):
    params, stream = make_params(frame), Stream(frame, "f32", 8)
    params.allocate_memory(1)
    params.pre_step({1: 2, 2: 2})
    with pytest.raises(error, match=message):
        make_module()(*stream.arrays({1: 2, 2: 2}, "bshd"), inference_params=params, **change)


@pytest.mark.parametrize("missing", ["num_heads_kv", "head_dim_k", "dtype"])
def test_the_sizes_are_required(missing):
    sizes = {"num_heads_kv": 1, "head_dim_k": 8, "dtype": np.float32}
    with pytest.raises(ValueError, match=missing):
        engine.InferenceParams(1, 8, **{**sizes, missing: None})


def test_positional_arguments_are_those_of_the_library():
    def names(function):
        parameters = list(inspect.signature(function).parameters.values())[1:]
        return " ".join(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    assert names(engine.InferenceParams.__init__) == (
        "max_batch_size max_sequence_length num_heads_kv head_dim_k dtype head_dim_v is_paged "
        "total_num_pages page_size max_ctx_len qkv_format custom_cache_manager"
    )
    assert names(engine.DotProductAttention.forward) == (
        "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv "
        "cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type "
        "window_size bottom_right_diagonal checkpoint_core_attention core_attention_bias_type "
        "core_attention_bias alibi_slopes fast_zero_fill inference_params pad_between_seqs "
        "fp8_output num_splits"
    )
