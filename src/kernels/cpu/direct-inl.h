// SPDX-License-Identifier: Apache-2.0
// The direct way of the tiled attention, for each of Highway's targets: few rows, K and V in place,
// all heads of a slot together. While a run of heads is scored its V is fetched, while its V is
// summed the next run's K. Short slots go through a pipeline instead: while a run is scored a few
// keys at a time, the weights and sums of the run before are made.

#if defined(OCTAVO_KERNELS_CPU_DIRECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTAVO_KERNELS_CPU_DIRECT_INL_H_
#undef OCTAVO_KERNELS_CPU_DIRECT_INL_H_
#else
#define OCTAVO_KERNELS_CPU_DIRECT_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class ElementsT>
class DirectKernel : UnitRows<ElementsT> {
  using Base = UnitRows<ElementsT>;
  using Base::p_, Base::q_stride_, Base::rows_, Base::scratch_, Base::unit_, Base::v_stride_;
  using Base::products_;
  using typename Base::T;

 public:
  explicit DirectKernel(const Unit& unit)
      : Base(unit), walk_(unit), pipelined_(walk_.run_bytes() <= kPipelinedBytes) {}

  void run() {
    walk_.start(unit_.first_head, unit_.end_head);
    std::int64_t t = unit_.first_key_tile;
    if (t < unit_.end_key_tile) walk_.enter(t);
    start_rows();
    Run before;
    while (t < unit_.end_key_tile) {
      for (std::int32_t h = unit_.first_head; h < unit_.end_head; h = walk_.run_end(h)) {
        const Run now{&walk_.tile(), h, walk_.run_end(h), next_scores()};
        score_run(now, before);
        before = now.tile->seen.empty() ? Run() : now;
        if (!pipelined_) {
          sum_run(before);
          before = Run();
        }
      }
      if (++t < unit_.end_key_tile) walk_.enter(t);
    }
    sum_run(before);
    for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) {
      this->end_head(h, head_rows(h));
    }
  }

 private:
  // Of a slot's K. With longer ones the pipeline was slower, two runs' scores fill the L1 cache.
  static constexpr std::int64_t kPipelinedBytes = 1024;

  // Heads that are walked together within a tile.
  struct Run {
    const KeyTile* tile = nullptr;
    std::int32_t first_head = 0;
    std::int32_t end_head = 0;
    float* scores = nullptr;  // [heads, rows, kKeyTile]

    [[nodiscard]] std::int32_t heads() const { return end_head - first_head; }
  };

  [[nodiscard]] HeadRows head_rows(std::int32_t h) const {
    const std::int64_t at = std::int64_t{h - unit_.first_head} * kDirectRows;
    return {scratch_.q + at * q_stride_, scratch_.weighted + at * v_stride_,
            scratch_.sum + at * kMaxLanes, scratch_.max + at};
  }

  [[nodiscard]] float* scores_of(const Run& run, std::int32_t h, std::int64_t row) const {
    return run.scores + ((h - run.first_head) * rows_ + row) * kKeyTile;
  }

  // In the pipeline two runs have scores at once.
  float* next_scores() {
    second_scores_ = pipelined_ && !second_scores_;
    const std::int64_t heads = walk_.run_end(unit_.first_head) - unit_.first_head;
    return scratch_.scores + (second_scores_ ? heads * rows_ * kKeyTile : 0);
  }

  // The first keys come while the queries are loaded.
  void start_rows() {
    Ahead ahead(walk_.is_cold(unit_.first_head)
                    ? walk_.keys(few_of(walk_.tile().seen), unit_.first_head,
                                 walk_.run_end(unit_.first_head))
                    : Lines());
    ahead.pace(ahead.count(), (unit_.end_head - unit_.first_head) * rows_);
    const bool held = scratch_.q_token == unit_.first_token && scratch_.q_seq == unit_.b &&
                      scratch_.q_first_head == unit_.first_head &&
                      scratch_.q_end_head == unit_.end_head;
    for (std::int32_t h = unit_.first_head; h < unit_.end_head; ++h) {
      const HeadRows rows = head_rows(h);
      this->clear(rows, rows_);
      if (!held) this->load_queries(h, rows.q, ahead);
    }
    ahead.finish();
    scratch_.q_seq = unit_.b;
    scratch_.q_token = unit_.first_token;
    scratch_.q_first_head = unit_.first_head;
    scratch_.q_end_head = unit_.end_head;
  }

  // Scores against keys [begin, end) of the tile.
  template <int kRows>
  void score_rows(const float* q, const PageRows<T>& k, Span keys, float* scores, Ahead& ahead) {
#if OCTAVO_HAS_PRODUCTS
    if constexpr (std::is_same_v<ElementsT, Bf16Elements>) {
      if (products_) {
        return score_products<kRows>(reinterpret_cast<const std::uint16_t*>(q), 2 * q_stride_, k,
                                     keys.begin, keys.end, p_.head_dim, scores, ahead);
      }
    }
#endif
    score_direct<ElementsT, kRows>(q, q_stride_, k, keys.begin, keys.end, p_.head_dim, scores,
                                   ahead);
  }

  template <int kRows>
  void weigh_rows(const Span* spans, bool same, const float* scores, const PageRows<T>& v,
                  const float* factors, float* to, Ahead& ahead) {
    if (same) {
      weigh<ElementsT, Sums::Merge, kRows, kDirectVectors>(
          scores, v, spans[0].begin, spans[0].end, p_.head_dim_v, factors, to, v_stride_, ahead);
      return;
    }
    for (int r = 0; r < kRows; ++r) {
      weigh<ElementsT, Sums::Merge, 1, kDirectVectors>(
          scores + std::int64_t{r} * kKeyTile, v, spans[r].begin, spans[r].end, p_.head_dim_v,
          factors + r, to + r * v_stride_, v_stride_, ahead);
    }
  }

  // Calls `block(first row, number of rows)` for the rows in blocks, the number as a constant.
  template <typename BlockT>
  void for_blocks(BlockT block) {
    std::int64_t first = 0;
    for (; first + kDirectBlock <= rows_; first += kDirectBlock) {
      block(first, std::integral_constant<int, kDirectBlock>());
    }
    const std::int64_t left = rows_ - first;
    if constexpr (kDirectBlock > 3) {
      if (left == 3) block(first, std::integral_constant<int, 3>());
    }
    if constexpr (kDirectBlock > 2) {
      if (left == 2) block(first, std::integral_constant<int, 2>());
    }
    if (left == 1) block(first, std::integral_constant<int, 1>());
  }
  [[nodiscard]] std::int64_t blocks() const { return (rows_ + kDirectBlock - 1) / kDirectBlock; }

  // Steps that a head takes; see score_direct and weigh.
  [[nodiscard]] std::int64_t score_steps(Span keys) const {
    const std::int64_t fours = (keys.end + 3) / 4 - keys.begin / 4;
    return blocks() * fours *
           std::max<std::int64_t>(1, p_.head_dim / (products_ ? 2 * kLanes : kLanes));
  }
  [[nodiscard]] std::int64_t weigh_steps(Span keys) const {
    constexpr std::int64_t kPass = kDirectVectors * kLanes;
    const std::int64_t passes =
        p_.head_dim_v / kPass + (p_.head_dim_v % kPass + kLanes - 1) / kLanes;
    return blocks() * (keys.end - keys.begin) * passes;
  }

  // What a head's scores and its sums, softmax step included, take for so many keys, in one unit:
  // measured, by the numbers of multiply-adds and of reductions.
  [[nodiscard]] std::int64_t score_time(std::int64_t keys) const {
    return ((products_ ? 5 : 8) * padded(p_.head_dim) / kMaxLanes + 18) * keys;
  }
  [[nodiscard]] std::int64_t sum_time(std::int64_t keys) const {
    return (9 * padded(p_.head_dim_v) / kMaxLanes + 14) * keys;
  }

  // The next keys to be scored, of those left: a few, unless the run's K is all there.
  [[nodiscard]] Span few_of(Span left) const {
    return pipelined_ ? first_keys_of(left, kFewShortKeys) : first_keys_of(left, kFewKeys);
  }

  // Scores of a run, a few keys of all its heads at a time where their K is still to come, and what
  // is left to do of the run before. Meanwhile the next few keys come, and these keys' V. The
  // thread's last V comes by heads, since nothing else is left to hide its way behind: each head's
  // while those before are summed.
  void score_run(const Run& run, const Run& before) {
    const Span seen = run.tile->seen;
    const bool final = walk_.is_final(run.end_head);
    if (final) {
      last_values_ = walk_.values(seen, run.first_head, run.end_head, Lines::Order::Heads);
      values_left_ = last_values_.count();
      time_left_ = run.heads() * score_time(seen.size()) + time_of(before) +
                   (run.heads() - 1) * sum_time(seen.size());
    }
    std::int32_t head = before.first_head;
    const bool there =
        pipelined_ ? walk_.is_fetched(run.first_head) : !walk_.is_cold(run.first_head);
    const auto part_of = [&](Span left) { return there && !pipelined_ ? left : few_of(left); };
    for (Span part = part_of(seen); !part.empty(); part = part_of({part.end, seen.end})) {
      const std::int64_t done = part.end - seen.begin;
      const auto due =
          static_cast<std::int32_t>(before.first_head + before.heads() * done / seen.size());
      Lines keys;  // that are scored next, if they are still to be fetched
      if (part.end < seen.end) {
        if (!there) keys = walk_.keys(few_of({part.end, seen.end}), run.first_head, run.end_head);
      } else if (pipelined_) {
        keys = walk_.first_keys_behind(run.end_head, kFewShortKeys);
      }
      const std::int64_t scoring = run.heads() * score_time(part.size());
      const std::int64_t summing =
          before.tile == nullptr ? 0 : (due - head) * sum_time(before.tile->seen.size());
      Ahead ahead(keys, final ? last_values_ : walk_.values(part, run.first_head, run.end_head));
      const std::int64_t count = keys.count() + (final ? share_of_values(scoring + summing)
                                                       : ahead.count() - keys.count());
      const std::int64_t beside_scores = count * scoring / (scoring + summing);
      ahead.pace(beside_scores, run.heads() * score_steps(part));
      for (std::int32_t h = run.first_head; h < run.end_head; ++h) {
        for_blocks([&](std::int64_t first, auto rows) {
          score_rows<rows()>(head_rows(h).q + first * q_stride_, this->keys(h, *run.tile), part,
                             scores_of(run, h, first), ahead);
        });
      }
      if (head < due) {
        ahead.pace(count - beside_scores, (due - head) * weigh_steps(before.tile->seen));
        sum_heads(before, head, due, ahead);
        head = due;
      }
      if (final) {
        ahead.finish_first();
        last_values_ = ahead.second();
      } else {
        ahead.finish();
      }
    }
    Ahead none;
    sum_heads(before, head, before.end_head, none);
  }

  [[nodiscard]] std::int64_t time_of(const Run& run) const {
    return run.tile == nullptr ? 0 : run.heads() * sum_time(run.tile->seen.size());
  }

  // Of the thread's last values, what is due in so much time.
  std::int64_t share_of_values(std::int64_t time) {
    const std::int64_t share =
        std::min(values_left_, values_left_ * time / std::max<std::int64_t>(1, time_left_));
    values_left_ -= share;
    time_left_ -= time;
    return share;
  }

  // The whole of a run, while the next one's K comes.
  void sum_run(const Run& run) {
    if (run.tile == nullptr) return;
    Ahead ahead(last_values_, walk_.keys_behind(run.end_head));
    const std::int64_t steps = weigh_steps(run.tile->seen);
    if (values_left_ > 0) {
      ahead.pace(values_left_, (run.heads() - 1) * steps);
    } else {
      ahead.pace(ahead.count(), run.heads() * steps);
    }
    for (std::int32_t h = run.first_head; h < run.end_head; ++h) {
      if (walk_.is_last()) this->reserve_partials(h);
      sum_heads(run, h, h + 1, ahead);
    }
    ahead.finish();
  }

  // Softmax steps and weighted sums.
  void sum_heads(const Run& run, std::int32_t first_head, std::int32_t end_head, Ahead& ahead) {
    for (std::int32_t h = first_head; h < end_head; ++h) {
      const HeadRows state = head_rows(h);
      for_blocks([&](std::int64_t first, auto rows) {
        Span spans[kDirectBlock];
        float factors[kDirectBlock];
        float* scores = scores_of(run, h, first);
        const bool same = this->find_spans(*run.tile, first, rows(), spans);
        this->soften_rows(*run.tile, h, first, rows(), state, spans, scores, factors);
        weigh_rows<rows()>(spans, same, scores, this->values(h, *run.tile), factors,
                           state.weighted + first * v_stride_, ahead);
      });
    }
  }

  TileWalk walk_;
  bool pipelined_;
  bool second_scores_ = false;
  Lines last_values_;
  std::int64_t values_left_ = 0;  // of these, not dealt
  std::int64_t time_left_ = 0;    // to deal them in
};

}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
