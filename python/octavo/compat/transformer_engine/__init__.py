# SPDX-License-Identifier: Apache-2.0
"""Octavo under the names of transformer_engine.pytorch, for inference.

    from octavo.compat.transformer_engine import DotProductAttention, InferenceParams

Also as octavo.compat.transformer_engine.pytorch and .pytorch.attention. PyTorch is imported where
it is installed, since modules are torch.nn.Module then; without it NumPy arrays go through plain
classes. docs/python/coming-from-transformer-engine.md lists what is covered, what differs and what
raises.
"""

from .._absent import absent
from ._attention import DotProductAttention
from ._graph import make_graphed_callables
from ._managers import CacheFull, KVCacheManager, NonPagedKVCacheManager, PagedKVCacheManager
from ._params import InferenceParams

__all__ = [
    "CacheFull",
    "DotProductAttention",
    "InferenceParams",
    "KVCacheManager",
    "NonPagedKVCacheManager",
    "PagedKVCacheManager",
    "make_graphed_callables",
]

# TransformerEngine's other modules and what surrounds them.
__getattr__ = absent(
    __name__,
    frozenset(
        (
            "GroupedLinear",
            "LayerNorm",
            "LayerNormLinear",
            "LayerNormMLP",
            "Linear",
            "MultiheadAttention",
            "RMSNorm",
            "RotaryPositionEmbedding",
            "TransformerLayer",
            "apply_rotary_pos_emb",
            "autocast",
            "checkpoint",
            "fp8_autocast",
            "fp8_model_init",
            "quantized_model_init",
        )
    ),
)
