// SPDX-License-Identifier: Apache-2.0
// The tiles of each instance of flash2. Compiles without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::kernels::flash2 {

/// Rows of one matrix product of a warp.
inline constexpr int kProductRows = 16;

/// Elements of 16 bytes.
inline constexpr int kChunk = 8;

/// How a block of an instance works. Rows are (token, query head) pairs. kFew: an instance
/// for steps of few rows, where keys are dealt to the warps and all look at all rows.
template <int kDimT, int kWarpsT, int kRowTilesT, int kKeysT, int kStagesT, int kBlocksT,
          bool kFewT = false>
struct TileConfig {
  static constexpr int kDim = kDimT;   ///< Widest head of K.
  static constexpr int kDimV = kDimT;  ///< Of V.
  static constexpr int kWarps = kWarpsT;
  static constexpr int kRowTiles = kRowTilesT;  ///< Of kProductRows rows, a warp.
  static constexpr int kKeys = kKeysT;          ///< Of a tile.
  static constexpr int kStages = kStagesT;      ///< Buffers of K, and of V.
  static constexpr int kBlocks = kBlocksT;      ///< That a multiprocessor is to hold.

  static constexpr int kThreads = kWarps * 32;
  static constexpr bool kFew = kFewT;
  static constexpr bool kWide = false;
  /// A block has its multiprocessor for itself, and several warps on each of its schedulers: they
  /// needn't be at the same tile (ring.cuh).
  static constexpr bool kDrifts = !kFew && kBlocks == 1 && kWarps > 4;
  static constexpr int kRows = (kFew ? 1 : kWarps) * kRowTiles * kProductRows;
  static constexpr int kWarpKeys = kKeys / kWarps;  ///< That a warp brings.
  /// Whose scores a warp has at once where rows are dealt: half a tile where the sums of two tiles
  /// of rows leave no registers for more.
  static constexpr int kScoreKeys = kRowTiles == 2 && kDim > 64 ? kKeys / 2 : kKeys;
  /// With few rows the keys are dealt to groups of warps, sixteen each; the warps of a group share
  /// the dims of V.
  static constexpr int kKeyGroups = kKeys / 16;
  static constexpr int kDimParts = kWarps / kKeyGroups;
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kKeyBytes = kKeys * kRowBytes;
  static constexpr int kQueryBytes = kRows * kRowBytes;
  static constexpr int kSmemBytes = kQueryBytes + 2 * kStages * kKeyBytes;
  static_assert(kStages >= 2 && kWarps % kKeyGroups == 0 && kWarpKeys <= 16);
};

using Head64 = TileConfig<64, 4, 2, 64, 3, 2>;
using Head128 = TileConfig<128, 4, 2, 64, 2, 2>;
using Head256 = TileConfig<256, 8, 1, 64, 2, 1>;
/// For multiprocessors with less shared memory than Head256 takes (sm80: 163 KB, sm86, sm89: 99 KB
/// a block).
using Head256Small = TileConfig<256, 4, 1, 32, 2, 1>;
static_assert(Head128::kSmemBytes <= 99 * 1024 && Head256Small::kSmemBytes <= 99 * 1024);

/// Decode, and drafts.
template <int kRowTiles>
using Few64 = TileConfig<64, 4, kRowTiles, 64, 3, kRowTiles == 1 ? 4 : 3, true>;
template <int kRowTiles>
using Few128 = TileConfig<128, 4, kRowTiles, 64, 2, 2, true>;
template <int kRowTiles>
using Few256 = TileConfig<256, 4, kRowTiles, 32, 2, 2, true>;
inline constexpr std::int32_t kMostFewRows = 32;

/// Heads too wide for the sums of a row to lie in one warp: warps share the dims of V, and tell
/// each other the weights (wide.cuh).
template <int kRowTilesT, int kWarpsT, int kKeysT, int kStagesT>
struct WideConfig {
  static constexpr int kDim = 576;
  static constexpr int kDimV = 512;
  static constexpr int kWarps = kWarpsT;
  static constexpr int kRowTiles = kRowTilesT;  ///< Of the block.
  static constexpr int kKeys = kKeysT;
  static constexpr int kStages = kStagesT;
  static constexpr int kBlocks = 1;

  static constexpr int kThreads = kWarps * 32;
  static constexpr bool kFew = false;
  static constexpr bool kWide = true;
  static constexpr bool kDrifts = false;
  static constexpr int kRows = kRowTiles * kProductRows;
  static constexpr int kWarpKeys = kKeys / kWarps;
  static constexpr int kKeyParts = kKeys / 16;               ///< A warp's scores are of one part,
  static constexpr int kOutTiles = kDimV / kChunk / kWarps;  ///< its sums of so many columns.
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kKeyBytes = kKeys * kRowBytes;
  static constexpr int kValueBytes = kKeys * kDimV * 2;
  static constexpr int kQueryBytes = kRows * kRowBytes;
  static constexpr int kTileBytes = kQueryBytes + kStages * (kKeyBytes + kValueBytes);
  static constexpr int kResultBytes = 8192 + kRows * (kDimV + 8) * 4;
  /// What warps tell each other: weights, each part's largest logits, what sums shrink by.
  static constexpr int kWeightPitch = kKeys * 2 + 16;  ///< Bytes; rows go to different banks.
  static constexpr int kExchangeOffset = kTileBytes > kResultBytes ? kTileBytes : kResultBytes;
  static constexpr int kExchangeBytes = kRows * (kWeightPitch + (kKeyParts + 1) * 4);
  static constexpr int kSmemBytes = kExchangeOffset + kExchangeBytes;
  static_assert(kRowTiles * kKeyParts <= kWarps && kWarpKeys == 4 && kOutTiles % 8 == 0);
};

using Wide = WideConfig<4, 8, 32, 2>;
using WideMedium = WideConfig<4, 8, 32, 1>;  ///< sm80.
using WideSmall = WideConfig<2, 4, 16, 1>;   ///< sm86, sm89.

/// Blocks have so much shared memory and more, in KB: on sm90, sm80, and the others. A block's
/// BlockState takes up to 2 KB beside its tiles.
inline constexpr std::size_t kStateBytes = 2048;
inline constexpr std::size_t kLeastBlockSmem = std::size_t{99} * 1024;
static_assert(Wide::kSmemBytes + kStateBytes <= std::size_t{227} * 1024 &&
              WideMedium::kSmemBytes + kStateBytes <= std::size_t{163} * 1024 &&
              WideSmall::kSmemBytes + kStateBytes <= kLeastBlockSmem);

/// Which of the instances of a width: for devices of how much shared memory.
enum class Room : std::uint8_t { Full, Medium, Small };

/// What a host needs to know of the configuration of a call.
struct Instance {
  std::int32_t dim = 0;     ///< Of V.
  std::int32_t rows = 0;    ///< Of a tile.
  std::int32_t keys = 0;    ///< Of a tile.
  std::int32_t blocks = 1;  ///< Of a multiprocessor.
  bool few = false;
  Room room = Room::Full;
};

/// The instance for heads of `widest` dims and tiles of up to `rows` rows, on a device whose blocks
/// may have smem_bytes of shared memory, and whose multiprocessors have as much and 1 KB a block;
/// what a block knows of its item takes up to 2 KB more.
constexpr Instance instance_of(std::int32_t widest, std::int64_t rows, std::size_t smem_bytes) {
  const auto make = [&]<typename ConfigT>(ConfigT, Room room = Room::Full) {
    const std::size_t fits = (smem_bytes + 1024) / (ConfigT::kSmemBytes + 3 * 1024);
    const std::int32_t blocks = fits < 1                  ? 1
                                : fits < ConfigT::kBlocks ? static_cast<std::int32_t>(fits)
                                                          : ConfigT::kBlocks;
    return Instance{ConfigT::kDimV, ConfigT::kRows, ConfigT::kKeys, blocks, ConfigT::kFew, room};
  };
  const auto few = [&]<typename OneT, typename TwoT>(OneT one, TwoT two) {
    return rows <= OneT::kRows ? make(one) : make(two);
  };
  if (widest > Head256::kDim) {
    if (smem_bytes >= Wide::kSmemBytes + kStateBytes) return make(Wide{});
    return smem_bytes >= WideMedium::kSmemBytes + kStateBytes ? make(WideMedium{}, Room::Medium)
                                                              : make(WideSmall{}, Room::Small);
  }
  if (rows <= kMostFewRows) {
    if (widest <= Few64<1>::kDim) return few(Few64<1>{}, Few64<2>{});
    if (widest <= Few128<1>::kDim) return few(Few128<1>{}, Few128<2>{});
    return few(Few256<1>{}, Few256<2>{});
  }
  if (widest <= Head64::kDim) return make(Head64{});
  if (widest <= Head128::kDim) return make(Head128{});
  return smem_bytes >= Head256::kSmemBytes ? make(Head256{}) : make(Head256Small{}, Room::Small);
}

}  // namespace octavo::kernels::flash2
