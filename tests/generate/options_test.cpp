// SPDX-License-Identifier: Apache-2.0
// The command line.
#include "examples/generate/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "tests/generate/expect_error.h"

namespace generate::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Options parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "octavo-generate");
  return parse_options(static_cast<int>(arguments.size()), arguments.data()).value();
}

std::string refusal(const std::vector<const char*>& arguments) {
  return error_of([&] { parse(arguments); });
}

class PromptsFile {
 public:
  explicit PromptsFile(const std::string& text) {
    path_ =
        std::filesystem::path(::testing::TempDir()) /
        (std::string("prompts-") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~PromptsFile() { std::filesystem::remove(path_); }
  PromptsFile(const PromptsFile&) = delete;
  PromptsFile& operator=(const PromptsFile&) = delete;
  [[nodiscard]] const char* path() const { return path_.c_str(); }

 private:
  std::filesystem::path path_;
};

TEST(Options, HaveTheirDefaults) {
  const Options options = parse({"Hi"});
  EXPECT_EQ(options.max_tokens, 128);
  EXPECT_EQ(options.page_size, 16);
  EXPECT_EQ(options.cache, octavo::CacheKind::Paged);
  EXPECT_EQ(options.cache_type, octavo::DType::F32);
  EXPECT_EQ(options.backend, octavo::Backend::Auto);
  EXPECT_GE(options.num_threads, 1);
}

TEST(Options, TakeSeedsOf64Bits) {
  EXPECT_EQ(parse({"Hi", "--seed", "18446744073709551615"}).seed, 18446744073709551615U);
}

TEST(Options, RefuseSeedsThatAreNone) {
  for (const char* seed : {"18446744073709551616", "-1", "", "7x"}) {
    EXPECT_THAT(refusal({"Hi", "--seed", seed}),
                HasSubstr(std::string("--seed: wanted 0 to 18446744073709551615, got ") + seed));
  }
}

TEST(Options, TakeSeveralPromptsAmongOptions) {
  EXPECT_THAT(parse({"one", "--max-tokens", "5", "two"}).prompts, ElementsAre("one", "two"));
}

TEST(Options, ReadPromptsFromAFileBehindThoseGiven) {
  const PromptsFile file("second\r\n\n  \nthird");
  EXPECT_THAT(parse({"first", "--prompts", file.path()}).prompts,
              ElementsAre("first", "second", "third"));
}

TEST(Options, TakeAnEmptyPrompt) { EXPECT_THAT(parse({""}).prompts, ElementsAre("")); }

TEST(Options, RefuseAFileWithoutText) {
  const PromptsFile file("\n\n");
  EXPECT_THAT(refusal({"--prompts", file.path()}), HasSubstr("wanted one prompt a line"));
}

TEST(Options, RefuseAFileThatIsNotThere) {
  EXPECT_EQ(refusal({"--prompts", "/nowhere"}), "--prompts: wanted a readable file, got /nowhere");
}

TEST(Options, RefuseNoPromptAtAll) {
  EXPECT_THAT(refusal({}), HasSubstr("prompt: wanted at least one, got none"));
}

TEST(Options, RefuseAPromptThatIsNotUtf8) {
  EXPECT_EQ(refusal({"ok", "a\xFF"}), "prompt 2: wanted UTF-8, got byte 0xff at offset 1");
}

TEST(Options, RefuseAnUnknownWord) {
  EXPECT_EQ(refusal({"Hi", "--cache", "ring"}),
            "--cache: wanted one of paged, contiguous, got ring");
  EXPECT_EQ(refusal({"Hi", "--cache-type", "f8"}),
            "--cache-type: wanted one of f32, f16, bf16, got f8");
  EXPECT_EQ(refusal({"Hi", "--backend", "fused"}),
            "--backend: wanted one of auto, cpu, unfused, got fused");
  EXPECT_EQ(refusal({"Hi", "--weights", "q4"}), "--weights: wanted one of f32, bf16, got q4");
}

TEST(Options, RefusePageSizeZero) {
  EXPECT_EQ(refusal({"Hi", "--page-size", "0"}), "--page-size: wanted 1 to 2147483647, got 0");
}

TEST(Options, RefuseNegativePages) {
  EXPECT_EQ(refusal({"Hi", "--pages", "-1"}), "--pages: wanted 0 to 2147483647, got -1");
}

TEST(Options, RefuseANumberThatIsNone) {
  EXPECT_THAT(refusal({"Hi", "--max-tokens", "many"}), HasSubstr("command line: "));
}

TEST(Options, RefuseANegativeTemperature) {
  EXPECT_EQ(refusal({"Hi", "--temperature", "-1"}),
            "--temperature: wanted a number from 0, got -1");
}

TEST(Options, RefuseATemperatureThatIsNoNumber) {
  EXPECT_THAT(refusal({"Hi", "--temperature", "nan"}), HasSubstr("--temperature"));
}

TEST(Options, RefuseAnUnknownOption) {
  EXPECT_THAT(refusal({"Hi", "--colour"}), HasSubstr("--colour"));
}

}  // namespace
}  // namespace generate::testing
