// SPDX-License-Identifier: Apache-2.0
// Fills in the defaults of configurations and refuses what is wrong in itself.
#pragma once

#include <octavo/attention.h>
#include <octavo/cache.h>

namespace octavo::api {

/// Throws InvalidArgument, Unsupported (a dtype that is only named yet) or NotCompiled (a device).
CacheConfig checked(const CacheConfig& config);

/// Throws InvalidArgument.
AttentionConfig checked(const AttentionConfig& config);

/// Throws InvalidArgument where the two don't describe the same heads.
void check_fit(const AttentionConfig& attention, const CacheConfig& cache);

}  // namespace octavo::api
