# SPDX-License-Identifier: Apache-2.0
"""As transformer_engine.pytorch.attention: see octavo.compat.transformer_engine."""

from .. import __getattr__ as __getattr__
from .. import (
    DotProductAttention,
    InferenceParams,
    KVCacheManager,
    NonPagedKVCacheManager,
    PagedKVCacheManager,
)

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "KVCacheManager",
    "NonPagedKVCacheManager",
    "PagedKVCacheManager",
]
