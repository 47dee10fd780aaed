// SPDX-License-Identifier: Apache-2.0
// One run of the program, from the options to the answers.
#pragma once

#include "examples/generate/options.h"

namespace generate {

/// Loads the model, answers the prompts, prints what the options ask for. Errors: octavo::Error.
void run_session(const Options& options);

}  // namespace generate
