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
#include "kernels/cuda/flash2/pieces.cuh"

namespace octavo::kernels::flash2 {

using cuda::SmemAddress;

/// Of what is not there; strides may be negative, so that no offset near 0 will do.
inline constexpr std::int64_t kNoOffset = -0x7FFFFFFFFFFFFFFF - 1;

/// Byte of chunk `chunk` of row `row`.
template <typename ConfigT>
__device__ constexpr SmemAddress place_of(int row, int chunk) {
  return static_cast<SmemAddress>(row * ConfigT::kRowBytes + ((chunk ^ (row & 7)) * 16));
}

/// From the byte of one of a row's first two chunks to that of the chunk 2 `pairs` further on. By
/// constants on an address that changes from tile to tile, so that nothing is kept in registers for
/// it. Tiles begin at multiples of 128 bytes.
__device__ constexpr SmemAddress pairs_on(SmemAddress chunk, int pairs) {
  return (chunk ^ static_cast<SmemAddress>(pairs % 4 * 32)) +
         static_cast<SmemAddress>(pairs / 4 * 128);
}
/// From a chunk's byte to that of the same chunk `rows` further on; the row that it is in and
/// `rows` have no bit in common below 8.
template <typename ConfigT>
__device__ constexpr SmemAddress rows_on(SmemAddress chunk, int rows) {
  return (chunk ^ static_cast<SmemAddress>(rows % 8 * 16)) +
         static_cast<SmemAddress>(rows * ConfigT::kRowBytes);
}

/// The bits of eight elements of q, rotated where asked.
template <typename T>
__device__ uint4 read_query(const Work& w, const Frequencies& frequencies, const Item& item,
                            const RowPlace& place, int d) {
  const AttendParams& a = w.attend;
  const T* from = static_cast<const T*>(a.q) + row_offset(a.q_layout, item, place);
  cuda::Vector<T> own;
  if (w.q_in_vectors) {
    own.bits = *reinterpret_cast<const uint4*>(from + d);
  } else {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) own.elements[e] = from[d + e];
  }
  if (d < a.rope.rotary_dim) {
    std::int64_t position = item.first_position + place.token - item.first_token;
    if (a.rope.positions != nullptr) position = a.rope.positions[item.begin_token + place.token];
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

/// Whether rows of q are copied as they are, 16 bytes at a time.
__device__ inline bool copies_queries(const Work& w) {
  return w.q_in_vectors && w.attend.rope.rotary_dim == 0;
}

/// Where row `row` of the item's tile lies in q; kNoOffset where there is none.
__device__ inline std::int64_t query_offset(const Work& w, const Item& item, int row) {
  const AttendParams& a = w.attend;
  const RowPlace place = place_of_row(w, item, row);
  return place.exists ? row_offset(a.q_layout, item, place) : kNoOffset;
}

/// Copies the first `rows` rows of q, whose offsets offset_of(row) gives.
template <typename T, typename ConfigT, typename PlaceT>
__device__ void copy_queries(const Work& w, int rows, SmemAddress to, const PlaceT& offset_of) {
  constexpr int kChunks = ConfigT::kDim / kChunk;
  const auto* q = static_cast<const T*>(w.attend.q);
#pragma unroll 4
  for (int c = static_cast<int>(threadIdx.x); c < rows * kChunks; c += ConfigT::kThreads) {
    const int row = c / kChunks;
    const int chunk = c % kChunks;
    const std::int64_t offset = offset_of(row);
    const bool valid = offset != kNoOffset && chunk * kChunk < w.attend.head_dim;
    cuda::copy_async(to + place_of<ConfigT>(row, chunk), valid ? q + offset + chunk * kChunk : q,
                     valid);
  }
}

/// As load_queries. Not inlined: it has the whole of RoPE, and several callers.
template <typename T, typename ConfigT>
__device__ __noinline__ void load_any_queries(const Work& w, Frequencies frequencies,
                                              BlockState<ConfigT>& state, int rows,
                                              unsigned char* to) {
  constexpr int kChunks = ConfigT::kDim / kChunk;
  const Item& item = state.item;
  if constexpr (!ConfigT::kFew) {
    if (copies_queries(w)) {
      for (int row = static_cast<int>(threadIdx.x); row < rows; row += ConfigT::kThreads)
        state.row_offsets[row] = query_offset(w, item, row);
      __syncthreads();
      copy_queries<T, ConfigT>(w, rows, cuda::smem_address(to),
                               [&](int row) { return state.row_offsets[row]; });
      return;
    }
  }
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < rows * kChunks; c += ConfigT::kThreads) {
    const int row = c / kChunks;
    const int chunk = c % kChunks;
    const RowPlace place = place_of_row(w, item, row);
    uint4 bits{};
    if (place.exists && chunk * kChunk < w.attend.head_dim)
      bits = read_query<T>(w, frequencies, item, place, chunk * kChunk);
    *reinterpret_cast<uint4*>(to + place_of<ConfigT>(row, chunk)) = bits;
  }
}

/// Brings the item's rows of q to the first `rows` of its tile; rows and dims that it hasn't become
/// 0. What is neither rotated nor unaligned comes by copies of the thread's open group. By all
/// threads. Few rows are not worth telling each other where they lie.
template <typename T, typename ConfigT>
__device__ void load_queries(const Work& w, Frequencies frequencies, BlockState<ConfigT>& state,
                             int rows, unsigned char* to) {
  if constexpr (ConfigT::kFew) {
    if (copies_queries(w)) {
      copy_queries<T, ConfigT>(w, rows, cuda::smem_address(to),
                               [&](int row) { return query_offset(w, state.item, row); });
      return;
    }
  }
  load_any_queries<T, ConfigT>(w, frequencies, state, rows, to);
}

/// A tile's copies, to be issued one by one between products.
struct SpreadCopies {
  const char* k;
  const char* v;
  SmemAddress k_to, v_to;
  bool wanted;
  bool has_k, has_v;
};

/// Brings tiles of K and V. A warp brings kWarpKeys rows of each; its lanes look up where these lie
/// (several lanes the same), and tell each other where rows may lie in different pages.
template <typename ConfigT>
class KeyLoader {
 public:
  __device__ KeyLoader(const Work& w, const Item& item) : w_(w), item_(item) {}

  /// Looks up the rows of a tile for the next load_keys and load_values; what is found is not
  /// waited for before that. Keys that none of the tokens sees, and pages outside the pool, read as
  /// zeros: what lies there never spreads.
  __device__ void look_up(int tile) {
    tile_ = tile;
    page_ = kNowhere;
    const std::int32_t key = own_key();
    if (tile >= item_.keys.end_tile || key >= item_.keys.end_key) return;
    if (w_.rows_together ? key + ConfigT::kWarpKeys <= item_.keys.begin_key
                         : key < item_.keys.begin_key)
      return;
    page_ = item_.row;
    if (w_.attend.batch.page_table != nullptr)
      page_ = item_.pages[divide(static_cast<std::uint32_t>(key), w_.by_page)];
  }

  /// The tile's copies, wanted where all of its rows are there, one behind the other in one page;
  /// otherwise load_keys and load_values are to be called.
  __device__ SpreadCopies spread(SmemAddress k_to, SmemAddress v_to) const {
    const std::int32_t key = own_key();
    const bool wanted = w_.rows_together && key >= item_.keys.begin_key &&
                        key + ConfigT::kWarpKeys <= item_.keys.end_key;
    const int chunk = lane() % kChunks;
    const int row = lane() / kChunks;
    const SmemAddress place = place_of<ConfigT>(first_row() + row, chunk);
    const std::uint32_t slot = slot_of(static_cast<std::uint32_t>(key)) + row;
    const KvPages& kv = w_.attend.kv;
    return {.k = item_.k_head + offset_of(kv.k, slot) + chunk * (kChunk * 2),
            .v = item_.v_head + offset_of(kv.v, slot) + chunk * (kChunk * 2),
            .k_to = k_to + place,
            .v_to = v_to + place,
            .wanted = wanted,
            .has_k = has_page() && chunk * kChunk < w_.attend.head_dim,
            .has_v = has_page() && chunk * kChunk < w_.attend.head_dim_v};
  }
  /// Copy `i` of a tile's.
  __device__ void copy(SpreadCopies& copies, int i) const {
    if (i >= ConfigT::kWarpKeys / kRowsAtOnce) return;
    const KvPages& kv = w_.attend.kv;
    const int at = i * kRowsAtOnce;
    cuda::copy_async_if(copies.wanted, rows_on<ConfigT>(copies.k_to, at), copies.k, copies.has_k);
    cuda::copy_async_if(copies.wanted, rows_on<ConfigT>(copies.v_to, at), copies.v, copies.has_v);
    copies.k += kv.k.slot_stride * (2 * kRowsAtOnce);
    copies.v += kv.v.slot_stride * (2 * kRowsAtOnce);
  }

  __device__ void load_keys(SmemAddress to) const {
    load(item_.k_head, w_.attend.kv.k, w_.k_steps, w_.attend.head_dim, to);
  }
  __device__ void load_values(SmemAddress to) const {
    load(item_.v_head, w_.attend.kv.v, w_.v_steps, w_.attend.head_dim_v, to);
  }

 private:
  static constexpr std::int32_t kNowhere = -1;  ///< Zeros are to be had.
  static constexpr std::int32_t kNoRow = -0x7FFFFFFF - 1;
  static constexpr int kChunks = ConfigT::kDim / kChunk;
  static constexpr int kRowsAtOnce = kLanes / kChunks;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ static int first_row() {
    return static_cast<int>(threadIdx.x) / kLanes * ConfigT::kWarpKeys;
  }
  /// The key that the lane looks up.
  [[nodiscard]] __device__ std::int32_t own_key() const {
    const std::int32_t first = tile_ * ConfigT::kKeys + first_row();
    return w_.rows_together ? first : first + lane() % ConfigT::kWarpKeys;
  }

  [[nodiscard]] __device__ bool has_page() const {
    return static_cast<std::uint32_t>(page_) < static_cast<std::uint32_t>(w_.num_pages);
  }
  [[nodiscard]] __device__ std::uint32_t slot_of(std::uint32_t key) const {
    return key - divide(key, w_.by_page) * static_cast<std::uint32_t>(w_.attend.kv.page_size);
  }
  /// Bytes.
  [[nodiscard]] __device__ std::int64_t offset_of(const PagedTensor& tensor,
                                                  std::uint32_t slot) const {
    return (page_ * tensor.page_stride + slot * tensor.slot_stride) * 2;
  }

  __device__ void load(const char* head, const PagedTensor& tensor, RowSteps steps, int dim,
                       SmemAddress to) const {
    const int chunk = lane() % kChunks;
    const int row = lane() / kChunks;
    const SmemAddress first = to + place_of<ConfigT>(first_row() + row, chunk);
    const bool has_chunk = chunk * kChunk < dim;
    const auto key = static_cast<std::uint32_t>(own_key());
    if (w_.rows_together) {
      const char* from = head + offset_of(tensor, slot_of(key)) + row * tensor.slot_stride * 2 +
                         chunk * (kChunk * 2);
      const std::int64_t step = tensor.slot_stride * (2 * kRowsAtOnce);
      const bool any = has_page() && has_chunk;
      const auto first_key = static_cast<std::int32_t>(key);
      if (first_key >= item_.keys.begin_key &&
          first_key + ConfigT::kWarpKeys <= item_.keys.end_key) {
#pragma unroll
        for (int at = 0; at < ConfigT::kWarpKeys; at += kRowsAtOnce) {
          cuda::copy_async(rows_on<ConfigT>(first, at), from, any);
          from += step;
        }
        return;
      }
      // Rows begin … begin + count - 1 are there.
      const std::int32_t begin = item_.keys.begin_key - first_key;
      const auto count =
          static_cast<std::uint32_t>(any ? item_.keys.end_key - item_.keys.begin_key : 0);
#pragma unroll
      for (int at = 0; at < ConfigT::kWarpKeys; at += kRowsAtOnce) {
        const bool valid = static_cast<std::uint32_t>(row + at - begin) < count;
        cuda::copy_async(rows_on<ConfigT>(first, at), from, valid);
        from += step;
      }
      return;
    }
    // One number tells where, and whether at all.
    const std::int32_t own =
        has_page() ? page_ * steps.page + static_cast<std::int32_t>(slot_of(key)) * steps.slot
                   : kNoRow;
    const char* from = head + chunk * (kChunk * 2);
#pragma unroll
    for (int at = 0; at < ConfigT::kWarpKeys; at += kRowsAtOnce) {
      const std::int32_t place = __shfl_sync(kAllLanes, own, at + row);
      const bool valid = place != kNoRow && has_chunk;
      cuda::copy_async(rows_on<ConfigT>(first, at),
                       from + std::int64_t{valid ? place : 0} * w_.row_unit, valid);
    }
  }

  const Work& w_;
  const Item& item_;
  std::int32_t tile_ = 0;
  std::int32_t page_ = kNowhere;
};

}  // namespace octavo::kernels::flash2
