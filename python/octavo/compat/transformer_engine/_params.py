# SPDX-License-Identifier: Apache-2.0
"""InferenceParams: the cache of all layers, stepped once for each pass of the model."""

from __future__ import annotations

from collections import OrderedDict
from itertools import accumulate

import octavo

from .._arrays import framework
from .._blame import names_arguments
from ._managers import NonPagedKVCacheManager, PagedKVCacheManager, _Manager
from ._torch import Counts, default_device
from ._wanted import LAYER, PARAMS, PRE_STEP, STEP_OF_LAYER

_FORMATS = ("bshd", "sbhd", "thd")


class InferenceParams:
    """Keys and values of a batch of growing sequences, for all layers of a model.

    max_batch_size sequences of at most max_sequence_length tokens; with is_paged, total_num_pages
    pages (None: as many as the worst case needs) of page_size tokens. custom_cache_manager is a
    class with KVCacheManager's methods and the built-in's arguments. device is where the cache
    lies; None is the current GPU for a torch.dtype where there is one, else the CPU.

    Each pass: pre_step({id: new tokens, ...}) in batch order, then the model. An id that is left
    out has finished. An id may bring any number of tokens.
    """

    @names_arguments(**PARAMS)
    def __init__(
        self,
        max_batch_size,
        max_sequence_length,
        num_heads_kv=None,
        head_dim_k=None,
        dtype=None,
        head_dim_v=None,
        is_paged=False,
        total_num_pages=None,
        page_size=None,
        max_ctx_len=None,
        qkv_format="bshd",
        custom_cache_manager=None,
        *,
        device=None,
    ):
        for name, value in (
            ("num_heads_kv", num_heads_kv),
            ("head_dim_k", head_dim_k),
            ("dtype", dtype),
        ):
            if value is None:
                raise ValueError(f"{name}: wanted a value, got None")
        _check_format(qkv_format)
        if qkv_format == "thd" and max_ctx_len is None:
            raise ValueError("max_ctx_len: wanted a value with qkv_format thd, got None")
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self.num_heads_kv = num_heads_kv
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.dtype = dtype
        self.is_paged = is_paged
        self.max_ctx_len = max_ctx_len
        self.device = default_device(dtype) if device is None else str(device)
        sizes = {
            "num_heads": num_heads_kv,
            "head_dim_k": head_dim_k,
            "dtype": dtype,
            "max_batch_size": max_batch_size,
            "max_seqlen": max_sequence_length,
            "head_dim_v": self.head_dim_v,
        }
        manager = NonPagedKVCacheManager
        if is_paged:
            if page_size is None or page_size < 1:
                raise ValueError(f"page_size: wanted at least 1 with is_paged, got {page_size}")
            worst_case = max_batch_size * -(-max_sequence_length // page_size)
            self.page_size = page_size
            self.total_num_pages = worst_case if total_num_pages is None else total_num_pages
            sizes.update(total_num_pages=self.total_num_pages, page_size=page_size)
            manager = PagedKVCacheManager
        if custom_cache_manager is not None:
            self.cache_manager = custom_cache_manager(**sizes)
        else:
            self.cache_manager = manager(**sizes, device=self.device)
        self.cache_qkv_format = "bshd"
        self._set_format(qkv_format)
        self._cu_q, self._cu_kv = (Counts(max_batch_size + 1, dtype, self.device) for _ in range(2))
        self._before = Counts(max_batch_size, dtype, self.device)
        self._capture = None
        self._clear()

    @property
    def is_built_in(self):
        """Whether the cache manager is Octavo's own."""
        return isinstance(self.cache_manager, _Manager)

    @property
    def cu_seqlens_q(self):
        """int32 [max_batch_size + 1]: prefix sums of the step's new tokens, the last repeated."""
        return self._cu_q.array

    @property
    def cu_seqlens_kv(self):
        """int32 [max_batch_size + 1]: prefix sums of the lengths after the step."""
        return self._cu_kv.array

    @property
    def pre_step_seqlens(self):
        return self._before.array

    def _maxima_of(self, q_shape, qkv_format):
        """In a capture, what a call is sized by: what its tensors hold and the longest sequence."""
        if self._capture is None:
            return None
        if qkv_format == "thd":
            tokens, seqs = q_shape[0], self.max_batch_size
            longest = tokens
        else:
            seqs, longest = q_shape[:2] if qkv_format == "bshd" else (q_shape[1], q_shape[0])
            tokens = seqs * longest
        maxima = octavo.StepMaxima(
            min(seqs, self.max_batch_size),
            tokens,
            min(longest, self.max_sequence_length),
            self.max_sequence_length,
        )
        self._capture.add(maxima)
        return maxima

    def _set_format(self, qkv_format):
        self.input_qkv_format = qkv_format
        self.output_qkv_format = "bshd" if qkv_format == "bshd" else f"{qkv_format}_2bshd"

    def _clear(self):
        self.sequences = OrderedDict()
        self.sequences_pre_step = OrderedDict()
        self.batch_size = 0
        self._cu_q.fill([0], 0)
        self._cu_kv.fill([0], 0)
        self._before.fill([], 0)

    def __repr__(self):
        pool = (
            f"total_pages={self.total_num_pages}, page_size={self.page_size}"
            if self.is_paged
            else f"max_batch_size={self.max_batch_size}, max_seqlen={self.max_sequence_length}"
        )
        return (
            f"dtype={self.dtype}, is_paged={self.is_paged}, {pool}, num_heads={self.num_heads_kv}, "
            f"head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}"
        )

    def reset(self):
        """Ends all sequences, and clears what the last step left."""
        self.cache_manager.reset()
        self._clear()

    @names_arguments(**LAYER)
    def allocate_memory(self, layer_number):
        """Makes room for a layer: for all before the first step, so that they share one pool."""
        self.cache_manager.allocate_memory(layer_number)

    @names_arguments(**PRE_STEP)
    def pre_step(self, step_dict):
        """Plans a pass: {sequence id: new tokens} in batch order; ids left out have finished.

        Raises ValueError for lengths and counts beyond the maxima and CacheFull (a RuntimeError)
        when pages don't suffice; the cache is then as before.
        """
        self.sequences = self.cache_manager.pre_step(step_dict)
        self.batch_size = len(step_dict)
        after = [self.sequences[i] for i in step_dict]
        new = list(step_dict.values())
        before = [n - k for n, k in zip(after, new, strict=True)]
        self.sequences_pre_step = OrderedDict(zip(step_dict, before, strict=True))
        self._before.fill(before, 0)
        for counts, values in ((self._cu_q, new), (self._cu_kv, after)):
            ends = [0, *accumulate(values)]
            counts.fill(ends, ends[-1])

    @names_arguments(**STEP_OF_LAYER)
    def step(self, layer_number, new_k, new_v, qkv_format):
        """Writes a layer's new keys and values. Returns (keys, values, cu_seqlens_q, cu_seqlens_kv,
        max_sequence_length, output format)."""
        _check_format(qkv_format)
        self._set_format(qkv_format)
        k, v = self.cache_manager.step(
            layer_number, new_k, new_v, self.cu_seqlens_q, self.cu_seqlens_kv, qkv_format
        )
        return (
            k,
            v,
            self.cu_seqlens_q,
            self.cu_seqlens_kv,
            self.max_sequence_length,
            self.output_qkv_format,
        )

    def get_seqlens_pre_step(self):
        """int32 [max_batch_size]: each sequence's length before the step; where RoPE starts."""
        return self.pre_step_seqlens

    @names_arguments(**LAYER)
    def convert_paged_to_nonpaged(self, layer_number):
        """(keys, values) [batch_size, max_sequence_length, heads, dim] of a layer, 0 behind each
        end.
        """
        manager = self.cache_manager
        if not self.is_built_in:
            return self._gather_custom(layer_number)
        group, layer = manager.group_of(layer_number)
        if group.plan is None:
            raise RuntimeError("convert_paged_to_nonpaged: wanted pre_step() before it")
        rows = [self._new_rows(manager.cache[layer_number][i]) for i in (0, 1)]
        group.cache.gather(group.plan, layer, *rows)
        return tuple(rows)

    def _new_rows(self, like):
        shape = (self.batch_size, self.max_sequence_length, *tuple(like.shape[2:]))
        if hasattr(like, "new_zeros"):
            return like.new_zeros(shape)
        return framework(like, "cache").empty(like, shape)[0]

    def _gather_custom(self, layer_number):
        """By the manager's own page table, as TransformerEngine does."""
        k, v = self.cache_manager.cache[layer_number]
        table = self.cache_manager.page_table[: self.batch_size]
        return tuple(
            x[table.reshape(-1)].reshape((self.batch_size, -1, *tuple(x.shape[2:]))) for x in (k, v)
        )


def _check_format(qkv_format):
    if qkv_format not in _FORMATS:
        raise ValueError(f"qkv_format: wanted one of {', '.join(_FORMATS)}, got {qkv_format!r}")
