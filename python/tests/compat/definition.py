# SPDX-License-Identifier: Apache-2.0
"""Attention by definition in float64, and what the tests of the fronts share. Knows nothing of
Octavo.
"""

from __future__ import annotations

import numpy as np

EPS = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    slopes=None,
    sinks=None,
    rising=False,
):
    """One sequence: q [n, Hq, D], k [L, Hk, D], v [L, Hk, Dv]; query i stands at L - n + i.

    Order: scale, softcap, ALiBi, mask, softmax, sink. Returns out [n, Hq, Dv] and the natural-log
    LSE [n, Hq] without the sink; a query that sees no key gives 0 and -inf.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    n, hq, d = q.shape
    length, hk, dv = v.shape
    scale = 1.0 / np.sqrt(d) if scale is None else scale
    out = np.zeros((n, hq, dv))
    lse = np.full((n, hq), -np.inf)
    here = length - n + np.arange(n)[:, None]
    there = np.arange(length)[None, :]
    seen = np.ones((n, length), bool)
    if causal:
        seen &= there <= here
    if window[0] >= 0:
        seen &= there >= here - window[0]
    if window[1] >= 0:
        seen &= there <= here + window[1]
    for h in range(hq):
        s = scale * (q[:, h] @ k[:, h // (hq // hk)].T)
        if softcap > 0:
            s = softcap * np.tanh(s / softcap)
        if slopes is not None:
            s = s + slopes[h] * (there - here if rising else -np.abs(here - there))
        sees = seen.any(1)
        s = np.where(seen, s, -np.inf)[sees]
        top = s.max(1, keepdims=True, initial=-np.inf)
        p = np.exp(s - top)
        total = p.sum(1, keepdims=True)
        lse[sees, h] = (top + np.log(total))[:, 0]
        if sinks is not None:
            total = total + np.exp(sinks[h] - top)
        out[sees, h] = p / total @ v[:, h // (hq // hk)]
    return out, lse


def rotate(x, positions, cos, sin, interleaved):
    """x [n, H, D] with row i turned by row positions[i] of the tables [P, R / 2]."""
    x = np.array(x, np.float64)
    half = cos.shape[1]
    c = np.asarray(cos, np.float64)[positions][:, None]
    s = np.asarray(sin, np.float64)[positions][:, None]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2].copy(), x[..., 1 : 2 * half : 2].copy()
        x[..., 0 : 2 * half : 2] = first * c - second * s
        x[..., 1 : 2 * half : 2] = first * s + second * c
    else:
        first, second = x[..., :half].copy(), x[..., half : 2 * half].copy()
        x[..., :half] = first * c - second * s
        x[..., half : 2 * half] = first * s + second * c
    return x


def rope_tables(num_positions, rotary_dim, base=10000.0, scale=1.0):
    """cos and sin [num_positions, rotary_dim / 2] in float64."""
    angles = np.outer(
        np.arange(num_positions) / scale, base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    )
    return np.cos(angles), np.sin(angles)


def weighed(q, k, v, **maths):
    """The weighted mean of |v|: times half an EPS, what rounding the weights to a dtype may move an
    output by. Each weight is off by at most that share of itself, and their sum is taken before.
    """
    return attention(q, k, np.abs(v), **maths)[0]


def turned_logits_error(q, k, scale, dtype):
    """What logits may be off by when q and k are turned and then rounded to dtype, each by half an
    EPS of an element.
    """
    if not len(q) or not len(k):
        return 0.0
    group = q.shape[1] // k.shape[1]
    products = np.einsum("qhd,khd->hqk", np.abs(q), np.abs(np.repeat(k, group, 1)))
    return EPS[dtype] * abs(scale) * products.max()


def check_close(got, want, dtype, biggest, context="", products="f32", mean=None, off=0.0):
    """|got - want| within one rounding to dtype and float32's accumulation over values up to
    `biggest`; and the rounding of the weights to the dtype that they are multiplied in: half an EPS
    of `mean`, which `weighed` gives, or where that is not given of `biggest`. off: beside that, as
    a share of `mean`.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{context}: shape {got.shape}, wanted {want.shape}"
    assert np.array_equal(np.isnan(got), np.isnan(want)), f"{context}: NaN"
    infinite = np.isinf(want)
    assert np.array_equal(got[infinite], want[infinite]), f"{context}: infinities"
    biggest = max(biggest, 1.0)
    room = EPS[dtype] * np.abs(want) + 16 * EPS["f32"] * biggest
    if products != "f32":
        room += EPS[products] / 2 * (biggest if mean is None else mean)
    room += off * (1.0 if mean is None else mean)
    error = np.abs(np.where(infinite, 0.0, got) - np.where(infinite, 0.0, want))
    worst = (
        np.unravel_index(np.argmax(error - np.where(infinite, 0, room)), error.shape)
        if error.size
        else ()
    )
    assert error.size == 0 or (error <= room)[~infinite].all(), (
        f"{context}: at {[int(i) for i in worst]} got {got[worst]}, wanted {want[worst]} "
        f"(off by {error[worst]:.3g}, room {room[worst]:.3g})"
    )
