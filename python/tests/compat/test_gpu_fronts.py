# SPDX-License-Identifier: Apache-2.0
"""What the fronts keep between calls on a GPU: workspaces, plans, and what a capture takes."""

from __future__ import annotations

import numpy as np
import pytest
from definition import attention, check_close
from flashinfer_case import LN2
from gpu_frames import captured, counted, on_gpus

import octavo
from octavo.compat import _gpu, flash_attn, flashinfer

pytestmark = on_gpus
CALLS_ONCE = True


def decode_step(frame, lens):
    random = np.random.default_rng(1)
    cache = [frame.make(random.standard_normal((6, 4, 2, 8)), "f16") for _ in range(2)]
    q, k, v = (frame.make(random.standard_normal((2, 1, h, 8)), "f16") for h in (4, 2, 2))
    table = frame.ints([[0, 1, 2], [3, 4, 5]])
    return (q, *cache, k, v), {
        "cache_seqlens": frame.ints(lens),
        "block_table": table,
        "causal": True,
    }


def test_calls_alike_share_a_workspace_and_plan_once_each(frame, monkeypatch):
    made, planned = counted(monkeypatch, "__init__"), counted(monkeypatch, "plan")
    for lens in ([3, 7], [4, 8]):
        tensors, words = decode_step(frame, lens)
        flash_attn.flash_attn_with_kvcache(*tensors, **words)
        assert len(made) == 1
        # A call of a known kind plans in the compiled module, but for the stand-in's.
        plans = 2 if lens == [4, 8] and frame.name == "stand-in" else 1
        assert len(planned) == plans, "the plan of the new tokens serves the queries"
    flash_attn.flash_attn_with_kvcache(*tensors, **words, softcap=2.0)
    assert len(made) == 2


def test_few_workspaces_are_kept(frame, monkeypatch):
    monkeypatch.setattr(_gpu, "_KEPT", 2)
    monkeypatch.setattr(_gpu, "spaces", _gpu.Spaces())
    x = frame.make(np.ones((1, 9, 1, 8)))
    for n in range(1, 6):
        flash_attn.flash_attn_func(x[:, :n], x, x)
    assert len(_gpu.spaces._ready) == 2


def test_a_capture_takes_a_workspace_that_was_made_before(frame, monkeypatch):
    tensors, words = decode_step(frame, [3, 7])
    spaces = _gpu.Spaces()
    monkeypatch.setattr(_gpu, "spaces", spaces)
    flash_attn.flash_attn_with_kvcache(*tensors, **words)
    (before,) = spaces._ready.values()
    monkeypatch.setattr(_gpu, "capturing", lambda: True)
    monkeypatch.setattr(_gpu, "stream_address", lambda device: 5)
    if frame.name == "cuda":
        pytest.skip("nothing is captured: the stand-in's part")
    for _ in range(2):
        flash_attn.flash_attn_with_kvcache(*tensors, **words)
    assert not spaces._ready, "an eager call must not use the graph's"
    assert list(spaces._captured.values()) == [before]
    with pytest.raises(RuntimeError, match="before the capture"):
        flash_attn.flash_attn_with_kvcache(*tensors, **words, softcap=2.0)


@pytest.mark.parametrize("name", ["q", "k_cache"])
def test_dtypes_that_are_not_covered_are_named(frame, name):
    (q, k_cache, v_cache, *_), words = decode_step(frame, [3, 7])
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    tensors[name] = tensors[name].to(frame.torch.float64)
    with pytest.raises(NotImplementedError, match=f"{name} of dtype"):
        flash_attn.flash_attn_with_kvcache(**tensors, **words)


def test_a_captured_call_serves_other_lengths(frame):
    tensors, words = decode_step(frame, [3, 7])
    call = lambda: flash_attn.flash_attn_with_kvcache(*tensors, **words)  # noqa: E731
    graph, out = captured(frame, call)
    words["cache_seqlens"].copy_(frame.ints([10, 1]))
    graph.replay()
    got = frame.read(out).copy()
    assert np.array_equal(got, frame.read(call()))


def test_a_captured_merge_serves_other_parts(frame):
    random = np.random.default_rng(2)
    q, k, v = (random.standard_normal(s) for s in ((5, 2, 8), (9, 2, 8), (9, 2, 8)))
    nothing = np.zeros((5, 2, 8)), np.full((5, 2), -np.inf)
    parts = [attention(q, k[s], v[s]) for s in (slice(0, 6), slice(6, 9))]
    tensors = [(frame.make(o, "f16"), frame.make(s / LN2)) for o, s in (nothing, nothing)]
    graph, (out, lse) = captured(frame, lambda: flashinfer.merge_state(*tensors[0], *tensors[1]))
    graph.replay()
    assert not frame.read(out).any()
    assert (frame.read(lse) == -np.inf).all()
    for mine, part in zip(tensors, parts, strict=True):
        mine[0].copy_(frame.make(part[0], "f16"))
        mine[1].copy_(frame.make(part[1] / LN2))
    graph.replay()
    _, want_lse = attention(q, k, v)
    rounded = [frame.read(x).astype(np.float64) for x, _ in tensors]
    want = sum(
        np.exp(s - want_lse)[..., None] * x for x, (_, s) in zip(rounded, parts, strict=True)
    )
    check_close(frame.read(out), want, "f16", 8.0)
    check_close(frame.read(lse), want_lse / LN2, "f32", 16.0)


def test_a_call_like_an_earlier_one_is_not_looked_at_anew(frame, monkeypatch):
    tensors, words = decode_step(frame, [3, 7])
    first = flash_attn.flash_attn_with_kvcache(*tensors, **words)
    looked = []
    checked = _gpu.checked
    monkeypatch.setattr(_gpu, "checked", lambda *a, **k: looked.append(k) or checked(*a, **k))
    again = flash_attn.flash_attn_with_kvcache(*tensors, **words)
    assert not looked
    assert np.array_equal(frame.read(first), frame.read(again))
    flash_attn.flash_attn_with_kvcache(*tensors, **words, softmax_scale=2.0)
    assert looked


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"cache_seqlens": 12}, "at most 12"),
        ({"cache_seqlens": [3, 7, 1]}, "cache_seqlens"),
        ({"block_table": [0, 1, 2]}, "page_table"),
        ({"softmax_scale": float("nan")}, "softmax_scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"window_size": (1,)}, "window_size"),
        ({"alibi_slopes": [[0.5] * 3]}, "alibi_slopes"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_after_right_calls_too(frame, change, error):
    tensors, words = decode_step(frame, [3, 7])
    for _ in range(2):
        flash_attn.flash_attn_with_kvcache(*tensors, **words)
    ((name, value),) = change.items()
    if isinstance(value, list):
        value = frame.make(value) if name == "alibi_slopes" else frame.ints(value)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=error):
        flash_attn.flash_attn_with_kvcache(*tensors, **{**words, name: value})


def test_a_length_that_the_host_knows_is_checked(frame):
    (q, *tensors), words = decode_step(frame, [3, 7])
    words["cache_seqlens"] = 12
    with pytest.raises(ValueError, match="at most 12 with new tokens, got 13"):
        flash_attn.flash_attn_with_kvcache(q, *tensors, **words)


@pytest.mark.parametrize(
    "change",
    [
        {"cache_batch_idx": [0, 2]},
        {"block_table": [[0, 1, 2], [3, 6, 5]]},
        {"cache_leftpad": [-1, 0]},
    ],
    ids=str,
)
def test_left_padding_hides_no_fault(frame, change):
    """What is wrong with rows, pages and padding is a page outside of the pool to the planning."""
    (q, k_cache, v_cache, *_), words = decode_step(frame, [3, 7])
    words |= {"cache_leftpad": frame.ints([1, 1])} | {n: frame.ints(x) for n, x in change.items()}
    if frame.name == "stand-in":  # which refuses what a GPU leaves out
        with pytest.raises(octavo.InvalidArgument, match="page_table"):
            flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **words)
        return
    out = frame.read(flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **words))
    wrong = 0 if "cache_leftpad" in change else 1
    assert not out[wrong].any()
    assert out[1 - wrong].any()


@pytest.mark.parametrize("change", [{"seqused_q": [3, 2]}, {"seqused_k": [4, 5]}], ids=str)
def test_no_sequence_uses_anothers_tokens(frame, change):
    random = np.random.default_rng(1)
    q, k, v = (frame.make(random.standard_normal((n, 2, 8)), "f16") for n in (4, 8, 8))
    words = {n: frame.ints(x) for n, x in change.items()}
    arrays = frame.ints([0, 2, 4]), frame.ints([0, 3, 8]), 2, 5
    call = lambda: flash_attn.flash_attn_varlen_func(q, k, v, *arrays, **words)  # noqa: E731
    if frame.name == "stand-in":  # which refuses what a GPU leaves out
        with pytest.raises((octavo.InvalidArgument, AssertionError)):
            call()
        return
    out = frame.read(call())
    assert not out[:2].any()
    assert ("seqused_k" in change) == bool(out[2:].any())
