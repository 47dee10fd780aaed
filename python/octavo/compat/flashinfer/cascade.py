# SPDX-License-Identifier: Apache-2.0
"""Merging of attention over parts of the keys. The LSE is in base 2; (0, -inf) is neutral."""

from __future__ import annotations

import numpy as np

import octavo

from .._arrays import as_float32, framework, native, not_covered
from ._common import LN2, LOG2E

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


def _merged(parts, like, frame):
    """[(v host [T, H, D], s host [T, H], base 2), ...] as new arrays of the caller's."""
    tokens, heads, dim = parts[0][0].shape
    made, out = frame.empty(like, (tokens, heads, dim))
    made_lse, lse = frame.empty(like, (tokens, heads), frame.float32)
    octavo.merge([(native(v), s * LN2) for v, s in parts], out=native(out), lse=lse)
    lse *= LOG2E
    return frame.finish(made), frame.finish(made_lse)


def merge_state(v_a, s_a, v_b, s_b):
    """(V [T, H, D], S float32 [T, H]) over the keys of both parts; V has v_a's dtype."""
    frame = framework(v_a, "v_a")
    parts = [
        (frame.host(v_a, "v_a"), as_float32(frame, s_a, "s_a")),
        (frame.host(v_b, "v_b"), as_float32(frame, s_b, "s_b")),
    ]
    return _merged(parts, v_a, frame)


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    """Merges (v_other, s_other) into (v, s); with mask [T] only the rows where it is true."""
    frame = framework(v, "v")
    if not frame.writable:
        raise not_covered("merge_state_in_place of JAX arrays", "they can't be written")
    out, lse = frame.host(v, "v"), frame.host(s, "s")
    if lse.dtype != np.float32:
        raise TypeError(f"s: wanted float32, got {lse.dtype}")
    other, other_lse = frame.host(v_other, "v_other"), as_float32(frame, s_other, "s_other")
    merged, merged_lse = np.empty_like(out), np.empty_like(lse)
    parts = [(native(out), lse * LN2), (native(other), other_lse * LN2)]
    octavo.merge(parts, out=native(merged), lse=merged_lse)
    merged_lse *= LOG2E
    rows = slice(None) if mask is None else frame.host(mask, "mask").astype(bool)
    out[rows], lse[rows] = merged[rows], merged_lse[rows]


def merge_states(v, s):
    """(V [T, H, D], S float32 [T, H]) of v [T, num_states, H, D] and s [T, num_states, H]."""
    frame = framework(v, "v")
    parts, lses = frame.host(v, "v"), as_float32(frame, s, "s")
    if parts.ndim != 4 or lses.shape != parts.shape[:3]:
        raise ValueError(f"s: wanted {list(parts.shape[:3])}, got {list(lses.shape)}")
    return _merged([(parts[:, i], lses[:, i]) for i in range(parts.shape[1])], v, frame)
