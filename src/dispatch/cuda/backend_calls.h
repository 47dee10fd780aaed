// SPDX-License-Identifier: Apache-2.0
// The GPU's backends behind one call each: what a call needs of workspace, and the call. Holds what
// they prepare; the workspace is whoever's it is.
#pragma once

#include <octavo/types.h>

#include <cstddef>

#include "dispatch/fused_calls.h"
#include "kernels/cuda/flash2/flash2.h"
#include "kernels/cuda/unfused/unfused.h"
#include "kernels/params.h"

namespace octavo::dispatch {

/// The fewest bytes of workspace with which unfused runs the call.
std::size_t least_unfused_bytes(const kernels::AttendParams& params,
                                const kernels::StepLengths& lengths);

class BackendCalls {
 public:
  /// Throws as block_smem_of_environment.
  explicit BackendCalls(Device device);

  /// Another step was begun, or something else used the workspace.
  void new_step() { fused_.new_step(); }

  /// The fewest bytes of workspace with which the call runs. Builds what the backend prepares for
  /// sizes that it has not met yet.
  std::size_t least_bytes(Backend backend, const kernels::AttendParams& params,
                          const kernels::StepLengths& lengths);

  /// Bytes beyond which more gains little.
  std::size_t good_bytes(Backend backend, const kernels::AttendParams& params,
                         const kernels::StepLengths& lengths);

  /// After least_bytes, with the same arguments, and with no less workspace.
  void attend(Backend backend, const kernels::AttendParams& params,
              const kernels::StepLengths& lengths, void* workspace, std::size_t workspace_bytes,
              Stream stream);

 private:
  kernels::cuda::Unfused unfused_;
  kernels::flash2::Flash2 flash2_;
  FusedCalls fused_;
};

/// Beyond what the longest sequence needs, more workspace means fewer and larger products: this
/// holds the scores of 8192 rows of 8192 keys and what goes with them.
inline constexpr std::size_t kGoodWorkspace = std::size_t{288} << 20U;

}  // namespace octavo::dispatch
