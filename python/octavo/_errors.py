# SPDX-License-Identifier: Apache-2.0
"""The exceptions: one for each code of the library, its message taken apart."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._native import Shortage

_FORM = re.compile(
    r"(?P<argument>[^:]*): wanted (?P<wanted>.*), got (?P<got>.*?)(?: \((?P<hint>.*)\))?", re.DOTALL
)


class Error(Exception):
    """What Octavo raises; the base of all below.

    Messages read "argument: wanted W, got G (hint)"; those parts are the attributes argument,
    wanted, got and hint (texts), and None where a message has another form.
    """

    argument: str | None = None
    wanted: str | None = None
    got: str | None = None
    hint: str | None = None

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        match = _FORM.fullmatch(message)
        if match:
            for name, text in match.groupdict().items():
                setattr(self, name, text)


class InvalidArgument(Error, ValueError):
    """An argument is wrong; nothing was changed."""


class Unsupported(Error, NotImplementedError):
    """The named backend, or every backend, cannot run this; the message lists what is missing."""


class OutOfMemory(Error, MemoryError):
    """Memory of the host or of a device could not be had; nothing was changed."""


class DeviceFailure(Error, RuntimeError):
    """A device or its driver reported an error."""


class NotCompiled(Error, RuntimeError):
    """This build leaves out what was asked for; the message says what it has."""


class Internal(Error, RuntimeError):
    """A defect of the library itself."""


class CacheFull(Error):
    """plan or fork found too few pages, sequences or slots; the cache is as before.

    An expected outcome of a full cache: release or truncate a sequence, or wait. `shortage` says
    what was missing and who holds it. KvCache.try_plan and try_fork return it as a value instead.
    """

    shortage: Shortage | None = None
