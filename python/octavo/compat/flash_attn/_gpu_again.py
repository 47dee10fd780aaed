# SPDX-License-Identifier: Apache-2.0
"""Calls on a GPU that are like an earlier one: what that one checked and worked out is kept.

What a call's course follows from is its kind: shapes, strides, dtypes and places of its tensors,
and its plain words. Nobody looks at what is in the tensors, so a call of a known kind needs its
tensors handed on and nothing else.
"""

from __future__ import annotations

from octavo._native import _kind_of_call as kind_of_call

from .. import _gpu as gpu
from .. import _gpu_call


def kind_of_cache_call(call):
    if (
        call.rotary_seqlens is not None
        or call.cache_leftpad is not None
        or call.cu_seqlens_k_new is not None
        or not _is_plain(call.arithmetic)
    ):
        return None
    return kind_of_call("flash_attn_with_kvcache", call)


def kind_of_ragged_call(call):
    if call.seqused_q is not None or not _is_plain(call.arithmetic):
        return None
    return kind_of_call("flash_attn_varlen_func", call)


def kind_of_dense_call(q, k, v, maths):
    return kind_of_call("flash_attn_func", q, k, v, maths) if _is_plain(maths) else None


def _is_plain(maths):
    slopes = maths.alibi_slopes
    return maths.descales is None and (slopes is None or len(slopes.shape) == 1)


class Again:
    """How a call of its kind goes. offsets, lens, table: kept if they are not the call's own."""

    def __init__(self, call, queries, out, lse, *, offsets=None, lens=None, table=None):
        self._call = _gpu_call.CallAgain(
            call.space.workspace, packed=table is not None, **call.words()
        )
        self._empty_like = gpu.torch().empty_like
        q = queries.tensor
        like_q = out.shape == q.shape and q.is_contiguous()
        self._like_out = None if like_q else gpu.likeness(out.shape, out.dtype, out.device)
        self._like_lse, self._settle = None, None
        if lse is not None:
            self._lse_of(queries, lse)
        self.offsets, self.lens, self.table = offsets, lens, table
        self.new_counts = self._longer = None

    def _lse_of(self, queries, lse):
        """The library writes into a tensor of FlashAttention's shape, where strides lead to it."""
        heads = lse.shape[1]
        form = queries.format, queries.num_seqs, queries.most
        if queries.format == "thd":
            shape, axes = (heads, lse.shape[0]), (1, 0)
        elif queries.most == 1:
            shape, axes = (queries.num_seqs, heads, 1), (0, 1)
        elif queries.num_seqs == 1:
            shape, axes = (1, heads, queries.most), (2, 1)
        else:
            shape, axes, self._settle = lse.shape, (0, 1), form
        self._call.set_lse_axes(*axes)
        self._like_lse = gpu.likeness(shape, lse.dtype, lse.device)

    def append_too(self, new, most, same_step):
        """The calls bring new keys; most: keys of one sequence with them."""
        # A tensor: PyTorch adds a number at more than twice the cost.
        self.new_counts = gpu.full(new.k.shape[0], new.most, new.k.device)
        with gpu.torch().inference_mode(False):  # or later calls outside of it might not write
            self._longer = gpu.torch().empty_like(self.new_counts)
        self._call.append_too(new.format, new.offsets, new.most, most, same_step)

    def with_new(self, lens):
        """The lengths with the new keys: one tensor for all calls, which follow each other."""
        return gpu.torch().add(lens, self.new_counts, out=self._longer)

    def rotate(self, style):
        """The calls bring tables to rotate by."""
        self._call.rotate(style)

    def run(
        self,
        stream,
        q,
        k,
        v,
        lens,
        offsets,
        table,
        rows,
        maths,
        cos=None,
        sin=None,
        new_k=None,
        new_v=None,
    ):
        """(out, LSE or None), as FlashAttention gives them."""
        out = self._empty_like(q if self._like_out is None else self._like_out)
        lse = None if self._like_lse is None else self._empty_like(self._like_lse)
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
            cos,
            sin,
            new_k,
            new_v,
            False,
            stream,
        )
        if self._settle is not None:
            lse = their_lse(lse, *self._settle)
        return out, lse


def with_kvcache_again(again, stream, call):
    q, k_cache, v_cache, k, v, cos, sin, _, _, lens, rows, _, table, offsets, _, _, maths = call
    if again.new_counts is None:
        k = v = None
    if again.lens is not None:
        lens = again.lens
    elif again.new_counts is not None:
        lens = again.with_new(lens)
    if again.offsets is not None:
        offsets = again.offsets
    results = again.run(
        stream, q, k_cache, v_cache, lens, offsets, table, rows, maths, cos, sin, k, v
    )
    return results if maths.want_lse else results[0]


def varlen_again(again, stream, call):
    ends, lens, table, rows = call.cu_seqlens_k, call.seqused_k, call.page_table, None
    if lens is None:
        lens = ends.diff()
    if table is None:
        table, rows = again.table, ends
    return again.run(
        stream, call.q, call.k, call.v, lens, call.cu_seqlens_q, table, rows, call.arithmetic
    )


def their_lse(lse, format, num_seqs, most):
    """The library's LSE as [Hq, T], or [B, Hq, Lq], dense."""
    if lse is None:
        return None
    if format == "thd":
        return lse.t().contiguous()
    if most == 1:
        return lse.unsqueeze(-1)
    return lse.view(num_seqs, most, -1).transpose(1, 2).contiguous()
