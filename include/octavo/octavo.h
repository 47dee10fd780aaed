// SPDX-License-Identifier: Apache-2.0
// Everything that Octavo offers, in one include.
#pragma once

#include <octavo/attention.h>
#include <octavo/backend.h>
#include <octavo/cache.h>
#include <octavo/convert.h>
#include <octavo/dlpack.h>
#include <octavo/error.h>
#include <octavo/graphed_step.h>
#include <octavo/merge.h>
#include <octavo/plan.h>
#include <octavo/tensor.h>
#include <octavo/types.h>
#include <octavo/version.h>
#include <octavo/workspace.h>
