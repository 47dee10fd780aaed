# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors on a GPU: workspaces for calls over the caller's cache, and integers there.

The host never reads a length: calls are sized by shapes and by what the caller says in numbers.
Keys that lie packed or padded are given by a table of slots (pages of one token), so that no view
overlaps another and a backend that clears V behind a sequence's end finds nothing to clear.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

import octavo

from .._results import torch_stream
from ._arrays import not_covered

_KEPT = 32
_ENOUGH = 256 << 20  # bytes of workspace, where the least is not more


@functools.cache
def torch():
    return sys.modules["torch"]


@functools.cache
def _float_dtypes():
    t = torch()
    return frozenset((t.float32, t.float16, t.bfloat16))


def on_gpu(x) -> bool:
    """Whether x is a tensor of PyTorch's on a GPU."""
    return getattr(x, "is_cuda", False) is True


def capturing() -> bool:
    return torch().cuda.is_current_stream_capturing()


def stream_address(device) -> int:
    return torch_stream(torch(), device.index)


def checked(like, **tensors):
    """The tensors, which must be of a dtype that Octavo knows and on the GPU of `like`."""
    kind, place, dtypes = torch().Tensor, like.device, _float_dtypes()
    for name, x in tensors.items():
        if not isinstance(x, kind):
            raise TypeError(f"{name}: wanted a tensor, as q is, got {type(x).__name__}")
        if x.device != place:
            raise ValueError(f"{name}: wanted a tensor on {place}, got one on {x.device}")
        if x.dtype not in dtypes:
            raise not_covered(f"{name} of dtype {x.dtype}", "float32, float16 and bfloat16 are")
    return tuple(x.detach() if x.requires_grad else x for x in tensors.values())


def ints(x, name, device, length=None):
    """Dense int32 on the device. Tensors of the host and lists are copied there."""
    t = torch()
    if not isinstance(x, t.Tensor):
        x = t.as_tensor(np.asarray(x, np.int32))
    if x.is_floating_point() or x.dtype is t.bool:
        raise TypeError(f"{name}: wanted integers, got {x.dtype}")
    if x.dtype is not t.int32 or x.device != device:
        x = x.to(device=device, dtype=t.int32, non_blocking=True)
    x = x.contiguous()
    if length is not None and tuple(x.shape) != (length,):
        raise ValueError(f"{name}: wanted shape [{length}], got {list(x.shape)}")
    return x


def table_of(x, name, device):
    table = ints(x, name, device)
    if table.dim() != 2:
        raise ValueError(f"{name}: wanted two axes, got {list(table.shape)}")
    return table


def floats(x, name, device, shape=None):
    """Dense float32 on the device."""
    t = torch()
    if not isinstance(x, t.Tensor):
        x = t.as_tensor(np.asarray(x, np.float32))
    if x.requires_grad:
        x = x.detach()
    if x.dtype is not t.float32 or x.device != device:
        x = x.to(device=device, dtype=t.float32, non_blocking=True)
    x = x.contiguous()
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name}: wanted shape {list(shape)}, got {list(x.shape)}")
    return x


@functools.lru_cache(maxsize=256)
def _kept_steps(first, step, count, device, stream):
    return _steps(first, step, count, device)


def _steps(first, step, count, device):
    t = torch()
    if step == 0:
        return t.full((count,), first, dtype=t.int32, device=device)
    return t.arange(first, first + step * count, step, dtype=t.int32, device=device)


def steps(first, step, count, device):
    """first, first + step, ...: kept for the calls of one stream, but for those made in a capture,
    which are the graph's.
    """
    if capturing():
        return _steps(first, step, count, device)
    return _kept_steps(first, step, count, device, stream_address(device))


def full(count, value, device):
    return steps(value, 0, count, device)


def likeness(shape, dtype, device):
    """What torch.empty_like makes dense tensors of such a kind from, at less than half the cost of
    other ways. Takes no memory worth the name.
    """
    return torch().empty(1, dtype=dtype, device=device).expand(shape)


def owners(offsets, num_tokens):
    """int64 [num_tokens]: the sequence of each packed token; the last one's past the end."""
    t = torch()
    tokens = steps(0, 1, num_tokens, offsets.device)
    return t.searchsorted(offsets[1:], tokens, right=True).clamp_(max=offsets.shape[0] - 2)


class Keys(NamedTuple):
    """Where the keys of each sequence lie, and the most that one may have (0: what a row holds)."""

    k: Any  # [N, P, Hk, D]
    v: Any
    kv_lens: Any
    page_table: Any = None
    rows: Any = None
    max_kv_len: int = 0

    @property
    def capacity(self):
        slots = self.k.shape[1]
        return slots if self.page_table is None else self.page_table.shape[1] * slots

    def where(self):
        return {"page_table": self.page_table, "row_indices": self.rows}


def packed_keys(k, v, starts, kv_lens, longest):
    """Keys [Tk, Hk, D] that lie end to end, each sequence's from starts[b] on, as pages of one."""
    longest = max(longest, 1)
    entries = steps(0, 1, k.shape[0] + longest, k.device)
    return Keys(k[:, None], v[:, None], kv_lens, one_list(entries, longest), starts, longest)


def one_list(entries, width):
    """A list of pages as a page table: row r has the `width` entries from r on."""
    count = entries.shape[0] - width + 1
    return entries.as_strided((count, width), (1, 1))


class Space:
    """A workspace and its memory. again: how calls of its kind go, where a front keeps that."""

    def __init__(self, device):
        self._device, self._bytes = device, 0
        self.again = None
        self.workspace = octavo.Workspace(str(device))

    def fit(self, sizes) -> bool:
        """Takes more memory where a call of such sizes wants it, and says so: the plan is lost."""
        wanted = max(sizes.least, min(sizes.good, _ENOUGH), 256)
        if wanted <= self._bytes:
            return False
        self.workspace.use(torch().empty(wanted, dtype=torch().uint8, device=self._device))
        self._bytes = wanted
        return True

    def plan(self, keys: Keys, offsets, num_tokens, max_new_tokens):
        self.workspace.plan(
            keys.k,
            keys.v,
            keys.kv_lens,
            token_offsets=offsets,
            num_tokens=num_tokens,
            max_new_tokens=max_new_tokens,
            max_kv_len=keys.max_kv_len,
            **keys.where(),
        )


class Spaces:
    """Workspaces by device, stream and kind of call. The least recently used are let go.

    A workspace serves one stream of one thread. A capture takes one that a call like it has made
    before, and keeps it for good: the graph's replays use it. Graphs captured on one stream share
    theirs, so they are to be replayed one after the other.
    """

    def __init__(self):
        self._ready = OrderedDict()
        self._captured = {}

    def get(self, device, kind, sizes, what) -> Space:
        """sizes(workspace): what such a call takes."""
        key = self._key(device, kind)
        if capturing():
            found = self._for_capture(key)
            if found is None:
                raise RuntimeError(
                    f"{what}: wanted a call like it before the capture of a CUDA graph, got none"
                )
            return found
        found = self._ready.get(key)
        if found is None:
            found = Space(device)
            found.fit(sizes(found.workspace))
            self._ready[key] = found
            if len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
        else:
            self._ready.move_to_end(key)
        return found

    def again(self, device, kind):
        """(how a call goes of whose kind there was one, the current stream's address): None if
        there was none or none is kept.
        """
        if kind is None:
            return None, None
        key = self._key(device, kind)
        if capturing():
            found = self._for_capture(key)
        else:
            found = self._ready.get(key)
            if found is not None:
                self._ready.move_to_end(key)
        return None if found is None else found.again, key[1][0]

    @staticmethod
    def _key(device, kind):
        return device, (stream_address(device), threading.get_ident()), kind

    def _for_capture(self, key):
        """None if there was no call like it before."""
        found = self._captured.get(key)
        if found is not None:
            return found
        for device, stream, kind in reversed(self._ready):
            if (device, kind) == (key[0], key[2]):
                found = self._captured[key] = self._ready.pop((device, stream, kind))
                return found
        return None


spaces = Spaces()
