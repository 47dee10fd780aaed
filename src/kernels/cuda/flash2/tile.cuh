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

/// Where the buffers of an item's shared memory lie.
template <typename ConfigT>
struct Buffers {
  SmemAddress q;
  [[nodiscard]] __device__ SmemAddress k(int stage) const {
    return q + ConfigT::kQueryBytes + 2 * stage * ConfigT::kKeyBytes;
  }
  [[nodiscard]] __device__ SmemAddress v(int stage) const { return k(stage) + ConfigT::kKeyBytes; }
};

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

/// Copies the first `rows` rows of q, which are few: not worth telling each other where they lie.
template <typename T, typename ConfigT>
__device__ void copy_few_queries(const Work& w, const Item& item, int rows, SmemAddress to) {
  constexpr int kChunks = ConfigT::kDim / kChunk;
  constexpr int kRowsAtOnce = ConfigT::kThreads / kChunks;
  const TokenLayout& layout = w.attend.q_layout;
  const int chunk = static_cast<int>(threadIdx.x % kChunks);
  const bool has_chunk = chunk * kChunk < w.attend.head_dim;
  const T* first = static_cast<const T*>(w.attend.q) + chunk * kChunk +
                   row_offset(layout, item, {true, item.first_token, item.first_head});
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x / kChunks); row < rows; row += kRowsAtOnce) {
    const RowPlace place = place_of_row(w, item, row);
    const T* from = first + (place.token - item.first_token) * layout.token_stride +
                    (place.head - item.first_head) * layout.head_stride;
    cuda::copy_async(to + place_of<ConfigT>(row, chunk), from, place.exists && has_chunk);
  }
}

/// Copies the first `rows` rows of q, from the offsets that row_offsets has.
template <typename T, typename ConfigT>
__device__ void copy_queries(const Work& w, const std::int64_t* row_offsets, int rows,
                             SmemAddress to) {
  constexpr int kChunks = ConfigT::kDim / kChunk;
  const auto* q = static_cast<const T*>(w.attend.q);
#pragma unroll 4
  for (int c = static_cast<int>(threadIdx.x); c < rows * kChunks; c += ConfigT::kThreads) {
    const int row = c / kChunks;
    const int chunk = c % kChunks;
    const std::int64_t offset = row_offsets[row];
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
      copy_queries<T, ConfigT>(w, state.row_offsets, rows, cuda::smem_address(to));
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
/// threads.
template <typename T, typename ConfigT>
__device__ void load_queries(const Work& w, Frequencies frequencies, BlockState<ConfigT>& state,
                             int rows, unsigned char* to) {
  if constexpr (ConfigT::kFew) {
    if (copies_queries(w)) {
      copy_few_queries<T, ConfigT>(w, state.item, rows, cuda::smem_address(to));
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

/// What an item says of where keys lie, read once a tile: each read of shared memory is waited for,
/// and the compiler may not move them over copies.
struct KeyPlaces {
  const char* k_head;
  const char* v_head;
  KeySpan keys;
  const std::int32_t* pages;
  std::int32_t row;
};
__device__ inline KeyPlaces key_places(const Item& item) {
  return {item.k_head, item.v_head, item.keys, item.pages, item.row};
}

/// Brings tiles of K and V. A warp brings kWarpKeys rows of each; its lanes look up where these lie
/// (several lanes the same), and tell each other where rows may lie in different pages.
template <typename ConfigT>
class KeyLoader {
 public:
  explicit __device__ KeyLoader(const Work& w)
      : w_(w), thread_(kKeepsNothing ? thread_of_item() : static_cast<int>(threadIdx.x)) {}

  /// Looks up the rows of a tile for what loads it next; what is found is not waited for before
  /// that. Keys that none of the tokens sees, and pages outside the pool, read as zeros: what lies
  /// there never spreads.
  __device__ void look_up(const KeyPlaces& places, int tile) {
    tile_ = tile;
    page_ = kNowhere;
    const std::int32_t key = own_key();
    if (tile >= places.keys.end_tile || key >= places.keys.end_key) return;
    if (w_.rows_together ? key + ConfigT::kWarpKeys <= places.keys.begin_key
                         : key < places.keys.begin_key)
      return;
    page_ = places.row;
    if (w_.attend.batch.page_table != nullptr)
      page_ = places.pages[divide(static_cast<std::uint32_t>(key), w_.by_page)];
  }

  /// The tile's copies, wanted where all of its rows are there, one behind the other in one page;
  /// otherwise load is to be called.
  __device__ SpreadCopies spread(const KeyPlaces& places, SmemAddress k_to,
                                 SmemAddress v_to) const {
    const std::int32_t slot = own_slot() + row();
    const SmemAddress place = place_of<ConfigT>(first_row() + row(), chunk());
    return {.k = places.k_head + offset_of(w_.k_steps, slot),
            .v = places.v_head + offset_of(w_.v_steps, slot),
            .k_to = k_to + place,
            .v_to = v_to + place,
            .wanted = w_.rows_together && has_whole_rows(places.keys),
            .has_k = has_page() && chunk() * kChunk < w_.attend.head_dim,
            .has_v = has_page() && chunk() * kChunk < w_.attend.head_dim_v};
  }
  /// Copy `i` of a tile's.
  __device__ void copy_keys(SpreadCopies& copies, int i) const {
    if (i >= ConfigT::kWarpKeys / kRowsAtOnce) return;
    cuda::copy_async_if(copies.wanted, rows_on<ConfigT>(copies.k_to, i * kRowsAtOnce), copies.k,
                        copies.has_k);
    copies.k += w_.attend.kv.k.slot_stride * (2 * kRowsAtOnce);
  }
  __device__ void copy_values(SpreadCopies& copies, int i) const {
    if (i >= ConfigT::kWarpKeys / kRowsAtOnce) return;
    cuda::copy_async_if(copies.wanted, rows_on<ConfigT>(copies.v_to, i * kRowsAtOnce), copies.v,
                        copies.has_v);
    copies.v += w_.attend.kv.v.slot_stride * (2 * kRowsAtOnce);
  }

  __device__ void load_keys(const KeyPlaces& places, SmemAddress to) const {
    load<true, false>(places, to, to);
  }
  __device__ void load_values(const KeyPlaces& places, SmemAddress to) const {
    load<false, true>(places, to, to);
  }
  /// Both.
  __device__ void load_tile(const KeyPlaces& places, SmemAddress k_to, SmemAddress v_to) const {
    load<true, true>(places, k_to, v_to);
  }

 private:
  static constexpr std::int32_t kNowhere = -1;  ///< Zeros are to be had.
  static constexpr std::int32_t kNoRow = -0x7FFFFFFF - 1;
  static constexpr int kChunks = ConfigT::kDim / kChunk;
  static constexpr int kRowsAtOnce = kLanes / kChunks;
  /// As thread_of_item says; with rows of more dims the compiler's order is better without.
  static constexpr bool kKeepsNothing = ConfigT::kFew || ConfigT::kDim <= 64;

  [[nodiscard]] __device__ int lane() const { return thread_ % kLanes; }
  /// Of the rows and chunks that are copied at once.
  [[nodiscard]] __device__ int row() const { return lane() / kChunks; }
  [[nodiscard]] __device__ int chunk() const { return lane() % kChunks; }
  [[nodiscard]] __device__ int first_row() const { return thread_ / kLanes * ConfigT::kWarpKeys; }
  /// The key that the lane looks up.
  [[nodiscard]] __device__ std::int32_t own_key() const {
    const std::int32_t first = tile_ * ConfigT::kKeys + first_row();
    return w_.rows_together ? first : first + lane() % ConfigT::kWarpKeys;
  }
  [[nodiscard]] __device__ std::int32_t own_slot() const {
    const auto key = static_cast<std::uint32_t>(own_key());
    return static_cast<std::int32_t>(key - divide(key, w_.by_page) *
                                               static_cast<std::uint32_t>(w_.attend.kv.page_size));
  }
  [[nodiscard]] __device__ bool has_page() const {
    return static_cast<std::uint32_t>(page_) < static_cast<std::uint32_t>(w_.num_pages);
  }
  /// Whether all of the rows that the warp brings are seen.
  [[nodiscard]] __device__ bool has_whole_rows(const KeySpan& keys) const {
    const std::int32_t first = own_key();
    return first >= keys.begin_key && first + ConfigT::kWarpKeys <= keys.end_key;
  }
  /// Bytes, to the lane's chunk of a slot of the page that was found.
  [[nodiscard]] __device__ std::int64_t offset_of(RowSteps steps, std::int32_t slot) const {
    return std::int64_t{page_ * steps.page + slot * steps.slot} * w_.row_unit +
           chunk() * (kChunk * 2);
  }

  template <bool kOfK, bool kOfV>
  __device__ void load(const KeyPlaces& places, SmemAddress k_to, SmemAddress v_to) const {
    const KvPages& kv = w_.attend.kv;
    const SmemAddress place = place_of<ConfigT>(first_row() + row(), chunk());
    const bool has_k = chunk() * kChunk < w_.attend.head_dim;
    const bool has_v = chunk() * kChunk < w_.attend.head_dim_v;
    if (!w_.rows_together) {
      load_scattered<kOfK, kOfV>(places, k_to + place, has_k, v_to + place, has_v);
      return;
    }
    const std::int32_t slot = own_slot() + row();
    const char* k = places.k_head + offset_of(w_.k_steps, slot);
    const char* v = places.v_head + offset_of(w_.v_steps, slot);
    const auto copy_row = [&](int at, bool exists) {
      if constexpr (kOfK) {
        cuda::copy_async(rows_on<ConfigT>(k_to + place, at), k, exists && has_k);
        k += kv.k.slot_stride * (2 * kRowsAtOnce);
      }
      if constexpr (kOfV) {
        cuda::copy_async(rows_on<ConfigT>(v_to + place, at), v, exists && has_v);
        v += kv.v.slot_stride * (2 * kRowsAtOnce);
      }
    };
    const bool any = has_page();
    if (has_whole_rows(places.keys)) {
#pragma unroll
      for (int at = 0; at < ConfigT::kWarpKeys; at += kRowsAtOnce) copy_row(at, any);
      return;
    }
    // Rows begin … begin + count - 1 are there.
    const std::int32_t begin = places.keys.begin_key - own_key();
    const auto count =
        static_cast<std::uint32_t>(any ? places.keys.end_key - places.keys.begin_key : 0);
#pragma unroll
    for (int at = 0; at < ConfigT::kWarpKeys; at += kRowsAtOnce)
      copy_row(at, static_cast<std::uint32_t>(row() + at - begin) < count);
  }

  /// One number tells where a row lies, and whether at all.
  template <bool kOfK, bool kOfV>
  __device__ void load_scattered(const KeyPlaces& places, SmemAddress k_to, bool has_k,
                                 SmemAddress v_to, bool has_v) const {
    const std::int32_t slot = own_slot();
    const auto own_of = [&](RowSteps steps) {
      return has_page() ? page_ * steps.page + slot * steps.slot : kNoRow;
    };
    const std::int32_t own_k = own_of(w_.k_steps);
    const std::int32_t own_v = own_of(w_.v_steps);
    const auto copy_row = [&](SmemAddress to, const char* head, std::int32_t own, int at,
                              bool has_chunk) {
      const std::int32_t units = __shfl_sync(kAllLanes, own, at + row());
      const bool valid = units != kNoRow && has_chunk;
      // Any address will do for what is not there. Full instances, whose registers are short, get
      // worse code around their products by it.
      const std::int64_t where = (ConfigT::kFew || valid) ? units : 0;
      cuda::copy_async(rows_on<ConfigT>(to, at),
                       head + chunk() * (kChunk * 2) + where * w_.row_unit, valid);
    };
#pragma unroll
    for (int at = 0; at < ConfigT::kWarpKeys; at += kRowsAtOnce) {
      if constexpr (kOfK) copy_row(k_to, places.k_head, own_k, at, has_k);
      if constexpr (kOfV) copy_row(v_to, places.v_head, own_v, at, has_v);
    }
  }

  const Work& w_;
  int thread_;
  std::int32_t tile_ = 0;
  std::int32_t page_ = kNowhere;
};

}  // namespace octavo::kernels::flash2
