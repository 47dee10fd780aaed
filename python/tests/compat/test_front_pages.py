# SPDX-License-Identifier: Apache-2.0
"""The code on the pages docs/python/coming-from-*.md runs, and what they name is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[3] / "docs" / "python").glob("coming-from-*.md"))


def test_there_is_a_page_for_each_front():
    assert [p.stem.removeprefix("coming-from-") for p in PAGES] == [
        "flash-attn",
        "flashinfer",
        "transformer-engine",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_code_runs(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_imports_to_change_to_work(page):
    text = page.read_text("utf-8")
    modules = set(re.findall(r"octavo\.compat\.[a-z_.]*[a-z_]", text))
    assert modules
    for module in modules:
        importlib.import_module(module)
