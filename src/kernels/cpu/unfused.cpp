// SPDX-License-Identifier: Apache-2.0
// Attention as it is defined: gather, multiply, softmax, multiply, in plain loops that are meant to
// be read. `cpu` (attend.cpp) is the fast one. Products and sums are float64. Queries are worked on
// in chunks, so that memory stays bounded by a chunk's logits.

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/cpu/elements.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/output.h"
#include "kernels/cpu/rope.h"
#include "kernels/cpu/scratch.h"

namespace octavo::kernels::cpu {
namespace {

constexpr std::int64_t kMaxChunkRows = 64;
constexpr std::int64_t kMaxChunkLogits = std::int64_t{1} << 21;

std::int64_t longest(const StepBatch& batch) {
  std::int64_t result = 1;
  for (std::int32_t b = 0; b < batch.num_seqs; ++b) {
    result = std::max<std::int64_t>(result, batch.kv_lens[b]);
  }
  return result;
}

std::int64_t chunk_rows(const StepBatch& batch) {
  return std::clamp<std::int64_t>(kMaxChunkLogits / longest(batch), 1, kMaxChunkRows);
}

// What one thread works in. A row is a (token, head of the group), the head fastest.
struct Chunk {
  Chunk(Scratch& scratch, const AttendParams& params)
      : q(scratch.take<float>(chunk_rows(params.batch) * params.head_dim)),
        logits(scratch.take<double>(chunk_rows(params.batch) * longest(params.batch))),
        weighted(scratch.take<double>(chunk_rows(params.batch) * params.head_dim_v)) {}

  float* q;          // [rows, head_dim]
  double* logits;    // [rows, keys]; after the softmax, exp(logit - max)
  double* weighted;  // [rows, head_dim_v]
  std::array<KeyRange, kMaxChunkRows> visible{};
  std::array<double, kMaxChunkRows> max{};
  std::array<double, kMaxChunkRows> sum{};

  std::int32_t b = 0;
  std::int32_t kv_head = 0;
  std::int64_t first_row = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_keys = 0;
};

class Definition {
 public:
  explicit Definition(const AttendParams& params)
      : params_(params), rope_(params.rope), group_(params.num_q_heads / params.num_kv_heads) {}

  void attend(Chunk& chunk) const {
    gather_queries(chunk);
    multiply_keys(chunk);
    softmax(chunk);
    multiply_values(chunk);
    for (std::int64_t r = 0; r < chunk.num_rows; ++r) {
      const RowState<double> row{chunk.weighted + r * params_.head_dim_v, chunk.max[at(r)],
                                 chunk.sum[at(r)]};
      finish_row(params_, chunk.b, token(chunk, r), head(chunk, r), row);
    }
  }

 private:
  static std::size_t at(std::int64_t row) { return static_cast<std::size_t>(row); }
  [[nodiscard]] std::int32_t token(const Chunk& chunk, std::int64_t r) const {
    return static_cast<std::int32_t>((chunk.first_row + r) / group_);
  }
  [[nodiscard]] std::int32_t head(const Chunk& chunk, std::int64_t r) const {
    return chunk.kv_head * group_ + static_cast<std::int32_t>((chunk.first_row + r) % group_);
  }
  [[nodiscard]] std::int64_t position(const Chunk& chunk, std::int64_t r) const {
    return position_of(params_.batch, chunk.b, token(chunk, r));
  }

  void gather_queries(Chunk& chunk) const {
    const TokenLayout& layout = params_.q_layout;
    std::array<float, std::size_t{2} * kMaxRotaryPairs> buffer;
    for (std::int64_t r = 0; r < chunk.num_rows; ++r) {
      const std::int32_t i = token(chunk, r);
      const std::int64_t from =
          token_offset(layout, params_.batch, chunk.b, i) + head(chunk, r) * layout.head_stride;
      float* q = chunk.q + r * params_.head_dim;
      load_row(params_.q, params_.q_dtype, from, layout.dim_stride, params_.head_dim, q);
      if (params_.rope.rotary_dim > 0) {
        const std::int32_t packed = params_.batch.token_offsets[chunk.b] + i;
        rotate(params_.rope, rope_.at(packed, position(chunk, r), buffer.data()), q);
      }
      chunk.visible[at(r)] = visible_keys(params_.causal, params_.window_left, params_.window_right,
                                          position(chunk, r), chunk.num_keys);
    }
  }

  // The keys that any row of the chunk sees: ranges move up with the rows.
  [[nodiscard]] KeyRange seen(const Chunk& chunk) const {
    return {chunk.visible[0].begin, chunk.visible[at(chunk.num_rows - 1)].end};
  }

  [[nodiscard]] static bool sees(const Chunk& chunk, std::int64_t r, std::int64_t key) {
    return key >= chunk.visible[at(r)].begin && key < chunk.visible[at(r)].end;
  }

  // Calls use(key, row) with each key's row of `tensor`, gathered to float32.
  template <typename UseT>
  void gather(const Chunk& chunk, const PagedTensor& tensor, std::int32_t dim, UseT use) const {
    const KeyRange keys = seen(chunk);
    if (keys.begin >= keys.end) return;
    SlotWalk slot(params_.batch, params_.kv, chunk.b, keys.begin);
    std::array<float, kMaxHeadDim> row;
    for (std::int64_t key = keys.begin; key < keys.end; ++key) {
      if (key > keys.begin) slot.advance();
      const std::int64_t from = slot.offset(tensor) + chunk.kv_head * tensor.head_stride;
      load_row(tensor.data, params_.kv.dtype, from, tensor.dim_stride, dim, row.data());
      use(key, row.data());
    }
  }

  void multiply_keys(Chunk& chunk) const {
    gather(chunk, params_.kv.k, params_.head_dim, [&](std::int64_t key, const float* k) {
      for (std::int64_t r = 0; r < chunk.num_rows; ++r) {
        if (!sees(chunk, r, key)) continue;
        const float* q = chunk.q + r * params_.head_dim;
        double dot = 0.0;
        for (std::int32_t d = 0; d < params_.head_dim; ++d) {
          dot += static_cast<double>(q[d]) * static_cast<double>(k[d]);
        }
        chunk.logits[r * chunk.num_keys + key] = logit(chunk, r, key, dot);
      }
    });
  }

  [[nodiscard]] double logit(const Chunk& chunk, std::int64_t r, std::int64_t key,
                             double dot) const {
    double result = dot * static_cast<double>(params_.scale);
    if (params_.softcap > 0.0F) {
      const double cap = static_cast<double>(params_.softcap);
      result = cap * std::tanh(result / cap);
    }
    if (params_.alibi_slopes != nullptr) {
      const auto distance = static_cast<double>(std::abs(position(chunk, r) - key));
      result -= static_cast<double>(params_.alibi_slopes[head(chunk, r)]) * distance;
    }
    return result;
  }

  void softmax(Chunk& chunk) const {
    for (std::int64_t r = 0; r < chunk.num_rows; ++r) {
      const KeyRange keys = chunk.visible[at(r)];
      double* logits = chunk.logits + r * chunk.num_keys;
      double max = -std::numeric_limits<double>::infinity();
      for (std::int64_t key = keys.begin; key < keys.end; ++key) max = std::max(max, logits[key]);
      double sum = 0.0;
      for (std::int64_t key = keys.begin; key < keys.end; ++key) {
        logits[key] = std::exp(logits[key] - max);
        sum += logits[key];
      }
      chunk.max[at(r)] = max;
      chunk.sum[at(r)] = sum;
    }
  }

  void multiply_values(Chunk& chunk) const {
    std::fill_n(chunk.weighted, chunk.num_rows * params_.head_dim_v, 0.0);
    gather(chunk, params_.kv.v, params_.head_dim_v, [&](std::int64_t key, const float* v) {
      for (std::int64_t r = 0; r < chunk.num_rows; ++r) {
        if (!sees(chunk, r, key)) continue;
        const double weight = chunk.logits[r * chunk.num_keys + key];
        double* weighted = chunk.weighted + r * params_.head_dim_v;
        for (std::int32_t d = 0; d < params_.head_dim_v; ++d) {
          weighted[d] += weight * static_cast<double>(v[d]);
        }
      }
    });
  }

  const AttendParams& params_;
  RopeAngles rope_;
  std::int32_t group_;
};

std::size_t thread_bytes(const AttendParams& params) {
  Scratch scratch(nullptr);
  const Chunk chunk(scratch, params);
  return scratch.bytes();
}

}  // namespace

std::size_t unfused_workspace_bytes(const AttendParams& params, int num_threads) {
  return thread_bytes(params) * static_cast<std::size_t>(num_threads);
}

void unfused_attend(const AttendParams& params, void* workspace) {
  const Definition definition(params);
  const StepBatch& batch = params.batch;
  const std::int32_t group = params.num_q_heads / params.num_kv_heads;
  const std::int64_t rows_per_chunk = chunk_rows(batch);
  const std::size_t bytes = thread_bytes(params);

  pad_output(params);
#pragma omp parallel num_threads(resolve_threads(params.num_threads))
  {
    Scratch scratch(static_cast<char*>(workspace) +
                    static_cast<std::size_t>(omp_get_thread_num()) * bytes);
    Chunk chunk(scratch, params);
    for (std::int32_t b = 0; b < batch.num_seqs; ++b) {
      const std::int64_t rows = std::int64_t{new_tokens(batch, b)} * group;
      const std::int64_t num_chunks = (rows + rows_per_chunk - 1) / rows_per_chunk;
#pragma omp for schedule(dynamic) nowait
      for (std::int64_t c = 0; c < num_chunks * params.num_kv_heads; ++c) {
        chunk.b = b;
        chunk.kv_head = static_cast<std::int32_t>(c % params.num_kv_heads);
        chunk.first_row = c / params.num_kv_heads * rows_per_chunk;
        chunk.num_rows = std::min(rows_per_chunk, rows - chunk.first_row);
        chunk.num_keys = batch.kv_lens[b];
        definition.attend(chunk);
      }
    }
  }
}

}  // namespace octavo::kernels::cpu
