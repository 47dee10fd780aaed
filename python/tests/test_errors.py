# SPDX-License-Identifier: Apache-2.0
"""What goes wrong is an exception with its parts, and leaves everything as it was."""

import numpy as np
import pytest

import octavo


def test_every_error_is_an_octavo_error_and_one_of_pythons():
    kinds = {
        octavo.InvalidArgument: ValueError,
        octavo.Unsupported: NotImplementedError,
        octavo.OutOfMemory: MemoryError,
        octavo.DeviceFailure: RuntimeError,
        octavo.NotCompiled: RuntimeError,
        octavo.Internal: RuntimeError,
    }
    for ours, pythons in kinds.items():
        assert issubclass(ours, octavo.Error)
        assert issubclass(ours, pythons)


def test_messages_come_apart():
    error = octavo.InvalidArgument("q.shape: wanted [7, 4, 16] (thd), got [7, 4, 8] (a hint)")
    assert (error.argument, error.wanted, error.got, error.hint) == (
        "q.shape",
        "[7, 4, 16] (thd)",
        "[7, 4, 8]",
        "a hint",
    )
    assert octavo.Internal("something else").wanted is None


# How the call goes wrong -> argument, wanted, got.
WRONG_FORWARDS = {
    "shape": (lambda a: a | {"q": a["q"][:, :3]}, "q.shape", "[>= 7, 4, 16] (thd)", "[7, 3, 16]"),
    "rank": (lambda a: a | {"q": a["q"][0]}, "q.rank", "3 (thd)", "2"),
    "dtype": (lambda a: a | {"k": a["k"].astype(float)}, "k.dtype", "f32, f16 or bf16", "float64"),
    "no array": (
        lambda a: a | {"v": [1.0]},
        "v",
        "an array (NumPy's, or any with __dlpack__)",
        "list",
    ),
    "layer": (lambda a: a | {"layer": 1}, "layer", "0 … 0", "1"),
    "format": (lambda a: a | {"format": "hbsd"}, "format", "'thd', 'bshd' or 'sbhd'", "'hbsd'"),
    "sinks": (lambda a: a | {"sinks": np.zeros(3, np.float32)}, "sinks.shape", "[4]", "[3]"),
    "slopes": (
        lambda a: a | {"alibi_slopes": np.zeros(4)},
        "alibi_slopes.dtype",
        "float32",
        "float64",
    ),
    "positions": (lambda a: a | {"positions": [1, 2]}, "positions.shape", "[7]", "[2]"),
    "lse": (lambda a: a | {"lse": np.zeros((6, 4), np.float32)}, "lse.shape", None, "[6, 4]"),
    "out": (
        lambda a: a | {"out": np.zeros((7, 4, 16), np.float16)},
        "out.dtype",
        "f32",
        "f16",
    ),
    "byte order": (
        lambda a: a | {"q": a["q"].astype(">f4")},
        "q.dtype",
        "the machine's byte order",
        "the other one",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_FORWARDS, ids=str)
def test_a_wrong_argument_is_named_and_nothing_is_changed(step, wrong):
    change, argument, wanted, got = WRONG_FORWARDS[wrong]
    cache, attention, plan, q, k, v = step()
    arguments = {"plan": plan, "cache": cache, "layer": 0, "q": q, "k": k, "v": v}
    with pytest.raises(octavo.InvalidArgument) as caught:
        attention.forward(**change(arguments))
    error = caught.value
    assert error.argument == argument
    assert error.got == got
    assert wanted is None or error.wanted == wanted
    assert not cache.key_storage(0).any()
    attention.forward(**arguments)


def test_a_plan_must_be_the_begun_one(step):
    cache, attention, plan, q, k, v = step()
    later = cache.plan({10: 7})
    with pytest.raises(octavo.InvalidArgument, match="plan: wanted the one that this cache began"):
        attention.forward(later, cache, 0, q, k, v)


@pytest.mark.parametrize(
    ("words", "argument"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 577}, "head_dim"),
        ({"dtype": "f64"}, "dtype"),
        ({"kind": "pages"}, "kind"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:x"}, "device"),
        ({"keys": np.zeros((1, 32, 16, 2, 16), np.float32)}, "values.data"),
    ],
    ids=str,
)
def test_a_wrong_size_is_named(make_cache, words, argument):
    with pytest.raises(octavo.InvalidArgument) as caught:
        make_cache(**words)
    assert caught.value.argument == argument


def test_arguments_of_another_kind_are_type_errors(make_cache):
    with pytest.raises(TypeError):
        make_cache(page_size="16")
    with pytest.raises(TypeError):
        make_cache(dtype=None)
    with pytest.raises(TypeError):
        make_cache(pages=3)
    with pytest.raises(TypeError):
        make_cache(num_layers=2**31)


def test_a_step_must_be_pairs(make_cache):
    cache = make_cache()
    for step in (5, [1, 2], [(1, 2, 3)], [(1, "two")], [(1, 0.5)], {"a": 1}, [(2**64, 1)]):
        with pytest.raises(octavo.InvalidArgument):
            cache.plan(step)
    assert len(cache) == 0

    def fails():
        yield (1, 2)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cache.plan(fails())


def test_a_backend_that_cannot_run_it_lists_what_is_missing(make_cache):
    with pytest.raises(octavo.Error, match="missing") as caught:
        octavo.Attention(make_cache(), num_q_heads=4, backend="flash3")
    assert isinstance(caught.value, octavo.NotCompiled | octavo.Unsupported)
    with pytest.raises(octavo.Error, match="fp8"):
        octavo.Attention(make_cache(), num_q_heads=4, compute="fp8")


def test_memory_that_cannot_be_had_is_a_memory_error():
    with pytest.raises(MemoryError) as caught:
        octavo.KvCache(
            num_kv_heads=1024, head_dim=512, max_num_seqs=64, max_seq_len=2**24, num_layers=64
        )
    assert isinstance(caught.value, octavo.OutOfMemory)


def test_softmax_scale_of_zero_is_no_default(make_cache):
    with pytest.raises(octavo.InvalidArgument, match="softmax_scale: wanted another number than 0"):
        octavo.Attention(make_cache(), num_q_heads=4, softmax_scale=0.0)


def test_rope_wants_both_tables_and_few_positions(step):
    cos = np.ones((4, 8), np.float32)
    with pytest.raises(octavo.InvalidArgument, match="sin: wanted both tables"):
        octavo.Rope(cos=cos)
    with pytest.raises(octavo.InvalidArgument, match=r"cos.shape: wanted \[positions, 5\]"):
        octavo.Rope(rotary_dim=10, cos=cos, sin=cos)
    for none in (cos[:0], np.ones((4, 0), np.float32)):
        with pytest.raises(octavo.InvalidArgument, match=r"cos.shape: .*both at least 1"):
            octavo.Rope(cos=none, sin=none)
    cache, attention, plan, q, k, v = step()
    with pytest.raises(octavo.InvalidArgument, match="position of a new token"):
        attention.forward(plan, cache, 0, q, k, v, rope=octavo.Rope(cos=cos, sin=cos))


def callers_arguments():
    cache = np.zeros((3, 4, 1, 8), np.float32)
    return {
        "q": np.zeros((2, 1, 8), np.float32),
        "k_cache": cache,
        "v_cache": cache.copy(),
        "kv_lens": [5],
        "page_table": np.array([[0, 2]], np.int32),
    }


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"kv_lens": [9]}, "kv_lens[0]"),
        ({"kv_lens": ["5"]}, "kv_lens[0]"),
        ({"kv_lens": np.array([5.0])}, "kv_lens.dtype"),
        ({"kv_lens": [[5]]}, "kv_lens[0]"),
        ({"token_offsets": [0, 1, 2]}, "token_offsets.shape"),
        ({"token_offsets": [1, 2]}, "token_offsets[0]"),
        ({"page_table": np.array([[0, 3]], np.int32)}, "page_table[0, 1]"),
        ({"page_table": np.array([[0, 2]])}, "page_table.dtype"),
        ({"page_table": np.array([0, 2], np.int32)}, "page_table.shape"),
        ({"row_indices": [1]}, "row_indices[0]"),
        ({"row_indices": [0, 0]}, "row_indices.shape"),
        ({"v_cache": np.zeros((3, 4, 2, 8), np.float32)}, "v_cache.shape"),
        ({"k_cache": np.zeros((3, 4, 8), np.float32)}, "k_cache.rank"),
        ({"k_cache": np.zeros((3, 4, 1, 8), np.float16)}, "v_cache.dtype"),
        ({"q": np.zeros((2, 1, 4), np.float32)}, "k_cache.shape"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_attend_has_its_name(change, argument):
    with pytest.raises(octavo.InvalidArgument) as caught:
        octavo.attend(**{**callers_arguments(), **change})
    assert caught.value.argument == argument


def test_append_wants_a_writable_cache():
    arguments = callers_arguments()
    k = arguments.pop("q")
    arguments["v_cache"].flags.writeable = False
    with pytest.raises(octavo.InvalidArgument, match="v_cache: wanted a writable array"):
        octavo.append_tokens(k, k, **arguments)


def test_merge_wants_pairs_that_fit():
    out, lse = np.zeros((2, 1, 4), np.float32), np.zeros((2, 1), np.float32)
    for partials in ([], 5, [out], [(out, lse), (out[:1], lse)], [(out, lse[:1])]):
        with pytest.raises(octavo.InvalidArgument):
            octavo.merge(partials)


def test_typed_arrays_must_fit_their_dtype(step):
    cache, attention, plan, q, k, v = step()
    with pytest.raises(
        octavo.InvalidArgument, match=r"q.array.dtype: wanted integers that hold bf16"
    ):
        attention.forward(plan, cache, 0, octavo.TypedArray(q, "bf16"), k, v)
    with pytest.raises(octavo.InvalidArgument, match=r"q.array.dtype: wanted 2 bytes"):
        attention.forward(plan, cache, 0, octavo.TypedArray(q.view(np.int32), "bf16"), k, v)
    with pytest.raises(octavo.InvalidArgument, match="names the dtype of bits"):
        attention.forward(plan, cache, 0, q.view(np.uint32), k, v)
