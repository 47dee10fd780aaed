# SPDX-License-Identifier: Apache-2.0
"""Attention by its definition, in float64 and plain loops: what the tests hold results to."""

from __future__ import annotations

import numpy as np


def attend_rows(
    q,
    k,
    v,
    positions,
    *,
    scale=None,
    causal=True,
    window=(-1, -1),
    softcap=0.0,
    slopes=None,
    sinks=None,
):
    """One sequence: q [n, Hq, D], k [L, Hk, D], v [L, Hk, Dv], positions [n] -> out, lse."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    n, num_q_heads, head_dim = q.shape
    group = num_q_heads // k.shape[1]
    scale = scale or head_dim**-0.5
    out = np.zeros((n, num_q_heads, v.shape[2]))
    lse = np.full((n, num_q_heads), -np.inf)
    key_positions = np.arange(k.shape[0])
    for i in range(n):
        p = positions[i]
        seen = np.ones(k.shape[0], bool)
        if causal:
            seen &= key_positions <= p
        if window[0] >= 0:
            seen &= key_positions >= p - window[0]
        if window[1] >= 0:
            seen &= key_positions <= p + window[1]
        if not seen.any():
            continue
        for h in range(num_q_heads):
            logits = k[seen, h // group] @ q[i, h] * scale
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            if slopes is not None:
                logits = logits - slopes[h] * np.abs(p - key_positions[seen])
            lse[i, h] = np.logaddexp.reduce(logits)
            total = lse[i, h] if sinks is None else np.logaddexp(lse[i, h], sinks[h])
            out[i, h] = np.exp(logits - total) @ v[seen, h // group]
    return out, lse


def rotate(x, positions, *, base=10000.0, rotary_dim=None, interleaved=False):
    """RoPE of x [n, heads, D] at positions [n]."""
    x = np.asarray(x).astype(np.float64)
    dim = rotary_dim or x.shape[-1]
    half = dim // 2
    angles = np.asarray(positions)[:, None] * base ** (-2.0 * np.arange(half) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first = np.s_[..., 0:dim:2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1:dim:2] if interleaved else np.s_[..., half:dim]
    turned = x.copy()
    turned[first] = x[first] * cos - x[second] * sin
    turned[second] = x[second] * cos + x[first] * sin
    return turned
