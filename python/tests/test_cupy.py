# SPDX-License-Identifier: Apache-2.0
"""CuPy's arrays on a GPU: in, out, as a cache's memory, and its streams.

Only what copies and views make is used of CuPy, none of the kernels that it compiles. Skipped where
CuPy or a GPU is missing; with OCTAVO_REQUIRE=cupy in the environment that is a failure.
"""

import ctypes
import functools

import numpy as np
import pytest

import octavo
from gpus import missing
from octavo.compat import flash_attn

CLOSE = {"rtol": 2e-3, "atol": 2e-3}
SHAPES = [(7, heads, 16) for heads in (4, 2, 2)]


@pytest.fixture
def cupy():
    try:
        import cupy
    except ImportError as error:
        missing(f"CuPy can't be imported: {error}", needs="cupy")
    try:
        cupy.cuda.Device(0).compute_capability  # noqa: B018
        octavo.Workspace()
    except (octavo.Error, cupy.cuda.runtime.CUDARuntimeError) as error:
        missing(str(error), needs="cupy")
    return cupy


@pytest.fixture
def hosts(random):
    return [random.standard_normal(shape).astype(np.float16) for shape in SHAPES]


@pytest.fixture
def make_step(make_step):
    """In pages of 4 slots."""
    return functools.partial(make_step, page_size=4)


@pytest.fixture
def wanted(make_step, hosts):
    """What the CPU gives for the step: (out, lse)."""
    cache, attention, plan = make_step("cpu")
    return attention.forward(plan, cache, 0, *hosts, lse=True)


def address(array):
    return array.data.ptr


def test_arrays_go_in_and_come_out(cupy, make_step, hosts, wanted):
    cache, attention, plan = make_step()
    out, lse = attention.forward(plan, cache, 0, *map(cupy.asarray, hosts), lse=True)
    assert (type(out), type(lse)) == (cupy.ndarray, cupy.ndarray)
    assert (out.dtype, lse.dtype) == (np.float16, np.float32)
    np.testing.assert_allclose(out.get(), wanted[0], **CLOSE)
    np.testing.assert_allclose(lse.get(), wanted[1], **CLOSE)


def test_append_then_attend_into_given_arrays(cupy, make_step, hosts, wanted):
    cache, attention, plan = make_step()
    q, k, v = map(cupy.asarray, hosts)
    attention.append(plan, cache, 0, k, v)
    out, lse = cupy.empty(q.shape, np.float32), cupy.empty((7, 4), np.float32)
    got = attention.attend(plan, cache, 0, q, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    np.testing.assert_allclose(out.get(), wanted[0], **CLOSE)
    np.testing.assert_allclose(lse.get(), wanted[1], **CLOSE)


def test_views_are_read_and_written_where_they_are(cupy, make_step, hosts, wanted):
    cache, attention, plan = make_step()
    wide = np.zeros((7, 8, 32), np.float16)
    wide[:, ::2, :16] = hosts[0]
    q = cupy.asarray(wide)[:, ::2, :16]
    whole = cupy.zeros((7, 8, 32), np.float16)
    k, v = map(cupy.asarray, hosts[1:])
    attention.forward(plan, cache, 0, q, k, v, out=whole[:, ::2, :16])
    got = whole.get()
    np.testing.assert_allclose(got[:, ::2, :16], wanted[0], **CLOSE)
    assert not got[:, 1::2].any()
    assert not got[:, :, 16:].any()


def test_bits_with_a_named_dtype_cross_both_ways(cupy, make_cache, random):
    results = []
    hosts = [random.standard_normal(s).astype(np.float32).view(np.uint32) >> 16 for s in SHAPES]
    hosts = [x.astype(np.uint16) for x in hosts]
    for device, convert in (("cpu", np.asarray), ("cuda", cupy.asarray)):
        cache = make_cache(device=device, dtype="bf16")
        plan = cache.plan({10: 5, 11: 2})
        cache.begin(plan)
        bits = [octavo.TypedArray(convert(x), "bf16") for x in hosts]
        out = octavo.Attention(cache, num_q_heads=4).forward(plan, cache, 0, *bits)
        assert (out.dtype, out.array.dtype) == ("bf16", np.uint16)
        results.append(out.array if device == "cpu" else out.array.get())
    cpu, gpu = ((x.astype(np.uint32) << 16).view(np.float32) for x in results)
    np.testing.assert_allclose(gpu, cpu, rtol=2e-2, atol=2e-2)


def test_storage_is_seen_without_a_copy(cupy, make_step, hosts):
    cache, attention, plan = make_step()
    keys = cupy.from_dlpack(cache.key_storage(0))
    assert address(keys) == address(cupy.from_dlpack(cache.key_storage(0)))
    attention.append(plan, cache, 0, *map(cupy.asarray, hosts[1:]))
    first, second = cache.page_ids(10)
    np.testing.assert_array_equal(keys[first].get(), hosts[1][:4])
    np.testing.assert_array_equal(keys[second, 0].get(), hosts[1][4])


def test_a_cache_lies_in_memory_of_cupys(cupy, make_step, hosts, wanted):
    pool = [cupy.zeros((1, 128, 4, 2, 16), np.float16) for _ in range(2)]
    cache, attention, plan = make_step(keys=pool[0], values=pool[1])
    assert address(cupy.from_dlpack(cache.key_storage(0))) == address(pool[0])
    out = attention.forward(plan, cache, 0, *map(cupy.asarray, hosts))
    np.testing.assert_allclose(out.get(), wanted[0], **CLOSE)
    assert cache.stats().bytes == 0
    np.testing.assert_array_equal(pool[1][0, cache.page_ids(11)[0], :2].get(), hosts[2][5:])


class Callers:
    """Two sequences over a caller's pages, on the CPU or on the GPU."""

    def __init__(self, random, convert):
        self.q, *self.new = (
            convert(random.standard_normal((4, heads, 16)).astype(np.float16))
            for heads in (4, 2, 2)
        )
        self.pools = [
            convert(random.standard_normal((8, 4, 2, 16)).astype(np.float16)) for _ in range(2)
        ]
        arrays = {
            "kv_lens": [9, 3],
            "token_offsets": [0, 3, 4],
            "page_table": [[7, 1, 4], [2, 0, 0]],
        }
        self.arrays = {name: convert(np.array(x, np.int32)) for name, x in arrays.items()}

    def run(self, **words):
        octavo.append_tokens(*self.new, *self.pools, **self.arrays, **words)
        return octavo.attend(self.q, *self.pools, **self.arrays, lse=True, **words)


def planned(cupy, callers):
    """(workspace, its memory)."""
    space = octavo.Workspace()
    sizes = space.sizes(callers.q, *callers.pools, **callers.arrays, lse=True)
    memory = cupy.empty(sizes.good, np.uint8)
    space.use(memory)
    space.plan(*callers.pools, **callers.arrays, num_tokens=4)
    return space


def test_a_callers_pages_are_attended_to_in_place(cupy):
    host = Callers(np.random.default_rng(3), np.asarray)
    want = host.run()
    callers = Callers(np.random.default_rng(3), cupy.asarray)
    space = planned(cupy, callers)
    before = [address(pool) for pool in callers.pools]
    got = callers.run(workspace=space)
    space.check()
    assert [address(pool) for pool in callers.pools] == before
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine.get(), theirs, **CLOSE)
    for mine, theirs in zip(callers.pools, host.pools, strict=True):
        np.testing.assert_array_equal(mine.get(), theirs)


def test_parts_of_the_keys_merge_on_the_host(cupy, random):
    q, k, v = (
        random.standard_normal((n, h, 16)).astype(np.float16) for n, h in ((3, 4), (16, 2), (16, 2))
    )
    parts = []
    for keys in (slice(0, 8), slice(8, 16), slice(0, 16)):
        arrays = [cupy.asarray(x[keys][None]) for x in (k, v)]
        words = {
            "kv_lens": cupy.asarray(np.array([keys.stop - keys.start], np.int32)),
            "token_offsets": cupy.asarray(np.array([0, 3], np.int32)),
        }
        space, rows = octavo.Workspace(), cupy.asarray(q)
        space.use(cupy.empty(space.sizes(rows, *arrays, **words, mask="full").good, np.uint8))
        space.plan(*arrays, **words, num_tokens=3)
        parts.append(octavo.attend(rows, *arrays, **words, mask="full", lse=True, workspace=space))
    with pytest.raises(octavo.InvalidArgument, match="device: wanted cpu, got cuda:0"):
        octavo.merge(parts[:2])
    out, lse = octavo.merge([(o.get(), s.get()) for o, s in parts[:2]], lse=True)
    np.testing.assert_allclose(out, parts[2][0].get(), **CLOSE)
    np.testing.assert_allclose(lse, parts[2][1].get(), **CLOSE)


def test_calls_go_to_cupys_current_stream(cupy, make_step, hosts, wanted):
    """What was enqueued elsewhere would not be in the graph that the stream captures."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cache, attention, plan = make_step()
        q, k, v = map(cupy.asarray, hosts)
        out = cupy.zeros(q.shape, np.float16)
        attention.forward(plan, cache, 0, q, k, v, out=out)
        out.data.memset_async(0, out.nbytes, stream)
        stream.begin_capture()
        attention.forward(plan, cache, 0, q, k, v, out=out)
        graph = stream.end_capture()
        stream.synchronize()
        assert not out.get().any()
        graph.launch(stream)
        np.testing.assert_allclose(out.get(), wanted[0], **CLOSE)


def test_a_stream_of_cupys_may_be_named(cupy, make_step, hosts, wanted):
    stream = cupy.cuda.Stream(non_blocking=True)
    cache, attention, _ = make_step()
    q, k, v = map(cupy.asarray, hosts)
    out = cupy.zeros(q.shape, np.float16)
    cupy.cuda.Device().synchronize()
    plan = cache.plan({20: 5, 21: 2})
    cache.begin(plan, stream=stream)
    attention.forward(plan, cache, 0, q, k, v, out=out, stream=stream)
    np.testing.assert_allclose(out.get(stream=stream), wanted[0], **CLOSE)


class ReadOnly:
    """An array whose capsule says that it may not be written to."""

    __module__ = "cupy"

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **words):
        capsule = self.array.__dlpack__(**words)
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = (
            ctypes.c_void_p,
            [ctypes.py_object, ctypes.c_char_p],
        )
        flags = pointer_of(capsule, b"dltensor_versioned") + 24  # behind version, context, deleter
        ctypes.c_uint64.from_address(flags).value |= 1
        return capsule


def test_read_only_arrays_go_in_but_not_out(cupy, make_step, hosts, wanted):
    cache, attention, plan = make_step()
    q, k, v = (ReadOnly(cupy.asarray(x)) for x in hosts)
    out = cupy.zeros(SHAPES[0], np.float16)
    with pytest.raises(octavo.InvalidArgument, match="out: wanted a writable array"):
        attention.forward(plan, cache, 0, q, k, v, out=ReadOnly(out))
    assert not out.get().any()
    attention.forward(plan, cache, 0, q, k, v, out=out)
    np.testing.assert_allclose(out.get(), wanted[0], **CLOSE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda cupy, q: q.get()}, "q.device: wanted cuda:0, got cpu"),
        ({"k": lambda cupy, k: k[:, :1]}, "k.shape: wanted"),
        ({"v": lambda cupy, v: v[:3]}, "v.shape: wanted"),
        ({"k": lambda cupy, k: cupy.zeros(k.shape, np.float64)}, "k.dtype: wanted"),
        ({"out": lambda cupy, q: q}, "out.data: wanted memory that q does not use"),
        ({"out": lambda cupy, q: cupy.zeros(q.shape, np.int32)}, "out.dtype: wanted"),
    ],
    ids=["host", "heads", "tokens", "float64", "overlap", "integers"],
)
def test_what_is_wrong_is_named_and_changes_nothing(cupy, make_step, hosts, change, message):
    cache, attention, plan = make_step()
    tensors = dict(zip("qkv", map(cupy.asarray, hosts), strict=True))
    for name, wrong in change.items():
        tensors[name] = wrong(cupy, tensors.get(name, tensors["q"]))
    with pytest.raises(octavo.InvalidArgument, match=message):
        attention.forward(plan, cache, 0, **tensors)
    assert not cupy.from_dlpack(cache.key_storage(0)).get().any()


def test_a_cache_on_the_cpu_refuses_them(cupy, make_step, hosts):
    cache, attention, plan = make_step("cpu")
    with pytest.raises(octavo.InvalidArgument, match="device: wanted cpu, got cuda:0"):
        attention.forward(plan, cache, 0, *map(cupy.asarray, hosts))


def test_the_fronts_name_what_they_take(cupy, hosts):
    q, k, v = (cupy.asarray(x[None]) for x in hosts)
    with pytest.raises(TypeError, match=r"q: wanted a PyTorch tensor.*got cupy\.ndarray"):
        flash_attn.flash_attn_func(q, k, v)
