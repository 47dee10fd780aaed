# SPDX-License-Identifier: Apache-2.0
"""A call of the library's over the caller's cache on a GPU, and what calls are known again by."""

from __future__ import annotations

from typing import Any, NamedTuple

import octavo
from octavo._native import _CallAgain as CallAgain
from octavo._native import _signature as signature

from . import _gpu as gpu

__all__ = ["Call", "CallAgain", "Options"]


class Options(NamedTuple):
    """The arithmetic of a call, as the library names it."""

    softmax_scale: float | None
    mask: str
    window: tuple
    softcap: float
    sinks: Any = None
    alibi_slopes: Any = None
    rope: Any = None
    positions: Any = None
    batch_invariant: bool = False
    backend: str = "auto"

    def kind(self):
        return (
            self.mask,
            self.window,
            self.softcap,
            self.batch_invariant,
            self.backend,
            self.sinks is None,
            self.alibi_slopes is None,
            self.rope is None,
            self.positions is None,
        )


class Call:
    """Attention of one step over the caller's cache: the space, then plan, append, attend."""

    def __init__(
        self,
        what,
        q,
        keys: gpu.Keys,
        offsets,
        options: Options,
        *,
        format,
        lse,
        out,
        most,
        owner=None,
        kind=None,
        new=None,
    ):
        """lse: an array or None. out: an array. most: new tokens of one sequence. owner: of the
        space, None for all calls' common one. kind: of the calls that share it, None: told from the
        arrays. new: the keys of an append before it.
        """
        self._new = new
        self._q, self._keys, self._offsets = q, keys, offsets
        self._format, self._lse, self._out, self._most = format, lse, out, most
        self._options = options
        self.num_tokens = q.shape[0] if format == "thd" else q.shape[0] * q.shape[1]
        if kind is None:
            kind = (
                signature(q, keys.k, keys.v, keys.page_table, keys.rows, offsets, lse, out),
                (format, most, keys.max_kv_len),
                options.kind(),
                None if new is None else (new.k.shape, new.format, new.most),
            )
        self.space = (gpu.spaces if owner is None else owner).get(q.device, kind, self._sizes, what)

    def words(self):
        """The call's words but for its tensors."""
        o = self._options
        return {
            "format": self._format,
            "max_new_tokens": self._most,
            "max_kv_len": self._keys.max_kv_len,
            "softmax_scale": o.softmax_scale,
            "mask": o.mask,
            "window": o.window,
            "softcap": o.softcap,
            "batch_invariant": o.batch_invariant,
            "backend": o.backend,
        }

    def _arguments(self):
        o = self._options
        return {
            "token_offsets": self._offsets,
            "out": self._out,
            "lse": self._lse,
            "page_table": self._keys.page_table,
            "row_indices": self._keys.rows,
            "sinks": o.sinks,
            "alibi_slopes": o.alibi_slopes,
            "rope": o.rope,
            "positions": o.positions,
            **self.words(),
        }

    def _sizes(self, workspace):
        arguments = self._arguments()
        del arguments["softmax_scale"]
        keys, new = self._keys, self._new
        sizes = workspace.sizes(self._q, keys.k, keys.v, keys.kv_lens, **arguments)
        if new is None:
            return sizes
        keys = new.keys
        # The step of the append may have more tokens: it is planned in the same memory.
        also = workspace.sizes(
            new.k,
            keys.k,
            keys.v,
            keys.kv_lens,
            token_offsets=new.offsets,
            page_table=keys.page_table,
            row_indices=keys.rows,
            format=new.format,
            out=new.k.new_empty((*new.k.shape[:-1], keys.v.shape[-1])),
            max_new_tokens=new.most,
            max_kv_len=keys.max_kv_len,
        )
        return octavo.WorkspaceSizes(max(sizes.least, also.least), max(sizes.good, also.good))

    def append(self, k, v, keys: gpu.Keys, offsets, format, most, rope, positions):
        """Plans the new tokens over `keys`, whose lengths count them, and writes them."""
        num_tokens = k.shape[0] if format == "thd" else k.shape[0] * k.shape[1]
        self.space.plan(keys, offsets, num_tokens, most)
        octavo.append_tokens(
            k,
            v,
            keys.k,
            keys.v,
            keys.kv_lens,
            token_offsets=offsets,
            format=format,
            rope=rope,
            positions=positions,
            workspace=self.space.workspace,
            max_new_tokens=most,
            max_kv_len=keys.max_kv_len,
            **keys.where(),
        )

    def plan(self):
        self.space.plan(self._keys, self._offsets, self.num_tokens, self._most)

    def attend(self):
        """Of the step that was planned last."""
        self._by(octavo.attend)
        return self._out

    def check(self):
        """Raises what attend would, before an append."""
        self._by(octavo.check_attend)

    def _by(self, function):
        function(
            self._q,
            self._keys.k,
            self._keys.v,
            self._keys.kv_lens,
            workspace=self.space.workspace,
            **self._arguments(),
        )
