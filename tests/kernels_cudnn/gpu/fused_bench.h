// SPDX-License-Identifier: Apache-2.0
// Times `fused` on the current GPU, one JSON line a case.
#pragma once

#include <cstdint>
#include <string>

namespace octavo::test {

/// Cases whose name holds `only`, for about so many seconds.
void bench_fused(std::int32_t arch, const std::string& device, double seconds,
                 const std::string& only, bool deterministic);

}  // namespace octavo::test
