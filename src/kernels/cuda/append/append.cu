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

// Below this many tokens, blocks of few tokens spread over more multiprocessors.
constexpr std::int64_t kFewTokens = 1024;

/// RoPE's frequencies are kernel parameters: few where few suffice, since large parameters make
/// short launches slower.
enum class Rotation { None, Few, Many };

/// Tokens of a thread, whose loads are in flight together. On an H200 4 and 2 (where a token is two
/// vectors) were the fastest of 1, 2, 4, in blocks of which a multiprocessor holds at least 5: more
/// blocks spill registers, fewer leave the lookups in sight.
template <Rotation kRotation>
constexpr int kUnroll = kRotation == Rotation::None ? 4 : 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMinBlocks = 4;  // all that sm75 holds
#else
constexpr int kMinBlocks = 5;
#endif

constexpr int kFewPairs = 64;

template <Rotation kRotation>
struct RotationParams {
  double values[kRotation == Rotation::Few ? kFewPairs : kMaxRotaryPairs];
};
template <>
struct RotationParams<Rotation::None> {};

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

/// Vector `unit` of a head, turned; `partner` holds the pairs' other halves in the half style.
template <typename T>
__device__ uint4 turn_vector(const RopeParams& rope, const Turn* turns, int unit, uint4 own_bits,
                             uint4 partner_bits) {
  Vector<T> own, partner, result;
  own.bits = own_bits;
  partner.bits = partner_bits;
  const int dim = unit * Vector<T>::kSize;
  if (rope.style == RopeStyle::Half) {
    const bool first = is_first(rope, dim);
    const Turn* own_turns = turns + pair_of(rope, dim);
#pragma unroll
    for (int e = 0; e < Vector<T>::kSize; ++e) {
      result.elements[e] = from_float<T>(
          turned(own_turns[e], first, to_float(own.elements[e]), to_float(partner.elements[e])));
    }
  } else {
    const Turn* own_turns = turns + dim / 2;
#pragma unroll
    for (int e = 0; e < Vector<T>::kSize; ++e) {
      result.elements[e] = from_float<T>(turned(
          own_turns[e / 2], e % 2 == 0, to_float(own.elements[e]), to_float(own.elements[e ^ 1])));
    }
  }
  return result.bits;
}

template <typename T>
__device__ const T* at(const void* data, std::int64_t offset) {
  return static_cast<const T*>(data) + offset;
}
__device__ uint4 load_vector(const void* from) { return __ldcs(static_cast<const uint4*>(from)); }

/// A thread keeps its part of a token's heads and goes from token to token: x is the part, y the
/// token.
template <typename T, Rotation kRotation>
__global__ void __launch_bounds__(kAppendThreads, kMinBlocks)
    append_vectors_kernel(const __grid_constant__ AppendParams p, const __grid_constant__ Shape s,
                          const __grid_constant__ RotationParams<kRotation> rotation) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kTokens = kUnroll<kRotation>;
  __shared__ BlockToken tokens[kMaxTokensPerBlock];
  extern __shared__ Turn turns_smem[];  // [tokens_per_block, pairs]
  const std::int64_t first_token = std::int64_t{blockIdx.x} * s.tokens_per_block;
  const std::uint32_t thread = threadIdx.y * blockDim.x + threadIdx.x;
  const std::uint32_t warps = blockDim.x * blockDim.y / kWarp;
  bool looked_up = false;

  for (std::uint32_t r = threadIdx.x; r < s.units || !looked_up; r += blockDim.x) {
    const bool works = r < s.units;
    const HeadPart part = part_of(works ? r : 0, s.k_units, s.k_head_units, s.v_head_units);
    const TokenLayout& layout = part.is_key ? p.k_layout : p.v_layout;
    const PagedTensor& tensor = part.is_key ? p.kv.k : p.kv.v;
    const T* from = at<T>(part.is_key ? p.k : p.v, unit_offset(part, layout.head_stride, kSize));
    bool turns = false;
    std::int64_t to_partner = 0;
    if constexpr (kRotation != Rotation::None) {
      const int dim = part.unit * kSize;
      turns = part.is_key && dim < p.rope.rotary_dim;
      if (turns && p.rope.style == RopeStyle::Half) to_partner = partner_of(p.rope, dim) - dim;
    }

    uint4 own[kTokens] = {};
    uint4 partner[kRotation == Rotation::None ? 1 : kTokens] = {};
    const auto load = [&](int u, std::int64_t offset) {
      own[u] = load_vector(from + offset);
      if constexpr (kRotation != Rotation::None) {
        if (to_partner != 0) partner[u] = load_vector(from + offset + to_partner);
      }
    };
    if (p.k_layout.ragged && works) {
#pragma unroll
      for (int u = 0; u < kTokens; ++u) {
        const std::uint32_t t = threadIdx.y + static_cast<std::uint32_t>(u) * blockDim.y;
        const std::int64_t token = first_token + t;
        if (t < s.tokens_per_block && token < layout.num_token_rows) {
          load(u, token * layout.token_stride);
        }
      }
    }
    if (!looked_up) {
      for (std::uint32_t t = thread / kWarp; t < s.tokens_per_block; t += warps) {
        look_up_token(p, first_token + t, tokens[t]);
      }
      __syncthreads();
      if constexpr (kRotation != Rotation::None) {
        make_turns(p, rotation.values, tokens, static_cast<int>(s.tokens_per_block), turns_smem);
        __syncthreads();
      }
      looked_up = true;
    }
    if (!works) break;
    if (!p.k_layout.ragged) {
#pragma unroll
      for (int u = 0; u < kTokens; ++u) {
        const std::uint32_t t = threadIdx.y + static_cast<std::uint32_t>(u) * blockDim.y;
        if (t < s.tokens_per_block && tokens[t].valid) {
          load(u, part.is_key ? tokens[t].k_from : tokens[t].v_from);
        }
      }
    }
    T* to = static_cast<T*>(tensor.data) + unit_offset(part, tensor.head_stride, kSize);
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      const std::uint32_t t = threadIdx.y + static_cast<std::uint32_t>(u) * blockDim.y;
      if (t >= s.tokens_per_block || !tokens[t].valid) continue;
      uint4 bits = own[u];
      if constexpr (kRotation != Rotation::None) {
        if (turns) {
          bits = turn_vector<T>(p.rope, turns_smem + t * (p.rope.rotary_dim / 2), part.unit, bits,
                                partner[u]);
        }
      }
      *reinterpret_cast<uint4*>(to + (part.is_key ? tokens[t].k_to : tokens[t].v_to)) = bits;
    }
    for (std::uint32_t t = threadIdx.y; t < s.tokens_per_block; t += blockDim.y) {
      if (!tokens[t].valid) continue;
      const std::int64_t first = part.is_key ? tokens[t].k_clear : tokens[t].v_clear;
      for (std::int32_t slot = 0; slot < tokens[t].num_clear; ++slot) {
        *reinterpret_cast<uint4*>(to + first + slot * tensor.slot_stride) = uint4{};
      }
    }
  }
}

/// Any strides, any mix of dtypes: an element a thread, a token a block.
__global__ void __launch_bounds__(kAppendThreads)
    append_elements_kernel(const __grid_constant__ AppendParams p, const __grid_constant__ Shape s,
                           const __grid_constant__ RotationParams<Rotation::Many> rotation) {
  __shared__ BlockToken token;
  extern __shared__ Turn turns_smem[];  // [pairs]
  if (threadIdx.x < kWarp) look_up_token(p, blockIdx.x, token);
  __syncthreads();
  if (!token.valid) return;
  if (p.rope.rotary_dim > 0) {
    make_turns(p, rotation.values, &token, 1, turns_smem);
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

template <Rotation kRotation>
RotationParams<kRotation> rotation_of(const RopeParams& rope) {
  RotationParams<kRotation> rotation{};
  if constexpr (kRotation != Rotation::None) fill_frequencies(rope, rotation.values);
  return rotation;
}

template <typename T, Rotation kRotation>
void launch_vectors(const AppendParams& p, CUstream_st* stream) {
  Shape s = shape_of(p, Vector<T>::kSize);
  // Parts of a token in x, as many as a power of two covers; the rest of the block's threads are
  // further tokens.
  unsigned x = kWarp;
  while (x < s.units && x < unsigned{kAppendThreads}) x *= 2;
  const bool few = p.batch.num_tokens <= kFewTokens;
  const unsigned y = unsigned{kAppendThreads} / x;
  s.tokens_per_block = few ? y : min(y * kUnroll<kRotation>, unsigned{kMaxTokensPerBlock});
  append_vectors_kernel<T, kRotation>
      <<<grid_for(p.batch.num_tokens, s.tokens_per_block), dim3(x, y),
         turns_bytes(p, s.tokens_per_block), stream>>>(p, s, rotation_of<kRotation>(p.rope));
}

template <typename T>
void launch_vectors(const AppendParams& p, CUstream_st* stream) {
  if (p.rope.rotary_dim == 0) {
    launch_vectors<T, Rotation::None>(p, stream);
  } else if (p.rope.rotary_dim / 2 <= kFewPairs) {
    launch_vectors<T, Rotation::Few>(p, stream);
  } else {
    launch_vectors<T, Rotation::Many>(p, stream);
  }
}

}  // namespace

int append(const AppendParams& p, CUstream_st* stream) {
  if (p.batch.num_tokens == 0) return 0;
  if (!fits_vectors(p)) {
    const Shape s = shape_of(p, 1);
    const std::uint32_t units = (s.units + kWarp - 1) / kWarp * kWarp;
    append_elements_kernel<<<grid_for(p.batch.num_tokens, 1),
                             min(units, std::uint32_t{kAppendThreads}), turns_bytes(p, 1),
                             stream>>>(p, s, rotation_of<Rotation::Many>(p.rope));
  } else if (p.kv.dtype == DType::F32) {
    launch_vectors<float>(p, stream);
  } else if (p.kv.dtype == DType::F16) {
    launch_vectors<__half>(p, stream);
  } else {
    launch_vectors<__nv_bfloat16>(p, stream);
  }
  return launched();
}

}  // namespace octavo::kernels::cuda
