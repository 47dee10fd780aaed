// SPDX-License-Identifier: Apache-2.0
// The tool as its users start it: output, exit status, and what stands on standard error.
#include "testing/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace octavo {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Ran {
  int status = -1;
  std::string out, err;

  [[nodiscard]] std::int64_t error_lines() const {
    return std::count(err.begin(), err.end(), '\n');
  }
};

std::string slurp(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

class Tool : public ::testing::Test {
 protected:
  Tool() {
    folder_ = ::testing::TempDir() + "octavo_tool_XXXXXX";
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
  }
  ~Tool() override {
    std::error_code code;
    std::filesystem::remove_all(folder_, code);
  }

  // Runs the tool with arguments as a shell reads them.
  Ran run(const std::string& arguments) const {
    const std::string out = folder_ + "/out";
    const std::string err = folder_ + "/err";
    const std::string command =
        std::string(OCTAVO_BIN_DIR) + "/octavo " + arguments + " >" + out + " 2>" + err;
    const int status = std::system(command.c_str());  // NOLINT(cert-env33-c)
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, slurp(out), slurp(err)};
  }

  static std::string data(const std::string& name) {
    return std::string(OCTAVO_TEST_DATA_DIR) + "/cases/" + name + ".safetensors";
  }

  // A file of the given bytes.
  std::string file(const std::string& name, const std::string& bytes) const {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  std::string folder_;
};

using Check = Tool;
using Plan = Tool;
using Info = Tool;
using CommandLine = Tool;
using Bench = Tool;

TEST_F(Check, PassesARightCaseSilently) {
  const Ran ran = run("check " + data("f32_fork") + " --backend cpu");
  EXPECT_EQ(ran.status, 0);
  EXPECT_EQ(ran.err, "");
  EXPECT_THAT(ran.out, AllOf(StartsWith("pass"), HasSubstr("cpu"), HasSubstr("4 steps"),
                             HasSubstr("max error"), HasSubstr("wanted"), HasSubstr("rms")));
}

TEST_F(Check, PrintsALineForEachCase) {
  const Ran ran = run("check " + data("f32_fork") + " " + data("bf16_sinks") +
                      " \"b2 q1 d16 seed3\" --backend unfused");
  EXPECT_EQ(ran.status, 0);
  EXPECT_EQ(std::count(ran.out.begin(), ran.out.end(), '\n'), 3);
}

TEST_F(Check, ReplaysOverAnotherCacheAndPageSize) {
  EXPECT_EQ(run("check " + data("f32_fork") + " --cache contiguous").status, 0);
  EXPECT_EQ(run("check " + data("f32_fork") + " --page-size 1 --threads 1").status, 0);
}

TEST_F(Check, FailsAWrongResultWithItsCoordinates) {
  // The expected output is the last tensor by name but the LSE; flip an exponent bit in every
  // fourth byte of the file's tail, which holds numbers alone.
  std::string bytes = slurp(data("small_f32_paged_forks"));
  bytes[bytes.size() - 1] = static_cast<char>(bytes[bytes.size() - 1] ^ 0x01);
  const Ran ran = run("check " + file("wrong.safetensors", bytes) + " --backend cpu");
  EXPECT_EQ(ran.status, 1);
  EXPECT_EQ(ran.error_lines(), 1);
  EXPECT_THAT(ran.out, StartsWith("fail"));
  EXPECT_THAT(ran.err, AllOf(HasSubstr("wrong.safetensors"), HasSubstr("step"), HasSubstr("head"),
                             HasSubstr("wanted"), HasSubstr("got")));
}

TEST_F(Check, FailsAPlanThatLacksPages) {
  const Ran ran = run("check " + data("small_out_of_pages"));
  EXPECT_EQ(ran.status, 1);
  EXPECT_THAT(ran.err, HasSubstr("pages: wanted 5, got 4"));
}

TEST_F(Check, RefusesFp8WithWhatIsMissing) {
  for (const char* backend : {"cpu", "unfused", "auto"}) {
    const Ran ran = run("check " + data("small_fp8") + " --backend " + backend);
    EXPECT_EQ(ran.status, 3) << backend;
    EXPECT_EQ(ran.error_lines(), 1);
    EXPECT_THAT(ran.err, AllOf(HasSubstr("missing"), HasSubstr("compute fp8")));
  }
}

TEST_F(Check, RefusesABackendThatIsNotThere) {
  EXPECT_EQ(run("check " + data("f32_fork") + " --backend flash3").status, 3);
}

TEST_F(Check, SaysThatAFileIsMissing) {
  const Ran ran = run("check nowhere.safetensors");
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.error_lines(), 1);
}

TEST_F(Check, SurvivesEveryTruncationOfAFile) {
  const std::string bytes = slurp(data("small_fp8"));
  for (const std::size_t length : {0UL, 7UL, 8UL, 100UL, 900UL, bytes.size() - 1}) {
    const Ran ran = run("check " + file("cut.safetensors", bytes.substr(0, length)));
    EXPECT_EQ(ran.status, 2) << length;
    EXPECT_EQ(ran.error_lines(), 1) << ran.err;
  }
}

TEST_F(Check, SurvivesAHostileHeaderLength) {
  const Ran ran = run("check " + file("hostile.safetensors", std::string(64, '\xff')));
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.error_lines(), 1);
}

TEST_F(Check, KeepsAHostileNameOnOneLine) {
  const std::string header = R"({"a\nb":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}})";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  const Ran ran = run("check " + file("name.safetensors", bytes + header));
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.error_lines(), 1);
}

TEST_F(Check, RefusesACacheWhoseBytesOverflow) {
  const std::vector<std::byte> source = [] {
    const testkit::SafeTensors right = testkit::SafeTensors::read(data("f32_zero_tokens"));
    auto description = nlohmann::json::parse(right.metadata().at("octavo_case"));
    description["cache"]["num_pages"] = 2147483647;
    description["cache"]["page_size"] = 2147483647;
    return testkit::write_safetensors(right.tensors(), {{"octavo_case", description.dump()}});
  }();
  const std::string bytes(reinterpret_cast<const char*>(source.data()), source.size());
  const Ran ran = run("check " + file("overflow.safetensors", bytes));
  EXPECT_EQ(ran.status, 2) << ran.err;
  EXPECT_EQ(ran.error_lines(), 1);
}

TEST_F(Check, GoesOnBehindABadFileAndTakesTheGravestStatus) {
  const std::string all =
      data("small_fp8") + " " + data("small_out_of_pages") + " " + data("f32_fork");
  const Ran both = run("check " + all);
  EXPECT_EQ(both.status, 1);
  EXPECT_THAT(both.out, HasSubstr("pass"));
  const Ran three = run("check nowhere.safetensors " + all);
  EXPECT_EQ(three.status, 2);
  EXPECT_EQ(three.error_lines(), 3);
  EXPECT_THAT(three.out, HasSubstr("pass"));
}

TEST_F(Check, SavesACaseThatPassesAsAFile) {
  ASSERT_EQ(run("check \"b2 q2 s9 d8 bf16 life seed4\" --save " + folder_).status, 0);
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    if (entry.path().extension() != ".safetensors") continue;
    EXPECT_EQ(run("check " + entry.path().string()).status, 0);
    return;
  }
  FAIL() << "wanted a file, got none";
}

TEST_F(Check, NamesAWrongWord) {
  const Ran ran = run("check \"b3 zebra\"");
  EXPECT_EQ(ran.status, 2);
  EXPECT_THAT(ran.err, HasSubstr("got 'zebra'"));
}

TEST_F(Plan, ShowsEachStep) {
  const Ran ran = run("plan --page-size 16 --num-pages 64 7:20 3:1 / 7:1 3:33");
  EXPECT_EQ(ran.status, 0);
  EXPECT_THAT(ran.out, AllOf(HasSubstr("step 0"), HasSubstr("step 1"), HasSubstr("sequence 7"),
                             HasSubstr("pages: 5 of 64 used")));
}

TEST_F(Plan, GivesJson) {
  const Ran ran = run("plan --json --page-size 4 7:6 / fork:7:8 8:1 / truncate:8:2 release:7 8:0");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const auto steps = nlohmann::json::parse(ran.out);
  ASSERT_EQ(steps.size(), 3U);
  EXPECT_EQ(steps[1]["copies"].size(), 1U);
  EXPECT_EQ(steps[1]["past_lens"], nlohmann::json({6}));
  EXPECT_EQ(steps[2]["kv_lens"], nlohmann::json({2}));
  EXPECT_EQ(steps[2]["stats"]["pages_used"], 1);
}

TEST_F(Plan, SaysWhatAStepLacks) {
  const Ran ran = run("plan --page-size 4 --num-pages 5 7:16 / 7:1 8:1");
  EXPECT_EQ(ran.status, 1);
  EXPECT_EQ(ran.error_lines(), 1);
  EXPECT_THAT(ran.err, HasSubstr("pages: wanted 2, got 1"));
}

TEST_F(Plan, RefusesAWordThatIsNone) {
  const Ran ran = run("plan 7:x");
  EXPECT_EQ(ran.status, 2);
  EXPECT_THAT(ran.err, HasSubstr("'7:x': wanted an integer, got 'x'"));
}

TEST_F(Plan, RefusesTheReleaseOfAnUnknownSequence) {
  const Ran ran = run("plan release:5");
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.error_lines(), 1);
}

TEST_F(Info, NamesEveryBackend) {
  const Ran ran = run("info");
  EXPECT_EQ(ran.status, 0);
  for (const char* name : {"cpu", "unfused", "fused", "flash2", "flash3", "gpu"}) {
    EXPECT_THAT(ran.out, HasSubstr(name));
  }
}

TEST_F(Info, GivesJson) {
  const Ran ran = run("info --json");
  ASSERT_EQ(ran.status, 0);
  EXPECT_EQ(nlohmann::json::parse(ran.out)["backends"].size(), 5U);
}

TEST_F(CommandLine, HelpsOnStandardOutput) {
  const Ran ran = run("--help");
  EXPECT_EQ(ran.status, 0);
  EXPECT_EQ(ran.err, "");
  EXPECT_THAT(ran.out, HasSubstr("octavo check report.safetensors"));
}

TEST_F(CommandLine, RefusesAnUnknownCommandInOneLine) {
  const Ran ran = run("dance");
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.error_lines(), 1);
}

TEST_F(CommandLine, RefusesNothingAtAll) { EXPECT_EQ(run("").status, 2); }

TEST_F(CommandLine, RefusesAnUnknownBackend) {
  const Ran ran = run("check x --backend gpu");
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.error_lines(), 1);
}

TEST_F(CommandLine, RefusesPageSizeZero) {
  EXPECT_EQ(run("check \"b1 d8\" --page-size 0").status, 2);
}

TEST_F(Bench, RefusesAFilterThatIsNone) {
  const Ran ran = run("bench --filter '('");
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.error_lines(), 1);
}

TEST_F(Bench, MeasuresPlansAsJsonLines) {
  const Ran ran = run("bench --quick --json --filter 'plan decode b64 s512 page16'");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const auto line = nlohmann::json::parse(ran.out);
  EXPECT_EQ(line["case"], "plan decode b64 s512 page16 q1");
  EXPECT_GT(line["time_us"], 0.0);
  for (const char* key : {"backend", "device", "driver", "commit", "date", "tflops", "tbps"}) {
    EXPECT_TRUE(line.contains(key)) << key;
  }
}

TEST_F(Bench, TellsADecodesShareOfItsBound) {
  const Ran ran = run("bench --quick --json --filter 'decode b1 s4096 h9/3 d64 f32 page16'");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const auto line = nlohmann::json::parse(ran.out);
  // DRAM, but for builds whose products are slow.
  EXPECT_TRUE(line["bound"] == "DRAM" || line["bound"] == "FMA") << ran.out;
  EXPECT_GT(line["bound_share"], 0.0);
  EXPECT_LT(line["bound_share"], 100.0);  // wrong units would be further off than a wild machine
}

}  // namespace
}  // namespace octavo
