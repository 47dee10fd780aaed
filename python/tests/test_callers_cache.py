# SPDX-License-Identifier: Apache-2.0
"""attend, append_tokens and their neighbours over the caller's arrays, against the definition."""

import numpy as np
import pytest

import octavo
from calls import plain_call_again
from reference import attend_rows, rotate

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


class Setup:
    """Three sequences (12, 0 and 7 tokens, of which 4, 0 and 1 are new) in pages of 3 slots."""

    def __init__(self, random, num_q_heads=4, dim=16, dim_v=8):
        self.lens, self.new = [12, 0, 7], [4, 0, 1]
        self.offsets = np.array([0, 4, 4, 5], np.int32)
        self.k = [random.standard_normal((n, 2, dim), np.float32) for n in self.lens]
        self.v = [random.standard_normal((n, 2, dim_v), np.float32) for n in self.lens]
        self.q = random.standard_normal((5, num_q_heads, dim), np.float32)
        self.k_cache = np.full((9, 3, 2, dim), np.nan, np.float32)
        self.v_cache = np.full((9, 3, 2, dim_v), np.nan, np.float32)
        # Rows of the table are the sequences' in another order; what isn't theirs is nonsense.
        self.table = np.full((4, 5), 2**31 - 1, np.int32)
        self.rows = np.array([2, 3, 0], np.int32)
        self.table[2, :4] = [8, 1, 5, 3]
        self.table[0, :3] = [2, 7, 0]

    @property
    def where(self):
        return {
            "kv_lens": np.array(self.lens, np.int32),
            "token_offsets": self.offsets,
            "page_table": self.table,
            "row_indices": self.rows,
        }

    def fill(self, keys=None):
        for b, n in enumerate(self.lens):
            for j in range(n):
                page = self.table[self.rows[b], j // 3]
                self.k_cache[page, j % 3] = (keys or self.k)[b][j]
                self.v_cache[page, j % 3] = self.v[b][j]

    def new_rows(self, which):
        parts = [rows[len(rows) - n :] for rows, n in zip(which, self.new, strict=True)]
        return np.concatenate(parts)

    def positions(self, b):
        return np.arange(self.lens[b] - self.new[b], self.lens[b])

    def wanted(self, keys=None, q=None, **words):
        q = self.q if q is None else q
        outs, lses = [], []
        for b in range(3):
            rows = q[self.offsets[b] : self.offsets[b + 1]]
            out, lse = attend_rows(rows, (keys or self.k)[b], self.v[b], self.positions(b), **words)
            outs.append(out)
            lses.append(lse)
        return np.concatenate(outs), np.concatenate(lses)


@pytest.fixture
def setup(random):
    return Setup(random)


@pytest.mark.parametrize("backend", ["auto", "cpu", "unfused"])
@pytest.mark.parametrize(
    ("words", "reference"),
    [
        ({}, {}),
        ({"mask": "full"}, {"causal": False}),
        ({"window": (3, 0)}, {"window": (3, 0)}),
        ({"mask": "full", "window": (-1, 2)}, {"causal": False, "window": (-1, 2)}),
        ({"softcap": 1.5}, {"softcap": 1.5}),
        ({"softmax_scale": 0.7}, {"scale": 0.7}),
        ({"batch_invariant": True, "num_threads": 1}, {}),
    ],
    ids=str,
)
def test_attend_is_the_definition(setup, backend, words, reference):
    setup.fill()
    out, lse = octavo.attend(
        setup.q, setup.k_cache, setup.v_cache, **setup.where, **words, lse=True, backend=backend
    )
    wanted_out, wanted_lse = setup.wanted(**reference)
    np.testing.assert_allclose(out, wanted_out, **TOLERANCE)
    np.testing.assert_allclose(lse, wanted_lse, **TOLERANCE)


@pytest.mark.parametrize("backend", ["cpu", "unfused"])
def test_pages_may_lie_in_one_list(setup, backend):
    """As FlashInfer's indices: row r of the table are the entries from r on."""
    setup.fill()
    counts = [-(-n // 3) for n in setup.lens]
    starts = np.cumsum([0, *counts[:-1]]).astype(np.int32)
    pages = [setup.table[row, :n] for row, n in zip(setup.rows, counts, strict=True)]
    entries = np.concatenate([*pages, np.full(5, -1, np.int32)])
    table = np.lib.stride_tricks.as_strided(entries, (len(entries) - 4, 5), (4, 4))
    where = setup.where | {"page_table": table, "row_indices": starts}
    arrays = setup.q, setup.k_cache, setup.v_cache
    out = octavo.attend(*arrays, **where, backend=backend)
    np.testing.assert_array_equal(out, octavo.attend(*arrays, **setup.where, backend=backend))


def test_sinks_and_slopes(setup, random):
    setup.fill()
    sinks = random.standard_normal(4, np.float32)
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    out, lse = octavo.attend(
        setup.q,
        setup.k_cache,
        setup.v_cache,
        **setup.where,
        sinks=sinks,
        alibi_slopes=slopes,
        lse=True,
    )
    wanted_out, wanted_lse = setup.wanted(sinks=sinks, slopes=slopes)
    np.testing.assert_allclose(out, wanted_out, **TOLERANCE)
    np.testing.assert_allclose(lse, wanted_lse, **TOLERANCE)


def tables(positions, dim, base):
    angles = np.arange(positions)[:, None] * base ** (-2.0 * np.arange(dim // 2) / dim)
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


@pytest.mark.parametrize(
    ("rope", "reference"),
    [
        (octavo.Rope(), {}),
        (octavo.Rope("interleaved", base=500.0), {"interleaved": True, "base": 500.0}),
        (octavo.Rope(rotary_dim=8), {"rotary_dim": 8}),
        (octavo.Rope(**tables(64, 8, 100.0)), {"rotary_dim": 8, "base": 100.0}),
    ],
    ids=["half", "interleaved", "partial", "tables"],
)
@pytest.mark.parametrize("explicit", [False, True], ids=["own", "given"])
def test_rope_turns_new_keys_and_queries(setup, rope, reference, explicit):
    new_positions = [setup.positions(b) for b in range(3)]
    if explicit:
        new_positions = [positions * 2 + 3 for positions in new_positions]
    flat = np.concatenate(new_positions)
    given = flat.astype(np.int32) if explicit else None

    setup.fill()
    k_new, v_new = setup.new_rows(setup.k), setup.new_rows(setup.v)
    octavo.append_tokens(
        k_new, v_new, setup.k_cache, setup.v_cache, **setup.where, rope=rope, positions=given
    )
    out = octavo.attend(
        setup.q, setup.k_cache, setup.v_cache, **setup.where, rope=rope, positions=given
    )

    keys = []
    for b, n in enumerate(setup.new):
        old, new = setup.k[b][: setup.lens[b] - n], setup.k[b][setup.lens[b] - n :]
        keys.append(np.concatenate([old, rotate(new, new_positions[b], **reference)]))
    wanted, _ = setup.wanted(keys=keys, q=rotate(setup.q, flat, **reference))
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=5e-5)


def test_append_writes_the_last_positions_and_nothing_else(setup):
    before = setup.k_cache.copy()
    k_new, v_new = setup.new_rows(setup.k), setup.new_rows(setup.v)
    octavo.append_tokens(k_new, v_new, setup.k_cache, setup.v_cache, **setup.where)
    written = ~np.isnan(setup.k_cache[..., 0, 0])
    wanted = np.zeros((9, 3), bool)
    for j in range(8, 12):
        wanted[setup.table[2, j // 3], j % 3] = True
    wanted[setup.table[0, 2], 0] = True
    np.testing.assert_array_equal(written, wanted)
    np.testing.assert_array_equal(setup.k_cache[~wanted], before[~wanted])


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
def test_padded_formats_and_rows_without_a_table(random, format):
    lens, new = np.array([6, 9], np.int32), [2, 3]
    k_cache = random.standard_normal((3, 10, 2, 16), np.float32)
    v_cache = random.standard_normal((3, 10, 2, 16), np.float32)
    q = np.full((2, 4, 4, 16), np.nan, np.float32)
    rows = np.array([2, 0], np.int32)
    wanted = np.zeros_like(q, np.float64)
    for b, n in enumerate(new):
        q[b, :n] = random.standard_normal((n, 4, 16), np.float32)
        positions = np.arange(lens[b] - n, lens[b])
        k, v = (cache[rows[b], : lens[b]] for cache in (k_cache, v_cache))
        wanted[b, :n], _ = attend_rows(q[b, :n], k, v, positions)
    if format == "sbhd":
        q, wanted = q.swapaxes(0, 1), wanted.swapaxes(0, 1)
    out = octavo.attend(
        q, k_cache, v_cache, lens, token_offsets=[0, 2, 5], row_indices=rows, format=format
    )
    np.testing.assert_allclose(out, wanted, **TOLERANCE)


def test_without_offsets_all_bring_equally_many(setup, random):
    k_cache, v_cache = random.standard_normal((2, 3, 8, 2, 16), np.float32)
    q = random.standard_normal((3, 2, 4, 16), np.float32)
    lens = [8, 4, 2]
    padded = octavo.attend(q, k_cache, v_cache, lens, format="bshd")
    packed = octavo.attend(q.reshape(6, 4, 16), k_cache, v_cache, np.array(lens))
    np.testing.assert_array_equal(padded.reshape(6, 4, 16), packed)
    with pytest.raises(octavo.InvalidArgument, match="token_offsets: wanted prefix sums"):
        octavo.attend(q.reshape(6, 4, 16)[:5], k_cache, v_cache, lens)


def test_head_major_and_interleaved_caches_are_strides(setup):
    setup.fill()
    wanted = octavo.attend(setup.q, setup.k_cache, setup.v_cache, **setup.where)
    head_major = np.ascontiguousarray(setup.k_cache.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    both = np.full((9, 2, 3, 2, 16), np.nan, np.float32)  # K and V of a page side by side
    both[:, 1, ..., :8] = setup.v_cache
    out = octavo.attend(setup.q, head_major, both[:, 1, ..., :8], **setup.where)
    np.testing.assert_array_equal(out, wanted)


def test_partials_of_two_halves_merge_into_the_whole(random):
    k, v = random.standard_normal((2, 1, 12, 2, 16), np.float32)
    q = random.standard_normal((3, 4, 16), np.float32)
    sinks = random.standard_normal(4, np.float32)
    halves = [
        octavo.attend(q, k[:, part], v[:, part], [6], mask="full", lse=True)
        for part in (np.s_[:6], np.s_[6:])
    ]
    nothing = (np.full_like(halves[0][0], np.nan), np.full((3, 4), -np.inf, np.float32))
    out, lse = octavo.merge([halves[0], nothing, halves[1]], sinks=sinks, lse=True)
    wanted, wanted_lse = octavo.attend(q, k, v, [12], mask="full", sinks=sinks, lse=True)
    np.testing.assert_allclose(out, wanted, **TOLERANCE)
    np.testing.assert_allclose(lse, wanted_lse, **TOLERANCE)


def test_convert_tokens_there_and_back(random):
    x = random.standard_normal((7, 2, 4), np.float32)
    offsets = [0, 3, 3, 7]
    padded = octavo.convert_tokens(x, "thd", "bshd", token_offsets=offsets)
    assert padded.shape == (3, 4, 2, 4)
    np.testing.assert_array_equal(padded[0, :3], x[:3])
    assert not padded[0, 3].any()
    assert not padded[1].any()
    turned = octavo.convert_tokens(padded, "bshd", "sbhd")
    np.testing.assert_array_equal(turned, padded.swapaxes(0, 1))
    back = np.empty((7, 2, 4), np.float16)
    assert octavo.convert_tokens(turned, "sbhd", "thd", token_offsets=offsets, out=back) is back
    np.testing.assert_array_equal(back, x.astype(np.float16))


def test_gather_cache_gives_rows_in_order(setup):
    setup.fill()
    where = setup.where
    del where["token_offsets"]
    keys, values = octavo.gather_cache(setup.k_cache, setup.v_cache, **where)
    assert keys.shape == (3, 12, 2, 16)
    for b, n in enumerate(setup.lens):
        np.testing.assert_array_equal(keys[b, :n], setup.k[b])
        np.testing.assert_array_equal(values[b, :n], setup.v[b])
        assert not keys[b, n:].any()


WRONG = [
    ({"softcap": -1.0}, "softcap"),
    ({"backend": "fused"}, ""),
    ({"out": np.zeros((5, 4, 8), np.int32)}, "out.dtype"),
    ({"lse": np.zeros((4, 4), np.float32)}, "lse.shape"),
    ({"token_offsets": [0, 4, 3, 5]}, "token_offsets[2]"),
]


@pytest.mark.parametrize(("change", "argument"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_check_attend_raises_what_attend_would(setup, change, argument):
    tensors = setup.q, setup.k_cache, setup.v_cache
    words = {**setup.where, **change}
    errors = []
    for function in (octavo.check_attend, octavo.attend):
        with pytest.raises(octavo.Error) as caught:
            function(*tensors, **words)
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    assert type(errors[0]) is type(errors[1])
    assert errors[0].argument == (argument or errors[1].argument)


def test_check_attend_does_nothing(setup):
    out = np.full((5, 4, 8), np.nan, np.float32)
    lse = np.full((5, 4), np.nan, np.float32)
    words = {**setup.where, "out": out, "lse": lse}
    assert octavo.check_attend(setup.q, setup.k_cache, setup.v_cache, **words) is None
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize("wrong", [{"out": np.int32}, {"lse": np.float64}], ids=str)
def test_a_call_again_appends_nothing_unless_attend_takes_its_own(random, wrong):
    q, new, cache = np.ones((2, 1, 2, 8)), np.ones((2, 1, 2, 8)), np.zeros((2, 4, 2, 8))
    q, new, cache = (x.astype(np.float32) for x in (q, new, cache))
    call = plain_call_again(None, "bshd")
    call.append_too("bshd", np.array([0, 1, 2], np.int32), 0, 0, same_step=True)
    results = {"out": np.zeros_like(q), "lse": np.zeros((2, 2), np.float32)}
    given = {name: results[name].astype(dtype) for name, dtype in wrong.items()}
    run = lambda out, lse: call.run(  # noqa: E731
        q, cache, cache, [2, 3], None, None, None, out, lse, None, None, new_k=new, new_v=new
    )
    with pytest.raises(octavo.InvalidArgument, match=next(iter(wrong))):
        run(**(results | given))
    assert not cache.any()
    run(**results)
    assert cache[[0, 1], [1, 2]].all()


def test_explain_tells_of_the_callers_cache(setup):
    explanation = octavo.explain(setup.q, setup.k_cache, setup.v_cache)
    assert explanation.chosen == "cpu"
    spread = np.broadcast_to(setup.k_cache[..., None], (*setup.k_cache.shape, 2))[..., 0]
    assert octavo.explain(setup.q, spread, setup.v_cache).chosen in ("cpu", "unfused")
