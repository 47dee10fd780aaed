#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a pack of GPU tests and benchmarks (./dev gpu-test --pack) on a machine that has a driver and
# the CUDA libraries. Usage: run.sh [test|bench|sanitize] [arguments of the program]
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export LD_LIBRARY_PATH="$here/lib:${LD_LIBRARY_PATH:-}:/usr/local/cuda/lib64"
export OCTAVO_TEST_DATA="$here/data"
export OCTAVO_REQUIRE=cuda

what="${1:-test}"
(($#)) && shift
case "$what" in
  test)
    "$here/bin/octavo" info
    "$here/bin/test_gpu" --gtest_brief=1 "$@"
    # 3: a case was refused (FP8, what cuDNN and flash2 lack) and none failed; the case of a full pool fails
    # by intent.
    for arguments in '--backend unfused' '--backend unfused --callers-cache' '--backend fused' \
      '--backend flash2' '--backend flash2 --callers-cache'; do
      status=0
      # shellcheck disable=SC2086 # options, word by word
      find "$here/data/cases" -name '*.safetensors' ! -name '*out_of_pages*' -print0 |
        xargs -0 "$here/bin/octavo" check --device cuda $arguments >"$here/check.log" 2>&1 ||
        status=$?
      echo "octavo check --device cuda $arguments"
      cat "$here/check.log"
      if grep -q '^fail\|^unmet\|^broken\|^invalid' "$here/check.log"; then exit 1; fi
      ((status == 0 || status == 123)) || exit 1
    done
    if [[ -x $here/bin/octavo_fused_gpu ]]; then
      "$here/bin/octavo_fused_gpu" || (($? == 77))
    fi
    ;;
  bench) "$here/bin/octavo_gpu_bench" "$@" ;;
  sanitize)
    # The suite's small half; the large cases would take the tools hours.
    filter='*DevicePlan*:CallersStep*:SmallGraph*:*AppendLayout*:*AppendRope*:*Converts*:*Gathers*:*Forks*:*AgreesWithTheOracle*seed1?:*AgreesWithTheOracle*seed2?:*Flash2*AgreesWithTheOracle*seed4??:*AnEarlierStepLeft:*RotatedShortCache*/4'
    # initcheck does not see all that cuBLAS's kernels write (their bulk stores), so that it reports
    # unfused's softmax falsely: it looks at append, begin, flash2 and the conversions alone.
    of_stores='*AppendLayout*:*AppendRope*:GpuTest.ATable*:GpuTest.Forks*:GpuTest.Chains*:GpuTest.ACapturedAppend*:GpuTest.Converts*:GpuTest.Converted*:GpuTest.Locates*:GpuTest.Gathers*:*GpuFlash2Rope*:*GpuFlash2.AgreesWithTheOracle*seed4??'
    for tool in memcheck racecheck synccheck initcheck; do
      tests="$filter"
      [[ $tool == initcheck ]] && tests="$of_stores"
      echo "compute-sanitizer $tool"
      compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 \
        "$here/bin/test_gpu" --gtest_brief=1 --gtest_filter="$tests" "$@"
    done
    ;;
  *)
    echo "run.sh: wanted test, bench or sanitize, got '$what'" >&2
    exit 2
    ;;
esac
