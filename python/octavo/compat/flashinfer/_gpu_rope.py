# SPDX-License-Identifier: Apache-2.0
"""pos_encoding_mode ROPE_LLAMA on a GPU: the keys that a run reads, copied end to end and turned.

FlashInfer turns keys as it reads them, Octavo as they are written. So PyTorch's operations turn a
copy here, in float32, and round it to the keys' dtype: right, but slow.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from .. import _gpu as gpu
from ._common import Keys, positions_from, rope_tables


class Turned(NamedTuple):
    """Where a plan's keys lie, and the positions of keys and queries; all but numbers on a GPU."""

    pages: Any  # int64 [Tk]
    slots: Any
    key_places: Any
    query_places: Any  # int64 [T]
    starts: Any  # int32 [B], of each sequence's keys in the copy
    lens: Any
    offsets: Any  # int32 [B + 1]
    longest: int
    num_places: int
    num_pages: int  # at least so many does a pool need
    most: int  # new tokens of one sequence


def turned(keys, offsets, page_size, device) -> Turned:
    """Of a plan's keys and offsets on the host. page_size None: keys in rows, not in pages."""
    lens = keys.kv_lens.astype(np.int64)
    starts = np.cumsum(lens) - lens
    within = np.arange(lens.sum()) - np.repeat(starts, lens)
    sequence = np.repeat(np.arange(len(lens)), lens)
    if keys.page_table is None:
        pages, slots = keys.rows[sequence] + within, np.zeros_like(within)
    else:
        pages, slots = keys.page_table[sequence, within // page_size], within % page_size
    q_lens = np.diff(offsets)
    # A query may stand before the first key: all are moved up then.
    before = max(int((q_lens - lens).max(initial=0)), 0)
    query_places = positions_from(lens - q_lens + before, q_lens)
    t = gpu.torch()
    places = [x.astype(np.int64) for x in (pages, slots, within + before, query_places)]
    integers = [x.astype(np.int32) for x in (starts, lens, offsets)]
    return Turned(
        *(t.from_numpy(x).to(device, non_blocking=True) for x in places + integers),
        longest=keys.longest,
        num_places=keys.longest + before,
        num_pages=int(pages.max(initial=-1)) + 1,
        most=int(q_lens.max(initial=0)),
    )


def of_rows(num_queries, num_keys, device) -> Turned:
    """Of one sequence's keys in a row."""
    lens = np.array([num_keys], np.int32)
    return turned(Keys(lens, rows=np.zeros(1, np.int32)), np.array([0, num_queries]), None, device)


@functools.lru_cache(maxsize=8)
def _tables(scale, theta, head_dim, count, device):
    t = gpu.torch()
    return tuple(t.from_numpy(x).to(device) for x in rope_tables(scale, theta, head_dim, count))


def _turn(x, places, cos, sin):
    """x [T, H, D] turned by its places, halves against each other."""
    t = gpu.torch()
    cos, sin = cos[places][:, None], sin[places][:, None]
    low, high = x.float().chunk(2, dim=-1)
    return t.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def turned_call(plan: Turned, q, k, v, maths):
    """(q, keys) of a call over the turned copy of k, v [N, P, Hk, D]."""
    if plan.num_pages > k.shape[0]:
        raise ValueError(
            f"paged_kv_cache: wanted at least {plan.num_pages} pages, as planned, got {k.shape[0]}"
        )
    count = 1 << max(plan.num_places - 1, 63).bit_length()
    cos, sin = _tables(*maths.rope_args, k.shape[-1], count, q.device)
    copy = k[plan.pages, plan.slots]
    keys = gpu.packed_keys(
        _turn(copy, plan.key_places, cos, sin),
        v[plan.pages, plan.slots],
        plan.starts,
        plan.lens,
        plan.longest,
    )
    return _turn(q, plan.query_places, cos, sin), keys
