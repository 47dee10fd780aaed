# SPDX-License-Identifier: Apache-2.0
"""Calls on a GPU that are like an earlier one: what that one checked and worked out is kept.

What a call's course follows from is its kind: shapes, strides, dtypes and places of its tensors,
and its plain words. Nobody looks at what is in the tensors, so a call of a known kind needs its
tensors handed on and nothing else.
"""

from __future__ import annotations

import octavo
from octavo._native import _kind_of_call as kind_of_call

from .. import _gpu as gpu
from .. import _gpu_call


def kind_of_cache_call(call):
    maths, lens = call.arithmetic, call.cache_seqlens
    given = (call.rotary_seqlens, call.cache_leftpad, call.cu_seqlens_k_new, maths.descales)
    if given != (None, None, None, None):
        return None
    known = lens if type(lens) is int else None
    words = (known, call.rotary_interleaved, call.max_seqlen_q)
    return _kind(
        "flash_attn_with_kvcache",
        maths,
        words,
        call.q,
        call.k_cache,
        call.v_cache,
        call.k,
        call.v,
        call.rotary_cos,
        call.rotary_sin,
        lens if known is None else None,
        call.cache_batch_idx,
        call.page_table,
        call.cu_seqlens_q,
    )


def kind_of_ragged_call(call):
    maths = call.arithmetic
    if call.seqused_q is not None or maths.descales is not None:
        return None
    return _kind(
        "flash_attn_varlen_func",
        maths,
        (call.max_seqlen_q, call.max_seqlen_k),
        call.q,
        call.k,
        call.v,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.seqused_k,
        call.page_table,
    )


def kind_of_dense_call(q, k, v, maths):
    return None if maths.descales is not None else _kind("flash_attn_func", maths, (), q, k, v)


def _kind(what, maths, words, *tensors):
    window, slopes = maths.window_size, maths.alibi_slopes
    if type(window) is not tuple or (slopes is not None and len(slopes.shape) == 2):
        return None
    plain = (what, *maths[:2], *window, maths.softcap, maths.want_lse, *words)
    return kind_of_call(plain, *tensors, maths.sinks, slopes)


class Again:
    """How a call of its kind goes. offsets, lens, table: kept if they are not the call's own."""

    def __init__(self, call, queries, out, lse, *, offsets=None, lens=None, table=None):
        self._call = _gpu_call.CallAgain(
            call.space.workspace, packed=table is not None, **call.words()
        )
        self._out, self._lse = out.shape, None if lse is None else lse.shape
        # The cheaper way to a new tensor.
        q = queries.tensor
        self._like_q = out.shape == q.shape and q.is_contiguous()
        self._float32 = gpu.torch().float32
        self._queries = (queries.format, queries.num_seqs, queries.most)
        self.offsets, self.lens, self.table = offsets, lens, table
        self.new_counts = None

    def append_too(self, new, most, same_step):
        """The calls bring new keys; most: keys of one sequence with them."""
        # A tensor: PyTorch adds a number at more than twice the cost.
        self.new_counts = gpu.full(new.k.shape[0], new.most, new.k.device)
        self._call.append_too(new.format, new.offsets, new.most, most, same_step)

    def run(self, q, k, v, lens, offsets, table, rows, maths, rope=None, new_k=None, new_v=None):
        """(out, LSE or None), as FlashAttention gives them."""
        out = gpu.torch().empty_like(q) if self._like_q else q.new_empty(self._out)
        lse = None if self._lse is None else q.new_empty(self._lse, dtype=self._float32)
        self._call.run(
            q,
            k,
            v,
            lens,
            offsets,
            table,
            rows,
            out,
            lse,
            maths.sinks,
            maths.alibi_slopes,
            rope,
            new_k,
            new_v,
        )
        return out, their_lse(lse, *self._queries)


def with_kvcache_again(again, call):
    lens, rope, new_k, new_v = again.lens, None, None, None
    if lens is None:
        lens = call.cache_seqlens
    if again.new_counts is not None:
        new_k, new_v = call.k, call.v
        if again.lens is None:
            lens = lens + again.new_counts
    if call.rotary_cos is not None:
        style = "interleaved" if call.rotary_interleaved else "half"
        rope = octavo.Rope(style, cos=call.rotary_cos, sin=call.rotary_sin)
    out, lse = again.run(
        call.q,
        call.k_cache,
        call.v_cache,
        lens,
        call.cu_seqlens_q if again.offsets is None else again.offsets,
        call.page_table,
        call.cache_batch_idx,
        call.arithmetic,
        rope,
        new_k,
        new_v,
    )
    return (out, lse) if call.arithmetic.want_lse else out


def varlen_again(again, call):
    ends, lens, table, rows = call.cu_seqlens_k, call.seqused_k, call.page_table, None
    if lens is None:
        lens = ends.diff()
    if table is None:
        table, rows = again.table, ends
    return again.run(call.q, call.k, call.v, lens, call.cu_seqlens_q, table, rows, call.arithmetic)


def their_lse(lse, format, num_seqs, most):
    """The library's LSE as [Hq, T], or [B, Hq, Lq], dense."""
    if lse is None:
        return None
    if format == "thd":
        return lse.t().contiguous()
    if most == 1:
        return lse.unsqueeze(-1)
    return lse.view(num_seqs, most, -1).transpose(1, 2).contiguous()
