// SPDX-License-Identifier: Apache-2.0
// Marks what the shared library shows. Everything else is hidden.
#pragma once

#if defined(__GNUC__)
#define OCTAVO_EXPORT __attribute__((visibility("default")))
#else
#define OCTAVO_EXPORT
#endif
