# SPDX-License-Identifier: Apache-2.0
"""One plan and one run of FlashInfer's, drawn from a seed, and what the definition says to it."""

from __future__ import annotations

import numpy as np
import pytest
from definition import (
    attention,
    check_close,
    rope_tables,
    rotate,
    turned_logits_error,
    weighed,
)

LN2 = np.log(2.0)
NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def alibi_slopes(heads):
    """As in ALiBi's paper, with its rule for numbers that are no power of two."""
    power = 2 ** int(np.floor(np.log2(heads)))
    first = [2.0 ** (-(8.0 / power) * i) for i in range(1, power + 1)]
    more = [2.0 ** (-(4.0 / power) * i) for i in range(1, 2 * (heads - power), 2)]
    return np.array(first + more)


def ends(lens):
    return np.concatenate([[0], np.cumsum(lens)]).astype(int)


class Case:
    """One plan and one run; all is drawn from the seed."""

    def __init__(self, seed, frame, decode=False):
        r = self.r = np.random.default_rng(seed)
        pick = lambda *xs: xs[int(r.integers(len(xs)))]  # noqa: E731
        self.frame, self.seed, self.decode = frame, seed, decode
        self.dtype = frame.dtypes[seed % len(frame.dtypes)]
        self.batch = pick(1, 2, 5)
        self.hk = pick(1, 2)
        self.hq = self.hk * pick(1, 3, 4)
        self.dim = pick(8, 32)
        self.dim_v = self.dim if decode else pick(self.dim, 16)
        self.page_size = pick(1, 3, 16)
        self.layout = pick("NHD", "HND")
        self.as_pair = self.dim != self.dim_v or pick(True, False)
        self.q_len = pick(1, 1, 3) if decode else None
        low = self.q_len if decode else 0
        self.kv_lens = r.integers(low, 40, self.batch)
        self.q_lens = np.full(self.batch, self.q_len) if decode else r.integers(0, 9, self.batch)
        self.causal = self.q_len > 1 if decode else pick(True, False)
        self.mode = pick("NONE", "NONE", "ROPE_LLAMA", "ALIBI")
        self.softcap = pick(None, None, 5.0) if self.mode != "ALIBI" else None
        self.alone = self.mode == "ALIBI" and not decode and not self.causal
        self.window = -1 if self.alone else pick(-1, -1, 6)
        self.scale = pick(None, 0.4)
        self.rope_scale, self.theta = pick((None, None), (2.0, 5e4))
        self.sinks = r.standard_normal(self.hq).astype(np.float32) if pick(False, True) else None
        if self.alone:
            self.sinks = None
        self.scales = pick({}, {"q_scale": 1.5, "k_scale": 0.5, "v_scale": 2.0})

    def __str__(self):
        skip = ("r", "frame", "sinks")
        return " ".join(
            f"{k}={v}" for k, v in vars(self).items() if k not in skip and not k.endswith("64")
        )

    def maths(self):
        return {
            "pos_encoding_mode": self.mode,
            "window_left": self.window,
            "logits_soft_cap": self.softcap,
            "sm_scale": self.scale,
            "rope_scale": self.rope_scale,
            "rope_theta": self.theta,
        }

    def types(self):
        return {"q_data_type": NAMES[self.dtype], "kv_data_type": self.frame.dtype(self.dtype)}

    def make_queries(self):
        shape = (self.q_lens.sum(), self.hq, self.dim)
        self.q = self.frame.make(self.r.standard_normal(shape), self.dtype)
        return self.q

    def make_pages(self):
        """Pages of random order, NaN wherever no token lies."""
        counts = -(-self.kv_lens // self.page_size)
        pages = self.r.permutation(int(counts.sum()) + 2)[: counts.sum()].astype(int)
        self.indptr, self.indices = ends(counts), pages
        self.last = np.where(counts > 0, self.kv_lens - (counts - 1) * self.page_size, 0)
        total = counts.sum() + 2
        k, v = (
            np.full((total, self.page_size, self.hk, d), np.nan) for d in (self.dim, self.dim_v)
        )
        for b, n in enumerate(self.kv_lens):
            for j in range(n):
                page = pages[self.indptr[b] + j // self.page_size]
                k[page, j % self.page_size] = self.r.standard_normal((self.hk, self.dim))
                v[page, j % self.page_size] = self.r.standard_normal((self.hk, self.dim_v))
        if self.layout == "HND":
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        if self.as_pair:
            self.cache = tuple(self.frame.make(x, self.dtype) for x in (k, v))
            both = [self.frame.read(x) for x in self.cache]
        else:
            self.cache = self.frame.make(np.stack([k, v], 1), self.dtype)
            both = [self.frame.read(self.cache)[:, i] for i in (0, 1)]
        if self.layout == "HND":
            both = [x.swapaxes(1, 2) for x in both]
        self.rows = []
        for b, n in enumerate(self.kv_lens):
            where = [
                (pages[self.indptr[b] + j // self.page_size], j % self.page_size) for j in range(n)
            ]
            self.rows.append(
                [np.array([x[w] for w in where]).reshape(n, *x.shape[2:]) for x in both]
            )
        ints = self.frame.ints
        return ints(self.indptr), ints(self.indices), ints(self.last)

    def make_ragged(self):
        k, v = (
            self.frame.make(self.r.standard_normal((self.kv_lens.sum(), self.hk, d)), self.dtype)
            for d in (self.dim, self.dim_v)
        )
        at = ends(self.kv_lens)
        self.rows = [
            [self.frame.read(x)[at[b] : at[b + 1]] for x in (k, v)] for b in range(self.batch)
        ]
        return k, v

    def check(self, out, lse=None):
        got = self.frame.read(out)
        assert self.frame.is_one(out)
        assert got.shape == (self.q_lens.sum(), self.hq, self.dim_v), str(self)
        at = ends(self.q_lens)
        q_all = self.frame.read(self.q)
        scale = 1.0 / np.sqrt(self.dim) if self.scale is None else self.scale
        scale *= self.scales.get("q_scale", 1.0) * self.scales.get("k_scale", 1.0)
        v_scale = self.scales.get("v_scale", 1.0)
        for b in range(self.batch):
            q, (k, v) = q_all[at[b] : at[b + 1]], self.rows[b]
            off = 0.0
            if self.mode == "ROPE_LLAMA":
                cos, sin = rope_tables(64, self.dim, self.theta or 1e4, self.rope_scale or 1.0)
                n, length = len(q), len(k)
                # A query may stand before the first key; a negative angle has the same cosine.
                places = length - n + np.arange(n)
                turn = np.sign(places + 0.5)[:, None]
                q = rotate(q, np.arange(n), cos[np.abs(places)], turn * sin[np.abs(places)], False)
                k = rotate(k, np.arange(length), cos, sin, False)
                if self.frame.turns_and_rounds:
                    off = turned_logits_error(q, k, scale, self.dtype)
            maths = {
                "scale": scale,
                "causal": self.causal,
                "window": (self.window, -1),
                "softcap": self.softcap or 0.0,
                "slopes": alibi_slopes(self.hq) if self.mode == "ALIBI" else None,
                "rising": True,  # behind the query, too
                "sinks": self.sinks,
            }
            want, want_lse = attention(q, k, v, **maths)
            rows = slice(at[b], at[b + 1])
            check_close(
                got[rows],
                want * v_scale,
                self.dtype,
                8.0,
                f"{self}: out of {b}",
                self.frame.products(self.dtype),
                weighed(q, k, v, **maths) * abs(v_scale),
                2 * off,  # each weight, and their sum
            )
            if lse is not None:
                check_close(
                    self.frame.read(lse)[rows],
                    want_lse / LN2,
                    "f32",
                    16.0,
                    f"{self}: lse of {b}",
                    off=off / LN2,
                )


def run_and_check(case, run):
    kwargs = dict(case.scales)
    if case.mode == "ALIBI":
        with pytest.raises(NotImplementedError, match="LSE"):
            run(return_lse=True, **kwargs)
        case.check(run(**kwargs))
    else:
        case.check(*run(return_lse=True, **kwargs))


def workspace(frame):
    return frame.ints(np.zeros(16))
