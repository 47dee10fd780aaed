// SPDX-License-Identifier: Apache-2.0
// The sizes of a cache, as keywords.
#pragma once

#include <nanobind/nanobind.h>

#include "cache.h"

namespace octavo::python {

/// KvCache's constructor and the function cache_sizes, which take the same keywords.
void bind_cache_sizes(nb::module_& module, nb::class_<CacheHolder>& cache);

}  // namespace octavo::python
