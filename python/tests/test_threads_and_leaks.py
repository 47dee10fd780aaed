# SPDX-License-Identifier: Apache-2.0
"""Calls release the GIL, a cache watches over its one thread, and nothing is left behind."""

import gc
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import octavo


def long_call(random):
    """An attention that takes a good part of a second, over its cache."""
    cache = octavo.KvCache(num_kv_heads=4, head_dim=128, max_num_seqs=1, max_seq_len=2048)
    attention = octavo.Attention(cache, num_q_heads=8, backend="unfused", num_threads=1)
    plan = cache.plan({1: 2048})
    cache.begin(plan)
    q, k, v = (random.standard_normal((2048, heads, 128), np.float32) for heads in (8, 4, 4))
    return cache, lambda: attention.forward(plan, cache, 0, q, k, v)


def test_other_threads_run_during_a_call(random):
    _, call = long_call(random)
    worker = threading.Thread(target=call)
    worker.start()
    rounds = 0
    while worker.is_alive():
        rounds += 1
    # With the GIL held this loop would stand still until the call is over.
    assert rounds > 1000


def test_a_second_thread_on_the_same_cache_is_refused(random):
    cache, call = long_call(random)
    worker = threading.Thread(target=call)
    worker.start()
    message = None
    while worker.is_alive() and message is None:
        try:
            cache.length(1)
        except octavo.InvalidArgument as error:
            message = str(error)
    worker.join()
    assert message == "cache: wanted one thread at a time, got a call while another one runs"
    assert cache.length(1) == 2048


def test_different_caches_run_side_by_side(random):
    q, k, v = (random.standard_normal((64, heads, 32), np.float32) for heads in (4, 2, 2))
    results = [None] * 4

    def run(slot):
        cache = octavo.KvCache(num_kv_heads=2, head_dim=32, max_num_seqs=1, max_seq_len=64)
        attention = octavo.Attention(cache, num_q_heads=4)
        for _ in range(20):
            plan = cache.plan({1: 64})
            cache.begin(plan)
            results[slot] = attention.forward(plan, cache, 0, q, k, v)
            cache.release(1)

    workers = [threading.Thread(target=run, args=(slot,)) for slot in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts pages by /proc")
def test_ten_thousand_steps_leave_nothing_behind(random):
    cache = octavo.KvCache(num_kv_heads=1, head_dim=8, max_num_seqs=3, max_seq_len=64, page_size=4)
    attention = octavo.Attention(cache, num_q_heads=2, num_threads=1)
    q, k, v = (random.standard_normal((2, heads, 8), np.float32) for heads in (2, 1, 1))
    rope = octavo.Rope()
    storage = cache.key_storage(0), cache.value_storage(0)

    def step(i):
        seq_id = i % 1000  # ids come and go
        plan = cache.plan([(seq_id, 1), (-1 - seq_id, 1)])
        cache.begin(plan)
        attention.forward(plan, cache, 0, q, k, v, lse=True, rope=rope)
        where = {"kv_lens": plan.kv_lens, "page_table": table, "num_threads": 1}
        part = octavo.attend(q, *storage, **where, token_offsets=plan.token_offsets, lse=True)
        octavo.merge([part, part])
        cache.gather(plan, 0)
        assert cache.stats().num_seqs == 2
        assert not cache.try_plan({seq_id: 10, -1 - seq_id: 1, 5000: 1, 5001: 1})
        with pytest.raises(octavo.InvalidArgument):
            attention.forward(plan, cache, 0, q[:1], k, v)
        cache.release(seq_id)
        cache.release(-1 - seq_id)

    table = np.zeros((2, 1), np.int32)
    for i in range(2000):
        step(i)
    watched = [q, k, v, rope, cache, table, *storage]
    counts = [sys.getrefcount(each) for each in watched]
    gc.collect()
    objects, before = len(gc.get_objects()), resident_bytes()
    for i in range(10000):
        step(i)
    gc.collect()
    assert [sys.getrefcount(each) for each in watched] == counts
    assert len(gc.get_objects()) - objects < 50
    # A leak of a hundred bytes a step would be a megabyte.
    assert resident_bytes() - before < 1_000_000
