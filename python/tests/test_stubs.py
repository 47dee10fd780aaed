# SPDX-License-Identifier: Apache-2.0
"""The stubs tell the truth, and help(octavo) teaches."""

import ast
import re
from pathlib import Path

import pytest

import octavo
from octavo import _native

STUBS = ast.parse((Path(octavo.__file__).parent / "_native.pyi").read_text())
CLASSES = {node.name: node for node in STUBS.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUBS.body if isinstance(node, ast.FunctionDef)}


def methods(node):
    return {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}


def is_property(node):
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


def stub_parameters(node):
    """[(name, keyword only, has a default)] without self."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    plain = len(positional) - len(arguments.defaults)
    listed = [(a.arg, False, i >= plain) for i, a in enumerate(positional)]
    listed += [
        (a.arg, True, default is not None)
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [entry for entry in listed if entry[0] != "self"]


def module_parameters(function):
    """The same, from the first line of the docstring that nanobind writes."""
    line = function.__doc__.splitlines()[0]
    node = ast.parse(f"def {line}: ...".replace("octavo._native.", "")).body[0]
    return stub_parameters(node)


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_stubs_and_module_have_the_same_names():
    module = public(name for name in dir(_native))
    assert public([*CLASSES, *FUNCTIONS]) == module


@pytest.mark.parametrize("name", CLASSES)
def test_stubs_and_class_have_the_same_members(name):
    stub = methods(CLASSES[name])
    real = getattr(_native, name)
    assert public(stub) == public(vars(real))
    for member in public(stub):
        assert is_property(stub[member]) == isinstance(vars(real)[member], property)


CALLABLES = [(None, name) for name in FUNCTIONS] + [
    (cls, name)
    for cls, node in CLASSES.items()
    for name, method in methods(node).items()
    if not is_property(method) and (not name.startswith("_") or name == "__init__")
]


@pytest.mark.parametrize(("cls", "name"), CALLABLES)
def test_stubs_and_module_have_the_same_parameters(cls, name):
    if cls is None:
        stub, real = FUNCTIONS[name], getattr(_native, name)
    else:
        stub, real = methods(CLASSES[cls])[name], getattr(getattr(_native, cls), name)
    assert stub_parameters(stub) == module_parameters(real)


def test_everything_public_is_listed_and_explains_itself():
    assert octavo.__all__ == sorted(octavo.__all__)
    for name in public(octavo.__all__):
        assert getattr(octavo, name).__doc__, name
    for name, node in CLASSES.items():
        for member in public(methods(node)):
            assert getattr(getattr(_native, name), member).__doc__, f"{name}.{member}"
    assert octavo.__version__ == re.search(
        r"VERSION ([0-9.]+)\n *DESCRIPTION",
        (Path(__file__).parents[2] / "CMakeLists.txt").read_text(),
    ).group(1)


def test_the_modules_example_runs():
    lines = octavo.__doc__.splitlines()
    example = "\n".join(line[4:] for line in lines if line.startswith("    "))
    names = {}
    exec(example, names)
    assert names["out"].shape == (6, 8, 64)
