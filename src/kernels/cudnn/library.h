// SPDX-License-Identifier: Apache-2.0
// cuDNN as found at run time. Compiles and runs without CUDA.
#pragma once

#include <cstdint>
#include <string>

namespace octavo::kernels::fused {

/// The oldest cuDNN that is used.
inline constexpr std::int32_t kOldestCudnn = 91000;

/// What dlopen found. `version` counts as cuDNN does: 91900 is 9.19.0; 0 when not found.
struct Library {
  void* handle = nullptr;
  std::int32_t version = 0;
  std::string version_text;  ///< "9.19.0"
  std::string why_not;       ///< Empty when found.

  [[nodiscard]] bool found() const { return handle != nullptr; }
};

/// Looked for once: the file named by the environment variable OCTAVO_CUDNN, else libcudnn.so.9 by
/// the loader's rules. Stays open.
const Library& library();

/// "9.19.0" of 91900.
std::string version_text(std::int32_t version);

}  // namespace octavo::kernels::fused
