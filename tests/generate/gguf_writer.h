// SPDX-License-Identifier: Apache-2.0
// Writes GGUF files into memory, good ones and, on request, bad ones, for the tests of the reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "examples/generate/quant.h"

namespace generate::testing {

class GgufWriter {
 public:
  /// Numbers of the format's value types.
  enum Type : std::uint32_t {
    kU32 = 4,
    kI32 = 5,
    kF32 = 6,
    kBool = 7,
    kText = 8,
    kArray = 9,
    kU64 = 10
  };

  std::uint32_t version = 3;
  std::int64_t extra_values = 0;  // added to the count that the header claims
  std::int64_t extra_tensors = 0;
  std::size_t alignment = 32;

  void add_u32(std::string_view key, std::uint32_t value) {
    begin_value(key, kU32);
    put(values_, value);
  }
  void add_f32(std::string_view key, float value) {
    begin_value(key, kF32);
    put(values_, value);
  }
  void add_bool(std::string_view key, bool value) {
    begin_value(key, kBool);
    put(values_, static_cast<std::uint8_t>(value));
  }
  void add_text(std::string_view key, std::string_view value) {
    begin_value(key, kText);
    put_text(values_, value);
  }
  void add_texts(std::string_view key, const std::vector<std::string>& texts) {
    begin_array(key, kText, texts.size());
    for (const std::string& text : texts) put_text(values_, text);
  }
  void add_i32s(std::string_view key, const std::vector<std::int32_t>& numbers) {
    begin_array(key, kI32, numbers.size());
    for (const std::int32_t number : numbers) put(values_, number);
  }
  /// An array's head alone: its elements, or their absence, are the caller's.
  void begin_array(std::string_view key, std::uint32_t type, std::uint64_t length) {
    begin_value(key, kArray);
    put(values_, type);
    put(values_, length);
  }
  void begin_value(std::string_view key, std::uint32_t type) {
    put_text(values_, key);
    put(values_, type);
    ++num_values_;
  }

  void add_tensor(std::string_view name, std::vector<std::uint64_t> shape, GgmlType type,
                  std::span<const std::byte> data) {
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    describe_tensor(name, shape, type, data_.size());
    data_.insert(data_.end(), data.begin(), data.end());
  }
  void add_f32_tensor(std::string_view name, std::vector<std::uint64_t> shape,
                      const std::vector<float>& values) {
    add_tensor(name, std::move(shape), GgmlType::F32, std::as_bytes(std::span(values)));
  }
  /// A directory entry alone, true or not.
  void describe_tensor(std::string_view name, const std::vector<std::uint64_t>& shape,
                       GgmlType type, std::uint64_t offset) {
    put_text(tensors_, name);
    put(tensors_, static_cast<std::uint32_t>(shape.size()));
    for (const std::uint64_t extent : shape) put(tensors_, extent);
    put(tensors_, static_cast<std::uint32_t>(type));
    put(tensors_, offset);
    ++num_tensors_;
  }

  [[nodiscard]] std::vector<std::byte> bytes() const {
    std::vector<std::byte> file;
    for (const char c : std::string_view("GGUF")) file.push_back(static_cast<std::byte>(c));
    put(file, version);
    put(file, num_tensors_ + extra_tensors);
    put(file, num_values_ + extra_values);
    file.insert(file.end(), values_.begin(), values_.end());
    file.insert(file.end(), tensors_.begin(), tensors_.end());
    file.resize((file.size() + alignment - 1) / alignment * alignment);
    file.insert(file.end(), data_.begin(), data_.end());
    return file;
  }

 private:
  template <typename T>
  static void put(std::vector<std::byte>& to, T value) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
    to.insert(to.end(), bytes, bytes + sizeof(T));
  }
  static void put_text(std::vector<std::byte>& to, std::string_view text) {
    put(to, static_cast<std::uint64_t>(text.size()));
    for (const char c : text) to.push_back(static_cast<std::byte>(c));
  }

  std::int64_t num_values_ = 0;
  std::int64_t num_tensors_ = 0;
  std::vector<std::byte> values_;
  std::vector<std::byte> tensors_;
  std::vector<std::byte> data_;
};

}  // namespace generate::testing
