// SPDX-License-Identifier: Apache-2.0
// Names of the public enums. One table each, read both ways.
#include <octavo/types.h>

#include <array>
#include <cstddef>
#include <string_view>
#include <utility>

namespace octavo {
namespace {

template <typename EnumT, std::size_t kCount>
using Names = std::array<std::pair<EnumT, const char*>, kCount>;

constexpr Names<DType, 6> kDTypes = {{{DType::F32, "f32"},
                                      {DType::F16, "f16"},
                                      {DType::BF16, "bf16"},
                                      {DType::F8E4M3, "f8e4m3"},
                                      {DType::I8, "i8"},
                                      {DType::I32, "i32"}}};
constexpr Names<DeviceType, 2> kDevices = {{{DeviceType::Cpu, "cpu"}, {DeviceType::Cuda, "cuda"}}};
constexpr Names<TensorFormat, 3> kFormats = {
    {{TensorFormat::Bshd, "bshd"}, {TensorFormat::Sbhd, "sbhd"}, {TensorFormat::Thd, "thd"}}};
constexpr Names<CacheKind, 2> kCacheKinds = {
    {{CacheKind::Contiguous, "contiguous"}, {CacheKind::Paged, "paged"}}};
constexpr Names<Mask, 2> kMasks = {{{Mask::Causal, "causal"}, {Mask::Full, "full"}}};
constexpr Names<Backend, 6> kBackends = {{{Backend::Auto, "auto"},
                                          {Backend::Unfused, "unfused"},
                                          {Backend::Cpu, "cpu"},
                                          {Backend::Fused, "fused"},
                                          {Backend::Flash2, "flash2"},
                                          {Backend::Flash3, "flash3"}}};
constexpr Names<Compute, 2> kComputes = {{{Compute::Same, "same"}, {Compute::Fp8, "fp8"}}};

template <typename EnumT, std::size_t kCount>
const char* name_of(const Names<EnumT, kCount>& names, EnumT value) noexcept {
  for (const auto& [candidate, name] : names) {
    if (candidate == value) return name;
  }
  return "unknown";
}

template <typename EnumT, std::size_t kCount>
std::optional<EnumT> value_of(const Names<EnumT, kCount>& names, std::string_view wanted) noexcept {
  for (const auto& [value, name] : names) {
    if (wanted == name) return value;
  }
  return std::nullopt;
}

}  // namespace

const char* to_string(DType dtype) noexcept { return name_of(kDTypes, dtype); }
const char* to_string(DeviceType type) noexcept { return name_of(kDevices, type); }
const char* to_string(TensorFormat format) noexcept { return name_of(kFormats, format); }
const char* to_string(CacheKind kind) noexcept { return name_of(kCacheKinds, kind); }
const char* to_string(Mask mask) noexcept { return name_of(kMasks, mask); }
const char* to_string(Backend backend) noexcept { return name_of(kBackends, backend); }
const char* to_string(Compute compute) noexcept { return name_of(kComputes, compute); }

std::optional<DType> parse_dtype(std::string_view name) noexcept { return value_of(kDTypes, name); }
std::optional<TensorFormat> parse_format(std::string_view name) noexcept {
  return value_of(kFormats, name);
}
std::optional<CacheKind> parse_cache_kind(std::string_view name) noexcept {
  return value_of(kCacheKinds, name);
}
std::optional<Backend> parse_backend(std::string_view name) noexcept {
  return value_of(kBackends, name);
}

}  // namespace octavo
