# SPDX-License-Identifier: Apache-2.0
"""Parts of the FlashAttention fronts' calls on a GPU: queries, new keys, rotation, left padding."""

from __future__ import annotations

import octavo

from .. import _gpu as gpu
from .._arrays import not_covered
from .._gpu_call import Call
from . import _core as core


class Queries:
    """The queries of a call and how they are packed."""

    def __init__(self, q, cu_seqlens, longest):
        self.tensor = q
        if cu_seqlens is None:
            self.format, self.num_seqs = "bshd", q.shape[0]
            self.most = q.shape[1]
            self.offsets = gpu.steps(0, self.most, self.num_seqs + 1, q.device)
            if self.most == 0:
                self.offsets = gpu.full(self.num_seqs + 1, 0, q.device)
        else:
            self.format = "thd"
            self.offsets = gpu.ints(cu_seqlens, "cu_seqlens_q", q.device)
            self.num_seqs = self.offsets.shape[0] - 1
            self.most = 0 if longest is None else int(longest)

    def per_token(self, values):
        """values [B, ...] for each token, with the token axes of q."""
        if self.format == "bshd":
            return values[:, None].expand(-1, self.most, *values.shape[1:])
        if not self.num_seqs:  # tokens of nobody
            return values.new_zeros((self.tensor.shape[0], *values.shape[1:]))
        return values[gpu.owners(self.offsets, self.tensor.shape[0])]

    def places(self, starts):
        """int32 [T], packed: starts[b], starts[b] + 1, ... for the tokens of each sequence."""
        if self.format == "bshd":
            ramp = gpu.steps(0, 1, self.most, starts.device)
            return (starts[:, None] + ramp).reshape(-1)
        tokens = gpu.steps(0, 1, self.tensor.shape[0], starts.device)
        return tokens + self.per_token(starts - self.offsets[:-1])


def results_of(queries, keys, want_lse):
    """New (out, the LSE in the library's shape or None)."""
    q = queries.tensor
    out = q.new_empty((*q.shape[:-1], keys.v.shape[-1]))
    if not want_lse:
        return out, None
    tokens = out.shape[0] if queries.format == "thd" else out.shape[0] * out.shape[1]
    return out, q.new_empty((tokens, q.shape[-2]), dtype=gpu.torch().float32)


def call_of(what, queries, keys, options, out, lse, kind, new=None):
    return Call(
        what,
        queries.tensor,
        keys,
        queries.offsets,
        options,
        format=queries.format,
        lse=lse,
        out=out,
        most=queries.most,
        kind=kind,
        new=new,
    )


class New:
    """New keys and values, to be written behind `past`; keys: among which."""

    keys = None

    def __init__(self, k, v, past, cu_seqlens, device):
        self.k, self.v = k, v
        self.format = "bshd" if cu_seqlens is None else "thd"
        if cu_seqlens is None:
            self.most = k.shape[1]
            self.offsets = gpu.steps(0, max(self.most, 1), past.shape[0] + 1, device)
            self.lens = past + self.most
        else:
            self.most = 0
            self.offsets = gpu.ints(cu_seqlens, "cu_seqlens_k_new", device, past.shape[0] + 1)
            self.lens = past + core.lengths(self.offsets)

    def places(self, starts):
        return Queries(self.k, None if self.format == "bshd" else self.offsets, None).places(starts)


def rope_of(cos, sin, interleaved):
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.dim() != 2 or table.shape != cos.shape:
            raise ValueError(
                f"{name}: wanted [positions, rotary_dim / 2], both alike, got {list(table.shape)}"
            )
    tables = [gpu.floats(x, "rotary_cos", cos.device) for x in (cos, sin)]
    return octavo.Rope(rope_style(interleaved), cos=tables[0], sin=tables[1])


def rope_style(interleaved):
    return "interleaved" if interleaved else "half"


def within_tables(keys, num_positions):
    """The same keys, at most as many as rotary tables have rows. A row of pages may hold more, so
    that this bound is what the tables have to serve; longer sequences are wrong lengths.
    """
    if keys.max_kv_len > num_positions:
        raise ValueError(
            f"rotary_cos: wanted rows for positions up to {keys.max_kv_len - 1}, "
            f"got {num_positions}"
        )
    if keys.max_kv_len or num_positions >= keys.capacity:
        return keys
    return keys._replace(max_kv_len=num_positions)


def skip_left(keys, leftpad, b):
    """The same keys without the first leftpad[b] slots of each sequence, as pages of one token."""
    t = gpu.torch()
    device = keys.k.device
    pad = gpu.ints(leftpad, "cache_leftpad", device, b)
    lens = (keys.kv_lens - pad).clamp_(min=0)
    rows = gpu.steps(0, 1, b, device) if keys.rows is None else keys.rows
    page_size = keys.k.shape[1]
    slots = pad[:, None] + gpu.steps(0, 1, keys.max_kv_len or keys.capacity, device)
    there = (slots >= 0) & (slots < keys.capacity)
    if keys.page_table is None:
        pages, within = rows[:, None].expand_as(slots), slots
    else:
        num_rows, width = keys.page_table.shape
        if b and not num_rows:
            raise ValueError(f"block_table: wanted a row for each of {b} sequences, got none")
        there &= ((rows >= 0) & (rows < num_rows))[:, None]
        table = keys.page_table[rows.clamp(0, num_rows - 1).long()]
        pages = t.take_along_dim(table, (slots // page_size).clamp_(0, width - 1).long(), 1)
        within = slots % page_size
    flat = [_flat(x, name) for x, name in ((keys.k, "k_cache"), (keys.v, "v_cache"))]
    if flat[0][1] != flat[1][1]:
        raise not_covered("cache_leftpad", "wanted k_cache and v_cache of alike strides")
    # What lies outside of the cache stays outside, so that the planning finds it.
    there &= (pages >= 0) & (pages < keys.k.shape[0])
    where = t.where(there, pages * flat[0][1] + within, -1).to(t.int32).contiguous()
    return gpu.Keys(flat[0][0], flat[1][0], lens, where, None, keys.max_kv_len)


def _flat(x, name):
    """A cache [N, P, H, D] as ([slots, 1, H, D], step): slot s of page n is slot n * step + s."""
    pages, slots = x.shape[:2]
    page_stride, slot_stride = x.stride()[:2]
    step = slots
    if pages > 1:
        step = page_stride // slot_stride if slot_stride else 0
        if step <= 0 or step * slot_stride != page_stride:
            raise not_covered(f"strides of {name}", "wanted pages a whole number of slots apart")
    total = (pages - 1) * step + slots if pages else 0
    strides = (slot_stride, slot_stride, *x.stride()[2:])
    return x.as_strided((total, 1, *x.shape[2:]), strides), step
