// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"

namespace octavo {

const char* to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::InvalidArgument:
      return "InvalidArgument";
    case ErrorCode::Unsupported:
      return "Unsupported";
    case ErrorCode::OutOfMemory:
      return "OutOfMemory";
    case ErrorCode::DeviceFailure:
      return "DeviceFailure";
    case ErrorCode::NotCompiled:
      return "NotCompiled";
    case ErrorCode::Internal:
      return "Internal";
  }
  return "unknown";
}

namespace base {

void throw_internal(const char* condition, const char* file, int line) {
  throw Error(ErrorCode::Internal, fmt::format("{} does not hold ({}:{})", condition, file, line));
}

}  // namespace base
}  // namespace octavo
