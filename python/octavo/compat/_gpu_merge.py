# SPDX-License-Identifier: Apache-2.0
"""Partial results on a GPU, merged by PyTorch's own operations: the library merges on the host."""

from __future__ import annotations

import numpy as np

from . import _gpu as gpu


def checked_lse(like, lse, name, shape):
    """A float32 LSE of a shape on the GPU of `like`."""
    (lse,) = gpu.checked(like, **{name: lse})
    if tuple(lse.shape) != tuple(shape):
        raise ValueError(f"{name}: wanted {list(shape)}, got {list(lse.shape)}")
    return lse.float()


def merge(values, lses):
    """(float32 values [..., D], LSEs [...]) of parts [S, ..., D] and [S, ...], natural log.

    (anything, -inf) is neutral, and of nothing else the result is (0, -inf).
    """
    t = gpu.torch()
    top = lses.amax(0)
    weights = t.exp(lses - t.where(top == -np.inf, 0.0, top))
    total = weights.sum(0)
    weights = weights.unsqueeze(-1)
    merged = t.where(weights == 0, 0.0, values.float() * weights).sum(0)
    merged /= t.where(total == 0, 1.0, total).unsqueeze(-1)
    return merged, top + t.log(t.where(total == 0, 1.0, total))
