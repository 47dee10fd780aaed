// SPDX-License-Identifier: Apache-2.0
// Cutting text into pieces, and pieces into tokens.
#include "examples/generate/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "tests/generate/expect_error.h"
#include "tests/generate/tiny_model.h"

namespace generate::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string_view> split(std::string_view kind, std::string_view text) {
  return Pretokenizer(kind).split(text);
}

TEST(Pretokenizer, SmollmTakesDigitsOneByOne) {
  EXPECT_THAT(split("smollm", "in 1984, x2"),
              ElementsAre("in", " ", "1", "9", "8", "4", ",", " x", "2"));
}

TEST(Pretokenizer, Gpt2KeepsNumbersTogether) {
  EXPECT_THAT(split("gpt-2", "in 1984, x2"), ElementsAre("in", " 1984", ",", " x", "2"));
}

TEST(Pretokenizer, Gpt2LeavesOneSpaceForTheNextWord) {
  EXPECT_THAT(split("gpt-2", "a   b  "), ElementsAre("a", "  ", " b", "  "));
}

TEST(Pretokenizer, Gpt2CutsContractions) {
  EXPECT_THAT(split("gpt-2", "don't WE'LL"), ElementsAre("don", "'t", " WE", "'", "LL"));
}

TEST(Pretokenizer, Gpt2KnowsLettersOfAllScripts) {
  EXPECT_THAT(split("gpt-2", "日本 né"), ElementsAre("日本", " né"));
}

// U+180E was once white space and is no more; PCRE2 10.42 still counts it.
TEST(Pretokenizer, MongolianVowelSeparatorIsNoSpace) {
  EXPECT_THAT(split("gpt-2", "a\n\n\u180E"), ElementsAre("a", "\n", "\n", "\u180E"));
}

TEST(Pretokenizer, LlamaTakesThreeDigitsAtATime) {
  EXPECT_THAT(split("llama-bpe", "x 12345!\n\n"), ElementsAre("x", " ", "123", "45", "!\n\n"));
}

TEST(Pretokenizer, Qwen2TakesDigitsOneByOne) {
  EXPECT_THAT(split("qwen2", "I'M 12"), ElementsAre("I", "'M", " ", "1", "2"));
}

TEST(Pretokenizer, NamesTheKindsThereAre) {
  EXPECT_EQ(error_of([] { Pretokenizer("tekken"); }),
            "tokenizer.ggml.pre: wanted one of smollm, gpt-2, llama-bpe, qwen2, got tekken");
}

TEST(Pretokenizer, RefusesBrokenText) {
  EXPECT_EQ(error_of([] { (void)split("gpt-2", "ab\xFF"); }),
            "text: wanted UTF-8, got byte 0xff at offset 2");
}

Tokenizer make_tokenizer(const TinyModel& model = {}) {
  const auto bytes = model.writer(false).bytes();
  return Tokenizer(Gguf(bytes, "tiny.gguf"));
}

TEST(Tokenizer, MergesByRank) {
  EXPECT_THAT(make_tokenizer().encode("the than", Specials::AsText),
              ElementsAre(257, ' ', 256, 259));
}

TEST(Tokenizer, MergesAcrossTheSpaceThatBelongsToAWord) {
  EXPECT_THAT(make_tokenizer().encode("a the", Specials::AsText), ElementsAre('a', 258));
}

TEST(Tokenizer, ReadsNamesOfControlTokensWhenTold) {
  EXPECT_THAT(make_tokenizer().encode("a<|im_end|>b", Specials::AsTokens),
              ElementsAre('a', TinyModel::kEnd, 'b'));
}

TEST(Tokenizer, TakesNamesOfControlTokensForTextOtherwise) {
  EXPECT_EQ(make_tokenizer().encode("<|im_end|>", Specials::AsText).size(), 10U);
}

TEST(Tokenizer, ControlTokensHaveNoText) { EXPECT_EQ(make_tokenizer().bytes(TinyModel::kEnd), ""); }

TEST(Tokenizer, KnowsWhatEndsAText) {
  const Tokenizer tokenizer = make_tokenizer();
  EXPECT_TRUE(tokenizer.ends_text(TinyModel::kEnd));
  EXPECT_FALSE(tokenizer.ends_text(TinyModel::kStart));
}

RC_GTEST_PROP(Tokenizer, GivesBackAnyText, (const std::vector<std::uint16_t>& codes)) {
  static const Tokenizer kTokenizer = make_tokenizer();
  std::string text;
  for (const std::uint16_t code : codes) {
    if (code < 0xD800 || code > 0xDFFF) append_utf8(text, code);
  }
  std::string back;
  for (const TokenId token : kTokenizer.encode(text, Specials::AsText)) {
    back += kTokenizer.bytes(token);
  }
  RC_ASSERT(back == text);
}

TEST(Tokenizer, MergesALongPieceInTime) {
  const std::string text(200000, 'h');
  EXPECT_EQ(make_tokenizer().encode("t" + text, Specials::AsText).size(), 200000U);
}

TEST(Tokenizer, RefusesAnotherKindByName) {
  TinyModel model;
  model.tokenizer = "llama";
  EXPECT_EQ(error_of([&] { make_tokenizer(model); }),
            "tiny.gguf: tokenizer.ggml.model: wanted gpt2 (byte-level BPE), got llama");
}

TEST(Tokenizer, RefusesAMergeOfUnknownTokens) {
  GgufWriter file;
  file.add_text("tokenizer.ggml.model", "gpt2");
  file.add_text("tokenizer.ggml.pre", "gpt-2");
  file.add_texts("tokenizer.ggml.tokens", {"a", "b"});
  file.add_texts("tokenizer.ggml.merges", {"a b"});
  const auto bytes = file.bytes();
  EXPECT_THAT(error_of([&] { Tokenizer(Gguf(bytes, "x")); }),
              HasSubstr("wanted two tokens that make a third, got \"a b\" at index 0"));
}

TEST(Tokenizer, RefusesTypesThatDoNotMatchTheTokens) {
  GgufWriter file;
  file.add_text("tokenizer.ggml.model", "gpt2");
  file.add_text("tokenizer.ggml.pre", "gpt-2");
  file.add_texts("tokenizer.ggml.tokens", {"a", "b"});
  file.add_i32s("tokenizer.ggml.token_type", {1});
  const auto bytes = file.bytes();
  EXPECT_THAT(error_of([&] { Tokenizer(Gguf(bytes, "x")); }),
              HasSubstr("token_type: wanted 2 types, got 1"));
}

TEST(Tokenizer, RefusesAnEndThatIsNoToken) {
  GgufWriter file;
  file.add_text("tokenizer.ggml.model", "gpt2");
  file.add_text("tokenizer.ggml.pre", "gpt-2");
  file.add_texts("tokenizer.ggml.tokens", {"a", "b"});
  file.add_u32("tokenizer.ggml.eos_token_id", 2);
  const auto bytes = file.bytes();
  EXPECT_THAT(error_of([&] { Tokenizer(Gguf(bytes, "x")); }),
              HasSubstr("eos_token_id: wanted a token below 2, got 2"));
}

}  // namespace
}  // namespace generate::testing
