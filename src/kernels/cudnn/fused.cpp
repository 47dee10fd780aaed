// SPDX-License-Identifier: Apache-2.0
#include "kernels/cudnn/fused.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>
#include <list>
#include <utility>

#include "base/error.h"
#include "kernels/cudnn/graph.h"
#include "kernels/cudnn/library.h"
#include "kernels/cudnn/sizes.h"
#include "kernels/cudnn/step_arrays.h"
#include "kernels/cudnn/support.h"

namespace octavo::kernels::fused {
namespace {

struct BuiltGraph {
  BuiltGraph(const GraphKey& wanted, const Handle& handle, std::int32_t arch, bool deterministic)
      : key(wanted), graph(wanted, handle, arch, deterministic) {}

  GraphKey key;
  Graph graph;
  bool captured = false;  ///< A CUDA graph replays its kernels, so it stays.
};

/// Tells captures apart; 0 when the stream is not captured.
unsigned long long capture_of(CUstream_st* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const bool known = cudaStreamGetCaptureInfo(stream, &status, &id) == cudaSuccess;
  return known && status == cudaStreamCaptureStatusActive ? id : 0;
}

/// What the step arrays in a workspace were made for, lengths apart.
struct Prepared {
  const void* workspace = nullptr;
  unsigned long long capture = 0;
  BatchRows rows = BatchRows::Sequences;
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
  std::int64_t slots = 0;
  std::int64_t k_page_stride = 0, v_page_stride = 0;
  std::int64_t q_stride = 0, out_stride = 0;
  std::int64_t q_batch_stride = 0, out_batch_stride = 0;
  std::int64_t num_q_heads = 0;
  bool causal = false;  ///< The mask counts where tokens are rows.
  std::int64_t window_right = -1;

  friend bool operator==(const Prepared&, const Prepared&) = default;
};

Prepared prepared_for(const AttendParams& params, const CallShape& shape, const void* workspace,
                      unsigned long long capture) {
  const GraphKey& key = shape.key;
  const bool tokens = shape.rows == BatchRows::Tokens;
  return {.workspace = workspace,
          .capture = capture,
          .rows = shape.rows,
          .num_rows = key.num_seqs,
          .width = key.paged ? key.kv_len / key.page_size : 0,
          .slots = key.page_size,
          .k_page_stride = key.k_page_stride,
          .v_page_stride = key.v_page_stride,
          .q_stride = key.ragged ? key.q_token_stride : 0,
          .out_stride = key.ragged ? key.out_token_stride : 0,
          .q_batch_stride = params.q_layout.ragged ? 0 : params.q_layout.batch_stride,
          .out_batch_stride = params.out_layout.ragged ? 0 : params.out_layout.batch_stride,
          .num_q_heads = key.num_q_heads,
          .causal = tokens && params.causal,
          .window_right = tokens ? params.window_right : -1};
}

template <typename T>
T* at(void* workspace, std::size_t offset) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(workspace) + offset);
}

StepArrays step_arrays(const CallShape& shape, const WorkspaceLayout& layout, void* workspace) {
  const GraphKey& key = shape.key;
  StepArrays arrays;
  arrays.kind = shape.rows;
  arrays.num_rows = static_cast<std::int32_t>(key.num_seqs);
  arrays.q_lens = at<std::int32_t>(workspace, layout.q_lens);
  arrays.kv_lens = at<std::int32_t>(workspace, layout.kv_lens);
  if (key.ragged) {
    arrays.q_offsets = at<std::int64_t>(workspace, layout.q_offsets);
    arrays.out_offsets = at<std::int64_t>(workspace, layout.out_offsets);
    arrays.stats_offsets = at<std::int64_t>(workspace, layout.stats_offsets);
  }
  if (key.paged) {
    arrays.k_table = at<std::int32_t>(workspace, layout.k_table);
    if (key.two_tables) arrays.v_table = at<std::int32_t>(workspace, layout.v_table);
    arrays.table_width = static_cast<std::int32_t>(key.kv_len / key.page_size);
  }
  return arrays;
}

/// Whether finish_step would have nothing to do. `clears`: cuDNN's decode path gives rows without
/// keys 0.
bool is_finished(const AttendParams& params, const Maxima& maxima, const CallShape& shape,
                 bool clears) {
  if (params.lse != nullptr) return false;
  const TokenLayout& out = params.out_layout;
  const std::int64_t rows =
      out.ragged ? out.num_token_rows : out.num_batch_rows * out.num_token_rows;
  if (maxima.exact && rows == params.batch.num_tokens) return true;
  // A row's keys end at its own position, so that a window leaves it one at least.
  return clears && shape.rows == BatchRows::Tokens && shape.key.padded &&
         rows == shape.key.num_seqs;
}

}  // namespace

struct FusedAttention::Impl {
  Handle handle;
  std::int32_t arch = 0;
  bool clears_empty_rows = false;
  FusedOptions options;
  std::list<BuiltGraph> graphs;  ///< The last used in front.
  Prepared prepared;

  [[nodiscard]] CallShape shape_of(const AttendParams& params, Maxima maxima) const {
    // Pages in any order want q by ragged offsets, which thd's callers have asked about.
    constexpr std::int32_t kRaggedArch = 90;
    if (!params.q_layout.ragged && arch < kRaggedArch) maxima.one_page_each = false;
    return call_shape(params, maxima, options.max_tokens_as_rows);
  }

  /// Null when it isn't built.
  BuiltGraph* find(const GraphKey& key) {
    const auto found = std::find_if(graphs.begin(), graphs.end(),
                                    [&](const BuiltGraph& built) { return built.key == key; });
    if (found == graphs.end()) return nullptr;
    graphs.splice(graphs.begin(), graphs, found);
    return &graphs.front();
  }

  BuiltGraph& get(const GraphKey& key) {
    if (BuiltGraph* built = find(key)) return *built;
    graphs.emplace_front(key, handle, arch, options.deterministic);
    if (graphs.size() > options.max_graphs) drop_oldest();
    return graphs.front();
  }

  void drop_oldest() {
    const auto oldest = std::find_if(graphs.rbegin(), std::prev(graphs.rend()),
                                     [](const BuiltGraph& built) { return !built.captured; });
    if (oldest == std::prev(graphs.rend())) return;
    // Its kernels may still run.
    cudaDeviceSynchronize();
    graphs.erase(std::prev(oldest.base()));
  }
};

bool is_captured(CUstream_st* stream) { return capture_of(stream) != 0; }

FusedAttention::FusedAttention(std::int32_t arch, const FusedOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->arch = arch;
  impl_->clears_empty_rows = clears_empty_rows(library().version, arch);
  impl_->options = options;
}

FusedAttention::~FusedAttention() = default;
FusedAttention::FusedAttention(FusedAttention&&) noexcept = default;
FusedAttention& FusedAttention::operator=(FusedAttention&&) noexcept = default;

std::size_t FusedAttention::num_graphs() const { return impl_->graphs.size(); }

std::size_t FusedAttention::workspace_bytes(const AttendParams& params, const Maxima& maxima) {
  if (maxima.num_seqs == 0 || maxima.num_tokens == 0) return 0;
  const GraphKey key = impl_->shape_of(params, maxima).key;
  return workspace_layout(key, maxima.num_tokens, impl_->get(key).graph.workspace_bytes())
      .num_bytes;
}

void FusedAttention::attend(const AttendParams& params, const Maxima& maxima,
                            const CallOptions& options, void* workspace,
                            std::size_t workspace_bytes, CUstream_st* stream) {
  if (maxima.num_seqs == 0 || maxima.num_tokens == 0) {
    finish_step(params, nullptr, {}, stream);
    return;
  }
  const CallShape shape = impl_->shape_of(params, maxima);
  const GraphKey& key = shape.key;
  BuiltGraph* built = impl_->find(key);
  const unsigned long long capture = capture_of(stream);
  if (built == nullptr && capture != 0) {
    throw Error(ErrorCode::Unsupported,
                "backend fused: wanted the graph of these sizes to be built before the stream is "
                "captured (ask for the workspace of the maxima first)");
  }
  if (built == nullptr) built = &impl_->get(key);
  built->captured = built->captured || capture != 0;
  const WorkspaceLayout layout =
      workspace_layout(key, maxima.num_tokens, built->graph.workspace_bytes());
  if (workspace_bytes < layout.num_bytes) {
    base::throw_mismatch("workspace", fmt::format("{} bytes", layout.num_bytes), workspace_bytes);
  }

  const StepArrays arrays = step_arrays(shape, layout, workspace);
  const Prepared wanted = prepared_for(params, shape, workspace, capture);
  if (key.padded && (options.new_step || !(wanted == impl_->prepared))) {
    prepare_step(params, shape.cut, arrays, stream);
    impl_->prepared = wanted;
  }
  // cuDNN's decode path does not look behind the end, nor does it where the tensors end there.
  if (options.clear_tails && key.padded && shape.rows != BatchRows::Tokens)
    clear_tails(params, key.paged ? kTailTile : kContiguousTailTile, stream);
  auto* stats = key.stats ? at<float>(workspace, layout.stats) : nullptr;
  const auto first_row = [&](const PagedTensor& tensor) {
    return static_cast<const std::byte*>(tensor.data) +
           shape.first_page * tensor.page_stride * dtype_bytes(params.kv.dtype);
  };
  const GraphPointers pointers{.q = params.q,
                               .k = first_row(params.kv.k),
                               .v = first_row(params.kv.v),
                               .out = params.out,
                               .stats = stats,
                               .q_lens = arrays.q_lens,
                               .kv_lens = arrays.kv_lens,
                               .q_offsets = arrays.q_offsets,
                               .out_offsets = arrays.out_offsets,
                               .stats_offsets = arrays.stats_offsets,
                               .k_table = arrays.k_table,
                               .v_table = arrays.v_table};
  built->graph.run(impl_->handle, pointers, at<std::byte>(workspace, layout.cudnn), stream);
  if (!is_finished(params, maxima, shape, impl_->clears_empty_rows))
    finish_step(params, stats, shape.stats, stream);
}

}  // namespace octavo::kernels::fused
