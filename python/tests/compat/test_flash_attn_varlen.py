# SPDX-License-Identifier: Apache-2.0
"""flash_attn_varlen_func, flash_attn_func, the packed forms and flash_attn_combine against the
definition.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from definition import attention, check_close, weighed
from gpu_frames import everywhere

from octavo.compat import flash_attn, flash_attn_interface

SIGNATURES = {
    (flash_attn, "flash_attn_with_kvcache"): (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved "
        "alibi_slopes num_splits return_softmax_lse"
    ),
    (flash_attn, "flash_attn_varlen_func"): (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale "
        "causal window_size softcap alibi_slopes deterministic return_attn_probs block_table"
    ),
    (flash_attn, "flash_attn_func"): (
        "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
        "return_attn_probs"
    ),
    (flash_attn_interface, "flash_attn_with_kvcache"): (
        "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens "
        "q_descale k_descale v_descale softmax_scale causal window_size attention_chunk softcap "
        "rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse"
    ),
    (flash_attn_interface, "flash_attn_varlen_func"): (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
        "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk "
        "softcap num_splits pack_gqa deterministic sm_margin return_attn_probs"
    ),
    (flash_attn_interface, "flash_attn_func"): (
        "q k v softmax_scale causal qv q_descale k_descale v_descale window_size "
        "attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs"
    ),
}


@pytest.mark.parametrize(
    "where", SIGNATURES, ids=lambda w: f"{w[0].__name__.rpartition('.')[2]}.{w[1]}"
)
def test_positional_arguments_are_those_of_the_library(where):
    parameters = inspect.signature(getattr(*where)).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == SIGNATURES[where].split()


def draw(seed, dtypes):
    r = np.random.default_rng(seed)
    pick = lambda *xs: xs[int(r.integers(len(xs)))]  # noqa: E731
    batch = pick(1, 2, 5)
    hk = pick(1, 2)
    dim = pick(8, 32)
    return {
        "seed": seed,
        "dtype": dtypes[seed % len(dtypes)],
        "q_lens": r.integers(0, 9, batch),
        "k_lens": r.integers(0, 20, batch),
        "heads": (hk * pick(1, 4), hk),
        "dims": (dim, pick(dim, 16)),
        "page_size": pick(0, 0, 1, 5, 16),
        "causal": pick(True, False),
        "window": pick((-1, -1), (4, 0), (3, 2)),
        "softcap": pick(0.0, 2.0),
        "alibi": pick("", "heads", "batch"),
        "sinks": pick(False, True),
        "scale": pick(None, 0.3),
        "used": pick(False, False, True),
    }


def ends(lens):
    return np.concatenate([[0], np.cumsum(lens)])


def call_and_check(c, frame):
    r = np.random.default_rng(c["seed"] + 20_000)
    (hq, hk), (dim, dim_v) = c["heads"], c["dims"]
    q_lens, k_lens = c["q_lens"], c["k_lens"]
    q = frame.make(r.standard_normal((q_lens.sum() + 1, hq, dim)), c["dtype"])
    k64, v64 = (
        r.standard_normal((k_lens.sum(), hk, dim)),
        r.standard_normal((k_lens.sum(), hk, dim_v)),
    )
    kwargs = {}
    if c["page_size"]:
        size = c["page_size"]
        per_row = max(-(-int(k_lens.max()) // size), 1)
        table = r.permutation(len(k_lens) * per_row).reshape(len(k_lens), per_row)
        pages = [np.full((table.size, size, *x.shape[1:]), np.nan) for x in (k64, v64)]
        for b, n in enumerate(k_lens):
            for j in range(n):
                for page, x in zip(pages, (k64, v64), strict=True):
                    page[table[b, j // size], j % size] = x[ends(k_lens)[b] + j]
        k, v = (frame.make(p, c["dtype"]) for p in pages)
        kwargs["block_table"] = frame.ints(table)
        rows = [
            np.array(
                [
                    frame.read(x)[table[b, j // size], j % size]
                    for b, n in enumerate(k_lens)
                    for j in range(n)
                ]
            )
            for x in (k, v)
        ]
        rows = [x.reshape(-1, *p.shape[2:]) for x, p in zip(rows, pages, strict=True)]
    else:
        k, v = frame.make(k64, c["dtype"]), frame.make(v64, c["dtype"])
        rows = [frame.read(k), frame.read(v)]
    used_q, used_k = q_lens, k_lens
    if c["used"]:
        used_q = np.array([r.integers(0, n + 1) for n in q_lens])
        used_k = np.array([r.integers(0, n + 1) for n in k_lens])
        kwargs.update(seqused_q=frame.ints(used_q), seqused_k=frame.ints(used_k))
    slopes = sinks = None
    if c["alibi"]:
        slopes = r.uniform(0.01, 0.5, (len(q_lens), hq) if c["alibi"] == "batch" else hq).astype(
            np.float32
        )
        kwargs["alibi_slopes"] = frame.make(slopes)
    if c["sinks"]:
        sinks = r.standard_normal(hq).astype(np.float32)
        kwargs["learnable_sink"] = frame.make(sinks)
    out, lse, probs = flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        frame.ints(ends(q_lens)),
        frame.ints(ends(k_lens)),
        int(q_lens.max()),
        int(k_lens.max()),
        softmax_scale=c["scale"],
        causal=c["causal"],
        window_size=c["window"],
        softcap=c["softcap"],
        return_attn_probs=True,
        **kwargs,
    )
    got, got_lse = frame.read(out), frame.read(lse)
    assert got_lse.shape == (hq, len(q))
    assert tuple(probs.shape) == (0,)
    for b in range(len(q_lens)):
        first, first_k = ends(q_lens)[b], ends(k_lens)[b]
        mine = slice(first, first + used_q[b])
        arrays = frame.read(q)[mine], *(x[first_k : first_k + used_k[b]] for x in rows)
        maths = {
            "scale": c["scale"],
            "causal": c["causal"],
            "window": c["window"],
            "softcap": c["softcap"],
            "slopes": slopes[b] if c["alibi"] == "batch" else slopes,
            "sinks": sinks,
        }
        want, want_lse = attention(*arrays, **maths)
        rounding = frame.products(c["dtype"]), weighed(*arrays, **maths)
        check_close(got[mine], want, c["dtype"], 4.0, f"{c}: out of sequence {b}", *rounding)
        check_close(got_lse[:, mine].T, want_lse, "f32", 8.0, f"{c}: lse of sequence {b}")
        beyond = slice(first + used_q[b], first + q_lens[b])
        assert (got[beyond] == 0).all()
        assert (got_lse[:, beyond] == -np.inf).all()
    assert (got[-1] == 0).all(), "padding at the end"
    assert (got_lse[:, -1] == -np.inf).all(), "padding at the end"


@everywhere
@pytest.mark.parametrize("seed", range(80))
def test_ragged_equals_the_definition(frame, seed):
    call_and_check(draw(seed, frame.dtypes), frame)


@everywhere
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=["fa2", "fa3"])
def test_dense_equals_the_definition(frame, module, seed):
    c = draw(seed + 500, frame.dtypes)
    r = np.random.default_rng(seed)
    (hq, hk), (dim, dim_v) = c["heads"], c["dims"]
    q = frame.make(r.standard_normal((3, 5, hq, dim)), c["dtype"])
    k = frame.make(r.standard_normal((3, seed, hk, dim)), c["dtype"])
    v = frame.make(r.standard_normal((3, seed, hk, dim_v)), c["dtype"])
    options = {
        "softmax_scale": c["scale"],
        "causal": c["causal"],
        "window_size": c["window"],
        "softcap": c["softcap"],
    }
    out, lse, *rest = module.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert len(rest) == (1 if module is flash_attn else 0)
    assert tuple(lse.shape) == (3, hq, 5)
    for b in range(3):
        arrays = [frame.read(x)[b] for x in (q, k, v)]
        maths = {x: c[x] for x in ("scale", "causal", "window", "softcap")}
        want, want_lse = attention(*arrays, **maths)
        rounding = frame.products(c["dtype"]), weighed(*arrays, **maths)
        check_close(frame.read(out)[b], want, c["dtype"], 4.0, f"{c}", *rounding)
        check_close(frame.read(lse)[b].T, want_lse, "f32", 8.0, f"{c}")


@everywhere
def test_packed_forms_equal_the_plain_one(frame):
    r = np.random.default_rng(0)
    qkv = frame.make(r.standard_normal((2, 6, 3, 2, 8)))
    want = frame.read(
        flash_attn.flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], causal=True)
    )
    q, kv = qkv[:, :, 0], qkv[:, :, 1:]
    flat, flat_kv = qkv.reshape(12, 3, 2, 8), kv.reshape(12, 2, 2, 8)
    cu = frame.ints([0, 6, 12])
    got = [
        flash_attn.flash_attn_qkvpacked_func(qkv, causal=True),
        flash_attn.flash_attn_kvpacked_func(q, kv, causal=True),
        flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu, 6, causal=True).reshape(2, 6, 2, 8),
        flash_attn.flash_attn_varlen_kvpacked_func(
            q.reshape(12, 2, 8), flat_kv, cu, cu, 6, 6, causal=True
        ).reshape(2, 6, 2, 8),
        flash_attn_interface.flash_attn_qkvpacked_func(qkv, causal=True),
        flash_attn_interface.flash_attn_qkvpacked_func(
            qkv.reshape(2, 6, 6, 8), causal=True, num_heads_q=2
        ),
    ]
    for out in got:
        assert np.array_equal(frame.read(out), want)


@everywhere
def test_combine_gives_attention_over_all_keys(frame):
    r = np.random.default_rng(1)
    q, k, v = (r.standard_normal(s).astype(np.float32) for s in ((4, 2, 8), (9, 2, 8), (9, 2, 8)))
    parts = [attention(q, k[s], v[s]) for s in (slice(0, 4), slice(4, 9))] + [
        (np.zeros((4, 2, 8)), np.full((4, 2), -np.inf))
    ]
    want, want_lse = attention(q, k, v)
    outs, lses = (frame.make(np.stack(x)) for x in zip(*parts, strict=True))
    out, lse = flash_attn_interface.flash_attn_combine(outs, lses)
    check_close(frame.read(out), want, "f32", 4.0)
    check_close(frame.read(lse), want_lse, "f32", 8.0)
    given = frame.make(np.zeros((4, 2, 8)), "f16")
    out, _ = flash_attn_interface.flash_attn_combine(outs, lses, given)
    assert out is given
    check_close(frame.read(given), want, "f16", 4.0)


def test_backward_is_refused_by_name():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.ones(1, 2, 1, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward"):
        flash_attn.flash_attn_func(x, x, x)
    with torch.no_grad():
        assert flash_attn.flash_attn_func(x, x, x).shape == x.shape


def test_dropout_is_refused_by_name(frame):
    x = frame.make(np.ones((1, 2, 1, 8)))
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn.flash_attn_func(x, x, x, 0.1)


def test_scheduler_metadata_is_nothing_to_carry():
    assert flash_attn_interface.get_scheduler_metadata(1, 1, 8, 2, 2, 8, None) is None


def test_keys_beyond_the_array_are_an_error(frame):
    x = frame.make(np.ones((4, 1, 8)))
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        flash_attn.flash_attn_varlen_func(x, x, x, frame.ints([0, 4]), frame.ints([0, 5]), 4, 5)
