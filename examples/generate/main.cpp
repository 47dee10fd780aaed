// SPDX-License-Identifier: Apache-2.0
// octavo-generate: a small language model over Octavo's cache. Exit status: 0, or 2 with one line
// on standard error.
#include <octavo/error.h>

#include <cstdio>
#include <exception>
#include <new>

#include "examples/generate/options.h"
#include "examples/generate/session.h"

int main(int argc, char** argv) {
  constexpr int kFailure = 2;
  try {
    const auto options = generate::parse_options(argc, argv);
    if (options) generate::run_session(*options);
    return 0;
  } catch (const std::bad_alloc&) {
    std::fputs("octavo-generate: memory: wanted more than the machine has free\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "octavo-generate: %s\n", error.what());
  }
  return kFailure;
}
