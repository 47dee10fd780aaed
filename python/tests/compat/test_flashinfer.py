# SPDX-License-Identifier: Apache-2.0
"""The front flashinfer against the definition, over FlashInfer's own parameters."""

from __future__ import annotations

import numpy as np
import pytest
from definition import attention, check_close, rope_tables, rotate
from octavo.compat import flashinfer

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
        if self.mode == "ALIBI" and not decode:
            self.causal = True
        self.window = pick(-1, -1, 6)
        self.scale = pick(None, 0.4)
        self.rope_scale, self.theta = pick((None, None), (2.0, 5e4))
        self.sinks = r.standard_normal(self.hq).astype(np.float32) if pick(False, True) else None
        self.scales = pick({}, {"q_scale": 1.5, "k_scale": 0.5, "v_scale": 2.0})

    def __str__(self):
        skip = ("r", "frame", "sinks")
        return " ".join(f"{k}={v}" for k, v in vars(self).items() if k not in skip and not k.endswith("64"))

    def maths(self):
        return dict(
            pos_encoding_mode=self.mode,
            window_left=self.window,
            logits_soft_cap=self.softcap,
            sm_scale=self.scale,
            rope_scale=self.rope_scale,
            rope_theta=self.theta,
        )

    def types(self):
        return dict(q_data_type=NAMES[self.dtype], kv_data_type=self.frame.dtype(self.dtype))

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
        k, v = (np.full((total, self.page_size, self.hk, d), np.nan) for d in (self.dim, self.dim_v))
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
            where = [(pages[self.indptr[b] + j // self.page_size], j % self.page_size) for j in range(n)]
            self.rows.append([np.array([x[w] for w in where]).reshape(n, *x.shape[2:]) for x in both])
        ints = self.frame.ints
        return ints(self.indptr), ints(self.indices), ints(self.last)

    def make_ragged(self):
        k, v = (
            self.frame.make(self.r.standard_normal((self.kv_lens.sum(), self.hk, d)), self.dtype)
            for d in (self.dim, self.dim_v)
        )
        at = ends(self.kv_lens)
        self.rows = [[self.frame.read(x)[at[b] : at[b + 1]] for x in (k, v)] for b in range(self.batch)]
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
            if self.mode == "ROPE_LLAMA":
                cos, sin = rope_tables(64, self.dim, self.theta or 1e4, self.rope_scale or 1.0)
                n, length = len(q), len(k)
                # A query may stand before the first key; a negative angle has the same cosine.
                places = length - n + np.arange(n)
                turn = np.sign(places + 0.5)[:, None]
                q = rotate(q, np.arange(n), cos[np.abs(places)], turn * sin[np.abs(places)], False)
                k = rotate(k, np.arange(length), cos, sin, False)
            want, want_lse = attention(
                q,
                k,
                v,
                scale=scale,
                causal=self.causal,
                window=(self.window, -1),
                softcap=self.softcap or 0.0,
                slopes=alibi_slopes(self.hq) if self.mode == "ALIBI" else None,
                sinks=self.sinks,
            )
            rows = slice(at[b], at[b + 1])
            check_close(got[rows], want * v_scale, self.dtype, 8.0, f"{self}: out of {b}")
            if lse is not None:
                check_close(self.frame.read(lse)[rows], want_lse / LN2, "f32", 16.0, f"{self}: lse of {b}")


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


@pytest.mark.parametrize("seed", range(60))
def test_decode_over_pages(frame, seed):
    case = Case(seed, frame, decode=True)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame), case.layout, use_tensor_cores=True)
    arrays = case.make_pages()
    wrapper.plan(
        *arrays, case.hq, case.hk, case.dim, case.page_size, q_len_per_req=case.q_len, **case.maths(), **case.types()
    )
    q = case.make_queries()
    sinks = None if case.sinks is None else frame.make(case.sinks)
    run_and_check(case, lambda **k: wrapper.run(q, case.cache, sinks=sinks, **k))


@pytest.mark.parametrize("seed", range(100, 160))
def test_prefill_over_pages(frame, seed):
    case = Case(seed, frame)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(frame), case.layout)
    arrays = case.make_pages()
    wrapper.plan(
        frame.ints(ends(case.q_lens)),
        *arrays,
        case.hq,
        case.hk,
        case.dim,
        case.page_size,
        case.dim_v,
        causal=case.causal,
        **case.maths(),
        **case.types(),
    )
    q = case.make_queries()
    sinks = None if case.sinks is None else frame.make(case.sinks)
    run_and_check(case, lambda **k: wrapper.run(q, case.cache, sinks=sinks, **k))


@pytest.mark.parametrize("seed", range(200, 250))
def test_prefill_over_ragged_keys(frame, seed):
    case = Case(seed, frame)
    case.layout, case.sinks = "NHD", None
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(frame))
    k, v = case.make_ragged()
    wrapper.plan(
        frame.ints(ends(case.q_lens)),
        frame.ints(ends(case.kv_lens)),
        case.hq,
        case.hk,
        case.dim,
        case.dim_v,
        causal=case.causal,
        **case.maths(),
        **case.types(),
    )
    q = case.make_queries()
    run_and_check(case, lambda **kw: wrapper.run(q, k, v, **kw))


@pytest.mark.parametrize("seed", range(300, 330))
def test_single_prefill(frame, seed):
    case = Case(seed, frame)
    case.batch, case.sinks = 1, None
    case.kv_lens, case.q_lens = case.kv_lens[:1], case.q_lens[:1]
    case.scales = {k: v for k, v in case.scales.items() if k != "q_scale"}
    k, v = case.make_ragged()
    if case.layout == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    q = case.make_queries()
    run_and_check(
        case,
        lambda **kw: flashinfer.single_prefill_with_kv_cache(
            q, k, v, causal=case.causal, kv_layout=case.layout, **case.maths(), **kw
        ),
    )


@pytest.mark.parametrize("seed", range(400, 420))
def test_single_decode(frame, seed):
    case = Case(seed, frame, decode=True)
    case.batch, case.sinks, case.causal = 1, None, False
    case.kv_lens, case.q_lens = case.kv_lens[:1], np.array([1])
    k, v = case.make_ragged()
    if case.layout == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    q = case.make_queries()

    def run(return_lse=False, **kw):
        result = flashinfer.single_decode_with_kv_cache(
            q[0], k, v, case.layout, **case.maths(), return_lse=return_lse, **kw
        )
        if not return_lse:
            assert tuple(result.shape) == (case.hq, case.dim)
            return result[None]
        assert tuple(result[0].shape) == (case.hq, case.dim) and tuple(result[1].shape) == (case.hq,)
        return result[0][None], result[1][None]

    run_and_check(case, run)


def test_deprecated_names_give_the_same(frame):
    case = Case(17, frame, decode=True)
    case.mode, case.softcap, case.scales, case.sinks, case.q_len = "NONE", None, {}, None, 1
    case.q_lens, case.causal = np.ones(case.batch, int), False
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame), case.layout)
    arrays = case.make_pages()
    wrapper.begin_forward(*arrays, case.hq, case.hk, case.dim, case.page_size, **case.types())
    q = case.make_queries()
    case.check(wrapper.forward(q, case.cache, window_left=case.window, sm_scale=case.scale))
    case.check(*wrapper.forward_return_lse(q, case.cache, window_left=case.window, sm_scale=case.scale))
    case.check(*wrapper.run_return_lse(q, case.cache))
    wrapper.end_forward()


def test_results_go_to_given_arrays(frame):
    case = Case(21, frame, decode=True)
    case.mode, case.sinks, case.scales = "NONE", None, {}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame), case.layout, use_tensor_cores=True)
    arrays = case.make_pages()
    wrapper.plan(
        *arrays, case.hq, case.hk, case.dim, case.page_size, q_len_per_req=case.q_len, **case.maths(), **case.types()
    )
    q = case.make_queries()
    out = frame.make(np.full((len(q), case.hq, case.dim), 7.0), case.dtype)
    lse = frame.make(np.full((len(q), case.hq), 7.0))
    got = wrapper.run(q, case.cache, out=out, lse=lse, return_lse=True)
    assert got[0] is out and got[1] is lse
    case.check(out, lse)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5])
def test_append_writes_tokens_and_nothing_else(frame, layout, page_size):
    r = np.random.default_rng(4)
    kv_lens, new = np.array([7, 0, 5, 12]), np.array([3, 0, 5, 1])
    counts = -(-kv_lens // page_size)
    indices = r.permutation(counts.sum() + 1)[: counts.sum()]
    indptr, last = ends(counts), np.where(counts > 0, kv_lens - (counts - 1) * page_size, 0)
    shape = (counts.sum() + 1, 2) + ((page_size, 2) if layout == "NHD" else (2, page_size)) + (8,)
    cache = frame.make(r.standard_normal(shape), "f16")
    want = frame.read(cache).copy()
    k, v = (frame.make(r.standard_normal((new.sum() + 2, 2, 8)), "f16") for _ in range(2))
    arrays = frame.ints(indptr), frame.ints(indices), frame.ints(last)
    lens = flashinfer.get_seq_lens(arrays[0], arrays[2], page_size)
    batch, positions = flashinfer.get_batch_indices_positions(frame.ints(ends(new)), lens, int(new.sum()) + 2)
    assert frame.read(batch).tolist() == [0, 0, 0, 2, 2, 2, 2, 2, 3, -1, -1]
    assert frame.read(positions).tolist() == [4, 5, 6, 0, 1, 2, 3, 4, 11, -1, -1]
    flashinfer.append_paged_kv_cache(k, v, batch, positions, cache, arrays[1], arrays[0], arrays[2], layout)
    for i in range(new.sum()):
        b, p = int(batch[i]), int(positions[i])
        page, slot = indices[indptr[b] + p // page_size], p % page_size
        for half, x in enumerate((k, v)):
            target = want[page, half, slot] if layout == "NHD" else want[page, half, :, slot]
            target[...] = frame.read(x)[i]
    assert np.array_equal(frame.read(cache), want)


def test_append_beyond_the_pages_is_an_error_and_writes_nothing(frame):
    cache = frame.make(np.zeros((2, 2, 4, 1, 8)))
    x = frame.make(np.ones((2, 1, 8)))
    with pytest.raises(ValueError, match="positions"):
        flashinfer.append_paged_kv_cache(
            x, x, frame.ints([0, 0]), frame.ints([3, 4]), cache, frame.ints([1]), frame.ints([0, 1]), frame.ints([4])
        )
    assert (frame.read(cache) == 0).all()


def test_merge_gives_attention_over_all_keys(frame):
    r = np.random.default_rng(2)
    q, k, v = (r.standard_normal(s) for s in ((5, 2, 8), (9, 2, 8), (9, 2, 8)))
    parts = [attention(q, k[s], v[s]) for s in (slice(0, 3), slice(3, 4), slice(4, 9))]
    parts.append((np.zeros((5, 2, 8)), np.full((5, 2), -np.inf)))
    want, want_lse = attention(q, k, v)
    outs, lses = zip(*((frame.make(o), frame.make(s / LN2)) for o, s in parts))
    stack = frame.make(np.stack([frame.read(o) for o in outs], 1)), frame.make(np.stack([frame.read(s) for s in lses], 1))
    out, lse = flashinfer.merge_states(*stack)
    check_close(frame.read(out), want, "f32", 8.0)
    check_close(frame.read(lse), want_lse / LN2, "f32", 16.0)
    out, lse = flashinfer.merge_state(outs[0], lses[0], outs[1], lses[1])
    out, lse = flashinfer.merge_state(out, lse, outs[3], lses[3])
    flashinfer.merge_state_in_place(out, lse, outs[2], lses[2])
    check_close(frame.read(out), want, "f32", 8.0)
    check_close(frame.read(lse), want_lse / LN2, "f32", 16.0)


def test_merge_in_place_leaves_masked_rows(frame):
    v, s = frame.make(np.zeros((3, 1, 4))), frame.make(np.zeros((3, 1)))
    other, other_s = frame.make(np.ones((3, 1, 4))), frame.make(np.zeros((3, 1)))
    mask = frame.make([1, 0, 1]) > 0
    flashinfer.merge_state_in_place(v, s, other, other_s, mask)
    np.testing.assert_allclose(frame.read(v)[:, 0, 0], [0.5, 0.0, 0.5])
    np.testing.assert_allclose(frame.read(s)[:, 0], [1.0, 0.0, 1.0])


def test_merge_of_nothing_is_nothing(frame):
    v, s = frame.make(np.zeros((1, 1, 4))), frame.make(np.full((1, 1), -np.inf))
    out, lse = flashinfer.merge_state(v, s, v, s)
    assert (frame.read(out) == 0).all() and (frame.read(lse) == -np.inf).all()


def graph_wrapper(frame):
    buffers = [frame.ints(np.zeros(n)) for n in (3, 8, 2)]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(frame), "NHD", use_cuda_graph=True, **dict(zip(
            ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"), buffers))
    )
    return wrapper, buffers


def test_graph_mode_fills_its_buffers_and_fixes_the_batch(frame):
    wrapper, buffers = graph_wrapper(frame)
    assert wrapper.is_cuda_graph_enabled
    wrapper.plan(frame.ints([0, 1, 3]), frame.ints([4, 2, 5]), frame.ints([1, 3]), 2, 2, 8, 4, q_data_type="float32")
    assert [frame.read(b).tolist() for b in buffers] == [[0, 1, 3], [4, 2, 5, 0, 0, 0, 0, 0], [1, 3]]
    with pytest.raises(ValueError, match="batch size"):
        wrapper.plan(frame.ints([0, 1]), frame.ints([4]), frame.ints([1]), 2, 2, 8, 4)
    with pytest.raises(ValueError, match="paged_kv_indices_buffer"):
        wrapper.plan(frame.ints([0, 1, 9]), frame.ints(np.arange(9)), frame.ints([1, 1]), 2, 2, 8, 4)
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame), use_cuda_graph=True)


@pytest.mark.parametrize(
    "option",
    ["custom_mask", "packed_custom_mask", "prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr"],
)
def test_what_plan_does_not_cover_is_named(frame, option):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(frame))
    arrays = [frame.ints(x) for x in ([0, 1], [0, 1], [0], [1])]
    with pytest.raises(NotImplementedError, match=option):
        wrapper.plan(*arrays, 1, 1, 8, 4, **{option: frame.ints([1])})


def test_what_run_does_not_cover_is_named(frame):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame))
    wrapper.plan(frame.ints([0, 1]), frame.ints([0]), frame.ints([1]), 1, 1, 8, 4, q_data_type="float32")
    q, cache = frame.make(np.ones((1, 1, 8))), frame.make(np.ones((1, 2, 4, 1, 8)))
    for option in ("kv_cache_sf", "skip_softmax_threshold_scale_factor"):
        with pytest.raises(NotImplementedError, match=option):
            wrapper.run(q, cache, **{option: 1.0})


def test_wrong_input_is_an_error(frame):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame))
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(frame.make(np.ones((1, 1, 8))), frame.make(np.ones((1, 2, 4, 1, 8))))
    arrays = frame.ints([0, 1]), frame.ints([0])
    with pytest.raises(ValueError, match="last_page_len"):
        wrapper.plan(*arrays, frame.ints([5]), 1, 1, 8, 4)
    with pytest.raises(ValueError, match="num_qo_heads"):
        wrapper.plan(*arrays, frame.ints([1]), 3, 2, 8, 4)
    with pytest.raises(KeyError, match="pos_encoding_mode"):
        wrapper.plan(*arrays, frame.ints([1]), 1, 1, 8, 4, pos_encoding_mode="ROPE")
    wrapper.plan(*arrays, frame.ints([1]), 1, 1, 8, 4, q_data_type="float32")
    good, cache = frame.make(np.ones((1, 1, 8))), frame.make(np.ones((1, 2, 4, 1, 8)))
    for q, kv, message in (
        (frame.make(np.ones((2, 1, 8))), cache, "rows"),
        (frame.make(np.ones((1, 1, 8)), "f16"), cache, "dtype"),
        (good, frame.make(np.ones((1, 2, 3, 1, 8))), "page_size"),
        (good, frame.make(np.ones((1, 2, 4, 2, 8))), "heads"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(q, kv)
    with pytest.raises(ValueError, match="window_left"):
        wrapper.run(good, cache, window_left=3)
    with pytest.raises(KeyError, match="kv_layout"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame), "DHN")
