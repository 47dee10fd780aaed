# SPDX-License-Identifier: Apache-2.0
"""The FlashAttention fronts' calls for tensors on a GPU. Lengths stay there: none is read back."""

from __future__ import annotations

import numpy as np

import octavo

from .. import _gpu as gpu
from .._arrays import not_covered
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
        return values[gpu.owners(self.offsets, self.tensor.shape[0])]

    def places(self, starts):
        """int32 [T], packed: starts[b], starts[b] + 1, ... for the tokens of each sequence."""
        if self.format == "bshd":
            ramp = gpu.steps(0, 1, self.most, starts.device)
            return (starts[:, None] + ramp).reshape(-1)
        tokens = gpu.steps(0, 1, self.tensor.shape[0], starts.device)
        return tokens + self.per_token(starts - self.offsets[:-1])


def _options(queries, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks):
    q = queries.tensor
    heads = q.shape[-2]
    plain = core.options(softmax_scale, causal, window_size, softcap, None, heads)
    if sinks is not None:
        sinks = gpu.floats(sinks, "sinks", q.device, (heads,))
    if alibi_slopes is not None:
        if len(alibi_slopes.shape) == 2:
            raise not_covered("alibi_slopes [batch, heads] on a GPU", "[heads] are")
        alibi_slopes = gpu.floats(alibi_slopes, "alibi_slopes", q.device, (heads,))
    return gpu.Options(
        plain.softmax_scale, plain.mask, plain.window, plain.softcap, sinks, alibi_slopes
    )


def _descale(queries, descales, num_kv_heads):
    """Multiplies the queries by the scales of Q and K; returns the scales of V for the output."""
    if descales is None:
        return None
    q = queries.tensor
    shape = (queries.num_seqs, num_kv_heads)
    of_q, of_k, of_v = (
        None if x is None else gpu.floats(x, name, q.device, shape)
        for x, name in zip(descales, ("q_descale", "k_descale", "v_descale"), strict=True)
    )
    group = q.shape[-2] // num_kv_heads

    def per_token(factors):
        return queries.per_token(factors.repeat_interleave(group, dim=1)).unsqueeze(-1)

    for factors in (of_q, of_k):
        if factors is not None:
            queries.tensor = (queries.tensor.float() * per_token(factors)).to(q.dtype)
    return None if of_v is None else per_token(of_v)


def _results(queries, keys, want_lse):
    """New (out, the LSE in the library's shape or None)."""
    q = queries.tensor
    out = q.new_empty((*q.shape[:-1], keys.v.shape[-1]))
    if not want_lse:
        return out, None
    tokens = out.shape[0] if queries.format == "thd" else out.shape[0] * out.shape[1]
    return out, q.new_empty((tokens, q.shape[-2]), dtype=gpu.torch().float32)


def _their_lse(queries, lse):
    """[Hq, T], or [B, Hq, Lq], dense."""
    if lse is None:
        return None
    if queries.format == "thd":
        return lse.t().contiguous()
    return lse.view(queries.num_seqs, queries.most, -1).transpose(1, 2).contiguous()


def _nothing_to_do(queries, keys):
    return queries.num_seqs == 0 or queries.tensor.numel() == 0 or keys.k.numel() == 0


def _empty(queries, keys, want_lse):
    """What attention over no key gives."""
    out, lse = _results(queries, keys, want_lse)
    out.zero_()
    return out, None if lse is None else _their_lse(queries, lse.fill_(-np.inf))


def _attend(what, queries, keys, options, v_scale, want_lse):
    if _nothing_to_do(queries, keys):
        return _empty(queries, keys, want_lse)
    out, lse = _results(queries, keys, want_lse)
    call = _call(what, queries, keys, options, out, lse)
    call.plan()
    call.attend()
    return _finish(queries, out, lse, v_scale)


def _call(what, queries, keys, options, out, lse):
    return gpu.Call(
        what,
        queries.tensor,
        keys,
        queries.offsets,
        options,
        format=queries.format,
        lse=lse,
        out=out,
        most=queries.most,
    )


def _finish(queries, out, lse, v_scale):
    if v_scale is not None:
        out.copy_(out.float() * v_scale)
    return out, _their_lse(queries, lse)


class New:
    """New keys and values, to be written behind `past`."""

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


def _rope(cos, sin, interleaved):
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.dim() != 2 or table.shape != cos.shape:
            raise ValueError(
                f"{name}: wanted [positions, rotary_dim / 2], both alike, got {list(table.shape)}"
            )
    tables = [gpu.floats(x, "rotary_cos", cos.device) for x in (cos, sin)]
    return octavo.Rope("interleaved" if interleaved else "half", cos=tables[0], sin=tables[1])


def with_kvcache(
    q,
    k_cache,
    v_cache,
    k,
    v,
    *,
    rotary_cos,
    rotary_sin,
    rotary_interleaved,
    rotary_seqlens,
    cache_seqlens,
    cache_batch_idx,
    cache_leftpad,
    page_table,
    cu_seqlens_q,
    cu_seqlens_k_new,
    max_seqlen_q,
    softmax_scale,
    causal,
    window_size,
    softcap,
    alibi_slopes,
    sinks,
    descales,
    return_softmax_lse,
):
    device = q.device
    gpu.check_tensors(q, q=q, k_cache=k_cache, v_cache=v_cache)
    queries = Queries(q, cu_seqlens_q, max_seqlen_q)
    b = queries.num_seqs
    table = None if page_table is None else gpu.table_of(page_table, "page_table", device)
    rows = None
    if cache_batch_idx is not None:
        rows = gpu.ints(cache_batch_idx, "cache_batch_idx", device, b)
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    past, most = _lengths_before(cache_seqlens, k, b, capacity, device)
    keys = gpu.Keys(k_cache, v_cache, past, table, rows, most)
    core.check_heads(q, k_cache)
    options = _options(queries, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    new = None
    if k is not None:
        gpu.check_tensors(q, k=k, v=v)
        new = New(k, v, past, cu_seqlens_k_new, device)
        most = min(most + new.most, capacity) if most and new.format == "bshd" else 0
        keys = keys._replace(kv_lens=new.lens, max_kv_len=most)
    rope = places = None
    if rotary_cos is not None:
        gpu.check_tensors(q, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
        rope = _rope(rotary_cos, rotary_sin, rotary_interleaved)
        starts = past
        if rotary_seqlens is not None:
            starts = gpu.ints(rotary_seqlens, "rotary_seqlens", device, b)
        places = new.places(starts)
        # As in FlashAttention: without causal mask and window all queries stand at the first place.
        if causal or options.window != (-1, -1):
            options = options._replace(rope=rope, positions=queries.places(starts))
        else:
            at_first = queries.per_token(starts).reshape(-1).contiguous()
            options = options._replace(rope=rope, positions=at_first)
    read = keys if cache_leftpad is None else _skip_left(keys, cache_leftpad, b)
    v_scale = _descale(queries, descales, k_cache.shape[-2])
    if _nothing_to_do(queries, read) and (new is None or new.k.numel() == 0):
        results = _empty(queries, read, return_softmax_lse)
    else:
        out, lse = _results(queries, read, return_softmax_lse)
        call = _call("flash_attn_with_kvcache", queries, read, options, out, lse)
        planned = False
        if new is not None and new.k.numel():
            call.append(k, v, keys, new.offsets, new.format, new.most, rope, places)
            planned = _same_step(new, queries, read is keys)
        if not planned:
            call.plan()
        call.attend()
        results = _finish(queries, out, lse, v_scale)
    return results if return_softmax_lse else results[0]


def _lengths_before(cache_seqlens, k, b, capacity, device):
    """(the lengths, the most as far as the host knows it: 0 is what a row holds)."""
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens: wanted the lengths before the new k and v, got None")
        return gpu.full(b, capacity, device), 0
    if isinstance(cache_seqlens, (int, np.integer)):
        return gpu.full(b, int(cache_seqlens), device), int(cache_seqlens)
    return gpu.ints(cache_seqlens, "cache_seqlens", device, b), 0


def _same_step(new, queries, same_keys):
    """Whether the plan of the new keys is that of the queries: kept arrays are the same tensors."""
    return (
        same_keys
        and new.format == queries.format == "bshd"
        and new.most == queries.most
        and new.offsets is queries.offsets
    )


def _skip_left(keys, leftpad, b):
    """The same keys without the first leftpad[b] slots of each sequence, as pages of one token."""
    t = gpu.torch()
    device = keys.k.device
    pad = gpu.ints(leftpad, "cache_leftpad", device, b)
    lens = (keys.kv_lens - pad).clamp_(min=0)
    rows = gpu.steps(0, 1, b, device) if keys.rows is None else keys.rows
    page_size = keys.k.shape[1]
    slots = pad[:, None] + gpu.steps(0, 1, keys.max_kv_len or keys.capacity, device)
    slots = slots.clamp_(0, max(keys.capacity - 1, 0))
    if keys.page_table is None:
        pages, within = rows[:, None].expand_as(slots), slots
    else:
        table = keys.page_table[rows.long().clamp_(0, keys.page_table.shape[0] - 1)]
        pages = t.take_along_dim(table, (slots // page_size).long(), 1)
        within = slots % page_size
    flat = [_flat(x, name) for x, name in ((keys.k, "k_cache"), (keys.v, "v_cache"))]
    if flat[0][1] != flat[1][1]:
        raise not_covered("cache_leftpad", "wanted k_cache and v_cache of alike strides")
    # A page outside the pool stays outside, so that it is found.
    where = t.where(
        (pages >= 0) & (pages < keys.k.shape[0]),
        pages * flat[0][1] + within,
        t.full_like(pages, -1),
    )
    return gpu.Keys(
        flat[0][0], flat[1][0], lens, where.to(t.int32).contiguous(), None, keys.max_kv_len
    )


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


def varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q,
    seqused_k,
    page_table,
    softmax_scale,
    causal,
    window_size,
    softcap,
    alibi_slopes,
    sinks,
    descales,
    want_lse,
):
    device = q.device
    gpu.check_tensors(q, q=q, k=k, v=v)
    queries = Queries(q, cu_seqlens_q, max_seqlen_q)
    b = queries.num_seqs
    used = None if seqused_k is None else gpu.ints(seqused_k, "seqused_k", device, b)
    ends = None if cu_seqlens_k is None else gpu.ints(cu_seqlens_k, "cu_seqlens_k", device, b + 1)
    if used is None and ends is None:
        raise ValueError("cu_seqlens_k: wanted it or seqused_k, got neither")
    lens = core.lengths(ends) if used is None else used
    longest = None if max_seqlen_k is None else int(max_seqlen_k)
    if page_table is not None:
        table = gpu.table_of(page_table, "block_table", device)
        most = 0 if longest is None else min(max(longest, 1), table.shape[1] * k.shape[1])
        keys = gpu.Keys(k, v, lens, table, None, most)
    elif ends is None:
        raise ValueError("cu_seqlens_k: wanted where each sequence starts, got None")
    else:
        keys = gpu.packed_keys(k, v, ends[:-1], lens, k.shape[0] if longest is None else longest)
    options = _options(queries, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    v_scale = _descale(queries, descales, k.shape[-2])
    if seqused_q is not None:
        return _partly_used(queries, keys, options, want_lse, v_scale, seqused_q)
    return _attend("flash_attn_varlen_func", queries, keys, options, v_scale, want_lse)


def _partly_used(queries, keys, options, want_lse, v_scale, seqused_q):
    """The first seqused_q[b] queries of each sequence; the others' rows are 0 and -inf.

    By way of [B, L], whose rows may be padding in every sequence.
    """
    t = gpu.torch()
    q, b = queries.tensor, queries.num_seqs
    if not q.shape[0] or not b:
        return _empty(queries, keys, want_lse)
    longest = queries.most or q.shape[0]
    counts = gpu.ints(seqused_q, "seqused_q", q.device, b)
    offsets = t.zeros(b + 1, dtype=t.int32, device=q.device)
    offsets[1:] = counts.cumsum(0)
    ramp = gpu.steps(0, 1, longest, q.device)
    index = (queries.offsets[:-1, None] + ramp).clamp_(max=q.shape[0] - 1).long()
    padded = Queries(q[index], None, None)
    padded.offsets = offsets
    out, lse = _results(padded, keys, want_lse)
    call = _call("flash_attn_varlen_func", padded, keys, options, out, lse)
    call.plan()
    call.attend()
    mine = gpu.owners(queries.offsets, q.shape[0])
    within = gpu.steps(0, 1, q.shape[0], q.device) - queries.offsets[mine]
    used = within < counts[mine]
    rows = within.clamp(0, longest - 1).long()
    ours = out[mine, rows] * used[:, None, None]
    if v_scale is not None:
        ours = (ours.float() * v_scale).to(out.dtype)
    if not want_lse:
        return ours, None
    packed = (offsets[mine] + within).clamp(0, lse.shape[0] - 1).long()
    ours_lse = t.where(used[:, None], lse[packed], -np.inf)
    return ours, ours_lse.t().contiguous()


def dense(
    q, k, v, *, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, descales, want_lse
):
    gpu.check_tensors(q, q=q, k=k, v=v)
    queries = Queries(q, None, None)
    if k.shape[0] != queries.num_seqs:
        raise ValueError(f"k: wanted a batch of {queries.num_seqs}, as q, got {k.shape[0]}")
    length = k.shape[1]
    keys = gpu.Keys(k, v, gpu.full(queries.num_seqs, length, q.device), None, None, length)
    options = _options(queries, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    v_scale = _descale(queries, descales, k.shape[-2])
    return _attend("flash_attn_func", queries, keys, options, v_scale, want_lse)
