# SPDX-License-Identifier: Apache-2.0
"""The three calls behind the FlashAttention fronts: a cache, ragged keys, dense keys."""

from __future__ import annotations

import numpy as np

import octavo

from .. import _gpu as gpu
from .._arrays import framework, int_table, ints, native, not_covered, sliding_rows
from . import _core as core
from . import _gpu
from ._given import Arithmetic, CacheCall, RaggedCall
from ._rotary import Rotary


def with_kvcache(call: CacheCall):
    if gpu.on_gpu(call.q):
        return _gpu.with_kvcache(call)
    core.check_pairs(call)
    q, maths = call.q, call.arithmetic
    frame = framework(q)
    host = frame.host(q, "q")
    queries = (
        core.padded_queries(host)
        if call.cu_seqlens_q is None
        else core.ragged_queries(host, call.cu_seqlens_q)
    )
    b = queries.num_seqs
    kc, vc = frame.host(call.k_cache, "k_cache"), frame.host(call.v_cache, "v_cache")
    table = None if call.page_table is None else int_table(call.page_table, "page_table")
    rows = (
        None if call.cache_batch_idx is None else ints(call.cache_batch_idx, "cache_batch_idx", b)
    )
    if call.cache_seqlens is None:
        if call.k is not None:
            raise ValueError("cache_seqlens: wanted the lengths before the new k and v, got None")
        past = core._full(b, kc.shape[1] if table is None else table.shape[1] * kc.shape[1])
    elif isinstance(call.cache_seqlens, (int, np.integer)):
        past = core._full(b, int(call.cache_seqlens))
    else:
        past = ints(call.cache_seqlens, "cache_seqlens", b)
    keys = core.Keys(kc, vc, past, table, rows)
    rotary = None
    if call.rotary_cos is not None:
        style = "interleaved" if call.rotary_interleaved else "half"
        rotary = Rotary(frame, call.rotary_cos, call.rotary_sin, style)
    starts = past if call.rotary_seqlens is None else ints(call.rotary_seqlens, "rotary_seqlens", b)
    write = None
    if call.k is not None:
        keys, write = _append(frame, call, keys, rotary, starts)
    core.check_heads(host, kc)
    opts = core.options(maths, host.shape[-2])
    if rotary is not None:
        # As in FlashAttention: without causal mask and window all queries stand at the first place.
        local = maths.causal or opts.window != (-1, -1)
        counts = (
            core.lengths(queries.offsets)
            if queries.offsets is not None
            else core._full(b, queries.q_len)
        )
        places = core.positions_from(starts, counts) if local else np.repeat(starts, counts)
        rope, places = rotary.at(places)
        queries = queries._replace(rope=rope, positions=places)
    if call.cache_leftpad is not None:
        keys = core.skip_left(keys, call.cache_leftpad, b)
    if kc.shape[0] == 0 or kc.shape[1] == 0:
        keys = keys._replace(**dict(zip("kv", core.some_slots(kc, vc), strict=True)))
    queries, v_descale = core.descaled(queries, maths.descales, kc.shape[-2])
    slopes = core.slopes_of(maths.alibi_slopes, b, host.shape[-2])
    out, lse = core.attend(frame, q, queries, keys, opts, slopes, maths.want_lse, v_descale, write)
    return (out, lse) if maths.want_lse else out


def _append(frame, call, keys, rotary, starts):
    """(the keys with their new lengths, what writes the new ones into the caller's cache)."""
    if not frame.writable:
        raise not_covered("k and v to append to a JAX array", "JAX arrays can't be written")
    hk, hv = frame.host(call.k, "k"), frame.host(call.v, "v")
    b = keys.kv_lens.shape[0]
    if call.cu_seqlens_k_new is None:
        offsets = None
        counts = core._full(b, hk.shape[1])
    else:
        offsets = ints(call.cu_seqlens_k_new, "cu_seqlens_k_new", b + 1)
        counts = core.lengths(offsets)
    lens = keys.kv_lens + counts
    if not hk.size:
        return keys._replace(kv_lens=lens), None
    rope, places = None, None
    if rotary is not None:
        rope, places = rotary.at(core.positions_from(starts, counts))

    def write():
        octavo.append_tokens(
            native(hk),
            native(hv),
            native(keys.k),
            native(keys.v),
            lens,
            token_offsets=offsets,
            page_table=keys.page_table,
            row_indices=keys.rows,
            format="bshd" if offsets is None else "thd",
            rope=rope,
            positions=places,
        )

    return keys._replace(kv_lens=lens), write


def varlen(call: RaggedCall):
    q, k, v, maths = call.q, call.k, call.v, call.arithmetic
    if gpu.on_gpu(q):
        return _gpu.varlen(call)
    frame = framework(q)
    core.check_forward_only(frame, q, k, v)
    queries = core.ragged_queries(frame.host(q, "q"), call.cu_seqlens_q)
    b = queries.num_seqs
    hk, hv = frame.host(k, "k"), frame.host(v, "v")
    used = None if call.seqused_k is None else ints(call.seqused_k, "seqused_k", b)
    ends = None if call.cu_seqlens_k is None else ints(call.cu_seqlens_k, "cu_seqlens_k", b + 1)
    if used is None and ends is None:
        raise ValueError("cu_seqlens_k: wanted it or seqused_k, got neither")
    lens = used if used is not None else core.lengths(ends)
    if call.page_table is not None:
        keys = core.Keys(hk, hv, lens, int_table(call.page_table, "block_table"), None)
    else:
        if ends is None:
            raise ValueError("cu_seqlens_k: wanted where each sequence starts, got None")
        if b and ends[-1] > hk.shape[0]:
            raise ValueError(
                f"cu_seqlens_k: wanted within k's {hk.shape[0]} rows, got {ends.tolist()}"
            )
        if used is not None and (used > core.lengths(ends)).any():
            raise ValueError(f"seqused_k: wanted within cu_seqlens_k, got {used.tolist()}")
        longest = max(int(lens.max()) if b else 0, 1)
        rows = [sliding_rows(x, x.shape[0], longest) for x in (hk, hv)]
        keys = core.Keys(*core.some_slots(*rows), lens, None, ends[:-1])
    opts = core.options(maths, queries.host.shape[-2])
    queries, v_descale = core.descaled(queries, maths.descales, hk.shape[-2])
    slopes = core.slopes_of(maths.alibi_slopes, b, queries.host.shape[-2])
    if call.seqused_q is not None:
        return _partly_used(
            frame, q, queries, keys, opts, slopes, maths.want_lse, v_descale, call.seqused_q
        )
    return core.attend(frame, q, queries, keys, opts, slopes, maths.want_lse, v_descale)


def _partly_used(frame, q, queries, keys, opts, slopes, want_lse, v_descale, seqused_q):
    """The first seqused_q[b] queries of each sequence; the others' rows are 0 and -inf."""
    counts = ints(seqused_q, "seqused_q", queries.num_seqs)
    if (counts < 0).any() or (counts > core.lengths(queries.offsets)).any():
        raise ValueError(f"seqused_q: wanted within cu_seqlens_q, got {counts.tolist()}")
    index = core.positions_from(queries.offsets[:-1], counts)
    offsets = np.zeros(queries.num_seqs + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    made, host = frame.empty(q, (*queries.host.shape[:-1], keys.v.shape[-1]))
    host[...] = 0
    packed = queries._replace(host=queries.host[index], offsets=offsets)
    numpy = framework(packed.host)
    out, lse = core.attend(numpy, packed.host, packed, keys, opts, slopes, want_lse, v_descale)
    host[index] = out
    if not want_lse:
        return frame.finish(made), None
    made_lse, host_lse = frame.empty(q, (host.shape[1], host.shape[0]), frame.float32)
    host_lse[...] = -np.inf
    host_lse[:, index] = lse
    return frame.finish(made), frame.finish(made_lse)


def dense(q, k, v, maths: Arithmetic):
    if gpu.on_gpu(q):
        return _gpu.dense(q, k, v, maths)
    frame = framework(q)
    core.check_forward_only(frame, q, k, v)
    queries = core.padded_queries(frame.host(q, "q"))
    hk, hv = frame.host(k, "k"), frame.host(v, "v")
    if hk.shape[0] != queries.num_seqs:
        raise ValueError(f"k: wanted a batch of {queries.num_seqs}, as q, got {hk.shape[0]}")
    lens = core._full(queries.num_seqs, hk.shape[1])
    keys = core.Keys(*core.some_slots(hk, hv), lens, None, None)
    opts = core.options(maths, queries.host.shape[-2])
    queries, v_descale = core.descaled(queries, maths.descales, hk.shape[-2])
    slopes = core.slopes_of(maths.alibi_slopes, queries.num_seqs, queries.host.shape[-2])
    return core.attend(frame, q, queries, keys, opts, slopes, maths.want_lse, v_descale)


def no_probs(q):
    """What FlashAttention gives for probabilities that it did not keep."""
    if gpu.on_gpu(q):
        return q.new_empty((0,))
    frame = framework(q)
    return frame.finish(frame.empty(q, (0,))[0])


def combine(out_partial, lse_partial, out, out_dtype):
    if gpu.on_gpu(out_partial):
        return _gpu.combine(out_partial, lse_partial, out, out_dtype)
    frame = framework(out_partial, "out_partial")
    parts, lses = frame.host(out_partial, "out_partial"), frame.host(lse_partial, "lse_partial")
    if parts.ndim < 3 or lses.shape != parts.shape[:-1]:
        raise ValueError(f"lse_partial: wanted {list(parts.shape[:-1])}, got {list(lses.shape)}")
    if out is None:
        made, host = frame.empty(out_partial, parts.shape[1:], out_dtype)
    elif not frame.writable:
        raise not_covered("out of JAX", "JAX arrays can't be written")
    else:
        made, host = out, frame.host(out, "out")
    heads, dim = parts.shape[-2:]
    made_lse, host_lse = frame.empty(out_partial, lses.shape[1:], frame.float32)
    flat = [
        (native(p.reshape(-1, heads, dim)), s.reshape(-1, heads))
        for p, s in zip(parts, lses, strict=True)
    ]
    dense = host if host.flags.c_contiguous else np.empty(host.shape, host.dtype)
    octavo.merge(flat, out=native(dense.reshape(-1, heads, dim)), lse=host_lse.reshape(-1, heads))
    if dense is not host:
        host[...] = dense
    return frame.finish(made), frame.finish(made_lse)
