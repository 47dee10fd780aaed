// SPDX-License-Identifier: Apache-2.0
#include "api/tensors.h"

#include <gtest/gtest.h>
#include <octavo/dlpack.h>
#include <octavo/error.h>

#include <array>
#include <string>
#include <vector>

#include "refusal/expect.h"

namespace octavo {
namespace {

TEST(Tensors, OutputsMustNotOverlapThemselves) {
  std::vector<float> data(64);
  TensorView out{data.data(), DType::F32, {4, 2, 8}};
  EXPECT_NO_THROW(api::check_writable("out", out));
  out.strides[1] = 4;
  EXPECT_EQ(
      "out.strides: wanted at least 8 for the axis of extent 2, got 4 (elements must not overlap)",
      refusal::message_of([&] { api::check_writable("out", out); }));
  out.strides[1] = 0;
  EXPECT_THROW(api::check_writable("out", out), Error);
}

TEST(Tensors, MayLieInTheGapsOfOneAnother) {
  std::vector<float> data(800);
  TensorView wide{data.data(), DType::F32, {8, 2, 4}};
  wide.strides[0] = 100;
  TensorView row{data.data() + 50, DType::F32, {1, 2, 4}};
  EXPECT_NO_THROW(api::check_apart("out", wide, "q", row));
  EXPECT_NO_THROW(api::check_apart("out", row, "q", wide));
  row.data = data.data() + 104;
  EXPECT_THROW(api::check_apart("out", wide, "q", row), Error);
  EXPECT_THROW(api::check_apart("out", row, "q", wide), Error);
}

TEST(Tensors, OutputsMayRunBackwards) {
  std::vector<float> data(64);
  TensorView out{data.data() + 48, DType::F32, {4, 2, 8}};
  out.strides[0] = -16;
  EXPECT_NO_THROW(api::check_writable("out", out));
}

TEST(Tensors, DataMustBeAligned) {
  std::vector<float> data(64);
  const TensorView q{reinterpret_cast<std::byte*>(data.data()) + 2, DType::F32, {4, 2, 4}};
  EXPECT_EQ("q.data: wanted a multiple of 4 bytes, got 2 beyond one",
            refusal::message_of([&] { api::check_tensor("q", q, 3); }));
}

TEST(Tensors, EmptyTensorsNeedNoData) {
  const TensorView q{nullptr, DType::F32, {0, 2, 4}};
  EXPECT_NO_THROW(api::check_tensor("q", q, 3));
}

TEST(DlPack, ReadsWhatItWrote) {
  std::vector<std::uint16_t> data(24);
  TensorView view{data.data(), DType::BF16, {2, 3, 4}};
  view.strides = {12, 1, 3};
  const dlpack::DlTensor tensor = dlpack::to_dlpack(view);
  const TensorView back = dlpack::from_dlpack(tensor);
  EXPECT_EQ(view.data, back.data);
  EXPECT_EQ(DType::BF16, back.dtype);
  EXPECT_EQ(view.shape, back.shape);
  EXPECT_EQ(view.strides, back.strides);
}

TEST(DlPack, NoStridesAreDenseOnes) {
  std::vector<float> data(24);
  std::array<std::int64_t, 3> shape{2, 3, 4};
  const dlpack::DlTensor tensor{data.data(), {1, 0}, 3, {2, 32, 1}, shape.data(), nullptr, 16};
  const TensorView view = dlpack::from_dlpack(tensor);
  EXPECT_EQ(12, view.strides[0]);
  EXPECT_EQ(1, view.strides[2]);
  EXPECT_EQ(data.data() + 4, view.data);
}

TEST(DlPack, NamesWhatItCannotTake) {
  std::array<std::int64_t, 1> shape{1};
  const dlpack::DlTensor doubles{nullptr, {1, 0}, 1, {2, 64, 1}, shape.data(), nullptr, 0};
  EXPECT_EQ("dtype: wanted float32, float16, bfloat16, int32 or int8, got code 2 of 64 bits",
            refusal::message_of([&] { static_cast<void>(dlpack::from_dlpack(doubles)); }));
  const dlpack::DlTensor deep{nullptr, {1, 0}, 7, {2, 32, 1}, shape.data(), nullptr, 0};
  EXPECT_EQ("ndim: wanted 0 … 6, got 7",
            refusal::message_of([&] { static_cast<void>(dlpack::from_dlpack(deep)); }));
  const dlpack::DlTensor vulkan{nullptr, {7, 0}, 1, {2, 32, 1}, shape.data(), nullptr, 0};
  EXPECT_EQ("device: wanted CPU (1), CUDA (2) or pinned memory (3), got 7",
            refusal::message_of([&] { static_cast<void>(dlpack::from_dlpack(vulkan)); }));
}

}  // namespace
}  // namespace octavo
