# SPDX-License-Identifier: Apache-2.0
"""make_graphed_callables: forward steps of modules in inference, captured in CUDA graphs."""

from __future__ import annotations

import contextlib

from .._arrays import not_covered
from .._blame import names_arguments
from ._params import InferenceParams
from ._torch import torch
from ._wanted import GRAPHED


@names_arguments(**GRAPHED)
def make_graphed_callables(
    modules,
    sample_args,
    num_warmup_iters=3,
    allow_unused_input=False,
    sample_kwargs=None,
    fp8_enabled=False,
    fp8_calibrating=False,
    fp8_recipe=None,
    fp8_group=None,
    fp8_weight_caching=False,
    _order=None,
    pool=None,
    retain_graph_in_backward=False,
    enabled=None,
    calibrating=None,
    recipe=None,
    amax_reduction_group=None,
    cache_quantized_params=None,
):
    """The modules, each with its forward pass captured for arguments like sample_args.

    One module and its arguments, or tuples of both. All must be in inference. A captured call is
    replayed when the tensors' shapes are the sample's and the step of inference_params lies within
    the maxima: as many sequences and tokens as the tensors hold, and max_sequence_length. Lengths,
    pages and ids may be others at each replay. Any other call runs as before.
    """
    for name, value in (
        ("fp8_enabled", fp8_enabled or enabled),
        ("fp8_calibrating", fp8_calibrating or calibrating),
        ("fp8_group", fp8_group),
        ("fp8_weight_caching", fp8_weight_caching or cache_quantized_params),
        ("_order", _order),
        ("retain_graph_in_backward", retain_graph_in_backward),
        ("amax_reduction_group", amax_reduction_group),
    ):
        if value:
            raise not_covered(name)
    single = not isinstance(modules, (tuple, list))
    all_modules = (modules,) if single else tuple(modules)
    all_args = (tuple(sample_args),) if single else tuple(tuple(a) for a in sample_args)
    all_kwargs = ({} if sample_kwargs is None else sample_kwargs,) if single else sample_kwargs
    if all_kwargs is None:
        all_kwargs = ({},) * len(all_modules)
    check_training(all_modules)
    if not len(all_modules) == len(all_args) == len(all_kwargs):
        raise ValueError(
            f"sample_args and sample_kwargs: wanted one of each for {len(all_modules)} modules, "
            f"got {len(all_args)} and {len(all_kwargs)}"
        )
    graphed = tuple(
        _capture(m, a, k, num_warmup_iters, pool)
        for m, a, k in zip(all_modules, all_args, all_kwargs, strict=True)
    )
    return graphed[0] if single else graphed


def check_training(modules):
    """All modules in one mode, and that inference."""
    names = [f"modules[{i}] ({type(m).__name__})" for i, m in enumerate(modules)]
    training = [n for n, m in zip(names, modules, strict=True) if getattr(m, "training", False)]
    inference = [n for n in names if n not in training]
    if training and inference:
        raise ValueError(
            f"modules: wanted all in one mode, got {', '.join(training)} in training "
            f"and {', '.join(inference)} in inference"
        )
    if training:
        raise not_covered("modules in training", "there is no backward pass; call eval() on them")


def _shapes(tensors):
    return tuple((tuple(t.shape), t.dtype) for t in tensors)


def _same(given, captured):
    """Whether lengths are read from where the capture read them. With inference_params it reads
    none of the caller's.
    """
    return given.keys() == captured.keys() and all(
        x is captured[name] or (isinstance(x, int) and x == captured[name])
        for name, x in given.items()
    )


def _lies_within(params, maxima):
    """Whether the step of params is one that a graph of such maxima serves."""
    after, before = params.sequences, params.sequences_pre_step
    new = [after[i] - before[i] for i in after]
    return all(
        len(new) <= m.num_seqs
        and sum(new) <= m.num_tokens
        and max(new, default=0) <= m.max_new_tokens
        and max(after.values(), default=0) <= m.max_kv_len
        for m in maxima
    )


@contextlib.contextmanager
def _bounded(params):
    """Calls over params are sized by their tensors, not by the step; gives the maxima they had."""
    maxima = set()
    if params is not None:
        params._capture = maxima
    try:
        yield maxima
    finally:
        if params is not None:
            params._capture = None


def _capture(module, args, kwargs, num_warmup_iters, pool):
    if (
        torch is None
        or not args
        or not all(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
    ):
        raise not_covered("sample_args that are not tensors on a GPU", "a CUDA graph needs them")
    params = kwargs.get("inference_params")
    if params is not None and not isinstance(params, InferenceParams):
        raise TypeError(f"inference_params: wanted InferenceParams, got {type(params).__name__}")
    if params is not None and not params.is_built_in:
        raise not_covered("custom_cache_manager in a CUDA graph")
    static = tuple(a.detach().clone() for a in args)
    eager = module.forward
    with torch.no_grad(), _bounded(params) as maxima:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(num_warmup_iters):
                eager(*static, **kwargs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = eager(*static, **kwargs)
    shapes = _shapes(static)

    def forward(*inputs, **given):
        same = (
            not module.training
            and given.get("inference_params") is params
            and set(given)
            <= {
                "inference_params",
                "cu_seqlens_q",
                "cu_seqlens_kv",
                "max_seqlen_q",
                "max_seqlen_kv",
            }
            and all(isinstance(x, torch.Tensor) for x in inputs)
            and _shapes(inputs) == shapes
            and (_same(given, kwargs) if params is None else _lies_within(params, maxima))
        )
        if not same:
            return eager(*inputs, **given)
        for mine, theirs in zip(static, inputs, strict=True):
            mine.copy_(theirs)
        graph.replay()
        return result.clone()

    module.forward = forward
    return module
