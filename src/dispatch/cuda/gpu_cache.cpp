// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/error.h"
#include "device/gpu.h"
#include "dispatch/cuda/upload.h"
#include "dispatch/fused_calls.h"
#include "dispatch/gpu.h"
#include "kernels/cuda/append/append.h"
#include "kernels/cuda/convert/convert.h"
#include "kernels/cuda/unfused/unfused.h"

namespace octavo::dispatch {
namespace {

// Beyond what the longest sequence needs, more workspace means fewer and larger products. A limit
// of length that nobody means (the whole pool, say) must not take the GPU's memory.
constexpr std::size_t kGoodWorkspace = std::size_t{256} << 20U;
constexpr std::size_t kMostWorkspace = std::size_t{2} << 30U;

class CudaCache final : public GpuCache {
 public:
  CudaCache(const CacheConfig& config, std::int32_t max_pages_per_seq)
      : upload_(config, max_pages_per_seq),
        max_pages_per_seq_(max_pages_per_seq),
        fused_(config.device) {
    workspace_ = static_cast<std::byte*>(config.workspace);
    workspace_bytes_ = static_cast<std::size_t>(config.workspace_bytes);
    if (workspace_ != nullptr) return;
    own_workspace_ = device::GpuBuffer(config.device, workspace_bytes_,
                                       device::GpuBuffer::Fill::None, "workspace");
    workspace_ = own_workspace_.data();
  }

  void begin(const detail::PlanData& plan, const GpuStorage& storage, Stream stream) override {
    fused_.new_step();
    upload_.begin(plan, storage, stream);
  }

  [[nodiscard]] kernels::StepBatch batch(const detail::PlanData& plan) const override {
    const kernels::cuda::ResidentStep& step = upload_.resident();
    return {.num_seqs = static_cast<std::int32_t>(plan.ids.size()),
            .num_tokens = plan.num_tokens,
            .token_offsets = step.token_offsets,
            .kv_lens = step.kv_lens,
            .rows = step.rows,
            .page_table = step.page_table,
            .page_table_stride = max_pages_per_seq_,
            .clear_lens = step.clear_lens};
  }

  void append(const kernels::AppendParams& params, Stream stream) override {
    device::check(kernels::cuda::append(params, stream.handle), "append");
    device::sync_if_asked(stream, "append");
  }

  void check_attend(Backend backend, const kernels::AttendParams& params,
                    const kernels::StepBatch& host) override {
    if (backend == Backend::Fused) {
      fused_.check(params, host, workspace_bytes_);
      return;
    }
    OCTAVO_CHECK(backend == Backend::Unfused);
    std::int32_t longest = 0;
    for (std::int32_t b = 0; b < host.num_seqs; ++b) longest = std::max(longest, host.kv_lens[b]);
    const std::size_t least = kernels::cuda::least_unfused_bytes(
        params.num_q_heads / params.num_kv_heads, params.head_dim, params.head_dim_v, longest);
    if (workspace_bytes_ < least) {
      base::throw_mismatch("workspace_bytes",
                           fmt::format("at least {} for {} tokens by unfused", least, longest),
                           workspace_bytes_);
    }
  }

  void attend(Backend backend, const kernels::AttendParams& params, const kernels::StepBatch& host,
              Stream stream) override {
    if (backend == Backend::Fused) {
      fused_.attend(params, host, workspace_, workspace_bytes_, stream);
      device::sync_if_asked(stream, "attend");
      return;
    }
    OCTAVO_CHECK(backend == Backend::Unfused);
    fused_.new_step();  // the workspace is shared
    unfused_.attend(params, host, workspace_, workspace_bytes_, stream.handle);
    device::sync_if_asked(stream, "attend");
  }

 private:
  Upload upload_;
  std::int32_t max_pages_per_seq_;
  device::GpuBuffer own_workspace_;
  std::byte* workspace_ = nullptr;
  std::size_t workspace_bytes_ = 0;
  kernels::cuda::Unfused unfused_;
  FusedCalls fused_;
};

}  // namespace

std::unique_ptr<GpuCache> make_gpu_cache(const CacheConfig& config,
                                         std::int32_t max_pages_per_seq) {
  const device::DeviceGuard guard(config.device);
  return std::make_unique<CudaCache>(config, max_pages_per_seq);
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

}  // namespace octavo::dispatch
