# SPDX-License-Identifier: Apache-2.0
"""JAX arrays through the fronts: read where they lie, answered in JAX, never written."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.compat import flash_attn, flashinfer

jax = pytest.importorskip("jax", reason="JAX is not installed")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_jax_arrays_with_numpys_values(dtype):
    random = np.random.default_rng(0)
    q, k, v = (jax.numpy.asarray(random.standard_normal((2, 3, 2, 8)), dtype) for _ in range(3))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert isinstance(out, jax.Array)
    assert out.dtype == q.dtype
    want, want_lse, _ = flash_attn.flash_attn_func(
        *(np.asarray(x) for x in (q, k, v)), causal=True, return_attn_probs=True
    )
    assert np.array_equal(np.asarray(out), want)
    assert np.array_equal(np.asarray(lse), want_lse)
    single = flashinfer.single_prefill_with_kv_cache(q[0], k[0], v[0], causal=True)
    assert np.array_equal(np.asarray(single), want[0])


def test_writing_into_jax_arrays_is_refused_by_name():
    x = jax.numpy.ones((1, 4, 1, 8))
    with pytest.raises(NotImplementedError, match="k and v to append to a JAX array"):
        flash_attn.flash_attn_with_kvcache(x, x, x, x[:, :1], x[:, :1], cache_seqlens=1)
    with pytest.raises(NotImplementedError, match="merge_state_in_place"):
        flashinfer.merge_state_in_place(x[0], x[0, :, :, 0], x[0], x[0, :, :, 0])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan([0, 1], [0], [4], 1, 1, 8, 4, q_data_type="float32")
    with pytest.raises(NotImplementedError, match="out of JAX"):
        wrapper.run(x[0, :1], (x, x), out=x[0, :1])
