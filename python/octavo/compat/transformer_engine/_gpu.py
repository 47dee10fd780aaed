# SPDX-License-Identifier: Apache-2.0
"""Attention without Octavo's own cache, for tensors on a GPU. Lengths stay there: none is read."""

from __future__ import annotations

import octavo

from .. import _gpu as gpu
from .._arrays import join_heads, not_covered
from .._gpu_call import Call, Options
from . import _backend
from ._given import PlainCall

_BATCH_AXIS = {"bshd": 0, "sbhd": 1}


def attend(module, call: PlainCall):
    """As _plain.attend."""
    qkv_format, cu_seqlens, causal = call.qkv_format, call.cu_seqlens, call.causal
    names = ("query_layer", "key_layer", "value_layer")
    q, k, v = gpu.checked(call.qkv[0], **dict(zip(names, call.qkv, strict=True)))
    device = q.device
    ragged = qkv_format == "thd" or call.padding
    if ragged:
        cu_q, cu_kv = (
            _prefix_sums(x, qkv_format, name, device)
            for x, name in zip(cu_seqlens, ("cu_seqlens_q", "cu_seqlens_kv"), strict=True)
        )
        kv_lens = _lengths(cu_kv)
    if qkv_format == "thd":
        most, longest_kv = (None if n is None else int(n) for n in call.longest)
        most = most or 0
        longest_kv = k.shape[0] if longest_kv is None else longest_kv
    else:
        batch = _BATCH_AXIS[qkv_format]
        b, most, longest_kv = q.shape[batch], q.shape[1 - batch], k.shape[1 - batch]
        if k.shape[batch] != b:
            raise ValueError(f"key_layer: wanted a batch of {b}, as q's, got {k.shape[batch]}")
        if batch:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        if not ragged:
            cu_q = gpu.steps(0, most, b + 1, device) if most else gpu.full(b + 1, 0, device)
            kv_lens = gpu.full(b, longest_kv, device)
    if call.alignment != "bottom_right" and (causal or call.window != (-1, -1)):
        alike = cu_seqlens[0] is cu_seqlens[1] if ragged else most == longest_kv
        if not alike and (ragged or not causal or most > longest_kv):
            raise not_covered(
                "a mask aligned to the top left on a GPU, unless queries and keys are equally many",
                "use a bottom_right mask; ragged: one tensor as cu_seqlens_q and cu_seqlens_kv",
            )
        if not alike:
            kv_lens = gpu.full(b, most, device)
    if qkv_format == "thd":
        keys = gpu.packed_keys(k, v, cu_kv[:-1], kv_lens, longest_kv)
    else:
        keys = gpu.Keys(k, v, kv_lens, None, None, longest_kv)
    config = call.config(module.softmax_scale)
    # The caller's values are not to be written to.
    refused = () if qkv_format == "thd" or not ragged else ("fused",)
    return _call(module, q, qkv_format, keys, cu_q, most, config, call.slopes, call.sinks, refused)


def over_custom_cache(module, call, params, config, slopes, sinks):
    """As _plain.over_custom_cache, with the step's tensors and the cache that its manager gave."""
    q, qkv_format, k_cache, v_cache, cu_q, cu_kv = call
    q, k_cache, v_cache = gpu.checked(q, query_layer=q, k_cache=k_cache, v_cache=v_cache)
    device, b = q.device, params.batch_size
    manager, table, rows = params.cache_manager, None, None
    if params.is_paged:
        table = gpu.table_of(manager.page_table, "page_table", device)
    elif getattr(manager, "batch_indices_post_step", None) is not None:
        rows = gpu.ints(manager.batch_indices_post_step, "batch_indices_post_step", device)[:b]
    offsets = gpu.ints(cu_q, "cu_seqlens_q", device)[: b + 1]
    kv_lens = _lengths(gpu.ints(cu_kv, "cu_seqlens_kv", device)[: b + 1])
    keys = gpu.Keys(k_cache, v_cache, kv_lens, table, rows)
    most = 0 if qkv_format == "thd" else q.shape[1 - _BATCH_AXIS[qkv_format]]
    return _call(module, q, qkv_format, keys, offsets, most, config, slopes, sinks)


def _prefix_sums(x, qkv_format, name, device):
    if x is None:
        why = "qkv_format thd" if qkv_format == "thd" else "a padding mask"
        raise ValueError(f"{name}: wanted prefix sums with {why}, got None")
    return gpu.ints(x, name, device)


def _lengths(ends):
    return ends[1:] - ends[:-1]


def _call(module, q, qkv_format, keys, offsets, most, config, slopes, sinks, refused=()):
    num_seqs, heads = offsets.shape[0] - 1, module.num_heads
    whole = q.new_empty((*q.shape[:-1], module.head_dim_v))
    out = whole
    if qkv_format != "thd" and q.shape[_BATCH_AXIS[qkv_format]] > num_seqs:
        # Rows behind the step's sequences, as in TransformerEngine's graphs.
        q, out = (x.narrow(_BATCH_AXIS[qkv_format], 0, num_seqs) for x in (q, whole))
        whole.zero_()
    if not q.numel():
        return join_heads(whole)
    scale, mask, window = config
    sinks, slopes = (
        None if x is None else gpu.floats(x, name, q.device, (heads,))
        for x, name in ((sinks, "softmax_offset"), (slopes, "alibi_slopes"))
    )

    def run(backend):
        if backend in refused:
            raise octavo.Unsupported("it clears values behind a sequence's end")
        options = Options(scale, mask, window, 0.0, sinks, slopes, backend=backend)
        call = Call(
            "DotProductAttention",
            q,
            keys,
            offsets,
            options,
            format=qkv_format,
            lse=None,
            out=out,
            most=most,
        )
        call.plan()
        call.attend()

    _backend.choose(run, _backend.flags(), True)
    return join_heads(whole)
