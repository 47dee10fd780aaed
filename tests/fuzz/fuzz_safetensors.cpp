// SPDX-License-Identifier: Apache-2.0
// Any bytes as a case file: either a case comes out that can be written again, or an InputError.
#include "testing/case_file.h"
#include "testing/input_error.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace octavo::testkit;  // NOLINT(google-build-using-namespace)
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  try {
    const Case value = case_from(SafeTensors::parse(std::vector<std::byte>(bytes, bytes + size)));
    const std::vector<std::byte> written = write_case(value);
    if (write_case(case_from(SafeTensors::parse(written))) != written) std::abort();
  } catch (const InputError&) {
    return 0;
  }
  return 0;
}
