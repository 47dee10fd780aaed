# SPDX-License-Identifier: Apache-2.0
"""Octavo under the names of flash_attn: `from octavo.compat.flash_attn import
flash_attn_with_kvcache`.

Positional arguments are FlashAttention 2's; FlashAttention 3's further options follow by keyword.
For FlashAttention 3's own order of arguments see octavo.compat.flash_attn_interface. Forward only.
docs/python/coming-from-flash-attn.md lists what is covered, what differs and what raises.
"""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
