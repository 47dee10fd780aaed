// SPDX-License-Identifier: Apache-2.0
// Which state of the sources was built; its .cpp is written into the build folder.
#pragma once

namespace octavo::bench {

extern const char* const
    kCommit;  ///< Short hash, "+" behind it when files were changed; or "unknown".

}  // namespace octavo::bench
