# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention: over an InferenceParams' cache, or over the keys of the call alone."""

from __future__ import annotations

import functools

import numpy as np

import octavo

from .._arrays import checked_scale, floats, ints, join_heads, not_covered
from .._blame import names_arguments
from . import _backend, _plain
from ._given import PlainCall
from ._torch import Module, torch
from ._wanted import FORWARD, MODULE

_MASKS = {
    "no_mask": (False, None),
    "padding": (True, None),
    "causal": (False, "top_left"),
    "causal_bottom_right": (False, "bottom_right"),
    "padding_causal": (True, "top_left"),
    "padding_causal_bottom_right": (True, "bottom_right"),
}
_SOFTMAX = ("vanilla", "off-by-one", "learnable")


@functools.lru_cache(maxsize=64)
def parse_mask(name):
    """(padding, None | top_left | bottom_right) of a mask's name, in any of its spellings."""
    plain = name.replace(",", "_")
    plain = {"causal_padding": "padding_causal"}.get(plain, plain)
    if plain == "arbitrary":
        raise not_covered("attn_mask_type arbitrary")
    if plain not in _MASKS:
        raise ValueError(f"attn_mask_type: wanted one of {', '.join(_MASKS)}, got {name!r}")
    return _MASKS[plain]


@functools.lru_cache(maxsize=64)
def parse_window(window, causal):
    """(left, right) of Octavo: -1 is no bound."""
    left, right = (-1, -1) if window is None else window
    if left < -1 or right < -1:
        raise ValueError(f"window_size: wanted (left, right) of at least -1, got {window}")
    if causal and right > 0:
        raise ValueError(f"window_size: wanted a right side of 0 under a causal mask, got {window}")
    return int(left), -1 if causal else int(right)


class DotProductAttention(Module):
    """softmax(q k^T * scale) v, the answer [.., num_attention_heads * head dim of v].

    kv_channels: the head dim, or a pair (of q and k, of v). With PyTorch a torch.nn.Module; forward
    only. See forward.
    """

    @names_arguments(**MODULE)
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        bottom_right_diagonal=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
        name=None,
    ):
        super().__init__()
        _refuse(
            tp_group=tp_group,
            cp_group=cp_group,
            cp_global_ranks=cp_global_ranks,
            cp_stream=cp_stream,
            return_max_logit=return_max_logit,
        )
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if num_attention_heads % groups or num_attention_heads % tp_size or groups % tp_size:
            raise ValueError(
                f"num_gqa_groups and tp_size: wanted divisors of {num_attention_heads} heads, "
                f"got {groups} and {tp_size}"
            )
        if attention_type not in ("self", "cross"):
            raise ValueError(f"attention_type: wanted self or cross, got {attention_type!r}")
        if softmax_type not in _SOFTMAX:
            raise ValueError(
                f"softmax_type: wanted one of {', '.join(_SOFTMAX)}, got {softmax_type!r}"
            )
        parse_mask(attn_mask_type)
        self.num_attention_heads = num_attention_heads
        self.num_heads = num_attention_heads // tp_size
        self.num_gqa_groups = groups
        self.num_kv_heads = groups // tp_size
        self.head_dim, self.head_dim_v = (
            (kv_channels, kv_channels) if isinstance(kv_channels, int) else tuple(kv_channels)
        )
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.layer_number = 1 if layer_number is None else layer_number
        self.attention_type = attention_type
        self.softmax_scale = checked_scale(softmax_scale, "softmax_scale")
        self.softmax_type = softmax_type
        self.name = name
        self._slopes_near = {}
        if softmax_type == "vanilla":
            self.softmax_offset = None
        elif torch is None:
            self.softmax_offset = np.zeros(self.num_heads, np.float32)
        elif softmax_type == "learnable":
            offset = torch.nn.Parameter(torch.zeros(self.num_heads))
            self.register_parameter("softmax_offset", offset)
        else:
            self.register_buffer("softmax_offset", torch.zeros(self.num_heads), persistent=False)

    @names_arguments(**FORWARD)
    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        bottom_right_diagonal=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
        num_splits=1,
    ):
        """Attention of query_layer; the answer has its framework and [.., heads * dim of v].

        Formats bshd [b, s, h, d], sbhd [s, b, h, d], thd [t, h, d]. With inference_params the new
        keys and values are written to its cache first, lengths are the step's, the mask must
        contain padding, and causal is aligned to the bottom right. Without it the call's own keys
        are all there is. max_seqlen_*, fast_zero_fill and num_splits change no result.
        """
        if (
            attention_mask is not None
            or cu_seqlens_q_padded is not None
            or cu_seqlens_kv_padded is not None
            or checkpoint_core_attention
            or core_attention_bias is not None
            or pad_between_seqs
            or fp8_output
        ):
            _refuse(
                attention_mask=attention_mask,
                cu_seqlens_q_padded=cu_seqlens_q_padded,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                checkpoint_core_attention=checkpoint_core_attention,
                core_attention_bias=core_attention_bias,
                pad_between_seqs=pad_between_seqs,
                fp8_output=fp8_output,
            )
        if core_attention_bias_type not in ("no_bias", "alibi"):
            raise not_covered(f"core_attention_bias_type {core_attention_bias_type}")
        if self.training and self.attention_dropout:
            raise not_covered("attention_dropout in training", "call eval() on the module")
        if (
            torch is not None
            and torch.is_grad_enabled()
            and _needs_grad(query_layer, key_layer, value_layer)
        ):
            raise not_covered("the backward pass", "call it under torch.no_grad()")
        qkv_format = self.qkv_format if qkv_format is None else qkv_format
        mask = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        padding, causal = parse_mask(mask)
        if window_size is None:
            window_size = self.window_size
        window = parse_window(window_size and tuple(window_size), causal is not None)
        if bottom_right_diagonal is None:
            bottom_right_diagonal = self.bottom_right_diagonal
        slopes = self._slopes(core_attention_bias_type, alibi_slopes, query_layer)
        if inference_params is None:
            call = PlainCall(
                (query_layer, key_layer, value_layer),
                qkv_format,
                (cu_seqlens_q, cu_seqlens_kv),
                (max_seqlen_q, max_seqlen_kv),
                padding,
                causal or ("bottom_right" if bottom_right_diagonal in (None, True) else "top_left"),
                causal is not None,
                window,
                slopes,
                self._sinks(),
            )
            return _plain.attend(self, call)
        if not padding:
            raise ValueError(
                f"attn_mask_type: wanted a padding mask with inference_params, got {mask!r}"
            )
        if bottom_right_diagonal is False and causal is None and window != (-1, -1):
            raise not_covered("bottom_right_diagonal False with inference_params")
        step = (query_layer, key_layer, value_layer, qkv_format)
        config = (self.softmax_scale, "full" if causal is None else "causal", window)
        if not inference_params.is_built_in:
            return _plain.over_custom_cache(
                self, step, inference_params, config, slopes, self._sinks()
            )
        return self._over_cache(step, inference_params, cu_seqlens_q, config, slopes)

    def _over_cache(self, step, params, cu_seqlens_q, config, slopes):
        """Append and attend in one call of the library."""
        q, k, v, qkv_format = step
        group, layer = params.cache_manager.group_of(self.layer_number)
        plan = group.plan
        if plan is None:
            raise RuntimeError("inference_params: wanted pre_step() before the module's call")
        params._set_format(qkv_format)
        _check_lengths(cu_seqlens_q, plan)
        key = (self.num_heads, config, group.flags())
        attention = group.attentions.get(key)
        if attention is None:
            attention = group.attentions[key] = self._choose(group, config, key[2])
        out = attention.forward(
            plan,
            group.cache,
            layer,
            q,
            k,
            v,
            format=qkv_format,
            sinks=self._sinks(),
            alibi_slopes=slopes,
            maxima=params._maxima_of(q.shape, qkv_format),
        )
        return join_heads(out)

    def _choose(self, group, config, flags):
        scale, mask, window = config

        def make(backend):
            return octavo.Attention(
                group.cache,
                num_q_heads=self.num_heads,
                softmax_scale=scale,
                mask=mask,
                window=window,
                backend=backend,
            )

        return _backend.choose(make, flags, group.cache.device != "cpu")

    def _sinks(self):
        offset = self.softmax_offset
        if offset is None or isinstance(offset, np.ndarray):
            return offset
        return offset.detach().float()

    def _slopes(self, bias_type, slopes, q):
        if bias_type == "no_bias":
            if slopes is not None:
                raise ValueError(
                    "alibi_slopes: wanted core_attention_bias_type alibi with them, got no_bias"
                )
            return None
        if slopes is None:
            return self._default_slopes(q)
        if len(slopes.shape) == 2:
            if not getattr(slopes, "is_cpu", True):
                raise not_covered("alibi_slopes [batch, heads] on a GPU", "[heads] are")
            values = floats(slopes, "alibi_slopes")
            if (values != values[0]).any():
                raise not_covered("alibi_slopes that differ between sequences")
            return values[0]
        return slopes

    def _default_slopes(self, q):
        """ALiBi's own slopes, made once where q is."""
        place = None if getattr(q, "is_cpu", True) else q.device
        slopes = self._slopes_near.get(place)
        if slopes is None:
            slopes = _plain.default_slopes(self.num_heads)
            if place is not None:
                slopes = torch.from_numpy(slopes).to(place)
            self._slopes_near[place] = slopes
        return slopes


def _refuse(**given):
    for name, value in given.items():
        if value is not None and value is not False:
            raise not_covered(name)


def _needs_grad(q, k, v):
    return (
        getattr(q, "requires_grad", False)
        or getattr(k, "requires_grad", False)
        or getattr(v, "requires_grad", False)
    )


def _check_lengths(cu_seqlens_q, plan):
    """The caller's lengths must be the step's; those on a GPU are not read back."""
    if cu_seqlens_q is None or not getattr(cu_seqlens_q, "is_cpu", True):
        return
    given = ints(cu_seqlens_q, "cu_seqlens_q")
    ends = plan.token_offsets
    if given.shape[0] < ends.shape[0] or (given[: ends.shape[0]] != ends).any():
        raise ValueError(
            f"cu_seqlens_q: wanted {ends.tolist()}, as pre_step() was told, got {given.tolist()}"
        )
