// SPDX-License-Identifier: Apache-2.0
// Append. Memory-bound: reads and writes K and V once. A thread moves some vectors of 16 bytes of
// one token's K or V: it loads them and, at the same time, the token's slot, which the step's own
// kernel has found for all layers; then it writes. What is not aligned, not dense or of another
// dtype than the cache goes element by element.
//
// The kernels over vectors may be launched while what is ahead of them still runs
// (programmatic dependent launch), which hides most of a short launch. Tokens, slots and the cache
// may be that work's results, so the wait for it is the first thing that they do.
#include "kernels/cuda/append/append.h"

#include "kernels/cuda/append/rows.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/step.cuh"

namespace octavo::kernels::cuda {
namespace {

constexpr int kCopiedRows = 2;  // in flight a thread
constexpr int kTurningThreads = 128;
constexpr std::int64_t kFewTokens = 1024;

/// RoPE's frequencies are kernel parameters: few where few suffice, since large parameters make
/// short launches slower.
constexpr int kFewPairs = 64;
template <int kPairs>
struct Frequencies {
  double values[kPairs];
};

/// Blocks are [columns, rows, tokens]; grids [tokens, K or V].
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(const __grid_constant__ VectorAppend p) {
  wait_for_inputs();
  const AppendSide& side = p.sides[blockIdx.y];
  const std::int64_t token = std::int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  if (token >= p.max_tokens || threadIdx.x >= side.num_columns) return;
  copy_rows<kCopiedRows>(p, side, token);
}

/// The turns of a token in shared memory: two of them in 16 bytes, the twos of a column (which
/// turns kPairs pairs) `num_columns` apart, so that neighbouring threads read neighbouring 16
/// bytes.
template <int kPairs>
__device__ int place_of_pair(int pair, int num_columns) {
  const int in = pair % kPairs;
  return (in / 2 * num_columns + pair / kPairs) * 2 + in % 2;
}

/// A column of a head: one vector that holds pairs, or in the half style two that hold halves of
/// them.
template <typename T, bool kHalf, int kRows>
__device__ void turn_rows(RowsInFlight<kRows>& first, RowsInFlight<kRows>& second,
                          const Turn* turns, int num_columns) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kPairs = kHalf ? kSize : kSize / 2;
#pragma unroll
  for (int two = 0; two < kPairs / 2; ++two) {
    const float4 bits = *reinterpret_cast<const float4*>(turns + two * 2 * num_columns);
    const Turn twos[2] = {{bits.x, bits.y}, {bits.z, bits.w}};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Vector<T> one, other;
      one.bits = first.bits[r];
      other.bits = second.bits[r];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int pair = 2 * two + i;
        T& a = one.elements[kHalf ? pair : 2 * pair];
        T& b = kHalf ? other.elements[pair] : one.elements[2 * pair + 1];
        const float x = to_float(a);
        const float y = to_float(b);
        a = from_float<T>(turned(twos[i], true, x, y));
        b = from_float<T>(turned(twos[i], false, y, x));
      }
      first.bits[r] = one.bits;
      second.bits[r] = other.bits;
    }
  }
}

/// As append_kernel; K's rows are heads. In the half style a column of the turned part is two
/// vectors, pairs' halves apart.
template <typename T, bool kHalf, int kRows, int kPairs>
__global__ void __launch_bounds__(kAppendThreads)
    append_turned_kernel(const __grid_constant__ VectorAppend p,
                         const __grid_constant__ VectorRope rope,
                         const __grid_constant__ Frequencies<kPairs> frequencies) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kPairsOfColumn = kHalf ? kSize : kSize / 2;
  extern __shared__ __align__(16) Turn turns_smem[];  // [tokens of the block, pairs]
  wait_for_inputs();
  const std::int64_t token = std::int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  const bool is_token = token < p.max_tokens;
  const auto column = static_cast<int>(threadIdx.x);
  if (blockIdx.y == 1) {
    if (is_token && column < p.sides[1].num_columns) copy_rows<2 * kRows>(p, p.sides[1], token);
    return;
  }
  const AppendSide& side = p.sides[0];
  const bool works = is_token && column < side.num_columns;
  const int pairs = rope.rotary_dim / 2;
  const int turned_columns = pairs / kPairsOfColumn;
  const bool turns = column < turned_columns;
  const bool is_two = kHalf && turns;
  const std::int64_t vector = kHalf && !turns ? column + turned_columns : column;
  const std::int64_t halves = turned_columns * std::int64_t{kVectorBytes};
  const auto first_row = static_cast<int>(threadIdx.y);
  const auto apart = static_cast<int>(blockDim.y);
  const std::int64_t from_step = apart * side.from_row_stride;
  const std::int64_t to_step = apart * side.to_row_stride;
  int left = works ? side.num_rows - first_row : 0;

  TokenSlot slot;
  std::int32_t given_position = 0;
  std::int32_t num_tokens = 0;
  const std::byte* from = nullptr;
  if (is_token) {
    from = rows_from(p, side, token) + vector * kVectorBytes + first_row * side.from_row_stride;
    slot = load_slot(p.slots + token);
    num_tokens = *p.num_tokens;
    if (rope.positions != nullptr) given_position = rope.positions[token];
  }
  RowsInFlight<kRows> first = {};
  RowsInFlight<kRows> second = {};
  const auto load = [&] {
    const std::byte* partner = from + halves;
    first.load(from, from_step, left);
    if (is_two) second.load(partner, from_step, left);
  };
  load();
  const bool is_written = token < num_tokens && slot.page >= 0;
  Turn* own_turns = turns_smem + threadIdx.z * static_cast<unsigned>(pairs);
  if (is_written) {
    const std::int64_t position = rope.positions != nullptr ? given_position : slot.position;
    const RopeParams params{.rotary_dim = rope.rotary_dim,
                            .cos = rope.cos,
                            .sin = rope.sin,
                            .num_table_positions = rope.num_table_positions};
#pragma unroll 1
    for (int pair = first_row * static_cast<int>(blockDim.x) + column; pair < pairs;
         pair += apart * static_cast<int>(blockDim.x)) {
      own_turns[place_of_pair<kPairsOfColumn>(pair, turned_columns)] =
          turn_at(params, frequencies.values, position, pair);
    }
  }
  __syncthreads();
  if (!is_written || left <= 0) return;
  std::byte* const behind = rows_to(side, slot) + vector * kVectorBytes;
  std::byte* to = behind + first_row * side.to_row_stride;
  while (true) {
    if (turns) turn_rows<T, kHalf, kRows>(first, second, own_turns + 2 * column, turned_columns);
#pragma unroll
    for (int r = 0; r < kRows; ++r, to += to_step) {
      if (r * apart >= left) continue;
      store_vector(to, first.bits[r]);
      if (is_two) store_vector(to + halves, second.bits[r]);
    }
    left -= kRows * apart;
    if (left <= 0) break;
    load();
  }
  if (slot.num_clear > 0) {
    clear_behind(side, behind, slot.num_clear);
    if (is_two) clear_behind(side, behind + halves, slot.num_clear);
  }
}

/// Any strides, any mix of dtypes: an element a thread, a token a block.
__global__ void __launch_bounds__(kAppendThreads)
    append_elements_kernel(const __grid_constant__ AppendParams p,
                           const __grid_constant__ Frequencies<kMaxRotaryPairs> frequencies) {
  extern __shared__ __align__(16) Turn turns_smem[];  // [pairs]
  const std::int64_t token = blockIdx.x;
  const TokenSlot slot = load_slot(p.batch.token_slots + token);
  if (token >= p.batch.token_offsets[p.batch.num_seqs] || slot.page < 0) return;
  const TokenIndex index = p.batch.token_indices[token];
  if (p.rope.rotary_dim > 0) {
    const std::int64_t position =
        p.rope.positions != nullptr ? p.rope.positions[token] : slot.position;
    for (int pair = static_cast<int>(threadIdx.x); pair < p.rope.rotary_dim / 2;
         pair += static_cast<int>(blockDim.x)) {
      turns_smem[pair] = turn_at(p.rope, frequencies.values, position, pair);
    }
    __syncthreads();
  }
  const int k_elements = p.num_kv_heads * p.head_dim;
  const int elements = k_elements + p.num_kv_heads * p.head_dim_v;
  for (int e = static_cast<int>(threadIdx.x); e < elements; e += static_cast<int>(blockDim.x)) {
    const bool is_key = e < k_elements;
    const int in = is_key ? e : e - k_elements;
    const int dims = is_key ? p.head_dim : p.head_dim_v;
    const int head = in / dims;
    const int d = in % dims;
    const TokenLayout& layout = is_key ? p.k_layout : p.v_layout;
    const PagedTensor& tensor = is_key ? p.kv.k : p.kv.v;
    const void* from = is_key ? p.k : p.v;
    const DType dtype = is_key ? p.k_dtype : p.v_dtype;
    const std::int64_t row =
        (layout.ragged ? token * layout.token_stride
                       : index.b * layout.batch_stride + index.i * layout.token_stride) +
        head * layout.head_stride;
    float value = load_element(from, dtype, row + d * layout.dim_stride);
    if (is_key && d < p.rope.rotary_dim) {
      const float other =
          load_element(from, dtype, row + partner_of(p.rope, d) * layout.dim_stride);
      value = turned(turns_smem[pair_of(p.rope, d)], is_first(p.rope, d), value, other);
    }
    const std::int64_t to = slot.page * tensor.page_stride + slot.slot * tensor.slot_stride +
                            head * tensor.head_stride + d * tensor.dim_stride;
    store_element(tensor.data, p.kv.dtype, to, value);
    for (std::int32_t s = 1; s <= slot.num_clear; ++s)
      store_element(tensor.data, p.kv.dtype, to + s * tensor.slot_stride, 0.0F);
  }
}

bool fits_vectors(const AppendParams& p) {
  const std::int64_t size = dtype_bytes(p.kv.dtype);
  const std::int64_t vector = kVectorBytes / size;
  const auto tokens_fit = [&](const void* data, const TokenLayout& t) {
    return t.dim_stride == 1 &&
           is_aligned(data, size, t.batch_stride, t.token_stride, t.head_stride);
  };
  const auto pages_fit = [&](const PagedTensor& t) {
    return t.dim_stride == 1 &&
           is_aligned(t.data, size, t.page_stride, t.slot_stride, t.head_stride);
  };
  // A vector is turned as a whole, and so is the one with its partners.
  const bool rope_fits = p.rope.style == RopeStyle::Half ? p.rope.rotary_dim / 2 % vector == 0
                                                         : p.rope.rotary_dim % vector == 0;
  return p.k_dtype == p.kv.dtype && p.v_dtype == p.kv.dtype && p.head_dim % vector == 0 &&
         p.head_dim_v % vector == 0 && tokens_fit(p.k, p.k_layout) && tokens_fit(p.v, p.v_layout) &&
         pages_fit(p.kv.k) && pages_fit(p.kv.v) && rope_fits;
}

AppendSide side_of(const AppendParams& p, bool is_key) {
  const TokenLayout& layout = is_key ? p.k_layout : p.v_layout;
  const PagedTensor& tensor = is_key ? p.kv.k : p.kv.v;
  const std::int64_t size = dtype_bytes(p.kv.dtype);
  return {.from = static_cast<const std::byte*>(is_key ? p.k : p.v),
          .to = static_cast<std::byte*>(tensor.data),
          .from_batch_stride = layout.batch_stride * size,
          .from_token_stride = layout.token_stride * size,
          .from_row_stride = layout.head_stride * size,
          .to_page_stride = tensor.page_stride * size,
          .to_slot_stride = tensor.slot_stride * size,
          .to_row_stride = tensor.head_stride * size,
          .num_rows = p.num_kv_heads,
          .num_columns = static_cast<std::int32_t>((is_key ? p.head_dim : p.head_dim_v) * size /
                                                   kVectorBytes)};
}

/// Heads that lie one behind the other on both ways, as rows of `columns` vectors where that goes.
void cut_anew(AppendSide& side, std::int32_t columns) {
  const std::int64_t row = std::int64_t{side.num_columns} * kVectorBytes;
  const std::int32_t all = side.num_rows * side.num_columns;
  if (side.from_row_stride != row || side.to_row_stride != row || all % columns != 0) return;
  side.num_rows = all / columns;
  side.num_columns = columns;
  side.from_row_stride = side.to_row_stride = std::int64_t{columns} * kVectorBytes;
}

/// How a launch is made: `few` tokens are spread over as many blocks as there are tokens.
struct Launch {
  bool few = false;
  bool overlaps = false;
  CUstream_st* stream = nullptr;
};

/// Blocks of about `threads` threads which have `rows` rows in flight each.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), const VectorAppend& p, int rows, int threads,
            std::size_t smem_per_token, const Launch& how, const Args&... args) {
  const auto x = static_cast<unsigned>(max(p.sides[0].num_columns, p.sides[1].num_columns));
  const auto most = static_cast<unsigned>(max(p.sides[0].num_rows, 1));
  unsigned y = (most + static_cast<unsigned>(rows) - 1) / static_cast<unsigned>(rows);
  y = max(1U, min(y, unsigned{kAppendThreads} / x));
  const unsigned z = how.few ? 1U : max(1U, min(static_cast<unsigned>(threads) / (x * y), 64U));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid_for(p.max_tokens, z), 2);
  config.blockDim = dim3(x, y, z);
  config.dynamicSmemBytes = z * smem_per_token;
  config.stream = how.stream;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = how.overlaps ? 1 : 0;
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, p, args...));
}

template <typename T, bool kHalf, int kRows, int kPairs>
void launch_turned(const VectorAppend& p, const RopeParams& rope, const Launch& how) {
  Frequencies<kPairs> frequencies{};
  fill_frequencies(rope, frequencies.values);
  const VectorRope turned{rope.cos, rope.sin, rope.num_table_positions, rope.positions,
                          rope.rotary_dim};
  launch(append_turned_kernel<T, kHalf, kRows, kPairs>, p, kRows, kTurningThreads,
         static_cast<std::size_t>(rope.rotary_dim / 2) * sizeof(Turn), how, turned, frequencies);
}

template <typename T, bool kHalf>
void launch_turned(VectorAppend p, const RopeParams& rope, const Launch& how) {
  AppendSide& k = p.sides[0];
  if (kHalf) k.num_columns -= rope.rotary_dim / 2 / Vector<T>::kSize;
  cut_anew(p.sides[1], k.num_columns);
  if (rope.rotary_dim / 2 > kFewPairs) {
    launch_turned<T, kHalf, 2, kMaxRotaryPairs>(p, rope, how);
  } else if (how.few) {
    launch_turned<T, kHalf, 1, kFewPairs>(p, rope, how);
  } else {
    launch_turned<T, kHalf, 2, kFewPairs>(p, rope, how);
  }
}

void launch_vectors(const AppendParams& params, std::int64_t max_tokens, bool overlaps,
                    CUstream_st* stream) {
  VectorAppend p{.sides = {side_of(params, true), side_of(params, false)},
                 .slots = params.batch.token_slots,
                 .indices = params.k_layout.ragged ? nullptr : params.batch.token_indices,
                 .num_tokens = params.batch.token_offsets + params.batch.num_seqs,
                 .max_tokens = max_tokens};
  const Launch how{.few = max_tokens <= kFewTokens, .overlaps = overlaps, .stream = stream};
  if (params.rope.rotary_dim > 0) {
    const bool half = params.rope.style == RopeStyle::Half;
    if (params.kv.dtype == DType::F32) {
      half ? launch_turned<float, true>(p, params.rope, how)
           : launch_turned<float, false>(p, params.rope, how);
    } else if (params.kv.dtype == DType::F16) {
      half ? launch_turned<__half, true>(p, params.rope, how)
           : launch_turned<__half, false>(p, params.rope, how);
    } else {
      half ? launch_turned<__nv_bfloat16, true>(p, params.rope, how)
           : launch_turned<__nv_bfloat16, false>(p, params.rope, how);
    }
    return;
  }
  for (AppendSide& side : p.sides) cut_anew(side, static_cast<std::int32_t>(kWarp));
  launch(append_kernel, p, kCopiedRows, kAppendThreads, 0, how);
}

}  // namespace

bool append_may_overlap() {
  // Before 12.3 a launch that overlaps could not be captured.
  constexpr int kLeastDriver = 12'030;
  constexpr int kLeastPtx = 90;
  int driver = 0;
  cudaFuncAttributes attributes{};
  const bool known = cudaDriverGetVersion(&driver) == cudaSuccess &&
                     cudaFuncGetAttributes(&attributes, append_kernel) == cudaSuccess;
  static_cast<void>(cudaGetLastError());
  return known && driver >= kLeastDriver && attributes.ptxVersion >= kLeastPtx;
}

int append(const AppendParams& p, bool overlaps, CUstream_st* stream) {
  const std::int64_t tokens = min(std::int64_t{p.batch.num_tokens}, p.batch.max_token_slots);
  if (tokens == 0) return 0;
  if (fits_vectors(p)) {
    launch_vectors(p, tokens, overlaps, stream);
  } else {
    Frequencies<kMaxRotaryPairs> frequencies{};
    if (p.rope.rotary_dim > 0) fill_frequencies(p.rope, frequencies.values);
    const std::size_t turns = static_cast<std::size_t>(p.rope.rotary_dim / 2) * sizeof(Turn);
    append_elements_kernel<<<grid_for(tokens, 1), kAppendThreads, turns, stream>>>(p, frequencies);
  }
  return launched();
}

}  // namespace octavo::kernels::cuda
