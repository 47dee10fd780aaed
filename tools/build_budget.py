#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when a file takes longer to compile than it may.

.ninja_log tells what each file took by the clock, with other compilers running beside it. A file
that looks too slow there is compiled anew, alone and without ccache, and judged by its
processor time. Limits are for the machine they were set on; a slower one, or a busy one, gets as much
more as a reference file takes longer there, compiled right before and right after. A file out of
ccache looks fast and passes; a machine with an empty cache judges it.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

# Seconds for one file, by the first prefix that fits its path from the top of the tree. Kernels are
# compiled many times over in one file: for each GPU architecture, for each instruction set.
LIMITS = [
    ("cli/app.cpp", 10),
    ("src/kernels/cudnn/", 60),
    ("src/kernels/", 30),
    ("tests/", 12),  # GoogleTest, and JSON or regular expressions beside it, take most of it
    ("", 6),
]
# A clean build of the library and the programs, by two compilers at a time.
CLEAN_BUILD_SECONDS = 120
CLEAN_BUILD_JOBS = 2
# A neighbour on the same core makes even processor time longer: one good try is enough.
TRIES = 4
# How much of the clock was waiting is told by so many of the longest files.
SAMPLED = 5


# The reference: what it holds, and its processor seconds where the limits were set.
REFERENCE = """#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <regex>
#include <string>
#include <vector>
bool matches(const std::string& text) {
  std::map<std::string, std::function<bool()>> cases;
  cases["x"] = [&] { return std::regex_match(text, std::regex("[a-z]+(x|y)*")); };
  return cases["x"]();
}
"""
REFERENCE_SECONDS = 3.8


def limit_of(source):
    return next(seconds for prefix, seconds in LIMITS if source.startswith(prefix))


def durations(build):
    """Seconds by the clock of the newest run of each output."""
    seconds = {}
    for line in (build / ".ninja_log").read_text(encoding="utf-8").splitlines():
        fields = line.split("\t")
        if len(fields) >= 4:
            seconds[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
    return seconds


def compiled_files(build):
    """(path from the top, command, folder, output) of each file of the compilation database."""
    entries = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    top = Path(__file__).resolve().parent.parent
    for entry in entries:
        source = Path(entry["file"])
        if source.is_relative_to(top) and not source.is_relative_to(build):
            command = shlex.split(entry["command"])
            output = command[command.index("-o") + 1]
            yield source.relative_to(top).as_posix(), command, entry["directory"], output


def measure_alone(command, folder):
    """Processor seconds of one compilation without ccache."""
    if Path(command[0]).name == "ccache":
        command = command[1:]
    with tempfile.TemporaryDirectory() as scratch:
        command = list(command)
        command[command.index("-o") + 1] = str(Path(scratch) / "out.o")
        before = os.times()
        subprocess.run(command, cwd=folder, check=True)
        after = os.times()
    return (after.children_user + after.children_system
            - before.children_user - before.children_system)


def machine_factor(compiler):
    """How much longer than where the limits were set compiling takes here and now; at least 1."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "reference.cpp"
        source.write_text(REFERENCE, encoding="utf-8")
        command = [compiler, "-w", "-std=c++20", "-O2", "-g", "-c", str(source), "-o", "out.o"]
        return max(1.0, measure_alone(command, scratch) / REFERENCE_SECONDS)


def judge_alone(command, folder, limit):
    """(processor seconds on the machine of the limits, whether they are too many)"""
    compiler = next(word for word in command if Path(word).name != "ccache")
    best = float("inf")
    for _ in range(TRIES):
        before = machine_factor(compiler)
        took = measure_alone(command, folder)
        best = min(best, took / max(before, machine_factor(compiler)))
        if best <= limit:
            return best, False
    return best, True


def clean_seconds(files):
    """Seconds of a clean build by CLEAN_BUILD_JOBS compilers; files: (clock seconds, command, folder)."""
    clean = sum(took for took, _, _ in files) / CLEAN_BUILD_JOBS
    if clean <= CLEAN_BUILD_SECONDS:
        return clean
    longest = sorted(files, key=lambda file: file[0])[-SAMPLED:]
    alone = sum(judge_alone(command, folder, 0)[0] for _, command, folder in longest)
    return clean * alone / sum(took for took, _, _ in longest)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="a build folder of Ninja, after a build")
    build = parser.parse_args().build.resolve()

    logged = durations(build)
    over, library, slowest = 0, [], ("nothing", 0.0)
    for source, command, folder, output in compiled_files(build):
        key = os.path.relpath(Path(folder) / output, build)
        if key not in logged:
            continue
        took, limit = logged[key], limit_of(source)
        if not source.startswith(("tests/", "testing/", "bench/")):
            library.append((took, command, folder))
        if took > limit:
            took, too_slow = judge_alone(command, folder, limit)
            if too_slow:
                over += 1
                print(f"{source}: wanted at most {limit} s to compile, got {took:.1f} s")
        slowest = max(slowest, (source, took), key=lambda pair: pair[1])
    clean = clean_seconds(library)
    print(f"slowest file: {slowest[0]}, {slowest[1]:.1f} s; library and programs: {clean:.0f} s "
          f"with {CLEAN_BUILD_JOBS} compilers (files from ccache count little)")
    if clean > CLEAN_BUILD_SECONDS:
        over += 1
        print(f"clean build without tests: wanted at most {CLEAN_BUILD_SECONDS} s, "
              f"got {clean:.0f} s")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
