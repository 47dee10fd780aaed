// SPDX-License-Identifier: Apache-2.0
// Tokens from format to format. Memory-bound: a warp moves one row of heads, 16 bytes a lane where
// dtypes agree and strides allow, four loads in flight.
#include "kernels/cuda/convert/convert.h"

#include "kernels/cuda/common/gather.cuh"

namespace octavo::kernels::cuda {
namespace {

constexpr int kRowsPerBlock = 8;
constexpr int kUnroll = 4;

/// The token of row `row` of `to`: its batch row and index, or -1 for padding. By a whole warp.
__device__ TokenPlace place_of_row(const ConvertParams& p, std::int64_t row) {
  if (p.to_layout.ragged) return place_of_token(p.batch, row);
  const auto b = static_cast<std::int32_t>(row / p.to_layout.num_token_rows);
  const auto i = static_cast<std::int32_t>(row % p.to_layout.num_token_rows);
  if (b >= p.batch.num_seqs || i >= new_tokens(p.batch, b)) return {};
  return {b, i};
}

__device__ std::int64_t offset_of_row(const TokenLayout& layout, std::int64_t row) {
  if (layout.ragged) return row * layout.token_stride;
  return row / layout.num_token_rows * layout.batch_stride +
         row % layout.num_token_rows * layout.token_stride;
}

template <Unit kUnit>
__global__ void __launch_bounds__(kRowsPerBlock* kWarp)
    convert_tokens_kernel(const __grid_constant__ ConvertParams p, std::int64_t num_rows) {
  const auto size = static_cast<std::int32_t>(p.to_dtype == DType::F32 ? 4 : 2);
  const std::int32_t width = kUnit == Unit::Vector ? kVectorBytes / size : 1;
  const std::int32_t head_units = p.dim / width;
  const std::int32_t units = p.num_heads * head_units;
  const std::int64_t step = std::int64_t{gridDim.x} * kRowsPerBlock;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
       row < num_rows; row += step) {
    const TokenPlace place = place_of_row(p, row);
    const std::int64_t to = offset_of_row(p.to_layout, row);
    const std::int64_t from =
        place.b >= 0 ? token_offset(p.from_layout, p.batch, place.b, place.i) : 0;
    const auto at = [&](const TokenLayout& layout, std::int32_t unit) {
      return unit / head_units * layout.head_stride + unit % head_units * width * layout.dim_stride;
    };
    for (auto first = static_cast<std::int32_t>(threadIdx.x % kWarp); first < units;
         first += kUnroll * static_cast<std::int32_t>(kWarp)) {
      if constexpr (kUnit == Unit::Vector) {
        uint4 bits[kUnroll] = {};
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const std::int32_t unit = first + u * static_cast<std::int32_t>(kWarp);
          if (place.b >= 0 && unit < units) {
            bits[u] = *reinterpret_cast<const uint4*>(static_cast<const char*>(p.from) +
                                                      (from + at(p.from_layout, unit)) * size);
          }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const std::int32_t unit = first + u * static_cast<std::int32_t>(kWarp);
          if (unit < units) {
            *reinterpret_cast<uint4*>(static_cast<char*>(p.to) +
                                      (to + at(p.to_layout, unit)) * size) = bits[u];
          }
        }
      } else {
        for (int u = 0; u < kUnroll; ++u) {
          const std::int32_t unit = first + u * static_cast<std::int32_t>(kWarp);
          if (unit >= units) break;
          store_element(p.to, p.to_dtype, to + at(p.to_layout, unit),
                        place.b >= 0
                            ? load_element(p.from, p.from_dtype, from + at(p.from_layout, unit))
                            : 0.0F);
        }
      }
    }
  }
}

}  // namespace

int convert_tokens(const ConvertParams& p, CUstream_st* stream) {
  const TokenLayout& t = p.to_layout;
  const std::int64_t rows = t.ragged ? t.num_token_rows : t.num_token_rows * t.num_batch_rows;
  if (rows == 0) return 0;
  const std::int64_t size = dtype_bytes(p.to_dtype);
  const auto fits = [&](const void* data, const TokenLayout& layout) {
    return layout.dim_stride == 1 &&
           is_aligned(data, size, layout.batch_stride, layout.token_stride, layout.head_stride);
  };
  const bool wide = p.from_dtype == p.to_dtype && p.dim * size % kVectorBytes == 0 &&
                    fits(p.from, p.from_layout) && fits(p.to, p.to_layout);
  const unsigned grid = grid_for(rows, kRowsPerBlock);
  if (wide) {
    convert_tokens_kernel<Unit::Vector><<<grid, kRowsPerBlock * kWarp, 0, stream>>>(p, rows);
  } else {
    convert_tokens_kernel<Unit::Element><<<grid, kRowsPerBlock * kWarp, 0, stream>>>(p, rows);
  }
  return launched();
}

int gather_pages(const GatherParams& p, CUstream_st* stream) { return launch_gather(p, stream); }

}  // namespace octavo::kernels::cuda
