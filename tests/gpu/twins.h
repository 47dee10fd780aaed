// SPDX-License-Identifier: Apache-2.0
// Two caches of one configuration, one on the host and one on the GPU, through the same steps.
// Pages are handed out alike, so that after the same appends the storage must be the same, byte for
// byte.
#pragma once

#include "testing/device_memory.h"
#include "testing/host_tensor.h"
#include "testing/random.h"
#include "tests/gpu/gpu_test.h"

#include <octavo/attention.h>
#include <octavo/cache.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

namespace octavo::gpu_tests {

struct Twins {
  explicit Twins(CacheConfig config)
      : host(config), gpu([&] {
          config.device = kGpu;
          return config;
        }()) {}

  KvCache host, gpu;

  /// Plans and begins on both. The plans must agree.
  std::pair<StepPlan, StepPlan> step(const std::vector<SequenceStep>& lines, Stream stream = {}) {
    StepPlan a = host.plan(lines).plan();
    StepPlan b = gpu.plan(lines).plan();
    EXPECT_TRUE(a == b);
    host.begin(a);
    gpu.begin(b, stream);
    return {a, b};
  }

  /// 0xFF (NaN in every dtype) into every byte of both.
  void poison() {
    for (std::int32_t layer = 0; layer < host.config().num_layers; ++layer) {
      for (const bool key : {true, false}) {
        const TensorView to = key ? host.key_storage(layer) : host.value_storage(layer);
        const TensorView on_gpu = key ? gpu.key_storage(layer) : gpu.value_storage(layer);
        std::memset(to.data, 0xFF, bytes_of(to));
        testkit::fill_device(kGpu, on_gpu.data, std::byte{0xFF}, bytes_of(on_gpu));
      }
    }
    testkit::synchronize(kGpu);
  }

  /// Whether all bytes of both storages agree.
  [[nodiscard]] bool same_storage() {
    for (std::int32_t layer = 0; layer < host.config().num_layers; ++layer) {
      for (const bool key : {true, false}) {
        const TensorView a = key ? host.key_storage(layer) : host.value_storage(layer);
        const TensorView b = key ? gpu.key_storage(layer) : gpu.value_storage(layer);
        std::vector<std::byte> bytes(bytes_of(b));
        testkit::read_device(kGpu, bytes.data(), b.data, bytes.size());
        if (std::memcmp(bytes.data(), a.data, bytes.size()) != 0) return false;
      }
    }
    return true;
  }

  static std::size_t bytes_of(const TensorView& view) {
    std::int64_t elements = 1;
    for (std::size_t axis = 0; axis < 4; ++axis) elements *= view.shape[axis];
    return static_cast<std::size_t>(elements * dtype_bytes(view.dtype));
  }
};

/// A tensor of random numbers, the same on the host and on the GPU.
struct TwinTensor {
  TwinTensor(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed)
      : host(dtype, std::move(shape)) {
    testkit::Random random(seed);
    for (std::int64_t i = 0; i < host.size(); ++i) host.set(i, 2.0 * random.uniform() - 1.0);
    gpu.emplace(kGpu, host);
  }

  [[nodiscard]] ConstTensorView on_host() const { return host.view(); }
  [[nodiscard]] ConstTensorView on_gpu() const { return gpu->view(); }

  testkit::HostTensor host;
  std::optional<testkit::DeviceTensor> gpu;
};

}  // namespace octavo::gpu_tests
