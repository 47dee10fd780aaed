// SPDX-License-Identifier: Apache-2.0
// A unit of the tiled attention: one item of the schedule (sequence, query tile, split) and a run
// of its KV heads. attend.cpp makes units, the kernels of attend-inl.h work them off.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/cpu/config.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/rope.h"
#include "kernels/cpu/scratch.h"
#include "kernels/params.h"

namespace octavo::kernels::cpu {

/// Lanes that rows in scratch are padded to; no target has more.
constexpr std::int32_t kMaxLanes = 16;

/// Rows that the register-blocked kernels take at once; see tile-inl.h.
constexpr std::int32_t kPackedRows = 6;

/// Up to this many rows (token, head of the group) K and V are read in place; beyond, a key tile is
/// packed first.
constexpr std::int32_t kDirectRows = 16;

constexpr std::int64_t padded(std::int64_t dim) {
  return (dim + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
}

/// Rows of a head in a query tile of `num_tokens`, padded to whole register blocks.
constexpr std::int64_t padded_rows(std::int64_t rows) {
  return (rows + kPackedRows - 1) / kPackedRows * kPackedRows;
}

/// Where partials go: row (token, split) of num_q_heads unnormalised outputs with max and sum.
struct Partials {
  float* weighted = nullptr;  ///< [rows, num_q_heads, padded dim]
  float* max = nullptr;       ///< [rows, num_q_heads]
  float* sum = nullptr;       ///< [rows, num_q_heads]
};

/// What a thread works in. `heads` heads of `rows` rows keep their state at once.
struct UnitScratch {
  UnitScratch(Scratch& scratch, const AttendParams& params, std::int64_t direct_heads,
              std::int64_t tile_rows) {
    const std::int64_t rows =
        std::max<std::int64_t>(direct_heads * kDirectRows, padded_rows(tile_rows));
    q = scratch.take<float>(rows * padded(params.head_dim));
    weighted = scratch.take<float>(rows * padded(params.head_dim_v));
    sum = scratch.take<float>(rows * kMaxLanes);
    max = scratch.take<float>(rows);
    scores = scratch.take<float>(
        std::max<std::int64_t>(2 * direct_heads * kDirectRows, kPackedRows) * kKeyTile);
    part = scratch.take<float>(kPackedRows * padded(params.head_dim_v));
    k_packed = scratch.take<float>(padded(params.head_dim) * kKeyTile);
    v_packed = scratch.take<float>(padded(params.head_dim_v) * kKeyTile);
    row = scratch.take<float>(padded(std::max(params.head_dim, params.head_dim_v)));
  }

  float* q;         ///< Rotated: [heads, rows, padded dim], or interleaved by kPackedRows.
  float* weighted;  ///< [heads, rows, padded dim]
  float* sum;       ///< [heads, rows, kMaxLanes]: a sum for each lane.
  float* max;       ///< [heads, rows]
  float* scores;    ///< [2, heads, rows, kKeyTile]
  float* part;      ///< [rows, padded dim]: a masked tile's share.
  float* k_packed;  ///< [dim, kKeyTile]
  float* v_packed;  ///< [kKeyTile, padded dim]
  float* row;       ///< [padded dim] of q, or of the output where splits are combined.

  // Whose rows `q` holds; token -1: of none that a unit could take over.
  std::int32_t q_seq = 0;
  std::int32_t q_token = -1;
  std::int32_t q_first_head = 0;
  std::int32_t q_end_head = 0;
};

struct Unit;

/// Where a thread's units come from.
class UnitSource {
 public:
  virtual ~UnitSource() = default;
  /// The unit that the thread works off next, null when there is none. May be called early, by the
  /// unit before, so that the rows between two units are not waited for.
  virtual Unit* claim() = 0;
};

struct Unit {
  const AttendParams* params = nullptr;
  const Angles* angles = nullptr;  ///< [num_tokens], or null: q is not rotated.
  UnitScratch* scratch = nullptr;
  const Partials* partials = nullptr;  ///< Null: the unit's rows are final.

  std::int32_t b = 0;
  std::int32_t first_token = 0;
  std::int32_t num_tokens = 0;
  std::int64_t first_key_tile = 0;
  std::int64_t end_key_tile = 0;
  std::int32_t first_head = 0;  ///< Of the KV heads.
  std::int32_t end_head = 0;
  std::int64_t first_partial_row = 0;  ///< Of split 0.
  std::int32_t split = 0;
  std::int32_t num_splits = 1;
  std::int32_t* splits_done = nullptr;  ///< Of the unit's rows; counted up by several threads.

  UnitSource* source = nullptr;  ///< Null: nothing comes behind.
  bool fetched = false;          ///< The first key tile's rows are on their way.
};

/// The keys that token `i` of the unit's batch row sees.
inline KeyRange keys_of(const Unit& unit, std::int32_t i) {
  const AttendParams& p = *unit.params;
  return visible_keys(p.causal, p.window_left, p.window_right, position_of(p.batch, unit.b, i),
                      p.batch.kv_lens[unit.b]);
}

/// Counts the unit's split as done. Returns whether all splits of its rows are.
inline bool finish_split(const Unit& unit) {
  const std::atomic_ref<std::int32_t> done(*unit.splits_done);
  return done.fetch_add(1, std::memory_order_acq_rel) + 1 == unit.num_splits;
}

void attend_unit_f32(const Unit& unit);
void attend_unit_f16(const Unit& unit);
void attend_unit_bf16(const Unit& unit);

}  // namespace octavo::kernels::cpu
