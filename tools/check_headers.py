#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles each public header alone, and on request measures what including it costs.

The cost is processor time of the compiler, not time by the clock, so that a busy machine doesn't
change the verdict; the best of three runs counts.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
RUNS = 3


def compile_alone(compiler, includes, header, folder):
    """Processor seconds to compile a file that includes nothing but `header`; exits if it can't."""
    source = folder / "alone.cpp"
    source.write_text(f"#include <octavo/{header}>\n", encoding="utf-8")
    command = [compiler, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{path}" for path in includes]
    command += ["-c", str(source), "-o", str(folder / "alone.o")]
    before = os.times()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    after = os.times()
    if result.returncode != 0:
        sys.exit(f"<octavo/{header}> does not compile alone:\n{result.stderr}")
    return (after.children_user + after.children_system
            - before.children_user - before.children_system)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="build folder, for version.h")
    parser.add_argument("--compiler", default=os.environ.get("CXX", "c++"))
    parser.add_argument("--max-seconds", type=float, help="fail when a header costs more")
    arguments = parser.parse_args()

    includes = [TOP / "include", arguments.build.resolve() / "include"]
    headers = sorted(p.name for path in includes for p in (path / "octavo").glob("*.h"))
    if "version.h" not in headers:
        sys.exit(f"no octavo/version.h under {includes[1]}: configure first")

    too_slow = 0
    with tempfile.TemporaryDirectory() as folder:
        for header in headers:
            runs = RUNS if arguments.max_seconds else 1
            cost = min(compile_alone(arguments.compiler, includes, header, Path(folder))
                       for _ in range(runs))
            verdict = "compiles alone"
            if arguments.max_seconds:
                verdict = f"{cost:.2f} s"
                if cost > arguments.max_seconds:
                    too_slow += 1
                    verdict += f": wanted at most {arguments.max_seconds:g} s"
            print(f"<octavo/{header}>  {verdict}")
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
