// SPDX-License-Identifier: Apache-2.0
#include "testing/case.h"

#include "testing/input_error.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>

namespace octavo::testkit {

namespace {

// Lengths and their sums are int32 in the library; a case beyond that can't be meant.
constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

}  // namespace

Tolerance tolerance_of(DType dtype, Compute compute) {
  if (compute == Compute::Fp8) return {3e-1, 1e-1, 9e-2};
  if (dtype == DType::BF16) return {1.6e-2, 1.6e-2, 6e-3};
  if (dtype == DType::F16) return {2e-3, 2e-3, 8e-4};
  return {1e-5, 1e-5, 2e-6};
}

std::int64_t total_new_tokens(const CaseStep& step) {
  std::int64_t total = 0;
  for (const SequenceStep& sequence : step.sequences) total += sequence.new_tokens;
  return total;
}

std::int64_t longest_new_tokens(const CaseStep& step) {
  std::int64_t longest = 0;
  for (const SequenceStep& sequence : step.sequences) {
    longest = std::max(longest, sequence.new_tokens);
  }
  return longest;
}

std::vector<std::int64_t> shape_of(const CaseStep& step, TensorFormat format, std::int64_t heads,
                                   std::int64_t dim) {
  const auto num_seqs = static_cast<std::int64_t>(step.sequences.size());
  switch (format) {
    case TensorFormat::Bshd:
      return {num_seqs, longest_new_tokens(step), heads, dim};
    case TensorFormat::Sbhd:
      return {longest_new_tokens(step), num_seqs, heads, dim};
    case TensorFormat::Thd:
      break;
  }
  return {total_new_tokens(step), heads, dim};
}

std::int64_t row_of(TensorFormat format, const std::vector<std::int64_t>& shape,
                    std::int64_t seq_idx, std::int64_t token_idx, std::int64_t packed_start) {
  switch (format) {
    case TensorFormat::Bshd:
      return seq_idx * shape[1] + token_idx;
    case TensorFormat::Sbhd:
      return token_idx * shape[1] + seq_idx;
    case TensorFormat::Thd:
      break;
  }
  return packed_start + token_idx;
}

void Lives::apply(const CaseStep& step) {
  for (const SequenceId id : step.release) {
    if (lengths_.erase(id) == 0) {
      throw InputError(fmt::format("release: wanted a live sequence, got {}", id));
    }
  }
  for (const CaseStep::Fork& fork : step.fork) {
    const auto source = lengths_.find(fork.from);
    if (source == lengths_.end()) {
      throw InputError(fmt::format("fork: wanted a live source, got {}", fork.from));
    }
    if (!lengths_.emplace(fork.to, source->second).second) {
      throw InputError(fmt::format("fork: wanted a new id, got {}, which lives", fork.to));
    }
  }
  for (const CaseStep::Truncate& cut : step.truncate) {
    const auto life = lengths_.find(cut.id);
    if (life == lengths_.end()) {
      throw InputError(fmt::format("truncate: wanted a live sequence, got {}", cut.id));
    }
    if (cut.length < 0 || cut.length > life->second) {
      throw InputError(fmt::format("truncate of {}: wanted a length from 0 to {}, got {}", cut.id,
                                   life->second, cut.length));
    }
    life->second = cut.length;
  }
  std::set<SequenceId> listed;
  std::int64_t total = 0;
  for (const SequenceStep& sequence : step.sequences) {
    if (!listed.insert(sequence.id).second) {
      throw InputError(fmt::format("sequences: wanted each id once, got {} twice", sequence.id));
    }
    std::int64_t& length = lengths_[sequence.id];
    const std::int64_t room = kMaxTokens - std::max(length, total);
    if (sequence.new_tokens < 0 || sequence.new_tokens > room) {
      throw InputError(fmt::format("sequences: wanted from 0 to {} new tokens for {}, got {}", room,
                                   sequence.id, sequence.new_tokens));
    }
    length += sequence.new_tokens;
    total += sequence.new_tokens;
  }
}

}  // namespace octavo::testkit
