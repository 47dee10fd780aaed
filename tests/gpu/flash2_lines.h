// SPDX-License-Identifier: Apache-2.0
// Lines that flash2 can run: the suite's, F32 made FP16, without the dims that it refuses; and what
// straddles the borders of its own tiles.
#pragma once

#include "testing/spec.h"
#include "tests/conformance/suite.h"

#include <string>
#include <vector>

namespace octavo::gpu_tests {

inline bool flash2_takes(const testkit::CaseSpec& spec) {
  const std::int32_t dim_v = spec.head_dim_v == 0 ? spec.head_dim : spec.head_dim_v;
  return spec.dtype != DType::F32 && spec.head_dim % 8 == 0 && dim_v % 8 == 0 &&
         spec.head_dim <= 576 && dim_v <= 512;
}

inline std::vector<std::string> flash2_lines() {
  std::vector<std::string> lines;
  for (std::string line : conformance::suite()) {
    const std::size_t at = line.find(" f32");
    if (at != std::string::npos) line.replace(at, 4, " f16");
    if (flash2_takes(testkit::parse_spec(line))) lines.push_back(line);
  }
  for (const char* line :
       {// Each instance, filled and not; groups that do and don't divide a tile's rows.
        "b3 q1 s63 steps3 hq3 hkv1 d64 p1 bf16 seed401",
        "b3 q1 s64 steps3 hq5 hkv1 d128 p16 f16 seed402",
        "b3 q1 s65 steps3 hq14 hkv2 d256 p7 bf16 seed403",
        "b2 q33 s127 steps2 hq12 hkv1 d128 p16 bf16 seed404",
        "b2 q65 s128 steps2 hq4 hkv4 d128 p64 f16 bshd seed405",
        "b2 q17 s129 steps2 hq14 hkv1 d256 dv64 p3 f16 sbhd seed406",
        "b2 q4 s200 steps3 hq65 hkv1 d64 p16 bf16 seed407",
        "b1 q3 s100 steps2 hq260 hkv2 d32 p16 f16 seed408",
        "b2 q5 s150 steps2 hq8 hkv2 d96 dv136 p48 bf16 full seed409",
        "b3 q1 s63 steps3 hq16 hkv1 d576 dv512 p1 bf16 seed461",
        "b2 q1 s24 steps3 hq128 hkv1 d576 dv512 p16 f16 seed462",
        "b2 q9 s65 steps2 hq5 hkv1 d264 p3 bf16 sbhd seed463",
        "b2 q20 s31 steps2 hq12 hkv2 d512 p7 f16 full w20,5 cap10 sinks alibi seed464",
        "b1 q33 s200 steps2 hq3 hkv1 d320 dv8 p16 f16 bshd seed465",
        "b2 q2 s70 steps2 hq4 hkv2 d72 dv320 p5 bf16 seed466",
        // Splits, with all that a combination must get right.
        "b1 q1 s1300 steps3 hq4 hkv1 d128 p16 bf16 seed410",
        "b2 q4 s900 steps3 hq4 hkv2 d64 p1 f16 sinks alibi seed411",
        "b1 q16 s900 steps2 hq6 hkv1 d128 p16 bf16 cap5 sinks bshd seed412",
        "b1 q2 s900 steps2 hq3 hkv1 d256 p256 f16 full w500,10 seed413",
        "b3 q1 s700 steps8 hq4 hkv1 d64 p4 bf16 life w500,0 seed414",
        "b1 q1 s1300 steps3 hq3 hkv1 d576 dv512 p64 bf16 sinks seed467",
        "b2 q5 s300 steps2 hq6 hkv1 d576 dv512 p16 f16 w200,0 cap5 seed468",
        // Parts that are added in groups first.
        "b1 q1 s1300 steps2 hq16 hkv1 d576 dv512 p16 bf16 sinks seed471",
        "b3 q2 s400 steps2 hq32 hkv1 d576 dv512 p7 f16 seed472",
        "b2 q1 s600 steps2 hq64 hkv1 d576 dv512 p16 bf16 seed473",
        "b1 q4 s1200 steps2 hq8 hkv1 d256 p1 f16 seed474"}) {
    lines.emplace_back(line);
  }
  return lines;
}

}  // namespace octavo::gpu_tests
