// SPDX-License-Identifier: Apache-2.0
// The calls of one cache that go to cuDNN: what the graphs are built for, and when the step arrays
// in the workspace are made anew. In fused/ or, for builds without cuDNN's frontend, in no_fused/.
#pragma once

#include <octavo/types.h>

#include <cstddef>
#include <memory>

#include "kernels/params.h"

namespace octavo::kernels::fused {
class FusedAttention;
}

namespace octavo::dispatch {

class FusedCalls {
 public:
  explicit FusedCalls(Device device);
  ~FusedCalls();
  FusedCalls(const FusedCalls&) = delete;
  FusedCalls& operator=(const FusedCalls&) = delete;

  /// Another step was begun, or something else used the workspace.
  void new_step() { new_step_ = true; }

  /// Bytes of workspace for such a call. Opens cuDNN and builds the graph where that wasn't done
  /// yet. Throws Unsupported with cuDNN's words when it has no such graph.
  std::size_t bytes(const kernels::AttendParams& params, const kernels::StepLengths& lengths);

  /// After bytes, with the same arguments.
  void attend(const kernels::AttendParams& params, const kernels::StepLengths& lengths,
              void* workspace, std::size_t workspace_bytes, Stream stream);

 private:
  [[maybe_unused]] Device device_;  // no_fused/ does not use it
  bool new_step_ = true;
  std::unique_ptr<kernels::fused::FusedAttention> attention_;
};

}  // namespace octavo::dispatch
