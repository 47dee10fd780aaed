# SPDX-License-Identifier: Apache-2.0
"""The FlashAttention fronts' calls for tensors on a GPU. Lengths stay there: none is read back."""

from __future__ import annotations

import numpy as np

from .. import _gpu as gpu
from .._arrays import framework
from .._gpu_call import Options
from .._gpu_merge import checked_lse, merge
from . import _core as core
from ._given import Arithmetic, CacheCall, RaggedCall
from ._gpu_again import (
    Again,
    kind_of_cache_call,
    kind_of_dense_call,
    kind_of_ragged_call,
    their_lse,
    varlen_again,
    with_kvcache_again,
)
from ._gpu_each import attend_each, check_each, each_its_own, first_of
from ._gpu_parts import New, Queries, rope_of, rope_style, skip_left, within_tables
from ._gpu_parts import call_of as _call
from ._gpu_parts import results_of as _results


def _options(queries, maths):
    q = queries.tensor
    heads = q.shape[-2]
    sinks, alibi_slopes = maths.sinks, maths.alibi_slopes
    if sinks is not None:
        sinks = gpu.floats(sinks, "sinks", q.device, (heads,))
    if alibi_slopes is not None:
        shape = (heads,) if len(alibi_slopes.shape) == 1 else (queries.num_seqs, heads)
        alibi_slopes = gpu.floats(alibi_slopes, "alibi_slopes", q.device, shape)
    return Options(*core.plain_options(maths), sinks, alibi_slopes)


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

    of_logits = of_q if of_k is None else of_k if of_q is None else of_q * of_k
    if of_logits is not None:  # rounded once
        queries.tensor = (q.float() * per_token(of_logits)).to(q.dtype)
    return None if of_v is None else per_token(of_v)


def _packing(queries):
    return queries.format, queries.num_seqs, queries.most


def _nothing_to_do(queries, keys):
    return queries.num_seqs == 0 or queries.tensor.numel() == 0 or keys.k.numel() == 0


def _empty(queries, keys, want_lse):
    """What attention over no key gives."""
    out, lse = _results(queries, keys, want_lse)
    out.zero_()
    return out, None if lse is None else their_lse(lse.fill_(-np.inf), *_packing(queries))


def _attend(what, queries, keys, options, v_scale, maths, kind, **kept):
    """kind: of the call, None unless its tensors go to the library as they are, but for those kept
    for the next call like it.
    """
    if _nothing_to_do(queries, keys):
        return _empty(queries, keys, maths.want_lse)
    if each_its_own(options):
        out, lse = attend_each(what, queries, keys, options, maths.want_lse)
        return _finish(queries, out, lse, v_scale)
    out, lse = _results(queries, keys, maths.want_lse)
    call = _call(what, queries, keys, options, out, lse, kind)
    if kind is not None:
        call.space.again = Again(call, queries, out, lse, **kept)
    call.plan()
    call.attend()
    return _finish(queries, out, lse, v_scale)


def _as_is(maths, options, *pairs):
    """Whether what goes to the library is what was given, or made of nothing given."""
    pairs += ((options.sinks, maths.sinks), (options.alibi_slopes, maths.alibi_slopes))
    return all(given is None or used is given for used, given in pairs)


def _finish(queries, out, lse, v_scale):
    if v_scale is not None:
        out.copy_(out.float() * v_scale)
    return out, their_lse(lse, *_packing(queries))


def with_kvcache(call: CacheCall):
    device, maths = call.q.device, call.arithmetic
    kind = kind_of_cache_call(call)
    again, stream = gpu.spaces.again(device, kind)
    if again is not None:
        return with_kvcache_again(again, stream, call)
    core.check_pairs(call)
    q, k_cache, v_cache = gpu.checked(call.q, q=call.q, k_cache=call.k_cache, v_cache=call.v_cache)
    queries = Queries(q, call.cu_seqlens_q, call.max_seqlen_q)
    b = queries.num_seqs
    table = None if call.page_table is None else gpu.table_of(call.page_table, "page_table", device)
    rows = None
    if call.cache_batch_idx is not None:
        rows = gpu.ints(call.cache_batch_idx, "cache_batch_idx", device, b)
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    past, most = _lengths_before(call, b, capacity, device)
    keys = gpu.Keys(k_cache, v_cache, past, table, rows, most)
    core.check_heads(q, k_cache)
    options = _options(queries, maths)
    new = None
    if call.k is not None:
        k, v = gpu.checked(q, k=call.k, v=call.v)
        new = New(k, v, past, call.cu_seqlens_k_new, device)
        most = most + new.most if most and new.format == "bshd" else 0
        keys = keys._replace(kv_lens=new.lens, max_kv_len=most)
    if most > capacity:
        raise ValueError(f"cache_seqlens: wanted at most {capacity} with new tokens, got {most}")
    rope = places = None
    if call.rotary_cos is not None:
        tables = gpu.checked(q, rotary_cos=call.rotary_cos, rotary_sin=call.rotary_sin)
        rope = rope_of(*tables, call.rotary_interleaved)
        starts = past
        if call.rotary_seqlens is None:
            keys = within_tables(keys, tables[0].shape[0])
        else:
            starts = gpu.ints(call.rotary_seqlens, "rotary_seqlens", device, b)
            places = new.places(starts)
        options = options._replace(
            rope=rope, positions=_query_places(call, queries, new, options, starts)
        )
    read = keys if call.cache_leftpad is None else skip_left(keys, call.cache_leftpad, b)
    v_scale = _descale(queries, maths.descales, k_cache.shape[-2])
    if _nothing_to_do(queries, read) and (new is None or new.k.numel() == 0):
        results = _empty(queries, read, maths.want_lse)
    else:
        out, lse = _results(queries, read, maths.want_lse)
        kind = _kept_kind(kind, call, queries, keys, past, options)
        one = first_of(options)  # of the sequences, for the append
        writes = new is not None and new.k.numel() > 0
        what, appended = "flash_attn_with_kvcache", new if writes else None
        if writes:
            new.keys = keys
        attend = _call(what, queries, read, one, out, lse, kind, appended)
        planned = writes and _same_step(new, queries, read is keys)
        if kind is not None:
            _keep(attend, call, queries, keys, appended, planned, out, lse)
        if writes:
            if each_its_own(options):
                check_each(what, queries, read, one, maths.want_lse)
            else:
                attend.check()
            attend.append(k, v, keys, new.offsets, new.format, new.most, rope, places)
        if each_its_own(options):
            out, lse = attend_each(what, queries, read, options, maths.want_lse)
        else:
            if not planned:
                attend.plan()
            attend.attend()
        results = _finish(queries, out, lse, v_scale)
    return results if maths.want_lse else results[0]


def _query_places(call, queries, new, options, starts):
    """Where queries stand for their rotation; None is where the library itself puts them."""
    # As in FlashAttention: without causal mask and window all stand at the first place.
    local = call.arithmetic.causal or options.window != (-1, -1)
    if (
        (local or queries.most == 1)
        and call.rotary_seqlens is None
        and call.cache_leftpad is None
        and queries.format == new.format == "bshd"
        and queries.most == new.most
    ):
        return None
    if local:
        return queries.places(starts)
    return queries.per_token(starts).reshape(-1).contiguous()


def _kept_kind(kind, call, queries, keys, past, options):
    """The kind of the call, if its tensors go to the library as they are."""
    lens = call.cache_seqlens if hasattr(call.cache_seqlens, "shape") else None
    as_is = options.positions is None and _as_is(
        call.arithmetic,
        options,
        (past, lens),
        (keys.page_table, call.page_table),
        (keys.rows, call.cache_batch_idx),
        (queries.offsets, call.cu_seqlens_q),
    )
    for table in (call.rotary_cos, call.rotary_sin):
        if table is not None:
            as_is &= table.dtype is gpu.torch().float32 and table.is_contiguous()
    return kind if as_is else None


def _keep(attend, call, queries, keys, new, planned, out, lse):
    """Keeps how the call goes, for those like it."""
    again = attend.space.again = Again(
        attend,
        queries,
        out,
        lse,
        offsets=None if queries.format == "thd" else queries.offsets,
        lens=None if hasattr(call.cache_seqlens, "shape") else keys.kv_lens,
    )
    if new is not None:
        again.append_too(new, keys.max_kv_len, planned)
    if call.rotary_cos is not None:
        again.rotate(rope_style(call.rotary_interleaved))


def _lengths_before(call, b, capacity, device):
    """(the lengths, the most as far as the host knows it: 0 is what a row holds)."""
    lens = call.cache_seqlens
    if lens is None:
        if call.k is not None:
            raise ValueError("cache_seqlens: wanted the lengths before the new k and v, got None")
        return gpu.full(b, capacity, device), 0
    if isinstance(lens, (int, np.integer)):
        return gpu.full(b, int(lens), device), int(lens)
    return gpu.ints(lens, "cache_seqlens", device, b), 0


def _same_step(new, queries, same_keys):
    """Whether the plan of the new keys is that of the queries: kept arrays are the same tensors."""
    return (
        same_keys
        and new.format == queries.format == "bshd"
        and new.most == queries.most
        and new.offsets is queries.offsets
    )


def varlen(call: RaggedCall):
    device, maths = call.q.device, call.arithmetic
    kind = kind_of_ragged_call(call)
    again, stream = gpu.spaces.again(device, kind)
    if again is not None:
        return varlen_again(again, stream, call)
    core.check_forward_only(framework(call.q), call.q, call.k, call.v)
    q, k, v = gpu.checked(call.q, q=call.q, k=call.k, v=call.v)
    queries = Queries(q, call.cu_seqlens_q, call.max_seqlen_q)
    b = queries.num_seqs
    used = None if call.seqused_k is None else gpu.ints(call.seqused_k, "seqused_k", device, b)
    ends = (
        None
        if call.cu_seqlens_k is None
        else gpu.ints(call.cu_seqlens_k, "cu_seqlens_k", device, b + 1)
    )
    if used is None and ends is None:
        raise ValueError("cu_seqlens_k: wanted it or seqused_k, got neither")
    lens = core.lengths(ends) if used is None else used
    if used is not None and ends is not None and call.page_table is None:
        # More than there are would be another sequence's: a length that the planning refuses.
        lens = gpu.torch().where(used > core.lengths(ends), -1, used)
    longest = None if call.max_seqlen_k is None else int(call.max_seqlen_k)
    if call.page_table is not None:
        table = gpu.table_of(call.page_table, "block_table", device)
        most = 0 if longest is None else min(max(longest, 1), table.shape[1] * k.shape[1])
        keys = gpu.Keys(k, v, lens, table, None, most)
    elif ends is None:
        raise ValueError("cu_seqlens_k: wanted where each sequence starts, got None")
    else:
        keys = gpu.packed_keys(k, v, ends[:-1], lens, k.shape[0] if longest is None else longest)
    options = _options(queries, maths)
    v_scale = _descale(queries, maths.descales, k.shape[-2])
    if call.seqused_q is not None:
        return _partly_used(queries, keys, options, maths.want_lse, v_scale, call.seqused_q)
    as_is = _as_is(
        maths,
        options,
        (queries.offsets, call.cu_seqlens_q),
        (ends, call.cu_seqlens_k),
        (keys.page_table, call.page_table),
        (lens, call.seqused_k),
    )
    return _attend(
        "flash_attn_varlen_func",
        queries,
        keys,
        options,
        v_scale,
        maths,
        kind if as_is else None,
        table=keys.page_table if call.page_table is None else None,
    )


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
    # More than there are would be another sequence's: a number that the planning refuses.
    wrong = (counts < 0) | (counts > core.lengths(queries.offsets))
    counts = t.where(wrong, longest + 1, counts)
    offsets = t.zeros(b + 1, dtype=t.int32, device=q.device)
    offsets[1:] = counts.cumsum(0)
    ramp = gpu.steps(0, 1, longest, q.device)
    index = (queries.offsets[:-1, None] + ramp).clamp_(0, q.shape[0] - 1).long()
    padded = Queries(q[index], None, None)
    padded.offsets = offsets
    if each_its_own(options):
        out, lse = attend_each("flash_attn_varlen_func", padded, keys, options, want_lse)
    else:
        out, lse = _results(padded, keys, want_lse)
        call = _call("flash_attn_varlen_func", padded, keys, options, out, lse, None)
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


def dense(q, k, v, maths: Arithmetic):
    kind = kind_of_dense_call(q, k, v, maths)
    again, stream = gpu.spaces.again(q.device, kind)
    if again is not None:
        return again.run(stream, q, k, v, again.lens, again.offsets, None, None, maths)
    core.check_forward_only(framework(q), q, k, v)
    q, k, v = gpu.checked(q, q=q, k=k, v=v)
    queries = Queries(q, None, None)
    if k.shape[0] != queries.num_seqs:
        raise ValueError(f"k: wanted a batch of {queries.num_seqs}, as q, got {k.shape[0]}")
    length = k.shape[1]
    keys = gpu.Keys(k, v, gpu.full(queries.num_seqs, length, q.device), None, None, length)
    options = _options(queries, maths)
    v_scale = _descale(queries, maths.descales, k.shape[-2])
    kept = {"offsets": queries.offsets, "lens": keys.kv_lens}
    kind = kind if _as_is(maths, options) else None
    return _attend("flash_attn_func", queries, keys, options, v_scale, maths, kind, **kept)


def combine(out_partial, lse_partial, out, out_dtype):
    (parts,) = gpu.checked(out_partial, out_partial=out_partial)
    if parts.dim() < 3:
        raise ValueError(f"out_partial: wanted [S, .., H, D], got {list(parts.shape)}")
    merged, lse = merge(parts, checked_lse(parts, lse_partial, "lse_partial", parts.shape[:-1]))
    if out is None:
        return merged.to(parts.dtype if out_dtype is None else out_dtype), lse
    gpu.checked(parts, out=out)
    if out.shape != merged.shape:
        raise ValueError(f"out: wanted {list(merged.shape)}, got {list(out.shape)}")
    return out.copy_(merged), lse
