// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/unfused/chunks.h"

#include <algorithm>
#include <limits>

#include "base/math.h"

namespace octavo::kernels::cuda {
namespace {

constexpr std::size_t kAlignment = 256;

// Batches beyond it gain nothing and meet the libraries' limits.
constexpr std::int64_t kMostProducts = 16384;

// A run may compute so much of what is in it, padding included.
constexpr double kMostPadding = 1.5;

// Query rows of one head that keep a product busy: heads are split before tokens fall below it. At
// the same bytes of scores fewer heads of more rows were faster, down to one head (H200); but a
// causal chunk of many tokens multiplies more pairs that nobody sees.
constexpr std::int64_t kGoodRows = 8192;
constexpr std::int64_t kGoodCausalRows = 2048;

// Rows of a product's tile: what is cut is cut into whole ones.
constexpr std::int64_t kTileRows = 256;

std::int64_t rounded_keys(std::int64_t keys) {
  return std::max<std::int64_t>(base::ceil_div(keys, kKeyStep), 1) * kKeyStep;
}

class Cut {
 public:
  Cut(const UnfusedShape& shape, const StepLengths& lengths, std::size_t budget,
      const std::function<void(const UnfusedChunk&)>& use)
      : shape_(shape), lengths_(lengths), budget_(budget), use_(use) {}

  void run() {
    const std::int32_t all = num_seqs();
    for (std::int32_t b = 0; b < all;) {
      if (new_tokens(b) == 0) {
        ++b;
      } else {
        b = take_run(b);
      }
    }
  }

 private:
  [[nodiscard]] std::int32_t num_seqs() const {
    return lengths_.bounded ? lengths_.maxima.num_seqs : lengths_.batch.num_seqs;
  }

  [[nodiscard]] std::int32_t new_tokens(std::int32_t b) const {
    if (lengths_.bounded) return lengths_.maxima.max_new_tokens;
    return lengths_.batch.token_offsets[b + 1] - lengths_.batch.token_offsets[b];
  }

  [[nodiscard]] std::int32_t kv_len(std::int32_t b) const {
    return lengths_.bounded ? lengths_.maxima.max_kv_len : lengths_.batch.kv_lens[b];
  }

  [[nodiscard]] bool fits(const UnfusedChunk& chunk) const {
    return UnfusedLayout(shape_, chunk).end <= budget_ &&
           std::int64_t{chunk.num_seqs} * chunk.num_heads <= kMostProducts;
  }

  // The longest run of batch rows from `first` on that fits as a whole and whose padding costs no
  // more than what is in it.
  std::int32_t take_run(std::int32_t first) {
    UnfusedChunk run{.first_seq = first, .num_seqs = 1, .num_heads = shape_.num_kv_heads};
    run.num_tokens = new_tokens(first);
    run.num_keys = rounded_keys(kv_len(first));
    run.seen_keys = run.num_keys;
    double inside = static_cast<double>(run.num_tokens) * static_cast<double>(run.num_keys);
    for (std::int32_t b = first + 1; b < num_seqs(); ++b) {
      UnfusedChunk longer = run;
      longer.num_seqs = b + 1 - first;
      longer.num_tokens = std::max(run.num_tokens, new_tokens(b));
      longer.num_keys = std::max(run.num_keys, rounded_keys(kv_len(b)));
      longer.seen_keys = longer.num_keys;
      const double more = inside + static_cast<double>(new_tokens(b)) *
                                       static_cast<double>(rounded_keys(kv_len(b)));
      const double padded = static_cast<double>(longer.num_seqs) *
                            static_cast<double>(longer.num_tokens) *
                            static_cast<double>(longer.num_keys);
      if (padded > kMostPadding * more || !fits(longer)) break;
      run = longer;
      inside = more;
    }
    split(run);
    return first + run.num_seqs;
  }

  // A run of one sequence may have to be cut by heads and by tokens.
  void split(UnfusedChunk run) const {
    const std::int32_t all_tokens = run.num_tokens;
    const std::int64_t good_rows = shape_.causal ? kGoodCausalRows : kGoodRows;
    const std::int64_t good =
        std::min<std::int64_t>(all_tokens, std::max<std::int64_t>(1, good_rows / shape_.group));
    run.num_tokens = most_tokens(run, all_tokens);
    while (run.num_heads > 1 && run.num_tokens < good) {
      run.num_heads = (run.num_heads + 1) / 2;
      run.num_tokens = most_tokens(run, all_tokens);
    }
    const std::int32_t heads = run.num_heads;
    const std::int32_t tokens = even_tokens(all_tokens, std::max(run.num_tokens, 1));
    for (std::int32_t head = 0; head < shape_.num_kv_heads; head += heads) {
      run.first_head = head;
      run.num_heads = std::min(heads, shape_.num_kv_heads - head);
      for (std::int32_t token = 0; token < all_tokens; token += tokens) {
        run.first_token = token;
        run.num_tokens = std::min(tokens, all_tokens - token);
        run.seen_keys = seen_keys(run);
        run.gathers = token == 0;
        use_(run);
      }
    }
  }

  // All, or at most `most`: but for the last ones alike, in whole tiles where there are any.
  [[nodiscard]] std::int32_t even_tokens(std::int32_t all, std::int32_t most) const {
    if (most >= all) return all;
    const auto unit =
        static_cast<std::int32_t>(std::max<std::int64_t>(1, kTileRows / shape_.group));
    if (most < unit) return most;
    const std::int32_t tiles = base::ceil_div(all, unit);
    return base::ceil_div(tiles, base::ceil_div(tiles, most / unit)) * unit;
  }

  [[nodiscard]] std::int32_t most_tokens(UnfusedChunk chunk, std::int32_t highest) const {
    std::int32_t low = 0;
    while (low < highest) {
      chunk.num_tokens = low + (highest - low + 1) / 2;
      if (fits(chunk)) {
        low = chunk.num_tokens;
      } else {
        highest = chunk.num_tokens - 1;
      }
    }
    return low;
  }

  [[nodiscard]] std::int64_t seen_keys(const UnfusedChunk& chunk) const {
    // A sequence with fewer tokens than the maximum has its first ones farther back.
    if (lengths_.bounded) return chunk.num_keys;
    std::int64_t seen = 0;
    for (std::int32_t b = chunk.first_seq; b < chunk.first_seq + chunk.num_seqs; ++b) {
      const std::int32_t last = std::min(chunk.first_token + chunk.num_tokens, new_tokens(b)) - 1;
      const std::int64_t position = std::int64_t{kv_len(b)} - new_tokens(b) + last;
      seen = std::max(
          seen, visible_keys(shape_.causal, -1, shape_.window_right, position, kv_len(b)).end);
    }
    return std::min(rounded_keys(seen), chunk.num_keys);
  }

  const UnfusedShape& shape_;
  const StepLengths& lengths_;
  std::size_t budget_;
  const std::function<void(const UnfusedChunk&)>& use_;
};

}  // namespace

UnfusedLayout::UnfusedLayout(const UnfusedShape& shape, const UnfusedChunk& chunk) {
  const std::int64_t products = std::int64_t{chunk.num_seqs} * chunk.num_heads;
  const std::int64_t rows = products * chunk.num_tokens * shape.group;
  const auto take = [&](std::int64_t bytes) {
    const std::size_t at = end;
    end += (static_cast<std::size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  k = take(products * chunk.num_keys * shape.padded_dim * shape.element_bytes);
  v = take(products * chunk.num_keys * shape.padded_dim_v * shape.element_bytes);
  q = take(rows * shape.padded_dim * shape.element_bytes);
  out = take(rows * shape.padded_dim_v * 4);
  factors = take(rows * 4);
  // For num_keys, so that K and V stay in place while chunks of tokens see more and more.
  scores = take(rows * chunk.num_keys * 4);
}

std::size_t least_chunk_bytes(const UnfusedShape& shape, std::int64_t kv_len) {
  const UnfusedChunk chunk{
      .num_seqs = 1, .num_heads = 1, .num_tokens = 1, .num_keys = rounded_keys(kv_len)};
  return UnfusedLayout(shape, chunk).end;
}

void for_each_chunk(const UnfusedShape& shape, const StepLengths& lengths, std::size_t budget,
                    const std::function<void(const UnfusedChunk&)>& use) {
  Cut(shape, lengths, budget, use).run();
}

std::size_t whole_chunk_bytes(const UnfusedShape& shape, const StepLengths& lengths) {
  std::size_t largest = 0;
  for_each_chunk(shape, lengths, std::numeric_limits<std::size_t>::max(),
                 [&](const UnfusedChunk& chunk) {
                   largest = std::max(largest, UnfusedLayout(shape, chunk).end);
                 });
  return largest;
}

}  // namespace octavo::kernels::cuda
