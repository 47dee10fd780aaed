// SPDX-License-Identifier: Apache-2.0
// Arguments as views of tensors, and arrays made for results.
#pragma once

#include <nanobind/nanobind.h>
#include <octavo/tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "memory.h"

namespace octavo::python {

/// A tensor argument. Borrows the Python object, which the call's arguments keep alive.
class Array {
 public:
  Array() = default;
  /// Errors: InvalidArgument for what is no array or has a dtype that Octavo doesn't know.
  Array(std::string_view name, nb::handle object);

  [[nodiscard]] const TensorView& view() const { return view_; }
  [[nodiscard]] Device device() const { return view_.device; }
  [[nodiscard]] bool read_only() const { return memory_.read_only; }
  /// What to keep for as long as the memory is used beyond the call.
  [[nodiscard]] nb::object kept() const {
    return nb::make_tuple(object_, memory_.keeper_or_none());
  }
  /// Errors: InvalidArgument when it is read-only.
  [[nodiscard]] const TensorView& writable(std::string_view name) const;

  /// A new array of the same framework and device, uninitialised; of float32 or this one's dtype.
  [[nodiscard]] nb::object make(std::span<const std::int64_t> shape, bool float32) const;
  /// What to hand out for an array that `make` made: it itself, or the framework's own over it.
  [[nodiscard]] nb::object finish(nb::object made) const;

 private:
  TensorView view_;
  Memory memory_;
  nb::handle object_;  // as given
  nb::handle inner_;   // the array inside a TypedArray
};

/// Where a result goes: an array of the caller's, or a new one like another argument.
class Result {
 public:
  Result() = default;
  /// `given` None: a new array, else the caller's, which must be writable.
  Result(std::string_view name, nb::handle given, const Array& like,
         std::span<const std::int64_t> shape, bool float32 = false);

  [[nodiscard]] const TensorView& view() const { return array_.view(); }
  [[nodiscard]] nb::object finish();

 private:
  Array array_;
  nb::object object_;
  const Array* like_ = nullptr;  // only for a new one
};

/// Which axes of a caller's LSE are the tokens and the heads; what else it has is of extent 1.
struct LseAxes {
  std::size_t token = 0, head = 1;
};

/// The optional result `lse`: False or None: none; True: a new array; else the caller's.
class LseResult {
 public:
  LseResult(nb::handle given, const Array& like, std::int64_t num_tokens, std::int64_t num_q_heads);
  LseResult(nb::handle given, const Array& like, std::int64_t num_tokens, std::int64_t num_q_heads,
            LseAxes axes);

  [[nodiscard]] const TensorView* view() const { return wanted_ ? &view_ : nullptr; }
  /// `out`, or the pair (out, lse).
  [[nodiscard]] nb::object beside(nb::object out);

 private:
  bool wanted_ = false;
  Result result_;
  TensorView view_;
};

/// Float32 numbers of the caller's, dense, on `device`; null for None. One axis of `count`.
const float* floats(std::string_view name, nb::handle object, std::int64_t count, Device device);

/// Integers of the caller's, int32 and dense on `device`; null for None.
///
/// On the host a list, a tuple or an int64 array is taken too, and copied.
class Integers {
 public:
  Integers() = default;
  Integers(Integers&&) = default;  // a copy would look into the other's list
  Integers& operator=(Integers&&) = default;
  Integers(std::string_view name, nb::handle object, Device device);

  [[nodiscard]] const std::int32_t* data() const { return data_; }
  [[nodiscard]] std::int64_t size() const { return size_; }
  /// Errors: InvalidArgument unless there are `count`; fine when there are none at all.
  void require(std::string_view name, std::int64_t count) const;

 private:
  void read_array(std::string_view name, nb::handle object, Device device);
  void read_sequence(std::string_view name, nb::handle object);

  const std::int32_t* data_ = nullptr;
  std::int64_t size_ = 0;
  std::vector<std::int32_t> copied_;
};

/// "[2, 3]"
std::string shape_text(const Memory& memory);

}  // namespace octavo::python
