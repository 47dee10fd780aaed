# SPDX-License-Identifier: Apache-2.0
"""Workspaces, maxima and captured steps: what they refuse everywhere, and what they do on a GPU."""

import sys

import numpy as np
import pytest

import octavo
from calls import plain_call_again
from gpus import torch_on_a_gpu

MAXIMA = octavo.StepMaxima(num_seqs=3, num_tokens=9, max_new_tokens=6, max_kv_len=64)


def has_cuda():
    try:
        octavo.Workspace()
    except octavo.NotCompiled:
        return False
    except octavo.DeviceFailure:
        return True
    return True


def test_a_workspace_is_for_a_gpu():
    with pytest.raises((octavo.NotCompiled, octavo.InvalidArgument), match="device: wanted"):
        octavo.Workspace("cpu")
    with pytest.raises(octavo.InvalidArgument, match="device: wanted 'cpu', 'cuda'"):
        octavo.Workspace("tpu")


def test_without_a_gpu_the_reason_is_said():
    try:
        octavo.Workspace()
    except (octavo.NotCompiled, octavo.DeviceFailure) as error:
        said = error
    else:
        pytest.skip("there is a GPU")
    assert said.argument == "device"
    assert said.hint


def test_a_captured_step_wants_a_cache_on_a_gpu(step):
    cache, attention, plan, q, k, v = step()
    layer = octavo.LayerTensors(q, k, v, np.empty_like(q))
    with pytest.raises((octavo.NotCompiled, octavo.InvalidArgument)) as caught:
        octavo.GraphedStep(attention, cache, octavo.StepMaxima(2, 7, 5, 64), [layer])
    assert caught.value.argument == "cache.device"
    assert isinstance(caught.value, octavo.NotCompiled) != has_cuda()


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"cache": 3}, "cache"),
        ({"maxima": None}, "maxima"),
        ({"maxima": (1, 2, 3)}, "maxima"),
        ({"maxima": (1, 2, 3, -1)}, "maxima.max_kv_len"),
        ({"maxima": (1, 2.5, 3, 4)}, "maxima.num_tokens"),
        ({"layers": [("q",)]}, "layers[0]"),
        ({"layers": [octavo.LayerTensors(1, 2, 3, 4)]}, "q"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_a_captured_step_is_named(step, change, argument):
    cache, attention, plan, q, k, v = step()
    layer = octavo.LayerTensors(q, k, v, np.empty_like(q))
    words = {"attention": attention, "cache": cache, "maxima": MAXIMA, "layers": [layer]}
    with pytest.raises(octavo.InvalidArgument) as caught:
        octavo.GraphedStep(**(words | change))
    assert caught.value.argument == argument


def test_maxima_size_a_call_on_the_cpu_too(step):
    cache, attention, plan, q, k, v = step()
    want, want_lse = attention.forward(plan, cache, 0, q, k, v, lse=True)
    padded = [np.full((9, *x.shape[1:]), np.nan, np.float32) for x in (q, k, v)]
    for wide, x in zip(padded, (q, k, v), strict=True):
        wide[:7] = x
    out, lse = attention.forward(plan, cache, 0, *padded, lse=True, maxima=MAXIMA)
    assert np.array_equal(out[:7], want)
    assert np.array_equal(lse[:7], want_lse)
    assert not out[7:].any()
    assert (lse[7:] == -np.inf).all()
    attention.append(plan, cache, 0, *padded[1:], maxima=MAXIMA)
    again = attention.attend(plan, cache, 0, padded[0], maxima=MAXIMA)
    assert np.array_equal(again, out)


@pytest.mark.parametrize(
    ("maxima", "argument"),
    [
        (octavo.StepMaxima(1, 9, 6, 64), "maxima.num_seqs"),
        (octavo.StepMaxima(3, 9, 4, 64), "maxima.max_new_tokens"),
        (octavo.StepMaxima(3, 9, 6, 4096), "maxima.max_kv_len"),
        ([3, 9, 6, 64], "maxima"),
    ],
    ids=str,
)
def test_a_step_must_lie_within_maxima_that_the_cache_can_hold(step, maxima, argument):
    cache, attention, plan, *_ = step()
    tensors = [np.zeros((9, heads, 16), np.float32) for heads in (4, 2, 2)]
    with pytest.raises(octavo.InvalidArgument) as caught:
        attention.forward(plan, cache, 0, *tensors, maxima=maxima)
    assert caught.value.argument.startswith((argument, "plan"))


class OnGpu:
    @pytest.fixture(autouse=True)
    def torch(self):
        return torch_on_a_gpu()


class Step:
    """Two sequences over a caller's cache in pages of 4, on the CPU and on the GPU."""

    def __init__(self, torch, random, lens=(9, 3), new=(3, 1)):
        def draw(*shape):
            return torch.from_numpy(random.standard_normal(shape, np.float32)).half()

        self.new = sum(new)
        self.tensors = [draw(self.new, heads, 16) for heads in (4, 2, 2)]
        self.pools = [draw(8, 4, 2, 16) for _ in range(2)]
        ends = [0, new[0], self.new]
        table = [[7, 1, 4], [2, 0, 0]]
        self.arrays = {
            "kv_lens": torch.tensor(lens, dtype=torch.int32),
            "token_offsets": torch.tensor(ends, dtype=torch.int32),
            "page_table": torch.tensor(table, dtype=torch.int32),
        }

    def cuda(self):
        self.tensors = [x.cuda() for x in self.tensors]
        self.pools = [x.cuda() for x in self.pools]
        self.arrays = {name: x.cuda() for name, x in self.arrays.items()}
        return self

    def workspace(self, torch):
        space = octavo.Workspace()
        q, *_ = self.tensors
        sizes = space.sizes(q, *self.pools, **self.arrays, lse=True)
        assert 0 < sizes.least <= sizes.good
        space.use(torch.empty(sizes.good, dtype=torch.uint8, device="cuda"))
        return space

    def plan(self, space):
        space.plan(*self.pools, **self.arrays, num_tokens=self.new)

    def run(self, **words):
        q, k, v = self.tensors
        octavo.append_tokens(k, v, *self.pools, **self.arrays, **words)
        return octavo.attend(q, *self.pools, **self.arrays, lse=True, **words)


class TestCallersCacheOnAGpu(OnGpu):
    def test_gives_the_cpus_results(self, torch):
        want = Step(torch, np.random.default_rng(3)).run()
        step = Step(torch, np.random.default_rng(3)).cuda()
        space = step.workspace(torch)
        step.plan(space)
        got = step.run(workspace=space)
        space.check()
        assert space.device == "cuda:0"
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=2e-3, atol=2e-3)

    def test_a_plan_is_needed_and_a_fault_is_named(self, torch):
        step = Step(torch, np.random.default_rng(3)).cuda()
        with pytest.raises(
            octavo.InvalidArgument, match=r"workspace: wanted a Workspace of cuda:0"
        ):
            step.run()
        space = step.workspace(torch)
        with pytest.raises(octavo.InvalidArgument, match="none was planned"):
            step.run(workspace=space)
        step.arrays["page_table"][0, 2] = 8
        step.plan(space)
        out, lse = step.run(workspace=space)
        assert not out[:3].any()
        assert (lse[:3] == -np.inf).all()
        with pytest.raises(octavo.InvalidArgument, match="entry 2 of the page table's row"):
            space.check()

    def test_a_graph_with_its_plan_serves_other_lengths(self, torch):
        step = Step(torch, np.random.default_rng(3)).cuda()
        space = step.workspace(torch)
        words = {"workspace": space}
        step.plan(space)
        step.run(**words)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.plan(space)
            out, lse = step.run(**words)
        other = Step(torch, np.random.default_rng(3), lens=(11, 2), new=(2, 2))
        want, want_lse = other.run()
        for mine, theirs in zip(
            step.pools, Step(torch, np.random.default_rng(3)).pools, strict=True
        ):
            mine.copy_(theirs)
        for name, array in other.arrays.items():
            step.arrays[name].copy_(array)
        graph.replay()
        torch.testing.assert_close(out.cpu(), want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse.cpu(), want_lse, rtol=2e-3, atol=2e-3)

    def test_what_attend_wants_is_checked_before_the_plan(self, torch):
        step = Step(torch, np.random.default_rng(3)).cuda()
        q, *_ = step.tensors
        check = lambda **words: octavo.check_attend(q, *step.pools, **step.arrays, **words)  # noqa: E731
        with pytest.raises(octavo.InvalidArgument, match="workspace: wanted a Workspace"):
            check()
        space = octavo.Workspace()
        with pytest.raises(octavo.InvalidArgument, match="workspace_bytes: wanted at least"):
            check(workspace=space)
        sizes = space.sizes(q, *step.pools, **step.arrays)
        space.use(torch.empty(sizes.least, dtype=torch.uint8, device="cuda"))
        check(workspace=space)
        with pytest.raises(octavo.InvalidArgument, match="softcap"):
            check(workspace=space, softcap=-1.0)
        with pytest.raises(octavo.Unsupported, match="cpu"):
            check(workspace=space, backend="cpu")

    @pytest.mark.parametrize("appends", [False, True])
    def test_a_call_that_fails_keeps_the_arrays_that_it_planned(self, torch, appends):
        """Else other ones that come to lie at their places would pass for planned. One that was to
        append fails before its plan.
        """
        step = Step(torch, np.random.default_rng(3)).cuda()
        q, k, v = step.tensors
        space = step.workspace(torch)
        call = plain_call_again(space, "thd")
        ends, table = step.arrays["token_offsets"], step.arrays["page_table"]
        if appends:
            call.append_too("thd", ends, 0, 0, True)
        lens = step.arrays["kv_lens"].clone()
        before = sys.getrefcount(lens)
        new = {"new_k": k, "new_v": v} if appends else {}
        out = torch.empty_like(q, dtype=torch.int32)
        keys = [pool.clone() for pool in step.pools]
        with pytest.raises(octavo.InvalidArgument, match=r"out\.dtype"):
            call.run(q, *step.pools, lens, ends, table, None, out, None, None, None, **new)
        assert sys.getrefcount(lens) == before + (0 if appends else 1)
        for pool, key in zip(step.pools, keys, strict=True):
            assert torch.equal(pool, key)


class TestCapturedStepsOnAGpu(OnGpu):
    def test_replays_other_steps(self, torch, make_cache):
        random = np.random.default_rng(5)
        caches = [make_cache(device=device, dtype="f16") for device in ("cpu", "cuda")]
        attentions = [octavo.Attention(cache, num_q_heads=4) for cache in caches]
        shapes = [(9, heads, 16) for heads in (4, 2, 2)]
        q, k, v = (torch.zeros(s, dtype=torch.half, device="cuda") for s in shapes)
        out = torch.full_like(q, 7.0)
        lse = torch.empty((9, 4), device="cuda")
        graph = octavo.GraphedStep(
            attentions[1], caches[1], MAXIMA, [octavo.LayerTensors(q, k, v, out, lse)]
        )
        assert graph.maxima == MAXIMA
        assert graph.backend in ("flash2", "unfused")
        for sequences in ({1: 5, 2: 2}, {2: 1, 1: 1}, {3: 6, 2: 1, 1: 2}):
            plans = [cache.plan(sequences) for cache in caches]
            for cache, plan in zip(caches, plans, strict=True):
                cache.begin(plan)
            hosts = [torch.from_numpy(random.standard_normal(s, np.float32)).half() for s in shapes]
            for mine, host in zip((q, k, v), hosts, strict=True):
                mine.copy_(host)
            graph.replay(plans[1])
            n = plans[0].num_tokens
            want, want_lse = attentions[0].forward(
                plans[0], caches[0], 0, *(x[:n] for x in hosts), lse=True
            )
            torch.testing.assert_close(out[:n].cpu(), want, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(lse[:n].cpu(), want_lse, rtol=2e-3, atol=2e-3)
            assert not out[n:].any()
            assert (lse[n:] == -np.inf).all()

    def test_a_step_beyond_the_maxima_is_refused(self, torch, make_cache):
        cache = make_cache(device="cuda", dtype="f16")
        q, k, v = (torch.zeros((9, h, 16), dtype=torch.half, device="cuda") for h in (4, 2, 2))
        attention = octavo.Attention(cache, num_q_heads=4)
        layers = [octavo.LayerTensors(q, k, v, torch.empty_like(q))]
        graph = octavo.GraphedStep(attention, cache, MAXIMA, layers)
        plan = cache.plan({1: 7})
        cache.begin(plan)
        with pytest.raises(octavo.InvalidArgument, match="max_new_tokens"):
            graph.replay(plan)
