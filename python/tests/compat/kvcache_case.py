# SPDX-License-Identifier: Apache-2.0
"""Calls of flash_attn_with_kvcache drawn over FlashAttention's own parameters, and held to the
definition.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from definition import attention, check_close, rope_tables, rotate, weighed

from octavo.compat import flash_attn


@dataclasses.dataclass
class Case:
    """One call. The values are drawn from the seed, so that a failure names what to repeat."""

    seed: int
    dtype: str
    batch: int
    q_len: int
    new_len: int  # 0: nothing to append
    heads: tuple  # (Hq, Hk)
    dim: int
    dim_v: int
    capacity: int
    page_size: int  # 0: not paged
    ragged: bool
    batch_idx: bool
    leftpad: bool
    rotary: str  # "", interleaved, half
    rotary_dim: int
    table_dtype: str
    causal: bool
    window: tuple
    softcap: float
    alibi: str  # "", heads, batch
    sinks: bool
    one_length: bool

    def __str__(self):
        return " ".join(
            f"{k}={v}" for k, v in dataclasses.asdict(self).items() if v not in (0, "", False, 0.0)
        )


def draw(seed, dtypes):
    r = np.random.default_rng(seed)
    pick = lambda *xs: xs[int(r.integers(len(xs)))]  # noqa: E731
    hk = pick(1, 2, 3)
    dim = pick(8, 16, 32, 40)
    page_size = pick(0, 0, 1, 3, 4, 16)
    new_len = pick(0, 1, 2, 5)
    q_len = pick(1, 1, 2, 4, 7)
    rotary = pick("", "interleaved", "half") if new_len else ""
    return Case(
        seed=seed,
        dtype=dtypes[seed % len(dtypes)],
        batch=pick(1, 2, 4),
        q_len=q_len,
        new_len=new_len,
        heads=(hk * pick(1, 2, 3), hk),
        dim=dim,
        dim_v=pick(dim, dim, 24),
        capacity=pick(24, 48, 96),
        page_size=page_size,
        ragged=pick(False, False, True),
        batch_idx=pick(False, True),
        leftpad=pick(False, False, True),
        rotary=rotary,
        rotary_dim=pick(8, dim) if rotary else 0,
        table_dtype=pick("f32", "same"),
        causal=pick(True, False),
        window=pick((-1, -1), (-1, -1), (5, 0), (7, 3), (-1, 2)),
        softcap=pick(0.0, 0.0, 3.0),
        alibi=pick("", "", "heads", "batch"),
        sinks=pick(False, False, True),
        one_length=pick(False, False, False, True),
    )


class Call:
    """The case's arrays, in the framework and as the definition reads them."""

    def __init__(self, case, frame):
        c, r = case, np.random.default_rng(case.seed + 10_000)
        self.case, self.frame = c, frame
        hq, hk = c.heads
        b = c.batch
        self.q_lens = r.integers(0, c.q_len + 1, b) if c.ragged else np.full(b, c.q_len)
        self.new_lens = r.integers(0, c.new_len + 1, b) if c.ragged else np.full(b, c.new_len)
        top = c.capacity - max(c.new_len, c.q_len if c.rotary else 0)
        self.past = (
            np.full(b, int(r.integers(0, top + 1))) if c.one_length else r.integers(0, top + 1, b)
        )
        self.pad = (
            np.array([r.integers(0, n) if n else 0 for n in self.past])
            if c.leftpad
            else np.zeros(b, int)
        )
        rows = 2 * b if c.batch_idx else b
        self.rows = r.permutation(rows)[:b] if c.batch_idx else np.arange(b)

        def normal(*shape, dtype=c.dtype):
            return frame.make(r.standard_normal(shape), dtype)

        tokens = (int(self.q_lens.sum()),) if c.ragged else (b, c.q_len)
        new = (int(self.new_lens.sum()),) if c.ragged else (b, c.new_len)
        self.q = normal(*tokens, hq, c.dim)
        self.k = normal(*new, hk, c.dim) if c.new_len else None
        self.v = normal(*new, hk, c.dim_v) if c.new_len else None
        self.kwargs = {}
        if c.page_size:
            per_row = -(-c.capacity // c.page_size)
            pages = rows * per_row + 3
            self.table = r.permutation(pages)[: rows * per_row].reshape(rows, per_row)
            self.kwargs["block_table"] = frame.ints(self.table)
            shape = (pages, c.page_size)
        else:
            self.table = None
            shape = (rows, c.capacity)
        self.k_cache, self.v_cache = normal(*shape, hk, c.dim), normal(*shape, hk, c.dim_v)
        self.k_before, self.v_before = (
            frame.read(self.k_cache).copy(),
            frame.read(self.v_cache).copy(),
        )
        self.cos = self.sin = None
        if c.rotary:
            table_dtype = "f32" if c.table_dtype == "f32" else c.dtype
            cos, sin = (
                frame.make(t, table_dtype) for t in rope_tables(c.capacity + 1, c.rotary_dim)
            )
            self.kwargs.update(
                rotary_cos=cos, rotary_sin=sin, rotary_interleaved=c.rotary == "interleaved"
            )
            self.cos, self.sin = frame.read(cos), frame.read(sin)
        self.slopes = self.sinks = None
        if c.alibi:
            self.slopes = r.uniform(0.01, 0.5, (b, hq) if c.alibi == "batch" else (hq,)).astype(
                np.float32
            )
            self.kwargs["alibi_slopes"] = frame.make(self.slopes)
        if c.sinks:
            self.sinks = r.standard_normal(hq).astype(np.float32)
            self.kwargs["learnable_sink"] = frame.make(self.sinks)
        if c.ragged:
            self.kwargs["cu_seqlens_q"] = frame.ints(np.concatenate([[0], np.cumsum(self.q_lens)]))
            self.kwargs["max_seqlen_q"] = int(self.q_lens.max())
            if c.new_len:
                self.kwargs["cu_seqlens_k_new"] = frame.ints(
                    np.concatenate([[0], np.cumsum(self.new_lens)])
                )
        self.kwargs.update(
            cache_seqlens=int(self.past[0]) if c.one_length else frame.ints(self.past),
            cache_batch_idx=frame.ints(self.rows) if c.batch_idx else None,
            cache_leftpad=frame.ints(self.pad) if c.leftpad else None,
            causal=c.causal,
            window_size=c.window,
            softcap=c.softcap,
        )

    def run(self, function=flash_attn.flash_attn_with_kvcache):
        return function(
            self.q,
            self.k_cache,
            self.v_cache,
            self.k,
            self.v,
            return_softmax_lse=True,
            **self.kwargs,
        )

    def slot(self, cache, b, position):
        """A view of one slot of a cache that was read as float64."""
        if self.table is None:
            return cache[self.rows[b], position]
        size = self.case.page_size
        return cache[self.table[self.rows[b], position // size], position % size]

    def tokens(self, x, lens, b):
        x = self.frame.read(x)
        if not self.case.ragged:
            return x[b]
        start = int(lens[:b].sum())
        return x[start : start + int(lens[b])]

    def check_cache(self):
        """The new tokens are in their slots, and nothing else has changed."""
        c = self.case
        want_k, want_v = self.k_before.copy(), self.v_before.copy()
        changed = np.zeros((*want_k.shape[:2], 1), bool)
        for b in range(c.batch if c.new_len else 0):
            places = self.past[b] + np.arange(self.new_lens[b])
            k = self.tokens(self.k, self.new_lens, b)
            if c.rotary:
                k = rotate(k, places, self.cos, self.sin, c.rotary == "interleaved")
            for i, place in enumerate(places):
                self.slot(want_k, b, place)[...] = k[i]
                self.slot(want_v, b, place)[...] = self.tokens(self.v, self.new_lens, b)[i]
                self.slot(changed, b, place)[...] = True
        got_k, got_v = self.frame.read(self.k_cache), self.frame.read(self.v_cache)
        assert np.array_equal(got_v, want_v), f"{c}: v_cache"
        assert np.array_equal(got_k[~changed[..., 0]], want_k[~changed[..., 0]]), (
            f"{c}: k_cache beside the new tokens"
        )
        check_close(got_k[changed[..., 0]], want_k[changed[..., 0]], c.dtype, 8.0, f"{c}: k_cache")

    def check(self, out, lse):
        c = self.case
        self.check_cache()
        got_k, got_v = self.frame.read(self.k_cache), self.frame.read(self.v_cache)
        got, got_lse = self.frame.read(out), self.frame.read(lse)
        heads = c.heads[0]
        tokens = int(self.q_lens.sum())
        assert got_lse.shape == ((heads, tokens) if c.ragged else (c.batch, heads, c.q_len)), str(c)
        for b in range(c.batch):
            length = int(self.past[b] + self.new_lens[b])
            places = range(int(self.pad[b]), length)
            q = self.tokens(self.q, self.q_lens, b)
            if c.rotary:
                spread = (
                    np.arange(len(q)) if c.causal or c.window != (-1, -1) else np.zeros(len(q), int)
                )
                q = rotate(q, self.past[b] + spread, self.cos, self.sin, c.rotary == "interleaved")
            k = np.array([self.slot(got_k, b, p) for p in places]).reshape(-1, c.heads[1], c.dim)
            v = np.array([self.slot(got_v, b, p) for p in places]).reshape(-1, c.heads[1], c.dim_v)
            slopes = self.slopes[b] if c.alibi == "batch" else self.slopes
            maths = {
                "causal": c.causal,
                "window": c.window,
                "softcap": c.softcap,
                "slopes": slopes,
                "sinks": self.sinks,
            }
            want, want_lse = attention(q, k, v, **maths)
            rows = self.tokens(out, self.q_lens, b)
            products = self.frame.products(c.dtype)
            mean = None if c.rotary else weighed(q, k, v, **maths)
            check_close(rows, want, c.dtype, 4.0, f"{c}: out of sequence {b}", products, mean)
            start = int(self.q_lens[:b].sum())
            row_lse = got_lse[:, start : start + len(q)].T if c.ragged else got_lse[b].T
            # Rotated queries are rounded to what they are multiplied in.
            turned = products if c.rotary else "f32"
            check_close(row_lse, want_lse, "f32", 8.0, f"{c}: lse of sequence {b}", turned)
        assert self.frame.is_one(out)
        assert self.frame.is_one(lse)
        assert got.shape == (*self.frame.read(self.q).shape[:-1], c.dim_v)
