// SPDX-License-Identifier: Apache-2.0
// Tensors at fixed addresses, as large as a step's maxima: what captured graphs run on.
#pragma once

#include "testing/case.h"
#include "testing/compare.h"
#include "testing/device_memory.h"
#include "testing/host_tensor.h"
#include "tests/gpu/gpu_test.h"

#include <octavo/graphed_step.h>

#include <gtest/gtest.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace octavo::gpu_tests {

/// The most that any step of a case asks for, and `spare` tokens.
inline StepMaxima maxima_of(const testkit::Case& value, std::int32_t spare) {
  StepMaxima maxima{.num_seqs = value.cache.max_num_seqs,
                    .max_kv_len = static_cast<std::int32_t>(value.cache.max_seq_len)};
  for (const testkit::CaseStep& step : value.steps) {
    maxima.num_tokens =
        std::max(maxima.num_tokens, static_cast<std::int32_t>(total_new_tokens(step)));
    maxima.max_new_tokens =
        std::max(maxima.max_new_tokens, static_cast<std::int32_t>(longest_new_tokens(step)));
  }
  maxima.num_tokens += spare;
  return maxima;
}

/// Tensors at fixed addresses, as large as the maxima, through which a case's steps go.
class FixedTensors {
 public:
  FixedTensors(const testkit::Case& value, const StepMaxima& maxima)
      : case_(value), maxima_(maxima) {
    const AttentionConfig& a = value.attention;
    q_ = tensor(value.dtype, a.num_q_heads, a.head_dim);
    k_ = tensor(value.dtype, a.num_kv_heads, a.head_dim);
    v_ = tensor(value.dtype, a.num_kv_heads, a.head_dim_v);
    out_ = tensor(value.dtype, a.num_q_heads, a.head_dim_v);
    lse_ = testkit::HostTensor(DType::F32, {maxima.num_tokens, a.num_q_heads});
    gpu_.reserve(5);
    for (const testkit::HostTensor* host : {&q_, &k_, &v_, &out_, &lse_})
      gpu_.emplace_back(kGpu, *host);
    if (value.sinks) sinks_.emplace(kGpu, *value.sinks);
  }

  [[nodiscard]] LayerTensors layer() const {
    LayerTensors layer;
    layer.inputs.q = gpu_[0].view();
    layer.inputs.k = gpu_[1].view();
    layer.inputs.v = gpu_[2].view();
    layer.inputs.format = case_.format;
    if (sinks_) layer.inputs.sinks = sinks_->floats();
    layer.out = gpu_[3].view();
    layer.lse = gpu_[4].view();
    return layer;
  }

  /// The step's tokens to the GPU, padding NaN; outputs are poisoned.
  void upload(const testkit::CaseStep& step) {
    copy(step, step.q, q_);
    copy(step, step.k, k_);
    copy(step, step.v, v_);
    out_ = tensor(case_.dtype, case_.attention.num_q_heads, case_.attention.head_dim_v);
    const testkit::HostTensor* hosts[] = {&q_, &k_, &v_, &out_, &lse_};
    for (std::size_t i = 0; i < 5; ++i) {
      testkit::synchronize(kGpu);
      gpu_memory_write(gpu_[i], *hosts[i]);
    }
  }

  /// Output and LSE as they are now.
  [[nodiscard]] std::pair<testkit::HostTensor, testkit::HostTensor> results() const {
    testkit::synchronize(kGpu);
    std::pair<testkit::HostTensor, testkit::HostTensor> now(out_, lse_);
    gpu_[3].download(now.first);
    gpu_[4].download(now.second);
    return now;
  }

  /// Holds the results to the case's; rows beyond the step must be 0 and -inf.
  void compare(std::size_t step_idx, testkit::Comparison& total) {
    const testkit::CaseStep& step = case_.steps[step_idx];
    testkit::synchronize(kGpu);
    gpu_[3].download(out_);
    testkit::HostTensor lse(DType::F32, lse_.shape());
    gpu_[4].download(lse);
    EXPECT_TRUE(out_.guards_intact());
    EXPECT_TRUE(lse.guards_intact());
    testkit::HostTensor out(case_.dtype, step.out.shape());
    for (std::int64_t i = 0; i < out.size(); ++i) out.set(i, 0.0);  // padding of the step's shape
    testkit::HostTensor step_lse(DType::F32, step.lse->shape());
    std::vector<bool> seen(static_cast<std::size_t>(out_.size()), false);
    for_each_row(step, step.out.shape(), out_.shape(),
                 [&](std::int64_t in_step, std::int64_t fixed) {
                   const std::int64_t width = row_width(out_);
                   for (std::int64_t i = 0; i < width; ++i) {
                     out.set(in_step * width + i, out_.get(fixed * width + i));
                     seen[static_cast<std::size_t>(fixed * width + i)] = true;
                   }
                 });
    for (std::int64_t i = 0; i < out_.size(); ++i) {
      if (!seen[static_cast<std::size_t>(i)]) {
        ASSERT_EQ(out_.get(i), 0.0) << i;
      }
    }
    for (std::int64_t i = 0; i < lse.size(); ++i) {
      if (i < step_lse.size()) {
        step_lse.set(i, lse.get(i));
      } else {
        ASSERT_EQ(lse.get(i), -INFINITY) << i;
      }
    }
    compare_step(case_, static_cast<std::int64_t>(step_idx), out, step_lse, total);
  }

 private:
  [[nodiscard]] testkit::HostTensor tensor(DType dtype, std::int64_t heads,
                                           std::int64_t dim) const {
    switch (case_.format) {
      case TensorFormat::Thd:
        return {dtype, {maxima_.num_tokens, heads, dim}};
      case TensorFormat::Bshd:
        return {dtype, {maxima_.num_seqs, maxima_.max_new_tokens, heads, dim}};
      case TensorFormat::Sbhd:
        break;
    }
    return {dtype, {maxima_.max_new_tokens, maxima_.num_seqs, heads, dim}};
  }

  static std::int64_t row_width(const testkit::HostTensor& tensor) {
    const auto& shape = tensor.shape();
    return shape[shape.size() - 2] * shape.back();
  }

  void for_each_row(const testkit::CaseStep& step, const std::vector<std::int64_t>& from,
                    const std::vector<std::int64_t>& to,
                    const std::function<void(std::int64_t, std::int64_t)>& use) const {
    std::int64_t start = 0;
    for (std::size_t b = 0; b < step.sequences.size(); ++b) {
      const auto seq = static_cast<std::int64_t>(b);
      for (std::int64_t token = 0; token < step.sequences[b].new_tokens; ++token) {
        use(testkit::row_of(case_.format, from, seq, token, start),
            testkit::row_of(case_.format, to, seq, token, start));
      }
      start += step.sequences[b].new_tokens;
    }
  }

  void copy(const testkit::CaseStep& step, const testkit::HostTensor& from,
            testkit::HostTensor& to) const {
    to = testkit::HostTensor(to.dtype(), to.shape());  // NaN
    const std::int64_t bytes = row_width(to) * dtype_bytes(to.dtype());
    for_each_row(step, from.shape(), to.shape(), [&](std::int64_t in_step, std::int64_t fixed) {
      std::memcpy(to.data() + fixed * bytes, from.data() + in_step * bytes,
                  static_cast<std::size_t>(bytes));
    });
  }

  static void gpu_memory_write(const testkit::DeviceTensor& to, const testkit::HostTensor& from) {
    ASSERT_EQ(cudaMemcpy(to.view().data, from.data(), static_cast<std::size_t>(from.num_bytes()),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
  }

  const testkit::Case& case_;
  StepMaxima maxima_;
  testkit::HostTensor q_, k_, v_, out_, lse_;
  std::vector<testkit::DeviceTensor> gpu_;
  std::optional<testkit::DeviceTensor> sinks_;
};

}  // namespace octavo::gpu_tests
