// SPDX-License-Identifier: Apache-2.0
// A cache of the caller's own and a step over it, read from arguments.
#pragma once

#include <nanobind/nanobind.h>
#include <octavo/attention.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "array.h"

namespace octavo::python {

class WorkspaceHolder;

/// A cache of the caller's as it is given.
struct CacheWords {
  nb::handle k_cache, v_cache, page_table, row_indices;
  /// k_cache and v_cache are [tokens, heads, dim], taken for pages of one token, and row_indices
  /// the prefix sums [num_seqs + 1] of the tokens, of which the last one is no row.
  bool packed = false;
};

/// A step over it as it is given. The last three are for GPUs.
struct StepWords {
  nb::handle kv_lens, token_offsets;
  std::int32_t max_new_tokens = 0, max_kv_len = 0;
  WorkspaceHolder* workspace = nullptr;
};

class CallersCache {
 public:
  explicit CallersCache(const CacheWords& words);

  void require_writable() const;
  [[nodiscard]] const KvView& view() const { return view_; }
  [[nodiscard]] const Array& keys() const { return keys_; }
  [[nodiscard]] const Array& values() const { return values_; }
  /// Errors: InvalidArgument unless the row indices, if there are any, are of so many sequences.
  void require_rows(std::int64_t num_seqs) const {
    row_indices_.require("row_indices", num_seqs + (packed_ ? 1 : 0));
  }

 private:
  bool packed_;
  Array keys_, values_;
  Integers row_indices_;
  Memory page_table_;
  KvView view_;
};

/// Prefix sums of new tokens, as given or (None) equally many for each of num_seqs sequences.
class TokenOffsets {
 public:
  TokenOffsets() = default;
  TokenOffsets(TokenOffsets&&) = default;  // as Integers
  TokenOffsets& operator=(TokenOffsets&&) = default;
  /// num_seqs: -1 when only `given` or the tensor tells.
  TokenOffsets(nb::handle given, std::string_view name, const Array& tensor, TensorFormat format,
               std::int64_t num_seqs);

  [[nodiscard]] const std::int32_t* data() const { return data_; }
  [[nodiscard]] std::int32_t num_seqs() const { return num_seqs_; }
  /// On a GPU: as many as the tensor has room for.
  [[nodiscard]] std::int32_t num_tokens() const { return num_tokens_; }

 private:
  void set_equal(std::string_view name, const Array& tensor, TensorFormat format);

  Integers given_;
  std::vector<std::int32_t> equal_;
  const std::int32_t* data_ = nullptr;
  std::int32_t num_seqs_ = 0;
  std::int32_t num_tokens_ = 0;
};

class CallersStep {
 public:
  /// With the new tokens of `tensor`, which is called `name`.
  CallersStep(const StepWords& words, std::string_view name, const Array& tensor,
              TensorFormat format, const CallersCache& cache);
  /// With at most num_tokens of them, on a GPU.
  CallersStep(const StepWords& words, std::int32_t num_tokens, const CallersCache& cache);
  /// Without new tokens.
  CallersStep(nb::handle kv_lens, const CallersCache& cache);

  [[nodiscard]] const StepArrays& arrays() const { return arrays_; }
  /// Errors: InvalidArgument on a GPU, where the host doesn't see the lengths: `argument` is
  /// wanted.
  [[nodiscard]] std::int64_t longest_kv_len(std::string_view argument) const;

 private:
  void set_maxima(const StepWords& words);

  Integers kv_lens_;
  TokenOffsets offsets_;
  Integers given_offsets_;
  StepArrays arrays_;
  Device device_;
};

}  // namespace octavo::python
