# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors, on the CPU, and the calls as operators of torch.compile."""

import numpy as np
import pytest

import octavo
from octavo import _native

torch = pytest.importorskip("torch", reason="PyTorch is not installed", exc_type=ImportError)


@pytest.fixture
def tensors(step):
    cache, attention, plan, *arrays = step()
    return cache, attention, plan, *(torch.from_numpy(x) for x in arrays)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_the_library_sees_the_tensors_own_memory(dtype):
    tensor = torch.zeros((4, 6), dtype=dtype)[1:, ::2]
    pointer, name, shape, strides, device, read_only = _native._describe(tensor)
    assert pointer == tensor.data_ptr()
    assert (shape, strides) == (tuple(tensor.shape), tensor.stride())
    assert (device, read_only) == ("cpu", False)
    wanted = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    assert name == wanted.get(dtype, "i32")


def test_a_pending_negation_is_refused():
    complex_numbers = torch.view_as_complex(torch.ones((2, 3, 8, 2)))
    assert _native._describe(complex_numbers.imag)[3] == (48, 16, 2)
    with pytest.raises(octavo.InvalidArgument, match="negation pending"):
        _native._describe(complex_numbers.conj().imag)


def test_tensors_in_tensors_out(tensors):
    cache, attention, plan, q, k, v = tensors
    wanted, wanted_lse = attention.forward(
        plan, cache, 0, q.numpy(), k.numpy(), v.numpy(), lse=True
    )
    out, lse = attention.forward(plan, cache, 0, q, k, v, lse=True)
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    np.testing.assert_array_equal(out.numpy(), wanted)
    np.testing.assert_array_equal(lse.numpy(), wanted_lse)
    mine = torch.empty_like(q)
    assert attention.attend(plan, cache, 0, q, out=mine) is mine
    assert torch.equal(mine, out)


def test_bfloat16_tensors_stay_bfloat16(step):
    cache, attention, plan, *arrays = step(dtype="bf16")
    q, k, v = (torch.from_numpy(x).bfloat16() for x in arrays)
    out = attention.forward(plan, cache, 0, q, k, v)
    assert out.dtype == torch.bfloat16
    exact = attention.attend(plan, cache, 0, q, out=torch.empty(q.shape))
    assert torch.equal(out, exact.bfloat16())


def test_a_cache_over_tensors(random):
    keys, values = torch.zeros((2, 1, 8, 4, 2, 16))
    cache = octavo.KvCache(
        num_kv_heads=2,
        head_dim=16,
        max_num_seqs=2,
        max_seq_len=16,
        page_size=4,
        keys=keys,
        values=values,
    )
    plan = cache.plan({1: 3})
    cache.begin(plan)
    k, v = torch.from_numpy(random.standard_normal((2, 3, 2, 16), np.float32))
    octavo.Attention(cache, num_q_heads=2).append(plan, cache, 0, k, v)
    assert torch.equal(keys[0, cache.page_ids(1)[0], :3], k)


class Graphs:
    """A backend of torch.compile that keeps what it was given."""

    def __init__(self):
        self.operators = []

    def __call__(self, graph, _inputs):
        self.operators += [
            str(node.target) for node in graph.graph.nodes if "octavo" in str(node.target)
        ]
        return graph.forward


def callers_step(random, num_tokens):
    caches = torch.zeros((2, 4, 4, 1, 8))
    new = torch.from_numpy(random.standard_normal((3, num_tokens, 1, 8), np.float32))
    where = {
        "kv_lens": torch.tensor([num_tokens], dtype=torch.int32),
        "token_offsets": torch.tensor([0, num_tokens], dtype=torch.int32),
        "page_table": torch.tensor([[2, 0]], dtype=torch.int32),
    }
    return caches, new, where


def test_each_call_is_one_node_of_a_compiled_graph(random):
    from octavo import torch as operators

    def layer(q, k, v, k_cache, v_cache, where):
        operators.append_tokens(k, v, k_cache, v_cache, **where, rope_style="half")
        return operators.attend(q * 1.0, k_cache, v_cache, **where, rope_style="half") + 1.0

    graphs = Graphs()
    compiled = torch.compile(layer, backend=graphs, fullgraph=True)
    (k_cache, v_cache), (q, k, v), where = callers_step(random, 5)
    out = compiled(q, k, v, k_cache, v_cache, where)
    assert sorted(graphs.operators) == ["octavo.append_tokens", "octavo.attend"]

    again_k, again_v = torch.zeros((2, 4, 4, 1, 8))
    octavo.append_tokens(k, v, again_k, again_v, **where, rope=octavo.Rope())
    wanted = octavo.attend(q, again_k, again_v, **where, rope=octavo.Rope()) + 1.0
    assert torch.equal(out, wanted)
    assert torch.equal(k_cache, again_k)


def test_operators_hold_to_pytorchs_own_rules(random):
    from octavo import torch as operators  # noqa: F401

    (k_cache, v_cache), (q, k, v), where = callers_step(random, 3)
    lens, offsets, table = where.values()
    rope = ["", 0, 1e4, None, None]
    append = [k, v, k_cache, v_cache, lens, offsets, table, None, None, *rope, "thd", 1]
    torch.library.opcheck(torch.ops.octavo.append_tokens, tuple(append))
    words = ["thd", None, "causal", -1, -1, 0.0, "auto", "same", False, 1]
    attend = [q, k_cache, v_cache, lens, offsets, table, *[None] * 4, *rope, *words]
    torch.library.opcheck(torch.ops.octavo.attend, tuple(attend))


def test_a_session_serves_compiled_layers_step_after_step(step, random):
    from octavo import torch as operators

    cache, attention, plan, *_ = step()
    session = operators.Session(attention, cache)
    with pytest.raises(octavo.InvalidArgument, match="session: wanted a begun step"):
        session.forward(0, *(torch.zeros((7, heads, 16)) for heads in (4, 2, 2)))
    graphs = Graphs()
    compiled = torch.compile(session.forward, backend=graphs, fullgraph=True, dynamic=True)
    for count in (7, 3, 5):
        plan = cache.plan({20: count})
        session.begin(plan)
        q, k, v = (
            torch.from_numpy(random.standard_normal((count, heads, 16), np.float32))
            for heads in (4, 2, 2)
        )
        out = compiled(0, q, k, v)
        assert torch.equal(out, attention.attend(plan, cache, 0, q))
    assert graphs.operators == ["octavo.forward"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_layer_whose_answer_nobody_uses_is_appended_all_the_same(step, mode):
    from octavo import torch as operators

    cache, attention, *_ = step()
    with torch.inference_mode():
        session = operators.Session(attention, cache)

    def layer(q, k, v):
        session.forward(0, q, k, v)
        return q + 1.0

    plan = cache.plan({20: 3})
    session.begin(plan)
    q, k, v = (torch.ones((3, heads, 16)) for heads in (4, 2, 2))
    with mode():
        torch.compile(layer, backend="aot_eager", fullgraph=True)(q, k, v)
    (page,) = cache.page_ids(20)
    assert (cache.key_storage(0)[page, :3] == 1).all()
    state = session._state
    torch.library.opcheck(
        torch.ops.octavo.forward, (state, session._number, 0, q, k, v, "thd", None, None, None)
    )


def test_gradients_are_refused_by_operators(random):
    from octavo import torch as operators

    (k_cache, v_cache), (q, _, _), where = callers_step(random, 2)
    with pytest.raises(octavo.Unsupported, match="gradients"):
        operators.attend(q.requires_grad_(), k_cache, v_cache, **where)
    with torch.no_grad():
        operators.attend(q, k_cache, v_cache, **where)


def test_subclasses_of_tensors_are_tensors(tensors):
    cache, attention, plan, q, k, v = tensors
    parameters = [torch.nn.Parameter(x, requires_grad=False) for x in (q, k, v)]
    out = attention.forward(plan, cache, 0, *parameters)
    assert torch.equal(out, attention.attend(plan, cache, 0, q))


def test_a_signature_tells_what_is_not_alike_apart():
    x = torch.zeros((4, 6), dtype=torch.int32)
    alike = torch.ones((4, 6), dtype=torch.int32)
    others = [x.t(), x[:2], x[:, ::2], x.float(), x.long(), x.flatten(), x.numpy(), None]
    assert _native._signature(x, None) == _native._signature(alike, None)
    assert len({_native._signature(x, y) for y in [x, *others]}) == 1 + len(others)
    assert _native._signature(x, None) != _native._signature(None, x)
    assert _native._signature(x, x) != _native._signature(x)
    for wrong in ([1, 2], 3, "x"):
        with pytest.raises(octavo.InvalidArgument):
            _native._signature(x, wrong)


def test_calls_are_known_again_by_their_words_and_tensors():
    kind = _native._kind_of_call
    x, words = torch.zeros((4, 6)), ("call", 1, 0.5, True, None)
    assert kind(words, x, None) == kind(words, torch.ones((4, 6)), None)
    others = [("calls", *words[1:]), ("call", 2, *words[2:]), ("call", True, *words[2:]), words[:4]]
    assert len({kind(w, x) for w in [words, *others]}) == 1 + len(others)
    assert kind((words, x)) == kind((words, torch.ones((4, 6)))) != kind(words, x)
    assert kind("ab", "c") != kind("a", "bc")
    assert kind("a") != kind("a\0")
    for unknown in (2**70, np.float32(0.5), [1], "\ud800", x.numpy(), x.clone().requires_grad_()):
        assert kind((unknown,), x) is None
        assert kind(words, unknown) is None
