// SPDX-License-Identifier: Apache-2.0
// Cases as safetensors files: the tensors step{i}.q, .k, .v, .out, .lse, sinks, alibi_slopes, and
// a description as JSON text under the metadata key "octavo_case", version 1.
#pragma once

#include "testing/case.h"
#include "testing/safetensors.h"

#include <cstddef>
#include <filesystem>
#include <vector>

namespace octavo::testkit {

/// The case in a file, checked through and through: each field's type and range, that the steps
/// make sense, that each tensor has the dtype and shape that they imply. Fields that the
/// description doesn't know are left alone; another version is refused.
/// Errors: InputError.
Case case_from(const SafeTensors& file);

/// Reads the file at `path`. Errors: InputError.
Case read_case(const std::filesystem::path& path);

/// The bytes of a file that case_from turns into the same case.
std::vector<std::byte> write_case(const Case& value);

}  // namespace octavo::testkit
