// SPDX-License-Identifier: Apache-2.0
// The GPU's side of a workspace for caches of the caller's: the planned step at its front, the
// backends' scratch behind.
#include <algorithm>
#include <optional>
#include <vector>

#include "base/error.h"
#include "device/gpu.h"
#include "dispatch/cuda/backend_calls.h"
#include "dispatch/gpu.h"
#include "kernels/cuda/append/append.h"
#include "kernels/cuda/plan/plan.h"

namespace octavo::dispatch {
namespace {

using kernels::cuda::Fault;
using kernels::cuda::PlanFault;

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Where the planned step's arrays lie, in bytes.
struct Places {
  explicit Places(const StepMaxima& maxima) {
    const auto n = static_cast<std::size_t>(maxima.num_seqs);
    const auto tokens = static_cast<std::size_t>(maxima.num_tokens);
    const auto take = [&](std::size_t bytes) {
      const std::size_t at = end;
      end += aligned(bytes);
      return at;
    };
    token_offsets = take((n + 1) * sizeof(std::int32_t));
    kv_lens = take(n * sizeof(std::int32_t));
    rows = take(n * sizeof(std::int32_t));
    faults = take((n + 1) * sizeof(PlanFault));
    token_slots = take(tokens * sizeof(kernels::TokenSlot));
    token_indices = take(tokens * sizeof(kernels::TokenIndex));
  }
  std::size_t token_offsets = 0, kv_lens = 0, rows = 0, faults = 0;
  std::size_t token_slots = 0, token_indices = 0;
  std::size_t end = 0;
};

std::string text_of(const kernels::CallersStep& step, const PlanFault& fault, std::int32_t b) {
  const auto text = [&](const std::string& argument, const std::string& wanted) {
    return base::mismatch_text(argument, wanted, fault.value, "");
  };
  switch (fault.kind) {
    case Fault::None:
      break;
    case Fault::FirstOffset:
      return text("step.token_offsets[0]", "0");
    case Fault::FallingOffset:
      return text(fmt::format("step.token_offsets[{}]", fault.index),
                  "no less than the one before");
    case Fault::NewTokens:
      return text(fmt::format("the new tokens of sequence {}", fault.index),
                  fmt::format("at most {} (step.max_new_tokens)", step.maxima.max_new_tokens));
    case Fault::NumTokens:
      return text(fmt::format("step.token_offsets[{}]", fault.index),
                  fmt::format("at most {} (step.num_tokens)", step.maxima.num_tokens));
    case Fault::Row:
      return text(step.batch.rows != nullptr ? fmt::format("cache.row_indices[{}]", b)
                                             : fmt::format("the row of sequence {}", b),
                  fmt::format("0 … {}", step.num_rows - 1));
    case Fault::Length:
      return text(
          fmt::format("step.kv_lens[{}]", b),
          fmt::format("0 … {}", std::min(step.max_slots, std::int64_t{step.maxima.max_kv_len})));
    case Fault::Page:
      return text(fmt::format("entry {} of the page table's row of sequence {}", fault.index, b),
                  fmt::format("0 … {}", step.num_pages - 1));
  }
  return {};
}

class CudaWorkspace final : public GpuWorkspace {
 public:
  explicit CudaWorkspace(Device device) : backends_(device) {}

  CallSizes sizes(Backend backend, const kernels::AttendParams& params,
                  const StepMaxima& maxima) override {
    const std::size_t plan = Places(maxima).end;
    const kernels::StepLengths lengths{.bounded = true, .maxima = maxima};
    return {plan + backends_.least_bytes(backend, params, lengths),
            plan + backends_.good_bytes(backend, params, lengths)};
  }

  void use(void* memory, std::size_t num_bytes) override {
    memory_ = static_cast<std::byte*>(memory);
    num_bytes_ = num_bytes;
    planned_.reset();
    backends_.new_step();
  }

  void plan(const kernels::CallersStep& step, Stream stream) override {
    const Places places(step.maxima);
    if (num_bytes_ < places.end) {
      base::throw_mismatch("workspace_bytes",
                           fmt::format("at least {} for a step of {} sequences and {} tokens",
                                       places.end, step.maxima.num_seqs, step.maxima.num_tokens),
                           num_bytes_);
    }
    planned_.reset();
    const auto at = [&](std::size_t place) {
      return reinterpret_cast<std::int32_t*>(memory_ + place);
    };
    const kernels::cuda::PlannedStep to{
        .token_offsets = at(places.token_offsets),
        .kv_lens = at(places.kv_lens),
        .rows = at(places.rows),
        .faults = reinterpret_cast<PlanFault*>(memory_ + places.faults),
        .token_slots = reinterpret_cast<kernels::TokenSlot*>(memory_ + places.token_slots),
        .token_indices = reinterpret_cast<kernels::TokenIndex*>(memory_ + places.token_indices)};
    device::check(kernels::cuda::plan_step(step, to, stream.handle), "plan_step");
    device::sync_if_asked(stream, "plan_step");
    backends_.new_step();
    planned_ = step;
    arrays_ = to;
    scratch_offset_ = places.end;
  }

  [[nodiscard]] const kernels::CallersStep* planned() const override {
    return planned_ ? &*planned_ : nullptr;
  }

  [[nodiscard]] kernels::StepBatch batch() const override {
    kernels::StepBatch batch = planned_->batch;
    batch.token_offsets = arrays_.token_offsets;
    batch.kv_lens = arrays_.kv_lens;
    if (batch.rows != nullptr) batch.rows = arrays_.rows;
    batch.token_slots = arrays_.token_slots;
    batch.token_indices = arrays_.token_indices;
    batch.max_token_slots = planned_->maxima.num_tokens;
    return batch;
  }

  [[nodiscard]] std::string fault(Stream stream) override {
    const auto n = static_cast<std::size_t>(planned_->maxima.num_seqs);
    std::vector<PlanFault> faults(n + 1);
    device::read_back(faults.data(), arrays_.faults, faults.size() * sizeof(PlanFault), stream);
    if (faults[n].kind != Fault::None)
      return text_of(*planned_, faults[n], static_cast<std::int32_t>(n));
    for (std::size_t b = 0; b < n; ++b) {
      if (faults[b].kind != Fault::None)
        return text_of(*planned_, faults[b], static_cast<std::int32_t>(b));
    }
    return {};
  }

  void append(const kernels::AppendParams& params, Stream stream) override {
    device::check(kernels::cuda::append(params, append_overlaps_, stream.handle), "append");
    device::sync_if_asked(stream, "append");
  }

  WorkspaceBytes workspace_for(Backend backend, const kernels::AttendParams& params) override {
    return {backends_.least_bytes(backend, params, lengths()), num_bytes_ - scratch_offset_};
  }

  void attend(Backend backend, const kernels::AttendParams& params, Stream stream) override {
    backends_.attend(backend, params, lengths(), memory_ + scratch_offset_,
                     num_bytes_ - scratch_offset_, stream);
  }

 private:
  [[nodiscard]] kernels::StepLengths lengths() const {
    return {.bounded = true, .maxima = planned_->maxima};
  }

  std::byte* memory_ = nullptr;
  std::size_t num_bytes_ = 0;
  std::optional<kernels::CallersStep> planned_;
  kernels::cuda::PlannedStep arrays_;
  std::size_t scratch_offset_ = 0;
  BackendCalls backends_;
  bool append_overlaps_ = kernels::cuda::append_may_overlap();
};

}  // namespace

std::unique_ptr<GpuWorkspace> make_gpu_workspace(Device device) {
  static_cast<void>(device::require_gpu(device, "device"));
  const device::DeviceGuard guard(device);
  return std::make_unique<CudaWorkspace>(device);
}

}  // namespace octavo::dispatch
