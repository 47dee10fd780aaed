# SPDX-License-Identifier: Apache-2.0
"""make_graphed_callables on a GPU: captured modules over arrivals of sequences."""

from __future__ import annotations

import numpy as np
import pytest
from arrivals import DIM, GROUPS, HEADS, Stream, make_module, make_params
from definition import attention, check_close, weighed
from gpu_frames import cuda

from octavo.compat import transformer_engine as engine

STEPS = [{5: 3, 2: 1}, {2: 1, 5: 2, 9: 4}, {9: 1}, {2: 4, 9: 1, 7: 2}]


@pytest.fixture
def frame():
    return cuda()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd"])
def test_captured_layers_serve_other_steps(frame, monkeypatch, dtype, paged, fmt):
    torch = frame.torch
    params = make_params(frame, dtype, paged=paged, qkv_format=fmt)
    modules = tuple(make_module(fmt, layer_number=i) for i in (1, 2))
    streams = [Stream(frame, dtype, seed) for seed in (1, 2)]
    for layer in (1, 2):
        params.allocate_memory(layer)
    params.pre_step(STEPS[0])
    shape = {"batch": 3, "longest": 4}
    samples = tuple(Stream(frame, dtype, 3).arrays(STEPS[0], fmt, **shape) for _ in modules)
    words = ({"inference_params": params},) * 2
    engine.make_graphed_callables(modules, samples, sample_kwargs=words)
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph)
    )
    for i, step in enumerate(STEPS):
        if i:
            params.pre_step(step)
        for module, stream in zip(modules, streams, strict=True):
            for gone in [s for s in stream.past if s not in step]:
                del stream.past[gone]
            arrays = stream.arrays(step, fmt, **shape)
            stream.check(module(*arrays, inference_params=params), step, fmt)
    assert len(replays) == len(STEPS) * len(modules)


def test_a_step_beyond_the_capture_runs_eagerly(frame):
    params, stream, module = make_params(frame, "f16"), Stream(frame, "f16", 1), make_module()
    params.allocate_memory(1)
    params.pre_step({5: 2})
    sample = Stream(frame, "f16", 3).arrays({5: 2}, "bshd")
    engine.make_graphed_callables(module, sample, sample_kwargs={"inference_params": params})
    for i, step in enumerate(({5: 2}, {5: 9}, {5: 1})):
        if i:
            params.pre_step(step)
        out = module(*stream.arrays(step, "bshd", longest=2), inference_params=params)
        stream.check(out, step, "bshd")


def test_lengths_without_a_cache_are_read_where_the_capture_read_them(frame):
    r = np.random.default_rng(2)
    q, k, v = (
        frame.make(r.standard_normal((2, 6, h, DIM)), "f16") for h in (HEADS, GROUPS, GROUPS)
    )
    module = make_module("bshd", "padding")

    def check(out, lens):
        for b, n in enumerate(lens):
            arrays = [frame.read(x)[b, :n] for x in (q, k, v)]
            want = attention(*arrays)[0].reshape(n, -1)
            mean = weighed(*arrays).reshape(n, -1)
            check_close(frame.read(out)[b, :n], want, "f16", 4.0, f"{lens}: {b}", "f16", mean)
            assert not frame.read(out)[b, n:].any()

    ends = frame.ints([0, 6, 9])
    words = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    engine.make_graphed_callables(module, (q, k, v), sample_kwargs=words)
    check(module(q, k, v, **words), (6, 3))
    ends.copy_(frame.ints([0, 2, 7]))
    check(module(q, k, v, **words), (2, 5))
    others = frame.ints([0, 1, 5])
    check(module(q, k, v, cu_seqlens_q=others, cu_seqlens_kv=others), (1, 4))
