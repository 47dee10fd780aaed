// SPDX-License-Identifier: Apache-2.0
// Attention over a cache that the caller manages in a GPU's memory: the plan, and the calls that
// use it. The host sees pointers, strides and maxima, never a length.
#include <octavo/workspace.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "api/callers_cache.h"
#include "api/config.h"
#include "api/layer.h"
#include "api/workspace_impl.h"
#include "base/error.h"
#include "device/gpu.h"

namespace octavo {
namespace {

/// What the view and the arrays say to the planning kernel.
kernels::CallersStep callers_step(const KvView& cache, const StepArrays& step) {
  const kernels::StepBatch batch = api::device_lengths(cache, step);
  if (step.token_offsets == nullptr)
    base::throw_mismatch("step.token_offsets", "a pointer", "null");
  const auto at_least_0 = [](const char* what, std::int64_t got) {
    if (got < 0) base::throw_mismatch(what, "at least 0", got);
  };
  at_least_0("step.num_tokens", step.num_tokens);
  at_least_0("step.max_new_tokens", step.max_new_tokens);
  at_least_0("step.max_kv_len", step.max_kv_len);
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  kernels::CallersStep callers;
  callers.batch = batch;
  callers.num_pages = cache.k.shape[0];
  callers.num_rows = cache.page_table != nullptr ? cache.num_rows : cache.k.shape[0];
  callers.page_size = static_cast<std::int32_t>(cache.k.shape[1]);
  callers.max_slots = cache.page_table != nullptr
                          ? std::int64_t{cache.max_pages_per_seq} * cache.k.shape[1]
                          : cache.k.shape[1];
  const std::int64_t slots = std::min(callers.max_slots, kMost);
  if (step.max_kv_len > slots) {
    base::throw_mismatch("step.max_kv_len", fmt::format("at most {} (what a row can hold)", slots),
                         step.max_kv_len);
  }
  const std::int32_t most_new =
      step.max_new_tokens == 0 ? step.num_tokens : std::min(step.max_new_tokens, step.num_tokens);
  callers.maxima = {
      .num_seqs = step.num_seqs,
      .num_tokens = step.num_tokens,
      .max_new_tokens = most_new,
      .max_kv_len = step.max_kv_len == 0 ? static_cast<std::int32_t>(slots) : step.max_kv_len};
  return callers;
}

bool same_step(const kernels::CallersStep& a, const kernels::CallersStep& b) {
  return a.batch.token_offsets == b.batch.token_offsets && a.batch.kv_lens == b.batch.kv_lens &&
         a.batch.rows == b.batch.rows && a.batch.page_table == b.batch.page_table &&
         a.batch.page_table_stride == b.batch.page_table_stride && a.num_pages == b.num_pages &&
         a.num_rows == b.num_rows && a.page_size == b.page_size && a.max_slots == b.max_slots &&
         a.maxima == b.maxima;
}

std::string device_name(Device device) {
  return device.type == DeviceType::Cpu ? std::string("the cpu")
                                        : fmt::format("cuda:{}", device.index);
}

detail::WorkspaceImpl& workspace_of(const KvView& cache, const StepArrays& step) {
  const std::string wanted = fmt::format("a Workspace of {}", device_name(cache.k.device));
  if (step.workspace == nullptr) base::throw_mismatch("step.workspace", wanted, "null");
  detail::WorkspaceImpl& impl = step.workspace->impl();
  if (impl.device != cache.k.device) {
    base::throw_mismatch("step.workspace", wanted,
                         fmt::format("one of {}", device_name(impl.device)));
  }
  return impl;
}

void check_planned(const dispatch::GpuWorkspace& workspace, const kernels::CallersStep& step) {
  if (workspace.planned() != nullptr && same_step(*workspace.planned(), step)) return;
  base::throw_mismatch("step", "the one that its workspace planned last",
                       workspace.planned() == nullptr ? "none was planned" : "other arrays",
                       "see Workspace::plan");
}

api::StepShape shape_of(const kernels::CallersStep& step, TensorFormat format, Device device) {
  return {.format = format,
          .num_seqs = step.maxima.num_seqs,
          .num_tokens = step.maxima.num_tokens,
          .max_new_tokens = step.maxima.max_new_tokens,
          .device = device,
          .max_kv_len = step.maxima.max_kv_len,
          .bounded = true};
}

void refuse_maxima(const LayerInputs& inputs) {
  if (inputs.maxima == nullptr) return;
  base::throw_mismatch("inputs.maxima", "null over a caller's cache", "maxima",
                       "the step has its own");
}

/// A checked attention call; the batch is the caller's own until the step is planned.
struct AttendCall {
  AttendCall(const api::GpuAttend& given, const kernels::CallersStep& step,
             const kernels::StepBatch& batch) {
    refuse_maxima(given.inputs);
    const Device device = given.cache.k.device;
    const api::StepShape shape = shape_of(step, given.inputs.format, device);
    params = api::attend_params(given.config, given.inputs, shape, {batch, {}},
                                api::checked_pages(given.config, given.cache, false, device),
                                given.out, given.lse);
    named = dispatch::or_environments(given.config.backend);
    request = api::attend_request(given.config, params, shape);
  }
  kernels::AttendParams params;
  Backend named = Backend::Auto;
  dispatch::Request request;
};

void require_gpu_of(const KvView& cache) {
  static_cast<void>(device::require_gpu(cache.k.device, "cache.k.device"));
}

}  // namespace

namespace api {

void attend_on_gpu(const GpuAttend& given) {
  const KvView& cache = given.cache;
  require_gpu_of(cache);
  const device::DeviceGuard guard(cache.k.device);
  static_cast<void>(checked_pages(given.config, cache, false, cache.k.device));
  const kernels::CallersStep callers = callers_step(cache, given.step);
  dispatch::GpuWorkspace& workspace = *workspace_of(cache, given.step).gpu;
  check_planned(workspace, callers);
  const AttendCall call(given, callers, workspace.batch());
  device::check_stream(cache.k.device, given.stream);
  const Backend backend = dispatch::choose_with_workspace(
      call.named, call.request, callers.maxima.max_kv_len,
      [&](Backend asked) { return workspace.workspace_for(asked, call.params); });
  workspace.attend(backend, call.params, given.stream);
}

void check_attend_on_gpu(const GpuAttend& given) {
  const KvView& cache = given.cache;
  require_gpu_of(cache);
  const device::DeviceGuard guard(cache.k.device);
  static_cast<void>(checked_pages(given.config, cache, false, cache.k.device));
  const kernels::CallersStep callers = callers_step(cache, given.step);
  const detail::WorkspaceImpl& workspace = workspace_of(cache, given.step);
  const AttendCall call(given, callers, callers.batch);
  device::check_stream(cache.k.device, given.stream);
  static_cast<void>(dispatch::choose_with_workspace(
      call.named, call.request, callers.maxima.max_kv_len,
      [&](Backend asked) -> std::optional<dispatch::WorkspaceBytes> {
        return dispatch::WorkspaceBytes{
            workspace.gpu->sizes(asked, call.params, callers.maxima).least, workspace.num_bytes};
      }));
}

void append_on_gpu(const AttentionConfig& config, const KvView& cache, const StepArrays& step,
                   const LayerInputs& inputs, Stream stream) {
  require_gpu_of(cache);
  const device::DeviceGuard guard(cache.k.device);
  const kernels::KvPages pages = checked_pages(config, cache, true, cache.k.device);
  const kernels::CallersStep callers = callers_step(cache, step);
  dispatch::GpuWorkspace& workspace = *workspace_of(cache, step).gpu;
  check_planned(workspace, callers);
  refuse_maxima(inputs);
  // Asked of the definition, as on the CPU.
  static_cast<void>(dispatch::choose(Backend::Unfused,
                                     dispatch::make_request(config, pages.dtype, cache.k.device)));
  const kernels::AppendParams params =
      append_params(config, inputs, shape_of(callers, inputs.format, cache.k.device),
                    {workspace.batch(), {}}, pages);
  device::check_stream(cache.k.device, stream);
  workspace.append(params, stream);
}

}  // namespace api

Workspace::Workspace(Device device) {
  if (device.type != DeviceType::Cuda) base::throw_mismatch("device", "cuda", "cpu");
  if (!device::gpu_report().compiled) static_cast<void>(device::require_gpu(device, "device"));
  impl_ = std::make_unique<detail::WorkspaceImpl>();
  impl_->device = device;
  impl_->gpu = dispatch::make_gpu_workspace(device);
}

Workspace::~Workspace() = default;
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;

WorkspaceSizes Workspace::sizes(const AttentionConfig& config, const KvView& cache,
                                const StepArrays& step, const LayerInputs& inputs,
                                const TensorView& out, const TensorView* lse) {
  const AttentionConfig c = api::checked(config);
  const device::DeviceGuard guard(impl_->device);
  static_cast<void>(api::checked_pages(c, cache, false, impl_->device));
  const kernels::CallersStep callers = callers_step(cache, step);
  const AttendCall call({c, cache, step, inputs, out, lse, {}}, callers, callers.batch);
  const dispatch::CallSizes sizes =
      impl_->gpu->sizes(dispatch::choose(call.named, call.request), call.params, callers.maxima);
  return {static_cast<std::int64_t>(sizes.least), static_cast<std::int64_t>(sizes.good)};
}

void Workspace::use(void* memory, std::int64_t num_bytes) {
  if (num_bytes < 0) base::throw_mismatch("num_bytes", "at least 0", num_bytes);
  if (memory == nullptr && num_bytes > 0) base::throw_mismatch("memory", "a pointer", "null");
  constexpr std::uintptr_t kAlignment = 256;
  const std::uintptr_t beyond = reinterpret_cast<std::uintptr_t>(memory) % kAlignment;
  if (beyond != 0) {
    base::throw_mismatch("memory", fmt::format("a multiple of {} bytes", kAlignment),
                         fmt::format("{} beyond one", beyond));
  }
  const device::DeviceGuard guard(impl_->device);
  api::check_pointer("memory", memory, num_bytes, impl_->device);
  impl_->gpu->use(memory, static_cast<std::size_t>(num_bytes));
  impl_->num_bytes = static_cast<std::size_t>(num_bytes);
}

void Workspace::plan(const KvView& cache, const StepArrays& step, Stream stream) {
  const device::DeviceGuard guard(impl_->device);
  api::check_tensor("cache.k", cache.k, 4, impl_->device);
  const kernels::CallersStep callers = callers_step(cache, step);
  device::check_stream(impl_->device, stream);
  impl_->gpu->plan(callers, stream);
}

void Workspace::check(Stream stream) const {
  if (impl_->gpu->planned() == nullptr)
    base::throw_mismatch("workspace", "a step that was planned", "none");
  const device::DeviceGuard guard(impl_->device);
  device::check_stream(impl_->device, stream);
  const std::string fault = impl_->gpu->fault(stream);
  if (!fault.empty()) throw Error(ErrorCode::InvalidArgument, fault);
}

Device Workspace::device() const noexcept { return impl_->device; }

}  // namespace octavo
