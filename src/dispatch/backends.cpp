// SPDX-License-Identifier: Apache-2.0
// The backends of this build, as `octavo info` shows them.
#include <octavo/backend.h>

#include "base/error.h"
#include "device/gpu.h"
#include "dispatch/features.h"
#include "kernels/cpu/kernels.h"

namespace octavo {

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> infos;
  for (const Backend backend : dispatch::preference()) {
    BackendInfo info;
    info.backend = backend;
    info.compiled = dispatch::is_compiled(backend);
    info.usable = info.compiled;
    if (!info.compiled) info.why_not = "not in this version";
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
        break;
      case Backend::Flash2:
        info.description = "own kernels for NVIDIA GPUs, sm80 and up";
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
