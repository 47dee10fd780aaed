# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel, installs it into clean environments, and runs the first step in each.

check_wheel.py: with this Python, and with every later one that is found. The wheel must be one for
all of them. Exit status 77 where no package index can be reached. A script, not a test of pytest's:
it takes minutes and is CTest's Python.Wheel (label slow).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
NO_INDEX = 77


def run(*command, **options):
    print("+", *command, flush=True)
    return subprocess.run([str(part) for part in command], text=True, check=False, **options)


def build_wheel(folder):
    """The wheel of the CPU part: no CUDA is asked for, none may be needed."""
    built = run(
        sys.executable, "-m", "pip", "wheel", "-q", REPOSITORY, "--no-deps", "--no-build-isolation",
        "-w", folder, "-C", "cmake.define.OCTAVO_CUDA=OFF",
    )  # fmt: skip
    if built.returncode != 0:
        sys.exit("the wheel could not be built")
    wheels = list(folder.iterdir())
    if len(wheels) != 1 or "-cp311-abi3-" not in wheels[0].name:
        sys.exit(f"wanted one wheel for cp311-abi3, got {[wheel.name for wheel in wheels]}")
    return wheels[0]


def pythons():
    yield sys.executable
    for minor in range(sys.version_info.minor + 1, 20):
        name = f"python3.{minor}"
        try:
            found = run(name, "-c", "import ensurepip", capture_output=True)
        except FileNotFoundError:
            continue
        if found.returncode == 0:
            yield name


def try_wheel(python, wheel, folder):
    """Installs and runs, away from the sources, with no GPU to be seen."""
    if run(python, "-m", "venv", folder).returncode != 0:
        sys.exit(f"{python} makes no environment")
    clean = folder / "bin" / "python"
    if run(clean, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel).returncode:
        sys.exit(NO_INDEX)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    example = (REPOSITORY / "examples" / "python" / "first_step.py").read_text(encoding="utf-8")
    program = folder / "first_step.py"
    program.write_text(example + "\nprint(octavo.__file__)\n", encoding="utf-8")
    result = run(clean, program, cwd=folder, env=environment, capture_output=True)
    print(result.stdout, result.stderr)
    if result.returncode != 0 or "3 of 4 pages used" not in result.stdout:
        sys.exit(f"{python}: the first step failed")
    if str(folder) not in result.stdout:
        sys.exit(f"{python}: another octavo than the wheel's was imported")


def main():
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "wheels").mkdir()
        wheel = build_wheel(Path(scratch) / "wheels")
        for i, python in enumerate(pythons()):
            try_wheel(python, wheel, Path(scratch) / f"clean{i}")


if __name__ == "__main__":
    main()
