# SPDX-License-Identifier: Apache-2.0
"""Every argument of every front in turn given something that it can't be: what is said is a
TypeError, a ValueError or a NotImplementedError in words, never a failure from within.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from octavo import compat
from octavo.compat import flash_attn, flash_attn_interface, flashinfer
from octavo.compat import transformer_engine as engine

frames = pytest.mark.parametrize("frame", ["numpy", "torch", "stand-in", "cuda"], indirect=True)


def wrong(frame):
    """What no argument of most is."""
    return {
        "None": None,
        "a word": "many",
        "a number": 3,
        "a fraction": 0.5,
        "an object": object(),
        "a list": [1, 2],
        "a tuple of three": (1, 2, 3),
        "one number": frame.make(np.float32(2.0)),
        "one axis": frame.make(np.ones(3)),
        "two axes": frame.make(np.ones((2, 2))),
        "three axes": frame.make(np.ones((2, 2, 2))),
        "four axes": frame.make(np.ones((2, 2, 2, 2))),
        "no rows": frame.make(np.ones((0, 1, 2, 8))),
        "integers": frame.ints([1, 2]),
        "a table": frame.ints([[1, 2], [3, 4]]),
        "no integers": frame.ints([]),
        "far integers": frame.ints([2_000_000_000, 2_000_000_000]),
        "negative integers": frame.ints([-1, -5]),
    }


def kvcache(frame):
    def draw(*shape):
        return frame.make(np.ones(shape))

    return {
        "q": draw(2, 1, 2, 8),
        "k_cache": draw(4, 4, 1, 8),
        "v_cache": draw(4, 4, 1, 8),
        "k": draw(2, 1, 1, 8),
        "v": draw(2, 1, 1, 8),
        "rotary_cos": draw(8, 4),
        "rotary_sin": draw(8, 4),
        "cache_seqlens": frame.ints([3, 2]),
        "block_table": frame.ints([[0, 1], [2, 3]]),
        "causal": True,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "softmax_scale": None,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "cu_seqlens_q": None,
        "cu_seqlens_k_new": None,
        "max_seqlen_q": None,
        "rotary_seqlens": None,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "sinks": None,
    }


def varlen(frame):
    x = frame.make(np.ones((5, 2, 8)))
    return {
        "q": x,
        "k": x,
        "v": x,
        "cu_seqlens_q": frame.ints([0, 2, 5]),
        "cu_seqlens_k": frame.ints([0, 2, 5]),
        "max_seqlen_q": 3,
        "max_seqlen_k": 3,
        "softmax_scale": None,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "block_table": None,
        "seqused_q": None,
        "seqused_k": None,
        "sinks": None,
    }


def dense(frame):
    x = frame.make(np.ones((2, 3, 2, 8)))
    words = {"softmax_scale": None, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None}
    return {"q": x, "k": x, "v": x, **words}


def combine(frame):
    return {
        "out_partial": frame.make(np.ones((2, 2, 3, 2, 8))),
        "lse_partial": frame.make(np.ones((2, 2, 3, 2))),
        "out": None,
        "out_dtype": None,
    }


def single(frame):
    x = frame.make(np.ones((3, 2, 8)))
    words = {"kv_layout": "NHD", "pos_encoding_mode": "NONE", "window_left": -1, "k_scale": None}
    return {"q": x, "k": x, "v": x, **words, "sm_scale": None, "logits_soft_cap": None}


def decode_one(frame):
    return single(frame) | {"q": frame.make(np.ones((2, 8)))}


def appended(frame):
    x = frame.make(np.ones((2, 2, 8)))
    return {
        "append_key": x,
        "append_value": x,
        "batch_indices": frame.ints([0, 1]),
        "positions": frame.ints([1, 0]),
        "paged_kv_cache": frame.make(np.zeros((4, 2, 4, 2, 8))),
        "kv_indices": frame.ints([0, 1]),
        "kv_indptr": frame.ints([0, 1, 2]),
        "kv_last_page_len": frame.ints([2, 1]),
        "kv_layout": "NHD",
    }


def places(frame):
    return {
        "append_indptr": frame.ints([0, 2, 3]),
        "seq_lens": frame.ints([4, 5]),
        "nnz": 3,
    }


def merged(frame):
    v, s = frame.make(np.ones((3, 2, 8))), frame.make(np.ones((3, 2)))
    return {"v_a": v, "s_a": s, "v_b": v, "s_b": s}


def merged_in_place(frame):
    v, s = frame.make(np.ones((3, 2, 8))), frame.make(np.ones((3, 2)))
    return {"v": v, "s": s, "v_other": v, "s_other": s, "mask": None}


def merged_all(frame):
    return {"v": frame.make(np.ones((3, 2, 2, 8))), "s": frame.make(np.ones((3, 2, 2)))}


def planned(frame):
    return {
        "indptr": frame.ints([0, 1, 2]),
        "indices": frame.ints([0, 1]),
        "last_page_len": frame.ints([2, 1]),
        "num_qo_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "page_size": 4,
        "window_left": -1,
        "q_data_type": "float32",
        "kv_data_type": None,
        "sm_scale": None,
        "block_tables": None,
        "seq_lens": None,
        "q_len_per_req": 1,
    }


def run(frame):
    return {
        "q": frame.make(np.ones((2, 2, 8))),
        "paged_kv_cache": frame.make(np.zeros((4, 2, 4, 2, 8))),
        "out": None,
        "lse": None,
        "q_scale": None,
        "v_scale": None,
        "sinks": None,
        "return_lse": True,
    }


def run_planned(frame):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(frame.make(np.zeros(1)))
    wrapper.plan(**planned(frame))
    return wrapper.run


def plan(frame):
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(frame.make(np.zeros(1))).plan


def prefill_planned(frame):
    return {
        "qo_indptr": frame.ints([0, 2, 3]),
        "paged_kv_indptr": frame.ints([0, 1, 2]),
        "paged_kv_indices": frame.ints([0, 1]),
        "paged_kv_last_page_len": frame.ints([2, 1]),
        "num_qo_heads": 2,
        "num_kv_heads": 2,
        "head_dim_qk": 8,
        "page_size": 4,
        "head_dim_vo": None,
        "causal": True,
        "q_data_type": "float32",
    }


def prefill_plan(frame):
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(frame.make(np.zeros(1))).plan


def ragged_planned(frame):
    return {
        "qo_indptr": frame.ints([0, 2, 3]),
        "kv_indptr": frame.ints([0, 2, 4]),
        "num_qo_heads": 2,
        "num_kv_heads": 2,
        "head_dim_qk": 8,
        "head_dim_vo": None,
        "q_data_type": "float32",
    }


def ragged_plan(frame):
    return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(frame.make(np.zeros(1))).plan


def params(frame):
    return {
        "max_batch_size": 2,
        "max_sequence_length": 8,
        "num_heads_kv": 2,
        "head_dim_k": 8,
        "dtype": frame.dtype("f32"),
        "head_dim_v": None,
        "is_paged": True,
        "total_num_pages": 4,
        "page_size": 4,
        "qkv_format": "bshd",
        "device": frame.device,
    }


def stepped(frame):
    made = engine.InferenceParams(**params(frame))
    made.allocate_memory(1)
    return made.pre_step


def module(frame):
    return {
        "num_attention_heads": 2,
        "kv_channels": 8,
        "num_gqa_groups": None,
        "qkv_format": "bshd",
        "attn_mask_type": "padding_causal",
        "window_size": None,
        "tp_size": 1,
        "softmax_scale": None,
        "softmax_type": "vanilla",
        "layer_number": 1,
    }


def attended(frame):
    x = frame.make(np.ones((2, 3, 2, 8)))
    return {
        "query_layer": x,
        "key_layer": x,
        "value_layer": x,
        "qkv_format": "bshd",
        "cu_seqlens_q": None,
        "cu_seqlens_kv": None,
        "attn_mask_type": "causal_bottom_right",
        "window_size": None,
        "alibi_slopes": None,
    }


def over_a_cache(frame):
    made = engine.InferenceParams(**params(frame))
    made.allocate_memory(1)
    made.pre_step({0: 3, 1: 2})
    words = {"attn_mask_type": "padding_causal", "inference_params": made}
    return attended(frame) | words


def new_module(frame):
    return engine.DotProductAttention(2, 8, qkv_format="bshd").eval()


CALLS = {
    "flash_attn_with_kvcache": (kvcache, lambda frame: flash_attn.flash_attn_with_kvcache),
    "flash_attn_varlen_func": (varlen, lambda frame: flash_attn.flash_attn_varlen_func),
    "flash_attn_func": (dense, lambda frame: flash_attn.flash_attn_func),
    "flash_attn_combine": (combine, lambda frame: flash_attn_interface.flash_attn_combine),
    "single_prefill": (single, lambda frame: flashinfer.single_prefill_with_kv_cache),
    "single_decode": (decode_one, lambda frame: flashinfer.single_decode_with_kv_cache),
    "append_paged_kv_cache": (appended, lambda frame: flashinfer.append_paged_kv_cache),
    "get_batch_indices_positions": (places, lambda frame: flashinfer.get_batch_indices_positions),
    "merge_state": (merged, lambda frame: flashinfer.merge_state),
    "merge_state_in_place": (merged_in_place, lambda frame: flashinfer.merge_state_in_place),
    "merge_states": (merged_all, lambda frame: flashinfer.merge_states),
    "decode plan": (planned, plan),
    "prefill plan": (prefill_planned, prefill_plan),
    "ragged plan": (ragged_planned, ragged_plan),
    "decode run": (run, run_planned),
    "InferenceParams": (params, lambda frame: engine.InferenceParams),
    "DotProductAttention": (module, lambda frame: engine.DotProductAttention),
    "forward": (attended, new_module),
    "forward over a cache": (over_a_cache, new_module),
}


@frames
@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_taken(frame, name):
    arguments, function = CALLS[name]
    function(frame)(**arguments(frame))


def not_named(frame, arguments, function, errors, left_out=()):
    """Wrong arguments that raise nothing of `errors` which says what was wanted.

    left_out: by what a stand-in, in place of a GPU's planning, leaves a sequence out.
    """
    bad = []
    for argument in arguments(frame):
        for what in wrong(frame):
            given = arguments(frame) | {argument: wrong(frame)[what]}
            try:
                function(frame)(**given)
                frame.wait()
            except errors as error:
                if not ("wanted" in str(error) or "not covered" in str(error)):
                    bad.append(f"{argument} = {what}: {type(error).__name__}: {error}")
            except left_out:
                if frame.name != "stand-in":
                    raise
            except Exception as error:
                bad.append(f"{argument} = {what}: {type(error).__name__}: {error}")
    return bad


NAMED = (TypeError, ValueError, NotImplementedError, KeyError)


@frames
@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_named(frame, name):
    bad = not_named(frame, *CALLS[name], NAMED, left_out=AssertionError)
    assert not bad, f"{len(bad)}:\n" + "\n".join(bad)


def test_every_error_of_the_fronts_says_what_was_wanted():
    """By that word errors of the fronts are told from failures within."""
    bad = []
    for path in Path(compat.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                raised = ast.get_source_segment(text, node)
                words = ("anted", "not_covered", "octavo.", "CacheFull", "has no attribute")
                if not any(x in raised for x in words):
                    bad.append(f"{path}:{node.lineno}: {raised}")
    assert not bad, "\n".join(bad)
