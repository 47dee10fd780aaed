# SPDX-License-Identifier: Apache-2.0
"""The FlashAttention fronts on a GPU beside PyTorch's scaled_dot_product_attention, at the sizes of
models: the error against float64 is at most twice PyTorch's in the same dtype.
"""

from __future__ import annotations

import pytest

from gpus import torch_on_a_gpu
from octavo.compat import flash_attn

DENSE = [  # batch, q_len, kv_len, query heads, KV heads, head dim, causal
    (2, 128, 128, 8, 8, 64, True),
    (2, 1, 1000, 32, 8, 128, False),
    (1, 1000, 1000, 8, 2, 128, True),
    (1, 2048, 2048, 16, 4, 64, True),
    (3, 17, 333, 6, 2, 64, True),
    (2, 64, 64, 4, 4, 256, False),
    (2, 200, 200, 4, 1, 96, True),
    (1, 300, 700, 4, 2, 32, False),
]


@pytest.fixture(autouse=True)
def torch():
    torch = torch_on_a_gpu()
    torch.manual_seed(11)
    return torch


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(torch, request):
    return getattr(torch, request.param)


def draw(torch, dtype, *shape):
    return torch.randn(shape, device="cuda").to(dtype)


def definition(torch, q, k, v, causal):
    """(out, lse) in float64 of q [L, H, D]: the mask aligned to the bottom right."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen(torch, q.shape[1], k.shape[1], causal), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def seen(torch, q_len, kv_len, causal):
    mask = torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda")
    return mask.tril(kv_len - q_len) if causal else mask


def pytorchs(torch, q, k, v, causal):
    """The same by PyTorch, in q's dtype."""
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        attn_mask=seen(torch, q.shape[0], k.shape[0], causal),
        enable_gqa=True,
    )[0].transpose(0, 1)


def check(torch, got, got_lse, q, k, v, causal):
    want, want_lse = definition(torch, q, k, v, causal)
    theirs = (pytorchs(torch, q, k, v, causal).double() - want).abs().max().item()
    mine = (got.double() - want).abs().max().item()
    assert mine <= 2 * theirs + 1e-5, f"off by {mine:.3g}, PyTorch by {theirs:.3g}"
    torch.testing.assert_close(got_lse.double(), want_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("sizes", DENSE, ids=str)
def test_dense(torch, dtype, sizes):
    batch, q_len, kv_len, hq, hk, dim, causal = sizes
    q = draw(torch, dtype, batch, q_len, hq, dim)
    k, v = (draw(torch, dtype, batch, kv_len, hk, dim) for _ in range(2))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    for b in range(batch):
        check(torch, out[b], lse[b], q[b], k[b], v[b], causal)


@pytest.mark.parametrize("causal", [False, True])
def test_ragged(torch, dtype, causal):
    q_lens, kv_lens = [1, 130, 64, 517, 16], [300, 130, 65, 900, 16]
    q = draw(torch, dtype, sum(q_lens), 8, 128)
    k, v = (draw(torch, dtype, sum(kv_lens), 2, 128) for _ in range(2))
    ends = [
        torch.tensor([0, *x], device="cuda").cumsum(0).to(torch.int32) for x in (q_lens, kv_lens)
    ]
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, *ends, max(q_lens), max(kv_lens), causal=causal, return_attn_probs=True
    )
    first = first_k = 0
    for n, m in zip(q_lens, kv_lens, strict=True):
        mine, keys = slice(first, first + n), slice(first_k, first_k + m)
        check(torch, out[mine], lse[:, mine], q[mine], k[keys], v[keys], causal)
        first, first_k = first + n, first_k + m


@pytest.mark.parametrize("new", [1, 3, 40])
@pytest.mark.parametrize("page_size", [16, 256])
def test_append_and_attend_over_pages(torch, dtype, page_size, new):
    lens, width = [5, 1000, 63, 64, 0], 1280 // page_size
    pool = [draw(torch, dtype, 5 * width + 1, page_size, 2, 128) for _ in range(2)]
    table = torch.randperm(5 * width + 1, device="cuda")[: 5 * width].view(5, width)
    table = table.to(torch.int32)
    q = draw(torch, dtype, 5, new, 8, 128)
    k, v = (draw(torch, dtype, 5, new, 2, 128) for _ in range(2))
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        *pool,
        k,
        v,
        cache_seqlens=torch.tensor(lens, dtype=torch.int32, device="cuda"),
        block_table=table,
        causal=True,
        return_softmax_lse=True,
    )
    for b, n in enumerate(lens):
        keys, values = (x[table[b].long()].flatten(0, 1)[: n + new] for x in pool)
        assert torch.equal(keys[n:], k[b])
        assert torch.equal(values[n:], v[b])
        check(torch, out[b], lse[b], q[b], keys, values, True)
