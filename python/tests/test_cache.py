# SPDX-License-Identifier: Apache-2.0
"""KvCache, StepPlan and what they count."""

from collections import OrderedDict

import numpy as np
import pytest

import octavo


def test_plan_takes_dicts_pairs_and_arrays_alike(make_cache):
    ways = [
        {7: 3, 9: 1},
        OrderedDict([(7, 3), (9, 1)]),
        [(7, 3), (9, 1)],
        ([7, 3], [9, 1]),
        np.array([[7, 3], [9, 1]]),
        zip([7, 9], [3, 1], strict=True),
    ]
    plans = [make_cache().plan(way) for way in ways]
    assert all(plan == plans[0] for plan in plans)
    assert plans[0].ids.tolist() == [7, 9]


def test_plan_tells_the_step_in_integers(make_cache):
    cache = make_cache(page_size=4)
    cache.begin(cache.plan({7: 3}))
    plan = cache.plan([(9, 2), (7, 2)])
    assert (plan.num_seqs, plan.num_tokens, plan.max_new_tokens, plan.max_kv_len) == (2, 4, 2, 5)
    assert plan.ids.dtype == np.int64
    assert plan.ids.tolist() == [9, 7]
    assert plan.token_offsets.tolist() == [0, 2, 4]
    assert plan.past_lens.tolist() == [0, 3]
    assert plan.kv_lens.tolist() == [2, 5]
    assert plan.page_size == 4
    assert plan.position(1, 0) == 3
    pages = cache.page_ids(7)
    assert plan.slot(1, 0) == pages[0] * 4 + 3
    assert plan.slot(1, 1) == pages[1] * 4
    assert plan.entries.tolist() == [*cache.page_ids(9), *pages]
    assert plan.entry_offsets.tolist() == [0, 1, 3]
    assert plan.first_entries.tolist() == [0, 0]
    assert "sequence 9" in str(plan)


def test_arrays_of_a_plan_are_read_only_and_outlive_it(make_cache):
    plan = make_cache().plan({7: 3})
    lengths = plan.kv_lens
    assert plan.kv_lens.ctypes.data == lengths.ctypes.data
    del plan
    assert lengths.tolist() == [3]
    with pytest.raises(ValueError, match="read-only"):
        lengths[0] = 4


def test_plans_compare_by_content_and_are_no_keys(make_cache):
    one, two, other = (make_cache().plan(step) for step in ({7: 3}, {7: 3}, {7: 4}))
    assert one == two
    assert one != other
    assert one != "a plan"
    with pytest.raises(TypeError):
        hash(one)


def test_shortage_is_an_exception_or_a_value(make_cache):
    cache = make_cache(num_pages=2, page_size=4)
    cache.begin(cache.plan({1: 5}))
    before = cache.stats()
    shortage = cache.try_plan({1: 4, 2: 3})
    assert not shortage
    assert isinstance(shortage, octavo.Shortage)
    assert (shortage.pages_wanted, shortage.pages_free, shortage.pages_total) == (2, 0, 2)
    assert shortage.holders == [octavo.PageHolder(id=1, num_pages=2, num_shared_pages=0)]
    with pytest.raises(octavo.CacheFull, match="pages") as caught:
        cache.plan({1: 4, 2: 3})
    assert caught.value.shortage.pages_wanted == 2
    assert cache.stats() == before
    assert cache.try_plan({1: 1})


def test_a_sequence_too_long_is_a_shortage(make_cache):
    cache = make_cache(max_seq_len=8)
    cache.begin(cache.plan({3: 6}))
    shortage = cache.try_plan({3: 6})
    assert shortage.too_long
    assert (shortage.longest_id, shortage.longest_len, shortage.max_seq_len) == (3, 12, 8)


def test_undo_release_truncate_and_fork(make_cache):
    cache = make_cache(page_size=4)
    plan = cache.plan({1: 6})
    cache.undo(plan)
    assert 1 not in cache
    cache.begin(cache.plan({1: 6}))
    cache.fork(1, 2)
    assert cache.page_ids(1) == cache.page_ids(2)
    assert cache.stats().pages_shared == 2
    plan = cache.plan({2: 1})
    assert plan.copies == [octavo.PageCopy(cache.page_ids(1)[1], cache.page_ids(2)[1], 2)]
    cache.truncate(1, 4)
    assert cache.length(1) == 4
    cache.release(1)
    assert cache.sequence_ids() == [2]
    assert len(cache) == 1
    assert cache
    cache.audit()


def test_fork_without_room_is_an_exception_or_a_value(make_cache):
    cache = make_cache(max_num_seqs=1)
    cache.begin(cache.plan({1: 1}))
    assert cache.try_fork(1, 2).seqs_free == 0
    with pytest.raises(octavo.CacheFull):
        cache.fork(1, 2)


def test_the_configuration_shows_its_defaults(make_cache):
    cache = make_cache(dtype="f16")
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim, cache.head_dim_v) == (
        1,
        2,
        16,
        16,
    )
    assert (cache.dtype, cache.kind, cache.device) == ("f16", "paged", "cpu")
    assert (cache.page_size, cache.num_pages) == (16, 32)
    assert (cache.max_num_seqs, cache.max_seq_len) == (4, 128)


def test_sizes_are_told_before_the_cache_is_made(make_cache):
    words = {"num_kv_heads": 2, "head_dim": 16, "max_num_seqs": 4, "max_seq_len": 128}
    sizes = octavo.cache_sizes(**words)
    assert sizes.keys == sizes.values == 4 * 128 * 2 * 16 * 4
    assert make_cache().stats().bytes == sizes.keys + sizes.values


def test_storage_is_shown_without_a_copy_and_keeps_the_cache_alive(step):
    cache, attention, plan, q, k, v = step()
    attention.append(plan, cache, 0, k, v)
    keys = cache.key_storage(0)
    assert keys.shape == (32, 16, 2, 16)
    assert keys.ctypes.data == cache.key_storage(0).ctypes.data
    page = cache.page_ids(11)[0]
    np.testing.assert_array_equal(keys[page, :2], k[5:])
    keys[page, 0] = 0.0
    assert not cache.key_storage(0)[page, 0].any()
    del cache
    np.testing.assert_array_equal(keys[page, 1], k[6])


def test_memory_of_the_callers_is_used_as_it_is(random):
    keys = np.full((1, 8, 4, 2, 16), np.nan, np.float32)
    # Head-major: the heads' axis lies outside the slots'.
    values = np.full((1, 8, 2, 4, 16), np.nan, np.float32).transpose(0, 1, 3, 2, 4)
    cache = octavo.KvCache(
        num_kv_heads=2,
        head_dim=16,
        max_num_seqs=2,
        max_seq_len=16,
        page_size=4,
        keys=keys,
        values=values,
    )
    attention = octavo.Attention(cache, num_q_heads=2)
    plan = cache.plan({1: 3})
    cache.begin(plan)
    k, v = random.standard_normal((2, 3, 2, 16), np.float32)
    attention.append(plan, cache, 0, k, v)
    page = cache.page_ids(1)[0]
    np.testing.assert_array_equal(keys[0, page, :3], k)
    np.testing.assert_array_equal(values[0, page, :3], v)
    assert cache.stats().bytes == 0


def test_gather_gives_rows_in_order(step):
    cache, attention, plan, q, k, v = step(page_size=3)
    attention.append(plan, cache, 0, k, v)
    keys, values = cache.gather(plan, 0)
    assert keys.shape == (2, 5, 2, 16)
    np.testing.assert_array_equal(keys[0], k[:5])
    np.testing.assert_array_equal(values[1, :2], v[5:])
    assert not values[1, 2:].any()
    mine = np.empty_like(keys)
    assert cache.gather(plan, 0, k=mine)[0] is mine


def test_explanation_names_every_backend(step):
    cache, attention, plan, *_ = step()
    explanation = attention.explain(plan)
    assert explanation.chosen == "cpu"
    assert explanation.reason in str(explanation)
    by_name = {support.backend: support for support in explanation.backends}
    assert by_name["unfused"].ok
    assert by_name["unfused"].missing == []
    assert by_name["flash3"].missing
    assert {info.backend for info in octavo.backends()} == set(by_name)
    assert octavo.cpu_target()
