// SPDX-License-Identifier: Apache-2.0
// One built cuDNN attention graph, and the handle it runs on. Behind this header stands the only
// file that sees cudnn_frontend.h. What goes into a graph, and when, is fused.cpp's business.
#pragma once

#include <octavo/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

struct CUstream_st;

namespace octavo::kernels::fused {

/// Everything that a graph is built from; equal keys, one graph. Sizes are buckets, strides
/// elements.
struct GraphKey {
  DType dtype = DType::F16;
  bool padded = true;       ///< Lengths come from device memory; else all are q_len and kv_len.
  bool ragged = true;       ///< q and out are thd, by offsets; else strides and a batch axis.
  bool paged = true;        ///< K and V by a page table; else one stretch a batch row.
  bool two_tables = false;  ///< V's pages are numbered otherwise than K's.
  bool causal = false;
  bool stats = false;  ///< The LSE is wanted.
  std::int32_t window_left = -1;
  std::int32_t window_right = -1;
  float scale = 1.0F;
  std::int64_t num_seqs = 0;
  std::int64_t q_len = 0;
  std::int64_t num_q_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t q_batch_stride = 0, q_token_stride = 0, q_head_stride = 0;
  std::int64_t out_batch_stride = 0, out_token_stride = 0, out_head_stride = 0;
  std::int64_t kv_len = 0;     ///< Contiguous: positions of a row. Paged: of all table entries.
  std::int64_t page_size = 0;  ///< Paged: slots of a page, a power of two.
  std::int64_t num_k_pages = 0, num_v_pages = 0;  ///< Contiguous: rows.
  std::int64_t k_page_stride = 0, k_slot_stride = 0, k_head_stride = 0;
  std::int64_t v_page_stride = 0, v_slot_stride = 0, v_head_stride = 0;

  friend bool operator==(const GraphKey&, const GraphKey&) = default;
};

/// Device memory that a graph reads and writes. Lengths are int32 [num_seqs], offsets int64
/// [num_seqs + 1] in elements, tables int32 [num_seqs, kv_len / page_size]; what the key doesn't
/// ask for may be null.
struct GraphPointers {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;
  float* stats = nullptr;  ///< ragged: [tokens, num_q_heads]; else [num_seqs, num_q_heads, q_len]
  const std::int32_t* q_lens = nullptr;
  const std::int32_t* kv_lens = nullptr;
  const std::int64_t* q_offsets = nullptr;
  const std::int64_t* out_offsets = nullptr;
  const std::int64_t* stats_offsets = nullptr;
  const std::int32_t* k_table = nullptr;
  const std::int32_t* v_table = nullptr;
};

/// cuDNN opened on the current device. Throws NotCompiled when the library cannot be found,
/// DeviceFailure when it refuses the device.
class Handle {
 public:
  Handle();
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  [[nodiscard]] void* get() const { return handle_; }

 private:
  void* handle_ = nullptr;
};

class Graph {
 public:
  /// Builds, which takes from tens of milliseconds to a second and may allocate on the device.
  /// `arch` is e.g. 90. Throws Unsupported with cuDNN's own words.
  Graph(const GraphKey& key, const Handle& handle, std::int32_t arch, bool deterministic);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  [[nodiscard]] std::size_t workspace_bytes() const { return workspace_bytes_; }

  /// Enqueues on `stream`; neither allocates nor waits.
  void run(const Handle& handle, const GraphPointers& pointers, void* workspace,
           CUstream_st* stream) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace octavo::kernels::fused
