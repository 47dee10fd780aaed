# SPDX-License-Identifier: Apache-2.0
"""As transformer_engine.pytorch: see octavo.compat.transformer_engine."""

from .. import (
    DotProductAttention,
    InferenceParams,
    KVCacheManager,
    NonPagedKVCacheManager,
    PagedKVCacheManager,
    make_graphed_callables,
)
from .. import __getattr__ as __getattr__

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "KVCacheManager",
    "NonPagedKVCacheManager",
    "PagedKVCacheManager",
    "make_graphed_callables",
]
