// SPDX-License-Identifier: Apache-2.0
// Wide heads: where things lie in shared memory, and what a warp multiplies between two barriers:
// scores of a tile, half of the dims, and values of the tile before, some of the dims. wide.cuh
// has what goes around it.
#pragma once

#include <cstdint>

#include "kernels/cuda/flash2/products.cuh"
#include "kernels/cuda/flash2/results.cuh"
#include "kernels/cuda/flash2/wide_loader.cuh"

namespace octavo::kernels::flash2 {

/// Where things lie in an item's shared memory.
template <typename ConfigT>
struct WideBuffers {
  static constexpr int kWeightsOffset = ConfigT::kExchangeOffset + ConfigT::kProductBytes;
  static constexpr int kMaximaOffset = kWeightsOffset + ConfigT::kRows * ConfigT::kWeightPitch;
  static_assert(Results<ConfigT>::kOffset +
                    ConfigT::kRows * Results<ConfigT>::kPitch * sizeof(float) <=
                ConfigT::kExchangeOffset);

  unsigned char* smem;
  SmemAddress q;

  __device__ explicit WideBuffers(unsigned char* to) : smem(to), q(cuda::smem_address(to)) {}

  __device__ static int stage_of(int tile) { return tile & (ConfigT::kStages - 1); }
  [[nodiscard]] __device__ SmemAddress k(int tile) const {
    return q + ConfigT::kQueryBytes + stage_of(tile) * ConfigT::kKeyBytes;
  }
  [[nodiscard]] __device__ SmemAddress v(int tile) const {
    return q + ConfigT::kQueryBytes + ConfigT::kStages * ConfigT::kKeyBytes +
           stage_of(tile) * ConfigT::kValueBytes;
  }
  /// A warp's products for its mate: [.., lanes].
  [[nodiscard]] __device__ float* products(int warp) const {
    return reinterpret_cast<float*>(smem + ConfigT::kExchangeOffset) +
           warp * kProductRows * ConfigT::kPartKeys;
  }
  /// Two weights, of a row and the keys `key` and key + 1 of the tile.
  [[nodiscard]] __device__ std::uint32_t* weights(int row, int key) const {
    return reinterpret_cast<std::uint32_t*>(smem + kWeightsOffset + row * ConfigT::kWeightPitch +
                                            key * 2);
  }
  /// Of a row and a part of the keys: the largest logit, and at the end the sum of weights.
  [[nodiscard]] __device__ float& largest(int part, int row) const {
    return reinterpret_cast<float*>(smem + kMaximaOffset)[part * ConfigT::kRows + row];
  }
  /// What the sums of a row are to be multiplied with.
  [[nodiscard]] __device__ float& shrink(int row) const { return largest(ConfigT::kParts, row); }
};

/// A warp's products of half of the dims, with all keys of a tile.
template <typename ConfigT>
using WideProducts = float[ConfigT::kKeys / 8][4];

/// A warp's scores of a tile: of its part of the keys.
template <typename ConfigT>
using WideScores = float[1][ConfigT::kPartKeys / 8][4];

/// out = out * shrink + weights v, of the first kRowTiles tiles of rows and the warp's dims, in
/// steps that go between others.
template <typename T, typename ConfigT, int kRowTiles>
class ValueSteps {
 public:
  static constexpr int kPairs = ConfigT::kOutTiles / 2;
  static constexpr int kSteps = 2 * kPairs * (ConfigT::kKeys / 16);

  using Sums = float[ConfigT::kRowTiles][ConfigT::kOutTiles][4];

  __device__ ValueSteps(const WideBuffers<ConfigT>& buffers, SmemAddress v, int first_tile,
                        int lane, Sums& out)
      : first_v_(v + place_of<ValueRows<ConfigT>>(lane / 8 % 2 * 8 + lane % 8, lane / 16) +
                 first_tile * 16),
        first_weight_(
            cuda::smem_address(buffers.weights(lane / 8 % 2 * 8 + lane % 8, lane / 16 * 8))) {
    float shrink[kRowTiles][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        shrink[m][r] = buffers.shrink(m * kProductRows + lane / 4 + 8 * r);
        grown = grown || shrink[m][r] != 1.0F;
      }
    }
    // As long as no row's largest grows, which is most of a long sequence, all factors are 1.
    if (!__any_sync(kAllLanes, grown)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (auto& part : out[m]) {
        for (int e = 0; e < 4; ++e) part[e] *= shrink[m][e / 2];
      }
    }
  }

  /// Step `i`, known when this is compiled: loads in even ones, products in odd ones.
  __device__ void step(int i, Sums& out) {
    if (i >= kSteps) return;
    const int n = i / 2 / kPairs;
    const int d = i / 2 % kPairs;
    if (i % 2 == 0) {
      if (d == 0) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          cuda::load_matrices(weights_[m],
                              first_weight_ + m * kProductRows * ConfigT::kWeightPitch + n * 32);
        }
      }
      cuda::load_matrices_transposed(
          values_, pairs_on(first_v_, d) + n * 16 * ValueRows<ConfigT>::kRowBytes);
      return;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      cuda::multiply_add<T>(out[m][2 * d], weights_[m], values_[0], values_[1]);
      cuda::multiply_add<T>(out[m][2 * d + 1], weights_[m], values_[2], values_[3]);
    }
  }

 private:
  SmemAddress first_v_;
  SmemAddress first_weight_;
  std::uint32_t weights_[kRowTiles][4];
  std::uint32_t values_[4];
};
template <typename T, typename ConfigT>
class ValueSteps<T, ConfigT, 0> {
 public:
  static constexpr int kSteps = 0;
  using Sums = float[ConfigT::kRowTiles][ConfigT::kOutTiles][4];
  __device__ ValueSteps(const WideBuffers<ConfigT>& /*buffers*/, SmemAddress /*v*/,
                        int /*first_tile*/, int /*lane*/, Sums& /*out*/) {}
  __device__ void step(int /*i*/, Sums& /*out*/) {}
};

/// What a warp does between two barriers: products of q and the keys of a tile, and of the weights
/// and the values of the tile before.
template <typename ConfigT>
struct WideStep {
  SmemAddress k, v;
  bool multiplies_keys;
  int part;
  int first_row;
  int first_tile;  ///< Of the warp's dims of V.
};

/// Part 0 has the first 32 of each 64 dims, part 1 the others, so that the same constants lead from
/// one to the next. Inlined by force: the sums must stay in registers.
template <typename T, typename ConfigT, int kRowTiles>
__device__ __forceinline__ void multiply(const WideBuffers<ConfigT>& buffers,
                                         const WideStep<ConfigT>& step,
                                         WideProducts<ConfigT>& products,
                                         typename ValueSteps<T, ConfigT, kRowTiles>::Sums& out) {
  constexpr int kDimSteps = ConfigT::kDim / 16 / ConfigT::kParts;
  constexpr int kPairs = ConfigT::kKeys / 16;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  ValueSteps<T, ConfigT, kRowTiles> values(buffers, step.v, step.first_tile, lane, out);
  static_assert(ValueSteps<T, ConfigT, kRowTiles>::kSteps <= kDimSteps);
  if (!step.multiplies_keys) {
#pragma unroll
    for (int i = 0; i < kDimSteps; ++i) values.step(i, out);
    return;
  }
#pragma unroll
  for (auto& pair : products) {
    for (float& value : pair) value = 0.0F;
  }
  const auto part = static_cast<SmemAddress>(step.part * 64);
  const SmemAddress first_q =
      (buffers.q + place_of<ConfigT>(step.first_row + lane / 8 % 2 * 8 + lane % 8, lane / 16)) ^
      part;
  const SmemAddress first_k =
      (step.k + place_of<ConfigT>(lane / 16 * 8 + lane % 8, lane / 8 % 2)) ^ part;
  const auto steps_on = [](SmemAddress first, int d) {
    return (first ^ static_cast<SmemAddress>(d % 2 * 32)) + static_cast<SmemAddress>(d / 2 * 128);
  };
  std::uint32_t rows[2][4];
  std::uint32_t keys[2][kPairs][4];
  const auto load = [&](int d) {
    cuda::load_matrices(rows[d % 2], steps_on(first_q, d));
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
      cuda::load_matrices(keys[d % 2][n], steps_on(first_k, d) + n * 16 * ConfigT::kRowBytes);
  };
  load(0);
#pragma unroll
  for (int d = 0; d < kDimSteps; ++d) {
    if (d + 1 < kDimSteps) load(d + 1);
    values.step(d, out);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const auto& [a, b, c, e] = keys[d % 2][n];
      cuda::multiply_add<T>(products[2 * n], rows[d % 2], a, b);
      cuda::multiply_add<T>(products[2 * n + 1], rows[d % 2], c, e);
    }
  }
}

/// Adds the products of the mate to those of the warp's part of the keys.
template <typename ConfigT>
__device__ void add_mates(const WideBuffers<ConfigT>& buffers, int part, int first_row, int lane,
                          const WideProducts<ConfigT>& products, WideScores<ConfigT>& scores) {
  constexpr int kTiles = ConfigT::kPartKeys / 8;
  const int row_tile = first_row / kProductRows;
  float* own = buffers.products(row_tile * 2 + part) + lane;
  const float* other = buffers.products(row_tile * 2 + 1 - part) + lane;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // Selected, not indexed: registers have no index.
      own[(n * 4 + e) * kLanes] = part == 0 ? products[kTiles + n][e] : products[n][e];
      scores[0][n][e] = part == 0 ? products[n][e] : products[kTiles + n][e];
    }
  }
  cuda::sync_some(1 + row_tile, 2 * kLanes);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[0][n][e] += other[(n * 4 + e) * kLanes];
  }
}

}  // namespace octavo::kernels::flash2
