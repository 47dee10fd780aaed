// SPDX-License-Identifier: Apache-2.0
#include "testing/spec.h"

#include "testing/case_file.h"
#include "testing/input_error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace octavo::testkit {
namespace {

std::string complaint(std::string_view line) {
  try {
    (void)parse_spec(line);
  } catch (const InputError& error) {
    return error.what();
  }
  return "none";
}

TEST(Spec, ReadsTheLineOfTheManual) {
  const CaseSpec spec = parse_spec("b3 q1 hq32 hkv8 d128 p16 bf16 seed7");
  EXPECT_EQ(spec.num_seqs, 3);
  EXPECT_EQ(spec.num_q_heads, 32);
  EXPECT_EQ(spec.dtype, DType::BF16);
  EXPECT_EQ(spec.seed, 7U);
}

TEST(Spec, ReadsBackWhatItPrints) {
  const CaseSpec spec = parse_spec(
      "b5 q3 s70 steps6 hq12 hkv4 d40 dv24 p7 pages90 f16 sbhd contiguous full w5,2 cap7.5 "
      "scale0.25 sinks alibi life mag2.5 seed99");
  EXPECT_EQ(parse_spec(spec.to_string()), spec);
}

TEST(Spec, NamesAnUnknownWord) {
  EXPECT_THAT(complaint("b3 zebra"), ::testing::HasSubstr("got 'zebra'"));
}

TEST(Spec, RefusesAnEmptyLine) { EXPECT_THAT(complaint("  "), ::testing::HasSubstr("got none")); }

TEST(Spec, RefusesANumberThatIsNone) {
  EXPECT_THAT(complaint("d1x8"), ::testing::HasSubstr("wanted a number from 1 to 4096, got '1x8'"));
}

TEST(Spec, RefusesHeadsThatDontDivide) {
  EXPECT_EQ(complaint("hq7 hkv2"), "case hq7: wanted a multiple of hkv2");
}

TEST(Spec, MakesTheSameCaseAgain) {
  const CaseSpec spec = parse_spec("b3 q2 s20 steps5 d8 bf16 life sinks seed5");
  EXPECT_EQ(write_case(make_case(spec)), write_case(make_case(spec)));
}

TEST(Spec, MakesACaseThatItsOwnReaderAccepts) {
  const Case value = make_case(parse_spec("b3 q2 s20 steps8 d8 f16 bshd life alibi seed5"));
  const Case again = case_from(SafeTensors::parse(write_case(value)));
  EXPECT_EQ(write_case(again), write_case(value));
}

}  // namespace
}  // namespace octavo::testkit
