// SPDX-License-Identifier: Apache-2.0
// Right, broken and hostile safetensors files.
#include "testing/safetensors.h"

#include "testing/input_error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace octavo::testkit {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> file_of(const std::string& header, std::size_t data_bytes,
                               std::uint64_t length) {
  std::vector<std::byte> bytes(8 + header.size() + data_bytes);
  std::memcpy(bytes.data(), &length, sizeof length);
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  return bytes;
}

std::string complaint(std::vector<std::byte> bytes) {
  try {
    (void)SafeTensors::parse(std::move(bytes));
  } catch (const InputError& error) {
    return error.what();
  }
  return "none";
}

std::string complaint(const std::string& header, std::size_t data_bytes) {
  return complaint(file_of(header, data_bytes, header.size()));
}

TEST(SafeTensors, ReadsTensorsAndMetadata) {
  const std::string header =
      R"({"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}})";
  const SafeTensors file = SafeTensors::parse(file_of(header, 8, header.size()));
  EXPECT_EQ(file.metadata().at("a"), "b");
  EXPECT_EQ(file.tensors().at("x").shape, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(file.tensors().at("x").bytes.size(), 8U);
}

TEST(SafeTensors, ReadsBackWhatItWrites) {
  const std::vector<std::byte> data = {std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}};
  const std::vector<std::byte> bytes = write_safetensors(
      {{"a", {"BF16", {2}, data}}, {"empty", {"F32", {0, 5}, {}}}}, {{"key", "value"}});
  const SafeTensors file = SafeTensors::parse(bytes);
  EXPECT_EQ(file.tensors().at("a").bytes[2], std::byte{3});
  EXPECT_EQ(file.tensors().at("empty").bytes.size(), 0U);
  EXPECT_EQ(file.metadata().at("key"), "value");
}

TEST(SafeTensors, RefusesAFileTooShortForItsLength) {
  EXPECT_EQ(complaint(std::vector<std::byte>(7)), "safetensors: wanted at least 8 bytes, got 7");
}

TEST(SafeTensors, RefusesAHeaderLongerThanTheFile) {
  EXPECT_EQ(complaint(file_of("{}", 0, 3)),
            "safetensors: wanted a header of at most 2 bytes, got 3");
}

TEST(SafeTensors, RefusesTheLargestHeaderLength) {
  EXPECT_THAT(complaint(file_of("{}", 0, ~std::uint64_t{0})),
              HasSubstr("got 18446744073709551615"));
}

TEST(SafeTensors, RefusesAHeaderThatIsNoJson) {
  EXPECT_EQ(complaint("{\"a\":", 0), "safetensors header: wanted JSON, got other text");
}

TEST(SafeTensors, RefusesInvalidUtf8) {
  EXPECT_EQ(complaint("{\"\xff\":1}", 0), "safetensors header: wanted JSON, got other text");
}

TEST(SafeTensors, RefusesAHeaderThatIsNoObject) {
  EXPECT_EQ(complaint("[]", 0), "safetensors header: wanted an object, got array");
}

TEST(SafeTensors, SurvivesDeepNesting) {
  std::string header = "{\"x\":";
  header.append(200'000, '[');
  header.append(200'000, ']');
  EXPECT_EQ(complaint(header + "}", 0), "tensor 'x': wanted an object, got array");
}

TEST(SafeTensors, SurvivesADeeplyNestedExtent) {
  std::string header = R"({"x":{"dtype":"F32","data_offsets":[0,0],"shape":[)";
  header.append(200'000, '[');
  header.append(200'000, ']');
  EXPECT_THAT(complaint(header + "]}}", 0), HasSubstr("shape: wanted an integer from 0"));
}

TEST(SafeTensors, RefusesATensorNamedTwice) {
  EXPECT_THAT(complaint(R"({"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"x":{}})", 0),
              HasSubstr("got 'x' twice"));
}

TEST(SafeTensors, NamesAnUnknownDtype) {
  EXPECT_THAT(complaint(R"({"x":{"dtype":"F4","shape":[],"data_offsets":[0,0]}})", 0),
              HasSubstr("got 'F4'"));
}

TEST(SafeTensors, RefusesANegativeExtent) {
  EXPECT_THAT(complaint(R"({"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}})", 0),
              HasSubstr("tensor 'x' shape: wanted an integer from 0 to"));
}

TEST(SafeTensors, RefusesAFractionalExtent) {
  EXPECT_THAT(complaint(R"({"x":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4),
              HasSubstr("got 1.5"));
}

TEST(SafeTensors, RefusesAShapeWhoseBytesOverflow) {
  EXPECT_THAT(
      complaint(R"({"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0),
      HasSubstr("wanted fewer than 2^63 bytes"));
}

TEST(SafeTensors, RefusesAnExtentBeyondInt64) {
  EXPECT_THAT(
      complaint(R"({"x":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,0]}})", 0),
      HasSubstr("got 18446744073709551615"));
}

TEST(SafeTensors, RefusesOffsetsBehindTheData) {
  EXPECT_THAT(complaint(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 3),
              HasSubstr("wanted begin <= end <= 3, got [0, 4]"));
}

TEST(SafeTensors, RefusesOffsetsInTheWrongOrder) {
  EXPECT_THAT(complaint(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4),
              HasSubstr("got [4, 0]"));
}

TEST(SafeTensors, RefusesOffsetsThatDontFitTheShape) {
  EXPECT_THAT(complaint(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4),
              HasSubstr("wanted 8 bytes as dtype and shape say, got 4"));
}

TEST(SafeTensors, RefusesThreeOffsets) {
  EXPECT_THAT(complaint(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}})", 4),
              HasSubstr("data_offsets: wanted 2 elements, got 3"));
}

TEST(SafeTensors, RefusesTensorsThatOverlap) {
  EXPECT_THAT(complaint(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                        R"("y":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
                        6),
              HasSubstr("tensor 'y' data_offsets: wanted begin 4, got 2 (it overlaps another)"));
}

TEST(SafeTensors, RefusesAHoleBetweenTensors) {
  EXPECT_THAT(complaint(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8),
              HasSubstr("wanted begin 0, got 4 (a hole)"));
}

TEST(SafeTensors, RefusesBytesBehindTheLastTensor) {
  EXPECT_THAT(complaint(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 5),
              HasSubstr("wanted 4 bytes of tensors, got 5"));
}

TEST(SafeTensors, RefusesMetadataThatIsNoString) {
  EXPECT_EQ(complaint(R"({"__metadata__":{"a":1}})", 0),
            "__metadata__ 'a': wanted a string, got 1");
}

TEST(SafeTensors, ShowsControlCharactersEscaped) {
  EXPECT_THAT(complaint("{\"a\\nb\":1}", 0), HasSubstr("tensor 'a\\x0ab'"));
}

TEST(SafeTensors, RefusesAFileThatIsNotThere) {
  EXPECT_THROW((void)SafeTensors::read("/nowhere/at/all.safetensors"), InputError);
}

TEST(SafeTensors, RefusesAFolder) { EXPECT_THROW((void)SafeTensors::read("/"), InputError); }

}  // namespace
}  // namespace octavo::testkit
