# SPDX-License-Identifier: Apache-2.0
"""Rotary tables of a FlashAttention front's call on the CPU, as Octavo reads them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import octavo

from ._core import arange


class Rotary(NamedTuple):
    """The caller's tables. Octavo reads float32; others are widened row by row, as a call needs
    them.
    """

    frame: object
    cos: object
    sin: object
    style: str

    def at(self, positions):
        """(rope, positions) that rotate tokens at `positions`."""
        if not positions.size:
            return None, None
        cos, sin = self.frame.host(self.cos, "rotary_cos"), self.frame.host(self.sin, "rotary_sin")
        if cos.shape != sin.shape or cos.ndim != 2:
            raise ValueError(
                f"rotary_cos and rotary_sin: wanted one shape [positions, rotary_dim / 2], "
                f"got {list(cos.shape)} and {list(sin.shape)}"
            )
        if cos.dtype == np.float32 and sin.dtype == np.float32:
            tables = (np.ascontiguousarray(cos), np.ascontiguousarray(sin))
            return octavo.Rope(self.style, cos=tables[0], sin=tables[1]), positions
        if positions.size and (positions.min() < 0 or positions.max() >= cos.shape[0]):
            raise ValueError(
                f"rotary_cos: wanted rows for positions up to {positions.max()}, got {cos.shape[0]}"
            )
        narrow = [np.ascontiguousarray(_widen(t[positions])) for t in (cos, sin)]
        return octavo.Rope(self.style, cos=narrow[0], sin=narrow[1]), arange(positions.size)


def _widen(rows):
    if rows.dtype == np.int16:
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32)
