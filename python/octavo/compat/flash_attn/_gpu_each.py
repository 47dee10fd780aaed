# SPDX-License-Identifier: Apache-2.0
"""Slopes of ALiBi that differ between sequences, on a GPU: a call for each sequence."""

from __future__ import annotations

import numpy as np

import octavo

from .. import _gpu as gpu
from .._gpu_call import Call
from ._gpu_parts import call_of, results_of


def each_its_own(options) -> bool:
    """Whether the slopes are [batch, heads]."""
    return options.alibi_slopes is not None and options.alibi_slopes.dim() == 2


def first_of(options):
    """The options of the first sequence, which for sizes are those of all."""
    return (
        options._replace(alibi_slopes=options.alibi_slopes[0]) if each_its_own(options) else options
    )


def attend_each(what, queries, keys, options, want_lse):
    """(out, the LSE in the library's shape or None). In each call all sequences but one have no
    keys, so that their rows are 0 and -inf: nobody knows on the host where a sequence's lie.
    """
    t = gpu.torch()
    made = [results_of(queries, keys, want_lse) for _ in range(2)]
    (out, lse), (part, part_lse) = made
    out.zero_()
    if want_lse:
        lse.fill_(-np.inf)
    if options.rope is not None and options.positions is None:
        # Of sequences without keys the library would put queries before the first position.
        starts = keys.kv_lens - (queries.offsets[1:] - queries.offsets[:-1])
        options = options._replace(positions=queries.places(starts).contiguous())
    sequences = gpu.steps(0, 1, queries.num_seqs, out.device)
    for b in range(queries.num_seqs):
        mine = keys._replace(kv_lens=t.where(sequences == b, keys.kv_lens, 0))
        words = options._replace(alibi_slopes=options.alibi_slopes[b])
        _by_first(_attend, what, queries, mine, words, *made[1])
        out += part
        if want_lse:
            t.maximum(lse, part_lse, out=lse)
    return out, lse


def check_each(what, queries, keys, options, want_lse):
    """Raises what attend_each would. The calls differ in what nobody looks at."""
    _by_first(Call.check, what, queries, keys, options, *results_of(queries, keys, want_lse))


def _attend(call):
    call.plan()
    call.attend()


def _by_first(step, what, queries, keys, options, out, lse):
    # Not by fused, which clears values behind a sequence's end.
    for backend in ("flash2", "unfused"):
        words = options._replace(backend=backend)
        try:
            step(call_of(what, queries, keys, words, out, lse, None))
            return
        except (octavo.Unsupported, octavo.NotCompiled):
            if backend == "unfused":
                raise
