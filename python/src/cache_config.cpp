// SPDX-License-Identifier: Apache-2.0
#include "cache_config.h"

#include <octavo/cache.h>

#include <utility>
#include <vector>

#include "array.h"
#include "errors.h"
#include "names.h"
#include "runtime.h"

namespace octavo::python {
namespace {

CacheConfig config_of(std::int32_t num_kv_heads, std::int32_t head_dim, std::int32_t max_num_seqs,
                      std::int64_t max_seq_len, std::int32_t num_layers, std::int32_t head_dim_v,
                      nb::handle dtype, nb::handle kind, std::int32_t page_size,
                      std::int64_t num_pages, nb::handle device, std::int64_t workspace_bytes) {
  CacheConfig config;
  config.kind = kind_named("kind", kind);
  config.num_layers = num_layers;
  config.num_kv_heads = num_kv_heads;
  config.head_dim = head_dim;
  config.head_dim_v = head_dim_v;
  config.dtype = dtype_named("dtype", dtype);
  config.max_num_seqs = max_num_seqs;
  config.max_seq_len = max_seq_len;
  config.page_size = page_size;
  config.num_pages = num_pages;
  config.device = device_named("device", device);
  config.workspace_bytes = workspace_bytes;
  return config;
}

/// Returns what keeps the workspace alive.
nb::object borrow_workspace(nb::handle workspace, CacheConfig& config) {
  const Memory memory = read_memory("workspace", workspace);
  if (memory.rank != 1 || memory.strides[0] != 1)
    throw_mismatch("workspace.shape", "one dense axis", shape_text(memory));
  if (memory.read_only) throw_mismatch("workspace", "a writable array", "a read-only one");
  if (memory.device != config.device)
    throw_mismatch("workspace.device", device_text(config.device), device_text(memory.device));
  config.workspace = memory.data;
  const std::int64_t bytes = memory.shape[0] * memory.bytes;
  if (config.workspace_bytes > bytes)
    throw_mismatch("workspace_bytes", "at most the workspace's own", "more");
  if (config.workspace_bytes == 0) config.workspace_bytes = bytes;
  return nb::make_tuple(workspace, memory.keeper_or_none());
}

void construct(CacheHolder* self, std::int32_t num_kv_heads, std::int32_t head_dim,
               std::int32_t max_num_seqs, std::int64_t max_seq_len, std::int32_t num_layers,
               std::int32_t head_dim_v, nb::handle dtype, nb::handle kind, std::int32_t page_size,
               std::int64_t num_pages, nb::handle device, nb::handle keys, nb::handle values,
               nb::handle workspace, std::int64_t workspace_bytes) {
  CacheConfig config =
      config_of(num_kv_heads, head_dim, max_num_seqs, max_seq_len, num_layers, head_dim_v, dtype,
                kind, page_size, num_pages, device, workspace_bytes);
  std::vector<nb::object> kept;
  if (!keys.is_none()) {
    const Array array("keys", keys);
    config.keys = array.writable("keys");
    kept.push_back(array.kept());
  }
  if (!values.is_none()) {
    const Array array("values", values);
    config.values = array.writable("values");
    kept.push_back(array.kept());
  }
  if (!workspace.is_none()) {
    kept.push_back(borrow_workspace(workspace, config));
  }
  new (self) CacheHolder(config, std::move(kept));
}

nb::object sizes(std::int32_t num_kv_heads, std::int32_t head_dim, std::int32_t max_num_seqs,
                 std::int64_t max_seq_len, std::int32_t num_layers, std::int32_t head_dim_v,
                 nb::handle dtype, nb::handle kind, std::int32_t page_size, std::int64_t num_pages,
                 nb::handle device, std::int64_t workspace_bytes) {
  const CacheSizes s = cache_sizes(config_of(num_kv_heads, head_dim, max_num_seqs, max_seq_len,
                                             num_layers, head_dim_v, dtype, kind, page_size,
                                             num_pages, device, workspace_bytes));
  return nb::getattr(runtime().records, "CacheSizes")(s.keys, s.values, s.workspace,
                                                      s.least_workspace);
}

}  // namespace

void bind_cache_sizes(nb::module_& module, nb::class_<CacheHolder>& cache) {
  cache.def("__init__", construct, nb::kw_only(), nb::arg("num_kv_heads"), nb::arg("head_dim"),
            nb::arg("max_num_seqs"), nb::arg("max_seq_len"), nb::arg("num_layers") = 1,
            nb::arg("head_dim_v") = 0, nb::arg("dtype") = "f32", nb::arg("kind") = "paged",
            nb::arg("page_size") = 16, nb::arg("num_pages") = 0, nb::arg("device") = "cpu",
            nb::arg("keys") = nb::none(), nb::arg("values") = nb::none(),
            nb::arg("workspace") = nb::none(), nb::arg("workspace_bytes") = 0,
            "Makes the cache and its storage, zeroed.\n\n"
            "num_kv_heads, head_dim: of K; head_dim_v: of V (0: head_dim). 1 ... 576.\n"
            "max_num_seqs: live sequences, paused ones included. max_seq_len: tokens.\n"
            "dtype: 'f32', 'f16' or 'bf16'. kind: 'paged' or 'contiguous'.\n"
            "page_size: tokens, from 1, any number. num_pages: 0 is as many as max_num_seqs full\n"
            "sequences need. device: 'cpu', 'cuda' or 'cuda:N'.\n"
            "keys, values: memory of the caller's, both or none, writable, any strides:\n"
            "[num_layers, num_pages, page_size, num_kv_heads, head_dim] (contiguous: [num_layers,\n"
            "max_num_seqs, max_seq_len, ...]); the cache keeps them alive.\n"
            "workspace, workspace_bytes: of a cache on a GPU; see cache_sizes.\n\n"
            "Raises InvalidArgument, OutOfMemory, NotCompiled (no such device in this build),\n"
            "DeviceFailure (no GPU, or its driver is too old).");
  module.def(
      "cache_sizes", sizes, nb::kw_only(), nb::arg("num_kv_heads"), nb::arg("head_dim"),
      nb::arg("max_num_seqs"), nb::arg("max_seq_len"), nb::arg("num_layers") = 1,
      nb::arg("head_dim_v") = 0, nb::arg("dtype") = "f32", nb::arg("kind") = "paged",
      nb::arg("page_size") = 16, nb::arg("num_pages") = 0, nb::arg("device") = "cpu",
      nb::arg("workspace_bytes") = 0,
      "What a cache would take, in bytes, before it is made: CacheSizes. Keywords: KvCache's.");
}

}  // namespace octavo::python
