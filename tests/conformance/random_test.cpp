// SPDX-License-Identifier: Apache-2.0
// Random steps of random lives with random features, against the oracle.
#include "tests/conformance/suite.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <string>

namespace octavo::conformance {
namespace {

using testkit::CaseSpec;

CaseSpec any_spec() {
  const auto within = [](std::int64_t low, std::int64_t high) {
    return *rc::gen::inRange<std::int64_t>(low, high + 1);
  };
  CaseSpec spec;
  spec.num_seqs = within(0, 5);
  spec.new_tokens = within(0, 6);
  spec.past = within(0, 70);
  spec.num_steps = within(1, 8);
  spec.num_kv_heads = static_cast<std::int32_t>(within(1, 3));
  spec.num_q_heads = spec.num_kv_heads * static_cast<std::int32_t>(within(1, 5));
  spec.head_dim = static_cast<std::int32_t>(within(1, 40));
  spec.head_dim_v = static_cast<std::int32_t>(within(0, 40));
  spec.page_size = static_cast<std::int32_t>(within(1, 20));
  spec.dtype = *rc::gen::element(DType::F32, DType::F16, DType::BF16);
  spec.format = *rc::gen::element(TensorFormat::Thd, TensorFormat::Bshd, TensorFormat::Sbhd);
  spec.kind = *rc::gen::element(CacheKind::Paged, CacheKind::Contiguous);
  spec.mask = *rc::gen::element(Mask::Causal, Mask::Full);
  spec.window = {*rc::gen::element<std::int64_t>(-1, -1, 0, 3, 30),
                 *rc::gen::element<std::int64_t>(-1, -1, 0, 3, 30)};
  spec.softcap = *rc::gen::element(0.0F, 4.0F);
  spec.sinks = *rc::gen::arbitrary<bool>();
  spec.alibi = *rc::gen::arbitrary<bool>();
  spec.life = *rc::gen::weightedElement<bool>({{3, true}, {1, false}});
  spec.seed = *rc::gen::inRange<std::uint64_t>(1, 1'000'000);
  return spec;
}

void check_random(Backend backend) {
  const CaseSpec spec = any_spec();
  RC_LOG() << "octavo check \"" << spec.to_string() << "\" --backend " << to_string(backend);
  ReplayOptions options;
  options.backend = backend;
  options.num_threads = *rc::gen::inRange(1, 4);
  options.scramble = *rc::gen::inRange<std::uint64_t>(0, 3);
  options.in_halves = *rc::gen::arbitrary<bool>();
  const ReplayResult result = replay(testkit::make_case(spec), options);
  RC_LOG() << result.reason;
  RC_ASSERT(result.verdict == testkit::Verdict::Pass);
}

RC_GTEST_PROP(RandomSteps, AgreeWithTheOracleOnCpu, ()) { check_random(Backend::Cpu); }

RC_GTEST_PROP(RandomSteps, AgreeWithTheOracleUnfused, ()) { check_random(Backend::Unfused); }

}  // namespace
}  // namespace octavo::conformance
