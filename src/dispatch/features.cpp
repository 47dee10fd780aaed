// SPDX-License-Identifier: Apache-2.0
#include "dispatch/features.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "device/gpu.h"
#include "kernels/cuda/flash2/config.h"
#include "kernels/cuda/flash2/flash2.h"
#include "kernels/cuda/flash2/row_steps.h"
#include "kernels/cudnn/library.h"
#include "kernels/cudnn/support.h"
#include "kernels/params.h"

namespace octavo::dispatch {
namespace {

constexpr std::array<Backend, 5> kPreference = {Backend::Flash3, Backend::Flash2, Backend::Fused,
                                                Backend::Cpu, Backend::Unfused};

bool is_float(DType dtype) {
  return dtype == DType::F32 || dtype == DType::F16 || dtype == DType::BF16;
}

/// One feature: whether a request needs it, whether a backend has it, and its name.
struct Feature {
  bool (*needed)(const Request&);
  bool (*has)(Backend, const Request&);
  std::string (*name)(const Request&);
};

bool always(const Request& /*request*/) { return true; }

bool on_gpu(const Request& request) { return request.device == DeviceType::Cuda; }

bool runs_on(Backend backend, const Request& request) {
  if (!on_gpu(request)) return backend == Backend::Cpu || backend == Backend::Unfused;
  return (backend == Backend::Unfused || backend == Backend::Flash2) &&
         request.machine.cuda_compiled;
}

bool has_bf16(const Request& request) {
  return request.cache_dtype == DType::BF16 || request.q_dtype == DType::BF16;
}

// The oldest GPUs: those that nvcc still builds for, and those that multiply BF16.
constexpr std::int32_t kOldestSm = 75;
constexpr std::int32_t kOldestBf16Sm = 80;
constexpr std::int32_t kOldestFlash2Sm = 80;

bool has_dtype(Backend backend, DType dtype) {
  return is_float(dtype) && (backend != Backend::Flash2 || dtype != DType::F32);
}

bool has_dims(Backend backend, const Request& r) {
  if (backend != Backend::Flash2) return std::max(r.head_dim, r.head_dim_v) <= kernels::kMaxHeadDim;
  return r.head_dim <= kernels::flash2::kWidestHead &&
         r.head_dim_v <= kernels::flash2::kWidestHeadV &&
         r.head_dim % kernels::flash2::kDimStep == 0 &&
         r.head_dim_v % kernels::flash2::kDimStep == 0;
}

// Host and GPU share a column where a backend has both: rows that ask for a device tell them apart.
constexpr std::array kFeatures = {
    Feature{always, [](Backend backend, const Request&) { return is_compiled(backend); },
            [](const Request&) { return std::string("compiled into this build"); }},
    Feature{always, runs_on,
            [](const Request& r) { return fmt::format("device {}", to_string(r.device)); }},
    Feature{on_gpu,
            [](Backend backend, const Request& r) {
              return r.machine.sm >= (backend == Backend::Flash2 ? kOldestFlash2Sm : kOldestSm);
            },
            [](const Request& r) { return fmt::format("sm{}", r.machine.sm); }},
    Feature{[](const Request& r) { return on_gpu(r) && has_bf16(r); },
            [](Backend, const Request& r) { return r.machine.sm >= kOldestBf16Sm; },
            [](const Request& r) { return fmt::format("bf16 on sm{}", r.machine.sm); }},
    Feature{[](const Request& r) { return r.compute != Compute::Same; },
            [](Backend, const Request&) { return false; },
            [](const Request& r) { return fmt::format("compute {}", to_string(r.compute)); }},
    Feature{
        always, [](Backend backend, const Request& r) { return has_dtype(backend, r.cache_dtype); },
        [](const Request& r) { return fmt::format("cache dtype {}", to_string(r.cache_dtype)); }},
    Feature{[](const Request& r) { return r.q_dtype.has_value(); },
            [](Backend backend, const Request& r) {
              return has_dtype(backend, *r.q_dtype) &&
                     (backend != Backend::Flash2 || *r.q_dtype == r.cache_dtype);
            },
            [](const Request& r) { return fmt::format("q dtype {}", to_string(*r.q_dtype)); }},
    Feature{always, has_dims,
            [](const Request& r) {
              return fmt::format("head_dim {}, head_dim_v {}", r.head_dim, r.head_dim_v);
            }},
    Feature{[](const Request& r) { return !r.dense_cache_rows; },
            [](Backend backend, const Request&) { return backend == Backend::Unfused; },
            [](const Request&) {
              return std::string("a last axis of K or V with a stride other than 1");
            }},
    Feature{[](const Request& r) { return !r.dense_token_rows; },
            [](Backend backend, const Request&) {
              return backend == Backend::Unfused || backend == Backend::Cpu;
            },
            [](const Request&) {
              return std::string("a last axis of q or out with a stride other than 1");
            }},
    Feature{[](const Request& r) { return on_gpu(r) && !r.aligned_cache_rows; },
            [](Backend backend, const Request&) { return backend == Backend::Unfused; },
            [](const Request&) {
              return std::string("rows of K or V that begin at no multiple of 16 bytes");
            }},
    Feature{[](const Request& r) { return on_gpu(r) && !r.near_cache_rows; },
            [](Backend backend, const Request&) { return backend == Backend::Unfused; },
            [](const Request&) {
              return std::string("rows of K or V 2^31 times their strides' common factor apart");
            }},
};

/// On GPUs cuDNN has rows of its own instead of the table's.
bool has_own_rows(Backend backend, const Request& request) {
  return backend == Backend::Fused && on_gpu(request);
}

/// Under Auto, `fused` waits until cuDNN's decode gives the same bits each time
/// (src/kernels/cudnn/README.md), and is left out where it is slow; naming it takes it.
bool taken_unnamed(Backend backend, const Request& request) {
  if (backend != Backend::Fused) return true;
  return request.machine.fused_repeats &&
         !kernels::fused::is_slow(request.fused.q_len, request.fused.kv_len);
}

const WorkspaceLack* lack_of(Backend backend, const Request& request) {
  const auto found =
      std::find_if(request.lacks.begin(), request.lacks.end(),
                   [&](const WorkspaceLack& lack) { return lack.backend == backend; });
  return found == request.lacks.end() ? nullptr : &*found;
}

/// The first in order of preference that can run it; Auto when there is none.
Backend first_of(const Request& request) {
  for (const Backend backend : kPreference) {
    if (taken_unnamed(backend, request) && can_run(backend, request)) return backend;
  }
  return Backend::Auto;
}

/// What a batch needs depends on all of it, and backends' bits differ.
bool gives_way(Backend wanted, const Request& request) {
  return wanted == Backend::Auto && !request.fused.batch_invariant;
}

/// `wanted`, or under Auto the first, that can run it and has the workspace for it; Auto when there
/// is none. Those that lack workspace are added to the request.
Backend first_with_workspace(Backend wanted, Request& request, const WorkspaceOf& workspace_of) {
  Backend chosen = wanted;
  if (wanted == Backend::Auto) {
    chosen = first_of(request);
  } else if (!can_run(wanted, request)) {
    return Backend::Auto;
  }
  while (chosen != Backend::Auto) {
    const std::optional<WorkspaceBytes> bytes = workspace_of(chosen);
    if (!bytes || bytes->wanted <= bytes->got) break;
    request.lacks.push_back({chosen, *bytes});
    chosen = gives_way(wanted, request) ? first_of(request) : Backend::Auto;
  }
  return chosen;
}

kernels::fused::SupportQuery fused_query(const Request& request) {
  kernels::fused::SupportQuery query = request.fused;
  query.compiled = request.machine.fused_compiled;
  query.sm = request.machine.sm;
  query.cudnn_version = request.machine.cudnn_version;
  query.cache_dtype = request.cache_dtype;
  query.q_dtype = request.q_dtype;
  query.compute = request.compute;
  query.head_dim = request.head_dim;
  query.head_dim_v = request.head_dim_v;
  query.dense_rows = request.dense_cache_rows && request.dense_token_rows;
  return query;
}

std::string joined(const std::vector<std::string>& words) {
  return words.empty() ? std::string("none") : fmt::format("{}", fmt::join(words, ", "));
}

std::string refusal_text(const Support& support) {
  return fmt::format("backend {}: required: {}; supported: {}; missing: {}",
                     to_string(support.backend), joined(support.required),
                     joined(support.supported), joined(support.missing));
}

std::string compiled_names() {
  std::vector<std::string> names;
  for (const Backend backend : kPreference) {
    if (is_compiled(backend)) names.emplace_back(to_string(backend));
  }
  return joined(names);
}

}  // namespace

Machine this_machine(Device device) {
  Machine machine;
  if (device.type == DeviceType::Cpu) return machine;
  const device::GpuReport& report = device::gpu_report();
  machine.cuda_compiled = report.compiled;
  const auto index = static_cast<std::size_t>(device.index);
  if (device.index >= 0 && index < report.gpus.size()) machine.sm = report.gpus[index].sm;
  machine.fused_compiled = kernels::fused::is_compiled();
  if (machine.fused_compiled && machine.sm > 0)
    machine.cudnn_version = kernels::fused::library().version;
  return machine;
}

Backend backend_of_environment() {
  const char* name = std::getenv("OCTAVO_BACKEND");
  if (name == nullptr || *name == '\0') return Backend::Auto;
  const std::optional<Backend> backend = parse_backend(name);
  if (!backend) base::throw_mismatch("OCTAVO_BACKEND", "the name of a backend", name);
  return *backend;
}

std::size_t block_smem_of_environment(std::size_t allowed) {
  constexpr std::size_t kKilobyte = 1024;
  constexpr std::size_t kLeast = kernels::flash2::kLeastBlockSmem / kKilobyte;
  const char* text = std::getenv("OCTAVO_BLOCK_SMEM_KB");
  if (text == nullptr || *text == '\0') return allowed;
  const std::string_view digits(text);
  std::size_t kilobytes = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), kilobytes);
  if (error != std::errc{} || end != digits.data() + digits.size() || kilobytes < kLeast ||
      kilobytes > allowed / kKilobyte) {
    base::throw_mismatch("OCTAVO_BLOCK_SMEM_KB",
                         fmt::format("{} … {}", kLeast, allowed / kKilobyte), text);
  }
  return kilobytes * kKilobyte;
}

Backend or_environments(Backend named) {
  return named == Backend::Auto ? backend_of_environment() : named;
}

Request make_request(const AttentionConfig& config, DType cache_dtype, Device device) {
  Request request;
  request.device = device.type;
  request.machine = this_machine(device);
  request.cache_dtype = cache_dtype;
  request.compute = config.compute;
  request.head_dim = config.head_dim;
  request.head_dim_v = config.head_dim_v;
  request.fused.causal = config.mask == Mask::Causal;
  request.fused.window_left = config.window.left;
  request.fused.window_right = config.window.right;
  request.fused.softcap = config.softcap != 0.0F;
  request.fused.batch_invariant = config.batch_invariant;
  if (device.type == DeviceType::Cuda && kernels::fused::is_compiled())
    request.fused.cudnn_why_not = kernels::fused::library().why_not;
  return request;
}

bool has_near_rows(const kernels::KvPages& pages) { return kernels::flash2::has_near_rows(pages); }

std::span<const Backend> preference() { return kPreference; }

bool is_compiled(Backend backend) {
  if (backend == Backend::Fused) return kernels::fused::is_compiled();
  if (backend == Backend::Flash2) return device::gpu_report().compiled;
  return backend == Backend::Cpu || backend == Backend::Unfused;
}

bool can_run(Backend backend, const Request& request) {
  if (lack_of(backend, request) != nullptr) return false;
  if (has_own_rows(backend, request)) return kernels::fused::supported(fused_query(request));
  for (const Feature& feature : kFeatures) {
    if (feature.needed(request) && !feature.has(backend, request)) return false;
  }
  return true;
}

Support explain(Backend backend, const Request& request) {
  Support support;
  support.backend = backend;
  const auto add = [&support](const std::string& name, bool has) {
    support.required.push_back(name);
    (has ? support.supported : support.missing).push_back(name);
  };
  if (has_own_rows(backend, request)) {
    for (const auto& row : kernels::fused::support_rows(fused_query(request)))
      add(row.name, row.ok);
  } else {
    for (const Feature& feature : kFeatures) {
      if (feature.needed(request)) add(feature.name(request), feature.has(backend, request));
    }
  }
  if (const WorkspaceLack* lack = lack_of(backend, request)) {
    add(fmt::format("{} bytes of workspace (there are {})", lack->bytes.wanted, lack->bytes.got),
        false);
  }
  support.ok = support.missing.empty();
  return support;
}

Backend choose(Backend named, const Request& request) {
  if (named != Backend::Auto) {
    if (can_run(named, request)) return named;
    if (!is_compiled(named)) {
      throw Error(ErrorCode::NotCompiled,
                  refusal_text(explain(named, request)) + "; compiled: " + compiled_names());
    }
    throw Error(ErrorCode::Unsupported, refusal_text(explain(named, request)));
  }
  if (const Backend first = first_of(request); first != Backend::Auto) return first;
  std::string text = "no backend can run this";
  for (const Backend backend : kPreference) {
    if (is_compiled(backend)) text += "; " + refusal_text(explain(backend, request));
  }
  throw Error(ErrorCode::Unsupported, text);
}

Backend choose_with_workspace(Backend named, Request request, std::int32_t max_kv_len,
                              const WorkspaceOf& workspace_of) {
  const Backend chosen = first_with_workspace(named, request, workspace_of);
  if (chosen != Backend::Auto) return chosen;
  if (request.lacks.empty()) return choose(named, request);  // throws
  const auto& [last, bytes] = request.lacks.back();
  base::throw_mismatch(
      "workspace_bytes",
      last != Backend::Unfused
          ? fmt::format("at least {} by {}", bytes.wanted, to_string(last))
          : fmt::format("at least {} for {} tokens by unfused", bytes.wanted, max_kv_len),
      bytes.got);
}

Explanation explain_all(Backend named, Backend wanted, const Request& request) {
  Explanation explanation;
  for (const Backend backend : kPreference)
    explanation.backends.push_back(explain(backend, request));
  for (const Support& support : explanation.backends) {
    const bool candidate = wanted == Backend::Auto ? taken_unnamed(support.backend, request)
                                                   : support.backend == wanted;
    if (candidate && support.ok && explanation.chosen == Backend::Auto)
      explanation.chosen = support.backend;
  }
  if (explanation.chosen == Backend::Auto) {
    explanation.reason = wanted == Backend::Auto
                             ? "no backend can run this"
                             : fmt::format("{} was named and cannot run this", to_string(wanted));
  } else {
    explanation.reason = wanted == Backend::Auto
                             ? "the first in order of preference that can run this"
                         : named == Backend::Auto ? "OCTAVO_BACKEND names it"
                                                  : "it was named";
  }
  return explanation;
}

Explanation explain_with_workspace(Backend named, Backend wanted, Request request,
                                   const WorkspaceOf& workspace_of) {
  static_cast<void>(first_with_workspace(wanted, request, workspace_of));
  if (gives_way(wanted, request) || wanted != Backend::Auto || request.lacks.empty())
    return explain_all(named, wanted, request);
  const Backend last = request.lacks.back().backend;
  Explanation explanation = explain_all(named, last, request);
  explanation.reason = fmt::format(
      "{} lacks workspace, and in batch-invariant mode no other backend takes its place",
      to_string(last));
  return explanation;
}

}  // namespace octavo::dispatch

namespace octavo {

std::string Explanation::to_string() const {
  std::string text = fmt::format(
      "chosen: {} ({})\n", chosen == Backend::Auto ? "none" : octavo::to_string(chosen), reason);
  for (const Support& support : backends) {
    text += support.ok ? fmt::format("  {}: can run this\n", octavo::to_string(support.backend))
                       : fmt::format("  {}: missing {}\n", octavo::to_string(support.backend),
                                     fmt::join(support.missing, ", "));
  }
  return text;
}

}  // namespace octavo
