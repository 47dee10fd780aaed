// SPDX-License-Identifier: Apache-2.0
// Reads and writes safetensors files: eight bytes of header length, a JSON header, raw tensors.
// Every number in a file is checked before it is used; a hostile file costs an InputError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace octavo::testkit {

/// One tensor of a file, still as the file spells it.
struct StoredTensor {
  std::string dtype;  ///< "F32", "BF16", …
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  ///< Not aligned.
};

/// A whole file. Owns the bytes that the tensors show.
class SafeTensors {
 public:
  /// Errors: InputError when the bytes are no safetensors file.
  static SafeTensors parse(std::vector<std::byte> bytes);
  /// Errors: InputError when the file can't be read, or as parse.
  static SafeTensors read(const std::filesystem::path& path);

  SafeTensors(SafeTensors&&) = default;
  SafeTensors& operator=(SafeTensors&&) = default;
  SafeTensors(const SafeTensors&) = delete;
  SafeTensors& operator=(const SafeTensors&) = delete;
  ~SafeTensors() = default;

  [[nodiscard]] const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  SafeTensors() = default;

  std::vector<std::byte> bytes_;
  std::map<std::string, StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// The bytes of a safetensors file. Errors: InputError for a dtype that the format doesn't know, or
/// bytes that don't fit the shape.
std::vector<std::byte> write_safetensors(const std::map<std::string, StoredTensor>& tensors,
                                         const std::map<std::string, std::string>& metadata);

}  // namespace octavo::testkit
