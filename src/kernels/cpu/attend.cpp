// SPDX-License-Identifier: Apache-2.0
// The tiled attention: deals the schedule's items to threads, then combines splits. How items are
// dealt can't be seen in the result: each writes rows of its own, and the combination's order is
// fixed.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/math.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/output.h"
#include "kernels/cpu/rope.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/unit.h"

namespace octavo::kernels::cpu {
namespace {

// State (queries and weighted sums) of the heads that a unit of few rows walks together.
constexpr std::int64_t kDirectStateFloats = std::int64_t{1} << 15;
// Units for each thread, below which items are cut by heads.
constexpr std::int64_t kUnitsPerThread = 4;

std::int64_t longest_step(const StepBatch& batch) {
  std::int64_t result = 0;
  for (std::int32_t b = 0; b < batch.num_seqs; ++b) {
    result = std::max<std::int64_t>(result, new_tokens(batch, b));
  }
  return result;
}

// The workspace, cut.
struct Workspace {
  Workspace(Scratch& scratch, const AttendParams& params, const SplitSchedule& schedule) {
    const std::int64_t rows = schedule.num_partial_rows * params.num_q_heads;
    partials.weighted = scratch.take<float>(rows * params.head_dim_v);
    partials.max = scratch.take<float>(rows);
    partials.sum = scratch.take<float>(rows);
    if (params.rope.rotary_dim > 0) {
      angles = scratch.take<Angles>(params.batch.num_tokens);
      if (params.rope.cos == nullptr) {
        turns = scratch.take<float>(std::int64_t{params.batch.num_tokens} * params.rope.rotary_dim);
      }
    }
  }

  Partials partials;
  Angles* angles = nullptr;  // [num_tokens]
  float* turns = nullptr;    // [num_tokens, rotary_dim], where the angles are computed
};

class Attend {
 public:
  Attend(const AttendParams& params, const SplitSchedule& schedule)
      : params_(params), schedule_(schedule), group_(params.num_q_heads / params.num_kv_heads) {
    tile_rows_ = std::min<std::int64_t>(longest_step(params.batch), schedule.q_tile) * group_;
    const std::int64_t state = std::min<std::int64_t>(tile_rows_, kDirectRows) *
                               (padded(params.head_dim) + padded(params.head_dim_v));
    direct_heads_ = std::clamp<std::int64_t>(kDirectStateFloats / std::max<std::int64_t>(1, state),
                                             1, params.num_kv_heads);
  }

  [[nodiscard]] std::size_t shared_bytes() const {
    Scratch scratch(nullptr);
    const Workspace workspace(scratch, params_, schedule_);
    return scratch.bytes();
  }

  [[nodiscard]] std::size_t thread_bytes() const {
    Scratch scratch(nullptr);
    const UnitScratch unit(scratch, params_, direct_heads_, tile_rows_);
    return scratch.bytes();
  }

  void run(void* memory) const {
    const int threads = resolve_threads(params_.num_threads);
    Scratch shared(memory);
    const Workspace workspace(shared, params_, schedule_);
    char* thread_memory = static_cast<char*>(memory) + shared_bytes();
    const RopeAngles rope(params_.rope);
    const std::int64_t heads = heads_per_unit(threads);
    std::atomic<std::int64_t> taken{0};

    pad_output(params_);
#pragma omp parallel num_threads(threads)
    {
      Scratch scratch(thread_memory +
                      static_cast<std::size_t>(omp_get_thread_num()) * thread_bytes());
      UnitScratch unit_scratch(scratch, params_, direct_heads_, tile_rows_);
      if (workspace.angles != nullptr) {
#pragma omp for schedule(static)
        for (std::int32_t token = 0; token < params_.batch.num_tokens; ++token) {
          fill_angles(workspace, rope, token);
        }
      }
      // A causal sequence's last query tiles are its heaviest: taken first, they can't be the ones
      // that all wait for.
      DealtUnits units(*this, workspace, unit_scratch, taken, heads);
      while (Unit* unit = units.take()) work_off(*unit);
#pragma omp barrier
      if (schedule_.num_partial_rows > 0) {
        const std::int64_t rows = std::int64_t{params_.batch.num_tokens} * params_.num_kv_heads;
#pragma omp for schedule(static)
        for (std::int64_t row = 0; row < rows; ++row) {
          combine(static_cast<std::int32_t>(row / params_.num_kv_heads),
                  static_cast<std::int32_t>(row % params_.num_kv_heads), workspace.partials,
                  unit_scratch.row);
        }
      }
    }
  }

 private:
  [[nodiscard]] std::int64_t heads_per_unit(int threads) const {
    const std::int64_t wanted = kUnitsPerThread * threads;
    const std::int64_t chunks = std::clamp<std::int64_t>(
        wanted / std::max<std::int64_t>(1, schedule_.num_items), 1, params_.num_kv_heads);
    return std::min(base::ceil_div<std::int64_t>(params_.num_kv_heads, chunks), direct_heads_);
  }

  void fill_angles(const Workspace& workspace, const RopeAngles& rope, std::int32_t token) const {
    const std::int32_t b = row_of_token(params_.batch, token);
    const std::int64_t planned =
        position_of(params_.batch, b, token - params_.batch.token_offsets[b]);
    float* buffer = workspace.turns == nullptr
                        ? nullptr
                        : workspace.turns + std::int64_t{token} * params_.rope.rotary_dim;
    workspace.angles[token] = rope.at(rope.position(token, planned), buffer);
  }

  // Units by number. Each thread takes the next one that nobody has.
  class DealtUnits final : public UnitSource {
   public:
    DealtUnits(const Attend& attend, const Workspace& workspace, UnitScratch& scratch,
               std::atomic<std::int64_t>& taken, std::int64_t heads)
        : attend_(attend),
          workspace_(workspace),
          scratch_(scratch),
          taken_(taken),
          heads_(heads),
          chunks_(base::ceil_div<std::int64_t>(attend.params_.num_kv_heads, heads)) {}

    Unit* claim() override {
      if (!claimed_) {
        claimed_ = true;
        const std::int64_t left = attend_.schedule_.num_items * chunks_ - 1 - taken_++;
        next_ = left < 0 ? nullptr : &units_[next_ == &units_[0] ? 1 : 0];
        if (next_ != nullptr) {
          *next_ =
              attend_.unit(left / chunks_, left % chunks_ * heads_, heads_, workspace_, scratch_);
          next_->source = this;
        }
      }
      return next_;
    }

    Unit* take() {
      Unit* unit = claim();
      claimed_ = false;
      return unit;
    }

   private:
    const Attend& attend_;
    const Workspace& workspace_;
    UnitScratch& scratch_;
    std::atomic<std::int64_t>& taken_;
    std::int64_t heads_;   // of a unit
    std::int64_t chunks_;  // units of an item
    Unit units_[2];        // the one worked on and the next
    Unit* next_ = nullptr;
    bool claimed_ = false;
  };

  [[nodiscard]] Unit unit(std::int64_t item, std::int64_t first_head, std::int64_t heads,
                          const Workspace& workspace, UnitScratch& scratch) const {
    const std::int64_t* offsets = schedule_.item_offsets;
    const std::int64_t* end = offsets + params_.batch.num_seqs + 1;
    const auto b = static_cast<std::int32_t>(std::upper_bound(offsets, end, item) - offsets - 1);
    const std::int32_t num_splits = schedule_.num_splits[b];
    const std::int64_t local = item - offsets[b];
    const std::int64_t split = local % num_splits;

    Unit unit;
    unit.params = &params_;
    unit.angles = workspace.angles;
    unit.scratch = &scratch;
    unit.b = b;
    unit.first_token = static_cast<std::int32_t>(local / num_splits * schedule_.q_tile);
    unit.num_tokens = std::min(schedule_.q_tile, new_tokens(params_.batch, b) - unit.first_token);
    unit.first_head = static_cast<std::int32_t>(first_head);
    unit.end_head =
        static_cast<std::int32_t>(std::min<std::int64_t>(first_head + heads, params_.num_kv_heads));
    const KeyRange first = keys_of(unit, unit.first_token);
    const KeyRange last = keys_of(unit, unit.first_token + unit.num_tokens - 1);
    unit.first_key_tile = first.begin / kKeyTile + split * schedule_.split_tiles[b];
    unit.end_key_tile = (last.end + kKeyTile - 1) / kKeyTile;
    if (num_splits > 1) {
      unit.end_key_tile =
          std::min(unit.end_key_tile, unit.first_key_tile + schedule_.split_tiles[b]);
      unit.partials = &workspace.partials;
      unit.partial_row_step = num_splits;
      unit.first_partial_row =
          schedule_.partial_offsets[b] + std::int64_t{unit.first_token} * num_splits + split;
    }
    return unit;
  }

  void work_off(const Unit& unit) const {
    switch (params_.kv.dtype) {
      case DType::F16:
        return attend_unit_f16(unit);
      case DType::BF16:
        return attend_unit_bf16(unit);
      default:
        return attend_unit_f32(unit);
    }
  }

  // Puts the splits of a token's group of heads together, in their order.
  void combine(std::int32_t token, std::int32_t kv_head, const Partials& partials,
               float* weighted) const {
    const std::int32_t b = row_of_token(params_.batch, token);
    const std::int32_t num_splits = schedule_.num_splits[b];
    if (num_splits <= 1) return;
    const std::int32_t i = token - params_.batch.token_offsets[b];
    const std::int64_t first_row = schedule_.partial_offsets[b] + std::int64_t{i} * num_splits;
    for (std::int32_t head = kv_head * group_; head < (kv_head + 1) * group_; ++head) {
      float max = -std::numeric_limits<float>::infinity();
      for (std::int32_t j = 0; j < num_splits; ++j) {
        max = std::max(max, partials.max[(first_row + j) * params_.num_q_heads + head]);
      }
      float sum = 0.0F;
      std::fill_n(weighted, params_.head_dim_v, 0.0F);
      for (std::int32_t j = 0; j < num_splits; ++j) {
        const std::int64_t at = (first_row + j) * params_.num_q_heads + head;
        if (partials.sum[at] == 0.0F) continue;
        const float weight = std::exp(partials.max[at] - max);
        sum += weight * partials.sum[at];
        const float* part = partials.weighted + at * params_.head_dim_v;
#pragma omp simd
        for (std::int32_t d = 0; d < params_.head_dim_v; ++d) weighted[d] += weight * part[d];
      }
      finish_row(params_, b, i, head, RowState<float>{weighted, max, sum});
    }
  }

  const AttendParams& params_;
  const SplitSchedule& schedule_;
  std::int32_t group_;
  std::int64_t tile_rows_ = 0;
  std::int64_t direct_heads_ = 0;
};

}  // namespace

int resolve_threads(int num_threads) {
  return num_threads > 0 ? num_threads : omp_get_max_threads();
}

std::size_t attend_workspace_bytes(const AttendParams& params, const SplitSchedule& schedule,
                                   int num_threads) {
  const Attend attention(params, schedule);
  return attention.shared_bytes() +
         static_cast<std::size_t>(num_threads) * attention.thread_bytes();
}

void attend(const AttendParams& params, const SplitSchedule& schedule, void* workspace) {
  Attend(params, schedule).run(workspace);
}

}  // namespace octavo::kernels::cpu
