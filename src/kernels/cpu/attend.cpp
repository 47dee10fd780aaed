// SPDX-License-Identifier: Apache-2.0
// The tiled attention: deals the schedule's items to threads, then combines splits. How items are
// dealt can't be seen in the result: each writes rows of its own, and the combination's order is
// fixed.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

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
// Units for each thread, from which on items are not cut by heads.
constexpr std::int64_t kUnitsPerThread = 4;
// The longest share of a thread may exceed the even one by one in so many.
constexpr std::int64_t kEven = 8;

std::int64_t longest_step(const StepBatch& batch) {
  std::int64_t result = 0;
  for (std::int32_t b = 0; b < batch.num_seqs; ++b) {
    result = std::max<std::int64_t>(result, new_tokens(batch, b));
  }
  return result;
}

// The workspace, cut.
struct Workspace {
  Workspace(Scratch& scratch, const AttendParams& params, const SplitSchedule& schedule,
            const float* known_turns) {
    const std::int64_t rows = schedule.num_partial_rows * params.num_q_heads;
    partials.weighted = scratch.take<float>(rows * padded(params.head_dim_v));
    partials.max = scratch.take<float>(rows);
    partials.sum = scratch.take<float>(rows);
    num_done = rows > 0 ? schedule.num_items * params.num_kv_heads : 0;
    done = scratch.take<std::int32_t>(num_done);
    if (params.rope.rotary_dim > 0) {
      angles = scratch.take<Angles>(params.batch.num_tokens);
      if (params.rope.cos == nullptr && known_turns == nullptr) {
        turns = scratch.take<float>(std::int64_t{params.batch.num_tokens} * params.rope.rotary_dim);
      }
    }
  }

  Partials partials;
  std::int32_t* done = nullptr;  // [items, units of an item]: finished splits, at the first one's
  std::int64_t num_done = 0;
  Angles* angles = nullptr;  // [num_tokens]
  float* turns = nullptr;    // [num_tokens, rotary_dim], where the angles are computed
};

class Attend {
 public:
  Attend(const AttendParams& params, const SplitSchedule& schedule, const float* turns)
      : params_(params),
        schedule_(schedule),
        turns_(turns),
        group_(params.num_q_heads / params.num_kv_heads) {
    tile_rows_ = std::min<std::int64_t>(longest_step(params.batch), schedule.q_tile) * group_;
    const std::int64_t state = std::min<std::int64_t>(tile_rows_, kDirectRows) *
                               (padded(params.head_dim) + padded(params.head_dim_v));
    direct_heads_ = std::clamp<std::int64_t>(kDirectStateFloats / std::max<std::int64_t>(1, state),
                                             1, params.num_kv_heads);
  }

  [[nodiscard]] std::size_t shared_bytes() const {
    Scratch scratch(nullptr);
    const Workspace workspace(scratch, params_, schedule_, turns_);
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
    const Workspace workspace(shared, params_, schedule_, turns_);
    char* thread_memory = static_cast<char*>(memory) + shared_bytes();
    const std::int64_t heads = heads_per_unit(threads);
    const std::int64_t chunks = base::ceil_div<std::int64_t>(params_.num_kv_heads, heads);
    std::atomic<std::int64_t> left{schedule_.num_items * chunks};

    pad_output(params_);
    std::fill_n(workspace.done, workspace.num_done, 0);
    if (workspace.angles != nullptr) fill_angles(workspace, threads);
    const auto work = [&](int thread) {
      Scratch scratch(thread_memory + static_cast<std::size_t>(thread) * thread_bytes());
      UnitScratch unit_scratch(scratch, params_, direct_heads_, tile_rows_);
      DealtUnits units(*this, workspace, unit_scratch, left, heads, threads);
      while (Unit* unit = units.take()) work_off(*unit);
    };
    // A region of one thread costs as much as one of several.
    if (threads == 1) return work(0);
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num());
  }

 private:
  // Few items are cut by KV heads, as little as gives the threads even shares: a slot's heads lie
  // together, and memory gives more when it is read on.
  [[nodiscard]] std::int64_t heads_per_unit(int threads) const {
    const std::int64_t all_heads = params_.num_kv_heads;
    const std::int64_t items = std::max<std::int64_t>(1, schedule_.num_items);
    std::int64_t heads = all_heads;
    for (std::int64_t chunks = 2; heads > 1; ++chunks) {
      const std::int64_t units = items * base::ceil_div(all_heads, heads);
      const bool even = base::ceil_div<std::int64_t>(units, threads) * heads * threads * kEven <=
                        items * all_heads * (kEven + 1);
      if (even || units >= kUnitsPerThread * threads) break;
      heads = base::ceil_div(all_heads, chunks);
    }
    return std::min(heads, direct_heads_);
  }

  void fill_angles(const Workspace& workspace, int threads) const {
    const RopeAngles rope(params_.rope, turns_);
    const StepBatch& batch = params_.batch;
#pragma omp parallel for schedule(static) num_threads(threads) if (batch.num_tokens > kFewAngles)
    for (std::int32_t token = 0; token < batch.num_tokens; ++token) {
      const std::int32_t b = row_of_token(batch, token);
      const std::int64_t planned = position_of(batch, b, token - batch.token_offsets[b]);
      float* buffer = workspace.turns == nullptr
                          ? nullptr
                          : workspace.turns + std::int64_t{token} * params_.rope.rotary_dim;
      workspace.angles[token] = rope.at(token, planned, buffer);
    }
  }

  // Units by number, from the last one down: a causal sequence's last query tiles are its heaviest,
  // and taken first they can't be the ones that all wait for. Whole items of few rows are taken in
  // runs, the next one in memory behind the one before, since memory gives more when it is read on;
  // the runs become shorter, so that all threads end together. Where items are cut by heads, all
  // items have a number before one has its second: threads that read one slot together fetch each
  // other's lines.
  class DealtUnits final : public UnitSource {
   public:
    DealtUnits(const Attend& attend, const Workspace& workspace, UnitScratch& scratch,
               std::atomic<std::int64_t>& left, std::int64_t heads, int threads)
        : attend_(attend),
          workspace_(workspace),
          scratch_(scratch),
          left_(left),
          heads_(heads),
          items_(attend.schedule_.num_items),
          run_share_(attend.tile_rows_ <= kDirectRows && heads == attend.params_.num_kv_heads
                         ? 2 * threads
                         : 0) {}

    Unit* claim() override {
      if (!claimed_) {
        claimed_ = true;
        if (run_ == run_end_) take_run();
        next_ = run_ == run_end_ ? nullptr : &units_[next_ == &units_[0] ? 1 : 0];
        if (next_ != nullptr) {
          *next_ =
              attend_.unit(run_ % items_, run_ / items_ * heads_, heads_, workspace_, scratch_);
          next_->source = this;
          ++run_;
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
    void take_run() {
      std::int64_t left = left_.load(std::memory_order_relaxed);
      std::int64_t count = 0;
      do {
        count = std::min<std::int64_t>(left, 1);
        if (run_share_ > 0) count = std::max(count, left / run_share_);
      } while (!left_.compare_exchange_weak(left, left - count, std::memory_order_relaxed));
      run_ = left - count;
      run_end_ = left;
    }

    const Attend& attend_;
    const Workspace& workspace_;
    UnitScratch& scratch_;
    std::atomic<std::int64_t>& left_;  // units that no thread has taken
    std::int64_t heads_;               // of a unit
    std::int64_t items_;
    std::int64_t run_share_;  // a run is one in so many of what is left; 0: one unit
    std::int64_t run_ = 0, run_end_ = 0;
    Unit units_[2];  // the one worked on and the next
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
      unit.num_splits = num_splits;
      unit.splits_done = workspace.done + (item - split) * params_.num_kv_heads + first_head;
      unit.first_partial_row =
          schedule_.partial_offsets[b] + std::int64_t{unit.first_token} * num_splits;
      unit.split = static_cast<std::int32_t>(split);
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

  const AttendParams& params_;
  const SplitSchedule& schedule_;
  const float* turns_;
  std::int32_t group_;
  std::int64_t tile_rows_ = 0;
  std::int64_t direct_heads_ = 0;
};

}  // namespace

int resolve_threads(int num_threads) {
  return num_threads > 0 ? num_threads : omp_get_max_threads();
}

std::size_t attend_workspace_bytes(const AttendParams& params, const SplitSchedule& schedule,
                                   int num_threads, const float* turns) {
  const Attend attention(params, schedule, turns);
  return attention.shared_bytes() +
         static_cast<std::size_t>(num_threads) * attention.thread_bytes();
}

void attend(const AttendParams& params, const SplitSchedule& schedule, void* workspace,
            const float* turns) {
  Attend(params, schedule, turns).run(workspace);
}

}  // namespace octavo::kernels::cpu
