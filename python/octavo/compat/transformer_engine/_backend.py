# SPDX-License-Identifier: Apache-2.0
"""Which of Octavo's backends TransformerEngine's environment variables leave, and which can run."""

from __future__ import annotations

import os

import octavo

_FLAGS = (
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NVTE_FLASH_ATTN_V2",
    "NVTE_FLASH_ATTN_V3",
)


def flags():
    """The variables' values, None where unset: what a choice depends on."""
    get = os.environ.get
    return tuple(get(name) for name in _FLAGS)


def _on(value, name):
    if value is None:
        return True
    if value not in ("0", "1"):
        raise ValueError(f"{name}: wanted 0 or 1, got {value!r}")
    return value == "1"


def allowed(values, on_gpu):
    """Backends left, best first; ["auto"] when all are. On a CPU `cpu` is FlashAttention."""
    flash, fused, unfused, flash2, flash3 = (_on(v, n) for v, n in zip(values, _FLAGS, strict=True))
    if flash and fused and unfused and flash2 and flash3:
        return ["auto"]
    names = ["fused"] if fused else []
    if flash:
        names += (
            [n for n, on in (("flash3", flash3), ("flash2", flash2)) if on] if on_gpu else ["cpu"]
        )
    return names + (["unfused"] if unfused else [])


def choose(make, values, on_gpu):
    """make(backend) for the first backend that can run it; ValueError, as TransformerEngine's, for
    none.
    """
    reasons = []
    for backend in allowed(values, on_gpu):
        try:
            return make(backend)
        except (octavo.Unsupported, octavo.NotCompiled) as error:
            reasons.append(f"{backend}: {error}")
    named = ", ".join(f"{n}={v}" for n, v in zip(_FLAGS, values, strict=True) if v is not None)
    raise ValueError(
        "No dot product attention backend is available for the provided inputs. "
        f"Set: {named or 'nothing'}. Wanted one that can run it, "
        f"got {'; '.join(reasons) or 'none that is left'}"
    )
