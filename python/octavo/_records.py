# SPDX-License-Identifier: Apache-2.0
"""Small values that calls return or take: tuples with names, and bits with a dtype."""

from __future__ import annotations

from typing import Any, NamedTuple


class PageCopy(NamedTuple):
    """Rows that a step copies from page to page before its first layer, in all layers."""

    source: int
    destination: int
    num_slots: int


class PageHolder(NamedTuple):
    """A sequence that holds pages; num_shared_pages of them would not be freed with it."""

    id: int
    num_pages: int
    num_shared_pages: int


class CacheStats(NamedTuple):
    """A cache's use at one moment. Slots are counted once, however many sequences share their page.

    num_tokens: of all live sequences. pages_shared: held by more than one. slots_wasted: of used
    pages, without a token. bytes: storage of K and V, all layers; 0 for the caller's memory.
    """

    num_seqs: int
    num_tokens: int
    pages_total: int
    pages_used: int
    pages_free: int
    pages_shared: int
    slots_used: int
    slots_wasted: int
    bytes: int


class CacheSizes(NamedTuple):
    """What a cache takes, in bytes; under least_workspace one is refused."""

    keys: int
    values: int
    workspace: int
    least_workspace: int


class WorkspaceSizes(NamedTuple):
    """What a Workspace needs for a call, in bytes.

    Fewer than least are refused; more than good gain little.
    """

    least: int
    good: int


class StepMaxima(NamedTuple):
    """The most that a step may have: what calls are sized by that serve many steps.

    num_tokens: new tokens of all sequences. max_new_tokens, max_kv_len: new tokens and all keys of
    one sequence.
    """

    num_seqs: int
    num_tokens: int
    max_new_tokens: int
    max_kv_len: int


class LayerTensors(NamedTuple):
    """One layer's tensors for a GraphedStep, at the same places for every replay.

    They hold as many rows as the maxima say, lse and positions maxima.num_tokens. Shapes and the
    other arguments: Attention.forward's; lse is an array or None.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any = None
    format: str = "thd"
    sinks: Any = None
    alibi_slopes: Any = None
    rope: Any = None
    positions: Any = None


class Support(NamedTuple):
    """Whether one backend can run something, and why; missing is empty exactly when ok."""

    backend: str
    ok: bool
    required: list[str]
    supported: list[str]
    missing: list[str]


class BackendInfo(NamedTuple):
    """A backend of this build on this machine; why_not is empty when it is usable."""

    backend: str
    compiled: bool
    usable: bool
    description: str
    why_not: str


class TypedArray:
    """An array with its dtype named: TypedArray(bits, "bf16"), bits an array of uint16 or int16.

    For dtypes that NumPy does not have; arrays of ml_dtypes.bfloat16 need none. Results that are
    made for a TypedArray are TypedArrays, too. Immutable.
    """

    __slots__ = ("_array", "_dtype")

    def __init__(self, array: Any, dtype: str) -> None:
        self._array = array
        self._dtype = dtype

    @property
    def array(self) -> Any:
        """The array as it was given."""
        return self._array

    @property
    def dtype(self) -> str:
        """The name of the dtype that its bits mean."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's."""
        return tuple(self._array.shape)

    def __repr__(self) -> str:
        return f"TypedArray({list(self.shape)}, {self._dtype!r})"
