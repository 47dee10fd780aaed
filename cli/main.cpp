// SPDX-License-Identifier: Apache-2.0
// The tool octavo. Everything is in the library beside this file, so that tests reach it.
#include "cli/commands.h"

int main(int argc, char** argv) { return octavo::cli::run(argc, argv); }
