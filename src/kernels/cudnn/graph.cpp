// SPDX-License-Identifier: Apache-2.0
// The only file that sees cudnn_frontend.h. cuDNN is opened at run time (library.h), so nothing
// here links against it; the frontend finds its symbols through cudnn_dlhandle.
#include "kernels/cudnn/graph.h"

#include <cudnn_frontend.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "kernels/cudnn/library.h"

namespace cudnn_frontend {
// Wanted by the frontend under NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING.
void* cudnn_dlhandle = nullptr;
}  // namespace cudnn_frontend

namespace octavo::kernels::fused {
namespace {

namespace fe = cudnn_frontend;

// The order of pointers in a call: the frontend takes them sorted by uid.
enum Uid : std::int64_t {
  kUidQ = 1,
  kUidK,
  kUidV,
  kUidOut,
  kUidStats,
  kUidQLens,
  kUidKvLens,
  kUidQOffsets,
  kUidOutOffsets,
  kUidStatsOffsets,
  kUidKTable,
  kUidVTable,
};
constexpr std::size_t kMaxPointers = kUidVTable;

cudnnHandle_t handle_of(const Handle& handle) { return static_cast<cudnnHandle_t>(handle.get()); }

void check(cudnnStatus_t status, const char* call, ErrorCode code) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw Error(code, fmt::format("{}: {}", call, fe::detail::get_error_string(status)));
}

void check(fe::error_t error, const char* step, ErrorCode code) {
  if (error.is_good()) return;
  throw Error(code,
              fmt::format("cuDNN {} {}: {}", library().version_text, step, error.get_message()));
}

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using Dims = std::vector<std::int64_t>;

Tensor tensor(fe::graph::Graph& graph, const char* name, Uid uid, fe::DataType_t dtype, Dims dims,
              Dims strides) {
  return graph.tensor(fe::graph::Tensor_attributes()
                          .set_name(name)
                          .set_uid(uid)
                          .set_data_type(dtype)
                          .set_dim(dims)
                          .set_stride(strides));
}

Tensor vector(fe::graph::Graph& graph, const char* name, Uid uid, fe::DataType_t dtype,
              std::int64_t length) {
  return tensor(graph, name, uid, dtype, {length, 1, 1, 1}, {1, 1, 1, 1});
}

fe::graph::SDPA_attributes attributes_of(const GraphKey& key) {
  auto attributes = fe::graph::SDPA_attributes();
  attributes.set_name("attention")
      .set_attn_scale(key.scale)
      .set_generate_stats(key.stats)
      .set_padding_mask(key.padded);
  const bool bounded_right = key.causal || key.window_right >= 0;
  // Without lengths, and square, both corners are the same; cuDNN is faster from this one.
  const bool square = !key.padded && key.q_len == key.kv_len;
  if (bounded_right || key.window_left >= 0) {
    attributes.set_diagonal_alignment(square ? fe::DiagonalAlignment_t::TOP_LEFT
                                             : fe::DiagonalAlignment_t::BOTTOM_RIGHT);
  }
  if (bounded_right) attributes.set_diagonal_band_right_bound(key.causal ? 0 : key.window_right);
  // cuDNN counts the query's own position.
  if (key.window_left >= 0) attributes.set_diagonal_band_left_bound(key.window_left + 1);
  return attributes;
}

}  // namespace

Handle::Handle() {
  const Library& cudnn = library();
  if (!cudnn.found()) throw Error(ErrorCode::NotCompiled, "backend fused: " + cudnn.why_not);
  [[maybe_unused]] static const bool once = [&] {
    fe::cudnn_dlhandle = cudnn.handle;
    return true;
  }();
  cudnnHandle_t handle = nullptr;
  check(fe::detail::create_handle(&handle), "cudnnCreate", ErrorCode::DeviceFailure);
  handle_ = handle;
}

Handle::~Handle() { fe::detail::destroy_handle(handle_of(*this)); }

struct Graph::Impl {
  fe::graph::Graph graph;
  bool padded = true;
  bool ragged = false;
  bool paged = false;
  bool two_tables = false;
  bool stats = false;
};

Graph::Graph(const GraphKey& key, const Handle& handle, std::int32_t arch, bool deterministic)
    : impl_(std::make_unique<Impl>()) {
  impl_->padded = key.padded;
  impl_->ragged = key.ragged;
  impl_->paged = key.paged;
  impl_->two_tables = key.two_tables;
  impl_->stats = key.stats;
  const auto dtype = key.dtype == DType::F16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16;
  constexpr auto kInt32 = fe::DataType_t::INT32;
  constexpr auto kInt64 = fe::DataType_t::INT64;
  fe::graph::Graph& graph = impl_->graph;
  // Naming the architecture keeps the frontend from looking for a CUDA runtime of its own.
  graph.set_io_data_type(dtype)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT)
      .set_sm_version(arch);

  const Tensor q =
      tensor(graph, "q", kUidQ, dtype, {key.num_seqs, key.num_q_heads, key.q_len, key.head_dim},
             {key.q_batch_stride, key.q_head_stride, key.q_token_stride, 1});
  const std::int64_t k_extent = key.paged ? key.page_size : key.kv_len;
  const std::int64_t num_k = key.paged ? key.num_k_pages : key.num_seqs;
  const std::int64_t num_v = key.paged ? key.num_v_pages : key.num_seqs;
  const Tensor k =
      tensor(graph, "k", kUidK, dtype, {num_k, key.num_kv_heads, k_extent, key.head_dim},
             {key.k_page_stride, key.k_head_stride, key.k_slot_stride, 1});
  const Tensor v =
      tensor(graph, "v", kUidV, dtype, {num_v, key.num_kv_heads, k_extent, key.head_dim_v},
             {key.v_page_stride, key.v_head_stride, key.v_slot_stride, 1});

  auto attributes = attributes_of(key);
  if (key.padded) {
    attributes.set_seq_len_q(vector(graph, "q_lens", kUidQLens, kInt32, key.num_seqs));
    attributes.set_seq_len_kv(vector(graph, "kv_lens", kUidKvLens, kInt32, key.num_seqs));
  }
  if (key.paged) {
    const std::int64_t width = key.kv_len / key.page_size;
    const Dims dims{key.num_seqs, 1, width, 1};
    const Dims strides{width, width, 1, 1};
    const Tensor k_table = tensor(graph, "k_table", kUidKTable, kInt32, dims, strides);
    attributes.set_paged_attention_k_table(k_table);
    attributes.set_paged_attention_v_table(
        key.two_tables ? tensor(graph, "v_table", kUidVTable, kInt32, dims, strides) : k_table);
    attributes.set_paged_attention_max_seq_len_kv(static_cast<int>(key.kv_len));
  }
  if (key.ragged)
    q->set_ragged_offset(vector(graph, "q_offsets", kUidQOffsets, kInt64, key.num_seqs + 1));

  auto [out, stats] = graph.sdpa(q, k, v, std::move(attributes));
  out->set_output(true)
      .set_name("out")
      .set_uid(kUidOut)
      .set_data_type(dtype)
      .set_dim({key.num_seqs, key.num_q_heads, key.q_len, key.head_dim_v})
      .set_stride({key.out_batch_stride, key.out_head_stride, key.out_token_stride, 1});
  if (key.ragged)
    out->set_ragged_offset(vector(graph, "out_offsets", kUidOutOffsets, kInt64, key.num_seqs + 1));
  if (key.stats) {
    stats->set_output(true)
        .set_name("stats")
        .set_uid(kUidStats)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({key.num_seqs, key.num_q_heads, key.q_len, 1});
    if (key.ragged) {
      stats->set_stride({key.num_q_heads * key.q_len, 1, key.num_q_heads, 1});
      stats->set_ragged_offset(
          vector(graph, "stats_offsets", kUidStatsOffsets, kInt64, key.num_seqs + 1));
    } else {
      stats->set_stride({key.num_q_heads * key.q_len, key.q_len, 1, 1});
    }
  }

  constexpr auto kRefusal = ErrorCode::Unsupported;
  check(graph.validate(), "refuses the graph", kRefusal);
  check(graph.build_operation_graph(handle_of(handle)), "cannot lower the graph", kRefusal);
  check(graph.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}),
        "has no plan for the graph", kRefusal);
  if (deterministic) graph.deselect_numeric_notes({fe::NumericalNote_t::NONDETERMINISTIC});
  check(graph.check_support(), "supports no plan of the graph", kRefusal);
  check(graph.build_plans(), "cannot build a plan", kRefusal);
  std::int64_t workspace_bytes = 0;
  check(graph.get_workspace_size(workspace_bytes), "cannot size the workspace",
        ErrorCode::DeviceFailure);
  workspace_bytes_ = static_cast<std::size_t>(workspace_bytes);
}

Graph::~Graph() = default;

void Graph::run(const Handle& handle, const GraphPointers& pointers, void* workspace,
                CUstream_st* stream) const {
  std::array<void*, kMaxPointers> sorted{};
  int num_pointers = 0;
  // The frontend's variant pack has no const.
  const auto add = [&](const void* pointer) {
    sorted[static_cast<std::size_t>(num_pointers++)] = const_cast<void*>(pointer);
  };
  add(pointers.q);
  add(pointers.k);
  add(pointers.v);
  add(pointers.out);
  if (impl_->stats) add(pointers.stats);
  if (impl_->padded) {
    add(pointers.q_lens);
    add(pointers.kv_lens);
  }
  if (impl_->ragged) {
    add(pointers.q_offsets);
    add(pointers.out_offsets);
    if (impl_->stats) add(pointers.stats_offsets);
  }
  if (impl_->paged) {
    add(pointers.k_table);
    if (impl_->two_tables) add(pointers.v_table);
  }
  check(fe::detail::set_stream(handle_of(handle), stream), "cudnnSetStream",
        ErrorCode::DeviceFailure);
  check(impl_->graph.execute(handle_of(handle), sorted.data(), num_pointers, workspace),
        "failed to run a graph", ErrorCode::DeviceFailure);
}

}  // namespace octavo::kernels::fused
