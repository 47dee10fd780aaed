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

class CallersCache {
 public:
  CallersCache(nb::handle k_cache, nb::handle v_cache, nb::handle page_table,
               nb::handle row_indices);

  void require_writable() const;
  [[nodiscard]] const KvView& view() const { return view_; }
  [[nodiscard]] const Array& keys() const { return keys_; }
  [[nodiscard]] const Array& values() const { return values_; }
  [[nodiscard]] const Integers& row_indices() const { return row_indices_; }

 private:
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
  CallersStep(nb::handle kv_lens, nb::handle token_offsets, std::string_view name,
              const Array& tensor, TensorFormat format, const CallersCache& cache);
  /// Without new tokens.
  CallersStep(nb::handle kv_lens, const CallersCache& cache);

  [[nodiscard]] const StepArrays& arrays() const { return arrays_; }
  /// Errors: InvalidArgument on a GPU, where the host doesn't see the lengths: `argument` is
  /// wanted.
  [[nodiscard]] std::int64_t longest_kv_len(std::string_view argument) const;

 private:
  Integers kv_lens_;
  TokenOffsets offsets_;
  StepArrays arrays_;
  Device device_;
};

}  // namespace octavo::python
