# SPDX-License-Identifier: Apache-2.0
"""Sequences that arrive, grow and finish, for the tests of TransformerEngine's front."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from definition import attention, check_close, weighed

from octavo.compat import transformer_engine as engine

HEADS, GROUPS, DIM = 4, 2, 16
FORMATS = ["bshd", "sbhd", "thd"]


def make_params(
    frame, dtype="f32", *, paged=False, batch=3, length=32, pages=None, page_size=4, **kwargs
):
    if paged:
        kwargs.update(is_paged=True, page_size=page_size, total_num_pages=pages)
    return engine.InferenceParams(
        max_batch_size=batch,
        max_sequence_length=length,
        num_heads_kv=GROUPS,
        head_dim_k=DIM,
        dtype=frame.dtype(dtype),
        max_ctx_len=length,
        device=frame.device,
        **kwargs,
    )


def make_module(fmt="bshd", mask="padding_causal", **kwargs):
    return engine.DotProductAttention(
        HEADS, kwargs.pop("kv_channels", DIM), GROUPS, qkv_format=fmt, attn_mask_type=mask, **kwargs
    ).eval()


class Stream:
    """What the tests remember of each sequence: all its tokens so far, as they were rounded."""

    def __init__(self, frame, dtype, seed, dim_v=DIM):
        self.frame, self.dtype, self.r = frame, dtype, np.random.default_rng(seed)
        self.dims = (DIM, DIM, dim_v)
        self.past = {}

    def arrays(self, step, fmt, batch=0, longest=0):
        """q, k and v of a step in a format, NaN in every padding row; the past grows by them."""
        longest = max([longest, *step.values()])
        shape = {
            "bshd": (max(batch, len(step)), longest),
            "sbhd": (longest, max(batch, len(step))),
            "thd": (sum(step.values()) + 2,),
        }[fmt]
        heads = (HEADS, GROUPS, GROUPS)
        whole = [np.full((*shape, h, d), np.nan) for h, d in zip(heads, self.dims, strict=True)]
        for x, (h, d) in zip(whole, zip(heads, self.dims, strict=True), strict=False):
            for rows, n in self.rows(step, fmt):
                x[rows] = self.r.standard_normal((n, h, d))
        made = [self.frame.make(x, self.dtype) for x in whole]
        for (rows, _), sequence in zip(self.rows(step, fmt), step, strict=True):
            old = self.past.get(
                sequence, [np.zeros((0, h, d)) for h, d in zip(heads, self.dims, strict=True)]
            )
            self.past[sequence] = [
                np.concatenate([o, self.frame.read(x)[rows]])
                for o, x in zip(old, made, strict=True)
            ]
        return made

    @staticmethod
    def rows(step, fmt):
        """Where each sequence's tokens lie: an index, and how many."""
        start = 0
        for b, n in enumerate(step.values()):
            index = {
                "bshd": (b, slice(0, n)),
                "sbhd": (slice(0, n), b),
                "thd": slice(start, start + n),
            }[fmt]
            start += n
            yield index, n

    def check(self, out, step, fmt, **maths):
        got = self.frame.read(out)
        assert self.frame.is_one(out)
        assert got.shape[-1] == HEADS * self.dims[2]
        assert got.ndim == (2 if fmt == "thd" else 3)
        used = np.zeros(got.shape[:-1], bool)
        for (rows, n), sequence in zip(self.rows(step, fmt), step, strict=True):
            q, k, v = self.past[sequence]
            mine = (q[len(q) - n :], k, v)
            maths = {"causal": True, **maths}
            want, _ = attention(*mine, **maths)
            check_close(
                got[rows],
                want.reshape(n, -1),
                self.dtype,
                4.0,
                f"sequence {sequence} of {step}",
                self.frame.products(self.dtype),
                weighed(*mine, **maths).reshape(n, -1),
            )
            used[rows] = True
        assert (got[~used] == 0).all(), "padding"


def arrivals(seed, batch, length):
    """Steps {id: new tokens}: sequences start, bring one or many tokens, change order, finish."""
    r = np.random.default_rng(seed)
    live, next_id = {}, 100
    for _ in range(12):
        for sequence in [s for s in live if r.random() < 0.2 or live[s] > length - 4]:
            del live[sequence]
        order = list(live)
        r.shuffle(order)
        step = OrderedDict()
        for sequence in order:
            step[sequence] = int(r.integers(1, 4)) if r.random() < 0.5 else 1
        while len(step) < batch and r.random() < 0.7:
            next_id += int(r.integers(-30, 40)) or 1
            if next_id in step or next_id in live:
                continue
            step[next_id] = int(r.integers(1, length // 2))
        for sequence, n in step.items():
            live[sequence] = live.get(sequence, 0) + n
        if step:
            yield step
