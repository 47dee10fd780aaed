// SPDX-License-Identifier: Apache-2.0
// The program octavo-generate as a user runs it, on a made-up model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tests/generate/tiny_model.h"

namespace generate::testing {
namespace {

using ::testing::HasSubstr;

struct Ran {
  int status = -1;
  std::string out, err;
};

class Program : public ::testing::Test {
 protected:
  Program() {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              (std::string("octavo-generate-") +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
    write_model(TinyModel{});
  }
  ~Program() override { std::filesystem::remove_all(folder_); }

  void write_model(const TinyModel& model) { write_model(model.writer().bytes()); }
  void write_model(const std::vector<std::byte>& bytes) {
    std::ofstream file(folder_ / "tiny.gguf", std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }

  // `arguments` as a shell would read them.
  Ran run(const std::string& arguments, const std::string& out_path = {}) {
    const std::string out = out_path.empty() ? (folder_ / "out").string() : out_path;
    const std::string command = std::string(OCTAVO_BIN_DIR) + "/octavo-generate --model " +
                                (folder_ / "tiny.gguf").string() + " " + arguments + " >" + out +
                                " 2>" + (folder_ / "err").string();
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read("out"), read("err")};
  }

  void expect_refusal(const std::string& arguments, const std::string& message) {
    const Ran ran = run(arguments);
    EXPECT_EQ(ran.status, 2);
    EXPECT_THAT(ran.err, HasSubstr(message));
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_EQ(ran.out, "");
  }

  [[nodiscard]] std::string read(const char* name) const {
    std::ifstream file(folder_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::filesystem::path folder_;
};

TEST_F(Program, PrintsOneJsonObject) {
  const Ran ran = run("'one' 'two' --json --max-tokens 5");
  EXPECT_EQ(ran.status, 0) << ran.err;
  const auto object = nlohmann::json::parse(ran.out);
  ASSERT_EQ(object["answers"].size(), 2U);
  EXPECT_EQ(object["answers"][0]["prompt"], "one");
  EXPECT_EQ(object["answers"][1]["prompt"], "two");
  EXPECT_EQ(object["answers"][0]["prompt_tokens"][0], TinyModel::kStart);
  EXPECT_LE(object["answers"][0]["tokens"].size(), 5U);
  EXPECT_TRUE(object["answers"][0]["text"].is_string());
  EXPECT_GT(object["stats"]["prompt_tokens"], 0);
}

TEST_F(Program, PrintsAnswersInTheOrderOfThePrompts) {
  const Ran ran = run("'a' 'b' 'c' --batch 2 --max-tokens 6 --quiet");
  EXPECT_EQ(ran.status, 0);
  EXPECT_EQ(ran.err, "");
  const auto object = nlohmann::json::parse(run("a b c --batch 2 --max-tokens 6 --json").out);
  std::string wanted;
  for (const auto& answer : object["answers"]) {
    if (!wanted.empty()) wanted += "\n";
    wanted += "> " + answer["prompt"].get<std::string>() + "\n" +
              answer["text"].get<std::string>() + "\n";
  }
  EXPECT_EQ(ran.out, wanted);
}

TEST_F(Program, PutsFiguresOnStandardError) {
  const Ran ran = run("hello --max-tokens 4");
  EXPECT_THAT(ran.err, HasSubstr("prefill"));
  EXPECT_THAT(ran.err, HasSubstr("slots wasted"));
}

TEST_F(Program, RawContinuesThePrompt) {
  const auto object = nlohmann::json::parse(run("'ab<|im_end|>' --raw --json --max-tokens 3").out);
  EXPECT_EQ(object["answers"][0]["prompt_tokens"], (std::vector<int>{'a', 'b', TinyModel::kEnd}));
}

TEST_F(Program, HelpEndsWell) {
  const Ran ran = run("--help");
  EXPECT_EQ(ran.status, 0);
  EXPECT_THAT(ran.out, HasSubstr("--page-size"));
  EXPECT_EQ(ran.err, "");
}

TEST_F(Program, RefusesAMissingModel) {
  std::filesystem::remove(folder_ / "tiny.gguf");
  expect_refusal("hello", "--model: wanted a GGUF file, got none at");
}

TEST_F(Program, RefusesATruncatedModel) {
  std::vector<std::byte> bytes = TinyModel{}.writer().bytes();
  bytes.resize(bytes.size() / 2);
  write_model(bytes);
  expect_refusal("hello", "(truncated?)");
}

TEST_F(Program, RefusesAnotherArchitecture) {
  TinyModel model;
  model.architecture = "mamba";
  write_model(model);
  expect_refusal("hello", "wanted llama, got mamba");
}

TEST_F(Program, RefusesAPromptLongerThanTheContext) {
  expect_refusal("'" + std::string(500, 'x') + "'", "prompt 1: wanted at most 160 tokens");
}

TEST_F(Program, RefusesAPromptLongerThanTheCache) {
  expect_refusal("'" + std::string(90, 'x') + "' --pages 2", "prompt 1: wanted at most 32 tokens");
}

TEST_F(Program, RefusesMoreMemoryThanThereIs) {
  expect_refusal("hello --pages 2000000000 --page-size 2000000000", "cache: wanted ");
}

TEST_F(Program, RefusesAnEmptyRawPrompt) {
  expect_refusal("'' --raw", "prompt: wanted at least one token, got none");
}

TEST_F(Program, RefusesAnUnknownOption) { expect_refusal("hello --frobnicate", "--frobnicate"); }

TEST_F(Program, SaysWhenItCannotWrite) {
  const Ran ran = run("hello --quiet --max-tokens 3", "/dev/full");
  EXPECT_EQ(ran.status, 2);
  EXPECT_THAT(ran.err, HasSubstr("standard output: wanted to write"));
}

}  // namespace
}  // namespace generate::testing
