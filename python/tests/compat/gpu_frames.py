# SPDX-License-Identifier: Apache-2.0
"""The fronts' way for a GPU's tensors, tested in two frameworks.

`Cuda` is PyTorch on a GPU; skipped where there is none. `StandIn` is for machines without one: the
fronts take PyTorch's tensors of the host for a GPU's, and the library's calls run on the CPU, after
they were held to what Workspace.plan was told. It tests the fronts' integers, and no kernel.
In both, calls are made twice, but for modules that say CALLS_ONCE.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from frames import Torch

import octavo
from gpus import torch_on_a_gpu
from octavo._native import _append_listed as native_append_listed
from octavo._native import _CallAgain as NativeCallAgain
from octavo.compat import _gpu, _gpu_call, flash_attn
from octavo.compat.flashinfer import _gpu_append
from octavo.compat.flashinfer._batch import PagedBatch


class Cuda(Torch):
    name = "cuda"
    device = "cuda:0"
    turns_and_rounds = True

    def products(self, dtype):
        return dtype

    def make(self, x, dtype="f32"):
        return super().make(x, dtype).cuda()

    def ints(self, x, dtype=np.int32):
        return super().ints(x, dtype).cuda()

    def read(self, x):
        return super().read(x.cpu())

    def place(self, module):
        return module.cuda()

    def wait(self):
        self.torch.cuda.synchronize()

    def is_one(self, x):
        return super().is_one(x) and x.is_cuda


class StandIn(Torch):
    name = "stand-in"
    turns_and_rounds = True


def _place(x):
    return None if x is None else (x.data_ptr(), tuple(x.shape))


class Workspace:
    """Holds calls to what was planned, and steps to their maxima, as the library does."""

    def __init__(self, device):
        self.step = None
        self._most_tokens = 0  # of a step that was asked about

    def sizes(self, q, k_cache, v_cache, kv_lens, **words):
        tokens = q.shape[0] * (1 if words["format"] == "thd" else q.shape[1])
        self._most_tokens = max(self._most_tokens, tokens)
        return octavo.WorkspaceSizes(256, 512)

    def use(self, memory):
        assert memory.numel() == 512

    def plan(
        self,
        k_cache,
        v_cache,
        kv_lens,
        *,
        token_offsets,
        num_tokens,
        page_table=None,
        row_indices=None,
        max_new_tokens=0,
        max_kv_len=0,
    ):
        for ints in (kv_lens, token_offsets, page_table, row_indices):
            assert ints is None or str(ints.dtype) == "torch.int32"
            assert ints is None or ints.is_contiguous() or ints is page_table
        ends, lens = token_offsets.numpy(), kv_lens.numpy()
        assert num_tokens <= self._most_tokens, "more than the workspace was made for"
        capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
        assert max_kv_len <= capacity
        assert ends[-1] <= num_tokens
        if len(lens):
            assert np.diff(ends).max() <= (max_new_tokens or num_tokens)
            assert lens.max() <= (max_kv_len or capacity)
        self.step = self.key(
            k_cache,
            kv_lens,
            token_offsets,
            page_table,
            row_indices,
            num_tokens,
            max_new_tokens,
            max_kv_len,
        )

    @staticmethod
    def key(k_cache, kv_lens, offsets, table, rows, num_tokens, most, max_kv_len):
        arrays = tuple(_place(x) for x in (kv_lens, offsets, table, rows))
        return (tuple(k_cache.shape[:2]), arrays, num_tokens, most, max_kv_len)


class Rope(octavo.Rope):
    """Knows how many positions its tables serve."""

    def __init__(self, style, *, cos, sin):
        super().__init__(style, cos=cos, sin=sin)
        self.num_rows = cos.shape[0]


def _check_planned(x, k_cache, kv_lens, words):
    workspace = words.pop("workspace")
    most, max_kv_len = words.pop("max_new_tokens"), words.pop("max_kv_len")
    num_tokens = x.shape[0] if words["format"] == "thd" else x.shape[0] * x.shape[1]
    arrays = (words["token_offsets"], words["page_table"], words["row_indices"])
    key = Workspace.key(k_cache, kv_lens, *arrays, num_tokens, most, max_kv_len)
    assert workspace.step == key, "not the step that was planned"
    rope = words.get("rope")
    if rope is not None and words.get("positions") is None:
        _check_tables(rope.num_rows, k_cache, arrays[1], max_kv_len)


def _check_tables(rows, k_cache, page_table, max_kv_len):
    slots = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    assert rows >= (max_kv_len or slots), f"rope: {rows} rows for {max_kv_len or slots} keys"


class CallAgain:
    """The fronts' call of a known kind: their own on the CPU, held to what was planned."""

    def __init__(self, workspace, *, max_new_tokens, max_kv_len, packed=False, **words):
        self._workspace, self._packed = workspace, packed
        self._most = {"max_new_tokens": max_new_tokens, "max_kv_len": max_kv_len}
        self._format, self._same_step = words["format"], False
        self._call = NativeCallAgain(None, max_new_tokens=0, max_kv_len=0, packed=packed, **words)

    def append_too(self, format, offsets, max_new_tokens, max_kv_len, same_step):
        self._call.append_too(format, offsets, 0, 0, same_step)
        self._new = (offsets, {"max_new_tokens": max_new_tokens, "max_kv_len": max_kv_len})
        self._new_format, self._same_step = format, same_step

    def rotate(self, style):
        self._call.rotate(style)

    def set_lse_axes(self, token, head):
        self._call.set_lse_axes(token, head)

    def run(
        self,
        q,
        k,
        v,
        lens,
        offsets,
        table,
        rows,
        out,
        lse,
        sinks,
        slopes,
        cos=None,
        sin=None,
        new_k=None,
        new_v=None,
        planned=False,
        stream=None,
    ):
        keys, at = (k.unsqueeze(1), rows[:-1]) if self._packed else (k, rows)
        where = {"page_table": table, "row_indices": at}
        if new_k is not None:
            new_offsets, most = self._new
            words = {"token_offsets": new_offsets, **where, **most}
            tokens = new_k.shape[0] * (1 if self._new_format == "thd" else new_k.shape[1])
            self._workspace.plan(keys, keys, lens, num_tokens=tokens, **words)
        words = {"token_offsets": offsets, **where, **self._most}
        if not planned and not (self._same_step and new_k is not None):
            tokens = q.shape[0] * (1 if self._format == "thd" else q.shape[1])
            self._workspace.plan(keys, keys, lens, num_tokens=tokens, **words)
        checked = {**words, "workspace": self._workspace, "format": self._format}
        _check_planned(q, keys, lens, checked)
        if cos is not None:
            _check_tables(cos.shape[0], keys, table, self._most["max_kv_len"])
        others = out, lse, sinks, slopes, cos, sin, new_k, new_v
        self._call.run(q, k, v, lens, offsets, table, rows, *others)


def append_listed(workspace, k, v, k_pages, v_pages, seqs, positions, ends, pages, places, offsets):
    """The fronts' append of single tokens, on the CPU: those that lie nowhere are left out there
    as a GPU leaves them out.
    """
    torch, n, page_size = sys.modules["torch"], len(k), k_pages.shape[1]
    assert places.shape == (2 * n,)
    assert places.dtype is torch.int32
    assert offsets.tolist() == list(range(n + 1))
    last = len(ends) - 2
    mine = seqs.clamp(0, last).long()
    entries = ends[mine] + positions.div(page_size, rounding_mode="floor")
    there = (seqs == mine) & (positions >= 0) & (entries < ends[mine + 1])
    some = k[there], v[there], k_pages, v_pages, seqs[there], positions[there]
    count = int(there.sum())
    room = torch.empty(2 * count, dtype=torch.int32)
    native_append_listed(None, *some, ends, pages, room, offsets[: count + 1])
    assert room.tolist() == [
        *entries[there].tolist(),
        *(positions[there] % page_size + 1).tolist(),
    ]


def stand_in(monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    attend, append_tokens = octavo.attend, octavo.append_tokens
    check_attend = octavo.check_attend

    def checked_attend(q, k_cache, v_cache, kv_lens, **words):
        _check_planned(q, k_cache, kv_lens, words)
        return attend(q, k_cache, v_cache, kv_lens, **words)

    def check_only(q, k_cache, v_cache, kv_lens, **words):
        for name in ("workspace", "max_new_tokens", "max_kv_len"):
            del words[name]
        check_attend(q, k_cache, v_cache, kv_lens, **words)

    def checked_append(k, v, k_cache, v_cache, kv_lens, **words):
        _check_planned(k, k_cache, kv_lens, words)
        append_tokens(k, v, k_cache, v_cache, kv_lens, **words)

    monkeypatch.setattr(octavo, "Workspace", Workspace)
    monkeypatch.setattr(octavo, "Rope", Rope)
    monkeypatch.setattr(octavo, "attend", checked_attend)
    monkeypatch.setattr(octavo, "append_tokens", checked_append)
    monkeypatch.setattr(octavo, "check_attend", check_only)
    monkeypatch.setattr(_gpu_call, "CallAgain", CallAgain)
    monkeypatch.setattr(_gpu_append, "append_listed", append_listed)
    monkeypatch.setattr(_gpu, "on_gpu", lambda x: isinstance(x, torch.Tensor))
    monkeypatch.setattr(_gpu, "capturing", lambda: False)
    monkeypatch.setattr(_gpu, "stream_address", lambda device: 0)
    monkeypatch.setattr(_gpu, "spaces", _gpu.Spaces())
    return StandIn(torch)


def make_calls_twice(monkeypatch):
    """The fronts' calls on a GPU are made twice, and the second one counts: it goes by what was
    kept of the first. Appending the same again changes nothing.
    """

    def twice(module, name):
        once = getattr(module, name)

        def call(*arguments, **words):
            once(*arguments, **words)
            return once(*arguments, **words)

        monkeypatch.setattr(module, name, call)

    for name in ("with_kvcache", "varlen", "dense"):
        twice(flash_attn._gpu, name)
    twice(PagedBatch, "_attend")
    twice(_gpu_append, "append")


def cuda():
    return Cuda(torch_on_a_gpu())


def counted(monkeypatch, name):
    """How often a method of the fronts' workspaces is called, of those made from now on."""
    calls = []

    class Counting(octavo.Workspace):
        pass

    method = getattr(octavo.Workspace, name)

    def count(self, *arguments, **words):
        calls.append(self)
        return method(self, *arguments, **words)

    setattr(Counting, name, count)
    monkeypatch.setattr(octavo, "Workspace", Counting)
    return calls


class StandInGraph:
    """A capture by the stand-in: makes the call anew, its results at the old places. As in a
    capture nothing is computed before the first replay.
    """

    def __init__(self, call):
        self.call, self.results = call, call()
        for x in self._each(self.results):
            x.fill_(float("nan"))

    @staticmethod
    def _each(results):
        if results is None:
            return ()
        return results if isinstance(results, tuple) else (results,)

    def replay(self):
        for mine, new in zip(self._each(self.results), self._each(self.call()), strict=True):
            mine.copy_(new)


def captured(frame, call):
    """A graph of `call`, after one outside of it."""
    if frame.name != "cuda":
        graph = StandInGraph(call)
        return graph, graph.results
    torch = frame.torch
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


everywhere = pytest.mark.parametrize("frame", ["numpy", "torch", "stand-in", "cuda"], indirect=True)
hosts_and_cuda = pytest.mark.parametrize("frame", ["numpy", "torch", "cuda"], indirect=True)
on_gpus = pytest.mark.parametrize("frame", ["stand-in", "cuda"], indirect=True)
