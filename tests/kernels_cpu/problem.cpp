// SPDX-License-Identifier: Apache-2.0
#include "kernels_cpu/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/cpu/elements.h"
#include "kernels/cpu/kernels.h"
#include "kernels_cpu/buffer.h"
#include "testing/oracle.h"
#include "testing/random.h"

namespace octavo::test {
namespace {

using kernels::TokenLayout;
using kernels::cpu::load_element;
using kernels::cpu::store_element;
constexpr float kCanary = 12345.0F;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

float rounded(DType dtype, double value) {
  float cell = 0.0F;
  store_element(&cell, dtype, 0, static_cast<float>(value));
  return load_element(&cell, dtype, 0);
}

// Logical values, rounded to their dtypes.
struct Values {
  std::vector<float> q;               // [tokens, q heads, dim]
  std::vector<std::vector<float>> k;  // for each sequence [keys, kv heads, dim]
  std::vector<std::vector<float>> v;
  std::vector<float> sinks, slopes;
};

std::vector<float> random_values(testkit::Random& random, std::int64_t count, DType dtype,
                                 double magnitude) {
  std::vector<float> result(at(count));
  for (float& value : result) value = rounded(dtype, magnitude * random.normal());
  return result;
}

std::int32_t num_tokens(const Problem& problem) {
  std::int32_t result = 0;
  for (const Lengths& lengths : problem.sequences) result += lengths.new_tokens;
  return result;
}

Values make_values(const Problem& p) {
  testkit::Random random(p.seed);
  Values values;
  const std::int64_t q_row = std::int64_t{p.num_q_heads} * p.head_dim;
  const std::int64_t skipped = p.skip_query_tokens * q_row;
  values.q = random_values(random, skipped + num_tokens(p) * q_row, p.q_dtype, p.magnitude);
  values.q.erase(values.q.begin(), values.q.begin() + skipped);
  for (const Lengths& lengths : p.sequences) {
    const std::int64_t heads = std::int64_t{lengths.keys} * p.num_kv_heads;
    values.k.push_back(random_values(random, heads * p.head_dim, p.kv_dtype, p.magnitude));
    values.v.push_back(random_values(random, heads * p.head_dim_v, p.kv_dtype, 1.0));
  }
  if (p.nan_value_key >= 0) {
    const std::int64_t row = std::int64_t{p.num_kv_heads} * p.head_dim_v;
    std::fill_n(values.v[0].begin() + p.nan_value_key * row, row,
                std::numeric_limits<float>::quiet_NaN());
  }
  for (std::int32_t h = 0; h < p.num_q_heads; ++h) {
    values.sinks.push_back(static_cast<float>(random.normal()));
    values.slopes.push_back(static_cast<float>(std::exp2(-8.0 * (h + 1) / p.num_q_heads)));
  }
  return values;
}

float scale_of(const Problem& p) {
  return p.scale != 0.0F ? p.scale : 1.0F / std::sqrt(static_cast<float>(p.head_dim));
}

// Where the pages of each sequence are: scattered, so that none follows its neighbour.
struct Placement {
  std::int32_t page_size = 0;
  std::int32_t max_pages = 0;
  std::int64_t num_pages = 0;
  std::vector<std::int32_t> table;
};

Placement place(const Problem& p) {
  Placement placement;
  std::int32_t longest = 1;
  for (const Lengths& lengths : p.sequences) longest = std::max(longest, lengths.keys);
  placement.page_size = p.page_size == 0 ? longest + 5 : p.page_size;
  placement.max_pages = (longest + placement.page_size - 1) / placement.page_size + 2;
  placement.num_pages = 3;
  for (const Lengths& lengths : p.sequences) {
    placement.num_pages += (lengths.keys + placement.page_size - 1) / placement.page_size;
  }
  if (p.page_size == 0) {
    placement.num_pages = static_cast<std::int64_t>(p.sequences.size());
    return placement;
  }
  std::vector<std::int32_t> pages(at(placement.num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  testkit::Random random(p.seed + 99);
  for (std::size_t i = pages.size() - 1; i > 0; --i) {
    std::swap(pages[i], pages[at(random.integer(0, static_cast<std::int64_t>(i)))]);
  }
  // Entries past the last page are poisoned: reading one would fault.
  placement.table.assign(p.sequences.size() * at(placement.max_pages),
                         std::numeric_limits<std::int32_t>::max() / 2);
  std::size_t next = 0;
  for (std::size_t b = 0; b < p.sequences.size(); ++b) {
    const std::int32_t count =
        (p.sequences[b].keys + placement.page_size - 1) / placement.page_size;
    for (std::int32_t i = 0; i < count; ++i) {
      placement.table[b * at(placement.max_pages) + at(i)] = pages[next++];
    }
  }
  return placement;
}

// A dense layout of the format; extents with padding.
TokenLayout layout_of(const Problem& p, std::int32_t heads, std::int32_t dim) {
  std::int32_t longest = 0;
  for (const Lengths& lengths : p.sequences) longest = std::max(longest, lengths.new_tokens);
  TokenLayout layout;
  layout.head_stride = dim;
  const std::int64_t row = std::int64_t{heads} * dim;
  layout.ragged = p.format == TensorFormat::Thd;
  layout.num_batch_rows = static_cast<std::int32_t>(p.sequences.size()) + p.padding_rows;
  if (layout.ragged) {
    layout.num_token_rows = num_tokens(p) + p.padding_rows;
    layout.token_stride = row;
  } else {
    layout.num_token_rows = longest + p.padding_rows;
    const bool batch_first = p.format == TensorFormat::Bshd;
    layout.token_stride = batch_first ? row : row * layout.num_batch_rows;
    layout.batch_stride = batch_first ? row * layout.num_token_rows : row;
  }
  return layout;
}

std::int64_t rows_of(const TokenLayout& layout) {
  return layout.ragged ? layout.num_token_rows : layout.num_token_rows * layout.num_batch_rows;
}

// Everything of a step that params only point to.
struct Step {
  explicit Step(const Problem& p) : problem(p), values(make_values(p)), placement(place(p)) {
    token_offsets.push_back(0);
    for (const Lengths& lengths : p.sequences) {
      token_offsets.push_back(token_offsets.back() + lengths.new_tokens);
      kv_lens.push_back(lengths.keys);
    }
    params.batch.num_seqs = static_cast<std::int32_t>(p.sequences.size());
    params.batch.num_tokens = token_offsets.back();
    params.batch.token_offsets = token_offsets.data();
    params.batch.kv_lens = kv_lens.data();
    if (!placement.table.empty()) {
      params.batch.page_table = placement.table.data();
      params.batch.page_table_stride = placement.max_pages;
    }
    params.num_q_heads = p.num_q_heads;
    params.num_kv_heads = p.num_kv_heads;
    params.head_dim = p.head_dim;
    params.head_dim_v = p.head_dim_v;
    params.scale = scale_of(p);
    params.softcap = p.softcap;
    params.causal = p.causal;
    params.window_left = p.window.left;
    params.window_right = p.window.right;
    if (p.sinks) params.sinks = values.sinks.data();
    if (p.alibi) params.alibi_slopes = values.slopes.data();
    if (p.rope) {
      params.rope = {p.rope->style,
                     p.rope->rotary_dim == 0 ? p.head_dim : p.rope->rotary_dim,
                     p.rope->base,
                     p.rope->cos,
                     p.rope->sin,
                     p.rope->num_table_positions,
                     p.rope_positions.empty() ? nullptr : p.rope_positions.data()};
    }
    params.num_threads = p.num_threads;
  }

  kernels::PagedTensor paged(Buffer& buffer, std::int32_t dim) const {
    kernels::PagedTensor tensor;
    tensor.data = buffer.data();
    tensor.head_stride = dim;
    tensor.slot_stride = std::int64_t{problem.num_kv_heads} * dim;
    tensor.page_stride = tensor.slot_stride * placement.page_size;
    return tensor;
  }

  void fill_pages(Buffer& buffer, const kernels::PagedTensor& tensor,
                  const std::vector<std::vector<float>>& from) const {
    for (std::int32_t b = 0; b < params.batch.num_seqs; ++b) {
      const std::vector<float>& values_of = from[at(b)];
      for (std::int32_t key = 0; key < kv_lens[at(b)]; ++key) {
        const std::int64_t to =
            page_of(params.batch, b, key / placement.page_size) * tensor.page_stride +
            key % placement.page_size * tensor.slot_stride;
        for (std::int64_t e = 0; e < tensor.slot_stride; ++e) {
          buffer.set(to + e, values_of[at(key * tensor.slot_stride + e)]);
        }
      }
    }
  }

  const Problem& problem;
  Values values;
  Placement placement;
  std::vector<std::int32_t> token_offsets, kv_lens;
  kernels::AttendParams params;
};

// The schedule that the problem asks for.
struct Splits {
  Splits(const Problem& p, const kernels::StepBatch& batch) {
    schedule.key_tile = kernels::cpu::kKeyTile;
    schedule.q_tile = kernels::cpu::q_tile_tokens(p.num_q_heads / p.num_kv_heads);
    items.push_back(0);
    partials.push_back(0);
    for (std::int32_t b = 0; b < batch.num_seqs; ++b) {
      const std::int32_t tokens = kernels::cpu::new_tokens(batch, b);
      const std::int32_t all =
          std::max(1, (batch.kv_lens[b] + schedule.key_tile - 1) / schedule.key_tile);
      const std::int32_t run = p.split_tiles == 0 ? all : p.split_tiles;
      const std::int32_t count = tokens == 0 ? 0 : (all + run - 1) / run;
      tiles.push_back(run);
      splits.push_back(count);
      items.push_back(items.back() +
                      std::int64_t{(tokens + schedule.q_tile - 1) / schedule.q_tile} * count);
      partials.push_back(partials.back() + (count > 1 ? std::int64_t{tokens} * count : 0));
    }
    schedule.num_items = items.back();
    schedule.num_partial_rows = partials.back();
    schedule.item_offsets = items.data();
    schedule.partial_offsets = partials.data();
    schedule.split_tiles = tiles.data();
    schedule.num_splits = splits.data();
  }

  kernels::SplitSchedule schedule;
  std::vector<std::int64_t> items, partials;
  std::vector<std::int32_t> tiles, splits;
};

}  // namespace

Answer run(const Problem& p, Kernel kernel) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Step step(p);
  kernels::AttendParams& params = step.params;
  const std::int64_t slots = step.placement.num_pages * step.placement.page_size;

  Buffer k(p.kv_dtype, slots * p.num_kv_heads * p.head_dim, kNan);
  Buffer v(p.kv_dtype, slots * p.num_kv_heads * p.head_dim_v, kNan);
  params.kv.k = step.paged(k, p.head_dim);
  params.kv.v = step.paged(v, p.head_dim_v);
  params.kv.dtype = p.kv_dtype;
  params.kv.num_pages = step.placement.num_pages;
  params.kv.page_size = step.placement.page_size;
  step.fill_pages(k, params.kv.k, step.values.k);
  step.fill_pages(v, params.kv.v, step.values.v);

  params.q_layout = layout_of(p, p.num_q_heads, p.head_dim);
  params.out_layout = layout_of(p, p.num_q_heads, p.head_dim_v);
  params.q_dtype = p.q_dtype;
  params.out_dtype = p.out_dtype;
  const std::int64_t q_row = std::int64_t{p.num_q_heads} * p.head_dim;
  const std::int64_t out_row = std::int64_t{p.num_q_heads} * p.head_dim_v;
  Buffer q(p.q_dtype, rows_of(params.q_layout) * q_row, kNan);
  Buffer out(p.out_dtype, rows_of(params.out_layout) * out_row, kCanary);
  const float canary = rounded(p.out_dtype, kCanary);
  for (std::int32_t b = 0; b < params.batch.num_seqs; ++b) {
    for (std::int32_t i = 0; i < kernels::cpu::new_tokens(params.batch, b); ++i) {
      const std::int64_t to = kernels::cpu::token_offset(params.q_layout, params.batch, b, i);
      const std::int64_t from = (step.token_offsets[at(b)] + i) * q_row;
      for (std::int64_t e = 0; e < q_row; ++e) q.set(to + e, step.values.q[at(from + e)]);
    }
  }
  Buffer lse(DType::F32, std::int64_t{params.batch.num_tokens + p.padding_rows} * p.num_q_heads,
             kCanary);
  params.q = q.data();
  params.out = out.data();
  params.lse = static_cast<float*>(lse.data());
  params.lse_token_stride = p.num_q_heads;
  params.num_lse_rows = params.batch.num_tokens + p.padding_rows;

  const int threads = kernels::cpu::resolve_threads(p.num_threads);
  const Splits splits(p, params.batch);
  const std::size_t bytes =
      kernel == Kernel::Unfused
          ? kernels::cpu::unfused_workspace_bytes(params, threads)
          : kernels::cpu::attend_workspace_bytes(params, splits.schedule, threads);
  std::vector<unsigned char> workspace(bytes + 1, 0xFF);
  if (kernel == Kernel::Unfused) {
    kernels::cpu::unfused_attend(params, workspace.data());
  } else {
    kernels::cpu::attend(params, splits.schedule, workspace.data());
  }

  Answer answer;
  answer.padding_ok =
      workspace.back() == 0xFF && out.guards_hold(canary) && lse.guards_hold(kCanary);
  for (std::int32_t b = 0; b < params.batch.num_seqs; ++b) {
    for (std::int32_t i = 0; i < kernels::cpu::new_tokens(params.batch, b); ++i) {
      const std::int64_t from = kernels::cpu::token_offset(params.out_layout, params.batch, b, i);
      for (std::int64_t e = 0; e < out_row; ++e) {
        answer.out.push_back(out.get(from + e));
        out.set(from + e, 0.0F);
      }
    }
  }
  for (std::int64_t i = 0; i < out.count; ++i) answer.padding_ok &= out.get(i) == 0.0F;
  const std::int64_t used = std::int64_t{params.batch.num_tokens} * p.num_q_heads;
  for (std::int64_t i = 0; i < lse.count; ++i) {
    if (i < used) {
      answer.lse.push_back(lse.get(i));
    } else {
      answer.padding_ok &= lse.get(i) == -kInfinity;
    }
  }
  return answer;
}

Answer expected(const Problem& p) {
  const Step step(p);
  AttentionConfig config;
  config.num_q_heads = p.num_q_heads;
  config.num_kv_heads = p.num_kv_heads;
  config.head_dim = p.head_dim;
  config.head_dim_v = p.head_dim_v;
  config.softmax_scale = scale_of(p);
  config.mask = p.causal ? Mask::Causal : Mask::Full;
  config.window = p.window;
  config.softcap = p.softcap;

  Answer answer;
  const std::vector<std::int32_t> one_page = {0};
  for (std::size_t b = 0; b < p.sequences.size(); ++b) {
    const Lengths lengths = p.sequences[b];
    const std::int64_t q_row = std::int64_t{p.num_q_heads} * p.head_dim;
    const auto q_begin = step.values.q.begin() + step.token_offsets[b] * q_row;
    std::vector<double> q(q_begin, q_begin + lengths.new_tokens * q_row);
    std::vector<double> k(step.values.k[b].begin(), step.values.k[b].end());
    std::vector<double> v(step.values.v[b].begin(), step.values.v[b].end());
    if (p.rope) {
      Rope rope = *p.rope;
      if (rope.rotary_dim == 0) rope.rotary_dim = p.head_dim;
      for (std::int64_t r = 0; r < std::int64_t{lengths.new_tokens} * p.num_q_heads; ++r) {
        const std::int64_t i = r / p.num_q_heads;
        const std::int64_t position = p.rope_positions.empty()
                                          ? lengths.keys - lengths.new_tokens + i
                                          : p.rope_positions[at(step.token_offsets[b] + i)];
        testkit::rotate_by_definition(rope, position,
                                      std::span(q).subspan(at(r * p.head_dim), at(p.head_dim)));
      }
    }
    testkit::OracleSequence sequence;
    sequence.q = q;
    sequence.num_queries = lengths.new_tokens;
    sequence.kv_len = lengths.keys;
    sequence.keys = {k, one_page, std::max(1, lengths.keys), p.num_kv_heads, p.head_dim};
    sequence.values = {v, one_page, std::max(1, lengths.keys), p.num_kv_heads, p.head_dim_v};
    if (p.sinks) sequence.sinks = step.values.sinks.data();
    if (p.alibi) sequence.alibi_slopes = step.values.slopes.data();
    const testkit::OracleResult result = testkit::attend_by_definition(config, sequence);
    for (const double value : result.out) answer.out.push_back(static_cast<float>(value));
    for (const double value : result.lse) answer.lse.push_back(static_cast<float>(value));
  }
  return answer;
}

}  // namespace octavo::test
