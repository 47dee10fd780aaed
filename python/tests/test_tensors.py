# SPDX-License-Identifier: Apache-2.0
"""How arrays cross: no copies, any strides, dtypes that NumPy lacks, arrays of other libraries."""

import contextlib
import gc
import sys
import types

import ml_dtypes
import numpy as np
import pytest

import octavo
from octavo import _native


class Foreign:
    """An array of some other library: DLPack and nothing else, as it was before or after 1.0."""

    def __init__(self, array, versioned=True):
        self.array = array
        self.versioned = versioned

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **words):
        if not self.versioned and words:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**words)


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3, 4), np.float32),
        np.zeros((2, 3, 4), np.float16)[::-1, :, ::2],
        np.zeros((5, 6), np.int32).T,
        np.zeros((3, 4), ml_dtypes.bfloat16)[1:],
        np.zeros((3, 4), ml_dtypes.float8_e4m3fn),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_the_library_sees_the_arrays_own_memory(array):
    names = {
        "float32": "f32",
        "float16": "f16",
        "int32": "i32",
        "bfloat16": "bf16",
        "float8_e4m3fn": "f8e4m3",
    }
    pointer, dtype, shape, strides, device, read_only = _native._describe(array)
    assert pointer == address(array)
    assert dtype == names[array.dtype.name]
    assert shape == array.shape
    assert strides == tuple(stride // array.itemsize for stride in array.strides)
    assert (device, read_only) == ("cpu", False)


@pytest.mark.parametrize("wrap", [np.asarray, Foreign], ids=["numpy", "dlpack"])
def test_strides_of_nothing_are_dense_whatever_numpy_says(wrap):
    array = np.zeros((3, 0, 2), np.float32).swapaxes(0, 2)
    _, _, shape, strides, _, _ = _native._describe(wrap(array))
    assert (shape, strides) == ((2, 0, 3), (3, 3, 1))


@pytest.mark.parametrize("backend", ["cpu", "unfused"])
def test_steps_without_a_token_run_on_every_backend(make_cache, backend):
    cache = make_cache()
    attention = octavo.Attention(cache, num_q_heads=4, backend=backend)
    plan = cache.plan({1: 0})
    cache.begin(plan)
    heads, dim = cache.num_kv_heads, cache.head_dim
    for format, lead in (("thd", (0,)), ("bshd", (1, 0)), ("sbhd", (0, 1))):
        q = np.zeros((*lead, 4, dim), np.float32)
        k = np.zeros((*lead, heads, dim), np.float32)
        out, lse = attention.forward(plan, cache, 0, q, k, k, format=format, lse=True)
        assert (out.shape, lse.shape) == (q.shape, (0, 4))


@pytest.mark.parametrize("backend", ["cpu", "unfused"])
def test_no_sequences_need_no_rows_of_a_page_table(backend):
    q = np.zeros((0, 4, 8), np.float32)
    pages = np.zeros((2, 16, 2, 8), np.float32)
    table = np.zeros((0, 3), np.int32)
    out = octavo.attend(q, pages, pages, [], page_table=table, backend=backend)
    assert out.shape == (0, 4, 8)


@pytest.mark.parametrize("versioned", [True, False], ids=["dlpack 1", "dlpack 0"])
def test_dlpack_shows_the_same_memory(versioned):
    array = np.zeros((4, 6), np.float32)[:, ::2]
    pointer, dtype, shape, strides, *_ = _native._describe(Foreign(array, versioned))
    assert (pointer, dtype, shape, strides) == (address(array), "f32", (4, 3), (6, 2))


def test_dlpack_says_what_is_read_only():
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    assert _native._describe(Foreign(array))[-1]


def test_a_foreign_array_is_given_back_after_the_call():
    array = np.zeros((2, 2), np.float32)
    watched = Foreign(array)
    _native._describe(watched)
    del watched
    gc.collect()
    assert len([r for r in gc.get_referrers(array) if isinstance(r, Foreign)]) == 0


def test_masks_are_not_looked_through():
    with pytest.raises(octavo.InvalidArgument, match="array: wanted an array without a mask"):
        _native._describe(np.ma.zeros(3, np.float32))


def test_arrays_in_files_are_arrays(tmp_path):
    array = np.memmap(tmp_path / "numbers", np.float32, "w+", shape=(3, 4))
    assert _native._describe(array)[0] == address(array)


def test_inputs_may_be_read_only_and_are_not_changed(step):
    cache, attention, plan, q, k, v = step()
    copies = [x.copy() for x in (q, k, v)]
    for x in (q, k, v):
        x.flags.writeable = False
    attention.forward(plan, cache, 0, q, k, v, rope=octavo.Rope())
    for x, copy in zip((q, k, v), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_out_must_be_writable(step):
    cache, attention, plan, q, k, v = step()
    out = np.zeros_like(q)
    out.flags.writeable = False
    with pytest.raises(octavo.InvalidArgument) as caught:
        attention.forward(plan, cache, 0, q, k, v, out=out)
    assert str(caught.value) == "out: wanted a writable array, got a read-only numpy.ndarray"
    lse = np.broadcast_to(np.float32(0), (7, 4))
    with pytest.raises(octavo.InvalidArgument, match="lse: wanted a writable array"):
        attention.forward(plan, cache, 0, q, k, v, lse=lse)


def test_a_given_out_is_written_and_returned(step):
    cache, attention, plan, q, k, v = step()
    wanted = attention.forward(plan, cache, 0, q, k, v)
    wide = np.full((7, 8, 32), np.nan, np.float32)
    out, lse = wide[:, ::2, :16], np.empty((7, 4), np.float32)
    got = attention.attend(plan, cache, 0, q, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    np.testing.assert_array_equal(out, wanted)
    assert np.isnan(wide[:, 1::2]).all()


def test_out_may_be_wider_than_q(step):
    cache, attention, plan, q, k, v = step(np.float16, dtype="f16")
    narrow = attention.forward(plan, cache, 0, q, k, v)
    wide = attention.attend(plan, cache, 0, q, out=np.empty(q.shape, np.float32))
    assert narrow.dtype == np.float16
    np.testing.assert_array_equal(narrow, wide.astype(np.float16))


def test_bfloat16_crosses_both_ways(step):
    cache, attention, plan, q, k, v = step(ml_dtypes.bfloat16, dtype="bf16")
    out = attention.forward(plan, cache, 0, q, k, v)
    assert out.dtype == ml_dtypes.bfloat16
    exact = attention.attend(plan, cache, 0, q, out=np.empty(q.shape, np.float32))
    np.testing.assert_array_equal(out, exact.astype(ml_dtypes.bfloat16))
    keys = cache.key_storage(0)
    assert keys.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(keys[cache.page_ids(10)[0], :5], k[:5])


def test_bits_with_a_named_dtype_cross_both_ways(step):
    cache, attention, plan, q, k, v = step(ml_dtypes.bfloat16, dtype="bf16")
    wanted = attention.forward(plan, cache, 0, q, k, v)
    bits = [octavo.TypedArray(x.view(np.uint16), "bf16") for x in (q, k, v)]
    out, lse = attention.forward(plan, cache, 0, *bits, lse=True)
    assert isinstance(out, octavo.TypedArray)
    assert (out.dtype, out.array.dtype, lse.dtype) == ("bf16", np.uint16, np.float32)
    np.testing.assert_array_equal(out.array, wanted.view(np.uint16))


def test_without_ml_dtypes_bfloat16_storage_is_a_typed_array(make_cache, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    storage = make_cache(dtype="bf16").key_storage(0)
    assert isinstance(storage, octavo.TypedArray)
    assert _native._describe(storage)[1] == "bf16"


def test_integers_are_taken_without_a_copy_or_converted(random):
    k_cache, v_cache = random.standard_normal((2, 2, 8, 1, 4), np.float32)
    q = random.standard_normal((3, 1, 4), np.float32)
    outs = [
        octavo.attend(q, k_cache, v_cache, lens, token_offsets=offsets, row_indices=rows)
        for lens, offsets, rows in [
            ([8, 5], (0, 1, 3), [1, 0]),
            (np.array([8, 5], np.int32), np.array([0, 1, 3], np.int32), np.array([1, 0], np.int32)),
            (np.array([8, 5]), np.array([0, 1, 3]), np.array([0, 1])[::-1]),
            ([np.int64(8), 5], [0, 1, np.int32(3)], Foreign(np.array([1, 0], np.int32))),
        ]
    ]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def test_a_new_out_of_an_unknown_library_is_refused(step):
    cache, attention, plan, q, k, v = step()
    with pytest.raises(octavo.InvalidArgument, match="out: wanted an array, got None"):
        attention.forward(plan, cache, 0, Foreign(q), k, v)
    out = np.empty_like(q)
    assert attention.forward(plan, cache, 0, Foreign(q), Foreign(k, False), v, out=out) is out


def fake_cupy():
    """CuPy as far as a CPU goes: its arrays' doors, its way to new arrays and to the stream."""

    class Array(Foreign):
        __module__ = "cupy"

        @property
        def __cuda_array_interface__(self):
            raise AssertionError("DLPack comes first")

        @property
        def dtype(self):
            return self.array.dtype

        device = 0

    package = types.ModuleType("cupy")
    package.ndarray, package.float32 = Array, np.float32
    package.empty = lambda shape, dtype: Array(np.full(shape, np.nan, dtype))
    package.cuda = types.SimpleNamespace(
        Device=contextlib.nullcontext,
        get_current_stream=lambda: types.SimpleNamespace(ptr=0),
    )
    return package


def test_cupys_arrays_go_in_and_come_out(step, monkeypatch):
    """Not CuPy itself, whose arrays lie in a GPU's memory alone: see test_cupy.py."""
    cupy = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cache, attention, plan, q, k, v = step()
    given = [cupy.ndarray(x) for x in (q, k, v)]
    out, lse = attention.forward(plan, cache, 0, *given, lse=True)
    assert (type(out), type(lse)) == (cupy.ndarray, cupy.ndarray)
    assert lse.dtype == np.float32
    again, lse_again = attention.attend(plan, cache, 0, q, lse=True)
    np.testing.assert_array_equal(out.array, again)
    np.testing.assert_array_equal(lse.array, lse_again)


def test_foreign_memory_is_kept_as_long_as_it_is_used(random, make_cache):
    shape = (1, 32, 16, 2, 16)
    owned = [np.zeros(shape, np.float32) for _ in range(2)]
    cache = make_cache(keys=Foreign(owned[0]), values=Foreign(owned[1]))
    cos = np.ones((128, 8), np.float32)
    rope = octavo.Rope(cos=Foreign(cos), sin=Foreign(np.zeros_like(cos)))
    gc.collect()
    attention = octavo.Attention(cache, num_q_heads=2)
    plan = cache.plan({1: 4})
    cache.begin(plan)
    q, k, v = random.standard_normal((3, 4, 2, 16), np.float32)
    turned = attention.forward(plan, cache, 0, q, k, v, rope=rope)
    np.testing.assert_array_equal(owned[0][0, cache.page_ids(1)[0], :4], k)
    np.testing.assert_array_equal(turned, attention.attend(plan, cache, 0, q))


def test_streams_are_addresses_or_objects_that_have_one():
    from octavo import _results

    class PyTorchs:
        cuda_stream = 17

    class CuPys:
        ptr = 18

    addresses = [_results.stream_address(stream, 0) for stream in (16, PyTorchs(), CuPys())]
    assert addresses == [16, 17, 18]
    assert _results.stream_address(None, 0) == 0  # nobody uses CUDA here
    with pytest.raises(octavo.InvalidArgument, match="stream: wanted None, an address"):
        _results.stream_address("main", 0)
