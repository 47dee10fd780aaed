# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache against the definition, over FlashAttention's own parameters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from definition import attention, check_close, rope_tables, rotate, weighed
from gpu_frames import everywhere

from octavo.compat import flash_attn, flash_attn_interface


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


@everywhere
@pytest.mark.parametrize("seed", range(160))
def test_equals_the_definition(frame, seed):
    call = Call(draw(seed, frame.dtypes), frame)
    call.check(*call.run())


@everywhere
@pytest.mark.parametrize("seed", range(160, 176))
def test_fa3_module_gives_the_same(frame, seed):
    call = Call(draw(seed, frame.dtypes), frame)
    call.kwargs["page_table"] = call.kwargs.pop("block_table", None)
    call.check(*call.run(flash_attn_interface.flash_attn_with_kvcache))


@everywhere
def test_returns_out_alone_without_lse(frame):
    q, cache = frame.make(np.ones((1, 1, 2, 8))), frame.make(np.ones((1, 4, 2, 8)))
    out = flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3)
    assert frame.is_one(out)
    assert tuple(out.shape) == (1, 1, 2, 8)
    np.testing.assert_allclose(frame.read(out), 1.0)


@everywhere
def test_without_lengths_the_whole_cache_counts(frame):
    r = np.random.default_rng(3)
    q, k, v = (r.standard_normal(s) for s in ((2, 1, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8)))
    out = flash_attn.flash_attn_with_kvcache(frame.make(q), frame.make(k), frame.make(v))
    for b in range(2):
        want, _ = attention(*(x[b].astype(np.float32) for x in (q, k, v)))
        check_close(frame.read(out)[b], want, "f32", 4.0)


@everywhere
def test_empty_sequences_give_zero_and_minus_infinity(frame):
    q, cache = frame.make(np.ones((2, 1, 2, 8))), frame.make(np.ones((2, 4, 2, 8)))
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=frame.ints([0, 2]), return_softmax_lse=True
    )
    assert (frame.read(out)[0] == 0).all()
    assert (frame.read(lse)[0] == -np.inf).all()
    np.testing.assert_allclose(frame.read(out)[1], 1.0)


@everywhere
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_descales_multiply_queries_keys_and_values(frame, dtype, ragged):
    if dtype not in frame.dtypes:
        pytest.skip(f"{frame.name} has no {dtype} here")
    r = np.random.default_rng(5)
    q, k, v = (
        frame.make(r.standard_normal(s), dtype) for s in ((2, 3, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    )
    scales = {
        n: r.choice([0.75, 1.0, 1.5, 2.0], (2, 2)).astype(np.float32) for n in ("q", "k", "v")
    }
    ends = {"cu_seqlens_q": frame.ints([0, 3, 6]), "max_seqlen_q": 3} if ragged else {}
    out = flash_attn.flash_attn_with_kvcache(
        q.reshape(6, 4, 8) if ragged else q,
        k,
        v,
        cache_seqlens=6,
        causal=True,
        **ends,
        **{f"{n}_descale": frame.make(s) for n, s in scales.items()},
    )
    got = frame.read(out).reshape(2, 3, 4, 8)
    for b in range(2):
        # The queries take both scales of the logits, and are rounded with them.
        both = np.repeat(scales["q"][b] * scales["k"][b], 2)[None, :, None]
        scaled = frame.read(frame.make(frame.read(q)[b] * both, dtype))
        want, _ = attention(scaled, frame.read(k)[b], frame.read(v)[b], causal=True)
        want *= np.repeat(scales["v"][b], 2)[None, :, None]
        # The answer is rounded before v's scale and after it.
        check_close(got[b], want, dtype, 8.0, f"{dtype} {b}", frame.products(dtype))


@everywhere
def test_num_splits_and_packing_change_nothing(frame):
    call = Call(draw(7, ["f32"]), frame)
    first = [frame.read(x).copy() for x in call.run()]
    call = Call(draw(7, ["f32"]), frame)
    call.kwargs.update(num_splits=3, pack_gqa=True)
    for a, b in zip(first, (frame.read(x) for x in call.run()), strict=True):
        assert np.array_equal(a, b)


@everywhere
def test_the_cache_is_not_copied(frame):
    call = Call(dataclasses.replace(draw(11, ["f32"]), new_len=2, rotary=""), frame)
    before = frame.address(call.k_cache), frame.address(call.v_cache)
    call.check(*call.run())
    assert (frame.address(call.k_cache), frame.address(call.v_cache)) == before


@pytest.mark.parametrize(
    "option",
    [
        {"softmax_scale": 0.0},
        {"qv": 1.5},
        {"attention_chunk": 4},
        {"scheduler_metadata": object()},
        {"sm_margin": 2},
    ],
    ids=lambda o: next(iter(o)),
)
def test_what_is_not_covered_is_named(frame, option):
    q, cache = frame.make(np.ones((1, 1, 2, 8))), frame.make(np.ones((1, 4, 2, 8)))
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3, **option)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": None}, "k and v"),
        ({"cache_seqlens": None}, "cache_seqlens"),
        ({"cache_seqlens": 4}, "kv_lens"),
        ({"rotary_cos": 1}, "rotary_cos and rotary_sin"),
        ({"num_splits": -1}, "num_splits"),
        ({"page_table": 1, "block_table": 1}, "block_table and page_table"),
        ({"q": np.ones((1, 1, 3, 8))}, "q: wanted a multiple of 2 heads of 8"),
        ({"q": np.ones((1, 1, 2, 4))}, "q: wanted a multiple of 2 heads of 8"),
        ({"q": np.ones((2, 1, 2, 8)), "cache_seqlens": [1, 2]}, "row of sequence 1"),
        ({"sinks": np.ones(3)}, "sinks"),
        ({"alibi_slopes": np.ones(3)}, "alibi_slopes"),
        ({"k_descale": np.ones((2, 2))}, "k_descale"),
        ({"v_descale": np.ones((1, 1))}, "v_descale"),
        ({"cache_leftpad": [-1]}, "cache_leftpad"),
        ({"cache_batch_idx": [1]}, "row"),
        ({"block_table": np.array([[1]])}, "page_table"),
        ({"block_table": np.array([0])}, "page_table: wanted two axes"),
        (
            {
                "block_table": np.array([[0]]),
                "cache_leftpad": np.array([1]),
                "cache_batch_idx": np.array([-1]),
            },
            "cache_batch_idx",
        ),
        ({"cache_seqlens": [2**32 + 3]}, "cache_seqlens: wanted 32 bits, got 4294967299"),
        ({"block_table": [[2**32]]}, "page_table: wanted 32 bits, got 4294967296"),
        ({"softcap": -1.0}, "softcap"),
        ({"softmax_scale": float("nan")}, "softmax_scale"),
    ],
)
def test_wrong_input_is_an_error_and_changes_nothing(frame, change, message):
    cache = frame.make(np.ones((1, 4, 2, 8)))
    arguments = {
        "q": frame.make(np.ones((1, 1, 2, 8))),
        "k": frame.make(np.full((1, 1, 2, 8), 2.0)),
        "v": frame.make(np.full((1, 1, 2, 8), 2.0)),
        "cache_seqlens": 3,
    }
    for name, value in change.items():
        if isinstance(value, np.ndarray):
            value = frame.make(value) if value.dtype == np.float64 else frame.ints(value)
        arguments[name] = value
    with pytest.raises(ValueError, match=message):
        flash_attn.flash_attn_with_kvcache(k_cache=cache, v_cache=cache, **arguments)
    assert (frame.read(cache) == 1).all()


def test_lengths_and_windows_may_be_scalars_of_the_framework(frame):
    """FlashAttention's own tests draw a window as a tensor."""
    r = np.random.default_rng(8)
    q, k, v = (
        r.standard_normal(s).astype(np.float32) for s in ((1, 3, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8))
    )
    out = flash_attn.flash_attn_with_kvcache(
        *(frame.make(x) for x in (q, k, v)),
        cache_seqlens=np.int64(7),
        window_size=frame.ints([2, 1], np.int64),
    )
    want, _ = attention(q[0], k[0, :7], v[0, :7], window=(2, 1))
    check_close(frame.read(out)[0], want, "f32", 4.0)
