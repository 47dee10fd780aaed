// SPDX-License-Identifier: Apache-2.0
// Append on the GPU against the CPU's: storage byte for byte, cleared slots and untouched ones
// included.
#include "tests/gpu/twins.h"

#include <cmath>
#include <string>

namespace octavo::gpu_tests {
namespace {

struct Layout {
  TensorFormat format = TensorFormat::Thd;
  DType input = DType::BF16;
  DType cache = DType::BF16;
  std::int32_t head_dim = 64;
  std::int32_t head_dim_v = 64;
  std::int32_t page_size = 16;
  CacheKind kind = CacheKind::Paged;
};

CacheConfig config_of(const Layout& layout) {
  CacheConfig c;
  c.kind = layout.kind;
  c.num_layers = 2;
  c.num_kv_heads = 3;
  c.head_dim = layout.head_dim;
  c.head_dim_v = layout.head_dim_v;
  c.dtype = layout.cache;
  c.max_num_seqs = 71;
  c.max_seq_len = 300;
  c.page_size = layout.page_size;
  c.num_pages = 70 * 300;
  if (layout.page_size > 4) c.num_pages = 70 * 300 / layout.page_size + 70;
  return c;
}

std::vector<std::int64_t> shape(const StepPlan& plan, TensorFormat format, std::int64_t dim) {
  const std::int64_t padding = 2;
  if (format == TensorFormat::Thd) return {plan.num_tokens() + padding, 3, dim};
  const std::int64_t longest = plan.max_new_tokens() + padding;
  const std::int64_t rows = plan.num_seqs() + padding;
  if (format == TensorFormat::Bshd) return {rows, longest, 3, dim};
  return {longest, rows, 3, dim};
}

AttentionConfig attention_of(const CacheConfig& c) {
  AttentionConfig a;
  a.num_q_heads = a.num_kv_heads = c.num_kv_heads;
  a.head_dim = c.head_dim;
  a.head_dim_v = c.head_dim_v;
  return a;
}

/// One step of both, into every layer.
void append(Twins& twins, const Layout& layout, const std::vector<SequenceStep>& lines,
            const Rope* host_rope = nullptr, const Rope* gpu_rope = nullptr,
            const TwinTensor* positions = nullptr) {
  const auto [host_plan, gpu_plan] = twins.step(lines);
  const Attention on_host(attention_of(twins.host.config()), twins.host.config());
  const Attention on_gpu(attention_of(twins.gpu.config()), twins.gpu.config());
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    const auto seed = static_cast<std::uint64_t>(layer) + gpu_plan.version() * 7;
    const TwinTensor k(layout.input, shape(host_plan, layout.format, layout.head_dim), seed);
    const TwinTensor v(layout.input, shape(host_plan, layout.format, layout.head_dim_v), seed + 3);
    LayerInputs inputs;
    inputs.format = layout.format;
    inputs.k = k.on_host();
    inputs.v = v.on_host();
    inputs.rope = host_rope;
    if (positions != nullptr) {
      inputs.positions = static_cast<const std::int32_t*>(positions->on_host().data);
    }
    on_host.append(host_plan, twins.host, layer, inputs);
    inputs.k = k.on_gpu();
    inputs.v = v.on_gpu();
    inputs.rope = gpu_rope;
    if (positions != nullptr) {
      inputs.positions = static_cast<const std::int32_t*>(positions->on_gpu().data);
    }
    on_gpu.append(gpu_plan, twins.gpu, layer, inputs);
    testkit::synchronize(kGpu);
  }
}

std::vector<SequenceStep> many(std::int64_t tokens) {
  std::vector<SequenceStep> lines;
  for (SequenceId id = 0; id < 70; ++id) lines.push_back({id, id % 5 == 3 ? 0 : tokens});
  return lines;
}

std::string text(const Layout& l) {
  return std::string(to_string(l.format)) + " " + to_string(l.input) + " to " + to_string(l.cache) +
         " d" + std::to_string(l.head_dim) + "/" + std::to_string(l.head_dim_v) + " p" +
         std::to_string(l.page_size) + " " + to_string(l.kind);
}

class AppendLayout : public GpuTestWith<Layout> {};

TEST_P(AppendLayout, WritesTheBytesThatTheCpuWrites) {
  Twins twins(config_of(GetParam()));
  twins.poison();
  append(twins, GetParam(), many(1));
  EXPECT_TRUE(twins.same_storage()) << text(GetParam());
  append(twins, GetParam(), {{5, 100}, {3, 37}, {900, 0}, {69, 1}, {7, 129}});
  EXPECT_TRUE(twins.same_storage()) << text(GetParam());
  append(twins, GetParam(), many(1));
  append(twins, GetParam(), many(33));  // more tokens than one a block
  EXPECT_TRUE(twins.same_storage()) << text(GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    All, AppendLayout,
    ::testing::Values(
        Layout{}, Layout{.format = TensorFormat::Bshd}, Layout{.format = TensorFormat::Sbhd},
        Layout{.page_size = 1}, Layout{.page_size = 3}, Layout{.kind = CacheKind::Contiguous},
        Layout{.input = DType::F16, .cache = DType::F16, .head_dim = 128, .head_dim_v = 64},
        Layout{.input = DType::F32, .cache = DType::F32, .head_dim = 36, .head_dim_v = 4},
        Layout{.input = DType::F32, .cache = DType::BF16},
        Layout{.input = DType::BF16, .cache = DType::F32},
        Layout{.format = TensorFormat::Sbhd, .input = DType::F32, .cache = DType::F16},
        Layout{.head_dim = 33, .head_dim_v = 5, .page_size = 7},
        Layout{.head_dim = 576, .head_dim_v = 512},
        Layout{.input = DType::F16, .cache = DType::F16, .head_dim = 1, .head_dim_v = 1}));

/// K of two storages, elements compared as numbers.
double largest_difference(Twins& twins) {
  double largest = 0.0;
  const TensorView a = twins.host.key_storage(1);
  const TensorView b = twins.gpu.key_storage(1);
  testkit::HostTensor host(a.dtype, {a.shape[0], a.shape[1], a.shape[2], a.shape[3]});
  testkit::HostTensor gpu = host;
  std::memcpy(host.data(), a.data, Twins::bytes_of(a));
  testkit::read_device(kGpu, gpu.data(), b.data, Twins::bytes_of(b));
  for (std::int64_t i = 0; i < host.size(); ++i) {
    if (std::isnan(host.get(i)) != std::isnan(gpu.get(i))) return HUGE_VAL;
    if (!std::isnan(host.get(i))) {
      largest = std::max(largest, std::abs(host.get(i) - gpu.get(i)));
    }
  }
  return largest;
}

struct Turned {
  RopeStyle style = RopeStyle::Half;
  std::int32_t rotary_dim = 0;
  DType dtype = DType::F32;
  std::int32_t head_dim = 64;
  bool tables = false;
  bool positions = false;
};

class AppendRope : public GpuTestWith<Turned> {};

// F32 differs in the last bits (the CPU may fuse other multiplications), F16 and BF16 in a
// rounding.
TEST_P(AppendRope, TurnsKAsTheCpuDoes) {
  const Turned& turned = GetParam();
  const Layout layout{.input = turned.dtype, .cache = turned.dtype, .head_dim = turned.head_dim};
  Rope rope{.style = turned.style, .rotary_dim = turned.rotary_dim};
  const std::int64_t pairs = (turned.rotary_dim == 0 ? turned.head_dim : turned.rotary_dim) / 2;
  const TwinTensor cos(DType::F32, {400, pairs}, 5);
  const TwinTensor sin(DType::F32, {400, pairs}, 6);
  TwinTensor positions(DType::I32, {600}, 1);
  auto* numbers = reinterpret_cast<std::int32_t*>(positions.host.data());
  for (std::int32_t i = 0; i < 600; ++i) numbers[i] = i * 7 % 400;
  positions.gpu.emplace(kGpu, positions.host);
  Rope gpu_rope = rope;
  if (turned.tables) {
    rope.num_table_positions = gpu_rope.num_table_positions = 400;
    rope.cos = static_cast<const float*>(cos.on_host().data);
    rope.sin = static_cast<const float*>(sin.on_host().data);
    gpu_rope.cos = static_cast<const float*>(cos.on_gpu().data);
    gpu_rope.sin = static_cast<const float*>(sin.on_gpu().data);
  }
  Twins twins(config_of(layout));
  twins.poison();
  append(twins, layout, {{1, 200}, {2, 5}, {3, 290}}, &rope, &gpu_rope,
         turned.positions ? &positions : nullptr);
  append(twins, layout, {{2, 7}, {1, 1}, {9, 2}}, &rope, &gpu_rope,
         turned.positions ? &positions : nullptr);
  const double allowed = turned.dtype == DType::F32   ? 4e-7
                         : turned.dtype == DType::F16 ? 1.0 / 1024
                                                      : 1.0 / 128;
  EXPECT_LE(largest_difference(twins), allowed);
}

INSTANTIATE_TEST_SUITE_P(
    All, AppendRope,
    ::testing::Values(Turned{}, Turned{.style = RopeStyle::Interleaved}, Turned{.rotary_dim = 32},
                      Turned{.style = RopeStyle::Interleaved, .rotary_dim = 6},
                      Turned{.rotary_dim = 22}, Turned{.dtype = DType::BF16},
                      Turned{.dtype = DType::F16, .tables = true},
                      Turned{
                          .style = RopeStyle::Interleaved, .dtype = DType::BF16, .head_dim = 128},
                      Turned{.head_dim = 50, .tables = true, .positions = true},
                      Turned{.rotary_dim = 16, .dtype = DType::BF16, .positions = true}));

}  // namespace
}  // namespace octavo::gpu_tests
