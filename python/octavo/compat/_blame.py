# SPDX-License-Identifier: Apache-2.0
"""Which argument was to blame when a front's call failed from within.

A front checks as it goes what may be wrong with right kinds of arguments. What is of no right kind,
a word for an array or one axis for three, fails somewhere inside; only then is it looked for, so
that calls which succeed don't pay for it.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import octavo

from ._arrays import dtype_name


class Want(NamedTuple):
    """What an argument is to be: in words, and the error of a value that it is not, or None."""

    text: str
    error_of: Any
    optional: bool = False

    def __or__(self, none):
        """Or None."""
        return self._replace(text=f"{self.text} or None", optional=True)

    def __call__(self, value):
        return None if value is None and self.optional else self.error_of(value)


def _one_of(types):
    return lambda x: None if isinstance(x, types) else TypeError


def _is_array(x):
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _holds_integers(x):
    if isinstance(x, (list, tuple)):
        return all(_number_error(i) is None and i == int(i) for i in x)
    return _is_array(x) and "int" in str(x.dtype)


def _axes(x):
    return len(x.shape) if _is_array(x) else 1


def array(*ranks):
    text = " or ".join(map(str, ranks))
    return Want(
        f"an array of {text} {'axis' if ranks == (1,) else 'axes'}",
        lambda x: TypeError if not _is_array(x) else None if len(x.shape) in ranks else ValueError,
    )


def ints(rank=1):
    return Want(
        f"integers, {rank} {'axis' if rank == 1 else 'axes'}",
        lambda x: TypeError if not _holds_integers(x) else None if _axes(x) == rank else ValueError,
    )


def _number_error(x):
    """Of what is no number. An array without axes may be one."""
    if isinstance(x, str) or (_is_array(x) and len(x.shape)):
        return TypeError
    try:
        float(x)
    except (TypeError, ValueError):
        return TypeError
    return None


def _whole_error(x):
    try:
        operator.index(x)
    except TypeError:
        return TypeError
    return TypeError if _is_array(x) and len(x.shape) else None


def _pair_error(x):
    if not isinstance(x, (tuple, list)):
        return TypeError
    if len(x) != 2:
        return ValueError
    return TypeError if any(i is not None and _whole_error(i) for i in x) else None


def _either(*wants):
    errors = [w.error_of for w in wants]
    return Want(
        " or ".join(w.text for w in wants),
        lambda x: None if any(e(x) is None for e in errors) else errors[-1](x),
    )


def _dims_error(x):
    return _pair_error(x) if isinstance(x, (tuple, list)) else _whole_error(x)


def _dtype_error(x):
    try:
        dtype_name(x)
    except (TypeError, NotImplementedError):
        return TypeError
    return TypeError if isinstance(x, str) else None


def _device_error(x):
    return None if re.fullmatch(r"cpu|cuda(:\d+)?", str(x)) else ValueError


NUMBER = Want("a number", _number_error)
DTYPE = Want("a dtype", _dtype_error)
DEVICE = Want("'cpu', 'cuda' or 'cuda:N'", _device_error)
WHOLE = Want("an int", _whole_error)
FLAG = Want("True or False", _one_of((bool, int)))
PAIR = Want("a pair of ints", _pair_error)
DIMS = Want("an int or a pair of them", _dims_error)
TEXT = Want("a str", _one_of(str))
STEP = Want("a dict {id: new tokens}", _one_of(Mapping))
LENGTHS = _either(WHOLE, ints())
SEQUENCE = Want("a tuple or a list", _one_of((tuple, list)))


def having(method, text):
    """What has a method."""
    return Want(text, lambda x: None if callable(getattr(x, method, None)) else TypeError)


def pages(rank):
    """One array or a pair."""

    def error_of(x):
        if isinstance(x, (tuple, list)):
            if len(x) != 2:
                return ValueError
            return next(filter(None, map(array(rank - 1).error_of, x)), None)
        return array(rank).error_of(x)

    return Want(f"an array of {rank} axes or a pair of {rank - 1}", error_of)


def described(x):
    """What was got, in words."""
    if _is_array(x):
        return f"{str(x.dtype).replace('torch.', '')} {list(x.shape)}"
    if isinstance(x, (int, float, str, tuple, list, type(None))) and len(repr(x)) < 60:
        return repr(x)
    return type(x).__name__


def _in_words(error):
    """Whether it was raised by a front or the library: theirs all say what was wanted."""
    return isinstance(error, (octavo.Error, NotImplementedError)) or "wanted" in str(error).lower()


def _blamed(wanted, error, given):
    """The error to raise instead, or None. given: {argument: value}."""
    for name, want in wanted.items():
        if name in given and (kind := want(given[name])) is not None:
            return kind(f"{name}: wanted {want.text}, got {described(given[name])}")
    if not isinstance(error, (IndexError, AttributeError, TypeError, ValueError)):
        return None
    arrays = [f"{n} {list(given[n].shape)}" for n in wanted if _is_array(given.get(n))]
    return ValueError(f"arguments: wanted such as fit each other, got {', '.join(arrays)}")


def name_argument(error, wanted, given):
    """Raises what says which argument of `given` is not as wanted, if `error` doesn't say it."""
    if given and not _in_words(error):
        named = _blamed(wanted, error, given)
        if named is not None:
            raise named from error


def names_arguments(**wanted):
    """A function whose wrong arguments are named when it fails: {argument: Want}.

    Costs a call more than name_argument in an `except`, for functions that are called often.
    """

    def decorate(function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                try:
                    given = signature.bind(*args, **kwargs).arguments
                except TypeError:
                    given = {}  # Python has said which argument is missing or unknown
                name_argument(error, wanted, given)
                raise

        return call

    return decorate
