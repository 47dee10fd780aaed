// SPDX-License-Identifier: Apache-2.0
#include "cache/page_pool.h"

#include <gtest/gtest.h>
#include <octavo/error.h>

namespace octavo::cache {
namespace {

TEST(PagePool, HandsOutPagesFromZeroUp) {
  PagePool pool(3);
  EXPECT_EQ(0, pool.take());
  EXPECT_EQ(1, pool.take());
  EXPECT_EQ(2, pool.take());
  EXPECT_EQ(0, pool.num_free());
}

TEST(PagePool, ReturnsPageWhenLastOwnerLeaves) {
  PagePool pool(2);
  const std::int32_t page = pool.take();
  pool.share(page);
  EXPECT_EQ(1, pool.num_shared());
  pool.drop(page);
  EXPECT_EQ(1, pool.num_free());
  EXPECT_EQ(0, pool.num_shared());
  pool.drop(page);
  EXPECT_EQ(2, pool.num_free());
}

TEST(PagePool, TakesTheNewestFreePageFirst) {
  PagePool pool(4);
  pool.take();
  const std::int32_t page = pool.take();
  pool.drop(page);
  EXPECT_EQ(page, pool.take());
}

TEST(PagePool, RefusesADropTooMany) {
  PagePool pool(1);
  pool.drop(pool.take());
  EXPECT_THROW(pool.drop(0), Error);
}

TEST(PagePool, RefusesToTakeFromAnEmptyPool) {
  PagePool pool(1);
  pool.take();
  EXPECT_THROW(pool.take(), Error);
}

}  // namespace
}  // namespace octavo::cache
