// SPDX-License-Identifier: Apache-2.0
#include "dispatch/run.h"

#include "base/error.h"

namespace octavo::dispatch {
namespace {

void* room_for(std::size_t num_bytes, device::HostBuffer& workspace) {
  if (num_bytes > workspace.size()) workspace = device::HostBuffer(num_bytes, "workspace");
  return workspace.data();
}

// Where angles must be computed and follow from the plan, all layers share them. Positions of the
// caller's may change from layer to layer.
const float* turns_of(const kernels::StepBatch& batch, const kernels::RopeParams& rope,
                      int num_threads, plan::TurnSet& turns) {
  if (rope.rotary_dim == 0 || rope.cos != nullptr || rope.positions != nullptr) return nullptr;
  const auto count =
      static_cast<std::size_t>(batch.num_tokens) * static_cast<std::size_t>(rope.rotary_dim);
  return turns.get(rope.rotary_dim, rope.base, count, [&](float* values) {
    kernels::cpu::compute_turns(batch, rope, num_threads, values);
  });
}

}  // namespace

void attend(Backend backend, bool batch_invariant, const kernels::AttendParams& params,
            plan::StepMemory& memory, device::HostBuffer& workspace) {
  const int num_threads = kernels::cpu::resolve_threads(params.num_threads);
  if (backend == Backend::Unfused) {
    kernels::cpu::unfused_attend(
        params, room_for(kernels::cpu::unfused_workspace_bytes(params, num_threads), workspace));
    return;
  }
  OCTAVO_CHECK(backend == Backend::Cpu);
  const auto num_seqs = static_cast<std::size_t>(params.batch.num_seqs);
  const plan::ScheduleShape shape{
      .key_tile = kernels::cpu::kKeyTile,
      .q_tile = kernels::cpu::q_tile_tokens(params.num_q_heads / params.num_kv_heads),
      .num_kv_heads = params.num_kv_heads,
      .causal = params.causal,
      .window_left = params.window_left,
      .window_right = params.window_right,
      .batch_invariant = batch_invariant};
  const plan::Schedule& cut = memory.schedules.get({params.batch.token_offsets, num_seqs + 1},
                                                   {params.batch.kv_lens, num_seqs}, shape);
  const kernels::SplitSchedule schedule{.key_tile = shape.key_tile,
                                        .q_tile = shape.q_tile,
                                        .num_items = cut.num_items(),
                                        .num_partial_rows = cut.num_partial_rows(),
                                        .item_offsets = cut.item_offsets.data(),
                                        .partial_offsets = cut.partial_offsets.data(),
                                        .split_tiles = cut.split_tiles.data(),
                                        .num_splits = cut.num_splits.data()};
  const float* turns = turns_of(params.batch, params.rope, num_threads, memory.turns);
  const std::size_t num_bytes =
      kernels::cpu::attend_workspace_bytes(params, schedule, num_threads, turns);
  kernels::cpu::attend(params, schedule, room_for(num_bytes, workspace), turns);
}

void append(const kernels::AppendParams& params, plan::StepMemory& memory) {
  const int num_threads = kernels::cpu::resolve_threads(params.num_threads);
  kernels::cpu::append(params, turns_of(params.batch, params.rope, num_threads, memory.turns));
}

void convert(const kernels::ConvertParams& params) { kernels::cpu::convert_tokens(params); }
void gather(const kernels::GatherParams& params) { kernels::cpu::gather_pages(params); }

void merge(const kernels::cpu::MergeParams& params) { kernels::cpu::merge_partials(params); }

}  // namespace octavo::dispatch
