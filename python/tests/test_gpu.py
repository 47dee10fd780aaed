# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors on a GPU; skipped where there is none, or this build has no CUDA part."""

import numpy as np
import pytest

import octavo

torch = pytest.importorskip("torch", reason="PyTorch is not installed", exc_type=ImportError)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")


@pytest.fixture
def make_step(random, make_cache):
    def make(device):
        try:
            cache = make_cache(device=device, dtype="f16")
        except octavo.NotCompiled as error:
            pytest.skip(str(error))
        plan = cache.plan({10: 5, 11: 2})
        cache.begin(plan)
        return cache, octavo.Attention(cache, num_q_heads=4), plan

    return make


@pytest.fixture
def host_tensors(random):
    shapes = [(7, heads, 16) for heads in (4, 2, 2)]
    return [torch.from_numpy(random.standard_normal(s, np.float32)).half() for s in shapes]


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_a_gpu_gives_the_cpus_results(make_step, host_tensors, own_stream):
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


def test_storage_and_gathered_rows_are_on_the_gpu(make_step, host_tensors):
    cache, attention, plan = make_step("cuda")
    _, k, v = (tensor.cuda() for tensor in host_tensors)
    attention.append(plan, cache, 0, k, v)
    keys = torch.from_dlpack(cache.key_storage(0))
    assert torch.equal(keys[cache.page_ids(11)[0], :2], k[5:])
    rows = [torch.empty((2, 5, 2, 16), dtype=torch.half, device="cuda") for _ in range(2)]
    assert cache.gather(plan, 0, k=rows[0], v=rows[1])[0] is rows[0]
    assert torch.equal(rows[1][1, :2], v[5:])


def test_tensors_of_the_host_are_refused(make_step, host_tensors):
    cache, attention, plan = make_step("cuda")
    with pytest.raises(octavo.InvalidArgument, match=r"k.device: wanted cuda:0, got cpu"):
        attention.forward(plan, cache, 0, *host_tensors)
