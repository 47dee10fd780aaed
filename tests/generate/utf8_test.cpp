// SPDX-License-Identifier: Apache-2.0
// Checked and streamed UTF-8.
#include "examples/generate/utf8.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace generate {
namespace {

TEST(Utf8, AcceptsCharactersOfEachLength) {
  EXPECT_EQ(find_invalid("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x99\x82"), std::nullopt);
}

TEST(Utf8, RefusesOverlongForms) { EXPECT_EQ(find_invalid("ab\xC0\x80"), 2U); }

TEST(Utf8, RefusesSurrogates) { EXPECT_EQ(find_invalid("\xED\xA0\x80"), 0U); }

TEST(Utf8, RefusesCodesBeyondUnicode) { EXPECT_EQ(find_invalid("\xF4\x90\x80\x80"), 0U); }

TEST(Utf8, RefusesACutOffEnd) { EXPECT_EQ(find_invalid("x\xE2\x82"), 1U); }

TEST(Utf8Stream, HoldsAnIncompleteCharacterBack) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xF0\x9F"), "a");
  EXPECT_EQ(stream.push("\x99"), "");
  EXPECT_EQ(stream.push("\x82z"), "\xF0\x9F\x99\x82z");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8Stream, ReplacesWhatCannotBecomeACharacter) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("\xE2\x82"), "");
  EXPECT_EQ(stream.push("A"),
            "\xEF\xBF\xBD"
            "A");
}

TEST(Utf8Stream, ReplacesAnIncompleteEnd) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("\xC3"), "");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
}

RC_GTEST_PROP(Utf8Stream, MakesValidTextOfAnyBytesWhereverTheyAreCut, (const std::string& bytes)) {
  Utf8Stream whole;
  Utf8Stream cut;
  std::string wanted = whole.push(bytes);
  wanted += whole.finish();
  std::string got;
  for (const char byte : bytes) got += cut.push(std::string_view(&byte, 1));
  got += cut.finish();
  RC_ASSERT(got == wanted);
  RC_ASSERT(!find_invalid(got).has_value());
}

}  // namespace
}  // namespace generate
