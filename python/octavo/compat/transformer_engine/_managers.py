# SPDX-License-Identifier: Apache-2.0
"""Cache managers under TransformerEngine's names, over octavo.KvCache.

A manager keeps the layers that are allocated before its first step in one cache. A layer allocated
later gets a cache of its own, which takes the same steps.
"""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

import octavo

from .._arrays import dtype_name, not_covered
from . import _backend
from ._torch import Counts, as_framework, default_device


class CacheFull(octavo.CacheFull, RuntimeError):
    """The step's pages don't suffice; nothing was changed."""


class KVCacheManager:
    """What a manager of one's own derives from; see InferenceParams' custom_cache_manager."""

    def __init__(self):
        self.cache = {}
        self.sequences = OrderedDict()

    def reset(self):
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number):
        self.cache[layer_number] = (None, None)

    def pre_step(self, step_dict):
        return self.sequences

    def step(self, layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format):
        return self.cache[layer_number]


class Group:
    """One octavo.KvCache, the layers in it, and the plan that was begun last."""

    def __init__(self, cache, layers):
        self.cache = cache
        self.layers = {layer: index for index, layer in enumerate(layers)}
        self.plan = None
        self.attentions = {}
        self._flags = self._flags_of = None

    def flags(self):
        """The environment's choice of backends, read once for each step."""
        if self._flags_of is not self.plan:
            self._flags, self._flags_of = _backend.flags(), self.plan
        return self._flags

    def attention(self, **config):
        """The octavo.Attention of a configuration, made once."""
        key = tuple(config.values())
        made = self.attentions.get(key)
        if made is None:
            made = self.attentions[key] = octavo.Attention(self.cache, **config)
        return made


class _Storage(Mapping):
    """cache[layer_number] -> (keys, values), as TransformerEngine shows them."""

    def __init__(self, manager):
        self._manager = manager

    def __getitem__(self, layer_number):
        group, layer = self._manager.group_of(layer_number)
        dtype = self._manager.dtype
        return tuple(
            as_framework(s(layer), dtype)
            for s in (group.cache.key_storage, group.cache.value_storage)
        )

    def __contains__(self, layer_number):
        return layer_number in self._manager.layers

    def __iter__(self):
        return iter(self._manager.layers)

    def __len__(self):
        return len(self._manager.layers)


class _Manager(KVCacheManager):
    """What both managers share."""

    def __init__(self, config, dtype, device):
        self.sequences = OrderedDict()
        self.dtype = dtype
        self.device = default_device(dtype) if device is None else str(device)
        self._config = dict(config, dtype=dtype_name(dtype), device=self.device)
        self.layers = []
        self._pending = []
        self._groups = {}  # layer number -> Group
        self.groups = []
        self._new = {}
        self.cache = _Storage(self)

    def allocate_memory(self, layer_number):
        """Makes room for a layer. Memory is taken at the first step, for all layers together."""
        if layer_number in self.layers:
            return
        if self.groups and any(n > self._new.get(i, 0) for i, n in self.sequences.items()):
            raise ValueError(
                f"layer_number: wanted {layer_number} allocated before its sequences' first step"
            )
        self.layers.append(layer_number)
        self._pending.append(layer_number)

    def _open(self):
        group = Group(octavo.KvCache(num_layers=len(self._pending), **self._config), self._pending)
        self._groups.update(dict.fromkeys(self._pending, group))
        self.groups.append(group)
        self._pending = []
        if self._new:
            self._plan(group, [])

    def group_of(self, layer_number):
        """(Group, the layer's index in it)."""
        if self._pending:
            self._open()
        group = self._groups.get(layer_number)
        if group is None:
            raise ValueError(
                f"layer_number: wanted an allocated one of {self.layers}, got {layer_number}"
            )
        return group, group.layers[layer_number]

    def page_ids(self, sequence):
        """The pages of a sequence, in order, which must be the same in all layers."""
        lists = [g.cache.page_ids(sequence) for g in self.groups if sequence in g.cache]
        if any(pages != lists[0] for pages in lists):
            raise not_covered(
                "one page table for layers that were allocated at different times",
                "allocate_memory for all before the first step",
            )
        return lists[0] if lists else []

    def _check_step(self, step_dict):
        """The lengths after the step, or an error before anything was changed."""
        after = OrderedDict()
        for sequence, new in step_dict.items():
            sequence, new = operator.index(sequence), operator.index(new)
            if new < 0:
                raise ValueError(f"step_dict[{sequence}]: wanted at least 0 new tokens, got {new}")
            after[sequence] = self.sequences.get(sequence, 0) + new
            if after[sequence] > self.max_seqlen:
                raise ValueError(
                    f"step_dict[{sequence}]: wanted at most {self.max_seqlen} tokens in all "
                    f"(max_sequence_length), got {after[sequence]}"
                )
        if len(after) > self.max_batch_size:
            raise ValueError(
                f"step_dict: wanted at most {self.max_batch_size} sequences (max_batch_size), "
                f"got {len(after)}"
            )
        return after

    def pre_step(self, step_dict):
        """Ends the sequences that step_dict {id: new tokens} leaves out, and plans the others'
        step.
        """
        after = self._check_step(step_dict)
        gone = [sequence for sequence in self.sequences if sequence not in after]
        self._new = {operator.index(s): operator.index(n) for s, n in step_dict.items()}
        for group in self.groups:
            self._plan(group, gone)
        if self._pending:
            self._open()
        self.sequences = after
        return self.sequences

    def _plan(self, group, gone):
        for sequence in gone:
            if sequence in group.cache:
                group.cache.release(sequence)
        group.plan = group.cache.plan(self._new)
        group.cache.begin(group.plan)

    def step(self, layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format):
        """Writes a layer's new keys and values; returns its (keys, values)."""
        group, layer = self.group_of(layer_number)
        if group.plan is None:
            raise RuntimeError("step: wanted pre_step() before it")
        attention = group.attention(num_q_heads=self.num_heads)
        attention.append(group.plan, group.cache, layer, new_k, new_v, format=qkv_format)
        return self.cache[layer_number]

    def reset(self):
        """Ends all sequences."""
        for group in self.groups:
            for sequence in group.cache.sequence_ids():
                group.cache.release(sequence)
            group.plan = None
        self._new = {}
        self.sequences = OrderedDict()


class NonPagedKVCacheManager(_Manager):
    """A run of max_seqlen slots for each sequence. Rows stay where they are while others finish."""

    def __init__(
        self,
        max_batch_size,
        max_seqlen,
        num_heads,
        head_dim_k,
        dtype,
        head_dim_v=None,
        *,
        device=None,
    ):
        self.max_batch_size = max_batch_size
        self.max_seqlen = max_seqlen
        self.num_heads = num_heads
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        config = {
            "kind": "contiguous",
            "num_kv_heads": num_heads,
            "head_dim": head_dim_k,
            "head_dim_v": self.head_dim_v,
            "max_num_seqs": max_batch_size,
            "max_seq_len": max_seqlen,
        }
        super().__init__(config, dtype, device)
        self._rows = Counts(max_batch_size, dtype, self.device)

    @property
    def batch_indices_post_step(self):
        """int32 [max_batch_size]: the row of the cache that holds each sequence of the step.

        0 for one without tokens, and past the step's sequences.
        """
        pages = [self.page_ids(sequence) for sequence in self.sequences]
        self._rows.fill([p[0] if p else 0 for p in pages], 0)
        return self._rows.array


class PagedKVCacheManager(_Manager):
    """Pages of page_size slots, taken as sequences grow. The pool may be smaller than the worst
    case.
    """

    def __init__(
        self,
        total_num_pages,
        page_size,
        num_heads,
        head_dim_k,
        dtype,
        max_batch_size,
        max_seqlen,
        head_dim_v=None,
        *,
        device=None,
    ):
        self.total_num_pages = total_num_pages
        self.page_size = page_size
        self.num_heads = num_heads
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.max_batch_size = max_batch_size
        self.max_seqlen = max_seqlen
        self.max_pages_per_seq = -(-max_seqlen // page_size)
        config = {
            "kind": "paged",
            "num_kv_heads": num_heads,
            "head_dim": head_dim_k,
            "head_dim_v": self.head_dim_v,
            "max_num_seqs": max_batch_size,
            "max_seq_len": max_seqlen,
            "page_size": page_size,
            "num_pages": total_num_pages,
        }
        super().__init__(config, dtype, device)
        self._table = Counts(max_batch_size * self.max_pages_per_seq, dtype, self.device)

    def _check_step(self, step_dict):
        after = super()._check_step(step_dict)
        wanted = sum(-(-n // self.page_size) for n in after.values())
        if wanted > self.total_num_pages:
            raise CacheFull(
                f"KV cache is full! The step takes {wanted} pages of {self.total_num_pages}"
            )
        return after

    @property
    def page_table(self):
        """int32 [max_batch_size, max_pages_per_seq] in the step's order, 0 past a sequence's last
        page.
        """
        table = np.zeros((self.max_batch_size, self.max_pages_per_seq), np.int32)
        for row, sequence in enumerate(self.sequences):
            pages = self.get_page_list(sequence)
            table[row, : len(pages)] = pages
        self._table.fill(table.reshape(-1), 0)
        return self._table.array.reshape(table.shape)

    def get_page_table(self, sequences):
        """The page table; `sequences` must be those of the step, in its order."""
        if list(sequences) != list(self.sequences):
            raise ValueError(f"sequences: wanted {list(self.sequences)}, got {list(sequences)}")
        return self.page_table

    def get_page_list(self, seq):
        return self.page_ids(seq)

    def get_page_count(self, seq):
        return len(self.get_page_list(seq))

    def get_sequence_count(self):
        return len(self.sequences)

    def get_sequence_lengths(self):
        return list(self.sequences.values())

    def has_free_page(self):
        return not self.groups or self.groups[0].cache.stats().pages_free > 0

    def print_cache(self):
        """Logs who holds which pages, at level DEBUG of the logger PagedKVCacheManager."""
        log = logging.getLogger("PagedKVCacheManager")
        if log.isEnabledFor(logging.DEBUG):
            for sequence, length in self.sequences.items():
                log.debug(
                    "sequence %s: %s tokens, pages %s",
                    sequence,
                    length,
                    self.get_page_list(sequence),
                )
