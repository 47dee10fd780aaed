# SPDX-License-Identifier: Apache-2.0
"""Writing new keys and values into pages on a GPU, and the index arrays that it takes: by PyTorch's
operations there, since nobody reads the arrays on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo._native import _append_listed as append_listed
from octavo._native import _kind_of_call as kind_of_call

from .. import _gpu as gpu
from .._gpu_call import Call, Options
from ._gpu import pages_of


class Again(NamedTuple):
    """How an append goes whose like there was: same shapes, strides, dtypes and places."""

    workspace: Any
    places: Any  # where each token lies, anew in each call
    offsets: Any


def append(k, v, batch_indices, positions, paged_kv_cache, indices, indptr, kv_layout):
    """append_paged_kv_cache. Each token is a sequence of its own, of the one page it lies in: a row
    of the table has one entry of `indices`.

    One beyond its sequence's pages is skipped, as those with negative numbers are: nobody reads
    them on the host.
    """
    k_pages, v_pages = pages_of(paged_kv_cache, kv_layout)
    given = batch_indices, positions, indptr, indices
    kind = kind_of_call(("append_paged_kv_cache",), k, v, k_pages, v_pages, *given)
    again, _ = gpu.spaces.again(k.device, kind)
    if again is not None:
        append_listed(again.workspace, k, v, k_pages, v_pages, *given, again.places, again.offsets)
        return
    k, v, k_pages, v_pages = gpu.checked(
        k, append_key=k, append_value=v, k_pages=k_pages, v_pages=v_pages
    )
    device, n = k.device, k.shape[0]
    batch = gpu.ints(batch_indices, "batch_indices", device, n)
    places = gpu.ints(positions, "positions", device, n)
    ends, pages = gpu.ints(indptr, "kv_indptr", device), gpu.ints(indices, "kv_indices", device)
    if not n or not pages.shape[0] or ends.shape[0] < 2:
        return
    used = batch, places, ends, pages
    if any(mine is not theirs for mine, theirs in zip(used, given, strict=True)):
        kind = None
    page_size = k_pages.shape[1]
    offsets = gpu.steps(0, 1, n + 1, device)
    # For the sizes: any integers [n] do for the lengths and the rows.
    keys = gpu.Keys(k_pages, v_pages, places, pages[:, None], batch, page_size)
    call = Call(
        "append_paged_kv_cache",
        k,
        keys,
        offsets,
        Options(None, "causal", (-1, -1), 0.0),
        format="thd",
        lse=None,
        out=k.new_empty((n, k.shape[1], v.shape[2])),
        most=1,
        kind=kind,
    )
    room = k.new_empty((2 * n,), dtype=gpu.torch().int32)
    again = Again(call.space.workspace, room, offsets)
    if kind is not None:
        call.space.again = again
    append_listed(again.workspace, k, v, k_pages, v_pages, *used, room, offsets)


def batch_indices_positions(append_indptr, seq_lens, nnz):
    t = gpu.torch()
    device = append_indptr.device
    ends = gpu.ints(append_indptr, "append_indptr", device)
    lens = gpu.ints(seq_lens, "seq_lens", device, ends.shape[0] - 1)
    if not nnz or ends.shape[0] < 2:
        return tuple(t.full((nnz,), -1, dtype=t.int32, device=device) for _ in range(2))
    batch = gpu.owners(ends, nnz)
    tokens = gpu.steps(0, 1, nnz, device)
    there = tokens < ends[-1]
    positions = lens[batch] - (ends[batch + 1] - tokens)
    return t.where(there, batch, -1).to(t.int32), t.where(there, positions, -1).to(t.int32)
