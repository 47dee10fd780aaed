# SPDX-License-Identifier: Apache-2.0
"""Names that a library has and its front has not: to import one is fine, to use it says so."""

from __future__ import annotations

from ._arrays import not_covered


class _Absent(type):
    """Of classes that can't be made, nor called as the functions that some stand for."""

    def __call__(cls, *args, **kwargs):
        raise not_covered(cls.__name__)


def absent(module, names):
    """A module's __getattr__: for `names` what raises NotImplementedError when it is called."""

    def find(name):
        if name in names:
            doc = f"Not covered by {module}: raises NotImplementedError when it is called."
            return _Absent(name, (), {"__doc__": doc, "__module__": module})
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
