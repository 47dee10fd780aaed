// SPDX-License-Identifier: Apache-2.0
#include "dispatch/fused_calls.h"

#include <algorithm>

#include "base/error.h"
#include "device/gpu.h"
#include "kernels/cudnn/fused.h"

namespace octavo::dispatch {
namespace {

kernels::fused::Maxima maxima_of(const kernels::StepLengths& lengths) {
  kernels::fused::Maxima maxima;
  if (lengths.bounded) {
    maxima.num_seqs = lengths.maxima.num_seqs;
    maxima.num_tokens = lengths.maxima.num_tokens;
    maxima.q_len = lengths.maxima.max_new_tokens;
    maxima.kv_len = lengths.maxima.max_kv_len;
    return maxima;
  }
  const kernels::StepBatch& host = lengths.batch;
  maxima.first_page = lengths.first_page;
  maxima.num_seqs = host.num_seqs;
  maxima.num_tokens = host.num_tokens;
  maxima.exact = maxima.uniform = true;
  for (std::int32_t b = 0; b < host.num_seqs; ++b) {
    const std::int32_t q_len = host.token_offsets[b + 1] - host.token_offsets[b];
    const std::int32_t kv_len = host.kv_lens[b];
    maxima.q_len = std::max(maxima.q_len, q_len);
    maxima.kv_len = std::max(maxima.kv_len, kv_len);
    if (q_len > kv_len) maxima.exact = false;
    if (q_len != host.token_offsets[1] - host.token_offsets[0] || kv_len != host.kv_lens[0])
      maxima.uniform = false;
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
  kernels::fused::Maxima maxima = maxima_of(lengths);
  const std::size_t bytes = attention_->workspace_bytes(params, maxima);
  if (maxima.first_page < 0) return bytes;
  // The graph by the table too, for a caller who captures the call that he has just made: under
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
  kernels::fused::Maxima maxima = maxima_of(lengths);
  // A captured graph is replayed with other lengths; its caches go by a table, and the cuDNN graph
  // by the table has been checked.
  if (kernels::fused::is_captured(stream.handle)) {
    maxima.exact = maxima.uniform = false;
    maxima.first_page = -1;
  }
  attention_->attend(params, maxima, options, workspace, workspace_bytes, stream.handle);
  new_step_ = false;
}

}  // namespace octavo::dispatch
