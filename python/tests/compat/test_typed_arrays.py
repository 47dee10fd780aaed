# SPDX-License-Identifier: Apache-2.0
"""bfloat16 without ml_dtypes: TypedArrays through the fronts give the bits of PyTorch's tensors."""

from __future__ import annotations

import numpy as np
import pytest
from frames import round_bf16

import octavo
from octavo.compat import flash_attn, flashinfer
from octavo.compat import transformer_engine as engine

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def pair():
    """A bfloat16 array of a shape, as a TypedArray and as a tensor over other memory."""
    random = np.random.default_rng(0)

    def make(*shape):
        bits = round_bf16(random.standard_normal(shape))
        tensor = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
        return octavo.TypedArray(bits, "bf16"), tensor

    return make


def same(typed, tensor):
    assert isinstance(typed, octavo.TypedArray)
    assert typed.dtype == "bf16"
    bits = tensor.view(torch.int16).numpy()
    assert np.array_equal(typed.array.view(np.int16), bits)


def test_flash_attn(pair):
    arrays = [
        pair(*s) for s in ((2, 1, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), (2, 1, 2, 8), (2, 1, 2, 8))
    ]
    outs = [
        flash_attn.flash_attn_with_kvcache(*(a[i] for a in arrays), cache_seqlens=3) for i in (0, 1)
    ]
    same(*outs)
    same(*arrays[1])
    cu = np.array([0, 2, 6], np.int32)
    arrays = [pair(6, 4, 8), pair(6, 2, 8), pair(6, 2, 8)]
    same(
        flash_attn.flash_attn_varlen_func(*(a[0] for a in arrays), cu, cu, 4, 4, causal=True),
        flash_attn.flash_attn_varlen_func(
            *(a[1] for a in arrays), *(torch.from_numpy(cu),) * 2, 4, 4, causal=True
        ),
    )


def test_flashinfer(pair):
    q, pages = pair(1, 4, 8), pair(2, 2, 4, 2, 8)
    outs = []
    for i in (0, 1):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
        wrapper.plan([0, 2], [1, 0], [2], 4, 2, 8, 4, q_data_type="bfloat16")
        outs.append(wrapper.run(q[i], pages[i], v_scale=0.5))
    same(*outs)
    states = [pair(3, 2, 8) for _ in range(2)]
    lse = np.zeros((3, 2), np.float32)
    same(
        flashinfer.merge_state(states[0][0], lse, states[1][0], lse)[0],
        flashinfer.merge_state(
            states[0][1], torch.from_numpy(lse), states[1][1], torch.from_numpy(lse)
        )[0],
    )


def test_transformer_engine(pair):
    arrays = [pair(1, 3, 4, 8), pair(1, 3, 2, 8), pair(1, 3, 2, 8)]
    module = engine.DotProductAttention(
        4, 8, 2, qkv_format="bshd", attn_mask_type="padding_causal"
    ).eval()
    outs = []
    for i, dtype in enumerate(("bf16", torch.bfloat16)):
        params = engine.InferenceParams(1, 8, 2, 8, dtype, device="cpu")
        params.allocate_memory(1)
        params.pre_step({1: 3})
        outs.append(module(*(a[i] for a in arrays), inference_params=params))
    same(*outs)
    assert outs[0].shape == (1, 3, 32)
    same(*(module(*(a[i] for a in arrays), attn_mask_type="causal") for i in (0, 1)))
