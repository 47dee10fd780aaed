// SPDX-License-Identifier: Apache-2.0
// One item by one block whose warps go at their own pace: rows are dealt to them, sixteen each, and
// each goes through all keys, which come through a ring. What the next tile's copies are to be is
// found twice a tile, those of K before the products with K, between which they are asked for, and
// those of V before the products with V.
#pragma once

#include "kernels/cuda/flash2/products.cuh"
#include "kernels/cuda/flash2/ring.cuh"
#include "kernels/cuda/flash2/rows.cuh"
#include "kernels/cuda/flash2/tile.cuh"

namespace octavo::kernels::flash2 {

/// Whether the results are written, which they are where they go to the output 16 bytes at a time.
template <typename T, typename ConfigT>
__device__ bool attend_drifting_rows(const Work& w, const Frequencies& frequencies,
                                     BlockState<ConfigT>& state, unsigned char* smem) {
  static_assert(ConfigT::kRowTiles == 1 && ConfigT::kScoreKeys == ConfigT::kKeys);
  constexpr int kAhead = ConfigT::kStages - 1;  // tiles on their way while one is worked on
  const Item& item = state.item;
  const Buffers<ConfigT> buffers{cuda::smem_address(smem)};
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kLanes;
  const int lane = thread % kLanes;
  const int first_row = warp * kProductRows;
  RingPlace<ConfigT> ring(state.ring);
  KeyLoader<ConfigT> loader(w);
  loader.look_up(key_places(item), item.keys.first_tile);
  if (copies_queries(w)) {
    copy_own_queries<T, ConfigT, kProductRows>(w, item, first_row, buffers.q);
    cuda::commit_copies();
  } else {
    load_any_queries<T, ConfigT>(w, frequencies, state, ConfigT::kRows, smem);
    cuda::commit_copies();
    cuda::wait_copies<0>();
    __syncthreads();  // other warps brought the rows
  }
  // In shared memory: there are no registers to spare.
  find_span<kProductRows>(w, item, first_row, state.spans[warp]);
  float out[1][ConfigT::kDim / 8][4] = {};
  SoftRows soft[1];
#pragma unroll 1
  for (int tile = item.keys.first_tile - kAhead; tile < item.keys.end_tile; ++tile) {
    const bool is_here = tile >= item.keys.first_tile;
    const KeyPlaces places = key_places(item);
    const unsigned sights =
        sights_of<ConfigT::kKeys, ConfigT::kKeys>(state.spans[warp], tile * ConfigT::kKeys);
    const bool loads = tile + kAhead < places.keys.end_tile;
    const bool has_rows = first_row < item.num_rows();
    const bool works = is_here && has_rows && (sights & kSeesAny) != 0;
    if (tile == item.keys.first_tile) {
      cuda::wait_copies<0>();  // those of q: others belong to no group
      __syncwarp();
    }
    if (loads) ring.wait_free(Filled::Keys);
    const int next = ring.next_stage();
    SpreadCopies copies = loader.spread(places, buffers.k(next), buffers.v(next));
    copies.wanted = copies.wanted && loads && works;
    if (loads && !copies.wanted) {
      loader.load_keys(places, buffers.k(next));
      ring.fill(Filled::Keys);
    }
    // A warp that has nothing to do waits too: no buffer is free before it is full.
    if (is_here) ring.wait_full(Filled::Keys);
    float scores[1][ConfigT::kKeys / 8][4];
    if (works) {
      multiply_keys<T, ConfigT>(scores, buffers.q, first_row, buffers.k(ring.stage()), 0, lane,
                                [&](int step) { loader.copy_keys(copies, step); });
      if (copies.wanted) ring.fill(Filled::Keys);
      ring.release(Filled::Keys);
      finish_logits(w, item, first_row, tile * ConfigT::kKeys, (sights & kMasked) != 0, lane,
                    scores);
      follow_largest(w.logit_factor, slack_in(tile, item.keys.first_tile), scores, soft, out);
    } else if (is_here) {
      ring.release(Filled::Keys);
    }
    if (loads) ring.wait_free(Filled::Values);
    // Read once more: there are no registers to keep it in.
    const KeyPlaces same_places = key_places(item);
    copies = loader.spread(same_places, buffers.k(next), buffers.v(next));
    copies.wanted = copies.wanted && loads && works;
    if (loads && !copies.wanted) {
      loader.load_values(same_places, buffers.v(next));
      ring.fill(Filled::Values);
    }
    loader.look_up(same_places, tile + kAhead + 1);
    if (is_here) ring.wait_full(Filled::Values);
    if (works) {
      multiply_values<T, ConfigT, true>(out, soft, scores, w.logit_factor, buffers.v(ring.stage()),
                                        0, 0, lane,
                                        [&](int step) { loader.copy_values(copies, step); });
      if (copies.wanted) ring.fill(Filled::Values);
      ring.release(Filled::Values);
    } else if (is_here) {
      ring.release(Filled::Values);
    }
    ring.advance();
  }
  cuda::commit_copies();
  cuda::wait_copies<0>();
  // Where there are no tiles nobody waited, and others may still be to read it.
  if (threadIdx.x == 0 && item.keys.first_tile < item.keys.end_tile) ring.keep(state.ring);
  return finish_own_rows<T, ConfigT>(w, item, first_row, lane, smem, soft, out);
}

}  // namespace octavo::kernels::flash2
