# SPDX-License-Identifier: Apache-2.0
"""As test_misuse, of what wrappers, caches and modules are made with and asked beside calls."""

from __future__ import annotations

import numpy as np
import pytest
from test_misuse import NAMED, frames, module, not_named, params, planned, run, single

from octavo.compat import flashinfer
from octavo.compat import transformer_engine as engine


def decode_wrapper(frame):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(frame.make(np.zeros(1)))
    wrapper.plan(**planned(frame))
    return wrapper


def cache(frame):
    made = engine.InferenceParams(**params(frame))
    made.allocate_memory(1)
    made.pre_step({0: 3})
    return made


def forwarded(frame):
    words = {"pos_encoding_mode": "NONE", "window_left": -1, "logits_soft_cap": None}
    given = run(frame)
    return {"q": given["q"], "paged_kv_cache": given["paged_kv_cache"], **words, "sm_scale": None}


def graph_buffers(frame):
    sizes = {"indptr_buffer": 3, "indices_buffer": 4, "last_page_len_buffer": 2}
    buffers = {name: frame.ints(np.zeros(n)) for name, n in sizes.items()}
    return {"workspace_buffer": frame.make(np.zeros(1)), **buffers, "kv_layout": "NHD"}


def levels(frame):
    # Two levels, of one sequence and of two.
    def ints(*arrays):
        return [frame.ints(x) for x in arrays]

    return {
        "qo_indptr_arr": ints([0, 2], [0, 1, 2]),
        "paged_kv_indptr_arr": ints([0, 1], [0, 1, 2]),
        "paged_kv_indices_arr": ints([0], [1, 2]),
        "paged_kv_last_page_len": ints([4], [1, 2]),
        "num_qo_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "page_size": 4,
        "sm_scale": None,
    }


def levels_wrapper(frame):
    return flashinfer.MultiLevelCascadeAttentionWrapper(2, frame.make(np.zeros(1)))


def new_tokens(frame):
    x = frame.make(np.ones((1, 3, 2, 8)))
    return {"layer_number": 1, "new_k": x, "new_v": x, "qkv_format": "bshd"}


CALLS = {
    "get_seq_lens": (
        lambda frame: {
            "kv_indptr": frame.ints([0, 1, 3]),
            "kv_last_page_len": frame.ints([2, 1]),
            "page_size": 4,
        },
        lambda frame: flashinfer.get_seq_lens,
    ),
    "fast_decode_plan": (
        lambda frame: {"self": decode_wrapper(frame), **planned(frame)} | {"block_tables": None},
        lambda frame: lambda block_tables, seq_lens, **words: flashinfer.fast_decode_plan(**words),
    ),
    "decode forward": (forwarded, lambda frame: decode_wrapper(frame).forward),
    "decode wrapper": (
        lambda frame: {
            "float_workspace_buffer": frame.make(np.zeros(1)),
            "kv_layout": "NHD",
            "backend": "auto",
        },
        lambda frame: flashinfer.BatchDecodeWithPagedKVCacheWrapper,
    ),
    "graph wrapper": (
        graph_buffers,
        lambda frame: flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    ),
    "levels": (levels, lambda frame: levels_wrapper(frame).plan),
    "allocate_memory": (
        lambda frame: {"layer_number": 2},
        lambda frame: engine.InferenceParams(**params(frame)).allocate_memory,
    ),
    "step": (new_tokens, lambda frame: cache(frame).step),
    "convert_paged_to_nonpaged": (
        lambda frame: {"layer_number": 1},
        lambda frame: cache(frame).convert_paged_to_nonpaged,
    ),
}


@frames
@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_taken(frame, name):
    arguments, function = CALLS[name]
    function(frame)(**arguments(frame))


@frames
@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_named(frame, name):
    bad = not_named(frame, *CALLS[name], (*NAMED, RuntimeError))
    assert not bad, f"{len(bad)}:\n" + "\n".join(bad)


def test_samples_of_graphs_are_named(frame):
    made = engine.DotProductAttention(**module(frame)).eval()
    for wrong_samples in (3, "x", None, single(frame)["q"]):
        with pytest.raises((TypeError, NotImplementedError), match=r"sample_args|without a GPU"):
            engine.make_graphed_callables(made, wrong_samples)
