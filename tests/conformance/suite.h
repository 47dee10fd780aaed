// SPDX-License-Identifier: Apache-2.0
// What the whole suite runs over: the backends of this machine, the cases, and ways to make one
// case from another. A backend is done when every test with its name in it passes.
#pragma once

#include "testing/case.h"
#include "testing/replay.h"
#include "testing/spec.h"

#include <octavo/types.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace octavo::conformance {

using testkit::Case;
using testkit::ReplayOptions;
using testkit::ReplayResult;

/// The backends that are usable here.
std::vector<Backend> usable_backends();

/// One line for each case, in the words of testing/spec.h.
const std::vector<std::string>& suite();

/// `text` as GoogleTest takes a name: letters, digits and underscores.
std::string test_name(std::string_view text);

/// Names of parametrised tests.
std::string backend_name(const ::testing::TestParamInfo<Backend>& tested);
std::string line_name(const ::testing::TestParamInfo<std::tuple<Backend, std::string>>& tested);

/// Replays and expects it to pass.
void expect_pass(const Case& value, const ReplayOptions& options);

/// Replays twice, keeping outputs, and expects the same bits.
void expect_same_bits(const Case& value, const ReplayOptions& a, const ReplayOptions& b);

/// The batch rows `order` of every step, in that order, as a case of its own. For cases whose steps
/// all list the same sequences in the same order.
Case select_rows(const Case& value, const std::vector<std::size_t>& order);

/// A case of one step, brought in chunks of `chunk` tokens instead. Causal cases only.
Case in_chunks(const Case& value, std::int64_t chunk);

/// The rows of one sequence in a step's output, as doubles.
std::vector<double> rows_of(const Case& value, std::size_t step_idx, std::size_t seq_idx,
                            const testkit::HostTensor& out);

}  // namespace octavo::conformance
