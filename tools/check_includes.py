#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds every #include to the directions between the rooms, and a few rules no compiler sees.

The table ROOMS says, for each folder, which other rooms and which third-party headers its files may
include. A file belongs to the room with the longest matching folder. A header that neither a room
nor the standard nor LIBRARIES knows is an error: name it here first.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PUBLIC = "include/octavo"
TESTING = ["testing"]
PROGRAM = ["fmt", "openmp", "posix"]


@dataclass(frozen=True)
class Room:
    folder: str
    rooms: tuple  # folders it may include, beside its own and the public headers
    libraries: tuple  # names in LIBRARIES


def room(folder, rooms=(), libraries=()):
    return Room(folder, tuple(rooms), tuple(libraries))


ROOMS = [
    room(PUBLIC),
    room("src/base", libraries=["fmt"]),
    room("src/cache", ["src/base"], ["fmt"]),
    room("src/plan", ["src/base", "src/cache"], ["fmt"]),
    room("src/device", ["src/base"], ["fmt", "posix"]),
    room("src/device/cuda", ["src/base", "src/device"], ["fmt", "cuda", "posix"]),
    room("src/kernels", ["src/base"]),  # the parameter structs that dispatch fills
    room("src/kernels/cpu", ["src/base", "src/device", "src/kernels/params.h"],
         ["fmt", "highway", "openmp"]),
    room("src/device/no_cuda", ["src/base", "src/device"], ["fmt"]),
    room("src/kernels/cuda/common", ["src/base", "src/kernels/params.h"], ["cuda"]),
    room("src/kernels/cudnn", ["src/base", "src/device", "src/device/cuda",
                               "src/kernels/params.h"],
         ["fmt", "cuda", "cudnn", "posix"]),
    room("src/dispatch", ["src/base", "src/cache", "src/plan", "src/device", "src/kernels"],
         ["fmt", "openmp"]),
    room("src/api", ["src/base", "src/cache", "src/plan", "src/device", "src/dispatch",
                     "src/kernels/params.h"],  # it checks tensors and says where they lie
         ["fmt", "openmp"]),
    room("testing", libraries=[*PROGRAM, "json"]),
    room("testing/cuda", TESTING, [*PROGRAM, "cuda"]),
    room("testing/no_cuda", TESTING, PROGRAM),
    room("cli", [*TESTING, "bench"], [*PROGRAM, "json", "cli11"]),
    room("examples", libraries=[*PROGRAM, "cuda"]),
    room("examples/generate", libraries=[*PROGRAM, "json", "cli11", "pcre2", "blas", "highway"]),
    room("examples/generate/cuda", ["examples/generate"], ["fmt", "cuda"]),
    room("examples/generate/no_cuda", ["examples/generate"]),
    room("python", libraries=["fmt", "nanobind"]),  # the public headers, like any other user
    room("bench", [*TESTING, "src"], [*PROGRAM, "json", "highway", "benchmark"]),
    room("bench/gpu", [*TESTING, "bench", "src/kernels/cuda/unfused"], [*PROGRAM, "cuda"]),
    room("tests/gpu", [*TESTING, "src", "tests"], [*PROGRAM, "gtest", "cuda"]),
    room("tests/kernels_cudnn/gpu", ["src", "tests"], ["fmt", "cuda"]),
    room("tests", [*TESTING, "src", "cli", "examples/generate"],
         [*PROGRAM, "json", "gtest", "rapidcheck", "highway", "dlpack"]),
]

# Each family of CUDA kernels knows the common parts and itself, never another family.
FAMILY_PARENT = "src/kernels/cuda"
FAMILY = room(FAMILY_PARENT,
              ["src/base", "src/device", "src/kernels/cuda/common", "src/kernels/params.h"],
              ["fmt", "cuda"])

LIBRARIES = {
    "fmt": r"fmt/.*",
    "highway": r"hwy/.*",
    "openmp": r"omp\.h",
    "json": r"nlohmann/.*",
    "cli11": r"CLI/.*",
    "pcre2": r"pcre2\.h",
    "blas": r"cblas\.h|openblas_config\.h",
    "gtest": r"(gtest|gmock)/.*",
    "rapidcheck": r"rapidcheck(/.*|\.h)",
    "benchmark": r"benchmark/.*",
    "nanobind": r"nanobind/.*",
    "dlpack": r"dlpack/dlpack\.h",
    "cuda": r"cuda.*\.h|cublasLt\.h|mma\.h|cooperative_groups.*",
    "cudnn": r"cudnn.*",
    "posix": r"(dlfcn|fcntl|link|unistd|sched|pthread|poll|spawn|signal)\.h|sys/.*\.h",
}

STANDARD = re.compile(r"[a-z_]+|std(int|def|lib|io|arg)\.h|(string|math|float|errno|limits)\.h")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
LONGEST_FILE = 400


def inside(path, folder):
    return path == folder or path.startswith(folder + "/")


def room_of(path):
    """The room that holds `path` (relative to the top), or None."""
    if inside(path, FAMILY_PARENT) and not inside(path, FAMILY_PARENT + "/common"):
        family = "/".join(path.split("/")[:4])
        return Room(family, FAMILY.rooms, FAMILY.libraries)
    fitting = [r for r in ROOMS if inside(path, r.folder)]
    return max(fitting, key=lambda r: len(r.folder), default=None)


def resolve(root, file, name):
    """The path of an own header, relative to the top, or None when `name` is none of ours."""
    if name.startswith("octavo/"):
        return "include/" + name
    for start in (Path(file).parent, Path("src"), Path("."), Path("tests")):
        if (root / start / name).is_file():
            return (root / start / name).resolve().relative_to(root.resolve()).as_posix()
    return None


def include_problem(root, file, home, name):
    target = resolve(root, file, name)
    if target is not None:
        if inside(target, PUBLIC) or room_of(target).folder == home.folder:
            return None
        if target.endswith(".cuh") and home.folder in ("src/dispatch", "src/api"):
            return f"{home.folder} may not include device code, got {name}"
        if any(inside(target, allowed) for allowed in home.rooms):
            return None
        allowed = ", ".join(home.rooms) or "no other room"
        return f"{home.folder} may include {allowed}; got {name} of {room_of(target).folder}"
    if STANDARD.fullmatch(name):
        return None
    for library, pattern in LIBRARIES.items():
        if re.fullmatch(pattern, name):
            if library in home.libraries:
                return None
            allowed = ", ".join(home.libraries) or "none"
            return f"{home.folder} may use the libraries: {allowed}; got {name} of {library}"
    return f"unknown header {name}: no room has it and LIBRARIES doesn't name it"


def check_file(root, file):
    """Yields (line, message) for each problem of one file."""
    home = room_of(file)
    if home is None:
        yield 1, "belongs to no room of the table"
        return
    lines = (root / file).read_text(encoding="utf-8").splitlines()
    is_header = file.endswith((".h", ".cuh"))
    if not lines or lines[0] != "// SPDX-License-Identifier: Apache-2.0":
        yield 1, "wanted '// SPDX-License-Identifier: Apache-2.0' as the first line"
    # Highway's per-target headers are included once for each target and toggle a guard instead.
    if is_header and "#pragma once" not in lines and "HWY_TARGET_TOGGLE" not in "\n".join(lines):
        yield 1, "wanted #pragma once"
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if match:
            name = match.group(2)
            if is_header and name == "iostream":
                yield number, "<iostream> in a header (use <iosfwd>)"
            problem = include_problem(root, file, home, name)
            if problem:
                yield number, problem
        elif is_header and re.match(r"\s*using\s+namespace\b", line):
            yield number, "using namespace in a header"


def own_files(root):
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"],
        capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = listed.stdout.split("\0")
    else:  # an unpacked archive
        names = [p.relative_to(root).as_posix() for p in root.rglob("*")]
        names = [n for n in names if not n.startswith("build/")]
    return sorted(n for n in names if Path(n).suffix in SUFFIXES and (root / n).is_file())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    files = own_files(root)
    problems = 0
    for file in files:
        for line, message in check_file(root, file):
            problems += 1
            print(f"{file}:{line}: {message}")
        length = (root / file).read_text(encoding="utf-8").count("\n")
        if length > LONGEST_FILE:
            print(f"{file}: warning: {length} lines, more than {LONGEST_FILE}")
    print(f"include rules: {len(files)} files, {problems} problems")
    return 1 if problems or not files else 0


if __name__ == "__main__":
    sys.exit(main())
