# SPDX-License-Identifier: Apache-2.0
"""What both wrappers for prefill check of their queries."""

from __future__ import annotations

import numpy as np

from .._arrays import ints


def query_ends(qo_indptr, batch_size):
    ends = ints(qo_indptr, "qo_indptr", batch_size + 1)
    if ends[0] != 0 or (np.diff(ends) < 0).any():
        raise ValueError(f"qo_indptr: wanted rising from 0, got {ends.tolist()}")
    return ends


def longest(ends):
    """The most queries of a sequence."""
    return int(np.diff(ends).max()) if len(ends) > 1 else 0


class Prefill:
    """What both prefill wrappers check beside their keys."""

    _max_rows = None

    def _check_rows(self, ends):
        """In graph mode the first plan fixes the most rows that a later one may have."""
        rows = int(ends[-1])
        if self.is_cuda_graph_enabled:
            if self._max_rows is None:
                self._max_rows = rows
            elif rows > self._max_rows:
                raise ValueError(
                    f"qo_indptr: wanted at most {self._max_rows} rows, as at first, got {rows}"
                )

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
