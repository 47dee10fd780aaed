# SPDX-License-Identifier: Apache-2.0
"""What a call of DotProductAttention without a cache was given, parsed: handed on whole to where
the tensors lie.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class PlainCall(NamedTuple):
    """Attention over the call's own keys."""

    qkv: tuple
    qkv_format: str
    cu_seqlens: tuple  # of q, of k and v
    longest: tuple  # new tokens and keys of one sequence, as far as the caller says it
    padding: bool
    alignment: str  # top_left or bottom_right
    causal: bool
    window: tuple
    slopes: Any
    sinks: Any

    def config(self, softmax_scale):
        """(scale, mask, window), as the library names them."""
        return softmax_scale, "causal" if self.causal else "full", self.window
