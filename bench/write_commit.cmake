# SPDX-License-Identifier: Apache-2.0
# Writes FILE, which defines octavo::bench::kCommit, when the commit of SOURCE_DIR is another than it says.

set(commit unknown)
execute_process(
  COMMAND git -C "${SOURCE_DIR}" describe --always --dirty=+ --exclude=*
  OUTPUT_VARIABLE described
  RESULT_VARIABLE failed
  ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT failed)
  set(commit "${described}")
endif()
file(CONFIGURE OUTPUT "${FILE}" CONTENT [[
#include "bench/commit.h"
const char* const octavo::bench::kCommit = "@commit@";
]] @ONLY)
