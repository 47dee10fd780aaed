# SPDX-License-Identifier: Apache-2.0
"""What the batch wrappers share: buffers of graph mode, a plan kept, a call with it."""

from __future__ import annotations

import inspect

import numpy as np

from .. import _gpu as gpu
from .._arrays import dtype_name, framework, ints, not_covered
from . import _gpu
from ._common import Maths, answer, attend, check_dtype, unpack


class Batch:
    """A plan and the buffers it is copied to."""

    def _set_up(self, float_workspace_buffer, kv_layout, use_cuda_graph, buffers):
        """buffers: the arrays of graph mode by the names of their arguments."""
        self._kv_layout = kv_layout
        self._float_workspace_buffer = float_workspace_buffer
        self._use_cuda_graph = bool(use_cuda_graph)
        self._buffers = buffers
        self._maths = None
        self._on_gpu = gpu.on_gpu(float_workspace_buffer)
        self._device_plan = None
        self._fixed_batch_size = 0
        if self._use_cuda_graph:
            for name, buffer in buffers.items():
                if not hasattr(buffer, "shape"):
                    raise ValueError(
                        f"{name}: wanted an array in CUDA graph mode, got {type(buffer).__name__}"
                    )
            sizes = {n: b.shape[0] - 1 for n, b in buffers.items() if "indptr" in n}
            sizes.update({n: b.shape[0] for n, b in buffers.items() if "last_page_len" in n})
            if len(set(sizes.values())) != 1:
                raise ValueError(f"buffers: wanted one batch size for all, got {sizes}")
            self._fixed_batch_size = next(iter(sizes.values()))

    @property
    def device(self):
        return getattr(self._float_workspace_buffer, "device", "cpu")

    @property
    def is_cuda_graph_enabled(self):
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer=None):
        """Keeps the new buffer; Octavo writes to neither."""
        self._float_workspace_buffer = float_workspace_buffer

    def workspace_size(self, *plan_arguments, **plan_options):
        """(0, 0): bytes of float and int workspace that such a plan() needs of the caller."""
        inspect.signature(type(self).plan).bind(self, *plan_arguments, **plan_options)
        return 0, 0

    def prewarm_paged_kv_stride_variant(self, variant="independent"):
        """Nothing to do: keys and values may have strides of their own in every call."""
        if variant not in ("independent", "shared"):
            raise ValueError(f"variant: wanted independent or shared, got {variant!r}")

    def end_forward(self):
        """Nothing to do."""

    def _keep_buffers(self, batch_size, arrays):
        """In graph mode: the same batch size each time, and the arrays copied to their buffers."""
        if not self._use_cuda_graph:
            return
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                f"batch size: wanted {self._fixed_batch_size} (of the buffers), got {batch_size}"
            )
        for name, array in arrays.items():
            buffer = self._buffers[name]
            values = ints(array, name)
            if values.shape[0] > buffer.shape[0]:
                raise ValueError(
                    f"{name}: wanted at least {values.shape[0]} entries, got {buffer.shape[0]}"
                )
            if self._on_gpu:
                host = gpu.torch().from_numpy(values)
                buffer[: values.shape[0]].copy_(host, non_blocking=True)
            else:
                framework(buffer, name).host(buffer, name)[: values.shape[0]] = values

    def _plan_on_gpu(self, most, block_tables=None):
        """The kept plan's integers to the GPU; most: new tokens of one sequence."""
        if not self._on_gpu:
            return
        if self._device_plan is None:
            fixed = self._fixed_pages(block_tables) if self._use_cuda_graph else None
            self._device_plan = _gpu.DevicePlan(self._float_workspace_buffer.device, fixed)
        offsets = self._offsets
        if offsets is None:
            offsets = np.arange(self._keys.kv_lens.shape[0] + 1, dtype=np.int32) * most
        try:
            self._device_plan.set(self._keys, offsets, most, self._page_size)
        except Exception:
            self._maths = None  # half a plan is none
            raise

    def _fixed_pages(self, block_tables):
        """Pages at most, in all and of one sequence, for as long as the wrapper lives."""
        (pages,) = (max(x.shape[0], 1) for n, x in self._buffers.items() if "indices" in n)
        if block_tables is None:
            return pages, pages
        width = max(min(pages, block_tables.shape[1]), 1)
        return width * self._fixed_batch_size, width

    def _keep_plan(self, keys, offsets, page_size, sizes, dtypes, maths):
        """sizes: query heads, KV heads, head dim and that of V. dtypes: of q, keys and output."""
        num_qo_heads, num_kv_heads, head_dim, _ = sizes
        if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
            raise ValueError(
                f"num_qo_heads: wanted a multiple of {num_kv_heads} KV heads, got {num_qo_heads}"
            )
        q_type = dtype_name(dtypes[0])
        kv_type = q_type if dtypes[1] is None else dtype_name(dtypes[1])
        o_type = q_type if dtypes[2] is None else dtype_name(dtypes[2])
        if o_type not in (q_type, "f32"):
            raise not_covered(f"o_data_type {dtypes[2]}", "q's and float32 are")
        self._args = (num_qo_heads, head_dim, maths)
        self._maths = Maths(num_qo_heads, head_dim, **maths)
        self._keys, self._offsets, self._page_size = keys, offsets, page_size
        self._sizes, self._types = sizes, (q_type, kv_type, o_type)
        self._checked = None

    def _change_maths(self, **changes):
        self._need_plan()
        num_qo_heads, head_dim, maths = self._args
        self._maths = Maths(num_qo_heads, head_dim, **{**maths, **changes})

    def _need_plan(self):
        if self._maths is None:
            raise RuntimeError("run: wanted plan() before it")

    def _check_run(self, window_left):
        self._need_plan()
        if window_left is not None and window_left != self._maths.window_left:
            raise ValueError(
                f"window_left: wanted {self._maths.window_left}, as planned, got {window_left}"
            )

    def _check_arrays(self, q, k_array, host, k, v):
        """Shapes and dtypes, once for each kind of arrays that a plan meets."""
        kind = (q.dtype, k_array.dtype, host.shape, k.shape, v.shape)
        if kind == self._checked:
            return
        check_dtype(q, self._types[0], "q")
        check_dtype(k_array, self._types[1], "k")
        num_qo_heads, num_kv_heads, head_dim, head_dim_v = self._sizes
        for name, got, want in (
            ("q", host.shape[1:], (num_qo_heads, head_dim)),
            ("k", k.shape[-2:], (num_kv_heads, head_dim)),
            ("v", v.shape[-2:], (num_kv_heads, head_dim_v)),
        ):
            if tuple(got) != want:
                raise ValueError(
                    f"{name}: wanted heads and dim {list(want)}, as planned, got {list(got)}"
                )
        if self._page_size and k.shape[1] != self._page_size:
            raise ValueError(f"page_size: wanted {self._page_size}, as planned, got {k.shape[1]}")
        self._checked = kind

    def _out_dtype(self, frame):
        return frame.float32 if self._types[2] != self._types[0] else None

    def _check_place(self, q):
        if gpu.on_gpu(q) != self._on_gpu:
            raise ValueError(
                f"q: wanted it where the workspace buffer is ({self.device}), got {q.device}"
            )

    def _attend_on_gpu(self, q, k, v, out, lse, return_lse, scales, sinks):
        result = self._device_plan.attend(
            q,
            k,
            v,
            self._maths,
            out,
            lse,
            return_lse,
            scales,
            sinks,
            gpu.torch().float32 if self._types[2] != self._types[0] else None,
        )
        return answer(result, return_lse)

    def _attend_keys(self, frame, q, host, k, v, keys, out, lse, return_lse, scales, sinks):
        result = attend(
            frame,
            q,
            host,
            k,
            v,
            keys,
            self._offsets,
            self._maths,
            out=out,
            lse=lse,
            want_lse=return_lse,
            scales=scales,
            sinks=sinks,
            out_dtype=self._out_dtype(frame),
        )
        return answer(result, return_lse)


class PagedBatch(Batch):
    """A batch over pages."""

    def _attend(self, q, paged_kv_cache, out, lse, return_lse, scales, sinks):
        array = paged_kv_cache[0] if isinstance(paged_kv_cache, (tuple, list)) else paged_kv_cache
        if self._on_gpu or gpu.on_gpu(q):
            self._check_place(q)
            k, v = _gpu.pages_of(paged_kv_cache, self._kv_layout)
            result = self._device_plan.attend_again(
                q, k, v, self._maths, out, lse, return_lse, scales, sinks
            )
            if result is not None:
                return answer(result, return_lse)
            self._check_arrays(q, array, q, k, v)
            return self._attend_on_gpu(q, k, v, out, lse, return_lse, scales, sinks)
        frame = framework(q)
        host = frame.host(q, "q")
        k, v = unpack(frame, paged_kv_cache, self._kv_layout)
        self._check_arrays(q, array, host, k, v)
        return self._attend_keys(
            frame, q, host, k, v, self._keys, out, lse, return_lse, scales, sinks
        )
