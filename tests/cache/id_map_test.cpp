// SPDX-License-Identifier: Apache-2.0
#include "cache/id_map.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace octavo::cache {
namespace {

TEST(IdMap, KeepsExtremeIds) {
  IdMap map(3);
  map.insert(INT64_MIN, 0);
  map.insert(INT64_MAX, 1);
  map.insert(0, 2);
  EXPECT_EQ(0, map.find(INT64_MIN));
  EXPECT_EQ(1, map.find(INT64_MAX));
  EXPECT_EQ(2, map.find(0));
  EXPECT_EQ(IdMap::kNone, map.find(1));
}

RC_GTEST_PROP(IdMap, AgreesWithAMap,
              (const std::vector<std::pair<bool, std::uint8_t>>& operations)) {
  constexpr std::int32_t kCapacity = 12;
  IdMap map(kCapacity);
  std::map<std::int64_t, std::int32_t> model;
  std::int32_t row = 0;
  for (const auto& [adds, byte] : operations) {
    const std::int64_t id =
        (byte % 24) * (std::int64_t{1} << 33);  // multiples of a power of two, to collide
    if (adds && !model.contains(id) && model.size() < kCapacity) {
      map.insert(id, row);
      model[id] = row++;
    } else if (!adds && model.contains(id)) {
      map.erase(id);
      model.erase(id);
    }
    for (std::int64_t i = 0; i < 24; ++i) {
      const std::int64_t key = i * (std::int64_t{1} << 33);
      RC_ASSERT(map.find(key) == (model.contains(key) ? model[key] : IdMap::kNone));
    }
  }
}

}  // namespace
}  // namespace octavo::cache
