// SPDX-License-Identifier: Apache-2.0
#include "testing/safetensors.h"

#include "testing/input_error.h"
#include "testing/json_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

namespace octavo::testkit {

namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr std::int64_t kMaxExtent = std::numeric_limits<std::int64_t>::max();

std::optional<std::uint64_t> element_bytes(std::string_view dtype) {
  struct Known {
    std::string_view name;
    std::uint64_t bytes;
  };
  static constexpr Known kKnown[] = {{"F64", 8}, {"I64", 8}, {"U64", 8},     {"F32", 4},
                                     {"I32", 4}, {"U32", 4}, {"F16", 2},     {"BF16", 2},
                                     {"I16", 2}, {"U16", 2}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
                                     {"I8", 1},  {"U8", 1},  {"BOOL", 1}};
  for (const Known& known : kKnown) {
    if (known.name == dtype) return known.bytes;
  }
  return std::nullopt;
}

// a * b, or nothing when it doesn't fit.
std::optional<std::uint64_t> product(std::uint64_t a, std::uint64_t b) {
  if (b != 0 && a > static_cast<std::uint64_t>(kMaxExtent) / b) return std::nullopt;
  return a * b;
}

std::uint64_t header_bytes(const std::vector<std::byte>& bytes) {
  if (bytes.size() < kLengthBytes) {
    throw InputError(
        fmt::format("safetensors: wanted at least {} bytes, got {}", kLengthBytes, bytes.size()));
  }
  std::uint64_t length = 0;
  for (std::uint64_t i = kLengthBytes; i-- > 0;) {
    length = (length << 8) | std::to_integer<std::uint64_t>(bytes[i]);
  }
  const std::uint64_t room = bytes.size() - kLengthBytes;
  if (length > std::min(room, kMaxHeaderBytes)) {
    throw InputError(fmt::format("safetensors: wanted a header of at most {} bytes, got {}",
                                 std::min(room, kMaxHeaderBytes), length));
  }
  return length;
}

StoredTensor parse_tensor(const std::string& name, const Json& entry,
                          std::span<const std::byte> room) {
  const std::string what = fmt::format("tensor '{}'", printable(name));
  StoredTensor tensor;
  tensor.dtype = text(member(object(entry, what), "dtype", what), what + " dtype");
  std::optional<std::uint64_t> size = element_bytes(tensor.dtype);
  if (!size) {
    throw InputError(fmt::format("{} dtype: wanted one of safetensors' byte-sized ones, got '{}'",
                                 what, printable(tensor.dtype)));
  }
  for (const Json& extent : array(member(entry, "shape", what), what + " shape")) {
    tensor.shape.push_back(integer(extent, 0, kMaxExtent, what + " shape"));
  }
  // A zero anywhere makes the tensor empty, whatever the other extents would overflow to.
  const bool empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
  for (const std::int64_t extent : tensor.shape) {
    if (size) size = product(*size, static_cast<std::uint64_t>(extent));
  }
  if (empty) size = 0;
  if (!size)
    throw InputError(fmt::format("{} shape: wanted fewer than 2^63 bytes, got more", what));

  const std::string where = what + " data_offsets";
  const Json& offsets = pair(member(entry, "data_offsets", what), where);
  const auto begin = static_cast<std::uint64_t>(integer(offsets[0], 0, kMaxExtent, where));
  const auto end = static_cast<std::uint64_t>(integer(offsets[1], 0, kMaxExtent, where));
  if (begin > end || end > room.size()) {
    throw InputError(
        fmt::format("{}: wanted begin <= end <= {}, got [{}, {}]", where, room.size(), begin, end));
  }
  if (end - begin != *size) {
    throw InputError(fmt::format("{}: wanted {} bytes as dtype and shape say, got {}", where, *size,
                                 end - begin));
  }
  tensor.bytes = room.subspan(begin, end - begin);
  return tensor;
}

// The tensors cover the data without holes or overlaps.
void check_cover(const std::map<std::string, StoredTensor>& tensors,
                 std::span<const std::byte> room) {
  struct Extent {
    const std::byte* begin;
    const std::byte* end;
    const std::string* name;
  };
  std::vector<Extent> extents;
  extents.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    extents.push_back({tensor.bytes.data(), tensor.bytes.data() + tensor.bytes.size(), &name});
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  const std::byte* covered = room.data();
  for (const Extent& extent : extents) {
    if (extent.begin != covered) {
      throw InputError(fmt::format("tensor '{}' data_offsets: wanted begin {}, got {} ({})",
                                   printable(*extent.name), covered - room.data(),
                                   extent.begin - room.data(),
                                   extent.begin < covered ? "it overlaps another" : "a hole"));
    }
    covered = extent.end;
  }
  if (covered != room.data() + room.size()) {
    throw InputError(fmt::format("safetensors: wanted {} bytes of tensors, got {}",
                                 covered - room.data(), room.size()));
  }
}

}  // namespace

SafeTensors SafeTensors::parse(std::vector<std::byte> bytes) {
  SafeTensors file;
  file.bytes_ = std::move(bytes);
  const std::uint64_t length = header_bytes(file.bytes_);
  const std::span<const std::byte> all(file.bytes_);
  const std::span<const std::byte> room = all.subspan(kLengthBytes + length);
  const std::string_view source(reinterpret_cast<const char*>(all.data() + kLengthBytes), length);
  const Json header = parse_json_object(source, "safetensors header");
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      file.tensors_.emplace(name, parse_tensor(name, entry, room));
      continue;
    }
    for (const auto& [key, value] : object(entry, "__metadata__").items()) {
      file.metadata_.emplace(key, text(value, "__metadata__ '" + printable(key) + "'"));
    }
  }
  check_cover(file.tensors_, room);
  return file;
}

SafeTensors SafeTensors::read(const std::filesystem::path& path) {
  std::error_code code;
  if (!std::filesystem::exists(path, code)) throw InputError("file: wanted one, got none there");
  if (!std::filesystem::is_regular_file(path, code)) {
    throw InputError("file: wanted a regular file, got another kind");
  }
  const std::uintmax_t size = std::filesystem::file_size(path, code);
  std::ifstream stream(path, std::ios::binary);
  if (code || !stream) throw InputError("file: wanted a readable one, got none");
  std::vector<std::byte> bytes(size);
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  if (static_cast<std::uintmax_t>(stream.gcount()) != size) {
    throw InputError(fmt::format("file: wanted {} bytes, got {}", size, stream.gcount()));
  }
  return parse(std::move(bytes));
}

std::vector<std::byte> write_safetensors(const std::map<std::string, StoredTensor>& tensors,
                                         const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    std::optional<std::uint64_t> size = element_bytes(tensor.dtype);
    for (const std::int64_t extent : tensor.shape) {
      if (size) size = product(*size, static_cast<std::uint64_t>(extent));
    }
    if (!size || *size != tensor.bytes.size()) {
      throw InputError(fmt::format("tensor '{}': wanted bytes as dtype and shape say, got {}",
                                   printable(name), tensor.bytes.size()));
    }
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {offset, offset + *size}}};
    offset += *size;
  }
  std::string source = header.dump();
  source.resize((source.size() + 7) / 8 * 8, ' ');  // tensors start aligned

  std::vector<std::byte> bytes(kLengthBytes + source.size() + offset);
  for (std::uint64_t i = 0; i < kLengthBytes; ++i) {
    bytes[i] = static_cast<std::byte>(source.size() >> (8 * i));
  }
  std::memcpy(bytes.data() + kLengthBytes, source.data(), source.size());
  std::byte* data = bytes.data() + kLengthBytes + source.size();
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.bytes.empty()) std::memcpy(data, tensor.bytes.data(), tensor.bytes.size());
    data += tensor.bytes.size();
  }
  return bytes;
}

}  // namespace octavo::testkit
