# SPDX-License-Identifier: Apache-2.0
"""What the front flashinfer refuses, and its arguments for CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
from flashinfer_case import workspace

from octavo.compat import flashinfer


def graph_wrapper(frame):
    buffers = [frame.ints(np.zeros(n)) for n in (3, 8, 2)]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(frame),
        "NHD",
        use_cuda_graph=True,
        **dict(
            zip(
                (
                    "paged_kv_indptr_buffer",
                    "paged_kv_indices_buffer",
                    "paged_kv_last_page_len_buffer",
                ),
                buffers,
                strict=True,
            )
        ),
    )
    return wrapper, buffers


def test_graph_mode_fills_its_buffers_and_fixes_the_batch(frame):
    wrapper, buffers = graph_wrapper(frame)
    assert wrapper.is_cuda_graph_enabled
    wrapper.plan(
        frame.ints([0, 1, 3]),
        frame.ints([4, 2, 5]),
        frame.ints([1, 3]),
        2,
        2,
        8,
        4,
        q_data_type="float32",
    )
    assert [frame.read(b).tolist() for b in buffers] == [
        [0, 1, 3],
        [4, 2, 5, 0, 0, 0, 0, 0],
        [1, 3],
    ]
    with pytest.raises(ValueError, match="batch size"):
        wrapper.plan(frame.ints([0, 1]), frame.ints([4]), frame.ints([1]), 2, 2, 8, 4)
    with pytest.raises(ValueError, match="paged_kv_indices_buffer"):
        wrapper.plan(
            frame.ints([0, 1, 9]), frame.ints(np.arange(9)), frame.ints([1, 1]), 2, 2, 8, 4
        )
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame), use_cuda_graph=True)


@pytest.mark.parametrize(
    "option",
    [
        "custom_mask",
        "packed_custom_mask",
        "prefix_len_ptr",
        "token_pos_in_items_ptr",
        "max_item_len_ptr",
    ],
)
def test_what_plan_does_not_cover_is_named(frame, option):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(frame))
    arrays = [frame.ints(x) for x in ([0, 1], [0, 1], [0], [1])]
    with pytest.raises(NotImplementedError, match=option):
        wrapper.plan(*arrays, 1, 1, 8, 4, **{option: frame.ints([1])})


def test_what_run_does_not_cover_is_named(frame):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame))
    wrapper.plan(
        frame.ints([0, 1]), frame.ints([0]), frame.ints([1]), 1, 1, 8, 4, q_data_type="float32"
    )
    q, cache = frame.make(np.ones((1, 1, 8))), frame.make(np.ones((1, 2, 4, 1, 8)))
    for option in ("kv_cache_sf", "skip_softmax_threshold_scale_factor"):
        with pytest.raises(NotImplementedError, match=option):
            wrapper.run(q, cache, **{option: 1.0})


def test_wrong_input_is_an_error(frame):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame))
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(frame.make(np.ones((1, 1, 8))), frame.make(np.ones((1, 2, 4, 1, 8))))
    arrays = frame.ints([0, 1]), frame.ints([0])
    with pytest.raises(ValueError, match="last_page_len"):
        wrapper.plan(*arrays, frame.ints([5]), 1, 1, 8, 4)
    with pytest.raises(ValueError, match="num_qo_heads"):
        wrapper.plan(*arrays, frame.ints([1]), 3, 2, 8, 4)
    with pytest.raises(KeyError, match="pos_encoding_mode"):
        wrapper.plan(*arrays, frame.ints([1]), 1, 1, 8, 4, pos_encoding_mode="ROPE")
    wrapper.plan(*arrays, frame.ints([1]), 1, 1, 8, 4, q_data_type="float32")
    good, cache = frame.make(np.ones((1, 1, 8))), frame.make(np.ones((1, 2, 4, 1, 8)))
    for q, kv, message in (
        (frame.make(np.ones((2, 1, 8))), cache, "rows"),
        (frame.make(np.ones((1, 1, 8)), "f16"), cache, "dtype"),
        (good, frame.make(np.ones((1, 2, 3, 1, 8))), "page_size"),
        (good, frame.make(np.ones((1, 2, 4, 2, 8))), "heads"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(q, kv)
    with pytest.raises(ValueError, match="window_left"):
        wrapper.run(good, cache, window_left=3)
    with pytest.raises(KeyError, match="kv_layout"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(frame), "DHN")
