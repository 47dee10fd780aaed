# SPDX-License-Identifier: Apache-2.0
"""Case files through the Python API on a GPU: Octavo's own cache, eager and captured."""

import numpy as np
import pytest

import octavo
from case_files import case_paths, check_step, read_case
from gpus import torch_on_a_gpu
from test_cases import UNMET, prepare

PATHS = [
    path
    for path in case_paths()
    if path.stem not in UNMET and read_case(path).about["compute"] != "fp8"
]


@pytest.fixture(autouse=True)
def torch():
    return torch_on_a_gpu()


def to_gpu(torch, array):
    if array is None:
        return None
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array.view(np.int16))).view(torch.bfloat16).cuda()
    return torch.from_numpy(np.array(array)).cuda()


def to_host(x):
    return x.float().cpu().numpy()


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_case_gives_its_answers(torch, path):
    case = read_case(path)
    cache = case.make_cache(device="cuda")
    attention = octavo.Attention(cache, num_q_heads=case.num_q_heads, **case.attention_words)
    for i, step in enumerate(case.steps):
        plan = prepare(cache, step)
        q, k, v = (to_gpu(torch, case.tensors[f"step{i}.{x}"]) for x in "qkv")
        out, lse = attention.forward(
            plan,
            cache,
            0,
            q,
            k,
            v,
            format=case.format,
            lse=True,
            sinks=to_gpu(torch, case.tensors.get("sinks")),
            alibi_slopes=to_gpu(torch, case.tensors.get("alibi_slopes")),
        )
        check_step(case, i, to_host(out), to_host(lse))
    cache.audit()


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_case_gives_its_answers_in_a_capture(torch, path):
    """Each step's layer captured with maxima of its own, then replayed."""
    case = read_case(path)
    cache = case.make_cache(device="cuda")
    attention = octavo.Attention(cache, num_q_heads=case.num_q_heads, **case.attention_words)
    for i, step in enumerate(case.steps):
        plan = prepare(cache, step)
        if not plan.num_tokens:
            continue
        q, k, v = (to_gpu(torch, case.tensors[f"step{i}.{x}"]) for x in "qkv")
        out = torch.full((*q.shape[:-1], v.shape[-1]), 7.0, dtype=q.dtype, device="cuda")
        lse = torch.empty((plan.num_tokens, case.num_q_heads), device="cuda")
        layer = octavo.LayerTensors(
            q,
            k,
            v,
            out,
            lse,
            format=case.format,
            sinks=to_gpu(torch, case.tensors.get("sinks")),
            alibi_slopes=to_gpu(torch, case.tensors.get("alibi_slopes")),
        )
        longest = int(np.diff(plan.token_offsets).max())
        if case.format != "thd":
            longest = max(q.shape[0] if case.format == "sbhd" else q.shape[1], longest)
        maxima = octavo.StepMaxima(len(plan.ids), plan.num_tokens, longest, int(plan.kv_lens.max()))
        octavo.GraphedStep(attention, cache, maxima, [layer]).replay(plan)
        check_step(case, i, to_host(out), to_host(lse))
