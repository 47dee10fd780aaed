// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <octavo/types.h>

#include "base/math.h"

namespace octavo {
namespace {

TEST(Types, NamesOfBackendsReadBack) {
  for (const Backend backend : {Backend::Auto, Backend::Unfused, Backend::Cpu, Backend::Fused,
                                Backend::Flash2, Backend::Flash3}) {
    EXPECT_EQ(backend, parse_backend(to_string(backend)));
  }
}

TEST(Types, NamesOfDtypesReadBack) {
  for (const DType dtype :
       {DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::I8, DType::I32}) {
    EXPECT_EQ(dtype, parse_dtype(to_string(dtype)));
  }
}

TEST(Types, AnUnknownNameIsNothing) {
  EXPECT_EQ(std::nullopt, parse_dtype("f64"));
  EXPECT_EQ(std::nullopt, parse_backend("CPU"));
  EXPECT_EQ(std::nullopt, parse_format(""));
  EXPECT_EQ(std::nullopt, parse_cache_kind("page"));
}

TEST(Math, ProductsBeyond64BitsAreNothing) {
  EXPECT_EQ(std::int64_t{1} << 62,
            base::checked_product({std::int64_t{1} << 31, std::int64_t{1} << 31}));
  EXPECT_EQ(std::nullopt, base::checked_product({std::int64_t{1} << 32, std::int64_t{1} << 31}));
}

}  // namespace
}  // namespace octavo
