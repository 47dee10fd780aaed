# SPDX-License-Identifier: Apache-2.0
"""Octavo: attention over contiguous and paged key/value caches.

A cache holds the keys and values of many growing sequences. Each pass of the model over some new
tokens is a step: plan it, begin it, then run each layer.

    import numpy as np
    import octavo

    cache = octavo.KvCache(num_kv_heads=2, head_dim=64, max_num_seqs=4, max_seq_len=1024)
    attention = octavo.Attention(cache, num_q_heads=8)

    plan = cache.plan({7: 5, 9: 1})          # sequence 7 brings 5 tokens, sequence 9 brings 1
    cache.begin(plan)
    random = np.random.default_rng(0)
    q = random.standard_normal((plan.num_tokens, 8, 64), np.float32)
    k = random.standard_normal((plan.num_tokens, 2, 64), np.float32)
    v = random.standard_normal((plan.num_tokens, 2, 64), np.float32)
    out = attention.forward(plan, cache, 0, q, k, v)      # [6, 8, 64]

Who keeps keys and values himself calls `append_tokens` and `attend` over his own arrays, in a GPU's
memory with a `Workspace`. A GPU's steps can be captured in CUDA graphs: `GraphedStep`, or `forward`
with `StepMaxima`.

Arrays are NumPy's, or any with `__dlpack__` (PyTorch, JAX, CuPy), and are never copied. Results go
into `out` or into a new array of the same framework. Dtypes are named by strings: "f32", "f16",
"bf16". Calls release the GIL. What goes wrong raises a subclass of `octavo.Error`.
"""

from ._errors import (
    CacheFull,
    DeviceFailure,
    Error,
    Internal,
    InvalidArgument,
    NotCompiled,
    OutOfMemory,
    Unsupported,
)
from ._native import (
    Attention,
    Explanation,
    GraphedStep,
    KvCache,
    Rope,
    Shortage,
    StepPlan,
    Workspace,
    __version__,
    append_tokens,
    attend,
    backends,
    cache_sizes,
    check_attend,
    convert_tokens,
    cpu_target,
    explain,
    gather_cache,
    merge,
)
from ._records import (
    BackendInfo,
    CacheSizes,
    CacheStats,
    LayerTensors,
    PageCopy,
    PageHolder,
    StepMaxima,
    Support,
    TypedArray,
    WorkspaceSizes,
)

__all__ = [
    "Attention",
    "BackendInfo",
    "CacheFull",
    "CacheSizes",
    "CacheStats",
    "DeviceFailure",
    "Error",
    "Explanation",
    "GraphedStep",
    "Internal",
    "InvalidArgument",
    "KvCache",
    "LayerTensors",
    "NotCompiled",
    "OutOfMemory",
    "PageCopy",
    "PageHolder",
    "Rope",
    "Shortage",
    "StepMaxima",
    "StepPlan",
    "Support",
    "TypedArray",
    "Unsupported",
    "Workspace",
    "WorkspaceSizes",
    "__version__",
    "append_tokens",
    "attend",
    "backends",
    "cache_sizes",
    "check_attend",
    "convert_tokens",
    "cpu_target",
    "explain",
    "gather_cache",
    "merge",
]
