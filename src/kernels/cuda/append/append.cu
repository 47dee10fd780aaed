// SPDX-License-Identifier: Apache-2.0
// Append. Memory-bound: reads and writes K and V once. A block takes some tokens; its warps look
// up a token each while its threads already load (ragged input is found without the lookup), 16
// bytes a thread and several loads in flight. What is not aligned, not dense or of another dtype
// than the cache goes element by element through the same lookups.
#include "kernels/cuda/append/append.h"
#include "kernels/cuda/append/tokens.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"

namespace octavo::kernels::cuda {
namespace {

constexpr int kUnroll = 4;
// Below this many tokens, blocks of one token each spread over more multiprocessors.
constexpr std::int64_t kFewTokens = 1024;

enum class Rotation { None, Rope };

struct Shape {
  std::uint32_t k_head_units;
  std::uint32_t v_head_units;
  std::uint32_t k_units;  // of all heads
  std::uint32_t units;    // of K and V
  std::uint32_t tokens_per_block;
};

__device__ std::int64_t unit_offset(const HeadPart& part, std::int64_t head_stride,
                                    std::int64_t unit_stride) {
  return part.head * head_stride + part.unit * unit_stride;
}

template <typename T>
__device__ uint4 load_vector(const void* data, std::int64_t offset) {
  return *reinterpret_cast<const uint4*>(static_cast<const T*>(data) + offset);
}

/// Vector `unit` of a head, turned; `partner` holds the pairs' other halves in the half style.
template <typename T>
__device__ uint4 turn_vector(const RopeParams& rope, const Turn* turns, int unit, uint4 own_bits,
                             uint4 partner_bits) {
  Vector<T> own, partner, result;
  own.bits = own_bits;
  partner.bits = partner_bits;
  const int first_dim = unit * Vector<T>::kSize;
#pragma unroll
  for (int e = 0; e < Vector<T>::kSize; ++e) {
    const int d = first_dim + e;
    const float other = rope.style == RopeStyle::Half ? to_float(partner.elements[e])
                                                      : to_float(own.elements[e ^ 1]);
    result.elements[e] = from_float<T>(
        turned(turns[pair_of(rope, d)], is_first(rope, d), to_float(own.elements[e]), other));
  }
  return result.bits;
}

/// Loads of one thread for one vector: where it is, and what was read.
struct Loaded {
  uint4 own;
  uint4 partner;
};

template <typename T, Rotation kRotation>
__device__ Loaded load_part(const AppendParams& p, const HeadPart& part, std::int64_t k_from,
                            std::int64_t v_from) {
  constexpr int kSize = Vector<T>::kSize;
  Loaded loaded{};
  if (!part.is_key) {
    loaded.own = load_vector<T>(p.v, v_from + unit_offset(part, p.v_layout.head_stride, kSize));
    return loaded;
  }
  const std::int64_t at = k_from + unit_offset(part, p.k_layout.head_stride, kSize);
  loaded.own = load_vector<T>(p.k, at);
  if constexpr (kRotation == Rotation::Rope) {
    const int dim = part.unit * kSize;
    if (p.rope.style == RopeStyle::Half && dim < p.rope.rotary_dim) {
      loaded.partner = load_vector<T>(p.k, at + partner_of(p.rope, dim) - dim);
    }
  }
  return loaded;
}

template <typename T, Rotation kRotation>
__global__ void __launch_bounds__(kAppendThreads)
    append_vectors_kernel(const __grid_constant__ AppendParams p, const __grid_constant__ Shape s,
                          const __grid_constant__ Frequencies frequencies) {
  constexpr int kSize = Vector<T>::kSize;
  __shared__ BlockToken tokens[kMaxTokensPerBlock];
  extern __shared__ Turn turns_smem[];  // [tokens_per_block, pairs]
  const std::int64_t first_token = std::int64_t{blockIdx.x} * s.tokens_per_block;
  const std::uint32_t all = s.tokens_per_block * s.units;
  const bool ragged = p.k_layout.ragged;

  Loaded loaded[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::uint32_t w = threadIdx.x + u * blockDim.x;
    const std::int64_t token = first_token + w / s.units;
    const HeadPart part = part_of(w % s.units, s.k_units, s.k_head_units, s.v_head_units);
    const std::int64_t rows = part.is_key ? p.k_layout.num_token_rows : p.v_layout.num_token_rows;
    if (ragged && w < all && token < rows) {
      loaded[u] = load_part<T, kRotation>(p, part, token * p.k_layout.token_stride,
                                          token * p.v_layout.token_stride);
    }
  }

  for (std::uint32_t t = threadIdx.x / kWarp; t < s.tokens_per_block; t += blockDim.x / kWarp) {
    look_up_token(p, first_token + t, tokens[t]);
  }
  __syncthreads();
  if constexpr (kRotation == Rotation::Rope) {
    make_turns(p, frequencies, tokens, static_cast<int>(s.tokens_per_block), turns_smem);
    __syncthreads();
  }

  const auto write = [&](std::uint32_t w, const Loaded& from) {
    const std::uint32_t t = w / s.units;
    const BlockToken& token = tokens[t];
    if (!token.valid) return;
    const HeadPart part = part_of(w % s.units, s.k_units, s.k_head_units, s.v_head_units);
    uint4 bits = from.own;
    if constexpr (kRotation == Rotation::Rope) {
      if (part.is_key && part.unit * kSize < p.rope.rotary_dim) {
        bits = turn_vector<T>(p.rope, turns_smem + t * (p.rope.rotary_dim / 2), part.unit, bits,
                              from.partner);
      }
    }
    T* to = part.is_key ? static_cast<T*>(p.kv.k.data) + token.k_to +
                              unit_offset(part, p.kv.k.head_stride, kSize)
                        : static_cast<T*>(p.kv.v.data) + token.v_to +
                              unit_offset(part, p.kv.v.head_stride, kSize);
    *reinterpret_cast<uint4*>(to) = bits;
  };
  const auto load = [&](std::uint32_t w) {
    const BlockToken& token = tokens[w / s.units];
    if (!token.valid) return Loaded{};
    const HeadPart part = part_of(w % s.units, s.k_units, s.k_head_units, s.v_head_units);
    return load_part<T, kRotation>(p, part, token.k_from, token.v_from);
  };
  if (!ragged) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::uint32_t w = threadIdx.x + u * blockDim.x;
      if (w < all) loaded[u] = load(w);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::uint32_t w = threadIdx.x + u * blockDim.x;
    if (w < all) write(w, loaded[u]);
  }
  for (std::uint32_t w = threadIdx.x + kUnroll * blockDim.x; w < all; w += blockDim.x) {
    write(w, load(w));
  }

  for (std::uint32_t t = 0; t < s.tokens_per_block; ++t) {
    const BlockToken& token = tokens[t];
    const std::int64_t clear = token.valid ? std::int64_t{token.num_clear} * s.units : 0;
    for (std::int64_t w = threadIdx.x; w < clear; w += blockDim.x) {
      const std::int64_t slot = w / s.units;
      const HeadPart part = part_of(static_cast<std::uint32_t>(w - slot * s.units), s.k_units,
                                    s.k_head_units, s.v_head_units);
      T* to = part.is_key
                  ? static_cast<T*>(p.kv.k.data) + token.k_clear + slot * p.kv.k.slot_stride +
                        unit_offset(part, p.kv.k.head_stride, kSize)
                  : static_cast<T*>(p.kv.v.data) + token.v_clear + slot * p.kv.v.slot_stride +
                        unit_offset(part, p.kv.v.head_stride, kSize);
      *reinterpret_cast<uint4*>(to) = uint4{};
    }
  }
}

/// Any strides, any mix of dtypes: an element a thread, a token a block.
__global__ void __launch_bounds__(kAppendThreads)
    append_elements_kernel(const __grid_constant__ AppendParams p, const __grid_constant__ Shape s,
                           const __grid_constant__ Frequencies frequencies) {
  __shared__ BlockToken token;
  extern __shared__ Turn turns_smem[];  // [pairs]
  if (threadIdx.x < kWarp) look_up_token(p, blockIdx.x, token);
  __syncthreads();
  if (!token.valid) return;
  if (p.rope.rotary_dim > 0) {
    make_turns(p, frequencies, &token, 1, turns_smem);
    __syncthreads();
  }
  for (std::uint32_t r = threadIdx.x; r < s.units; r += blockDim.x) {
    const HeadPart part = part_of(r, s.k_units, s.k_head_units, s.v_head_units);
    const TokenLayout& layout = part.is_key ? p.k_layout : p.v_layout;
    const PagedTensor& tensor = part.is_key ? p.kv.k : p.kv.v;
    const void* from = part.is_key ? p.k : p.v;
    const DType dtype = part.is_key ? p.k_dtype : p.v_dtype;
    const std::int64_t head =
        (part.is_key ? token.k_from : token.v_from) + part.head * layout.head_stride;
    float value = load_element(from, dtype, head + part.unit * layout.dim_stride);
    if (part.is_key && part.unit < p.rope.rotary_dim) {
      const float other =
          load_element(from, dtype, head + partner_of(p.rope, part.unit) * layout.dim_stride);
      value =
          turned(turns_smem[pair_of(p.rope, part.unit)], is_first(p.rope, part.unit), value, other);
    }
    const std::int64_t to = (part.is_key ? token.k_to : token.v_to) +
                            unit_offset(part, tensor.head_stride, tensor.dim_stride);
    store_element(tensor.data, p.kv.dtype, to, value);
  }
  for (std::int64_t w = threadIdx.x; w < std::int64_t{token.num_clear} * s.units; w += blockDim.x) {
    const std::int64_t slot = w / s.units;
    const HeadPart part = part_of(static_cast<std::uint32_t>(w - slot * s.units), s.k_units,
                                  s.k_head_units, s.v_head_units);
    const PagedTensor& tensor = part.is_key ? p.kv.k : p.kv.v;
    const std::int64_t to = (part.is_key ? token.k_clear : token.v_clear) +
                            slot * tensor.slot_stride +
                            unit_offset(part, tensor.head_stride, tensor.dim_stride);
    store_element(tensor.data, p.kv.dtype, to, 0.0F);
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

Shape shape_of(const AppendParams& p, std::int32_t unit) {
  Shape s{};
  s.k_head_units = static_cast<std::uint32_t>(p.head_dim / unit);
  s.v_head_units = static_cast<std::uint32_t>(p.head_dim_v / unit);
  s.k_units = static_cast<std::uint32_t>(p.num_kv_heads) * s.k_head_units;
  s.units = s.k_units + static_cast<std::uint32_t>(p.num_kv_heads) * s.v_head_units;
  s.tokens_per_block = 1;
  return s;
}

std::size_t turns_bytes(const AppendParams& p, std::uint32_t tokens) {
  return tokens * static_cast<std::size_t>(p.rope.rotary_dim / 2) * sizeof(Turn);
}

template <typename T>
void launch_vectors(const AppendParams& p, const Frequencies& frequencies, CUstream_st* stream) {
  Shape s = shape_of(p, Vector<T>::kSize);
  if (p.batch.num_tokens > kFewTokens) {
    const std::uint32_t whole = kUnroll * kAppendThreads / s.units;
    s.tokens_per_block = whole < 1 ? 1 : min(whole, std::uint32_t{kMaxTokensPerBlock});
  }
  const unsigned grid = grid_for(p.batch.num_tokens, s.tokens_per_block);
  const std::uint32_t work = s.tokens_per_block * s.units;
  const unsigned threads = min((work + kWarp - 1) / kWarp * kWarp, unsigned{kAppendThreads});
  if (p.rope.rotary_dim > 0) {
    append_vectors_kernel<T, Rotation::Rope>
        <<<grid, threads, turns_bytes(p, s.tokens_per_block), stream>>>(p, s, frequencies);
  } else {
    append_vectors_kernel<T, Rotation::None><<<grid, threads, 0, stream>>>(p, s, frequencies);
  }
}

}  // namespace

int append(const AppendParams& p, CUstream_st* stream) {
  if (p.batch.num_tokens == 0) return 0;
  Frequencies frequencies{};
  if (p.rope.rotary_dim > 0) fill_frequencies(p.rope, frequencies);
  if (!fits_vectors(p)) {
    const Shape s = shape_of(p, 1);
    const std::uint32_t units = (s.units + kWarp - 1) / kWarp * kWarp;
    append_elements_kernel<<<grid_for(p.batch.num_tokens, 1),
                             min(units, std::uint32_t{kAppendThreads}), turns_bytes(p, 1),
                             stream>>>(p, s, frequencies);
  } else if (p.kv.dtype == DType::F32) {
    launch_vectors<float>(p, frequencies, stream);
  } else if (p.kv.dtype == DType::F16) {
    launch_vectors<__half>(p, frequencies, stream);
  } else {
    launch_vectors<__nv_bfloat16>(p, frequencies, stream);
  }
  return launched();
}

}  // namespace octavo::kernels::cuda
