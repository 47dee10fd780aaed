# SPDX-License-Identifier: Apache-2.0
"""What calls on a GPU cost the host, with PyTorch's tensors.

python python/bench/gpu_call_cost.py [--beside FILE] [--json FILE]. Layers are timed as
octavo_gpu_bench's part `steps` times them in C++: --beside FILE, its lines, gives what Python adds.
The fronts are timed beside the library's own calls for the same.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path

import torch
from call_cost import stamp

import octavo
from octavo.compat import flash_attn, flashinfer
from octavo.compat import transformer_engine as engine

LAYERS, REPEATS = 16, 101


def host_us(call, calls=1) -> tuple[float, float]:
    """The host's time for one of `calls` calls, the device idle before them: (median, best)."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / calls * 1e6, min(times) / calls * 1e6


def layers(backend, seqs, past=1000):
    """(name of the case in C++, time of a layer or of a replay) of a decode step."""
    cache = octavo.KvCache(
        num_layers=LAYERS,
        num_kv_heads=8,
        head_dim=128,
        dtype="bf16",
        max_num_seqs=seqs,
        max_seq_len=past + 16,
        page_size=16,
        device="cuda",
    )
    cache.begin(cache.plan(dict.fromkeys(range(seqs), past)))
    plan = cache.plan(dict.fromkeys(range(seqs), 1))
    cache.begin(plan)
    attention = octavo.Attention(cache, num_q_heads=32, backend=backend)
    shape = (seqs, 32, 128)
    q, out = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    k, v = (q[:, :8].contiguous() for _ in range(2))

    def eager(**words):
        for layer in range(LAYERS):
            attention.forward(plan, cache, layer, q, k, v, **words)

    name = f"step b{seqs} s{past} q1 h32/8 d128 bf16 page16, {LAYERS} layers"
    for variant, words in (("out given", {"out": out}), ("new out", {})):
        times = host_us(lambda words=words: eager(**words))
        yield f"{name}, eager, host", variant, [us / LAYERS for us in times], LAYERS
    maxima = octavo.StepMaxima(seqs, seqs, 1, past + 16)
    tensors = [octavo.LayerTensors(q, k, v, out)] * LAYERS
    graph = octavo.GraphedStep(attention, cache, maxima, tensors)
    yield f"{name}, replayed, host", "", host_us(lambda: graph.replay(plan)), 1


def pairs():
    """(name, a front's call, the library's calls for the same) of two sequences of one token."""

    def draw(*shape):
        return torch.randn(shape, device="cuda").bfloat16()

    def ints(x):
        return torch.tensor(x, dtype=torch.int32, device="cuda")

    q, new = draw(2, 1, 4, 64), draw(2, 1, 4, 64)
    k_cache, v_cache = draw(2, 64, 4, 64), draw(2, 64, 4, 64)
    lens, longer, table, ends = ints([40, 50]), ints([41, 51]), ints([[0], [1]]), ints([0, 1, 2])
    out = torch.empty_like(q)
    space = octavo.Workspace("cuda:0")
    paged = {"token_offsets": ends, "page_table": table, "max_new_tokens": 1}
    sizes = space.sizes(q, k_cache, v_cache, lens, format="bshd", **paged, out=out)
    memory = torch.empty(sizes.good, dtype=torch.uint8, device="cuda")
    space.use(memory)

    def attend(kv_lens, plan=True, **more):
        if plan:
            space.plan(k_cache, v_cache, kv_lens, **paged, num_tokens=2)
        octavo.attend(
            q, k_cache, v_cache, kv_lens, **paged, format="bshd", out=out, workspace=space, **more
        )

    def append_and_attend(rope=None, **more):
        space.plan(k_cache, v_cache, longer, **paged, num_tokens=2)
        octavo.append_tokens(
            new, new, k_cache, v_cache, longer, **paged, format="bshd", workspace=space, rope=rope
        )
        attend(longer, plan=False, rope=rope, **more)

    def kvcache(*more, **options):
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, *more, cache_seqlens=lens, block_table=table, **options
        )

    yield "flash_attn_with_kvcache", lambda: kvcache(causal=True), lambda: attend(lens)
    yield "flash_attn_with_kvcache, append", lambda: kvcache(new, new), append_and_attend
    angles = torch.zeros((64, 32), device="cuda")
    rope = octavo.Rope("interleaved", cos=angles, sin=angles)
    lse = torch.empty((2, 4), device="cuda")
    yield (
        "flash_attn_with_kvcache, append, rotation, LSE",
        lambda: kvcache(new, new, angles, angles, causal=True, return_softmax_lse=True),
        lambda: append_and_attend(rope, lse=lse),
    )
    packed, keys = q[:, 0], k_cache.view(128, 4, 64)
    key_ends = ints([0, 40, 90])
    yield (
        "flash_attn_varlen_func",
        lambda: flash_attn.flash_attn_varlen_func(packed, keys, keys, ends, key_ends, 1, 50),
        lambda: attend(lens),
    )
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, device="cuda"))
    decode.plan(ends, ints([0, 1]), lens, 4, 4, 64, 64, q_data_type=torch.bfloat16)
    yield (
        "BatchDecodeWithPagedKVCacheWrapper.run",
        lambda: decode.run(packed, (k_cache, v_cache)),
        lambda: attend(lens, plan=False),
    )
    tokens, places, last = ints([0, 1]), ints([40, 50]), ints([41, 51])

    def append_only():
        space.plan(k_cache, v_cache, longer, **paged, num_tokens=2)
        octavo.append_tokens(
            packed, packed, k_cache, v_cache, longer, **paged, format="thd", workspace=space
        )

    yield (
        "append_paged_kv_cache",
        lambda: flashinfer.append_paged_kv_cache(
            packed, packed, tokens, places, (k_cache, v_cache), tokens, ends, last
        ),
        append_only,
    )
    params = engine.InferenceParams(
        2, 64, 4, 64, torch.bfloat16, is_paged=True, page_size=16, device="cuda:0"
    )
    params.allocate_memory(1)
    params.pre_step({3: 40, 7: 50})
    params.pre_step({3: 1, 7: 1})
    module = engine.DotProductAttention(
        4, 64, attn_mask_type="padding_causal", qkv_format="thd"
    ).eval()
    group = params.cache_manager.groups[0]
    attention = octavo.Attention(group.cache, num_q_heads=4)
    yield (
        "DotProductAttention",
        lambda: module(packed, packed, packed, inference_params=params),
        lambda: attention.forward(group.plan, group.cache, 0, packed, packed, packed),
    )


def in_cpp(file):
    """{(case, backend): us} of octavo_gpu_bench's lines."""
    rows = []
    for line in file.read_text().splitlines() if file else []:
        if line.startswith("{"):
            rows.append(json.loads(line))
    return {(row["case"], row["backend"]): row["time_us"] for row in rows if "backend" in row}


def driver() -> str:
    """The version of NVIDIA's driver, where Linux tells."""
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+\.\d+", file.read_text()) if file.exists() else None
    return found.group() if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, help="lines of octavo_gpu_bench steps")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    rows = []
    beside = in_cpp(arguments.beside)
    for backend, seqs in (("unfused", 4), ("unfused", 64), ("flash2", 4), ("flash2", 64)):
        for case, variant, (us, best), count in layers(backend, seqs):
            bare = beside.get((case, backend))
            bare = None if bare is None else bare / count
            rows.append({"call": case, "backend": backend, "variant": variant, "us": us})
            rows[-1] |= {"us_best": best, "library_us": bare}
    for name, front, library in pairs():
        (us, best), (library_us, _) = host_us(front, 8), host_us(library, 8)
        rows.append({"call": name, "us": us, "us_best": best, "library_us": library_us})
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "torch": torch.__version__,
    }
    for row in rows:
        bare = row["library_us"]
        over = "" if bare is None else f" {row['us'] - bare:7.2f} over {bare:.2f}"
        name = " ".join(filter(None, (row["call"], row.get("backend"), row.get("variant"))))
        print(f"{row['us']:8.2f} us (best {row['us_best']:7.2f}){over}  {name}")
        if arguments.json:
            row |= {"arrays": "torch", **stamp(), **machine}
            row = {n: round(x, 2) if isinstance(x, float) else x for n, x in row.items()}
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
