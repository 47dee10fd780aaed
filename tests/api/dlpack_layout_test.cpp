// SPDX-License-Identifier: Apache-2.0
// Our mirror of DLPack's structs against DLPack's own header, where it is installed.
#include <gtest/gtest.h>
#include <octavo/dlpack.h>

#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>

#include <cstddef>

namespace octavo::dlpack {
namespace {

TEST(DlPackLayout, MirrorsDlTensor) {
  EXPECT_EQ(sizeof(DLTensor), sizeof(DlTensor));
  EXPECT_EQ(offsetof(DLTensor, data), offsetof(DlTensor, data));
  EXPECT_EQ(offsetof(DLTensor, device), offsetof(DlTensor, device));
  EXPECT_EQ(offsetof(DLTensor, ndim), offsetof(DlTensor, ndim));
  EXPECT_EQ(offsetof(DLTensor, dtype), offsetof(DlTensor, dtype));
  EXPECT_EQ(offsetof(DLTensor, shape), offsetof(DlTensor, shape));
  EXPECT_EQ(offsetof(DLTensor, strides), offsetof(DlTensor, strides));
  EXPECT_EQ(offsetof(DLTensor, byte_offset), offsetof(DlTensor, byte_offset));
}

TEST(DlPackLayout, MirrorsDataType) {
  EXPECT_EQ(sizeof(DLDataType), sizeof(DlDataType));
  EXPECT_EQ(offsetof(DLDataType, bits), offsetof(DlDataType, bits));
  EXPECT_EQ(offsetof(DLDataType, lanes), offsetof(DlDataType, lanes));
}

}  // namespace
}  // namespace octavo::dlpack
#else
TEST(DlPackLayout, MirrorsDlTensor) { GTEST_SKIP() << "dlpack/dlpack.h is not installed"; }
#endif
