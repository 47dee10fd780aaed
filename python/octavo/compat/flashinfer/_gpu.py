# SPDX-License-Identifier: Apache-2.0
"""The FlashInfer fronts on a GPU: a plan's integers there, the workspace that has planned them, and
calls without a plan.

As FlashInfer's, plan() looks at its arrays on the host: those on a GPU are waited for there.
run() waits for nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from octavo._native import _kind_of_call as kind_of_call

from .. import _gpu as gpu
from .. import _gpu_call
from .._arrays import checked_scale, not_covered
from .._gpu_call import Call, Options
from ._common import LOG2E
from ._gpu_rope import of_rows, turned, turned_call


def on_host(x):
    """What plan() reads: a tensor on a GPU is copied to the host."""
    return x.cpu() if gpu.on_gpu(x) else x


def options(maths, device, heads, scales, sinks):
    """The arithmetic of a plan and a call."""
    scale = maths.scale
    for name, factor in zip(("q_scale", "k_scale"), scales, strict=False):
        if factor is None:
            continue
        if gpu.on_gpu(factor):
            raise not_covered(f"{name} as a tensor on a GPU", "a number is")
        scale *= float(factor)
    if sinks is not None:
        sinks = gpu.floats(sinks, "sinks", device, (heads,))
    return Options(
        checked_scale(scale, "sm_scale with q_scale and k_scale"),
        maths.mask,
        maths.window,
        maths.softcap,
        sinks,
        maths.slopes_on(device),
        batch_invariant=maths.batch_invariant,
    )


def check_lse(maths, want_lse):
    if want_lse and maths.slopes is not None:
        raise not_covered("the LSE with pos_encoding_mode ALIBI")


def results(q, dim_v, out, lse, want_lse, out_dtype):
    """(out, lse or None), given or new."""
    t = gpu.torch()
    shape, lse_shape = (*q.shape[:2], dim_v), tuple(q.shape[:2])
    if out is None:
        out = q.new_empty(shape, dtype=q.dtype if out_dtype is None else out_dtype)
    if not want_lse:
        lse = None
    elif lse is None:
        lse = q.new_empty(lse_shape, dtype=t.float32)
    for name, array, wanted in (("out", out, shape), ("lse", lse, lse_shape)):
        if array is not None and tuple(array.shape) != wanted:
            raise ValueError(f"{name}: wanted {list(wanted)}, got {list(array.shape)}")
    return out, lse


def _to_base_2(device):
    """A tensor, by which PyTorch multiplies at a third of what a number costs."""
    t = gpu.torch()
    return t.full((1,), float(LOG2E), dtype=t.float32, device=device)


def finish(out, lse, v_scale, to_base_2=None):
    if lse is not None:
        lse.mul_(float(LOG2E) if to_base_2 is None else to_base_2)
    if v_scale is not None:
        out.mul_(v_scale)
    return out, lse


def empty(out, lse):
    """What attention over no key gives."""
    out.zero_()
    return out, None if lse is None else lse.fill_(-np.inf)


def _pages(keys, page_size):
    """(where each sequence's pages begin, the pages of all, the most that one has)."""
    lens = keys.kv_lens
    if keys.page_table is None:  # ragged keys, in pages of one
        total = int((keys.rows + lens).max(initial=0))
        return keys.rows, np.arange(total, dtype=np.int32), max(keys.longest, 1)
    counts = -(-lens // page_size)
    entries = keys.page_table[np.arange(keys.page_table.shape[1]) < counts[:, None]]
    return np.cumsum(counts) - counts, entries, max(int(counts.max(initial=0)), 1)


class Again(NamedTuple):
    """How a run goes whose like there was: same shapes, strides, dtypes, places and words."""

    maths: Any
    call: Any
    slopes: Any
    likes: tuple  # of out and lse: what torch.empty_like makes them from
    to_base_2: Any  # by what the LSE is multiplied, None without one
    space: Any
    plan: tuple  # of Space.plan
    plan_key: Any  # None in graph mode, where plan() plans


class DevicePlan:
    """A plan's integers on the GPU, and the workspace that has planned them.

    The pages of all sequences lie in one list, of which each row of the page table begins one entry
    further on. In graph mode the integers lie at fixed places, with room for fixed[0] pages in all
    and fixed[1] of a sequence, and each kind of call has a workspace of its own, which plan() plans
    anew: a captured graph holds layers only.
    """

    def __init__(self, device, fixed=None):
        self._device, self._fixed = device, fixed
        self._space = gpu.Space(device) if fixed is None else None
        self._spaces = {}  # graph mode: kind -> (space, call's plan)
        self._sized, self._planned = set(), None
        self._packed = self._lens = self._offsets = self._rows = self._table = None
        self._again = {}

    def set(self, keys, offsets, most, page_size):
        """keys and offsets of the host; most: new tokens of one sequence, 0 for all of them."""
        t = gpu.torch()
        self._most, self._page_size, self._longest = most, page_size, max(keys.longest, 1)
        self._on_host, self._turned = (keys, offsets), None
        rows, entries, width = _pages(keys, page_size)
        if self._fixed is None:
            self._place(len(rows), len(entries), width)
            self._sized.clear()
        else:
            for n, most_pages, what in (
                (len(entries), self._fixed[0], "in all"),
                (width, self._fixed[1], "of a sequence"),
            ):
                if n > most_pages:
                    raise ValueError(
                        f"indices: wanted at most {most_pages} pages {what} (of the buffer, or of "
                        f"the first plan's block_tables), got {n}"
                    )
            for _, plan in self._spaces.values():
                if plan is not None:
                    self._check_longest(plan[0].max_kv_len)
            if self._packed is None:
                self._place(len(rows), *self._fixed)
        packed = np.concatenate([keys.kv_lens, offsets, rows, entries]).astype(np.int32)
        self._packed[: len(packed)].copy_(t.from_numpy(packed), non_blocking=True)
        self._planned = None
        self._again.clear()
        for space, plan in self._spaces.values():
            if plan is not None:
                space.plan(*plan)

    def _place(self, b, count, width):
        """Memory for the integers of b sequences with `count` pages in all. Behind the last one's
        there are `width` more, so that rows of the table end within.
        """
        t = gpu.torch()
        with t.inference_mode(False):  # or a plan outside of it might not write
            self._packed = t.zeros(3 * b + 1 + count + width, dtype=t.int32, device=self._device)
        self._lens, self._offsets = self._packed[:b], self._packed[b : 2 * b + 1]
        self._rows = self._packed[2 * b + 1 : 3 * b + 1]
        self._table = gpu.one_list(self._packed[3 * b + 1 :], width)

    def _check_longest(self, max_kv_len):
        if self._longest > max_kv_len:
            raise ValueError(
                f"kv lengths: wanted at most {max_kv_len}, which the cache's pages hold, "
                f"got {self._longest}"
            )

    def _max_kv_len(self, num_pages):
        """Of one sequence: in graph mode what later plans may have, too."""
        if self._fixed is None:
            return self._longest
        most = min(self._fixed[1], num_pages) * self._page_size
        self._check_longest(most)
        return most

    def get(self, device, kind, sizes, what):
        """As gpu.Spaces.get."""
        if self._fixed is None:
            if gpu.capturing():
                raise RuntimeError(f"{what}: wanted use_cuda_graph in a capture, got a plain one")
            if kind not in self._sized:
                if self._space.fit(sizes(self._space.workspace)):
                    self._planned = None
                self._sized.add(kind)
            return self._space
        if kind not in self._spaces:
            if gpu.capturing():
                raise RuntimeError(
                    f"{what}: wanted a run like it before the capture of a CUDA graph, got none"
                )
            space = gpu.Space(device)
            space.fit(sizes(space.workspace))
            self._spaces[kind] = (space, None)
        self._kind = kind
        return self._spaces[kind][0]

    def attend(self, q, k, v, maths, out, lse, want_lse, scales, sinks, out_dtype):
        """(out, lse or None) of one layer: k, v [N, P, Hk, D] over the plan's pages."""
        kind = _kind_of_run(q, k, v, out, lse, want_lse, scales, sinks)
        q, k, v = gpu.checked(q, q=q, k=k, v=v)
        check_lse(maths, want_lse)
        out, lse = results(q, v.shape[-1], out, lse, want_lse, out_dtype)
        arithmetic = options(maths, q.device, q.shape[1], scales, sinks)
        if not self._lens.shape[0] or not q.shape[0] or k.numel() == 0:
            return empty(out, lse)
        if maths.rope_args is not None:
            return finish(*self._attend_turned(q, k, v, maths, arithmetic, out, lse), scales[2])
        most_keys = self._max_kv_len(k.shape[0])
        keys = gpu.Keys(k, v, self._lens, self._table, self._rows, most_keys)
        most = min(self._most, q.shape[0])
        call = Call(
            "run",
            q,
            keys,
            self._offsets,
            arithmetic,
            format="thd",
            lse=lse,
            out=out,
            most=most,
            owner=self,
        )
        plan = keys, self._offsets, call.num_tokens, most
        plan_key = self._plan(call.space, plan)
        if kind is not None and sinks is arithmetic.sinks and not gpu.capturing():
            made = out, lse
            self._again[kind] = Again(
                maths,
                _gpu_call.CallAgain(call.space.workspace, **call.words()),
                arithmetic.alibi_slopes,
                tuple(
                    None if x is None else gpu.likeness(x.shape, x.dtype, x.device) for x in made
                ),
                None if lse is None else _to_base_2(lse.device),
                call.space,
                plan,
                plan_key,
            )
        call.attend()
        return finish(out, lse, scales[2])

    def _attend_turned(self, q, k, v, maths, arithmetic, out, lse):
        """Over keys that are turned as they are read."""
        if self._fixed is not None:
            raise not_covered(
                "pos_encoding_mode ROPE_LLAMA in CUDA graph mode on a GPU",
                "rotate before the append",
            )
        if self._turned is None:
            self._turned = turned(*self._on_host, self._page_size, self._device)
        self._planned = None  # the workspace plans another step
        return _attend_turned(self._turned, q, k, v, maths, arithmetic, out, lse, self)

    def attend_again(self, q, k, v, maths, out, lse, want_lse, scales, sinks):
        """As attend, if there was a call like it since the plan, else None."""
        kind = _kind_of_run(q, k, v, out, lse, want_lse, scales, sinks)
        again = None if kind is None else self._again.get(kind)
        if again is None or again.maths is not maths:
            return None
        if self._fixed is None and gpu.capturing():
            return None  # attend says why not
        empty_like = gpu.torch().empty_like
        if out is None:
            out = empty_like(again.likes[0])
        if not want_lse:
            lse = None
        elif lse is None:
            lse = empty_like(again.likes[1])
        if again.plan_key != self._planned:
            again.space.plan(*again.plan)
            self._planned = again.plan_key
        again.call.run(
            q,
            k,
            v,
            self._lens,
            self._offsets,
            self._table,
            self._rows,
            out,
            lse,
            sinks,
            again.slopes,
            planned=True,
        )
        return finish(out, lse, scales[2], again.to_base_2)

    def _plan(self, space, plan):
        """The step's plan is the same for all layers whose pools are as large. Returns by what it
        is known, None in graph mode.
        """
        if self._fixed is not None:
            _, planned = self._spaces[self._kind]
            if planned is None:
                space.plan(*plan)
                self._spaces[self._kind] = (space, plan)
            return None
        keys, _, num_tokens, most = plan
        key = (tuple(keys.k.shape[:2]), num_tokens, most)
        if self._planned != key:
            space.plan(*plan)
            self._planned = key
        return key


def _attend_turned(plan, q, k, v, maths, arithmetic, out, lse, owner=None):
    if not plan.pages.shape[0]:
        return empty(out, lse)
    q, keys = turned_call(plan, q, k, v, maths)
    call = Call(
        "run",
        q,
        keys,
        plan.offsets,
        arithmetic,
        format="thd",
        lse=lse,
        out=out,
        most=plan.most,
        owner=owner,
    )
    call.plan()
    call.attend()
    return out, lse


def _kind_of_run(q, k, v, out, lse, want_lse, scales, sinks):
    return kind_of_call((want_lse, *scales), q, k, v, out, lse, sinks)


def attend_rows(what, q, k, v, maths, *, want_lse, scales, out_dtype=None, single=False):
    """(out, lse or None) of one sequence: q [n, Hq, D], k [L, Hk, D], v [L, Hk, Dv]. single: each
    query is a sequence of its own, over the same keys.
    """
    q, k, v = gpu.checked(q, q=q, k=k, v=v)
    check_lse(maths, want_lse)
    out, lse = results(q, v.shape[-1], None, None, want_lse, out_dtype)
    arithmetic = options(maths, q.device, q.shape[1], scales, None)
    if not q.shape[0] or k.numel() == 0:
        return empty(out, lse)
    n, length = q.shape[0], k.shape[0]
    if maths.rope_args is not None:
        plan = of_rows(n, length, q.device)
        pages = k[:, None], v[:, None]
        return finish(*_attend_turned(plan, q, *pages, maths, arithmetic, out, lse), scales[2])
    seqs, most = (n, 1) if single else (1, n)
    rows = gpu.full(seqs, 0, q.device)
    keys = gpu.Keys(k[None], v[None], gpu.full(seqs, length, q.device), None, rows, length)
    call = Call(
        what,
        q,
        keys,
        gpu.steps(0, most, seqs + 1, q.device),
        arithmetic,
        format="thd",
        lse=lse,
        out=out,
        most=most,
    )
    call.plan()
    call.attend()
    return finish(out, lse, scales[2])


def pages_of(paged_kv_cache, kv_layout):
    """(k, v) [N, P, Hk, D] of one tensor [N, 2, ..] or a pair."""
    if isinstance(paged_kv_cache, (tuple, list)):
        k, v = paged_kv_cache
    else:
        if paged_kv_cache.dim() != 5 or paged_kv_cache.shape[1] != 2:
            raise ValueError(
                "paged_kv_cache: wanted [pages, 2, ...] of five axes, "
                f"got {list(paged_kv_cache.shape)}"
            )
        k, v = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    return (k.transpose(1, 2), v.transpose(1, 2)) if kv_layout == "HND" else (k, v)
