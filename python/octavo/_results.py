# SPDX-License-Identifier: Apache-2.0
"""What the compiled module asks of the caller's frameworks: new arrays and current streams.

No framework is imported here that the caller has not imported before.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from ._errors import InvalidArgument
from ._records import TypedArray


@functools.lru_cache(maxsize=64)
def _roots(kind: type) -> frozenset[str]:
    """The packages that a type and those it derives from are of."""
    return frozenset(base.__module__.partition(".")[0] for base in kind.__mro__)


def new_like(array: Any, shape: tuple[int, ...], float32: bool) -> Any:
    """A new array on `array`'s device, of its dtype or of float32; not called for NumPy's."""
    roots = _roots(type(array))
    if "torch" in roots:
        if float32:
            return array.new_empty(shape, dtype=sys.modules["torch"].float32)
        return array.new_empty(shape)
    if roots & {"jax", "jaxlib"}:
        if next(iter(array.devices())).platform != "cpu":
            raise InvalidArgument("out: wanted arrays on the CPU with JAX, got others (give out)")
        return np.empty(shape, np.float32 if float32 else array.dtype)
    if "cupy" in roots:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(array.device):
            return cupy.empty(shape, cupy.float32 if float32 else array.dtype)
    name = f"{type(array).__module__}.{type(array).__qualname__}"
    raise InvalidArgument(f"out: wanted an array, got None (new ones of {name} can't be made)")


def to_jax(array: np.ndarray) -> Any:
    """JAX's own array over the memory of `array`, where its alignment allows, else a copy."""
    return sys.modules["jax"].numpy.asarray(array)


def as_bfloat16(bits: np.ndarray) -> Any:
    """uint16 as bfloat16, without a copy."""
    try:
        import ml_dtypes
    except ImportError:
        return TypedArray(bits, "bf16")
    return bits.view(ml_dtypes.bfloat16)


def stream_address(stream: Any, device_index: int) -> int:
    """The address of a CUDA stream; None: PyTorch's or CuPy's current one, or the default one."""
    if stream is None:
        return _current_stream(device_index)
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr"):
        address = getattr(stream, attribute, None)
        if isinstance(address, int):
            return address
    raise InvalidArgument(
        "stream: wanted None, an address, or an object with cuda_stream or ptr, "
        f"got {type(stream).__qualname__}"
    )


def _current_stream(device_index: int) -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch_stream(torch, device_index)
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        return int(cupy.cuda.get_current_stream().ptr)
    return 0


def torch_stream(torch: Any, device_index: int) -> int:
    """The address of PyTorch's current stream, by the way that makes no object if there is one."""
    address = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if address is not None:
        return address(device_index)
    return int(torch.cuda.current_stream(device_index).cuda_stream)
