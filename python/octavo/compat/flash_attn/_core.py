# SPDX-License-Identifier: Apache-2.0
"""What the FlashAttention fronts share: options, lengths, rows, the call of the library."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

import octavo

from .._arrays import (
    checked_scale,
    checked_softcap,
    flat_slots,
    floats,
    ints,
    native,
    not_covered,
    scale_by,
    sliding_rows,
)
from ._given import Arithmetic

_INT32 = np.int32


class Options(NamedTuple):
    """The arithmetic of a call, as the library names it, but for the slopes of ALiBi."""

    softmax_scale: float | None
    mask: str
    window: tuple[int, int]
    softcap: float
    sinks: np.ndarray | None


_SIMPLE = frozenset((int, float, bool, type(None)))


def plain_options(given: Arithmetic):
    """(softmax_scale, mask, window, softcap), as the library names them."""
    plain = (given.softmax_scale, given.softcap, *given.window_size)
    if _SIMPLE.issuperset(map(type, plain)):
        return _known_options(*plain, bool(given.causal))
    return _plain_options(*plain, given.causal)


def _plain_options(softmax_scale, softcap, left, right, causal):
    return (
        checked_scale(softmax_scale, "softmax_scale"),
        "causal" if causal else "full",
        (
            -1 if left is None or left < 0 else int(left),
            -1 if right is None or right < 0 else int(right),
        ),
        checked_softcap(softcap, "softcap"),
    )


_known_options = functools.lru_cache(maxsize=64)(_plain_options)


def options(given: Arithmetic, num_heads) -> Options:
    sinks = None if given.sinks is None else floats(given.sinks, "sinks", (num_heads,))
    return Options(*plain_options(given), sinks)


def one_of(**named):
    """The one of several spellings of an argument that was given, or None."""
    found = None
    for value in named.values():
        if value is not None:
            if found is not None:
                raise ValueError(f"{' and '.join(named)}: wanted one of them, got both")
            found = value
    return found


def refuse(**unless_empty):
    """Raises for options that the front leaves out, when they ask for something."""
    for name, value in unless_empty.items():
        if value is None or value is False or (isinstance(value, (int, float)) and value == 0):
            continue
        raise not_covered(name)


def check_tuning(num_splits, pack_gqa):
    """Hints that change speed only: splits and packing follow from the lengths here."""
    if num_splits is not None and (not isinstance(num_splits, int) or num_splits < 0):
        raise ValueError(f"num_splits: wanted an int of at least 0, got {num_splits!r}")
    if pack_gqa not in (None, True, False):
        raise ValueError(f"pack_gqa: wanted None, True or False, got {pack_gqa!r}")


@functools.lru_cache(maxsize=256)
def arange(n: int) -> np.ndarray:
    a = np.arange(n, dtype=_INT32)
    a.flags.writeable = False
    return a


@functools.lru_cache(maxsize=256)
def _full(n: int, value: int) -> np.ndarray:
    a = np.full(n, value, _INT32)
    a.flags.writeable = False
    return a


def lengths(ends):
    """The differences of prefix sums."""
    return ends[1:] - ends[:-1]


def check_pairs(call):
    k, v = call.k, call.v
    if (k is None) != (v is None):
        raise ValueError(f"k and v: wanted both or neither, got {'v' if k is None else 'k'} alone")
    if (call.rotary_cos is None) != (call.rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin: wanted both or neither, got one")
    if k is None and call.rotary_cos is not None:
        raise ValueError("rotary_cos: wanted new k and v with it, got None")
    if k is None and call.cu_seqlens_k_new is not None:
        raise ValueError("cu_seqlens_k_new: wanted k and v with it, got None")


def check_heads(q, k_cache):
    heads, dim = k_cache.shape[-2:]
    if q.shape[-1] != dim or heads < 1 or q.shape[-2] % heads:
        raise ValueError(
            f"q: wanted a multiple of {heads} heads of {dim} (k_cache's), got {list(q.shape[-2:])}"
        )


class Keys(NamedTuple):
    """Where the keys of each sequence lie."""

    k: np.ndarray  # [N, P, Hk, D]
    v: np.ndarray
    kv_lens: np.ndarray
    page_table: np.ndarray | None
    rows: np.ndarray | None


class Queries(NamedTuple):
    """The queries of a call."""

    host: np.ndarray
    format: str  # bshd or thd
    num_seqs: int
    q_len: int  # bshd: of each sequence
    offsets: np.ndarray | None  # thd
    rope: object = None
    positions: np.ndarray | None = None


def padded_queries(host) -> Queries:
    return Queries(host, "bshd", host.shape[0], host.shape[1], None)


def ragged_queries(host, cu_seqlens) -> Queries:
    offsets = ints(cu_seqlens, "cu_seqlens_q")
    return Queries(host, "thd", offsets.shape[0] - 1, 0, offsets)


def some_slots(k, v):
    """The library wants a slot to exist, even if no sequence has a key."""
    if k.shape[0] and k.shape[1]:
        return k, v
    return tuple(np.zeros((max(x.shape[0], 1), 1, *x.shape[2:]), x.dtype) for x in (k, v))


def _attend(by, opts: Options, queries: Queries, keys: Keys, slopes, out, lse):
    """by: octavo.attend or what takes its arguments."""
    by(
        native(queries.host),
        native(keys.k),
        native(keys.v),
        keys.kv_lens,
        token_offsets=queries.offsets,
        page_table=keys.page_table,
        row_indices=keys.rows,
        format=queries.format,
        out=native(out),
        lse=lse,
        softmax_scale=opts.softmax_scale,
        mask=opts.mask,
        window=opts.window,
        softcap=opts.softcap,
        sinks=opts.sinks,
        alibi_slopes=slopes,
        rope=queries.rope,
        positions=queries.positions,
    )


def slopes_of(alibi_slopes, num_seqs, num_heads):
    """[Hq], or [B, Hq] when sequences differ."""
    if alibi_slopes is None:
        return None
    slopes = floats(alibi_slopes, "alibi_slopes")
    if slopes.shape == (num_heads,):
        return slopes
    if slopes.shape != (num_seqs, num_heads):
        raise ValueError(
            f"alibi_slopes: wanted [{num_heads}] or [{num_seqs}, {num_heads}], "
            f"got {list(slopes.shape)}"
        )
    return slopes[0] if num_seqs and (slopes == slopes[0]).all() else slopes


def _parts(queries, keys, slopes, out, lse):
    """Arguments of a call for each sequence, for slopes that differ between them."""
    ends = (
        queries.offsets if queries.format == "thd" else arange(queries.num_seqs + 1) * queries.q_len
    )
    rows = keys.rows if keys.rows is not None else arange(queries.num_seqs)
    for b in range(queries.num_seqs):
        first, last = int(ends[b]), int(ends[b + 1])
        tokens = slice(first, last) if queries.format == "thd" else slice(b, b + 1)
        one = queries._replace(
            host=queries.host[tokens],
            num_seqs=1,
            offsets=np.array([0, last - first], _INT32) if queries.format == "thd" else None,
            positions=None if queries.positions is None else queries.positions[first:last],
        )
        mine = keys._replace(kv_lens=keys.kv_lens[b : b + 1], rows=rows[b : b + 1])
        yield one, mine, slopes[b], out[tokens], None if lse is None else lse[first:last]


def attend(
    frame,
    q,
    queries: Queries,
    keys: Keys,
    opts: Options,
    slopes,
    want_lse,
    v_descale=None,
    write=None,
):
    """(out, lse or None) in the caller's framework, lse in FlashAttention's shape.

    write: what puts new keys into the cache, called when nothing is wrong with the attention.
    """
    num_heads = queries.host.shape[-2]
    made, out = frame.empty(q, (*queries.host.shape[:-1], keys.v.shape[-1]))
    made_lse = lse = None
    if want_lse:
        made_lse, lse, settle = _lse_buffers(frame, q, queries, num_heads)
    calls = [(queries, keys, slopes, out, lse)]
    if slopes is not None and slopes.ndim == 2:
        if queries.format == "thd":
            out[queries.offsets[-1] :] = 0
        calls = list(_parts(*calls[0]))
    if write is not None:
        for call in calls:
            _attend(octavo.check_attend, opts, *call)
        write()
    for call in calls:
        _attend(octavo.attend, opts, *call)
    if v_descale is not None:
        out[...] = scale_by(out, _per_token(queries, v_descale, num_heads))
    if want_lse:
        settle()
        return frame.finish(made), frame.finish(made_lse)
    return frame.finish(made), None


def _lse_buffers(frame, q, queries, num_heads):
    """The caller's LSE, the library's view of it or a scratch, and what copies one to the other."""
    if queries.format == "thd":  # [Hq, T], which the library fills by strides
        made, host = frame.empty(q, (num_heads, queries.host.shape[0]), frame.float32)
        host[:, queries.offsets[-1] :] = -np.inf
        return made, host.T, lambda: None
    b, length = queries.num_seqs, queries.q_len
    made, host = frame.empty(q, (b, num_heads, length), frame.float32)
    if length == 1 or b == 1:
        flat = host[:, :, 0] if length == 1 else host[0].T
        return made, flat, lambda: None
    flat = np.empty((b * length, num_heads), np.float32)

    def settle():
        host[...] = flat.reshape(b, length, num_heads).transpose(0, 2, 1)

    return made, flat, settle


def _per_token(queries, factors, num_heads):
    """Factors [B, Hk] for each token and query head of [..., Hq, D]."""
    factors = np.repeat(factors, num_heads // factors.shape[1], axis=1)
    if queries.format == "bshd":
        return factors[:, None, :, None]
    per_token = np.ones((queries.host.shape[0], num_heads), np.float32)
    counts = lengths(queries.offsets)
    per_token[: counts.sum()] = np.repeat(factors, counts, axis=0)
    return per_token[:, :, None]


def descaled(queries: Queries, descales, num_kv_heads):
    """(queries times the scales of Q and K, the scales of V or None); all are [B, Hk] or None."""
    if descales is None:
        return queries, None
    shape = (queries.num_seqs, num_kv_heads)
    q_descale, k_descale, v_descale = descales
    of_v = None if v_descale is None else floats(v_descale, "v_descale", shape)
    return _times(queries, q_descale, k_descale, shape), of_v


def _times(queries: Queries, q_descale, k_descale, shape) -> Queries:
    factors = [
        floats(x, n, shape)
        for x, n in ((q_descale, "q_descale"), (k_descale, "k_descale"))
        if x is not None
    ]
    if not factors:
        return queries
    product = functools.reduce(np.multiply, factors)
    if (product == 1).all():
        return queries
    return queries._replace(
        host=scale_by(queries.host, _per_token(queries, product, queries.host.shape[-2]))
    )


def positions_from(starts, counts):
    """starts[b], starts[b] + 1, ... for counts[b] tokens each, packed."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return (arange(total) + np.repeat(starts - (ends - counts), counts)).astype(_INT32, copy=False)


def skip_left(keys: Keys, leftpad, num_seqs) -> Keys:
    """The same keys without the first leftpad[b] slots of each sequence."""
    pad = ints(leftpad, "cache_leftpad", num_seqs)
    if num_seqs and (pad < 0).any():
        raise ValueError(f"cache_leftpad: wanted at least 0, got {pad.min()}")
    capacity = (
        keys.k.shape[1] if keys.page_table is None else keys.page_table.shape[1] * keys.k.shape[1]
    )
    if num_seqs and keys.kv_lens.max() > capacity:
        raise ValueError(
            f"cache_seqlens: wanted at most {capacity} with new tokens, got {keys.kv_lens.max()}"
        )
    lens = np.maximum(keys.kv_lens - pad, 0).astype(_INT32)
    rows = keys.rows if keys.rows is not None else arange(num_seqs)
    k, step = flat_slots(keys.k, "k_cache")
    v, step_v = flat_slots(keys.v, "v_cache")
    if step != step_v:
        raise not_covered("cache_leftpad", "wanted k_cache and v_cache of alike strides")
    if keys.page_table is None:
        longest = max(int(lens.max()) if num_seqs else 0, 1)
        starts = (rows * step + pad).astype(_INT32)
        return Keys(
            sliding_rows(k, k.shape[0], longest),
            sliding_rows(v, v.shape[0], longest),
            lens,
            None,
            starts,
        )
    if num_seqs and not 0 <= rows.min() <= rows.max() < keys.page_table.shape[0]:
        raise ValueError(
            f"cache_batch_idx: wanted rows of the page table, 0 … {keys.page_table.shape[0] - 1}, "
            f"got {rows.tolist()}"
        )
    page_size = keys.k.shape[1]
    slots = pad[:, None] + arange(int(lens.max()) if num_seqs else 0)
    pages = np.take_along_axis(
        keys.page_table[rows], np.minimum(slots // page_size, keys.page_table.shape[1] - 1), 1
    )
    table = pages * step + slots % page_size
    return Keys(k[:, None], v[:, None], lens, table.astype(_INT32), None)


def check_forward_only(frame, q, k, v):
    if frame.needs_grad(q, k, v):
        raise not_covered("the backward pass", "call it under torch.no_grad()")
