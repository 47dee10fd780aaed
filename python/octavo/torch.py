# SPDX-License-Identifier: Apache-2.0
"""Octavo's calls as PyTorch operators, so that torch.compile sees one node in each.

`attend` and `append_tokens` are octavo's own, for tensors: use these in code that is compiled.
`Session` is for Octavo's own cache. Import this module only where PyTorch is; nothing is built
against it. There is no backward pass: what needs gradients is refused.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

import octavo
from octavo import InvalidArgument, KvCache, Rope, StepPlan

__all__ = ["Session", "append_tokens", "attend"]


def _rope(style: str, rotary_dim: int, base: float, cos: Tensor | None, sin: Tensor | None):
    return Rope(style, rotary_dim, base, cos, sin) if style else None


@torch.library.custom_op("octavo::attend", mutates_args=())
def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    token_offsets: Tensor | None,
    page_table: Tensor | None,
    row_indices: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    positions: Tensor | None,
    rope_style: str,
    rotary_dim: int,
    rope_base: float,
    rope_cos: Tensor | None,
    rope_sin: Tensor | None,
    format: str,
    softmax_scale: float | None,
    mask: str,
    window_left: int,
    window_right: int,
    softcap: float,
    backend: str,
    compute: str,
    batch_invariant: bool,
    num_threads: int,
) -> tuple[Tensor, Tensor]:
    out, lse = _attend_shapes(q, v_cache)
    octavo.attend(
        q,
        k_cache,
        v_cache,
        kv_lens,
        token_offsets=token_offsets,
        page_table=page_table,
        row_indices=row_indices,
        format=format,
        out=out,
        lse=lse,
        softmax_scale=softmax_scale,
        mask=mask,
        window=(window_left, window_right),
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        rope=_rope(rope_style, rotary_dim, rope_base, rope_cos, rope_sin),
        positions=positions,
        backend=backend,
        compute=compute,
        batch_invariant=batch_invariant,
        num_threads=num_threads,
    )
    return out, lse


def _attend_shapes(q: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    tokens = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
    out = q.new_empty((*q.shape[:-1], v_cache.shape[3]))
    return out, q.new_empty((tokens, q.shape[-2]), dtype=torch.float32)


@_attend.register_fake
def _attend_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _attend_shapes(q, v_cache)


@torch.library.custom_op("octavo::append_tokens", mutates_args=("k_cache", "v_cache"))
def _append_tokens(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    token_offsets: Tensor | None,
    page_table: Tensor | None,
    row_indices: Tensor | None,
    positions: Tensor | None,
    rope_style: str,
    rotary_dim: int,
    rope_base: float,
    rope_cos: Tensor | None,
    rope_sin: Tensor | None,
    format: str,
    num_threads: int,
) -> None:
    octavo.append_tokens(
        k,
        v,
        k_cache,
        v_cache,
        kv_lens,
        token_offsets=token_offsets,
        page_table=page_table,
        row_indices=row_indices,
        format=format,
        rope=_rope(rope_style, rotary_dim, rope_base, rope_cos, rope_sin),
        positions=positions,
        num_threads=num_threads,
    )


@_append_tokens.register_fake
def _append_tokens_fake(*_: Any) -> None:
    return None


# The cache is not among the arguments. `state` stands for it: for what it thinks is written, the
# compiler keeps a call whose answer nobody uses, and the order of calls.
@torch.library.custom_op("octavo::forward", mutates_args=("state",))
def _forward(
    state: Tensor,
    session: int,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    format: str,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    owner = _sessions.get(session)
    if owner is None or owner.plan is None:
        raise InvalidArgument("session: wanted a begun step, got none (call begin before a layer)")
    return owner.attention.forward(
        owner.plan,
        owner.cache,
        layer,
        q,
        k,
        v,
        format=format,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        rope=owner.rope,
        positions=positions,
    )


@_forward.register_fake
def _forward_fake(
    state: Tensor, session: int, layer: int, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _refuse_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise octavo.Unsupported(
            "gradients: wanted none, got a tensor that requires them (use torch.no_grad)"
        )


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    *,
    token_offsets: Tensor | None = None,
    page_table: Tensor | None = None,
    row_indices: Tensor | None = None,
    format: str = "thd",
    lse: bool = False,
    softmax_scale: float | None = None,
    mask: str = "causal",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rope_style: str | None = None,
    rotary_dim: int = 0,
    rope_base: float = 10000.0,
    rope_cos: Tensor | None = None,
    rope_sin: Tensor | None = None,
    positions: Tensor | None = None,
    backend: str = "auto",
    compute: str = "same",
    batch_invariant: bool = False,
    num_threads: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """octavo.attend as one operator; integers are int32 tensors.

    rope_style "half" or "interleaved" rotates q; the other rope_ arguments are octavo.Rope's.
    Returns out, or (out, lse): float32 [T, Hq], or [B * L, Hq] of which the first rows are the new
    tokens' and the rest -inf.
    """
    _refuse_gradients(q, k_cache, v_cache)
    out, sums = torch.ops.octavo.attend(
        q,
        k_cache,
        v_cache,
        kv_lens,
        token_offsets,
        page_table,
        row_indices,
        sinks,
        alibi_slopes,
        positions,
        rope_style or "",
        rotary_dim,
        rope_base,
        rope_cos,
        rope_sin,
        format,
        softmax_scale,
        mask,
        window[0],
        window[1],
        softcap,
        backend,
        compute,
        batch_invariant,
        num_threads,
    )
    return (out, sums) if lse else out


def append_tokens(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    *,
    token_offsets: Tensor | None = None,
    page_table: Tensor | None = None,
    row_indices: Tensor | None = None,
    format: str = "thd",
    rope_style: str | None = None,
    rotary_dim: int = 0,
    rope_base: float = 10000.0,
    rope_cos: Tensor | None = None,
    rope_sin: Tensor | None = None,
    positions: Tensor | None = None,
    num_threads: int = 0,
) -> None:
    """octavo.append_tokens as one operator that writes k_cache and v_cache."""
    _refuse_gradients(k, v)
    torch.ops.octavo.append_tokens(
        k,
        v,
        k_cache,
        v_cache,
        kv_lens,
        token_offsets,
        page_table,
        row_indices,
        positions,
        rope_style or "",
        rotary_dim,
        rope_base,
        rope_cos,
        rope_sin,
        format,
        num_threads,
    )


_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Session:
    """An attention over Octavo's own cache, for layers that are compiled.

    Plan and begin outside of compiled code; call `forward` inside. The compiled code holds a number
    that stands for the session, so it stays good from step to step.
    """

    def __init__(
        self, attention: octavo.Attention, cache: KvCache, rope: Rope | None = None
    ) -> None:
        self.attention = attention
        self.cache = cache
        self.rope = rope
        self.plan: StepPlan | None = None
        with torch.inference_mode(False):
            self._state = torch.zeros(1, device=cache.device)
        self._number = next(_numbers)
        _sessions[self._number] = self

    def begin(self, plan: StepPlan, stream: Any = None) -> None:
        """cache.begin, and the plan that forward uses from here on."""
        self.cache.begin(plan, stream)
        self.plan = plan

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        format: str = "thd",
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attention.forward as one operator: appends k and v, attends, returns a new out."""
        _refuse_gradients(q, k, v)
        return torch.ops.octavo.forward(
            self._state, self._number, layer, q, k, v, format, sinks, alibi_slopes, positions
        )
