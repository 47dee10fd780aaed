# SPDX-License-Identifier: Apache-2.0
"""What the documents show runs, and is what the examples hold."""

import re
import runpy

import pytest

from case_files import REPOSITORY


def blocks(path, language):
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_guides_code_runs():
    names = {}
    for block in blocks("docs/python.md", "python"):
        exec(compile(block, "docs/python.md", "exec"), names)
    assert names["out"].dtype == "bf16"


def test_readme_shows_the_first_step(capsys):
    example = REPOSITORY / "examples" / "python" / "first_step.py"
    (shown,) = blocks("README.md", "python")
    # Without the head: the licence's line and what the file is for.
    assert shown == "".join(example.read_text(encoding="utf-8").splitlines(keepends=True)[2:])
    runpy.run_path(str(example))
    assert capsys.readouterr().out.endswith("3 of 4 pages used, 17 slots without a token\n")


@pytest.mark.parametrize("path", ["docs/python.md", "README.md"])
def test_documents_name_only_what_there_is(path):
    import octavo

    text = (REPOSITORY / path).read_text(encoding="utf-8")
    for name in set(re.findall(r"\boctavo\.([A-Za-z_]\w*)", text)) - {
        "compat",
        "h",
        "octavo",
        "torch",
    }:
        assert hasattr(octavo, name), name
