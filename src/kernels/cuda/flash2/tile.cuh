// SPDX-License-Identifier: Apache-2.0
// Tiles in shared memory: where an element lies, how rows of q, K and V come there.
//
// A tile has rows of kDim 16-bit elements. Its 16-byte chunks are swizzled: chunk c of row r lies
// where chunk c ^ (r % 8) would, so that the eight rows of a matrix load, same chunk, lie in
// different banks.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/rope.cuh"
#include "kernels/cuda/common/tensor_core.cuh"
#include "kernels/cuda/flash2/item.cuh"

namespace octavo::kernels::flash2 {

using cuda::SmemAddress;

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kLanes;
inline constexpr int kWarpRows = kTileRows / kWarps;  ///< Rows of a warp's products.
inline constexpr int kWarpKeys = kTileKeys / kWarps;  ///< Keys that a warp brings.
inline constexpr int kChunk = 8;                      ///< Elements of 16 bytes.

template <int kDim>
struct TileShape {
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kBytes = 64 * kDim * 2;
  /// Buffers of K, and of V. All instances fit the 99 KB of sm86 and sm89.
  static constexpr int kStages = kDim == 256 ? 1 : 2;
  static constexpr int kSmemBytes = (1 + 2 * kStages) * kBytes;
};
static_assert(kTileRows == 64 && kTileKeys == 64);

/// Byte of chunk `chunk` of row `row`.
template <int kDim>
__device__ constexpr SmemAddress place_of(int row, int chunk) {
  return static_cast<SmemAddress>(row * kDim * 2 + ((chunk ^ (row & 7)) * 16));
}

/// The bits of eight elements of q, rotated where asked.
template <typename T>
__device__ uint4 read_query(const Work& w, const Frequencies& frequencies, const Item& item,
                            int token, int head, int d) {
  const AttendParams& a = w.attend;
  const T* from = static_cast<const T*>(a.q) +
                  cuda::token_offset(a.q_layout, a.batch, item.b, token) +
                  head * a.q_layout.head_stride;
  cuda::Vector<T> own;
  if (w.q_in_vectors) {
    own.bits = *reinterpret_cast<const uint4*>(from + d);
  } else {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) own.elements[e] = from[d + e];
  }
  if (d < a.rope.rotary_dim) {
    std::int64_t position = item.first_position + token - item.first_token;
    if (a.rope.positions != nullptr)
      position = a.rope.positions[a.batch.token_offsets[item.b] + token];
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if (d + e >= a.rope.rotary_dim) break;
      const cuda::Turn turn =
          cuda::turn_at(a.rope, frequencies.values, position, cuda::pair_of(a.rope, d + e));
      const float partner = cuda::to_float(from[cuda::partner_of(a.rope, d + e)]);
      const float value =
          cuda::turned(turn, cuda::is_first(a.rope, d + e), cuda::to_float(from[d + e]), partner);
      own.elements[e] = cuda::from_float<T>(value);
    }
  }
  return own.bits;
}

/// Brings the item's rows of q to shared memory; rows and dims that it hasn't become 0.
template <typename T, int kDim>
__device__ void load_queries(const Work& w, const Frequencies& frequencies, const Item& item,
                             unsigned char* to) {
  constexpr int kChunks = TileShape<kDim>::kChunks;
  const int rows = item.num_rows();
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < kTileRows * kChunks; c += kThreads) {
    const int row = c / kChunks;
    const int chunk = c % kChunks;
    uint4 bits{};
    if (row < rows && chunk * kChunk < w.attend.head_dim) {
      bits = read_query<T>(w, frequencies, item, item.first_token + row / item.num_heads,
                           item.first_head + row % item.num_heads, chunk * kChunk);
    }
    *reinterpret_cast<uint4*>(to + place_of<kDim>(row, chunk)) = bits;
  }
}

/// Brings tiles of K and V. A warp brings kWarpKeys rows of each; its lanes look up where these lie
/// (lane and lane + 16 the same), and tell each other.
template <int kDim>
class KeyLoader {
 public:
  __device__ KeyLoader(const Work& w, const Item& item)
      : w_(w),
        item_(item),
        lane_(static_cast<int>(threadIdx.x) % kLanes),
        first_row_(static_cast<int>(threadIdx.x) / kLanes * kWarpKeys) {}

  /// Looks up the rows of a tile for the next load_keys and load_values. Keys that none of the
  /// tokens sees, and pages outside the pool, read as zeros: what lies there never spreads.
  __device__ void look_up(int tile) {
    k_from_ = v_from_ = kNowhere;
    const std::int32_t key = tile * kTileKeys + first_row_ + lane_ % kWarpKeys;
    if (tile >= item_.end_tile || key < item_.begin_key || key >= item_.end_key) return;
    const KvPages& kv = w_.attend.kv;
    const auto size = static_cast<std::uint32_t>(kv.page_size);
    const auto index = static_cast<std::uint32_t>(key) / size;
    const std::uint32_t slot = static_cast<std::uint32_t>(key) - index * size;
    const std::int32_t page = page_of(w_.attend.batch, item_.b, static_cast<std::int32_t>(index));
    if (page < 0 || page >= kv.num_pages) return;
    k_from_ = page * kv.k.page_stride + slot * kv.k.slot_stride + item_.kv_head * kv.k.head_stride;
    v_from_ = page * kv.v.page_stride + slot * kv.v.slot_stride + item_.kv_head * kv.v.head_stride;
  }

  __device__ void load_keys(SmemAddress to) const {
    load(w_.attend.kv.k.data, k_from_, w_.attend.head_dim, to);
  }
  __device__ void load_values(SmemAddress to) const {
    load(w_.attend.kv.v.data, v_from_, w_.attend.head_dim_v, to);
  }

 private:
  /// Zeros are to be had. Strides may be negative, so that no offset below 0 will do.
  static constexpr std::int64_t kNowhere = -0x7FFFFFFFFFFFFFFF - 1;

  __device__ void load(const void* data, std::int64_t own_from, int dim, SmemAddress to) const {
    constexpr int kChunks = TileShape<kDim>::kChunks;
    constexpr int kRowsAtOnce = kLanes / kChunks;
    const int chunk = lane_ % kChunks;
    const auto* bytes = static_cast<const char*>(data);
#pragma unroll
    for (int at = 0; at < kWarpKeys; at += kRowsAtOnce) {
      const int row = at + lane_ / kChunks;
      const std::int64_t from = __shfl_sync(kAllLanes, own_from, row);
      const bool valid = from != kNowhere && chunk * kChunk < dim;
      cuda::copy_async(to + place_of<kDim>(first_row_ + row, chunk),
                       bytes + (valid ? (from + chunk * kChunk) * 2 : 0), valid);
    }
  }

  const Work& w_;
  const Item& item_;
  int lane_;
  int first_row_;
  std::int64_t k_from_ = kNowhere;  ///< Elements.
  std::int64_t v_from_ = kNowhere;
};

}  // namespace octavo::kernels::flash2
