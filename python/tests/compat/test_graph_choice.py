# SPDX-License-Identifier: Apache-2.0
"""When a captured call is replayed and when it runs eagerly, with a stand-in for PyTorch's graphs.

What a GPU computes is not tested here: only which way a call takes.
"""

from __future__ import annotations

import contextlib
import types

import numpy as np
import pytest

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
        self.eager = 0

    def forward(self, *inputs, **kwargs):
        self.eager += 1
        return Tensor(1)


@pytest.fixture
def capture(monkeypatch):
    """(module, params, inputs) captured after pre_step({1: 2, 2: 2})."""
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
    params = engine.InferenceParams(2, 16, 1, 8, np.float32)
    params.pre_step({1: 2, 2: 2})
    module, inputs = Module(), [Tensor(2, 2, 1, 8) for _ in range(3)]
    graphed = engine.make_graphed_callables(
        module, inputs, num_warmup_iters=2, sample_kwargs={"inference_params": params}
    )
    assert graphed is module
    assert module.eager == 3, "two calls to warm up, one to capture"
    return module, params, inputs


def test_the_samples_step_is_replayed(capture):
    module, params, inputs = capture
    params.reset()
    params.pre_step({7: 2, 5: 2})
    module.forward(*inputs, inference_params=params, max_seqlen_q=2)
    assert (Graph.replays, module.eager) == (1, 3)


@pytest.mark.parametrize(
    "change", ["lengths", "shape", "dtype", "option", "training", "parameters", "none"]
)
def test_any_other_call_runs_eagerly(capture, change):
    module, params, inputs = capture
    options = {"inference_params": params}
    if change == "lengths":
        params.pre_step({1: 2, 2: 2})
    elif change == "shape":
        inputs = [Tensor(2, 3, 1, 8)] * 3
    elif change == "dtype":
        inputs = [Tensor(2, 2, 1, 8, dtype="float32")] * 3
    elif change == "option":
        options["window_size"] = (1, 0)
    elif change == "training":
        module.training = True
    elif change == "parameters":
        options["inference_params"] = engine.InferenceParams(2, 16, 1, 8, np.float32)
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
