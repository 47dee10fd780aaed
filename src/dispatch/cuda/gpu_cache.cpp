// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/error.h"
#include "device/gpu.h"
#include "dispatch/cuda/backend_calls.h"
#include "dispatch/cuda/upload.h"
#include "dispatch/features.h"
#include "dispatch/gpu.h"
#include "kernels/cuda/append/append.h"
#include "kernels/cuda/convert/convert.h"
#include "kernels/cuda/plan/plan.h"
#include "kernels/cuda/unfused/unfused.h"

namespace octavo::dispatch {
namespace {

// A limit of length that nobody means (the whole pool, say) must not take the GPU's memory.
constexpr std::size_t kMostWorkspace = std::size_t{2} << 30U;

class CudaCache final : public GpuCache {
 public:
  CudaCache(const CacheConfig& config, std::int32_t max_pages_per_seq)
      : upload_(config, max_pages_per_seq), backends_(config.device) {
    workspace_ = static_cast<std::byte*>(config.workspace);
    workspace_bytes_ = static_cast<std::size_t>(config.workspace_bytes);
    if (workspace_ != nullptr) return;
    own_workspace_ = device::GpuBuffer(config.device, workspace_bytes_,
                                       device::GpuBuffer::Fill::None, "workspace");
    workspace_ = own_workspace_.data();
  }

  void begin(const detail::PlanData& plan, const GpuStorage& storage, Stream stream) override {
    backends_.new_step();
    upload_.begin(plan, storage, stream);
  }

  [[nodiscard]] kernels::StepBatch batch(std::int32_t num_seqs,
                                         std::int32_t num_tokens) const override {
    const kernels::cuda::ResidentStep& step = upload_.resident();
    return {.num_seqs = num_seqs,
            .num_tokens = num_tokens,
            .token_offsets = step.token_offsets,
            .kv_lens = step.kv_lens,
            .rows = step.rows,
            .page_table = step.page_table,
            .page_table_stride = step.page_table_stride,
            .clear_lens = step.clear_lens,
            .token_slots = step.token_slots,
            .token_indices = step.token_indices,
            .max_token_slots = step.max_tokens};
  }

  void append(const kernels::AppendParams& params, Stream stream) override {
    device::check(kernels::cuda::append(params, append_overlaps_, stream.handle), "append");
    device::sync_if_asked(stream, "append");
  }

  WorkspaceBytes workspace_for(Backend backend, const kernels::AttendParams& params,
                               const kernels::StepLengths& lengths) override {
    return {backends_.least_bytes(backend, params, lengths), workspace_bytes_};
  }

  void attend(Backend backend, const kernels::AttendParams& params,
              const kernels::StepLengths& lengths, Stream stream) override {
    backends_.attend(backend, params, lengths, workspace_, workspace_bytes_, stream);
  }

  void workspace_used() override { backends_.new_step(); }

 private:
  Upload upload_;
  device::GpuBuffer own_workspace_;
  std::byte* workspace_ = nullptr;
  std::size_t workspace_bytes_ = 0;
  BackendCalls backends_;
  bool append_overlaps_ = kernels::cuda::append_may_overlap();
};

}  // namespace

std::unique_ptr<GpuCache> make_gpu_cache(const CacheConfig& config,
                                         std::int32_t max_pages_per_seq) {
  const device::DeviceGuard guard(config.device);
  return std::make_unique<CudaCache>(config, max_pages_per_seq);
}

std::size_t least_call_bytes(Backend backend, const kernels::AttendParams& params,
                             const kernels::StepLengths& lengths, Device device) {
  if (backend == Backend::Unfused) return least_unfused_bytes(params, lengths);
  OCTAVO_CHECK(backend == Backend::Flash2);
  return kernels::flash2::workspace_bytes_on(
      device, block_smem_of_environment(device::require_gpu(device, "device").block_smem_bytes),
      params, lengths);
}

std::size_t least_gpu_workspace(const CacheConfig& config) {
  return kernels::cuda::least_unfused_bytes(1, config.head_dim, config.head_dim_v, 1);
}

std::size_t default_gpu_workspace(const CacheConfig& config) {
  constexpr std::int32_t kLargeGroup = 16;
  const std::int64_t longest = std::min(config.max_seq_len, config.num_pages * config.page_size);
  return std::clamp(
      kernels::cuda::least_unfused_bytes(kLargeGroup, config.head_dim, config.head_dim_v, longest),
      kGoodWorkspace, kMostWorkspace);
}

void convert_on_gpu(const kernels::ConvertParams& params, Stream stream) {
  device::check(kernels::cuda::convert_tokens(params, stream.handle), "convert_tokens");
  device::sync_if_asked(stream, "convert_tokens");
}

void gather_on_gpu(const kernels::GatherParams& params, Stream stream) {
  device::check(kernels::cuda::gather_pages(params, stream.handle), "gather_pages");
  device::sync_if_asked(stream, "gather_pages");
}

void locate_on_gpu(const kernels::ListedParams& params, Stream stream) {
  device::check(kernels::cuda::locate_tokens(params, stream.handle), "locate_tokens");
  device::sync_if_asked(stream, "locate_tokens");
}

}  // namespace octavo::dispatch
