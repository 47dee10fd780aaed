// SPDX-License-Identifier: Apache-2.0
// Elements of tensors as numbers, by bit patterns alone. Written apart from the library's own
// conversions, so that the two can't share a mistake. Not fast.
#pragma once

#include <octavo/types.h>

#include <cstddef>
#include <cstdint>

namespace octavo::testkit {

/// The value of one element. Dtypes: F32, F16, BF16, I32.
double load_number(DType dtype, const std::byte* element);

/// Stores `value`, rounded to nearest even. Dtypes: F32, F16, BF16.
void store_number(DType dtype, double value, std::byte* element);

/// `value` after a trip through `dtype`.
double rounded(DType dtype, double value);

}  // namespace octavo::testkit
