#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tidy.sh BUILD_FOLDER FILE: clang-tidy on one file, silent when it is clean.
set -u
output="$(clang-tidy-14 --quiet -p "$1" --extra-arg=-Wno-pragma-once-outside-header "$2" 2>&1)"
status=$?
if ((status != 0)); then
  printf '%s\n' "$output" | grep -v 'warnings generated\.$\|^Suppressed \|^Use -header-filter'
fi
exit "$status"
