# SPDX-License-Identifier: Apache-2.0
"""What a call costs from Python, C++ included: one token of one head, on one thread.

python python/bench/call_cost.py [--torch] [--json FILE]. Each figure is the best of many rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np

import octavo

ROUNDS, CALLS = 25, 1000


def best_us(call) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e6


def measurements(convert):
    cache = octavo.KvCache(num_kv_heads=1, head_dim=8, max_num_seqs=64, max_seq_len=64)
    attention = octavo.Attention(cache, num_q_heads=1, num_threads=1)
    plan = cache.plan({0: 1})
    cache.begin(plan)
    q, k, v, out = (convert(np.zeros((1, 1, 8), np.float32)) for _ in range(4))
    yield "forward, out given", lambda: attention.forward(plan, cache, 0, q, k, v, out=out)
    yield "forward, new out", lambda: attention.forward(plan, cache, 0, q, k, v)
    yield "forward, new out and lse", lambda: attention.forward(plan, cache, 0, q, k, v, lse=True)

    pages = convert(np.zeros((1, 64, 1, 8), np.float32))
    where = {
        "kv_lens": convert(np.ones(1, np.int32)),
        "token_offsets": convert(np.array([0, 1], np.int32)),
        "page_table": convert(np.zeros((1, 1), np.int32)),
        "num_threads": 1,
    }
    yield "attend, out given", lambda: octavo.attend(q, pages, pages, **where, out=out)
    yield "append_tokens", lambda: octavo.append_tokens(k, v, pages, pages, **where)

    planner = octavo.KvCache(num_kv_heads=1, head_dim=8, max_num_seqs=64, max_seq_len=64)
    for count in (1, 32):
        step = dict.fromkeys(range(count), 1)
        yield f"plan and undo, {count} sequences", lambda s=step: planner.undo(planner.plan(s))


def stamp() -> dict:
    """Where, when and of what the figures are."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    commit = os.environ.get("OCTAVO_COMMIT", "")  # where the tree is a copy without its history
    if not commit and shutil.which("git"):
        asked = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        commit = asked.stdout.strip()
    return {
        "commit": commit,
        "cpu_target": octavo.cpu_target(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": cpu.group(1) if cpu else platform.machine(),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", action="store_true", help="with PyTorch's tensors")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    convert = lambda array: array  # noqa: E731
    if arguments.torch:
        import torch

        convert = torch.from_numpy
    for name, call in measurements(convert):
        figure = best_us(call)
        print(f"{figure:7.2f} us  {name}")
        if arguments.json:
            arrays = "torch" if arguments.torch else "numpy"
            row = {"arrays": arrays, "call": name, **stamp(), "us": round(figure, 2)}
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
