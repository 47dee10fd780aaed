# SPDX-License-Identifier: Apache-2.0
"""Writing new keys and values into pages, and the index arrays that it takes."""

from __future__ import annotations

import numpy as np

import octavo

from .. import _gpu as gpu
from .._absent import absent
from .._arrays import framework, ints, native, not_covered
from .._blame import names_arguments
from . import _gpu_append
from ._absent_names import NAMES
from ._common import check_layout, given_or_new, unpack
from ._wanted import APPEND, PLACES, SEQ_LENS

__all__ = ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"]

__getattr__ = absent(__name__, NAMES)


@names_arguments(**SEQ_LENS)
def get_seq_lens(kv_indptr, kv_last_page_len, page_size):
    """Lengths [B] of sequences that hold kv_indptr[b + 1] - kv_indptr[b] pages, the last one
    partly.
    """
    if kv_indptr.shape[0] != kv_last_page_len.shape[0] + 1:
        raise ValueError(
            f"kv_indptr: wanted [{kv_last_page_len.shape[0] + 1}], got {list(kv_indptr.shape)}"
        )
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return (pages - 1).clip(0) * page_size + kv_last_page_len


@names_arguments(**PLACES)
def get_batch_indices_positions(append_indptr, seq_lens, nnz, batch_indices=None, positions=None):
    """(batch index, position) int32 [nnz] of each appended token; seq_lens count the new tokens.

    Entries past append_indptr[-1] are -1, which append_paged_kv_cache skips. batch_indices and
    positions: where they go, if not to new arrays.
    """
    if gpu.on_gpu(append_indptr):
        made = _gpu_append.batch_indices_positions(append_indptr, seq_lens, nnz)
        given = (batch_indices, positions)
        return tuple(m if g is None else g.copy_(m) for m, g in zip(made, given, strict=True))
    frame = framework(append_indptr, "append_indptr")
    ends = ints(append_indptr, "append_indptr")
    lens = ints(seq_lens, "seq_lens", ends.shape[0] - 1)
    counts = np.diff(ends)
    total = int(ends[-1])
    if total > nnz:
        raise ValueError(f"nnz: wanted at least {total} (append_indptr's end), got {nnz}")
    made = [
        given_or_new(frame, append_indptr, array, (nnz,), frame.int32, name)
        for name, array in (("batch_indices", batch_indices), ("positions", positions))
    ]
    (_, batch), (_, places) = made
    batch[:total] = np.repeat(np.arange(counts.shape[0], dtype=np.int32), counts)
    places[:total] = np.arange(total, dtype=np.int32) + np.repeat(
        lens - counts - (ends[1:] - counts), counts
    )
    batch[total:] = places[total:] = -1
    return tuple(frame.finish(m) for m, _ in made)


@names_arguments(**APPEND)
def append_paged_kv_cache(
    append_key,
    append_value,
    batch_indices,
    positions,
    paged_kv_cache,
    kv_indices,
    kv_indptr,
    kv_last_page_len,
    kv_layout="NHD",
):
    """Writes append_key and append_value [T, Hk, D] to positions [T] of sequences batch_indices
    [T].

    Pages must have been given to the sequences before. Tokens with a negative batch index or
    position are skipped; one beyond its sequence's pages is an error, and nothing is written.
    """
    check_layout(kv_layout)
    if gpu.on_gpu(append_key):
        _gpu_append.append(
            append_key,
            append_value,
            batch_indices,
            positions,
            paged_kv_cache,
            kv_indices,
            kv_indptr,
            kv_layout,
        )
        return
    frame = framework(append_key, "append_key")
    if not frame.writable:
        raise not_covered("append_paged_kv_cache to JAX arrays", "they can't be written")
    k, v = frame.host(append_key, "append_key"), frame.host(append_value, "append_value")
    k_pages, v_pages = unpack(frame, paged_kv_cache, kv_layout)
    page_size = k_pages.shape[1]
    batch = ints(batch_indices, "batch_indices", k.shape[0])
    places = ints(positions, "positions", k.shape[0])
    ends, pages = ints(kv_indptr, "kv_indptr"), ints(kv_indices, "kv_indices")
    ints(kv_last_page_len, "kv_last_page_len", ends.shape[0] - 1)
    kept = (batch >= 0) & (places >= 0)
    if not kept.all():
        k, v, batch, places = k[kept], v[kept], batch[kept], places[kept]
    if not k.shape[0]:
        return
    if batch.max() >= ends.shape[0] - 1:
        raise ValueError(f"batch_indices: wanted below {ends.shape[0] - 1}, got {batch.max()}")
    entries = ends[batch] + places // page_size
    late = entries >= ends[batch + 1]
    if late.any():
        raise ValueError(
            f"positions: wanted within the sequence's pages, "
            f"got {places[late][0]} for sequence {batch[late][0]}"
        )
    # Each token as a sequence of its own, whose only page is the token's.
    octavo.append_tokens(
        native(k),
        native(v),
        native(k_pages),
        native(v_pages),
        places % page_size + 1,
        token_offsets=np.arange(k.shape[0] + 1, dtype=np.int32),
        page_table=pages[entries][:, None],
    )
