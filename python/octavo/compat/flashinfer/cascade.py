# SPDX-License-Identifier: Apache-2.0
"""As flashinfer.cascade: merging of partial results, and wrappers for keys that sequences share."""

from .._absent import absent
from ._absent_names import NAMES
from ._levels import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from ._merge import merge_state, merge_state_in_place, merge_states

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

__getattr__ = absent(__name__, NAMES)
