// SPDX-License-Identifier: Apache-2.0
// The backends of this build, as `octavo info` shows them.
#include <octavo/backend.h>

#include "base/error.h"
#include "device/gpu.h"
#include "dispatch/features.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cudnn/library.h"
#include "kernels/cudnn/support.h"

namespace octavo {

namespace {

void describe_fused(BackendInfo& info) {
  const kernels::fused::Library& cudnn = kernels::fused::library();
  info.usable = false;
  if (!cudnn.found()) {
    info.why_not = cudnn.why_not;
    return;
  }
  info.description += fmt::format(", version {}", cudnn.version_text);
  const auto& gpus = device::gpu_report().gpus;
  if (gpus.empty()) {
    info.why_not = fmt::format("no GPU ({})", device::gpu_report().why_none);
    return;
  }
  kernels::fused::SupportQuery query;
  query.compiled = true;
  query.sm = gpus.front().sm;
  query.cudnn_version = cudnn.version;
  for (const kernels::fused::SupportRow& row : kernels::fused::support_rows(query)) {
    if (!row.ok && info.why_not.empty()) info.why_not = "wanted " + row.name;
  }
  info.usable = info.why_not.empty();
}

void describe_flash2(BackendInfo& info) {
  constexpr std::int32_t kOldestSm = 80;
  const device::GpuReport& report = device::gpu_report();
  info.usable = !report.gpus.empty() && report.gpus.front().sm >= kOldestSm;
  if (info.usable) return;
  info.why_not = report.gpus.empty()
                     ? fmt::format("no GPU ({})", report.why_none)
                     : fmt::format("wanted sm80 or newer (found: sm{})", report.gpus.front().sm);
}

}  // namespace

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> infos;
  for (const Backend backend : dispatch::preference()) {
    BackendInfo info;
    info.backend = backend;
    info.compiled = dispatch::is_compiled(backend);
    info.usable = info.compiled;
    if (!info.compiled) {
      info.why_not = backend == Backend::Fused
                         ? fmt::format("not compiled: {}", kernels::fused::why_not_compiled())
                     : info.backend == Backend::Flash2
                         ? fmt::format("not compiled: {}", device::gpu_report().why_none)
                         : std::string("not in this version");
    }
    switch (backend) {
      case Backend::Cpu:
        info.description =
            fmt::format("tiled online softmax on the host, SIMD target {}", cpu_target());
        break;
      case Backend::Unfused:
        info.description =
            device::gpu_report().gpus.empty()
                ? fmt::format("the definition: on the host; no GPU ({})",
                              device::gpu_report().why_none)
                : fmt::format("the definition: on the host, and on {} by cuBLASLt ({})",
                              device::gpu_report().gpus.front().name,
                              device::gpu_report().versions);
        break;
      case Backend::Fused:
        info.description = "cuDNN's attention on NVIDIA GPUs";
        if (info.compiled) describe_fused(info);
        break;
      case Backend::Flash2:
        info.description = "own kernels for NVIDIA GPUs, sm80 and up";
        if (info.compiled) describe_flash2(info);
        break;
      case Backend::Flash3:
        info.description = "own kernels for NVIDIA GPUs, sm90a";
        break;
      case Backend::Auto:
        break;
    }
    infos.push_back(info);
  }
  return infos;
}

std::string cpu_target() { return kernels::cpu::target_name(); }

}  // namespace octavo
