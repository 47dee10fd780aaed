# SPDX-License-Identifier: Apache-2.0
"""InferenceParams and DotProductAttention against the definition, over arrivals that come and go."""

from __future__ import annotations

import inspect
from collections import OrderedDict

import numpy as np
import pytest
from definition import attention, check_close
from octavo.compat import transformer_engine as te

HEADS, GROUPS, DIM = 4, 2, 16
FORMATS = ["bshd", "sbhd", "thd"]


def make_params(frame, dtype="f32", *, paged=False, batch=3, length=32, pages=None, page_size=4, **kwargs):
    if paged:
        kwargs.update(is_paged=True, page_size=page_size, total_num_pages=pages)
    return te.InferenceParams(
        max_batch_size=batch,
        max_sequence_length=length,
        num_heads_kv=GROUPS,
        head_dim_k=DIM,
        dtype=frame.dtype(dtype),
        max_ctx_len=length,
        **kwargs,
    )


def make_module(fmt="bshd", mask="padding_causal", **kwargs):
    return te.DotProductAttention(
        HEADS, kwargs.pop("kv_channels", DIM), GROUPS, qkv_format=fmt, attn_mask_type=mask, **kwargs
    ).eval()


class Stream:
    """What the tests remember of each sequence: all its tokens so far, as they were rounded."""

    def __init__(self, frame, dtype, seed, dim_v=DIM):
        self.frame, self.dtype, self.r = frame, dtype, np.random.default_rng(seed)
        self.dims = (DIM, DIM, dim_v)
        self.past = {}

    def arrays(self, step, fmt, batch=0, longest=0):
        """q, k and v of a step in a format, NaN in every padding row; the past grows by them."""
        longest = max([longest, *step.values()])
        shape = {
            "bshd": (max(batch, len(step)), longest),
            "sbhd": (longest, max(batch, len(step))),
            "thd": (sum(step.values()) + 2,),
        }[fmt]
        heads = (HEADS, GROUPS, GROUPS)
        whole = [np.full(shape + (h, d), np.nan) for h, d in zip(heads, self.dims)]
        for x, (h, d) in zip(whole, zip(heads, self.dims)):
            for rows, n in self.rows(step, fmt):
                x[rows] = self.r.standard_normal((n, h, d))
        made = [self.frame.make(x, self.dtype) for x in whole]
        for (rows, _), sequence in zip(self.rows(step, fmt), step):
            old = self.past.get(sequence, [np.zeros((0, h, d)) for h, d in zip(heads, self.dims)])
            self.past[sequence] = [np.concatenate([o, self.frame.read(x)[rows]]) for o, x in zip(old, made)]
        return made

    @staticmethod
    def rows(step, fmt):
        """Where each sequence's tokens lie: an index, and how many."""
        start = 0
        for b, n in enumerate(step.values()):
            index = {
                "bshd": (b, slice(0, n)),
                "sbhd": (slice(0, n), b),
                "thd": slice(start, start + n),
            }[fmt]
            start += n
            yield index, n

    def check(self, out, step, fmt, **maths):
        got = self.frame.read(out)
        assert self.frame.is_one(out)
        assert got.shape[-1] == HEADS * self.dims[2] and got.ndim == (2 if fmt == "thd" else 3)
        used = np.zeros(got.shape[:-1], bool)
        for (rows, n), sequence in zip(self.rows(step, fmt), step):
            q, k, v = self.past[sequence]
            want, _ = attention(q[len(q) - n :], k, v, **{"causal": True, **maths})
            check_close(got[rows], want.reshape(n, -1), self.dtype, 4.0, f"sequence {sequence} of {step}")
            used[rows] = True
        assert (got[~used] == 0).all(), "padding"


def arrivals(seed, batch, length):
    """Steps {id: new tokens}: sequences start, bring one or many tokens, change order, and finish."""
    r = np.random.default_rng(seed)
    live, next_id = {}, 100
    for _ in range(12):
        for sequence in [s for s in live if r.random() < 0.2 or live[s] > length - 4]:
            del live[sequence]
        order = list(live)
        r.shuffle(order)
        step = OrderedDict()
        for sequence in order:
            step[sequence] = int(r.integers(1, 4)) if r.random() < 0.5 else 1
        while len(step) < batch and r.random() < 0.7:
            next_id += int(r.integers(-30, 40)) or 1
            if next_id in step or next_id in live:
                continue
            step[next_id] = int(r.integers(1, length // 2))
        for sequence, n in step.items():
            live[sequence] = live.get(sequence, 0) + n
        if step:
            yield step


@pytest.mark.parametrize("backend", ["", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_arrivals_equal_the_definition(frame, monkeypatch, dtype, fmt, paged, backend):
    if dtype not in frame.dtypes:
        pytest.skip(f"{frame.name} has no {dtype} here")
    if backend:
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            monkeypatch.setenv(name, str(int(name == backend)))
    params = make_params(frame, dtype, paged=paged, batch=4, length=40, page_size=3, qkv_format=fmt)
    modules = [make_module(fmt, layer_number=i) for i in (1, 2)]
    streams = [Stream(frame, dtype, seed) for seed in (1, 2)]
    for layer in (1, 2):
        params.allocate_memory(layer)
    for step in arrivals(7, 4, 40):
        gone = [s for s in params.sequences if s not in step]
        for stream in streams:
            for sequence in gone:
                stream.past.pop(sequence, None)
        params.pre_step(step)
        for module, stream in zip(modules, streams):
            out = module(*stream.arrays(step, fmt), inference_params=params)
            stream.check(out, step, fmt)


@pytest.mark.parametrize(
    ("options", "maths"),
    [
        (dict(mask="padding"), dict(causal=False)),
        (dict(mask="padding_causal_bottom_right"), {}),
        (dict(mask="causal,padding"), {}),
        (dict(window_size=(3, 0)), dict(window=(3, 0))),
        (dict(mask="padding", window_size=(3, 2)), dict(causal=False, window=(3, 2))),
        (dict(softmax_scale=0.3), dict(scale=0.3)),
        (dict(softmax_type="off-by-one"), dict(sinks=np.zeros(HEADS))),
        (dict(softmax_type="learnable"), dict(sinks=np.arange(HEADS) / 2.0)),
    ],
    ids=["full", "bottom_right", "spelled", "window", "full_window", "scale", "off_by_one", "learnable"],
)
@pytest.mark.parametrize("paged", [False, True])
def test_options_equal_the_definition(frame, paged, options, maths):
    module = make_module(**options)
    if options.get("softmax_type") == "learnable":
        offset = getattr(module.softmax_offset, "data", module.softmax_offset)
        for head, sink in enumerate(maths["sinks"]):
            offset[head] = float(sink)
    params, stream = make_params(frame, paged=paged), Stream(frame, "f32", 3)
    params.allocate_memory(1)
    for step in ({4: 6, 2: 3}, {2: 1, 4: 2}):
        params.pre_step(step)
        stream.check(module(*stream.arrays(step, "bshd"), inference_params=params), step, "bshd", **maths)


def test_alibi_equals_the_definition(frame):
    slopes = np.array([0.1, 0.3, 0.2, 0.7])
    for given in (slopes, np.stack([slopes, slopes]), None):
        params, stream, module = make_params(frame), Stream(frame, "f32", 3), make_module()
        params.allocate_memory(1)
        step = {1: 5, 2: 3}
        params.pre_step(step)
        out = module(
            *stream.arrays(step, "bshd"),
            inference_params=params,
            core_attention_bias_type="alibi",
            alibi_slopes=None if given is None else frame.make(given),
        )
        stream.check(out, step, "bshd", slopes=slopes if given is not None else 2.0 ** (-2.0 * np.arange(1, 5)))


def test_values_may_have_another_width(frame):
    params = make_params(frame, paged=True, head_dim_v=8)
    params.allocate_memory(1)
    module, stream = make_module(kv_channels=(DIM, 8)), Stream(frame, "f32", 5, dim_v=8)
    for step in ({1: 5}, {1: 1}):
        params.pre_step(step)
        stream.check(module(*stream.arrays(step, "bshd"), inference_params=params), step, "bshd")


def test_what_a_step_shows(frame):
    params = make_params(frame, paged=True)
    params.allocate_memory(1)
    addresses = [frame.address(x) for x in (params.cu_seqlens_q, params.cu_seqlens_kv, params.pre_step_seqlens)]
    params.pre_step(OrderedDict([(1, 2), (8, 5)]))
    params.pre_step(OrderedDict([(8, 3), (1, 1)]))
    assert frame.read(params.cu_seqlens_q).tolist() == [0, 3, 4, 4]
    assert frame.read(params.cu_seqlens_kv).tolist() == [0, 8, 11, 11]
    assert frame.read(params.get_seqlens_pre_step()).tolist() == [5, 2, 0]
    assert list(params.sequences.items()) == [(8, 8), (1, 3)]
    assert list(params.sequences_pre_step.items()) == [(8, 5), (1, 2)]
    assert params.batch_size == 2
    table = frame.read(params.cache_manager.page_table)
    assert table.shape == (3, 8)
    assert table[0, :2].tolist() == params.cache_manager.get_page_list(8)
    assert table[1, :1].tolist() == params.cache_manager.get_page_list(1)
    assert params.cache_manager.get_page_count(8) == 2 and params.cache_manager.get_sequence_count() == 2
    params.cache_manager.print_cache()
    assert [frame.address(x) for x in (params.cu_seqlens_q, params.cu_seqlens_kv, params.pre_step_seqlens)] == addresses
    params.reset()
    assert not params.sequences and params.batch_size == 0
    assert not frame.read(params.cu_seqlens_kv).any() and not frame.read(params.pre_step_seqlens).any()
    assert params.cache_manager.has_free_page()
    assert "page_size=4" in repr(params) and "is_paged=True" in repr(params)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_step_and_conversion_show_the_tokens(frame, fmt, paged):
    params, stream = make_params(frame, paged=paged), Stream(frame, "f32", 9)
    params.allocate_memory(3)
    for step in ({4: 6, 2: 3}, {2: 2, 7: 1}):
        params.pre_step(step)
        for sequence in [s for s in stream.past if s not in step]:
            del stream.past[sequence]
        _, k, v = stream.arrays(step, fmt)
        result = params.step(3, k, v, fmt)
        assert len(result) == 6
        assert result[2] is params.cu_seqlens_q and result[3] is params.cu_seqlens_kv
        assert result[4:] == (32, "bshd" if fmt == "bshd" else f"{fmt}_2bshd")
    assert frame.is_one(result[0]) and tuple(result[0].shape) == ((24, 4, 2, 16) if paged else (3, 32, 2, 16))
    rows = [frame.read(x) for x in params.convert_paged_to_nonpaged(3)]
    for got, want in zip(rows, (1, 2)):
        assert got.shape == (2, 32, GROUPS, DIM)
        for b, sequence in enumerate(step):
            kept = stream.past[sequence][want]
            assert np.array_equal(got[b, : len(kept)], kept) and not got[b, len(kept) :].any()


def test_the_pool_may_be_smaller_than_the_worst_case(frame):
    params = make_params(frame, paged=True, pages=4)
    params.allocate_memory(1)
    params.pre_step({1: 8, 2: 4})
    with pytest.raises(RuntimeError, match="KV cache is full!"):
        params.pre_step({1: 5, 2: 1})
    assert dict(params.sequences) == {1: 8, 2: 4}, "as before"
    params.pre_step({1: 8})
    assert dict(params.sequences) == {1: 16}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({1: 30}, "max_sequence_length"),
        ({1: 1, 2: 1, 3: 1, 4: 1}, "max_batch_size"),
        ({1: -1}, "at least 0"),
    ],
)
def test_a_step_beyond_the_maxima_changes_nothing(frame, paged, step, message):
    params, stream, module = make_params(frame, paged=paged), Stream(frame, "f32", 2), make_module()
    params.allocate_memory(1)
    first = {1: 4, 9: 2}
    params.pre_step(first)
    module(*stream.arrays(first, "bshd"), inference_params=params)
    with pytest.raises(ValueError, match=message):
        params.pre_step(step)
    assert dict(params.sequences) == {1: 4, 9: 2}
    params.pre_step({9: 1, 1: 1})
    stream.check(module(*stream.arrays({9: 1, 1: 1}, "bshd"), inference_params=params), {9: 1, 1: 1}, "bshd")


def test_layers_may_be_allocated_in_the_first_pass(frame):
    params = make_params(frame, paged=True)
    streams = [Stream(frame, "f32", s) for s in (1, 2)]
    for step in ({5: 3}, {5: 1, 6: 4}):
        params.pre_step(step)
        for layer, stream in enumerate(streams, 1):
            if layer not in params.cache_manager.cache:
                params.allocate_memory(layer)
            out = make_module(layer_number=layer)(*stream.arrays(step, "bshd"), inference_params=params)
            stream.check(out, step, "bshd")
    with pytest.raises(ValueError, match="before its sequences' first step"):
        params.allocate_memory(3)
    with pytest.raises(ValueError, match="allocate_memory"):
        make_module(layer_number=3)(*streams[0].arrays(step, "bshd"), inference_params=params)


def test_batches_padded_to_the_maximum(frame):
    """As in TransformerEngine's graphs: rows beyond the step's sequences, and longer rows."""
    params, stream, module = make_params(frame, paged=True), Stream(frame, "f32", 4), make_module()
    params.allocate_memory(1)
    for step in ({5: 3}, {5: 1, 6: 4}):
        params.pre_step(step)
        arrays = stream.arrays(step, "bshd", batch=3, longest=8)
        ends = np.zeros(4)
        ends[1 : len(step) + 1] = np.cumsum(list(step.values()))
        out = module(
            *arrays,
            cu_seqlens_q=frame.ints(ends),
            cu_seqlens_kv=frame.ints(ends),
            max_seqlen_q=8,
            max_seqlen_kv=32,
            inference_params=params,
        )
        stream.check(out, step, "bshd")


class OwnManager(te.KVCacheManager):
    """A contiguous cache kept in plain arrays: row i for the i-th sequence ever seen."""

    frame = None

    def __init__(self, max_batch_size, max_seqlen, num_heads, head_dim_k, dtype, head_dim_v):
        super().__init__()
        self.shape = (max_batch_size, max_seqlen, num_heads, head_dim_k)
        self.rows = {}

    def allocate_memory(self, layer_number):
        self.cache[layer_number] = tuple(self.frame.make(np.zeros(self.shape)) for _ in range(2))

    def pre_step(self, step_dict):
        for sequence in step_dict:
            self.rows.setdefault(sequence, len(self.rows))
        self.sequences = OrderedDict((s, self.sequences.get(s, 0) + n) for s, n in step_dict.items())
        self.step_lens = step_dict
        self.batch_indices_post_step = self.frame.ints([self.rows[s] for s in step_dict])
        return self.sequences

    def step(self, layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format):
        assert qkv_format == "bshd"
        for cache, new in zip(self.cache[layer_number], (new_k, new_v)):
            for b, (sequence, n) in enumerate(self.step_lens.items()):
                end = self.sequences[sequence]
                cache[self.rows[sequence], end - n : end] = new[b, :n]
        return self.cache[layer_number]


def test_a_manager_of_ones_own(frame):
    OwnManager.frame = frame
    params, stream = make_params(frame, custom_cache_manager=OwnManager), Stream(frame, "f32", 6)
    params.allocate_memory(1)
    module = make_module()
    for step in ({5: 3, 2: 4}, {2: 1, 5: 2}):
        params.pre_step(step)
        stream.check(module(*stream.arrays(step, "bshd"), inference_params=params), step, "bshd")


def test_backends_are_chosen_by_the_environment(frame, monkeypatch):
    params, stream, module = make_params(frame), Stream(frame, "f32", 8), make_module()
    params.allocate_memory(1)
    params.pre_step({1: 2})
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(ValueError, match="No dot product attention backend.*NVTE_FLASH_ATTN=0"):
        module(*stream.arrays({1: 2}, "bshd"), inference_params=params)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "yes")
    with pytest.raises(ValueError, match="NVTE_FLASH_ATTN: wanted 0 or 1"):
        module(*stream.arrays({1: 2}, "bshd"), inference_params=params)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(attn_mask_type="causal"), ValueError, "padding"),
        (dict(attn_mask_type="arbitrary"), NotImplementedError, "arbitrary"),
        (dict(attn_mask_type="other"), ValueError, "attn_mask_type"),
        (dict(attention_mask=1), NotImplementedError, "attention_mask"),
        (dict(core_attention_bias_type="post_scale_bias"), NotImplementedError, "post_scale_bias"),
        (dict(pad_between_seqs=True), NotImplementedError, "pad_between_seqs"),
        (dict(fp8_output=True), NotImplementedError, "fp8_output"),
        (dict(cu_seqlens_q_padded=1), NotImplementedError, "cu_seqlens_q_padded"),
        (dict(cu_seqlens_q=np.array([0, 1, 2], np.int32)), ValueError, "cu_seqlens_q"),
        (dict(window_size=(2, 1)), ValueError, "window_size"),
    ],
)
def test_what_is_wrong_or_not_covered_is_named(frame, change, error, message):
    params, stream = make_params(frame), Stream(frame, "f32", 8)
    params.allocate_memory(1)
    params.pre_step({1: 2, 2: 2})
    with pytest.raises(error, match=message):
        make_module()(*stream.arrays({1: 2, 2: 2}, "bshd"), inference_params=params, **change)


@pytest.mark.parametrize("missing", ["num_heads_kv", "head_dim_k", "dtype"])
def test_the_sizes_are_required(missing):
    sizes = dict(num_heads_kv=1, head_dim_k=8, dtype=np.float32)
    with pytest.raises(ValueError, match=missing):
        te.InferenceParams(1, 8, **{**sizes, missing: None})


def test_positional_arguments_are_those_of_the_library():
    def names(function):
        parameters = list(inspect.signature(function).parameters.values())[1:]
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert names(te.InferenceParams.__init__) == (
        "max_batch_size max_sequence_length num_heads_kv head_dim_k dtype head_dim_v is_paged total_num_pages "
        "page_size max_ctx_len qkv_format custom_cache_manager"
    ).split()
    assert names(te.DotProductAttention.forward) == (
        "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv "
        "cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size "
        "bottom_right_diagonal checkpoint_core_attention core_attention_bias_type core_attention_bias "
        "alibi_slopes fast_zero_fill inference_params pad_between_seqs fp8_output num_splits"
    ).split()
