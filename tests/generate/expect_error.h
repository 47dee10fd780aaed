// SPDX-License-Identifier: Apache-2.0
// Expectations on octavo::Error.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <octavo/error.h>

#include <string>

namespace generate::testing {

/// What a call throws as octavo::Error; empty, and a failed test, when it throws nothing.
template <typename CallT>
std::string error_of(CallT&& call) {
  try {
    call();
  } catch (const octavo::Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace generate::testing
