// SPDX-License-Identifier: Apache-2.0
#include "api/config.h"

#include <cmath>
#include <limits>

#include "api/tensors.h"
#include "base/error.h"
#include "base/math.h"
#include "device/gpu.h"
#include "dispatch/gpu.h"
#include "kernels/params.h"

namespace octavo::api {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

void check_range(const char* field, std::int64_t lowest, std::int64_t highest, std::int64_t got) {
  if (got >= lowest && got <= highest) return;
  if (highest == kMaxInt32) {
    base::throw_mismatch(field, fmt::format("at least {} and at most 2^31 - 1", lowest), got);
  }
  base::throw_mismatch(field, fmt::format("{} … {}", lowest, highest), got);
}

std::int64_t require_product(const char* what, std::initializer_list<std::int64_t> factors,
                             std::int64_t highest) {
  const auto product = base::checked_product(factors);
  if (!product || *product > highest) {
    base::throw_mismatch(
        what, fmt::format("at most {}", highest),
        product ? fmt::format("{}", *product) : std::string("a product beyond 64 bits"));
  }
  return *product;
}

void check_callers_tensor(const char* name, const TensorView& view, const CacheConfig& c,
                          std::int32_t head_dim) {
  check_tensor(name, view, 5, c.device);
  if (view.dtype != c.dtype) {
    base::throw_mismatch(fmt::format("{}.dtype", name), to_string(c.dtype), to_string(view.dtype));
  }
  const std::int64_t wanted[] = {c.num_layers, c.num_pages, c.page_size, c.num_kv_heads, head_dim};
  for (std::int32_t axis = 0; axis < 5; ++axis) check_extent(name, view, axis, wanted[axis]);
  check_writable(name, view);
}

void check_callers_memory(const CacheConfig& c) {
  if (c.keys.data == nullptr && c.values.data == nullptr) return;
  if (c.keys.data == nullptr || c.values.data == nullptr) {
    base::throw_mismatch(c.keys.data == nullptr ? "keys.data" : "values.data",
                         "memory for both K and V or for neither", "null");
  }
  check_callers_tensor("keys", c.keys, c, c.head_dim);
  check_callers_tensor("values", c.values, c, c.head_dim_v);
}

void fill_workspace(CacheConfig& c) {
  if (c.device.type == DeviceType::Cpu) {
    if (c.workspace != nullptr) {
      base::throw_mismatch("workspace", "null", "a pointer", "the CPU's grows by itself");
    }
    if (c.workspace_bytes != 0) base::throw_mismatch("workspace_bytes", 0, c.workspace_bytes);
    return;
  }
  const auto least = static_cast<std::int64_t>(dispatch::least_gpu_workspace(c));
  if (c.workspace == nullptr && c.workspace_bytes == 0) {
    c.workspace_bytes = static_cast<std::int64_t>(dispatch::default_gpu_workspace(c));
  }
  if (c.workspace_bytes < least) {
    base::throw_mismatch("workspace_bytes", fmt::format("at least {}", least), c.workspace_bytes,
                         "see cache_sizes");
  }
  if (c.workspace == nullptr) return;
  check_pointer("workspace", c.workspace, c.workspace_bytes, c.device);
  constexpr std::uintptr_t kAlignment = 256;
  const auto address = reinterpret_cast<std::uintptr_t>(c.workspace);
  if (address % kAlignment != 0) {
    base::throw_mismatch("workspace", fmt::format("a multiple of {} bytes", kAlignment), address);
  }
}

}  // namespace

CacheConfig checked(const CacheConfig& config) {
  CacheConfig c = config;
  if (c.head_dim_v == 0) c.head_dim_v = c.head_dim;
  check_range("num_layers", 1, kMaxInt32, c.num_layers);
  check_range("num_kv_heads", 1, kMaxInt32, c.num_kv_heads);
  check_range("head_dim", 1, kernels::kMaxHeadDim, c.head_dim);
  check_range("head_dim_v", 1, kernels::kMaxHeadDim, c.head_dim_v);
  check_range("max_num_seqs", 1, kMaxInt32, c.max_num_seqs);
  check_range("max_seq_len", 1, kMaxInt32, c.max_seq_len);
  if (c.dtype != DType::F32 && c.dtype != DType::F16 && c.dtype != DType::BF16) {
    throw Error(ErrorCode::Unsupported,
                base::mismatch_text("dtype", "f32, f16 or bf16", to_string(c.dtype),
                                    "no backend stores it yet"));
  }
  if (c.device.type == DeviceType::Cuda) {
    static_cast<void>(device::require_gpu(c.device, "device"));
  } else if (c.device.index != 0) {
    base::throw_mismatch("device.index", 0, c.device.index);
  }
  if (c.kind == CacheKind::Contiguous) {
    c.page_size = static_cast<std::int32_t>(c.max_seq_len);
    c.num_pages = c.max_num_seqs;
  }
  check_range("page_size", 1, kMaxInt32, c.page_size);
  const std::int64_t pages_per_seq = base::ceil_div<std::int64_t>(c.max_seq_len, c.page_size);
  require_product("max_num_seqs * ceil(max_seq_len / page_size) * 4 bytes of page table",
                  {c.max_num_seqs, pages_per_seq, 4}, std::numeric_limits<std::int64_t>::max());
  if (c.num_pages == 0) {
    c.num_pages = require_product("num_pages (max_num_seqs * ceil(max_seq_len / page_size))",
                                  {c.max_num_seqs, pages_per_seq}, kMaxInt32);
  }
  check_range("num_pages", 1, kMaxInt32, c.num_pages);
  const std::int64_t widest = std::max(c.head_dim, c.head_dim_v);
  require_product(
      "num_layers * num_pages * page_size * num_kv_heads * head_dim bytes",
      {c.num_layers, c.num_pages, c.page_size, c.num_kv_heads, widest, dtype_bytes(c.dtype), 2},
      std::numeric_limits<std::int64_t>::max());
  check_callers_memory(c);
  fill_workspace(c);
  return c;
}

AttentionConfig checked(const AttentionConfig& config) {
  AttentionConfig c = config;
  if (c.head_dim_v == 0) c.head_dim_v = c.head_dim;
  check_range("num_q_heads", 1, kMaxInt32, c.num_q_heads);
  check_range("num_kv_heads", 1, kMaxInt32, c.num_kv_heads);
  if (c.num_q_heads % c.num_kv_heads != 0) {
    base::throw_mismatch("num_q_heads",
                         fmt::format("a multiple of num_kv_heads ({})", c.num_kv_heads),
                         c.num_q_heads);
  }
  check_range("head_dim", 1, kernels::kMaxHeadDim, c.head_dim);
  check_range("head_dim_v", 1, kernels::kMaxHeadDim, c.head_dim_v);
  if (!std::isfinite(c.softmax_scale))
    base::throw_mismatch("softmax_scale", "a finite number", c.softmax_scale);
  if (c.softmax_scale == 0.0F)
    c.softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.head_dim)));
  if (!(c.softcap >= 0.0F) || !std::isfinite(c.softcap)) {
    base::throw_mismatch("softcap", "0 or a positive finite number", c.softcap);
  }
  if (c.window.left < -1)
    base::throw_mismatch("window.left", "-1 (no bound) or more", c.window.left);
  if (c.window.right < -1)
    base::throw_mismatch("window.right", "-1 (no bound) or more", c.window.right);
  check_range("num_threads", 0, kMaxInt32, c.num_threads);
  return c;
}

void check_fit(const AttentionConfig& attention, const CacheConfig& cache) {
  const auto check = [](const char* field, std::int32_t wanted, std::int32_t got) {
    if (wanted != got) base::throw_mismatch(field, fmt::format("{} (the cache's)", wanted), got);
  };
  check("num_kv_heads", cache.num_kv_heads, attention.num_kv_heads);
  check("head_dim", cache.head_dim, attention.head_dim);
  check("head_dim_v", cache.head_dim_v, attention.head_dim_v);
}

}  // namespace octavo::api
