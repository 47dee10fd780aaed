// SPDX-License-Identifier: Apache-2.0
// What tests on a GPU start from: the GPU itself, or a skip that says why there is none. With
// OCTAVO_REQUIRE=cuda in the environment a missing GPU fails the test instead.
#pragma once

#include "testing/device_memory.h"

#include <octavo/backend.h>
#include <octavo/types.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace octavo::gpu_tests {

inline constexpr Device kGpu{DeviceType::Cuda, 0};

inline void require_gpu() {
  const std::string trouble = testkit::device_trouble(kGpu);
  if (trouble.empty()) return;
  const char* required = std::getenv("OCTAVO_REQUIRE");
  ASSERT_FALSE(required != nullptr && std::string_view(required) == "cuda") << trouble;
  GTEST_SKIP() << trouble;
}

/// Skips where a backend can't be used: no cuDNN, for one.
inline void require_backend(Backend backend) {
  for (const BackendInfo& info : backends()) {
    if (info.backend == backend && !info.usable) GTEST_SKIP() << info.why_not;
  }
}

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override { require_gpu(); }
};

template <typename ParamT>
class GpuTestWith : public ::testing::TestWithParam<ParamT> {
 protected:
  void SetUp() override { require_gpu(); }
};

}  // namespace octavo::gpu_tests
