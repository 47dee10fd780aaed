// SPDX-License-Identifier: Apache-2.0
// The GGUF reader: what good files say, and how bad ones are refused.
#include "examples/generate/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/generate/expect_error.h"
#include "tests/generate/gguf_writer.h"
#include "tests/generate/tiny_model.h"

namespace generate::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Gguf parse(const std::vector<std::byte>& bytes) { return Gguf(bytes, "x.gguf"); }

std::string refusal(const GgufWriter& file) {
  const std::vector<std::byte> bytes = file.bytes();
  return error_of([&] { parse(bytes); });
}

TEST(Gguf, ReadsValuesOfEachKind) {
  GgufWriter file;
  file.add_u32("number", 7);
  file.add_f32("real", 0.5F);
  file.add_bool("flag", true);
  file.add_text("word", "llama");
  file.add_texts("words", {"a", "", "c"});
  file.add_i32s("numbers", {-1, 2});
  const auto bytes = file.bytes();
  const Gguf gguf = parse(bytes);
  EXPECT_EQ(gguf.integer("number"), 7);
  EXPECT_EQ(gguf.number("real"), 0.5);
  EXPECT_EQ(gguf.boolean("flag"), true);
  EXPECT_EQ(gguf.text("word"), "llama");
  EXPECT_THAT(gguf.texts("words"), ElementsAre("a", "", "c"));
  EXPECT_THAT(gguf.integers("numbers"), ElementsAre(-1, 2));
  EXPECT_EQ(gguf.integer("absent"), std::nullopt);
}

TEST(Gguf, ReadsVersionTwo) {
  GgufWriter file;
  file.version = 2;
  file.add_u32("number", 7);
  const auto bytes = file.bytes();
  EXPECT_EQ(parse(bytes).integer("number"), 7);
}

TEST(Gguf, FindsTensorsWithShapeAndData) {
  GgufWriter file;
  file.add_f32_tensor("a", {3}, {1, 2, 3});
  file.add_f32_tensor("b", {2, 2}, {4, 5, 6, 7});
  const auto bytes = file.bytes();
  const Gguf gguf = parse(bytes);
  const GgufTensor* const tensor = gguf.find_tensor("b");
  ASSERT_NE(tensor, nullptr);
  EXPECT_THAT(tensor->shape, ElementsAre(2, 2));
  std::vector<float> values(4);
  dequantize(tensor->type, tensor->data.data(), values);
  EXPECT_THAT(values, ElementsAre(4, 5, 6, 7));
}

TEST(Gguf, HonoursTheFilesAlignment) {
  GgufWriter file;
  file.alignment = 128;
  file.add_u32("general.alignment", 128);
  file.add_f32_tensor("a", {1}, {9});
  const auto bytes = file.bytes();
  float value = 0;
  dequantize(GgmlType::F32, parse(bytes).find_tensor("a")->data.data(), {&value, 1});
  EXPECT_EQ(value, 9.0F);
}

// Every proper prefix of a file lacks something; reading must say so and touch nothing beyond.
TEST(Gguf, RefusesEveryTruncation) {
  GgufWriter file;
  file.add_u32("number", 7);
  file.add_texts("words", {"one", "two"});
  file.add_f32_tensor("a", {3}, {1, 2, 3});
  const auto bytes = file.bytes();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    // A copy of its own size, so that a sanitizer sees a read beyond the end.
    const std::vector<std::byte> cut(bytes.begin(),
                                     bytes.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_THROW(parse(cut), octavo::Error) << size << " of " << bytes.size() << " bytes";
  }
}

TEST(Gguf, NamesAnotherFormat) {
  const std::vector<std::byte> bytes(64, std::byte{'P'});
  EXPECT_EQ(error_of([&] { parse(bytes); }),
            "x.gguf: wanted a GGUF file, got another format (its first bytes: \"PPPP\")");
}

TEST(Gguf, NamesAnotherVersion) {
  GgufWriter file;
  file.version = 1;
  EXPECT_EQ(refusal(file), "x.gguf: wanted GGUF version 2 or 3, got version 1");
}

TEST(Gguf, NamesABigEndianFile) {
  GgufWriter file;
  file.version = 3U << 24U;
  EXPECT_THAT(refusal(file), HasSubstr("got a big-endian file"));
}

TEST(Gguf, RefusesMoreKeysThanTheFileCanHold) {
  GgufWriter file;
  file.extra_values = std::numeric_limits<std::int64_t>::max();
  EXPECT_THAT(refusal(file), HasSubstr("metadata keys in the"));
}

TEST(Gguf, RefusesMoreTensorsThanTheFileCanHold) {
  GgufWriter file;
  file.extra_tensors = -1;  // as the unsigned number that it is: 2^64 - 1
  EXPECT_THAT(refusal(file), HasSubstr("tensors in the"));
}

TEST(Gguf, RefusesAnArrayLongerThanTheFile) {
  GgufWriter file;
  file.begin_array("numbers", GgufWriter::kU64, std::uint64_t{1} << 61U);
  EXPECT_THAT(refusal(file), HasSubstr("array elements in the"));
}

TEST(Gguf, RefusesArraysOfArrays) {
  GgufWriter file;
  file.begin_array("nested", GgufWriter::kArray, 1);
  EXPECT_THAT(refusal(file), HasSubstr("nested: wanted an array of numbers or strings"));
}

TEST(Gguf, RefusesAnUnknownValueType) {
  GgufWriter file;
  file.begin_value("odd", 13);
  EXPECT_EQ(refusal(file), "x.gguf: odd: wanted a value type up to 12, got 13");
}

TEST(Gguf, RefusesAKeyGivenTwice) {
  GgufWriter file;
  file.add_u32("number", 7);
  file.add_u32("number", 8);
  EXPECT_THAT(refusal(file), HasSubstr("got number twice"));
}

TEST(Gguf, RefusesATensorGivenTwice) {
  GgufWriter file;
  file.add_f32_tensor("a", {1}, {1});
  file.add_f32_tensor("a", {1}, {1});
  EXPECT_THAT(refusal(file), HasSubstr("got a twice"));
}

TEST(Gguf, RefusesAShapeWhoseProductOverflows) {
  GgufWriter file;
  const std::uint64_t large = std::uint64_t{1} << 33U;
  file.describe_tensor("a", {large, large}, GgmlType::F32, 0);
  EXPECT_THAT(refusal(file), HasSubstr("got extent 8589934592 on axis 1"));
}

TEST(Gguf, RefusesAnEmptyAxis) {
  GgufWriter file;
  file.describe_tensor("a", {4, 0}, GgmlType::F32, 0);
  EXPECT_THAT(refusal(file), HasSubstr("got extent 0 on axis 1"));
}

TEST(Gguf, RefusesTooManyAxes) {
  GgufWriter file;
  file.describe_tensor("a", {1, 1, 1, 1, 1}, GgmlType::F32, 0);
  EXPECT_THAT(refusal(file), HasSubstr("wanted 1 to 4 dimensions, got 5"));
}

TEST(Gguf, RefusesATensorBeyondTheEnd) {
  GgufWriter file;
  file.add_f32_tensor("a", {4}, {1, 2, 3, 4});
  file.describe_tensor("b", {4}, GgmlType::F32, 32);
  EXPECT_THAT(refusal(file), HasSubstr("tensor b: wanted 16 bytes at offset 32, got 16 bytes"));
}

TEST(Gguf, RefusesAnOffsetThatWouldOverflow) {
  GgufWriter file;
  file.add_f32_tensor("a", {4}, {1, 2, 3, 4});
  file.describe_tensor("b", {4}, GgmlType::F32, ~std::uint64_t{31});
  EXPECT_THAT(refusal(file), HasSubstr("tensor b: wanted 16 bytes at offset"));
}

TEST(Gguf, RefusesAMisalignedTensor) {
  GgufWriter file;
  file.add_f32_tensor("a", {16}, std::vector<float>(16));
  file.describe_tensor("b", {1}, GgmlType::F32, 4);
  EXPECT_THAT(refusal(file), HasSubstr("tensor b: wanted an offset that 32 divides, got 4"));
}

TEST(Gguf, RefusesTensorsThatOverlap) {
  GgufWriter file;
  file.add_f32_tensor("a", {16}, std::vector<float>(16));
  file.describe_tensor("b", {8}, GgmlType::F32, 32);
  EXPECT_THAT(refusal(file), HasSubstr("got a over b"));
}

TEST(Gguf, RefusesRowsThatAreNotWholeBlocks) {
  GgufWriter file;
  file.describe_tensor("a", {33}, GgmlType::Q4_1, 0);
  EXPECT_THAT(refusal(file), HasSubstr("wanted rows of whole Q4_1 blocks (32 elements), got 33"));
}

TEST(Gguf, RefusesAnAlignmentThatIsNoPowerOfTwo) {
  GgufWriter file;
  file.add_u32("general.alignment", 24);
  EXPECT_THAT(refusal(file), HasSubstr("general.alignment: wanted a power of two"));
}

TEST(Gguf, KeepsTensorsOfUnknownTypeWithoutData) {
  GgufWriter file;
  file.describe_tensor("a", {256}, static_cast<GgmlType>(12), 0);
  const auto bytes = file.bytes();
  EXPECT_TRUE(parse(bytes).find_tensor("a")->data.empty());
}

TEST(Gguf, RefusesAValueOfAnotherTypeThanAskedFor) {
  GgufWriter file;
  file.add_text("number", "seven");
  const auto bytes = file.bytes();
  const Gguf gguf = parse(bytes);
  EXPECT_EQ(error_of([&] { (void)gguf.integer("number"); }),
            "x.gguf: number: wanted an integer, got another type");
}

TEST(Gguf, KeepsErrorsOnOneLine) {
  GgufWriter file;
  file.begin_value("new\nline\x1b", 13);
  EXPECT_THAT(refusal(file), HasSubstr("new\\x0aline\\x1b: wanted"));
}

TEST(MappedFile, NamesAFileThatIsNotThere) {
  EXPECT_THAT(error_of([] { MappedFile("/nowhere/at/all.gguf"); }),
              HasSubstr("/nowhere/at/all.gguf: wanted a readable file"));
}

TEST(MappedFile, RefusesAFolder) {
  EXPECT_THAT(error_of([] { MappedFile("/"); }), HasSubstr("wanted a plain file"));
}

}  // namespace
}  // namespace generate::testing
