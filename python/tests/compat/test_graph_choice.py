# SPDX-License-Identifier: Apache-2.0
"""When a captured call is replayed and when it runs eagerly, with a stand-in for PyTorch's graphs.

What a GPU computes is not tested here: only which way a call takes.
"""

from __future__ import annotations

import contextlib
import types

import gpu_frames
import numpy as np
import pytest

import octavo
from octavo.compat import transformer_engine as engine
from octavo.compat.transformer_engine import _backend, _graph


class Tensor:
    """As much of a tensor on a GPU as a capture looks at."""

    is_cuda = True

    def __init__(self, *shape, dtype="float16"):
        self.shape, self.dtype, self.copied = shape, dtype, None

    def detach(self):
        return self

    def clone(self):
        return Tensor(*self.shape, dtype=self.dtype)

    def copy_(self, other):
        self.copied = other


class Graph:
    replays = 0

    def replay(self):
        Graph.replays += 1


class Module:
    training = False

    def __init__(self):
        self.eager, self.maxima = 0, []

    def forward(self, *inputs, inference_params=None, **kwargs):
        self.eager += 1
        if inference_params is not None:
            self.maxima.append(inference_params._maxima_of(inputs[0].shape, "bshd"))
        return Tensor(1)


@pytest.fixture
def capture(monkeypatch):
    """(module, params, inputs) captured after pre_step({1: 2, 2: 1})."""
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    cuda = types.SimpleNamespace(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda s: contextlib.nullcontext(),
        graph=lambda graph, pool: contextlib.nullcontext(),
        CUDAGraph=Graph,
    )
    stand_in = types.SimpleNamespace(Tensor=Tensor, no_grad=contextlib.nullcontext, cuda=cuda)
    monkeypatch.setattr(_graph, "torch", stand_in)
    monkeypatch.setattr(Graph, "replays", 0)
    params = engine.InferenceParams(4, 16, 1, 8, np.float32)
    params.pre_step({1: 2, 2: 1})
    module, inputs = Module(), [Tensor(2, 2, 1, 8) for _ in range(3)]
    graphed = engine.make_graphed_callables(
        module, inputs, num_warmup_iters=2, sample_kwargs={"inference_params": params}
    )
    assert graphed is module
    assert module.eager == 3, "two calls to warm up, one to capture"
    return module, params, inputs


def test_a_capture_is_sized_by_its_tensors(capture):
    module, params, _ = capture
    assert module.maxima == [octavo.StepMaxima(2, 4, 2, 16)] * 3
    params.pre_step({1: 1})
    module.forward(Tensor(2, 3, 1, 8), inference_params=params)
    assert module.maxima[-1] is None, "the step's own sizes, outside of the capture"


@pytest.mark.parametrize("step", [{7: 2, 5: 2}, {1: 1, 2: 2}, {2: 1}, {}], ids=str)
def test_steps_within_the_maxima_are_replayed(capture, step):
    module, params, inputs = capture
    params.pre_step(step)
    module.forward(*inputs, inference_params=params, max_seqlen_q=2)
    assert (Graph.replays, module.eager) == (1, 3)


@pytest.mark.parametrize(
    "change", ["tokens", "sequences", "shape", "dtype", "option", "training", "parameters", "none"]
)
def test_any_other_call_runs_eagerly(capture, change):
    module, params, inputs = capture
    options = {"inference_params": params}
    if change == "tokens":
        params.pre_step({1: 3})
    elif change == "sequences":
        params.pre_step({1: 1, 2: 1, 3: 1})
    elif change == "shape":
        inputs = [Tensor(2, 3, 1, 8)] * 3
    elif change == "dtype":
        inputs = [Tensor(2, 2, 1, 8, dtype="float32")] * 3
    elif change == "option":
        options["window_size"] = (1, 0)
    elif change == "training":
        module.training = True
    elif change == "parameters":
        options["inference_params"] = engine.InferenceParams(4, 16, 1, 8, np.float32)
    else:
        options = {}
    module.forward(*inputs, **options)
    assert (Graph.replays, module.eager) == (0, 4)


@pytest.mark.parametrize(
    ("values", "on_gpu", "names"),
    [
        ((None,) * 5, True, ["auto"]),
        (("1", "1", "1", None, None), False, ["auto"]),
        (("1", "0", "0", None, None), True, ["flash3", "flash2"]),
        (("1", "0", "0", "0", None), True, ["flash3"]),
        (("1", "0", "1", None, "0"), True, ["flash2", "unfused"]),
        (("0", "1", "0", None, None), True, ["fused"]),
        (("0", "1", "1", None, None), True, ["fused", "unfused"]),
        (("1", "0", "0", None, None), False, ["cpu"]),
        (("0", "0", "1", None, None), False, ["unfused"]),
        (("0", "0", "0", None, None), False, []),
    ],
)
def test_environment_variables_leave_these_backends(values, on_gpu, names):
    assert _backend.allowed(values, on_gpu) == names


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
def test_calls_sized_by_maxima_give_the_same(qkv_format):
    """On the CPU, which takes maxima, too: what a capture enqueues is right for other steps."""
    random = np.random.default_rng(2)
    sizes = (4, 32, 2, 16, np.float32)
    max_ctx_len = {"qkv_format": qkv_format, "max_ctx_len": 16}
    pair = [engine.InferenceParams(*sizes, is_paged=True, page_size=4, **max_ctx_len) for _ in "ab"]
    module = engine.DotProductAttention(
        4, 16, num_gqa_groups=2, qkv_format=qkv_format, attn_mask_type="padding_causal"
    )
    for params in pair:
        params.allocate_memory(1)
    pair[1]._capture = maxima = set()
    for step in ({1: 3, 2: 3}, {1: 2, 2: 3}, {2: 1, 3: 3}):
        shape = {"thd": (6,), "bshd": (2, 3), "sbhd": (3, 2)}[qkv_format]
        tensors = [random.standard_normal((*shape, h, 16), np.float32) for h in (4, 2, 2)]
        outs = []
        for params in pair:
            params.pre_step(step)
            outs.append(module(*tensors, inference_params=params))
        assert np.array_equal(*outs)
    num_seqs = 4 if qkv_format == "thd" else 2
    assert maxima == {octavo.StepMaxima(num_seqs, 6, 6 if qkv_format == "thd" else 3, 32)}


def test_a_captured_module_serves_other_steps():
    frame = gpu_frames.cuda()
    torch = frame.torch
    random = np.random.default_rng(4)
    pair, modules = [], []
    for _ in range(2):
        params = engine.InferenceParams(
            4, 32, 2, 16, torch.float16, is_paged=True, page_size=4, max_ctx_len=16
        )
        params.allocate_memory(1)
        pair.append(params)
        modules.append(
            engine.DotProductAttention(
                4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="padding_causal"
            ).eval()
        )

    def draw():
        return [frame.make(random.standard_normal((2, 3, h, 16)), "f16") for h in (4, 2, 2)]

    pair[0].pre_step({1: 3, 2: 1})
    graphed = engine.make_graphed_callables(
        modules[0], draw(), sample_kwargs={"inference_params": pair[0]}
    )
    for step in ({1: 3, 2: 2}, {2: 3, 1: 1}, {2: 1, 3: 3}):
        tensors = draw()
        outs = []
        for module, params in zip((graphed, modules[1]), pair, strict=True):
            if step == {1: 3, 2: 2}:
                params.reset()
            params.pre_step(step)
            outs.append(frame.read(module(*tensors, inference_params=params)))
        np.testing.assert_allclose(*outs, rtol=2e-3, atol=2e-3)
