# SPDX-License-Identifier: Apache-2.0
"""What both wrappers for prefill check of their queries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._arrays import framework, ints, not_covered
from ._common import LN2, each_for_itself


def query_ends(qo_indptr, batch_size):
    ends = ints(qo_indptr, "qo_indptr", batch_size + 1)
    if ends[0] != 0 or (np.diff(ends) < 0).any():
        raise ValueError(f"qo_indptr: wanted rising from 0, got {ends.tolist()}")
    return ends


def longest(ends):
    """The most queries of a sequence."""
    return int(np.diff(ends).max()) if len(ends) > 1 else 0


class LseForm(NamedTuple):
    """In which base and layout run() gives the LSE."""

    natural: bool
    heads_first: bool

    @classmethod
    def of(cls, base, layout):
        if base == "log2" and layout == "NH":
            return _USUAL
        if base not in ("log2", "ln"):
            raise ValueError(f"lse_base: wanted log2 or ln, got {base!r}")
        if layout not in ("NH", "HN"):
            raise ValueError(f"lse_layout: wanted NH or HN, got {layout!r}")
        return cls(base == "ln", layout == "HN")

    def taken(self, lse):
        """The caller's array as [T, Hq]."""
        return lse.T if self.heads_first and lse is not None else lse

    def given(self, result):
        """(out, LSE) of base 2 and [T, Hq] in the form that was asked for."""
        if self is _USUAL:
            return result
        out, lse = result
        if self.natural:
            if framework(lse).writable:
                lse *= float(LN2)
            else:
                lse = lse * float(LN2)
        return out, lse.T if self.heads_first else lse


_USUAL = LseForm(False, False)


class Prefill:
    """What both prefill wrappers check beside their keys."""

    _max_rows = None
    _single = False  # whether the plan's sequences are single queries

    def _check_rows(self, ends, uniform_q_len=None):
        """In graph mode the first plan fixes the most rows that a later one may have, unless
        max_total_num_rows does.
        """
        if uniform_q_len is not None and (np.diff(ends) != uniform_q_len).any():
            raise ValueError(
                f"uniform_q_len: wanted the rows of every sequence in {ends.tolist()}, "
                f"got {uniform_q_len}"
            )
        rows = int(ends[-1])
        if self.is_cuda_graph_enabled:
            if self._max_rows is None:
                self._max_rows = rows
            elif rows > self._max_rows:
                raise ValueError(
                    f"qo_indptr: wanted at most {self._max_rows} rows, as at first or as "
                    f"max_total_num_rows says, got {rows}"
                )

    def _each_for_itself(self, keys, ends, causal, pos_encoding_mode, window_left):
        """The keys and offsets, of single queries where the arithmetic wants it."""
        self._single = each_for_itself(causal, pos_encoding_mode, window_left, longest(ends))
        if not self._single:
            return keys, ends
        if self.is_cuda_graph_enabled:
            raise not_covered("pos_encoding_mode ALIBI without causal in CUDA graph mode")
        return keys.repeated(np.diff(ends)), np.arange(ends[-1] + 1, dtype=np.int32)

    def _check_q(self, q):
        self._need_plan()
        if q.shape[0] != self._offsets[-1]:
            raise ValueError(
                f"q: wanted {self._offsets[-1]} rows (qo_indptr's end), got {q.shape[0]}"
            )

    def _forward(
        self,
        arrays,
        causal,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        sm_scale,
        rope_scale,
        rope_theta,
        **run,
    ):
        self._change_maths(
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(*arrays, **run)
