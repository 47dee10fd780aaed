// SPDX-License-Identifier: Apache-2.0
// The conversions on the GPU against the CPU's, byte for byte, and those against plain arithmetic.
#include "tests/gpu/twins.h"

#include <octavo/convert.h>

#include <gtest/gtest.h>

#include <string>

namespace octavo::gpu_tests {
namespace {

constexpr TensorFormat kFormats[] = {TensorFormat::Thd, TensorFormat::Bshd, TensorFormat::Sbhd};
const std::vector<std::int32_t> kOffsets = {0, 3, 3, 20, 21, 21};  // 3, 0, 17, 1, 0 tokens

std::vector<std::int64_t> shape(TensorFormat format, std::int64_t heads, std::int64_t dim) {
  if (format == TensorFormat::Thd) return {24, heads, dim};
  if (format == TensorFormat::Bshd) return {6, 19, heads, dim};
  return {19, 6, heads, dim};
}

testkit::DeviceMemory on_device(const std::vector<std::int32_t>& values) {
  testkit::DeviceMemory memory(kGpu, values.size() * sizeof(std::int32_t));
  memory.upload(values.data(), memory.size());
  return memory;
}

const std::int32_t* ints(const testkit::DeviceMemory& memory) {
  return reinterpret_cast<const std::int32_t*>(memory.data());
}

void expect_converted_alike(DType from_dtype, DType to_dtype, std::int64_t dim) {
  const testkit::DeviceMemory offsets = on_device(kOffsets);
  StepArrays host_step{.num_seqs = 5, .num_tokens = 21, .token_offsets = kOffsets.data()};
  StepArrays gpu_step = host_step;
  gpu_step.token_offsets = ints(offsets);
  for (const TensorFormat from_format : kFormats) {
    for (const TensorFormat to_format : kFormats) {
      SCOPED_TRACE(std::string(to_string(from_format)) + " to " + to_string(to_format));
      const TwinTensor from(from_dtype, shape(from_format, 3, dim), 1);
      TwinTensor to(to_dtype, shape(to_format, 3, dim), 2);
      convert_tokens(from.on_host(), from_format, to.host.view(), to_format, host_step);
      convert_tokens(from.on_gpu(), from_format, to.gpu->view(), to_format, gpu_step);
      testkit::HostTensor back = to.host;
      to.gpu->download(back);
      EXPECT_TRUE(back == to.host);
      EXPECT_TRUE(back.guards_intact());
    }
  }
}

TEST_F(GpuTest, ConvertsTokensAsTheCpuDoes) {
  expect_converted_alike(DType::BF16, DType::BF16, 64);
  expect_converted_alike(DType::F32, DType::F32, 8);
}

TEST_F(GpuTest, ConvertsOddRowsAndOtherDtypesAsTheCpuDoes) {
  expect_converted_alike(DType::F16, DType::F16, 7);
  expect_converted_alike(DType::F32, DType::BF16, 16);
}

TEST_F(GpuTest, ConvertedThereAndBackIsTheSame) {
  const testkit::DeviceMemory offsets = on_device(kOffsets);
  const StepArrays step{.num_seqs = 5, .num_tokens = 21, .token_offsets = ints(offsets)};
  const TwinTensor from(DType::BF16, {21, 2, 32}, 3);
  const TwinTensor padded(DType::BF16, {5, 17, 2, 32}, 4);
  TwinTensor back(DType::BF16, {21, 2, 32}, 5);
  convert_tokens(from.on_gpu(), TensorFormat::Thd, padded.gpu->view(), TensorFormat::Bshd, step);
  convert_tokens(padded.on_gpu(), TensorFormat::Bshd, back.gpu->view(), TensorFormat::Thd, step);
  back.gpu->download(back.host);
  EXPECT_TRUE(back.host == from.host);
}

TEST_F(GpuTest, LocatesListedTokensAsTheCpuDoes) {
  // More than a block's tokens; some of no sequence, some beyond their pages.
  constexpr std::int32_t kTokens = 300;
  const std::vector<std::int32_t> page_offsets = {0, 2, 2, 9};
  std::vector<std::int32_t> seqs(kTokens), positions(kTokens);
  for (std::int32_t i = 0; i < kTokens; ++i) {
    seqs[static_cast<std::size_t>(i)] = i % 5 - 1;
    positions[static_cast<std::size_t>(i)] = i * 7 % 41 - 2;
  }
  ListedTokens tokens{.seqs = seqs.data(),
                      .positions = positions.data(),
                      .page_offsets = page_offsets.data(),
                      .num_tokens = kTokens,
                      .num_seqs = 3,
                      .num_pages = 9,
                      .page_size = 4};
  std::vector<std::int32_t> places(2 * kTokens, 7), back = places;
  locate_tokens(tokens, places.data(), places.data() + kTokens);

  const testkit::DeviceMemory seqs_there = on_device(seqs), positions_there = on_device(positions),
                              offsets_there = on_device(page_offsets);
  testkit::DeviceMemory places_there = on_device(back);
  tokens.seqs = ints(seqs_there);
  tokens.positions = ints(positions_there);
  tokens.page_offsets = ints(offsets_there);
  tokens.device = kGpu;
  auto* to = reinterpret_cast<std::int32_t*>(places_there.data());
  locate_tokens(tokens, to, to + kTokens);
  places_there.download(back.data(), places_there.size());
  EXPECT_EQ(back, places);
}

TEST_F(GpuTest, GathersPagesAsTheCpuDoes) {
  const std::vector<std::int32_t> lens = {9, 0, 16, 1};
  const std::vector<std::int32_t> rows = {2, 0, 1, 3};
  const std::vector<std::int32_t> table = {-7, 99, 99, 99, 4, 0, 7, 6, 1, 8, 3, 2'000'000'000,
                                           5,  -1, -1, -1};
  const testkit::DeviceMemory gpu_lens = on_device(lens);
  const testkit::DeviceMemory gpu_rows = on_device(rows);
  const testkit::DeviceMemory gpu_table = on_device(table);
  for (const std::int64_t dim : {64, 5}) {
    const TwinTensor k(DType::F16, {9, 4, 2, dim}, 1);
    const TwinTensor v(DType::F16, {9, 4, 2, dim}, 2);
    TwinTensor k_out(DType::F16, {4, 20, 2, dim}, 3);
    TwinTensor v_out(DType::F32, {4, 12, 2, dim}, 4);
    KvView cache;
    cache.num_rows = 4;
    cache.max_pages_per_seq = 4;
    cache.page_table_stride = 4;
    const auto view = [](const ConstTensorView& source) {
      TensorView writable;
      writable.data = const_cast<void*>(source.data);
      writable.dtype = source.dtype;
      writable.device = source.device;
      writable.rank = source.rank;
      writable.shape = source.shape;
      writable.strides = source.strides;
      return writable;
    };
    cache.k = view(k.on_host());
    cache.v = view(v.on_host());
    cache.page_table = table.data();
    cache.row_indices = rows.data();
    StepArrays step{.num_seqs = 4, .kv_lens = lens.data()};
    gather_cache(cache, step, k_out.host.view(), v_out.host.view());
    cache.k = view(k.on_gpu());
    cache.v = view(v.on_gpu());
    cache.page_table = ints(gpu_table);
    cache.row_indices = ints(gpu_rows);
    step.kv_lens = ints(gpu_lens);
    gather_cache(cache, step, k_out.gpu->view(), v_out.gpu->view());
    testkit::HostTensor k_back = k_out.host;
    testkit::HostTensor v_back = v_out.host;
    k_out.gpu->download(k_back);
    v_out.gpu->download(v_back);
    EXPECT_TRUE(k_back == k_out.host);
    EXPECT_TRUE(v_back == v_out.host);
    // Position 5 of batch row 0, whose row of the table is 2: page 8, slot 1.
    EXPECT_EQ(k_back.get((5 * 2 + 1) * dim + 3), k.host.get(((8 * 4 + 1) * 2 + 1) * dim + 3));
    EXPECT_EQ(k_back.get((9 * 2 + 1) * dim + 3), 0.0);
  }
}

}  // namespace
}  // namespace octavo::gpu_tests
