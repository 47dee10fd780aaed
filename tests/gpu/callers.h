// SPDX-License-Identifier: Apache-2.0
// A cache that its caller manages in a GPU's memory: a pool of pages (all NaN), a page table that
// hands pages out from both ends, lengths, rows and offsets, all at addresses that never change.
#pragma once

#include "testing/case.h"
#include "testing/compare.h"
#include "testing/device_memory.h"
#include "testing/host_tensor.h"
#include "tests/gpu/gpu_test.h"

#include <octavo/attention.h>
#include <octavo/workspace.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <vector>

namespace octavo::gpu_tests {

/// InOrder: contiguous, row b for batch row b.
enum class PoolLayout { Nhd, Hnd, Interleaved, Contiguous, InOrder };

/// Integers of the host's and their double on the GPU.
class DeviceInts {
 public:
  DeviceInts(std::size_t size, std::int32_t value)
      : values(size, value), memory_(kGpu, size * sizeof(std::int32_t)) {}

  void upload() { memory_.upload(values.data(), values.size() * sizeof(std::int32_t)); }
  [[nodiscard]] const std::int32_t* get() const {
    return reinterpret_cast<const std::int32_t*>(memory_.data());
  }

  std::vector<std::int32_t> values;

 private:
  testkit::DeviceMemory memory_;
};

/// Runs a case without forks and cuts. Page-table rows are handed out from the last on.
class GpuCallersCache {
 public:
  static constexpr std::int32_t kNoPage = 2'147'480'000;

  GpuCallersCache(const testkit::Case& value, PoolLayout layout, std::int64_t page_size)
      : case_(value),
        page_size_(is_contiguous(layout) ? value.cache.max_seq_len : page_size),
        max_pages_((value.cache.max_seq_len + page_size_ - 1) / page_size_),
        num_rows_(value.cache.max_num_seqs + 3),
        num_pages_(max_pages_ * num_rows_),
        table_(static_cast<std::size_t>(num_rows_ * max_pages_), kNoPage),
        rows_(static_cast<std::size_t>(value.cache.max_num_seqs), 0),
        kv_lens_(static_cast<std::size_t>(value.cache.max_num_seqs), 0),
        offsets_(static_cast<std::size_t>(value.cache.max_num_seqs) + 1, 0),
        workspace_(kGpu) {
    make_pool(layout);
    in_order_ = layout == PoolLayout::InOrder;
    if (!is_contiguous(layout)) {
      view_.page_table = table_.get();
      view_.page_table_stride = max_pages_;
      view_.num_rows = static_cast<std::int32_t>(num_rows_);
      view_.max_pages_per_seq = static_cast<std::int32_t>(max_pages_);
    }
    if (!in_order_) view_.row_indices = rows_.get();
    arrays_.num_seqs = value.cache.max_num_seqs;
    arrays_.token_offsets = offsets_.get();
    arrays_.kv_lens = kv_lens_.get();
    arrays_.workspace = &workspace_;
    arrays_.max_kv_len = static_cast<std::int32_t>(value.cache.max_seq_len);
    for (const testkit::CaseStep& step : value.steps) {
      const auto tokens = static_cast<std::int32_t>(total_new_tokens(step));
      arrays_.num_tokens = std::max(arrays_.num_tokens, tokens);
    }
  }

  /// The step's arrays as they are to be, on the GPU. Maxima of tokens are the step's own.
  void prepare(const testkit::CaseStep& step) {
    std::fill(kv_lens_.values.begin(), kv_lens_.values.end(), 0);
    arrays_.max_new_tokens = std::max(1, static_cast<std::int32_t>(longest_new_tokens(step)));
    std::size_t b = 0;
    for (const SequenceStep& sequence : step.sequences) {
      const std::int64_t row = row_of_id(sequence.id);
      std::int64_t& length = lengths_[row];
      length += sequence.new_tokens;
      for (std::int64_t page = 0; page * page_size_ < length; ++page) {
        std::int32_t& entry = table_.values[static_cast<std::size_t>(row * max_pages_ + page)];
        if (entry == kNoPage) entry = next_page();
      }
      rows_.values[b] = static_cast<std::int32_t>(row);
      kv_lens_.values[b] = static_cast<std::int32_t>(length);
      offsets_.values[b + 1] = offsets_.values[b] + static_cast<std::int32_t>(sequence.new_tokens);
      ++b;
    }
    std::fill(offsets_.values.begin() + static_cast<std::ptrdiff_t>(b) + 1, offsets_.values.end(),
              offsets_.values[b]);
    upload();
  }

  void upload() {
    for (DeviceInts* ints : {&table_, &rows_, &kv_lens_, &offsets_}) ints->upload();
  }

  /// Room for such a call, as much as `sizes` says.
  void take_workspace(const AttentionConfig& config, const LayerInputs& inputs,
                      const TensorView& out, const TensorView* lse) {
    const WorkspaceSizes sizes = workspace_.sizes(config, view_, arrays_, inputs, out, lse);
    EXPECT_LE(sizes.least, sizes.good);
    if (memory_.size() >= static_cast<std::size_t>(sizes.good)) return;
    testkit::synchronize(kGpu);
    memory_ = testkit::DeviceMemory(kGpu, static_cast<std::size_t>(sizes.good));
    testkit::fill_device(kGpu, memory_.data(), std::byte{0xFF}, memory_.size());
    workspace_.use(memory_.data(), sizes.good);
  }

  /// Runs all steps; the results are held to the case's.
  testkit::Comparison run(Backend backend) {
    testkit::Comparison total;
    for (std::size_t i = 0; i < case_.steps.size(); ++i) run_step(backend, i, total);
    return total;
  }

  void run_step(Backend backend, std::size_t step_idx, testkit::Comparison& total) {
    const testkit::CaseStep& step = case_.steps[step_idx];
    prepare(step);
    AttentionConfig config = case_.attention;
    config.backend = backend;
    const testkit::DeviceTensor q(kGpu, step.q);
    const testkit::DeviceTensor k(kGpu, step.k);
    const testkit::DeviceTensor v(kGpu, step.v);
    testkit::HostTensor out(case_.dtype, step.out.shape());
    testkit::HostTensor lse(DType::F32,
                            {step.lse->shape()[0] + spare_tokens_, case_.attention.num_q_heads});
    const testkit::DeviceTensor gpu_out(kGpu, out);
    const testkit::DeviceTensor gpu_lse(kGpu, lse);
    const TensorView lse_view = gpu_lse.view();
    // Thd tensors are as long as the step.
    StepArrays& arrays = arrays_;
    const StepArrays all = arrays;
    if (case_.format == TensorFormat::Thd) {
      arrays.num_tokens = static_cast<std::int32_t>(step.q.shape()[0]);
    } else {
      arrays.num_tokens = static_cast<std::int32_t>(total_new_tokens(step)) + spare_tokens_;
    }
    arrays.num_seqs = static_cast<std::int32_t>(step.sequences.size());
    LayerInputs inputs = inputs_of(q.view(), k.view(), v.view());
    std::vector<testkit::DeviceTensor> kept;
    if (case_.sinks) inputs.sinks = kept.emplace_back(kGpu, *case_.sinks).floats();
    if (case_.alibi_slopes)
      inputs.alibi_slopes = kept.emplace_back(kGpu, *case_.alibi_slopes).floats();
    take_workspace(config, inputs, gpu_out.view(), &lse_view);
    if (poison_) testkit::fill_device(kGpu, memory_.data(), *poison_, memory_.size());
    workspace_.plan(view_, arrays);
    append_tokens(config, view_, arrays, inputs);
    attend(config, view_, arrays, inputs, gpu_out.view(), &lse_view);
    workspace_.check();
    gpu_out.download(out);
    gpu_lse.download(lse);
    arrays_ = all;
    EXPECT_TRUE(out.guards_intact());
    EXPECT_TRUE(lse.guards_intact());
    testkit::HostTensor step_lse(DType::F32, step.lse->shape());
    for (std::int64_t i = 0; i < lse.size(); ++i) {
      if (i < step_lse.size()) {
        step_lse.set(i, lse.get(i));
      } else {
        ASSERT_EQ(lse.get(i), -INFINITY) << i;
      }
    }
    compare_step(case_, static_cast<std::int64_t>(step_idx), out, step_lse, total);
  }

  /// From now on the workspace holds nothing but such bytes when a step is planned, and steps of
  /// padded formats say that they have `spare_tokens` more than they do.
  void poison_workspace(std::byte with, std::int32_t spare_tokens) {
    poison_ = with;
    if (case_.format != TensorFormat::Thd) spare_tokens_ = spare_tokens;
  }

  [[nodiscard]] LayerInputs inputs_of(const ConstTensorView& q, const ConstTensorView& k,
                                      const ConstTensorView& v) const {
    LayerInputs inputs;
    inputs.q = q;
    inputs.k = k;
    inputs.v = v;
    inputs.format = case_.format;
    return inputs;
  }

  KvView& view() { return view_; }
  StepArrays& arrays() { return arrays_; }
  Workspace& workspace() { return workspace_; }
  DeviceInts& table() { return table_; }
  DeviceInts& rows() { return rows_; }
  DeviceInts& kv_lens() { return kv_lens_; }
  DeviceInts& offsets() { return offsets_; }
  [[nodiscard]] const testkit::DeviceMemory& pool() const { return pool_; }

 private:
  static bool is_contiguous(PoolLayout layout) {
    return layout == PoolLayout::Contiguous || layout == PoolLayout::InOrder;
  }

  void make_pool(PoolLayout layout) {
    const AttentionConfig& a = case_.attention;
    const std::int64_t heads = a.num_kv_heads;
    const std::int64_t widest = std::max(a.head_dim, a.head_dim_v);
    // One pool for K and V: page, then K or V, then the rest.
    const std::int64_t half = page_size_ * heads * widest;
    const std::int64_t size = dtype_bytes(case_.dtype);
    pool_ = testkit::DeviceMemory(kGpu, static_cast<std::size_t>(num_pages_ * 2 * half * size));
    testkit::fill_device(kGpu, pool_.data(), std::byte{0xFF}, pool_.size());
    view_.k =
        TensorView(pool_.data(), case_.dtype, {num_pages_, page_size_, heads, a.head_dim}, kGpu);
    view_.v = TensorView(pool_.data() + half * size, case_.dtype,
                         {num_pages_, page_size_, heads, a.head_dim_v}, kGpu);
    for (TensorView* view : {&view_.k, &view_.v}) {
      view->strides = {2 * half, heads * widest, widest, 1};
      if (layout == PoolLayout::Hnd) view->strides = {2 * half, widest, page_size_ * widest, 1};
      if (layout == PoolLayout::Interleaved) view->strides = {2 * half, heads * widest, 1, heads};
    }
  }

  std::int64_t row_of_id(SequenceId id) {
    const auto next = static_cast<std::int64_t>(row_of_.size());
    const auto [at, is_new] = row_of_.try_emplace(id, in_order_ ? next : num_rows_ - 1 - next);
    static_cast<void>(is_new);
    return at->second;
  }

  std::int32_t next_page() {
    const auto pages = static_cast<std::int32_t>(num_pages_);
    const std::int32_t page = taken_ % 2 == 0 ? taken_ / 2 : pages - 1 - taken_ / 2;
    ++taken_;
    return page;
  }

  const testkit::Case& case_;
  std::int64_t page_size_, max_pages_, num_rows_, num_pages_;
  testkit::DeviceMemory pool_, memory_;
  DeviceInts table_, rows_, kv_lens_, offsets_;
  KvView view_;
  StepArrays arrays_;
  Workspace workspace_;
  std::map<SequenceId, std::int64_t> row_of_;
  std::map<std::int64_t, std::int64_t> lengths_;
  bool in_order_ = false;
  std::int32_t taken_ = 0;
  std::optional<std::byte> poison_;
  std::int32_t spare_tokens_ = 0;
};

}  // namespace octavo::gpu_tests
