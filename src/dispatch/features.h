// SPDX-License-Identifier: Apache-2.0
// The feature table: what a step needs, and which backend has it. One walk over the table answers
// both "can this backend run it" (cheap, for every layer call) and "why not" (with words, for
// refusals and explain).
#pragma once

#include <octavo/attention.h>
#include <octavo/backend.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "kernels/cudnn/support.h"
#include "kernels/params.h"

namespace octavo::dispatch {

/// What runs it: tests put in what they like.
struct Machine {
  bool cuda_compiled = false;      ///< This build has the CUDA part.
  std::int32_t sm = 0;             ///< Of the GPU that is asked for, major * 10 + minor; 0: none.
  bool fused_compiled = false;     ///< This build has cuDNN's frontend.
  std::int32_t cudnn_version = 0;  ///< As cuDNN counts; 0: not found.
  /// cuDNN's decode gives the same bits each time. No version was found to.
  bool fused_repeats = false;
};

/// The machine that we are on, as far as `device` goes.
Machine this_machine(Device device);

/// Workspace that a call wants, and what there is; bytes.
struct WorkspaceBytes {
  std::size_t wanted = 0;
  std::size_t got = 0;
};

/// A backend that lacks workspace.
struct WorkspaceLack {
  Backend backend = Backend::Auto;
  WorkspaceBytes bytes = {};
};

/// What is asked of a backend. Fields that are not known yet (no tensors seen) ask for nothing.
struct Request {
  DeviceType device = DeviceType::Cpu;
  Machine machine = {};
  DType cache_dtype = DType::F32;
  std::optional<DType> q_dtype;
  Compute compute = Compute::Same;
  std::int32_t head_dim = 0;
  std::int32_t head_dim_v = 0;
  bool dense_cache_rows = true;             ///< The last axis of K and V has stride 1.
  bool dense_token_rows = true;             ///< The same for q and the output.
  bool aligned_cache_rows = true;           ///< Rows of K and V begin at multiples of 16 bytes.
  bool near_cache_rows = true;              ///< has_near_rows.
  kernels::fused::SupportQuery fused = {};  ///< What cuDNN is asked beside all this.
  std::vector<WorkspaceLack> lacks = {};    ///< Those that are known.
};

/// The request of a configuration on this machine, before any tensor is seen.
Request make_request(const AttentionConfig& config, DType cache_dtype, Device device);

/// Whether flash2 can say where rows of K and V lie.
bool has_near_rows(const kernels::KvPages& pages);

/// All backends in order of preference.
std::span<const Backend> preference();

/// Whether this build has the backend.
bool is_compiled(Backend backend);

bool can_run(Backend backend, const Request& request);
Support explain(Backend backend, const Request& request);

/// The backend that OCTAVO_BACKEND names, to be taken where Auto is asked for; Auto when it is not
/// set. Throws InvalidArgument for a name that is none.
Backend backend_of_environment();

/// Bytes of shared memory that a block of flash2 may have on a GPU that allows `allowed`: these, or
/// what OCTAVO_BLOCK_SMEM_KB says, so that a large GPU can run the kernels of smaller ones. Throws
/// InvalidArgument for what no GPU that flash2 runs on has, or more than is allowed.
std::size_t block_smem_of_environment(std::size_t allowed);

/// `named`, or the environment's where that is Auto. Throws as backend_of_environment.
Backend or_environments(Backend named);

/// The backend to take: `named`, or under Auto the first that can run it. Throws NotCompiled or
/// Unsupported with required, supported and missing features.
Backend choose(Backend named, const Request& request);

/// A backend's workspace; nothing for one that isn't asked.
using WorkspaceOf = std::function<std::optional<WorkspaceBytes>(Backend)>;

/// The same where workspace counts: under Auto a backend without what it wants gives way to the
/// next. Throws InvalidArgument when nobody is left; `max_kv_len` is for the message.
Backend choose_with_workspace(Backend named, Request request, std::int32_t max_kv_len,
                              const WorkspaceOf& workspace_of);

/// What every backend says, and what choose would take of `wanted`, which is `named` or the
/// environment's.
Explanation explain_all(Backend named, Backend wanted, const Request& request);

/// The same where workspace counts.
Explanation explain_with_workspace(Backend named, Backend wanted, Request request,
                                   const WorkspaceOf& workspace_of);

}  // namespace octavo::dispatch
