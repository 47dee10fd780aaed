# SPDX-License-Identifier: Apache-2.0
"""JAX's arrays, on the CPU: inputs that are read-only, results that are JAX's again."""

import numpy as np
import pytest

import octavo
from octavo import _native

jax = pytest.importorskip("jax", reason="JAX is not installed")


def test_the_library_sees_the_arrays_own_memory_read_only():
    array = jax.numpy.zeros((3, 4))
    pointer, dtype, shape, strides, _, read_only = _native._describe(array)
    assert pointer == array.unsafe_buffer_pointer()
    assert (dtype, shape, strides, read_only) == ("f32", (3, 4), (4, 1), True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_in_arrays_out(step, dtype):
    cache, attention, plan, *arrays = step(dtype={"float32": "f32", "bfloat16": "bf16"}[dtype])
    q, k, v = (jax.numpy.asarray(x, dtype) for x in arrays)
    out, lse = attention.forward(plan, cache, 0, q, k, v, lse=True)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert out.dtype == dtype
    wanted, wanted_lse = attention.attend(plan, cache, 0, np.asarray(q), lse=True)
    np.testing.assert_array_equal(np.asarray(out), wanted)
    np.testing.assert_array_equal(np.asarray(lse), wanted_lse)


def test_an_array_of_jax_is_no_out(step):
    cache, attention, plan, q, k, v = step()
    with pytest.raises(octavo.InvalidArgument, match="JAX's never are: leave it out"):
        attention.forward(plan, cache, 0, q, k, v, out=jax.numpy.zeros(q.shape))
