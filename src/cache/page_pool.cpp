// SPDX-License-Identifier: Apache-2.0
#include "cache/page_pool.h"

#include "base/error.h"

namespace octavo::cache {

PagePool::PagePool(std::int32_t num_pages)
    : num_owners_(static_cast<std::size_t>(num_pages), 0),
      free_(static_cast<std::size_t>(num_pages)) {
  for (std::size_t i = 0; i < free_.size(); ++i)
    free_[i] = num_pages - 1 - static_cast<std::int32_t>(i);
}

std::int32_t PagePool::take() {
  OCTAVO_CHECK(!free_.empty());
  const std::int32_t page = free_.back();
  free_.pop_back();
  num_owners_[static_cast<std::size_t>(page)] = 1;
  return page;
}

void PagePool::share(std::int32_t page) {
  std::int32_t& owners = num_owners_[static_cast<std::size_t>(page)];
  OCTAVO_CHECK(owners > 0);
  if (++owners == 2) ++num_shared_;
}

void PagePool::drop(std::int32_t page) {
  std::int32_t& owners = num_owners_[static_cast<std::size_t>(page)];
  OCTAVO_CHECK(owners > 0);
  --owners;
  if (owners == 1) --num_shared_;
  if (owners == 0) free_.push_back(page);
}

}  // namespace octavo::cache
