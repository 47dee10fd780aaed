# SPDX-License-Identifier: Apache-2.0
"""Names that a library has and its front has not: not there for who asks, and they say so."""

from __future__ import annotations


class NotCovered(NotImplementedError, AttributeError):
    """A name that a front has not, whose library has it.

    An AttributeError, so that hasattr and `from ... import ...` find it missing as programs expect
    that choose by what their version of the library has; a NotImplementedError as whatever else a
    front does not cover.
    """


def absent(module, names):
    """A module's __getattr__, which names those of `names` that are asked for."""

    def find(name):
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        error = NotCovered(f"{name}: not covered by {module}")
        error.name = name
        raise error

    return find
