// SPDX-License-Identifier: Apache-2.0
#include "tests/conformance/suite.h"

#include <octavo/backend.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstring>

namespace octavo::conformance {

using testkit::CaseStep;
using testkit::HostTensor;
using testkit::row_of;
using testkit::shape_of;

std::vector<Backend> usable_backends() {
  std::vector<Backend> usable;
  for (const BackendInfo& info : backends()) {
    if (info.usable) usable.push_back(info.backend);
  }
  return usable;
}

const std::vector<std::string>& suite() {
  static const std::vector<std::string> lines = {
      // Lengths about the borders of pages and tiles.
      "b1 q1 s0 steps4 hq1 hkv1 d8 p4 f32 seed1",
      "b3 q1 s15 steps3 hq3 hkv3 d16 p16 f32 bshd seed2",
      "b3 q1 s16 steps3 hq9 hkv9 d16 p16 f32 sbhd seed3",
      "b3 q1 s17 steps3 hq9 hkv3 d64 p16 bf16 seed4",
      "b2 q5 s63 steps3 hq4 hkv1 d64 p7 f16 bshd seed5",
      "b2 q64 s65 steps2 hq7 hkv1 d32 p3 bf16 sbhd seed6",
      "b4 q3 s129 steps3 hq8 hkv1 d24 p1 f32 seed7",
      "b2 q1 s257 steps2 hq12 hkv1 d40 p256 f16 seed8",
      "b1 q2 s700 steps2 hq6 hkv2 d32 p16 bf16 seed9",
      "b40 q1 s9 steps3 hq2 hkv1 d16 p2 f32 seed10",
      // Head dims that are no multiple of anything, V narrower and wider than K.
      "b2 q2 s20 hq3 hkv1 d1 p5 f32 seed11",
      "b2 q2 s20 hq3 hkv1 d7 dv13 p5 f16 sbhd seed12",
      "b2 q2 s20 hq2 hkv2 d33 dv1 p5 bf16 bshd seed13",
      "b2 q2 s40 hq4 hkv1 d192 dv128 p16 bf16 seed14",
      "b2 q1 s30 hq16 hkv1 d576 dv512 p16 bf16 seed15",
      "b1 q2 s20 hq2 hkv1 d80 dv256 p16 f32 seed16",
      // Masks and what is added to logits.
      "b3 q2 s50 hq4 hkv2 d32 f32 full seed17",
      "b3 q3 s90 hq4 hkv2 d32 p8 f32 w24,0 seed18",
      "b2 q3 s60 hq4 hkv2 d32 p8 bf16 full w8,5 bshd seed19",
      "b2 q3 s60 hq4 hkv2 d32 p8 f32 w0,0 seed20",
      "b2 q3 s60 hq4 hkv2 d32 f16 full w-1,2 seed21",
      "b1 q1 s1500 hq2 hkv1 d32 f32 w100,0 seed22",
      "b2 q200 s300 hq2 hkv2 d32 p8 f32 w2,0 seed33",
      "b2 q200 s300 hq2 hkv1 d32 p8 bf16 full w1,3 seed34",
      "b2 q3 s60 hq4 hkv2 d32 f32 cap5 mag3 seed23",
      "b2 q3 s60 hq4 hkv2 d32 bf16 sinks seed24",
      "b2 q3 s60 hq6 hkv2 d32 f16 alibi sbhd seed25",
      "b2 q3 s60 hq4 hkv2 d32 f32 scale0.7 seed26",
      "b2 q3 s70 hq6 hkv2 d48 dv24 p5 f32 full w20,4 cap10 sinks alibi scale0.2 seed27",
      "b2 q2 s40 hq4 hkv2 d64 f32 mag12 seed28",
      // Whole lives.
      "b4 q3 s30 steps24 hq4 hkv2 d16 p4 f32 life seed29",
      "b4 q3 s30 steps24 hq3 hkv1 d16 p1 bf16 life sbhd seed30",
      "b4 q9 s20 steps24 hq2 hkv2 d8 p7 f16 life bshd sinks w11,0 seed31",
  };
  return lines;
}

std::string test_name(std::string_view text) {
  std::string name;
  for (const char c : text) name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name;
}

std::string backend_name(const ::testing::TestParamInfo<Backend>& tested) {
  return to_string(tested.param);
}

std::string line_name(const ::testing::TestParamInfo<std::tuple<Backend, std::string>>& tested) {
  return test_name(std::string(to_string(std::get<0>(tested.param))) + "_" +
                   std::get<1>(tested.param));
}

void expect_pass(const Case& value, const ReplayOptions& options) {
  const ReplayResult result = replay(value, options);
  EXPECT_EQ(result.verdict, testkit::Verdict::Pass)
      << "octavo check \"" << value.name << "\" --backend " << to_string(options.backend) << "\n"
      << result.reason;
}

void expect_same_bits(const Case& value, const ReplayOptions& a, const ReplayOptions& b) {
  ReplayOptions keep_a = a;
  ReplayOptions keep_b = b;
  keep_a.keep_outputs = keep_b.keep_outputs = true;
  const ReplayResult result_a = replay(value, keep_a);
  const ReplayResult result_b = replay(value, keep_b);
  ASSERT_EQ(result_a.verdict, testkit::Verdict::Pass) << result_a.reason;
  ASSERT_EQ(result_b.verdict, testkit::Verdict::Pass) << result_b.reason;
  ASSERT_EQ(result_a.outs.size(), value.steps.size());
  EXPECT_TRUE(result_a.outs == result_b.outs) << value.name;
  EXPECT_TRUE(result_a.lses == result_b.lses) << value.name;
}

namespace {

// Where one sequence's tokens lie in a step.
struct Rows {
  std::size_t seq_idx;
  std::int64_t packed_start;
};

Rows rows_at(const CaseStep& step, std::size_t seq_idx) {
  std::int64_t start = 0;
  for (std::size_t b = 0; b < seq_idx; ++b) start += step.sequences[b].new_tokens;
  return {seq_idx, start};
}

void copy_row(const HostTensor& from, std::int64_t from_row, HostTensor& to, std::int64_t to_row,
              std::int64_t width) {
  const std::int64_t bytes = width * dtype_bytes(from.dtype());
  std::memcpy(to.data() + to_row * bytes, from.data() + from_row * bytes,
              static_cast<std::size_t>(bytes));
}

// Copies `count` tokens of a sequence, from token `first` on, between the tensors of two steps.
void copy_tokens(const Case& value, const CaseStep& from, Rows from_rows, std::int64_t first,
                 CaseStep& to, Rows to_rows, std::int64_t count) {
  const AttentionConfig& a = value.attention;
  const auto copy = [&](const HostTensor& source, HostTensor& target, std::int64_t width) {
    for (std::int64_t token = 0; token < count; ++token) {
      copy_row(source,
               row_of(value.format, source.shape(), static_cast<std::int64_t>(from_rows.seq_idx),
                      first + token, from_rows.packed_start),
               target,
               row_of(value.format, target.shape(), static_cast<std::int64_t>(to_rows.seq_idx),
                      token, to_rows.packed_start),
               width);
    }
  };
  copy(from.q, to.q, std::int64_t{a.num_q_heads} * a.head_dim);
  copy(from.k, to.k, std::int64_t{a.num_kv_heads} * a.head_dim);
  copy(from.v, to.v, std::int64_t{a.num_kv_heads} * a.head_dim_v);
  copy(from.out, to.out, std::int64_t{a.num_q_heads} * a.head_dim_v);
  for (std::int64_t token = 0; token < count; ++token) {
    copy_row(*from.lse, from_rows.packed_start + first + token, *to.lse,
             to_rows.packed_start + token, a.num_q_heads);
  }
}

// Tensors for the sequences that the step lists; outputs 0, the rest NaN.
void make_tensors(const Case& value, CaseStep& step) {
  const AttentionConfig& a = value.attention;
  const auto tensor = [&](DType dtype, std::int32_t heads, std::int32_t dim) {
    return HostTensor(dtype, shape_of(step, value.format, heads, dim));
  };
  step.q = tensor(value.dtype, a.num_q_heads, a.head_dim);
  step.k = tensor(value.dtype, a.num_kv_heads, a.head_dim);
  step.v = tensor(value.dtype, a.num_kv_heads, a.head_dim_v);
  step.out = tensor(DType::F32, a.num_q_heads, a.head_dim_v);
  for (std::int64_t i = 0; i < step.out.size(); ++i) step.out.set(i, 0.0);
  step.lse.emplace(DType::F32, std::vector<std::int64_t>{total_new_tokens(step), a.num_q_heads});
}

}  // namespace

Case select_rows(const Case& value, const std::vector<std::size_t>& order) {
  Case selected = value;
  for (std::size_t step_idx = 0; step_idx < value.steps.size(); ++step_idx) {
    const CaseStep& from = value.steps[step_idx];
    CaseStep& to = selected.steps[step_idx];
    to.sequences.clear();
    for (const std::size_t row : order) to.sequences.push_back(from.sequences[row]);
    make_tensors(value, to);
    for (std::size_t b = 0; b < order.size(); ++b) {
      copy_tokens(value, from, rows_at(from, order[b]), 0, to, rows_at(to, b),
                  to.sequences[b].new_tokens);
    }
  }
  return selected;
}

Case in_chunks(const Case& value, std::int64_t chunk) {
  Case chunked = value;
  chunked.steps.clear();
  const CaseStep& whole = value.steps.front();
  for (std::int64_t done = 0; done < longest_new_tokens(whole); done += chunk) {
    CaseStep step;
    for (const SequenceStep& sequence : whole.sequences) {
      const std::int64_t left = std::max<std::int64_t>(sequence.new_tokens - done, 0);
      step.sequences.push_back({sequence.id, std::min(chunk, left)});
    }
    make_tensors(value, step);
    for (std::size_t b = 0; b < step.sequences.size(); ++b) {
      copy_tokens(value, whole, rows_at(whole, b), done, step, rows_at(step, b),
                  step.sequences[b].new_tokens);
    }
    chunked.steps.push_back(std::move(step));
  }
  return chunked;
}

std::vector<double> rows_of(const Case& value, std::size_t step_idx, std::size_t seq_idx,
                            const HostTensor& out) {
  const CaseStep& step = value.steps[step_idx];
  const Rows rows = rows_at(step, seq_idx);
  const std::int64_t width = std::int64_t{value.attention.num_q_heads} * value.attention.head_dim_v;
  std::vector<double> numbers;
  for (std::int64_t token = 0; token < step.sequences[seq_idx].new_tokens; ++token) {
    const std::int64_t row = row_of(value.format, out.shape(), static_cast<std::int64_t>(seq_idx),
                                    token, rows.packed_start);
    for (std::int64_t i = 0; i < width; ++i) numbers.push_back(out.get(row * width + i));
  }
  return numbers;
}

}  // namespace octavo::conformance
