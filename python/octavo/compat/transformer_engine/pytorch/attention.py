# SPDX-License-Identifier: Apache-2.0
"""As transformer_engine.pytorch.attention: see octavo.compat.transformer_engine."""

from .. import (
    DotProductAttention,
    InferenceParams,
    KVCacheManager,
    NonPagedKVCacheManager,
    PagedKVCacheManager,
)
from .. import __getattr__ as __getattr__

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "KVCacheManager",
    "NonPagedKVCacheManager",
    "PagedKVCacheManager",
]
