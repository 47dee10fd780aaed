// SPDX-License-Identifier: Apache-2.0
// Which of Highway's targets are built. Included before any of Highway's headers.
#pragma once

// SSSE3 and SSE4 machines take the portable target; AVX3_DL adds nothing that we use; SVE's vectors
// have no size at compile time, and NEON serves those machines.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
