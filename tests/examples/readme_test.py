#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""README's C++ example is examples/first_step.cpp, line by line, without its head comment."""
import itertools
import pathlib
import sys

root = pathlib.Path(__file__).resolve().parents[2]
readme = (root / "README.md").read_text(encoding="utf-8")
shown = readme.split("```cpp\n", 1)[1].split("```", 1)[0]
source = (root / "examples" / "first_step.cpp").read_text(encoding="utf-8")
lines = source.splitlines(keepends=True)
wanted = "".join(itertools.dropwhile(lambda line: line.startswith("//"), lines))
if shown != wanted:
    sys.exit("README.md: wanted examples/first_step.cpp as its C++ example, got another text")
print("README.md shows examples/first_step.cpp")
