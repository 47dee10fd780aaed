# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors on a GPU: Octavo's own cache there, its storage, its operators."""

import numpy as np
import pytest

import octavo
from gpus import torch_on_a_gpu


@pytest.fixture(autouse=True)
def torch():
    return torch_on_a_gpu()


@pytest.fixture
def host_tensors(torch, random):
    shapes = [(7, heads, 16) for heads in (4, 2, 2)]
    return [torch.from_numpy(random.standard_normal(s, np.float32)).half() for s in shapes]


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_a_gpu_gives_the_cpus_results(torch, make_step, host_tensors, own_stream):
    cache, attention, plan = make_step("cpu")
    wanted, wanted_lse = attention.forward(plan, cache, 0, *host_tensors, lse=True)
    cache, attention, plan = make_step("cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        tensors = [tensor.cuda() for tensor in host_tensors]
        out, lse = attention.forward(plan, cache, 0, *tensors, lse=True, rope=None)
        # Enqueued behind the call on the same stream: no other synchronisation is needed.
        got, got_lse = out.cpu(), lse.cpu()
    assert out.device.type == lse.device.type == "cuda"
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(got_lse, wanted_lse, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("wrong", [-1, 2**64, "main"])
def test_a_stream_that_is_none_is_named(make_step, host_tensors, wrong):
    cache, attention, plan = make_step("cuda")
    tensors = [tensor.cuda() for tensor in host_tensors]
    with pytest.raises(octavo.InvalidArgument, match="stream: wanted"):
        attention.forward(plan, cache, 0, *tensors, stream=wrong)


def test_storage_and_gathered_rows_are_on_the_gpu(torch, make_step, host_tensors):
    cache, attention, plan = make_step("cuda")
    _, k, v = (tensor.cuda() for tensor in host_tensors)
    attention.append(plan, cache, 0, k, v)
    keys = torch.from_dlpack(cache.key_storage(0))
    assert torch.equal(keys[cache.page_ids(11)[0], :2], k[5:])
    rows = [torch.empty((2, 5, 2, 16), dtype=torch.half, device="cuda") for _ in range(2)]
    assert cache.gather(plan, 0, k=rows[0], v=rows[1])[0] is rows[0]
    assert torch.equal(rows[1][1, :2], v[5:])
    with pytest.raises(octavo.InvalidArgument, match=r"v: wanted an array on cuda:0, got None"):
        cache.gather(plan, 0, k=rows[0])


def test_storage_is_taken_as_a_callers_cache(torch, make_step, host_tensors):
    cache, attention, plan = make_step("cuda")
    _, k, v = (tensor.cuda() for tensor in host_tensors)
    attention.append(plan, cache, 0, k, v)
    table = torch.zeros((2, 2), dtype=torch.int32, device="cuda")
    for row, sequence in enumerate((10, 11)):
        pages = cache.page_ids(sequence)
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    lens = torch.tensor([5, 2], dtype=torch.int32, device="cuda")
    rows = [torch.empty((2, 5, 2, 16), dtype=torch.half, device="cuda") for _ in range(2)]
    octavo.gather_cache(
        cache.key_storage(0),
        cache.value_storage(0),
        lens,
        page_table=table,
        k=rows[0],
        v=rows[1],
        longest=5,
    )
    assert torch.equal(rows[0][0], k[:5])
    assert torch.equal(rows[1][1, :2], v[5:])
    assert not rows[1][1, 2:].any()


@pytest.mark.parametrize("tokens", [0, 3], ids=["no token", "no sequence"])
def test_empty_arrays_are_no_other_memory(torch, tokens):
    """PyTorch's empty tensors have no address, and None is something else than an empty array."""

    def ints(*shape):
        return torch.zeros(shape, dtype=torch.int32, device="cuda")

    num_seqs = 0 if tokens else 2
    q, out = (torch.ones((tokens, 2, 16), dtype=torch.half, device="cuda") for _ in range(2))
    cache = torch.ones((4, 16, 2, 16), dtype=torch.half, device="cuda")
    where = {
        "token_offsets": ints(num_seqs + 1),
        "page_table": ints(num_seqs, 2),
        "row_indices": ints(num_seqs),
    }
    rope = {"rope": octavo.Rope("half"), "positions": ints(tokens)}
    space = octavo.Workspace()
    lens = ints(num_seqs)
    sizes = space.sizes(q, cache, cache, lens, **where, **rope, out=out)
    space.use(torch.empty(max(sizes.good, 256), dtype=torch.uint8, device="cuda"))
    space.plan(cache, cache, lens, **where, num_tokens=tokens)
    octavo.append_tokens(q, q, cache, cache, lens, **where, **rope, workspace=space)
    octavo.attend(q, cache, cache, lens, **where, **rope, out=out, workspace=space)
    space.check()
    assert not out.any(), "a row of no sequence"
    assert (cache == 1).all()


def test_tensors_of_the_host_are_refused(make_step, host_tensors):
    cache, attention, plan = make_step("cuda")
    with pytest.raises(octavo.InvalidArgument, match=r"k.device: wanted cuda:0, got cpu"):
        attention.forward(plan, cache, 0, *host_tensors)


def test_a_session_serves_compiled_layers(torch, make_cache, random):
    from octavo import torch as operators

    cache = make_cache(device="cuda", dtype="f16")
    attention = octavo.Attention(cache, num_q_heads=4)
    session = operators.Session(attention, cache)
    compiled = torch.compile(session.forward, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (7, 3, 1):
        plan = cache.plan({20: count})
        session.begin(plan)
        q, k, v = (
            torch.from_numpy(random.standard_normal((count, heads, 16), np.float32)).half().cuda()
            for heads in (4, 2, 2)
        )
        assert torch.equal(compiled(0, q, k, v), attention.attend(plan, cache, 0, q))


def test_caches_and_workspaces_give_their_memory_back(torch, make_cache):
    def use():
        cache = make_cache(device="cuda", dtype="f16", max_seq_len=1 << 16, page_size=64)
        plan = cache.plan({1: 3})
        cache.begin(plan)
        q, k, v = (torch.ones((3, h, 16), dtype=torch.half, device="cuda") for h in (4, 2, 2))
        octavo.Attention(cache, num_q_heads=4).forward(plan, cache, 0, q, k, v)
        octavo.Workspace()

    use()
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    for _ in range(50):
        use()
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    # A cache holds 16 MiB: more than two of fifty are not kept.
    assert before - after < 48 << 20
