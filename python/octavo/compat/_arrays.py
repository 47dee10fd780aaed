# SPDX-License-Identifier: Apache-2.0
"""Arrays of any framework, seen as NumPy arrays over the same memory, and results made in the
caller's.

A bfloat16 tensor of PyTorch is seen as its bits (int16); `native` names the dtype again when it is
handed to the library. Nothing here computes attention.
"""

from __future__ import annotations

import functools
import math
import sys

import numpy as np

import octavo

_INT32 = np.dtype(np.int32)
_BITS = np.dtype(np.int16)
_DTYPES = {
    "float32": "f32",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
}


def not_covered(what: str, hint: str = "") -> NotImplementedError:
    return NotImplementedError(
        f"{what}: not covered by this front" + (f" ({hint})" if hint else "")
    )


def checked_scale(scale, name):
    """A softmax scale as a float; None is the default, which the library's 0 would be, too."""
    if scale is None:
        return None
    scale = float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"{name}: wanted a finite number, got {scale}")
    if scale == 0.0:
        raise not_covered(f"{name} 0")
    return scale


def checked_softcap(softcap, name):
    """A soft cap as a float; None and 0 are none."""
    softcap = 0.0 if softcap is None else float(softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"{name}: wanted 0 or a positive finite number, got {softcap}")
    return softcap


class NumpyFramework:
    """NumPy arrays, those of ml_dtypes included."""

    writable = True

    def host(self, x, name):
        if isinstance(x, np.ndarray):
            return x
        if isinstance(x, octavo.TypedArray):
            if x.dtype != "bf16":
                raise not_covered(f"{name} of dtype {x.dtype}", "f32, f16 and bf16 are")
            bits = np.asarray(x.array)
            return bits if bits.dtype == _BITS else bits.view(_BITS)
        raise TypeError(
            f"{name}: wanted a NumPy array, as the first argument is, got {type(x).__name__}"
        )

    def empty(self, like, shape, dtype=None):
        """(what the caller gets, what the library writes): dtype None is that of `like`."""
        if isinstance(like, octavo.TypedArray) and dtype is None:
            bits = np.empty(shape, _BITS)
            return octavo.TypedArray(bits.view(np.uint16), "bf16"), bits
        out = np.empty(shape, like.dtype if dtype is None else dtype)
        return out, out

    def finish(self, made):
        return made

    def needs_grad(self, q, k, v):
        return False

    float32 = np.dtype(np.float32)
    int32 = _INT32


class TorchFramework:
    """PyTorch tensors in the host's memory."""

    writable = True

    def __init__(self, torch):
        self._tensor = torch.Tensor
        self._grad_enabled = torch.is_grad_enabled
        self._from_numpy = torch.from_numpy
        self._bf16 = torch.bfloat16
        self._int16 = torch.int16
        self._hosts = {  # what a dtype is on the host
            torch.float32: np.dtype(np.float32),
            torch.float16: np.dtype(np.float16),
            torch.bfloat16: _BITS,
            torch.int32: _INT32,
            torch.int64: np.dtype(np.int64),
            torch.bool: np.dtype(np.bool_),
        }
        self.float32 = torch.float32
        self.int32 = torch.int32

    def host(self, x, name):
        if not isinstance(x, self._tensor):
            raise TypeError(
                f"{name}: wanted a tensor, as the first argument is, got {type(x).__name__}"
            )
        if not x.is_cpu:
            raise not_covered(f"{name} on {x.device}", "this call reads it on the host")
        if x.requires_grad:
            x = x.detach()
        dtype = x.dtype
        if dtype is self._bf16:
            return x.view(self._int16).numpy()
        if dtype not in self._hosts:
            raise not_covered(f"{name} of dtype {dtype}", "float32, float16 and bfloat16 are")
        return x.numpy()

    def empty(self, like, shape, dtype=None):
        # Made by NumPy, whose allocation and whose view by PyTorch cost less than the reverse.
        dtype = like.dtype if dtype is None else dtype
        host = np.empty(shape, self._hosts[dtype])
        out = self._from_numpy(host)
        return (out.view(dtype) if dtype is self._bf16 else out), host

    def finish(self, made):
        return made

    def needs_grad(self, q, k, v):
        return (q.requires_grad or k.requires_grad or v.requires_grad) and self._grad_enabled()


class JaxFramework:
    """JAX arrays in the host's memory: read as they are, results copied into new ones."""

    writable = False

    def __init__(self, jax):
        self._jax = jax

    def host(self, x, name):
        if isinstance(x, np.ndarray):
            return x
        if not isinstance(x, self._jax.Array):
            raise TypeError(
                f"{name}: wanted a JAX array, as the first argument is, got {type(x).__name__}"
            )
        if any(d.platform != "cpu" for d in x.devices()):
            raise not_covered(f"{name} on {next(iter(x.devices()))}", "JAX arrays on the CPU are")
        return np.asarray(x)

    def empty(self, like, shape, dtype=None):
        out = np.empty(shape, like.dtype if dtype is None else dtype)
        return out, out

    def finish(self, made):
        return self._jax.numpy.asarray(made)

    def needs_grad(self, q, k, v):
        return False

    float32 = np.dtype(np.float32)
    int32 = _INT32


_NUMPY = NumpyFramework()
_by_type = {np.ndarray: _NUMPY, octavo.TypedArray: _NUMPY}
_by_module: dict[str, object] = {}


def framework(x, name="q"):
    """The framework of an array, by what the program has imported itself."""
    known = _by_type.get(type(x))
    return known if known is not None else _find_framework(x, name)


def _find_framework(x, name):
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if isinstance(x, np.ndarray):
        found = _NUMPY
    elif torch is not None and isinstance(x, torch.Tensor):
        found = _by_module.setdefault("torch", TorchFramework(torch))
    elif jax is not None and isinstance(x, jax.Array):
        found = _by_module.setdefault("jax", JaxFramework(jax))
    else:
        kind = type(x)
        got = (
            kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        )
        raise TypeError(f"{name}: wanted a PyTorch tensor, a NumPy or a JAX array, got {got}")
    return _by_type.setdefault(type(x), found)


def native(host):
    """A host array as the library takes it."""
    return octavo.TypedArray(host, "bf16") if host.dtype is _BITS or host.dtype == _BITS else host


@functools.lru_cache(maxsize=64)
def dtype_name(dtype):
    """f32, f16 or bf16 of a name, a NumPy or a PyTorch dtype."""
    text = dtype if isinstance(dtype, str) else str(dtype).replace("torch.", "")
    if text not in _DTYPES:
        text = getattr(dtype, "__name__", text)
    if text not in _DTYPES:
        raise not_covered(f"dtype {dtype}", "float32, float16 and bfloat16 are")
    return _DTYPES[text]


def ints(x, name, length=None):
    """A dense int32 array on the host of a list, an array or a tensor."""
    if type(x) is not np.ndarray:
        if isinstance(x, (list, tuple)):
            x = np.asarray(x)
            if x.size == 0:
                x = x.astype(_INT32)
        else:
            x = framework(x, name).host(x, name)
    if x.dtype != _INT32:
        if x.dtype.kind not in "iu":
            raise TypeError(f"{name}: wanted integers, got {x.dtype}")
        wide, x = x, x.astype(_INT32)
        if (x != wide).any():
            raise ValueError(f"{name}: wanted 32 bits, got {wide[x != wide][0]}")
    if length is not None and x.shape != (length,):
        raise ValueError(f"{name}: wanted shape [{length}], got {list(x.shape)}")
    return np.ascontiguousarray(x)


def int_table(x, name):
    """A dense int32 array [rows, entries] on the host."""
    table = ints(x, name)
    if table.ndim != 2:
        raise ValueError(f"{name}: wanted two axes, got {list(table.shape)}")
    return table


def floats(x, name, shape=None):
    """A dense float32 array on the host."""
    if not isinstance(x, np.ndarray):
        x = as_float32(framework(x, name), x, name)
    x = np.ascontiguousarray(x, np.float32)
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name}: wanted shape {list(shape)}, got {list(x.shape)}")
    return x


def as_float32(frame, x, name):
    """Host values of any float dtype, widened: a copy unless they are float32."""
    host = frame.host(x, name)
    if host.dtype == _BITS:
        return (host.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(host, np.float32)


def scale_by(host, factors):
    """host * factors in the host's own dtype, as a new array; factors are float32."""
    if host.dtype != _BITS:
        return (host.astype(np.float32) * factors).astype(host.dtype)
    wide = (host.view(np.uint16).astype(np.uint32) << 16).view(np.float32) * factors
    bits = wide.view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return np.where(np.isnan(wide), 0x7FC0, rounded >> 16).astype(np.uint16).view(_BITS)


class _Span:
    """Memory of `owner` under another shape and other strides, which NumPy is not to check."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner, shape, strides):
        self.owner = owner
        self.__array_interface__ = owner.__array_interface__ | {"shape": shape, "strides": strides}


def _strided(host, shape, strides):
    view = np.asarray(_Span(host, shape, strides))
    return view if view.dtype == host.dtype else view.view(host.dtype)  # ml_dtypes' are mere bytes


def join_heads(out):
    """[..., heads, dim] as [..., heads * dim], without a copy."""
    if isinstance(out, octavo.TypedArray):
        return octavo.TypedArray(join_heads(out.array), out.dtype)
    *lead, heads, dim = out.shape
    return out.reshape(*lead, heads * dim)


def sliding_rows(host, num_rows, row_len):
    """[num_rows, row_len, ...] where row r starts at slot r of the flat host [slots, ...].

    Rows overlap; those near the end reach past it, and are read only as far as their lengths say.
    """
    strides = host.strides
    return _strided(
        host, (num_rows, row_len, *host.shape[1:]), (strides[0], strides[0], *strides[1:])
    )


def flat_slots(host, name):
    """A cache [N, P, ...] as ([slots, ...], step): slot s of page n is slot n * step + s."""
    pages, slots = host.shape[:2]
    page_stride, slot_stride = host.strides[:2]
    step = page_stride // slot_stride if slot_stride else 0
    if pages > 1 and (step <= 0 or step * slot_stride != page_stride):
        raise not_covered(f"strides of {name}", "wanted pages a whole number of slots apart")
    step = step if pages > 1 else slots
    total = (pages - 1) * step + slots if pages else 0
    return _strided(host, (total, *host.shape[2:]), (slot_stride, *host.strides[2:])), step
