// SPDX-License-Identifier: Apache-2.0
// The GGUF reader.
#include "examples/generate/gguf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "examples/generate/error.h"

namespace generate {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF is read in place");

constexpr std::int64_t kMaxElements = std::int64_t{1} << 48;
constexpr std::size_t kMaxRank = 4;

// Numbers of the value types, as the format has them.
enum : std::uint32_t {
  TypeU8,
  TypeI8,
  TypeU16,
  TypeI16,
  TypeU32,
  TypeI32,
  TypeF32,
  TypeBool,
  TypeText,
  TypeArray,
  TypeU64,
  TypeI64,
  TypeF64
};

constexpr std::array<const char*, 13> kValueNames = {
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"};
constexpr std::array<std::uint64_t, 13> kValueBytes = {1, 1, 2, 2, 4, 4, 4, 1, 8, 0, 8, 8, 8};

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) fail("{}: wanted a readable file, got: {}", printable(path), std::strerror(errno));
  struct stat status {};
  const bool plain = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  const auto size = plain ? static_cast<std::size_t>(status.st_size) : 0;
  void* at = size > 0 ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  const int map_error = errno;
  close(file);
  if (!plain) fail("{}: wanted a plain file, got a directory or a device", printable(path));
  if (size == 0) fail("{}: wanted a GGUF file, got an empty one", printable(path));
  if (at == MAP_FAILED) {
    fail("{}: wanted to map {} bytes, got: {}", printable(path), size, std::strerror(map_error));
  }
  mapping_ = std::shared_ptr<void>(at, [size](void* mapped) { munmap(mapped, size); });
  bytes_ = {static_cast<const std::byte*>(at), size};
}

// Reads forward and refuses to pass the end.
class Gguf::Cursor {
 public:
  Cursor(std::span<const std::byte> bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  [[nodiscard]] std::size_t offset() const noexcept { return at_; }
  [[nodiscard]] std::uint64_t left() const noexcept { return bytes_.size() - at_; }

  std::span<const std::byte> take(std::uint64_t count, const char* what) {
    if (count > left()) {
      fail("{}: wanted {} bytes for {} at offset {}, got {} (truncated or damaged?)", name_, count,
           what, at_, left());
    }
    const auto taken = bytes_.subspan(at_, static_cast<std::size_t>(count));
    at_ += taken.size();
    return taken;
  }

  template <typename T>
  T number(const char* what) {
    T value;
    std::memcpy(&value, take(sizeof(T), what).data(), sizeof(T));
    return value;
  }

  std::string_view text(const char* what) {
    const auto length = number<std::uint64_t>(what);
    const auto taken = take(length, what);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }

  // A count of things that take at least `least_bytes` each, so that no allocation can outgrow the
  // file.
  std::uint64_t count(std::uint64_t value, std::uint64_t least_bytes, const char* what) const {
    if (value > left() / least_bytes) {
      fail("{}: wanted at most {} {} in the {} bytes left, got {} (truncated or damaged?)", name_,
           left() / least_bytes, what, left(), value);
    }
    return value;
  }

 private:
  std::span<const std::byte> bytes_;
  const std::string& name_;
  std::size_t at_ = 0;
};

Gguf::Gguf(std::span<const std::byte> bytes, std::string_view name) : name_(printable(name)) {
  Cursor cursor(bytes, name_);
  const auto magic = cursor.take(4, "the magic");
  if (std::memcmp(magic.data(), "GGUF", 4) != 0) {
    fail("{}: wanted a GGUF file, got another format (its first bytes: \"{}\")", name_,
         printable({reinterpret_cast<const char*>(magic.data()), 4}));
  }
  const auto version = cursor.number<std::uint32_t>("the version");
  if (version != 2 && version != 3) {
    const bool swapped = version != 0 && (version & 0xFFFFU) == 0;
    fail("{}: wanted GGUF version 2 or 3, got {}", name_,
         swapped ? std::string("a big-endian file") : fmt::format("version {}", version));
  }
  const auto num_tensors = cursor.number<std::uint64_t>("the number of tensors");
  const auto num_values = cursor.number<std::uint64_t>("the number of metadata keys");
  read_values(cursor, cursor.count(num_values, 13, "metadata keys"));
  read_tensors(cursor, cursor.count(num_tensors, 24, "tensors"));
}

Gguf::Value Gguf::read_value(Cursor& cursor, std::uint32_t type, std::string_view key) const {
  const char* what = "a metadata value";
  switch (type) {
    case TypeU8:
      return std::int64_t{cursor.number<std::uint8_t>(what)};
    case TypeI8:
      return std::int64_t{cursor.number<std::int8_t>(what)};
    case TypeU16:
      return std::int64_t{cursor.number<std::uint16_t>(what)};
    case TypeI16:
      return std::int64_t{cursor.number<std::int16_t>(what)};
    case TypeU32:
      return std::int64_t{cursor.number<std::uint32_t>(what)};
    case TypeI32:
      return std::int64_t{cursor.number<std::int32_t>(what)};
    case TypeI64:
      return cursor.number<std::int64_t>(what);
    case TypeU64: {
      const auto value = cursor.number<std::uint64_t>(what);
      if (!std::in_range<std::int64_t>(value)) {
        fail("{}: {}: wanted at most 2^63 - 1, got {}", name_, printable(key), value);
      }
      return static_cast<std::int64_t>(value);
    }
    case TypeF32:
      return static_cast<double>(cursor.number<float>(what));
    case TypeF64:
      return cursor.number<double>(what);
    case TypeBool:
      return cursor.number<std::uint8_t>(what) != 0;
    case TypeText:
      return cursor.text(what);
    case TypeArray:
      return read_array(cursor, key);
    default:
      fail("{}: {}: wanted a value type up to {}, got {}", name_, printable(key),
           kValueNames.size() - 1, type);
  }
}

Gguf::Value Gguf::read_array(Cursor& cursor, std::string_view key) const {
  const auto type = cursor.number<std::uint32_t>("an array's type");
  const auto length = cursor.number<std::uint64_t>("an array's length");
  if (type >= kValueNames.size() || type == TypeArray) {
    fail("{}: {}: wanted an array of numbers or strings, got one of {}", name_, printable(key),
         type == TypeArray ? std::string("arrays") : fmt::format("type {}", type));
  }
  cursor.count(length, kValueBytes[type], "array elements");
  Array array;
  array.kind = fmt::format("array of {}", kValueNames[type]);
  if (type == TypeText) {
    array.texts.reserve(static_cast<std::size_t>(length));
    for (std::uint64_t i = 0; i < length; ++i) array.texts.push_back(cursor.text("a string"));
  } else if (type == TypeF32 || type == TypeF64) {
    // Scores and the like: nobody here reads them.
    cursor.take(length * kValueBytes[type], "an array");
  } else {
    array.integers.reserve(static_cast<std::size_t>(length));
    for (std::uint64_t i = 0; i < length; ++i) {
      const Value element = read_value(cursor, type, key);
      const auto* value = std::get_if<std::int64_t>(&element);
      array.integers.push_back(value != nullptr ? *value : std::int64_t{std::get<bool>(element)});
    }
  }
  return array;
}

void Gguf::read_values(Cursor& cursor, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string_view key = cursor.text("a metadata key");
    const auto type = cursor.number<std::uint32_t>("a value type");
    if (!values_.emplace(key, read_value(cursor, type, key)).second) {
      fail("{}: wanted each metadata key once, got {} twice", name_, printable(key));
    }
  }
}

GgufTensor Gguf::read_tensor(Cursor& cursor, std::uint64_t& offset) const {
  GgufTensor tensor;
  tensor.name = cursor.text("a tensor's name");
  const auto rank = cursor.number<std::uint32_t>("a tensor's rank");
  if (rank == 0 || rank > kMaxRank) {
    fail("{}: tensor {}: wanted 1 to {} dimensions, got {}", name_, printable(tensor.name),
         kMaxRank, rank);
  }
  tensor.num_elements = 1;
  for (std::uint32_t axis = 0; axis < rank; ++axis) {
    const auto extent = cursor.number<std::uint64_t>("a tensor's shape");
    if (extent == 0 || extent > static_cast<std::uint64_t>(kMaxElements / tensor.num_elements)) {
      fail("{}: tensor {}: wanted 1 to 2^48 elements, got extent {} on axis {}", name_,
           printable(tensor.name), extent, axis);
    }
    tensor.shape.push_back(static_cast<std::int64_t>(extent));
    tensor.num_elements *= static_cast<std::int64_t>(extent);
  }
  tensor.type = static_cast<GgmlType>(cursor.number<std::uint32_t>("a tensor's type"));
  offset = cursor.number<std::uint64_t>("a tensor's offset");
  return tensor;
}

void Gguf::read_tensors(Cursor& cursor, std::uint64_t count) {
  std::vector<std::uint64_t> offsets;
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t offset = 0;
    tensors_.push_back(read_tensor(cursor, offset));
    offsets.push_back(offset);
    if (!tensor_idx_.emplace(tensors_.back().name, tensors_.size() - 1).second) {
      fail("{}: wanted each tensor once, got {} twice", name_, printable(tensors_.back().name));
    }
  }
  const std::int64_t alignment = integer("general.alignment").value_or(32);
  if (alignment < 1 || alignment > (1 << 20) ||
      !std::has_single_bit(static_cast<std::uint64_t>(alignment))) {
    fail("{}: general.alignment: wanted a power of two up to 2^20, got {}", name_, alignment);
  }
  const auto step = static_cast<std::uint64_t>(alignment);
  const std::uint64_t gap = (step - cursor.offset() % step) % step;
  if (count == 0) return;
  cursor.take(gap, "the padding before the tensors");
  const auto data = cursor.take(cursor.left(), "the tensors");
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (offsets[i] % step != 0) {
      fail("{}: tensor {}: wanted an offset that {} divides, got {}", name_,
           printable(tensors_[i].name), step, offsets[i]);
    }
    place(tensors_[i], offsets[i], data);
  }
  demand_disjoint();
}

void Gguf::place(GgufTensor& tensor, std::uint64_t offset, std::span<const std::byte> data) const {
  const BlockSize block = block_size(tensor.type);
  if (block.elements == 0) return;
  if (tensor.shape[0] % block.elements != 0) {
    fail("{}: tensor {}: wanted rows of whole {} blocks ({} elements), got {} elements", name_,
         printable(tensor.name), type_name(tensor.type), block.elements, tensor.shape[0]);
  }
  // At most 2^48 elements of 4 bytes: no overflow.
  const std::uint64_t bytes =
      static_cast<std::uint64_t>(tensor.num_elements) / block.elements * block.bytes;
  if (offset > data.size() || bytes > data.size() - offset) {
    fail("{}: tensor {}: wanted {} bytes at offset {}, got {} bytes of tensors (truncated?)", name_,
         printable(tensor.name), bytes, offset, data.size());
  }
  tensor.data = data.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(bytes));
}

// Tensors that share bytes are a sign of damage, and would let a small file ask for much memory.
void Gguf::demand_disjoint() const {
  std::vector<const GgufTensor*> order;
  for (const GgufTensor& tensor : tensors_) {
    if (!tensor.data.empty()) order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const GgufTensor* a, const GgufTensor* b) {
    return a->data.data() < b->data.data();
  });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const GgufTensor& before = *order[i - 1];
    if (before.data.data() + before.data.size() > order[i]->data.data()) {
      fail("{}: wanted tensors that do not overlap, got {} over {}", name_, printable(before.name),
           printable(order[i]->name));
    }
  }
}

template <typename T>
const T* Gguf::get(std::string_view key, const char* wanted) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return nullptr;
  const auto* value = std::get_if<T>(&found->second);
  if (value == nullptr) fail("{}: {}: wanted {}, got another type", name_, key, wanted);
  return value;
}

std::optional<std::string_view> Gguf::text(std::string_view key) const {
  const auto* value = get<std::string_view>(key, "a string");
  return value != nullptr ? std::optional(*value) : std::nullopt;
}

std::optional<std::int64_t> Gguf::integer(std::string_view key) const {
  const auto* value = get<std::int64_t>(key, "an integer");
  return value != nullptr ? std::optional(*value) : std::nullopt;
}

std::optional<double> Gguf::number(std::string_view key) const {
  const auto* value = get<double>(key, "a float");
  return value != nullptr ? std::optional(*value) : std::nullopt;
}

std::optional<bool> Gguf::boolean(std::string_view key) const {
  const auto* value = get<bool>(key, "a bool");
  return value != nullptr ? std::optional(*value) : std::nullopt;
}

std::span<const std::string_view> Gguf::texts(std::string_view key) const {
  const auto* value = get<Array>(key, "an array of strings");
  if (value == nullptr) return {};
  if (value->kind != "array of string") {
    fail("{}: {}: wanted an array of strings, got {}", name_, key, value->kind);
  }
  return value->texts;
}

std::vector<std::int64_t> Gguf::integers(std::string_view key) const {
  const auto* value = get<Array>(key, "an array of integers");
  if (value == nullptr) return {};
  if (value->integers.empty() && value->kind != "array of i32" && value->kind != "array of u32") {
    fail("{}: {}: wanted an array of integers, got {}", name_, key, value->kind);
  }
  return value->integers;
}

const GgufTensor* Gguf::find_tensor(std::string_view name) const {
  const auto found = tensor_idx_.find(name);
  return found != tensor_idx_.end() ? &tensors_[found->second] : nullptr;
}

}  // namespace generate
