# SPDX-License-Identifier: Apache-2.0
"""The frameworks that the fronts are tested in: arrays made and read in the tests' own way."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None


def round_bf16(x):
    """float64 to the nearest bfloat16, as uint16 bits, by float32 (the tests' values have no ties
    there).
    """
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen_bf16(bits):
    return (
        (np.asarray(bits).view(np.uint16).astype(np.uint32) << 16)
        .view(np.float32)
        .astype(np.float64)
    )


class Host:
    """What the host's frameworks have in common."""

    device = "cpu"
    turns_and_rounds = False  # whether what is turned is rounded to its dtype again

    def products(self, dtype):
        """What weights and values are multiplied in, when they are of a dtype."""
        return "f32"

    def place(self, module):
        """A module where the arrays are."""
        return module

    def wait(self):
        """Until calls are done."""


class Numpy(Host):
    name = "numpy"
    dtypes = ("f32", "f16", "bf16") if ml_dtypes else ("f32", "f16")

    def dtype(self, name):
        return {"f32": np.float32, "f16": np.float16, "bf16": getattr(ml_dtypes, "bfloat16", None)}[
            name
        ]

    def make(self, x, dtype="f32"):
        return np.asarray(x, np.float32).astype(self.dtype(dtype))

    def ints(self, x, dtype=np.int32):
        return np.asarray(x, dtype)

    def read(self, x):
        return np.asarray(x).astype(np.float64)

    def is_one(self, x):
        return isinstance(x, np.ndarray)

    def address(self, x):
        return x.__array_interface__["data"][0]


class Torch(Host):
    name = "torch"
    dtypes = ("f32", "f16", "bf16")

    def __init__(self, torch):
        self.torch = torch

    def dtype(self, name):
        return {"f32": self.torch.float32, "f16": self.torch.float16, "bf16": self.torch.bfloat16}[
            name
        ]

    def make(self, x, dtype="f32"):
        return (
            self.torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(self.dtype(dtype)).clone()
        )

    def ints(self, x, dtype=np.int32):
        return self.torch.from_numpy(np.array(x, dtype))

    def read(self, x):
        return x.to(self.torch.float64).numpy()

    def is_one(self, x):
        return isinstance(x, self.torch.Tensor)

    def address(self, x):
        return x.data_ptr()


def frame_of(name):
    if name == "numpy":
        return Numpy()
    return Torch(pytest.importorskip("torch", reason="PyTorch is not installed"))


def has(name):
    return importlib.util.find_spec(name) is not None
