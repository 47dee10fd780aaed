# SPDX-License-Identifier: Apache-2.0
# The compiled module: what octavo/__init__.py hands on. The docstrings of the module itself teach;
# here stand the types. A test holds both to the same names and parameters.
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ._records import (
    BackendInfo,
    CacheSizes,
    CacheStats,
    LayerTensors,
    PageCopy,
    PageHolder,
    StepMaxima,
    Support,
    WorkspaceSizes,
)

# Anything that shows its memory: a NumPy array, an array with __dlpack__ (PyTorch, JAX, CuPy), or a
# TypedArray. Inputs may be read-only; what is written must be writable.
Array = Any
# Integers for the host: a list or tuple of ints, or an int32 (taken as it is) or int64 (copied) array.
Ints = Any
# None, a CUDA stream's address as an int, or an object with cuda_stream (PyTorch) or ptr (CuPy).
Stream = Any
DType = Literal["f32", "f16", "bf16", "f8e4m3", "i8", "i32"]
Format = Literal["bshd", "sbhd", "thd"]
Kind = Literal["paged", "contiguous"]
Mask = Literal["causal", "full"]
BackendName = Literal["auto", "unfused", "cpu", "fused", "flash2", "flash3"]
Compute = Literal["same", "fp8"]

__version__: str

class Shortage:
    """What a step or a fork lacked. False in a condition."""

    def __bool__(self) -> Literal[False]: ...
    @property
    def pages_wanted(self) -> int: ...
    @property
    def pages_free(self) -> int: ...
    @property
    def pages_total(self) -> int: ...
    @property
    def seqs_wanted(self) -> int: ...
    @property
    def seqs_free(self) -> int: ...
    @property
    def too_long(self) -> bool: ...
    @property
    def longest_id(self) -> int: ...
    @property
    def longest_len(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def holders(self) -> list[PageHolder]: ...

class StepPlan:
    """What one step needs, in integers. Immutable, comparable by content, printable.

    The arrays are read-only views of the plan's own memory (no copy); each keeps the plan alive.
    """

    def __bool__(self) -> Literal[True]: ...
    def __eq__(self, other: object) -> bool: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def max_kv_len(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def ids(self) -> NDArray[np.int64]: ...
    @property
    def rows(self) -> NDArray[np.int32]: ...
    @property
    def token_offsets(self) -> NDArray[np.int32]: ...
    @property
    def past_lens(self) -> NDArray[np.int32]: ...
    @property
    def kv_lens(self) -> NDArray[np.int32]: ...
    @property
    def first_entries(self) -> NDArray[np.int32]: ...
    @property
    def entry_offsets(self) -> NDArray[np.int32]: ...
    @property
    def entries(self) -> NDArray[np.int32]: ...
    @property
    def clear_lens(self) -> NDArray[np.int32]: ...
    @property
    def copies(self) -> list[PageCopy]: ...
    def slot(self, seq_idx: int, token_idx: int) -> int: ...
    def position(self, seq_idx: int, token_idx: int) -> int: ...

class KvCache:
    """Keys and values of many growing sequences, paged or contiguous.

    keys, values: memory of the caller's, [num_layers, num_pages, page_size, num_kv_heads, head_dim]
    (contiguous: [num_layers, max_num_seqs, max_seq_len, ...]), any strides, kept alive by the cache.
    """

    def __init__(
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        max_num_seqs: int,
        max_seq_len: int,
        num_layers: int = 1,
        head_dim_v: int = 0,  # 0: head_dim
        dtype: DType = "f32",
        kind: Kind = "paged",
        page_size: int = 16,
        num_pages: int = 0,  # 0: as many as max_num_seqs full sequences need
        device: str = "cpu",  # "cpu", "cuda", "cuda:1"
        keys: Array | None = None,
        values: Array | None = None,
        workspace: Array | None = None,  # one axis of bytes, on a GPU
        workspace_bytes: int = 0,
    ) -> None: ...
    def plan(self, step: Mapping[int, int] | Iterable[tuple[int, int]]) -> StepPlan:
        """Takes the slots of a step, {id: new tokens} or [(id, new tokens)], in batch order.

        Raises CacheFull (with .shortage) when they don't suffice; the cache is then as before.
        """
    def try_plan(self, step: Mapping[int, int] | Iterable[tuple[int, int]]) -> StepPlan | Shortage:
        """As plan, with the shortage as a value: `if not (plan := cache.try_plan(step)): ...`."""
    def undo(self, plan: StepPlan) -> None: ...
    def begin(self, plan: StepPlan, stream: Stream = None) -> None: ...
    def release(self, id: int) -> None: ...
    def truncate(self, id: int, length: int) -> None: ...
    def fork(self, source: int, to: int) -> None:
        """Raises CacheFull when no sequence is free."""
    def try_fork(self, source: int, to: int) -> Shortage | None: ...
    def __contains__(self, id: int) -> bool: ...
    def __len__(self) -> int:
        """Live sequences."""
    def length(self, id: int) -> int: ...
    def page_ids(self, id: int) -> list[int]: ...
    def sequence_ids(self) -> list[int]: ...
    def stats(self) -> CacheStats: ...
    def audit(self) -> None: ...
    def key_storage(self, layer: int) -> Array:
        """[num_pages, page_size, num_kv_heads, head_dim], writable, no copy, by the cache's strides.

        A NumPy array on the CPU (bf16: ml_dtypes.bfloat16 where installed, else a TypedArray); on a
        GPU an object with __dlpack__.
        """
    def value_storage(self, layer: int) -> Array: ...
    def gather(
        self,
        plan: StepPlan,
        layer: int,
        k: Array | None = None,
        v: Array | None = None,
        stream: Stream = None,
    ) -> tuple[Array, Array]:
        """Keys and values of the step's sequences as rows: [num_seqs, max_kv_len, num_kv_heads, dim]."""
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def version(self) -> int: ...

class Rope:
    """Rotary position embedding; cos and sin: float32 [num_table_positions, rotary_dim / 2], dense."""

    def __init__(
        self,
        style: Literal["half", "interleaved"] = "half",
        rotary_dim: int = 0,  # 0: head_dim, or what the tables say
        base: float = 10000.0,
        cos: Array | None = None,
        sin: Array | None = None,
    ) -> None: ...
    @property
    def style(self) -> str: ...
    @property
    def rotary_dim(self) -> int: ...
    @property
    def base(self) -> float: ...

class Explanation:
    """Which backend is chosen and why; str() prints a table."""

    @property
    def chosen(self) -> BackendName:
        """"auto" when none can run it."""
    @property
    def reason(self) -> str: ...
    @property
    def backends(self) -> list[Support]: ...

class Attention:
    """Attention with one configuration over caches like `cache`."""

    def __init__(
        self,
        cache: KvCache,
        *,
        num_q_heads: int,
        softmax_scale: float | None = None,  # None: 1 / sqrt(head_dim)
        mask: Mask = "causal",
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        batch_invariant: bool = False,
        backend: BackendName = "auto",
        compute: Compute = "same",
        num_threads: int = 0,
    ) -> None: ...
    def forward(
        self,
        plan: StepPlan,
        cache: KvCache,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        *,
        format: Format = "thd",
        out: Array | None = None,
        lse: Array | bool | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        rope: Rope | None = None,
        positions: Ints | None = None,
        maxima: StepMaxima | None = None,
        stream: Stream = None,
    ) -> Any:
        """Appends k and v, then attends. Returns out, or (out, lse) when lse is True or an array.

        out: new (q's dtype and framework) when None. lse: float32 [num_tokens, num_q_heads].
        """
    def append(
        self,
        plan: StepPlan,
        cache: KvCache,
        layer: int,
        k: Array,
        v: Array,
        *,
        format: Format = "thd",
        rope: Rope | None = None,
        positions: Ints | None = None,
        maxima: StepMaxima | None = None,
        stream: Stream = None,
    ) -> None: ...
    def attend(
        self,
        plan: StepPlan,
        cache: KvCache,
        layer: int,
        q: Array,
        *,
        format: Format = "thd",
        out: Array | None = None,
        lse: Array | bool | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        rope: Rope | None = None,
        positions: Ints | None = None,
        maxima: StepMaxima | None = None,
        stream: Stream = None,
    ) -> Any: ...
    def explain(self, plan: StepPlan, format: Format = "thd") -> Explanation:
        """What every backend says to this step, and which one forward would take.

        Shapes and dtypes are the configuration's; what tensors add is taken to fit. Where a backend
        lacks workspace, the bytes are named. Enqueues nothing, waits for nothing.
        """

class GraphedStep:
    """Append and attention of all layers over a GPU's KvCache, captured once as a CUDA graph."""

    def __init__(
        self,
        attention: Attention,
        cache: KvCache,
        maxima: StepMaxima,
        layers: Sequence[LayerTensors],
    ) -> None: ...
    def replay(self, plan: StepPlan, stream: Stream = None) -> None: ...
    @property
    def maxima(self) -> StepMaxima: ...
    @property
    def backend(self) -> BackendName: ...

class Workspace:
    """Memory and the planned step for attention over a cache of the caller's in a GPU's memory."""

    def __init__(self, device: str = "cuda") -> None: ...
    def sizes(
        self,
        q: Array,
        k_cache: Array,
        v_cache: Array,
        kv_lens: Array,
        *,
        token_offsets: Array | None = None,
        page_table: Array | None = None,
        row_indices: Array | None = None,
        format: Format = "thd",
        out: Array | None = None,
        lse: Array | bool | None = None,
        mask: Mask = "causal",
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        rope: Rope | None = None,
        positions: Array | None = None,
        backend: BackendName = "auto",
        compute: Compute = "same",
        batch_invariant: bool = False,
        max_new_tokens: int = 0,  # 0: as many as q has room for
        max_kv_len: int = 0,  # 0: what a row can hold
    ) -> WorkspaceSizes: ...
    def use(self, memory: Array) -> None:
        """One dense axis of bytes on the device, kept alive."""
    def plan(
        self,
        k_cache: Array,
        v_cache: Array,
        kv_lens: Array,
        *,
        token_offsets: Array,
        num_tokens: int,
        page_table: Array | None = None,
        row_indices: Array | None = None,
        max_new_tokens: int = 0,
        max_kv_len: int = 0,
        stream: Stream = None,
    ) -> None: ...
    def check(self, stream: Stream = None) -> None: ...
    @property
    def device(self) -> str: ...


def attend(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    kv_lens: Ints,
    *,
    token_offsets: Ints | None = None,
    page_table: Array | None = None,
    row_indices: Ints | None = None,
    format: Format = "thd",
    out: Array | None = None,
    lse: Array | bool | None = None,
    softmax_scale: float | None = None,
    mask: Mask = "causal",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    rope: Rope | None = None,
    positions: Ints | None = None,
    backend: BackendName = "auto",
    compute: Compute = "same",
    batch_invariant: bool = False,
    num_threads: int = 0,
    workspace: Workspace | None = None,
    max_new_tokens: int = 0,
    max_kv_len: int = 0,
    stream: Stream = None,
) -> Any:
    """Attention over a cache of the caller's own, the new tokens already in it (see append_tokens).

    q: [T, Hq, D] (thd), [B, L, Hq, D] (bshd), [L, B, Hq, D] (sbhd).
    k_cache [N, P, Hk, D], v_cache [N, P, Hk, Dv]: N pages of P slots, or without a page_table N rows
    of P slots; any strides with a dense last axis (other layouts run on the unfused backend).
    kv_lens [B]: tokens of each sequence, the step's new ones included; query i of n stands at
    kv_len - n + i.
    token_offsets [B + 1]: prefix sums of the new tokens. None: all sequences bring equally many
    (L of bshd and sbhd, T / B of thd).
    page_table [rows, M] int32; entries past a sequence's last page are never read.
    row_indices [B]: which row (of the page table, or of the cache) is each sequence's; None: row b.
    positions [T]: of the new tokens, packed in batch order, for RoPE alone.
    rope rotates q; K must have been rotated when it was written.
    sinks, alibi_slopes: float32 [Hq].
    workspace, max_new_tokens, max_kv_len: on a GPU; see Workspace.
    Returns out, or (out, lse) when lse is True or an array (float32 [T, Hq], packed in batch order).
    """

def check_attend(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    kv_lens: Ints,
    *,
    token_offsets: Ints | None = None,
    page_table: Array | None = None,
    row_indices: Ints | None = None,
    format: Format = "thd",
    out: Array | None = None,
    lse: Array | bool | None = None,
    softmax_scale: float | None = None,
    mask: Mask = "causal",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    rope: Rope | None = None,
    positions: Ints | None = None,
    backend: BackendName = "auto",
    compute: Compute = "same",
    batch_invariant: bool = False,
    num_threads: int = 0,
    workspace: Workspace | None = None,
    max_new_tokens: int = 0,
    max_kv_len: int = 0,
    stream: Stream = None,
) -> None:
    """Raises what attend would raise for these arguments before it enqueues anything; does nothing
    else.

    For an append whose tokens are not to stay in the cache without their attention. The new tokens
    need not be there yet, nor, on a GPU, the step be planned; a workspace is needed there.
    """

def append_tokens(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    kv_lens: Ints,
    *,
    token_offsets: Ints | None = None,
    page_table: Array | None = None,
    row_indices: Ints | None = None,
    format: Format = "thd",
    rope: Rope | None = None,
    positions: Ints | None = None,
    num_threads: int = 0,
    workspace: Workspace | None = None,
    max_new_tokens: int = 0,
    max_kv_len: int = 0,
    stream: Stream = None,
) -> None:
    """Writes new keys (rotated when rope is given) and values at the last positions of each sequence.

    Arguments as in attend; kv_lens count the new tokens; the dtypes of k, v and cache may differ.
    """

def explain(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    mask: Mask = "causal",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    backend: BackendName = "auto",
    compute: Compute = "same",
    batch_invariant: bool = False,
) -> Explanation:
    """What every backend says to attend with such arguments, and which one it would take.

    q: [T, Hq, D], [B, L, Hq, D] or [L, B, Hq, D]. k_cache [N, P, Hk, D], v_cache [N, P, Hk, Dv].
    Dtypes: f32, f16 or bf16; they count, as do strides and the alignment of the caches. Lengths and
    workspace are not known here. Raises InvalidArgument for a cache or words that attend would refuse,
    DeviceFailure where the cache's GPU is not there. Enqueues nothing, reads nothing in the arrays.
    """

def merge(
    partials: Sequence[tuple[Array, Array]],
    *,
    out: Array | None = None,
    lse: Array | bool | None = None,
    sinks: Array | None = None,
    stream: Stream = None,
) -> Any:
    """Merges [(out [T, H, Dv], lse float32 [T, H]), ...] of parts of the keys.

    (0, -inf) is neutral. sinks are applied once, last. New out: the first partial's dtype and
    framework. Returns out, or (out, lse) when lse is True or an array.
    """

def convert_tokens(
    x: Array,
    from_format: Format,
    to_format: Format,
    *,
    token_offsets: Ints | None = None,
    out: Array | None = None,
    longest: int = 0,
    stream: Stream = None,
) -> Array:
    """Copies new tokens [..., heads, dim] from one format to another; padding becomes 0.

    token_offsets None: equally many each, for from_format bshd and sbhd. A new out has x's dtype and
    L = longest (0: the most new tokens of a sequence); a given one may have another dtype.
    """

def gather_cache(
    k_cache: Array,
    v_cache: Array,
    kv_lens: Ints,
    *,
    page_table: Array | None = None,
    row_indices: Ints | None = None,
    longest: int = 0,
    k: Array | None = None,
    v: Array | None = None,
    stream: Stream = None,
) -> tuple[Array, Array]:
    """Pages to rows: position j of sequence b goes to [b, j]; rows behind a sequence's end become 0.

    New k [B, L, Hk, D] and v [B, L, Hk, Dv], L = longest (0: the longest sequence).
    """

def cache_sizes(
    *,
    num_kv_heads: int,
    head_dim: int,
    max_num_seqs: int,
    max_seq_len: int,
    num_layers: int = 1,
    head_dim_v: int = 0,
    dtype: DType = "f32",
    kind: Kind = "paged",
    page_size: int = 16,
    num_pages: int = 0,
    device: str = "cpu",
    workspace_bytes: int = 0,
) -> CacheSizes: ...
def backends() -> list[BackendInfo]: ...
def cpu_target() -> str: ...
