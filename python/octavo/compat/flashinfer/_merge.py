# SPDX-License-Identifier: Apache-2.0
"""Merging of attention over parts of the keys. The LSE is in base 2; (0, -inf) is neutral."""

from __future__ import annotations

import numpy as np

import octavo

from .. import _gpu as gpu
from .._arrays import as_float32, framework, native, not_covered
from .._blame import names_arguments
from .._gpu_merge import checked_lse, merge
from ._common import LN2, LOG2E
from ._wanted import MERGE, MERGE_ALL, MERGE_IN_PLACE

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


def _merged(parts, like, frame):
    """[(v host [T, H, D], s host [T, H], base 2), ...] as new arrays of the caller's."""
    tokens, heads, dim = parts[0][0].shape
    made, out = frame.empty(like, (tokens, heads, dim))
    made_lse, lse = frame.empty(like, (tokens, heads), frame.float32)
    octavo.merge([(native(v), s * LN2) for v, s in parts], out=native(out), lse=lse)
    lse *= LOG2E
    return frame.finish(made), frame.finish(made_lse)


def _merged_on_gpu(named, lses):
    """The same of {name: v [T, H, D]} and {name: s [T, H]} on a GPU."""
    t = gpu.torch()
    like = next(iter(named.values()))
    values = gpu.checked(like, **named)
    for name, v in named.items():
        if v.dim() != 3 or v.shape != like.shape:
            raise ValueError(f"{name}: wanted [T, H, D], all alike, got {list(v.shape)}")
    lses = [checked_lse(like, s, name, like.shape[:2]) for name, s in lses.items()]
    out, lse = merge(t.stack([v.float() for v in values]), t.stack(lses) * float(LN2))
    return out.to(like.dtype), lse.mul_(float(LOG2E))


@names_arguments(**MERGE)
def merge_state(v_a, s_a, v_b, s_b):
    """(V [T, H, D], S float32 [T, H]) over the keys of both parts; V has v_a's dtype."""
    if gpu.on_gpu(v_a):
        return _merged_on_gpu({"v_a": v_a, "v_b": v_b}, {"s_a": s_a, "s_b": s_b})
    frame = framework(v_a, "v_a")
    parts = [
        (frame.host(v_a, "v_a"), as_float32(frame, s_a, "s_a")),
        (frame.host(v_b, "v_b"), as_float32(frame, s_b, "s_b")),
    ]
    return _merged(parts, v_a, frame)


@names_arguments(**MERGE_IN_PLACE)
def merge_state_in_place(v, s, v_other, s_other, mask=None):
    """Merges (v_other, s_other) into (v, s); with mask [T] only the rows where it is true."""
    if gpu.on_gpu(v):
        out, lse = _merged_on_gpu({"v": v, "v_other": v_other}, {"s": s, "s_other": s_other})
        if s.dtype != gpu.torch().float32:
            raise TypeError(f"s: wanted float32, got {s.dtype}")
        if mask is not None:
            rows = mask.to(device=v.device).bool()
            if rows.shape != v.shape[:1]:
                raise ValueError(f"mask: wanted [{v.shape[0]}], got {list(rows.shape)}")
            out = gpu.torch().where(rows[:, None, None], out, v)
            lse = gpu.torch().where(rows[:, None], lse, s)
        v.copy_(out)
        s.copy_(lse)
        return
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


@names_arguments(**MERGE_ALL)
def merge_states(v, s):
    """(V [T, H, D], S float32 [T, H]) of v [T, num_states, H, D] and s [T, num_states, H]."""
    if gpu.on_gpu(v):
        (v,) = gpu.checked(v, v=v)
        if v.dim() != 4:
            raise ValueError(f"v: wanted [T, num_states, H, D], got {list(v.shape)}")
        s = checked_lse(v, s, "s", v.shape[:3])
        out, lse = merge(v.transpose(0, 1), s.transpose(0, 1) * float(LN2))
        return out.to(v.dtype), lse.mul_(float(LOG2E))
    frame = framework(v, "v")
    parts, lses = frame.host(v, "v"), as_float32(frame, s, "s")
    if parts.ndim != 4 or lses.shape != parts.shape[:3]:
        raise ValueError(f"s: wanted {list(parts.shape[:3])}, got {list(lses.shape)}")
    return _merged([(parts[:, i], lses[:, i]) for i in range(parts.shape[1])], v, frame)
