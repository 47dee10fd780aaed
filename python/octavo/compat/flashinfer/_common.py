# SPDX-License-Identifier: Apache-2.0
"""What the FlashInfer fronts share: layouts, page tables, the arithmetic of a plan, one call."""

from __future__ import annotations

import functools
import math

import numpy as np

import octavo

from .. import _gpu as gpu
from .._arrays import (
    checked_scale,
    checked_softcap,
    dtype_name,
    floats,
    int_table,
    ints,
    native,
    not_covered,
    scale_by,
)

LOG2E = np.float32(1.0 / math.log(2.0))
LN2 = np.float32(math.log(2.0))

_BACKENDS = [
    "auto",
    "fa2",
    "fa3",
    "fa2_tc",
    "cudnn",
    "cutlass",
    "trtllm-gen",
    "trtllm-native",
    "cute-dsl",
    "cutile",
    "xqa",
]


def check_layout(kv_layout):
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"kv_layout: wanted NHD or HND, got {kv_layout!r}")


def check_backend(backend, jit_args):
    """Backends are names for FlashInfer's kernels: any of them means Octavo's own choice."""
    if jit_args is not None:
        raise not_covered("jit_args")
    if backend not in _BACKENDS:
        raise ValueError(f"backend: wanted one of {', '.join(_BACKENDS)}, got {backend!r}")


def refuse(**given):
    """Raises for arguments that the front leaves out."""
    for name, value in given.items():
        if (
            value is not None
            and value is not False
            and not (isinstance(value, (int, tuple)) and not value)
        ):
            raise not_covered(name)


def check_dtype(x, planned, name):
    if dtype_name(x.dtype) != planned:
        raise ValueError(f"{name}: wanted dtype {planned}, as plan() was told, got {x.dtype}")


def alibi_slopes(num_heads):
    """The slopes of ALiBi's paper: powers of 2^(-8/n), n the power of two below num_heads, then odd
    halves.
    """
    n = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 / n * (i + 1)) for i in range(n)]
    slopes += [2.0 ** (-4.0 / n * (2 * i + 1)) for i in range(num_heads - n)]
    return np.array(slopes, np.float32)


class Maths:
    """The arithmetic that a plan fixes."""

    def __init__(
        self,
        num_heads,
        head_dim,
        *,
        causal,
        q_lens,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        sm_scale,
        rope_scale,
        rope_theta,
        batch_invariant=False,
    ):
        if pos_encoding_mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
            raise KeyError(
                f"pos_encoding_mode: wanted NONE, ROPE_LLAMA or ALIBI, got {pos_encoding_mode!r}"
            )
        self.mask = "causal" if causal else "full"
        self.window = (-1 if window_left is None or window_left < 0 else int(window_left), -1)
        self.window_left = window_left
        self.softcap = checked_softcap(logits_soft_cap, "logits_soft_cap")
        self.scale = checked_scale(sm_scale, "sm_scale") or 1.0 / math.sqrt(head_dim)
        self.slopes = self._slopes_there = None
        self.rope_args = None
        self.batch_invariant = batch_invariant
        if pos_encoding_mode == "ALIBI":
            if self.softcap > 0:
                raise not_covered("logits_soft_cap with pos_encoding_mode ALIBI")
            if not causal and q_lens > 1:
                raise not_covered(
                    "pos_encoding_mode ALIBI without causal by forward()", "by plan() it is"
                )
            self.slopes = alibi_slopes(num_heads)
        elif pos_encoding_mode == "ROPE_LLAMA":
            self.rope_args = (rope_scale or 1.0, rope_theta or 1e4)

    def slopes_on(self, device):
        """The slopes as a tensor on a GPU, or None."""
        if self.slopes is None:
            return None
        if self._slopes_there is None or self._slopes_there.device != device:
            self._slopes_there = gpu.floats(self.slopes, "alibi_slopes", device)
        return self._slopes_there

    def rope(self, head_dim, longest):
        """The rotation of positions below `longest`."""
        scale, theta = self.rope_args
        if scale == 1.0:
            return octavo.Rope("half", base=theta)
        cos, sin = rope_tables(scale, theta, head_dim, 1 << max(longest - 1, 63).bit_length())
        return octavo.Rope("half", cos=cos, sin=sin)


@functools.lru_cache(maxsize=8)
def rope_tables(scale, theta, head_dim, count):
    angles = np.outer(np.arange(count) / scale, theta ** (-np.arange(0, head_dim, 2) / head_dim))
    return tuple(np.ascontiguousarray(f(angles), np.float32) for f in (np.cos, np.sin))


def each_for_itself(causal, pos_encoding_mode, window_left, q_lens):
    """Whether each query has to be a sequence of its own, at the end of its keys.

    FlashInfer's ALiBi grows with the key's position, behind the query, too; Octavo's falls there.
    Of a query behind all keys both are the same, but for a number that softmax doesn't see.
    """
    if causal or pos_encoding_mode != "ALIBI" or q_lens <= 1:
        return False
    if window_left is not None and window_left >= 0:
        raise not_covered("window_left with pos_encoding_mode ALIBI without causal")
    return True


class Keys:
    """Where a plan's keys lie: lengths, and page table or rows."""

    def __init__(self, kv_lens, page_table=None, rows=None):
        self.kv_lens = kv_lens
        self.page_table = page_table
        self.rows = rows
        self.longest = int(kv_lens.max()) if kv_lens.size else 0

    def repeated(self, counts):
        """Those of counts[b] sequences each that are all like sequence b."""
        table, rows = (
            None if x is None else np.repeat(x, counts, axis=0)
            for x in (self.page_table, self.rows)
        )
        return Keys(np.repeat(self.kv_lens, counts), table, rows)


def paged_keys(indptr, indices, last_page_len, page_size, seq_lens=None, block_tables=None):
    """Keys of FlashInfer's three arrays, checked."""
    last = ints(last_page_len, "last_page_len")
    b = last.shape[0]
    ends = ints(indptr, "indptr", b + 1)
    pages = ints(indices, "indices")
    counts = np.diff(ends)
    if b and (ends[0] < 0 or (counts < 0).any() or ends[-1] > pages.shape[0]):
        raise ValueError(
            f"indptr: wanted rising from 0 to at most {pages.shape[0]}, got {ends.tolist()}"
        )
    if page_size < 1:
        raise ValueError(f"page_size: wanted at least 1, got {page_size}")
    if block_tables is not None:
        table = int_table(block_tables, "block_tables")
        capacity = np.full(b, table.shape[1] * page_size)
    else:
        longest = int(counts.max()) if b else 0
        table = np.zeros((b, max(longest, 1)), np.int32)
        table[np.arange(table.shape[1]) < counts[:, None]] = pages[ends[0] : ends[-1]] if b else 0
        capacity = counts * page_size
    if seq_lens is not None:
        lens = ints(seq_lens, "seq_lens").reshape(-1)
        if lens.shape != (b,) or (lens < 0).any() or (lens > capacity).any():
            raise ValueError(
                f"seq_lens: wanted {b} lengths within their pages, got {lens.tolist()}"
            )
    else:
        held = counts > 0
        if (last[held] < 0).any() or (last[held] > page_size).any():
            raise ValueError(
                f"last_page_len: wanted at most {page_size} (page_size), got {last.tolist()}"
            )
        lens = np.where(held, (counts - 1) * page_size + last, 0).astype(np.int32)
    return Keys(lens, table)


def unpack(frame, paged_kv_cache, kv_layout):
    """(k, v) [N, P, Hk, D] on the host of one tensor [N, 2, ..] or a pair."""
    if isinstance(paged_kv_cache, (tuple, list)):
        k, v = (frame.host(x, "paged_kv_cache") for x in paged_kv_cache)
    else:
        both = frame.host(paged_kv_cache, "paged_kv_cache")
        if both.ndim != 5 or both.shape[1] != 2:
            raise ValueError(
                f"paged_kv_cache: wanted [pages, 2, ...] of five axes, got {list(both.shape)}"
            )
        k, v = both[:, 0], both[:, 1]
    return (k.swapaxes(1, 2), v.swapaxes(1, 2)) if kv_layout == "HND" else (k, v)


def _rotated(maths, k, v, keys, q_lens):
    """Keys turned by their positions, in float32 rows of their own: FlashInfer keeps them unturned.

    Returns k, v, keys, and the rope and positions of the queries. A query may stand before the
    first key: all are moved up then, since only differences of positions count.
    """
    b = keys.kv_lens.shape[0]
    longest = max(keys.longest, 1)
    shapes = [(b, longest, *x.shape[2:]) for x in (k, v)]
    rows = [np.empty(s, np.float32) for s in shapes]
    octavo.gather_cache(
        native(k),
        native(v),
        keys.kv_lens,
        page_table=keys.page_table,
        row_indices=keys.rows,
        longest=longest,
        k=rows[0],
        v=rows[1],
    )
    turned = [np.empty(s, np.float32) for s in shapes]
    before = max(int((q_lens - keys.kv_lens).max()) if b else 0, 0)
    rope = maths.rope(k.shape[-1], longest + before)
    if keys.longest:
        offsets = np.zeros(b + 1, np.int32)
        np.cumsum(keys.kv_lens, out=offsets[1:])
        octavo.append_tokens(
            *rows,
            *turned,
            keys.kv_lens,
            token_offsets=offsets,
            format="bshd",
            rope=rope,
            positions=positions_from(np.full(b, before), keys.kv_lens),
        )
    return (
        turned[0],
        turned[1],
        Keys(keys.kv_lens),
        rope,
        positions_from(keys.kv_lens - q_lens + before, q_lens),
    )


def positions_from(starts, counts):
    """starts[b], starts[b] + 1, ... for counts[b] tokens each, packed."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return (np.arange(total) + np.repeat(starts - (ends - counts), counts)).astype(np.int32)


def attend(
    frame, q, host, k, v, keys, offsets, maths, *, out, lse, want_lse, scales, sinks, out_dtype=None
):
    """(out, lse or None): one call for q [T, Hq, D] on the host; lse in base 2."""
    tokens, heads = host.shape[:2]
    shape = (tokens, heads, v.shape[-1])
    made, into = given_or_new(frame, q, out, shape, out_dtype, "out")
    made_lse = into_lse = None
    if want_lse:
        if maths.slopes is not None:
            raise not_covered("the LSE with pos_encoding_mode ALIBI")
        made_lse, into_lse = given_or_new(frame, q, lse, (tokens, heads), frame.float32, "lse")
    if not (k.shape[0] and k.shape[1]):
        k, v = (np.zeros((max(x.shape[0], 1), 1, *x.shape[2:]), x.dtype) for x in (k, v))
    rope = positions = None
    if maths.rope_args is not None and tokens:
        b = len(keys.kv_lens)
        q_lens = np.full(b, tokens // b, np.int32) if offsets is None else np.diff(offsets)
        k, v, keys, rope, positions = _rotated(maths, k, v, keys, q_lens)
    q_scale, k_scale, v_scale = scales
    scale = maths.scale
    for factor in (q_scale, k_scale):
        if factor is not None:
            scale *= float(factor)
    scale = checked_scale(scale, "sm_scale with q_scale and k_scale")
    octavo.attend(
        native(host),
        native(k),
        native(v),
        keys.kv_lens,
        token_offsets=offsets,
        page_table=keys.page_table,
        row_indices=keys.rows,
        out=native(into),
        lse=into_lse,
        softmax_scale=scale,
        mask=maths.mask,
        window=maths.window,
        softcap=maths.softcap,
        sinks=None if sinks is None else floats(sinks, "sinks", (heads,)),
        alibi_slopes=maths.slopes,
        rope=rope,
        positions=positions,
        batch_invariant=maths.batch_invariant,
    )
    if into_lse is not None:
        into_lse *= LOG2E
    if v_scale is not None and float(v_scale) != 1.0:
        into[...] = scale_by(into, np.float32(v_scale))
    return frame.finish(made), None if made_lse is None else frame.finish(made_lse)


def given_or_new(frame, like, array, shape, dtype, name):
    if array is None:
        return frame.empty(like, shape, dtype)
    if not frame.writable:
        raise not_covered(f"{name} of JAX", "JAX arrays can't be written")
    host = frame.host(array, name)
    if host.shape != shape:
        raise ValueError(f"{name}: wanted {list(shape)}, got {list(host.shape)}")
    return array, host


def answer(result, return_lse):
    return result if return_lse else result[0]
