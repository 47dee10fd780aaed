// SPDX-License-Identifier: Apache-2.0
// The Python class KvCache: a cache, what it borrows, and the watch over its one thread.
#pragma once

#include <nanobind/nanobind.h>
#include <octavo/cache.h>

#include <vector>

namespace octavo::python {

namespace nb = nanobind;

class CacheHolder {
 public:
  CacheHolder(const CacheConfig& config, std::vector<nb::object> kept);

  /// The cache for one call. While a `Use` lives, another thread that comes with the GIL is
  /// refused: a cache belongs to one thread at a time, and the work runs without the GIL.
  class Use {
   public:
    explicit Use(CacheHolder& holder);
    ~Use() { holder_.busy_ = false; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    KvCache* operator->() { return &holder_.cache_; }
    KvCache& operator*() { return holder_.cache_; }

   private:
    CacheHolder& holder_;
  };

  [[nodiscard]] const CacheConfig& config() const noexcept { return cache_.config(); }

  std::vector<SequenceStep> steps;  ///< Kept from plan to plan, so that none allocates.

 private:
  KvCache cache_;
  std::vector<nb::object> kept_;
  bool busy_ = false;  // read and written under the GIL
};

void bind_cache(nb::module_& module);
void bind_plan(nb::module_& module);

}  // namespace octavo::python
