# SPDX-License-Identifier: Apache-2.0
"""What the fronts cost over the library's own calls: two sequences of one token, on one thread.

python python/bench/front_costs.py [--torch] [--json FILE]. Each figure is the best of many rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the fronts have no argument for it

import numpy as np
from call_cost import stamp

import octavo
from octavo.compat import flash_attn, flashinfer
from octavo.compat import transformer_engine as engine

LENGTHS = np.array([4, 5], np.int32)
ENDS, KEY_ENDS = np.array([0, 1, 2], np.int32), np.array([0, 4, 9], np.int32)


def best_us(call, rounds=3000, calls=20) -> float:
    """Many rounds so short that some fall between other programs' turns."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def pairs(convert, float32):
    """(name, the front's call, the library's call for the same)."""
    q, k_cache, v_cache, new = (
        convert(np.ones(shape, np.float32))
        for shape in ((2, 1, 2, 16), (2, 8, 2, 16), (2, 8, 2, 16), (2, 1, 2, 16))
    )
    lens, longer, table, ends, key_ends = (
        convert(x) for x in (LENGTHS, LENGTHS + 1, np.array([[0], [1]], np.int32), ENDS, KEY_ENDS)
    )

    def attend(kv_lens=lens, **where):
        return octavo.attend(q, k_cache, v_cache, kv_lens, format="bshd", **where)

    def append_and_attend():
        octavo.append_tokens(new, new, k_cache, v_cache, longer, format="bshd")
        return attend(longer)

    def kvcache(*more, **options):
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, *more, cache_seqlens=lens, causal=True, **options
        )

    yield "flash_attn_with_kvcache", kvcache, attend
    yield (
        "flash_attn_with_kvcache, pages, LSE",
        lambda: kvcache(block_table=table, return_softmax_lse=True),
        lambda: attend(page_table=table, lse=True),
    )
    yield "flash_attn_with_kvcache, append", lambda: kvcache(new, new), append_and_attend
    packed, keys = q[:, 0], k_cache.reshape(16, 2, 16)
    yield (
        "flash_attn_varlen_func",
        lambda: flash_attn.flash_attn_varlen_func(packed, keys, keys, ends, key_ends, 1, 5),
        lambda: octavo.attend(packed, k_cache, v_cache, lens, token_offsets=ends),
    )
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    decode.plan(
        ends, convert(np.arange(2, dtype=np.int32)), lens, 2, 2, 16, 8, q_data_type="float32"
    )
    yield (
        "BatchDecodeWithPagedKVCacheWrapper.run",
        lambda: decode.run(packed, (k_cache, v_cache)),
        lambda: octavo.attend(packed, k_cache, v_cache, lens, page_table=table),
    )
    params = engine.InferenceParams(
        2, 64, 2, 16, float32, is_paged=True, page_size=16, device="cpu"
    )
    params.allocate_memory(1)
    params.pre_step({3: 1, 7: 1})
    module = engine.DotProductAttention(
        2, 16, attn_mask_type="padding_causal", qkv_format="thd"
    ).eval()
    group = params.cache_manager.groups[0]
    attention = octavo.Attention(group.cache, num_q_heads=2)
    yield (
        "DotProductAttention",
        lambda: module(packed, packed, packed, inference_params=params),
        lambda: attention.forward(group.plan, group.cache, 0, packed, packed, packed),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", action="store_true", help="with PyTorch's tensors")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    convert, float32 = (lambda array: array), np.float32
    if arguments.torch:
        import torch

        convert, float32 = torch.from_numpy, torch.float32
    for name, front, library in pairs(convert, float32):
        mine, bare = best_us(front), best_us(library)
        print(f"{mine:7.2f} us, {mine - bare:6.2f} over the library  {name}")
        if arguments.json:
            arrays = "torch" if arguments.torch else "numpy"
            row = {"arrays": arrays, "call": name, **stamp()}
            row.update({"us": round(mine, 2), "library_us": round(bare, 2)})
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
