// SPDX-License-Identifier: Apache-2.0
// GGUF files (versions 2 and 3): metadata and tensors, read in place from the mapped file. Nothing
// in the file is believed: every count, length and offset is checked against what is there.
// What the keys mean is for others: tokenizer.h, chat.h, weights.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "examples/generate/quant.h"

namespace generate {

/// A file in memory, read-only, for as long as a copy of this lives.
class MappedFile {
 public:
  /// Errors: InvalidArgument when the file cannot be opened, is not a plain file, or is empty.
  explicit MappedFile(const std::string& path);

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::shared_ptr<void> mapping_;
  std::span<const std::byte> bytes_;
};

struct GgufTensor {
  std::string_view name;
  GgmlType type = GgmlType::F32;
  std::vector<std::int64_t> shape;  ///< Innermost first: a matrix is {columns, rows}.
  std::int64_t num_elements = 0;
  std::span<const std::byte> data;  ///< Empty for a type that cannot be read.
};

/// The parsed directory of a file.
///
/// Views point into the bytes that were parsed, which must outlive it. Errors of all functions:
/// InvalidArgument with the file's name, what was wanted, and what was found.
class Gguf {
 public:
  /// `name` stands in front of error messages.
  Gguf(std::span<const std::byte> bytes, std::string_view name);

  /// Values by key; nothing when the key is absent. A value of another kind is an error.
  [[nodiscard]] std::optional<std::string_view> text(std::string_view key) const;
  [[nodiscard]] std::optional<std::int64_t> integer(std::string_view key) const;
  [[nodiscard]] std::optional<double> number(std::string_view key) const;
  [[nodiscard]] std::optional<bool> boolean(std::string_view key) const;
  /// Arrays; empty when absent.
  [[nodiscard]] std::span<const std::string_view> texts(std::string_view key) const;
  [[nodiscard]] std::vector<std::int64_t> integers(std::string_view key) const;

  [[nodiscard]] bool has(std::string_view key) const { return values_.contains(key); }
  [[nodiscard]] const GgufTensor* find_tensor(std::string_view name) const;
  [[nodiscard]] std::span<const GgufTensor> tensors() const noexcept { return tensors_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

 private:
  class Cursor;

  struct Array {
    std::vector<std::int64_t> integers;
    std::vector<std::string_view> texts;
    std::string kind;
  };
  using Value = std::variant<std::int64_t, double, bool, std::string_view, Array>;

  Value read_value(Cursor& cursor, std::uint32_t type, std::string_view key) const;
  Value read_array(Cursor& cursor, std::string_view key) const;
  void read_values(Cursor& cursor, std::uint64_t count);
  void read_tensors(Cursor& cursor, std::uint64_t count);
  GgufTensor read_tensor(Cursor& cursor, std::uint64_t& offset) const;
  void place(GgufTensor& tensor, std::uint64_t offset, std::span<const std::byte> data) const;
  void demand_disjoint() const;

  template <typename T>
  [[nodiscard]] const T* get(std::string_view key, const char* wanted) const;

  std::string name_;
  std::map<std::string_view, Value> values_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string_view, std::size_t> tensor_idx_;
};

}  // namespace generate
