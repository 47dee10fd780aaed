// SPDX-License-Identifier: Apache-2.0
// What tests of refusals share: the message of one, and small configurations that are right.
#pragma once

#include "tests/gpu/gpu_test.h"

#include <octavo/attention.h>
#include <octavo/cache.h>
#include <octavo/error.h>

#include <gtest/gtest.h>

#include <string>

namespace octavo::gpu_tests {

template <typename CallT>
std::string refused(CallT call, ErrorCode code = ErrorCode::InvalidArgument) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}

inline CacheConfig small() {
  CacheConfig c;
  c.num_kv_heads = 2;
  c.head_dim = 16;
  c.dtype = DType::BF16;
  c.max_num_seqs = 4;
  c.max_seq_len = 64;
  c.device = kGpu;
  return c;
}

inline AttentionConfig attention() {
  AttentionConfig a;
  a.num_q_heads = a.num_kv_heads = 2;
  a.head_dim = 16;
  return a;
}

}  // namespace octavo::gpu_tests
