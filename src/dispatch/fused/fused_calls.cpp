// SPDX-License-Identifier: Apache-2.0
#include "dispatch/fused_calls.h"

#include <algorithm>

#include "base/error.h"
#include "device/gpu.h"
#include "kernels/cudnn/fused.h"

namespace octavo::dispatch {
namespace {

kernels::fused::Maxima fused_maxima(const kernels::StepLengths& lengths) {
  const StepMaxima step = kernels::maxima_of(lengths);
  kernels::fused::Maxima maxima{.num_seqs = step.num_seqs,
                                .num_tokens = step.num_tokens,
                                .q_len = step.max_new_tokens,
                                .kv_len = step.max_kv_len,
                                .one_page_each = lengths.one_page_each};
  if (lengths.bounded) return maxima;
  const kernels::StepBatch& host = lengths.batch;
  maxima.first_page = lengths.first_page;
  maxima.exact = maxima.uniform = true;
  for (std::int32_t b = 0; b < host.num_seqs; ++b) {
    const std::int32_t q_len = host.token_offsets[b + 1] - host.token_offsets[b];
    if (q_len > host.kv_lens[b]) maxima.exact = false;
    if (q_len != maxima.q_len || host.kv_lens[b] != maxima.kv_len) maxima.uniform = false;
  }
  return maxima;
}

}  // namespace

FusedCalls::FusedCalls(Device device) : device_(device) {}
FusedCalls::~FusedCalls() = default;

std::size_t FusedCalls::bytes(const kernels::AttendParams& params,
                              const kernels::StepLengths& lengths) {
  if (attention_ == nullptr) {
    const std::int32_t sm = device::require_gpu(device_, "device").sm;
    attention_ = std::make_unique<kernels::fused::FusedAttention>(sm);
  }
  kernels::fused::Maxima maxima = fused_maxima(lengths);
  const std::size_t bytes = attention_->workspace_bytes(params, maxima);
  if (maxima.first_page < 0) return bytes;
  // The graph for any pages too, for a caller who captures the call that he has just made: under
  // capture none can be built.
  maxima.first_page = -1;
  return std::max(bytes, attention_->workspace_bytes(params, maxima));
}

void FusedCalls::attend(const kernels::AttendParams& params, const kernels::StepLengths& lengths,
                        void* workspace, std::size_t workspace_bytes, Stream stream) {
  // cuDNN multiplies hidden V by 0 up to the end of a part. Our append leaves the slots behind each
  // end clear, but callers may write there. The last page of a sequence with new tokens is its own,
  // so clearing it again harms no sharer.
  const kernels::fused::CallOptions options{.new_step = new_step_, .clear_tails = true};
  kernels::fused::Maxima maxima = fused_maxima(lengths);
  // A captured graph is replayed with other lengths and pages; the cuDNN graph for any pages has
  // been checked.
  if (kernels::fused::is_captured(stream.handle)) {
    maxima.exact = maxima.uniform = false;
    maxima.first_page = -1;
  }
  attention_->attend(params, maxima, options, workspace, workspace_bytes, stream.handle);
  new_step_ = false;
}

}  // namespace octavo::dispatch
