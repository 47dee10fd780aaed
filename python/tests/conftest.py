# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

import octavo


@pytest.fixture
def random():
    return np.random.default_rng(8)


@pytest.fixture
def make_cache():
    """A small cache; keywords change it."""

    def make(**words):
        sizes = {"num_kv_heads": 2, "head_dim": 16, "max_num_seqs": 4, "max_seq_len": 128}
        return octavo.KvCache(**{**sizes, **words})

    return make


@pytest.fixture
def step(random, make_cache):
    """A begun step of 5 + 2 tokens with its tensors, as (cache, attention, plan, q, k, v)."""

    def make(numbers=np.float32, **words):
        cache = make_cache(**words)
        attention = octavo.Attention(cache, num_q_heads=4)
        plan = cache.plan({10: 5, 11: 2})
        cache.begin(plan)
        q, k, v = (
            random.standard_normal((7, heads, 16), np.float32).astype(numbers)
            for heads in (4, 2, 2)
        )
        return cache, attention, plan, q, k, v

    return make


@pytest.fixture
def make_step(make_cache):
    """A begun step of 5 + 2 tokens of a cache in float16, as (cache, attention, plan)."""

    def make(device="cuda", **words):
        cache = make_cache(device=device, dtype="f16", **words)
        plan = cache.plan({10: 5, 11: 2})
        cache.begin(plan)
        return cache, octavo.Attention(cache, num_q_heads=4), plan

    return make
