// SPDX-License-Identifier: Apache-2.0
// How a refusal is held to its promise: the code, the whole message, and a cache that is as before.
#pragma once

#include <octavo/cache.h>
#include <octavo/error.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace octavo::refusal {

/// The message of the Error that `call` throws; notes another code, or no throw, as a failure.
template <typename CallT>
std::string message_of(CallT&& call, ErrorCode wanted = ErrorCode::InvalidArgument) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), wanted) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "wanted an Error, got none";
  return {};
}

/// All that a caller can see of a cache.
struct Snapshot {
  std::uint64_t version;
  std::vector<SequenceId> ids;
  std::vector<std::int64_t> lengths;
  std::vector<std::vector<std::int32_t>> pages;
  std::int64_t pages_free;
  std::vector<std::byte> storage;

  friend bool operator==(const Snapshot&, const Snapshot&) = default;
};

inline Snapshot snapshot_of(KvCache& cache) {
  Snapshot shot;
  shot.version = cache.version();
  shot.ids = cache.sequence_ids();
  for (const SequenceId id : shot.ids) {
    shot.lengths.push_back(cache.length(id));
    shot.pages.push_back(cache.page_ids(id));
  }
  shot.pages_free = cache.stats().pages_free;
  for (std::int32_t layer = 0; layer < cache.config().num_layers; ++layer) {
    for (const TensorView& view : {cache.key_storage(layer), cache.value_storage(layer)}) {
      std::int64_t bytes = dtype_bytes(view.dtype);
      for (std::size_t axis = 0; axis < 4; ++axis) bytes *= view.shape[axis];
      const auto* first = static_cast<const std::byte*>(view.data);
      shot.storage.insert(shot.storage.end(), first, first + bytes);
    }
  }
  return shot;
}

}  // namespace octavo::refusal
