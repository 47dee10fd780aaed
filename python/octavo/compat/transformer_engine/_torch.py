# SPDX-License-Identifier: Apache-2.0
"""PyTorch where it is installed, and what the front needs of it or of NumPy in its place."""

from __future__ import annotations

import numpy as np

from .._arrays import not_covered

try:
    import torch
except ImportError:
    torch = None


class PlainModule:
    """What modules are without PyTorch: in inference, called as a function."""

    training = False

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def eval(self):
        return self


Module = PlainModule if torch is None else torch.nn.Module


def default_device(dtype):
    """As TransformerEngine: the current GPU; where there is none, or NumPy's dtypes are meant, the
    CPU.
    """
    if torch is not None and isinstance(dtype, torch.dtype) and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


class Counts:
    """int32 [n] at a fixed address, filled from the host: a tensor of PyTorch or a NumPy array."""

    def __init__(self, n, dtype, device):
        self._host = np.zeros(n, np.int32)
        if torch is not None and isinstance(dtype, torch.dtype):
            with torch.inference_mode(False):  # or a step outside of it might not write
                self.array = torch.zeros(n, dtype=torch.int32, device=device)
            self._source = torch.from_numpy(self._host)
        elif device == "cpu":
            self.array = self._host
            self._source = None
        else:
            raise not_covered(f"dtype {dtype!r} on {device}", "on a GPU a torch.dtype is")

    def fill(self, values, rest):
        """values, then `rest` up to the end."""
        n = len(values)
        self._host[:n] = values
        self._host[n:] = rest
        if self._source is not None:
            self.array.copy_(self._source)


def as_framework(storage, dtype):
    """A layer's storage as the caller's kind of array, without a copy."""
    if torch is None or not isinstance(dtype, torch.dtype):
        return storage
    if hasattr(storage, "array"):  # bfloat16 as its bits
        storage = storage.array
    if isinstance(storage, np.ndarray):
        bits = storage.view(np.int16) if dtype is torch.bfloat16 else storage
        return torch.from_numpy(bits).view(dtype)
    return torch.from_dlpack(storage)
