// SPDX-License-Identifier: Apache-2.0
// Attention over a contiguous cache of its caller's, on the host by the definition and on a GPU by
// any backend.
#pragma once

#include "testing/device_memory.h"
#include "testing/host_tensor.h"
#include "tests/gpu/callers.h"
#include "tests/gpu/twins.h"

#include <octavo/attention.h>
#include <octavo/backend.h>
#include <octavo/workspace.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace octavo::gpu_tests {

/// K and V are [sequences, slots, KV heads, dim], q and the results [tokens, heads, dim].
struct CallersTwins {
  CallersTwins(AttentionConfig attention, DType dtype, std::int32_t slots,
               std::vector<std::int32_t> new_tokens, std::vector<std::int32_t> kv_lens)
      : config(attention),
        offsets(offsets_of(new_tokens)),
        lengths(std::move(kv_lens)),
        positions(static_cast<std::size_t>(num_tokens()), 5),
        q(dtype, {num_tokens(), config.num_q_heads, config.head_dim}, 1),
        k(dtype, {num_seqs(), slots, config.num_kv_heads, config.head_dim}, 2),
        v(dtype, {num_seqs(), slots, config.num_kv_heads, config.head_dim}, 3),
        wanted(dtype, q.host.shape()),
        wanted_lse(DType::F32, {num_tokens(), config.num_q_heads}) {}

  /// Fills `wanted` and `wanted_lse`, from what q, k and v have on the host.
  void run_on_host() {
    config.backend = Backend::Unfused;
    const TensorView lse = wanted_lse.view();
    attend(config, view_of(k.host.view(), v.host.view()),
           {num_seqs(), num_tokens(), offsets.data(), lengths.data()},
           inputs_of(q.on_host(), positions.data()), wanted.view(), &lse);
  }

  /// Holds what a backend gives on the GPU to what the host gave; `times` calls, one after the
  /// other.
  void check_on_gpu(Backend backend, bool with_lse, double tolerance, int times = 1) {
    DeviceInts gpu_offsets(offsets.size(), 0);
    DeviceInts gpu_lens(lengths.size(), 0);
    gpu_offsets.values = offsets;
    gpu_lens.values = lengths;
    DeviceInts gpu_positions(positions.size(), 0);
    gpu_positions.values = positions;
    gpu_positions.upload();
    gpu_offsets.upload();
    gpu_lens.upload();
    config.backend = backend;
    const KvView view = view_of(k.gpu->view(), v.gpu->view());
    const LayerInputs inputs = inputs_of(q.on_gpu(), gpu_positions.get());
    Workspace workspace(kGpu);
    StepArrays step{num_seqs(), num_tokens(), gpu_offsets.get(), gpu_lens.get()};
    step.workspace = &workspace;
    testkit::HostTensor got(wanted.dtype(), wanted.shape());
    testkit::HostTensor got_lse(DType::F32, wanted_lse.shape());
    const testkit::DeviceTensor out(kGpu, got);
    const testkit::DeviceTensor lse(kGpu, got_lse);
    const TensorView lse_view = lse.view();
    const std::int64_t bytes = workspace.sizes(config, view, step, inputs, out.view()).good;
    const testkit::DeviceMemory memory(kGpu, static_cast<std::size_t>(bytes));
    workspace.use(memory.data(), bytes);
    workspace.plan(view, step);
    for (int i = 0; i < times; ++i) {
      attend(config, view, step, inputs, out.view(), with_lse ? &lse_view : nullptr);
      workspace.check();
      out.download(got);
      ASSERT_NO_FATAL_FAILURE(check_rows(got, wanted, tolerance)) << "output of call " << i;
      if (!with_lse) continue;
      lse.download(got_lse);
      ASSERT_NO_FATAL_FAILURE(check_rows(got_lse, wanted_lse, 1e-3)) << "LSE of call " << i;
    }
  }

  static std::vector<std::int32_t> offsets_of(const std::vector<std::int32_t>& counts) {
    std::vector<std::int32_t> sums = {0};
    for (const std::int32_t count : counts) sums.push_back(sums.back() + count);
    return sums;
  }
  static void check_rows(const testkit::HostTensor& got, const testkit::HostTensor& wanted,
                         double tolerance) {
    const std::int64_t of_token = wanted.size() / wanted.shape()[0];
    for (std::int64_t i = 0; i < wanted.size(); ++i) {
      if (std::isinf(wanted.get(i))) {
        ASSERT_EQ(got.get(i), wanted.get(i)) << "token " << i / of_token;
      } else {
        ASSERT_LE(std::abs(got.get(i) - wanted.get(i)), tolerance) << "token " << i / of_token;
      }
    }
  }

  [[nodiscard]] std::int32_t num_seqs() const { return static_cast<std::int32_t>(lengths.size()); }
  [[nodiscard]] std::int32_t num_tokens() const { return offsets.back(); }
  [[nodiscard]] KvView view_of(TensorView keys, TensorView values) const {
    KvView view;
    view.k = keys;
    view.v = values;
    view.num_rows = num_seqs();
    return view;
  }
  [[nodiscard]] LayerInputs inputs_of(ConstTensorView queries, const std::int32_t* at) const {
    LayerInputs inputs;
    inputs.q = queries;
    inputs.rope = rope;
    if (rope != nullptr) inputs.positions = at;
    return inputs;
  }

  AttentionConfig config;
  const Rope* rope = nullptr;  ///< Rotates q, as if its tokens stood at `positions`.
  std::vector<std::int32_t> offsets, lengths, positions;
  TwinTensor q, k, v;
  testkit::HostTensor wanted, wanted_lse;
};

}  // namespace octavo::gpu_tests
