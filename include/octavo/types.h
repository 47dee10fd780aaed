// SPDX-License-Identifier: Apache-2.0
// The small vocabulary that every other header uses: dtypes, devices, formats, masks, backends.
#pragma once

#include <octavo/export.h>

#include <cstdint>
#include <optional>
#include <string_view>

struct CUstream_st;

namespace octavo {

/// The caller's name for a sequence: any value he likes.
using SequenceId = std::int64_t;

/// Element types. F8E4M3 and I8 are named so that a refusal can name them; no backend takes them
/// yet.
enum class DType : std::uint8_t { F32, F16, BF16, F8E4M3, I8, I32 };

/// Bytes of one element.
constexpr std::int64_t dtype_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::F32:
    case DType::I32:
      return 4;
    case DType::F16:
    case DType::BF16:
      return 2;
    case DType::F8E4M3:
    case DType::I8:
      return 1;
  }
  return 0;
}

enum class DeviceType : std::uint8_t { Cpu, Cuda };

struct Device {
  DeviceType type = DeviceType::Cpu;
  std::int32_t index = 0;  ///< Ordinal of the GPU; 0 for the CPU.

  friend bool operator==(const Device&, const Device&) = default;
};

/// A CUDA stream to enqueue on; the default value is the device's default stream. The CPU ignores
/// it and works at once.
struct Stream {
  CUstream_st* handle = nullptr;
};

/// How new tokens lie in q, k, v and the output.
enum class TensorFormat : std::uint8_t {
  Bshd,  ///< [num_seqs, longest, heads, dim], each sequence padded to the longest
  Sbhd,  ///< [longest, num_seqs, heads, dim]
  Thd,   ///< [num_tokens, heads, dim], packed in batch order
};

enum class CacheKind : std::uint8_t {
  Contiguous,  ///< One run of max_seq_len slots for each sequence.
  Paged,       ///< Pages of page_size slots, taken as sequences grow and shared by forks.
};

enum class Mask : std::uint8_t {
  Causal,  ///< A query sees keys at positions up to its own (aligned to the bottom right).
  Full,    ///< A query sees every key of its sequence.
};

/// A query at position p sees keys at p - left … p + right; -1 is no bound on that side.
struct Window {
  std::int64_t left = -1;
  std::int64_t right = -1;

  friend bool operator==(const Window&, const Window&) = default;
};

enum class Backend : std::uint8_t {
  Auto,     ///< The first, in a fixed order of preference, that can run the step.
  Unfused,  ///< Matrix product, softmax, matrix product: the definition, and the widest coverage.
  Cpu,      ///< Tiled online softmax with SIMD and threads, on the host.
  Fused,    ///< cuDNN's attention.
  Flash2,   ///< Own kernels for sm80 and up.
  Flash3,   ///< Own kernels for sm90a.
};

/// The precision of the arithmetic.
enum class Compute : std::uint8_t {
  Same,  ///< That of the tensors, accumulated in float32.
  Fp8,   ///< FP8 (E4M3) products over a cache that stays in its dtype.
};

OCTAVO_EXPORT const char* to_string(DType dtype) noexcept;
OCTAVO_EXPORT const char* to_string(DeviceType type) noexcept;
OCTAVO_EXPORT const char* to_string(TensorFormat format) noexcept;
OCTAVO_EXPORT const char* to_string(CacheKind kind) noexcept;
OCTAVO_EXPORT const char* to_string(Mask mask) noexcept;
OCTAVO_EXPORT const char* to_string(Backend backend) noexcept;
OCTAVO_EXPORT const char* to_string(Compute compute) noexcept;

/// The inverse of to_string; nothing when the name is unknown. Names are lower case: "f32", "bshd",
/// "paged", "cpu" …
OCTAVO_EXPORT std::optional<DType> parse_dtype(std::string_view name) noexcept;
OCTAVO_EXPORT std::optional<TensorFormat> parse_format(std::string_view name) noexcept;
OCTAVO_EXPORT std::optional<CacheKind> parse_cache_kind(std::string_view name) noexcept;
OCTAVO_EXPORT std::optional<Backend> parse_backend(std::string_view name) noexcept;

}  // namespace octavo
