# SPDX-License-Identifier: Apache-2.0
"""Attention without Octavo's own cache: over a call's keys or a custom manager's cache."""

from __future__ import annotations

import numpy as np

import octavo

from .. import _gpu as gpu
from .._arrays import (
    dtype_name,
    framework,
    ints,
    join_heads,
    native,
    not_covered,
    sliding_rows,
)
from . import _backend, _gpu
from ._given import PlainCall

_BATCH_AXIS = {"bshd": 0, "sbhd": 1}


def default_slopes(num_heads):
    """ALiBi's slopes: powers of 2^(-8/n), n the power of two below, then those between."""
    n = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 / n * (i + 1)) for i in range(n)]
    slopes += [2.0 ** (-4.0 / n * (2 * i + 1)) for i in range(num_heads - n)]
    return np.array(slopes, np.float32)


def _lengths(shape, qkv_format, cu_seqlens, padding, name):
    """Lengths [b] of the sequences of q or of k and v."""
    if qkv_format == "thd" or (padding and cu_seqlens is not None):
        if cu_seqlens is None:
            raise ValueError(f"{name}: wanted prefix sums with qkv_format thd, got None")
        ends = ints(cu_seqlens, name)
        return ends[1:] - ends[:-1]
    if padding:
        raise ValueError(f"{name}: wanted prefix sums with a padding mask, got None")
    batch = _BATCH_AXIS[qkv_format]
    return np.full(shape[batch], shape[1 - batch], np.int32)


def _aligned(q_lens, kv_lens, call):
    """Lengths of the keys that a mask aligned to the top left leaves, for Octavo's bottom right."""
    if call.alignment == "bottom_right" or (q_lens == kv_lens).all():
        return kv_lens
    if not call.causal and call.window == (-1, -1):
        return kv_lens
    if not call.causal or (q_lens > kv_lens).any():
        raise not_covered(
            "a mask aligned to the top left of more queries than keys", "use a bottom_right mask"
        )
    return np.minimum(q_lens, kv_lens)


def attend(module, call: PlainCall):
    """Without a cache: every key of the call counts."""
    qkv_format = call.qkv_format
    if qkv_format not in ("bshd", "sbhd", "thd"):
        raise ValueError(f"qkv_format: wanted bshd, sbhd or thd, got {qkv_format!r}")
    q = call.qkv[0]
    if gpu.on_gpu(q):
        return _gpu.attend(module, call)
    frame = framework(q)
    hosts = [
        frame.host(x, n)
        for x, n in zip(call.qkv, ("query_layer", "key_layer", "value_layer"), strict=True)
    ]
    q_lens, kv_lens = (
        _lengths(host.shape, qkv_format, ends, call.padding, name)
        for host, ends, name in zip(
            hosts, call.cu_seqlens, ("cu_seqlens_q", "cu_seqlens_kv"), strict=False
        )
    )
    visible = _aligned(q_lens, kv_lens, call)
    rows = None
    if qkv_format == "thd":
        longest = max(int(kv_lens.max()) if len(kv_lens) else 0, 1)
        rows = (np.cumsum(kv_lens) - kv_lens).astype(np.int32)
        keys = [sliding_rows(x, x.shape[0], longest) for x in hosts[1:]]
    else:
        keys = hosts[1:] if qkv_format == "bshd" else [x.swapaxes(0, 1) for x in hosts[1:]]
    return _call(
        module,
        frame,
        q,
        hosts[0],
        keys,
        visible,
        _prefix_sums(q_lens),
        qkv_format,
        call.config(module.softmax_scale),
        call.slopes,
        call.sinks,
        row_indices=rows,
    )


def _prefix_sums(lens):
    ends = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=ends[1:])
    return ends


def _call(
    module, frame, like, q, keys, kv_lens, offsets, qkv_format, config, slopes, sinks, **where
):
    shape = (*q.shape[:-2], module.num_heads, module.head_dim_v)
    made, out = frame.empty(like, shape)
    scale, mask, window = config

    def run(backend):
        octavo.attend(
            native(q),
            *(native(x) for x in keys),
            kv_lens,
            token_offsets=offsets,
            format=qkv_format,
            out=native(out),
            softmax_scale=scale,
            mask=mask,
            window=window,
            sinks=sinks,
            alibi_slopes=slopes,
            backend=backend,
            **where,
        )

    _backend.choose(run, _backend.flags(), False)
    return join_heads(frame.finish(made))


def _check_query(module, q, qkv_format):
    """What can be wrong with the attention whatever the manager's cache is, before it is written
    to.
    """
    rank = 3 if qkv_format == "thd" else 4
    wanted = [module.num_heads, module.head_dim]
    if len(q.shape) != rank or list(q.shape[-2:]) != wanted:
        raise ValueError(
            f"query_layer: wanted {rank} axes ({qkv_format}), the last two {wanted}, "
            f"got {list(q.shape)}"
        )
    dtype_name(q.dtype)
    _backend.allowed(_backend.flags(), gpu.on_gpu(q))


def over_custom_cache(module, step, params, config, slopes, sinks):
    """Over the cache of a manager of the caller's, by its page_table or batch_indices_post_step."""
    q, k, v, qkv_format = step
    _check_query(module, q, qkv_format)
    k_cache, v_cache, cu_q, cu_kv, _, _ = params.step(module.layer_number, k, v, qkv_format)
    if gpu.on_gpu(q):
        call = (q, qkv_format, k_cache, v_cache, cu_q, cu_kv)
        return _gpu.over_custom_cache(module, call, params, config, slopes, sinks)
    frame = framework(q)
    b = params.batch_size
    where = {}
    if params.is_paged:
        where["page_table"] = ints(params.cache_manager.page_table, "page_table")
    elif getattr(params.cache_manager, "batch_indices_post_step", None) is not None:
        where["row_indices"] = ints(
            params.cache_manager.batch_indices_post_step, "batch_indices_post_step"
        )[:b]
    ends = ints(cu_kv, "cu_seqlens_kv")[: b + 1]
    return _call(
        module,
        frame,
        q,
        frame.host(q, "query_layer"),
        [frame.host(x, "cache") for x in (k_cache, v_cache)],
        ends[1:] - ends[:-1],
        ints(cu_q, "cu_seqlens_q")[: b + 1],
        qkv_format,
        config,
        slopes,
        sinks,
        **where,
    )
