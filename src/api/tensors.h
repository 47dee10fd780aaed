// SPDX-License-Identifier: Apache-2.0
// Checks the caller's tensors against what a step implies, and turns them into the kernels'
// layouts.
#pragma once

#include <octavo/attention.h>
#include <octavo/tensor.h>

#include <cstdint>

#include "kernels/params.h"

namespace octavo::api {

/// What the tensors of a step must hold.
struct StepShape {
  TensorFormat format = TensorFormat::Thd;
  std::int32_t num_seqs = 0;
  std::int32_t num_tokens = 0;
  std::int32_t max_new_tokens = 0;
  Device device = {};           ///< Where they must be.
  std::int32_t max_kv_len = 0;  ///< Keys of the longest sequence.
  bool bounded = false;         ///< All of these are maxima; the host knows no lengths.
};

/// Checks device, dtype, rank and shape of q, k, v or out, and that data is there where elements
/// are. Throws InvalidArgument naming `name`. `writable` tensors must not map two elements to one
/// place.
kernels::TokenLayout token_layout(const char* name, const ConstTensorView& tensor,
                                  const StepShape& step, std::int32_t num_heads, std::int32_t dim,
                                  bool writable);

/// Checks an LSE tensor and writes its fields of `params`; null is none.
void set_lse(const TensorView* lse, Device device, kernels::AttendParams& params);

/// Checks a tensor's device, dtypes, rank and data. `name` is for messages.
void check_tensor(const char* name, const ConstTensorView& tensor, std::int32_t rank,
                  Device device = {});
/// Checks that `count` elements are where kernels of `device` want them. Those of an empty array
/// may be said to lie anywhere. `member` follows the name in messages.
void check_pointer(const char* name, const void* pointer, std::int64_t count, Device device,
                   const char* member = "");
void check_extent(const char* name, const ConstTensorView& tensor, std::int32_t axis,
                  std::int64_t wanted);
void check_writable(const char* name, const ConstTensorView& tensor);

/// Whether both name the same elements in the same order. Of checked tensors, like check_apart.
bool same_view(const ConstTensorView& a, const ConstTensorView& b);
/// Throws InvalidArgument where the two share an element, or look as if they did: rows of equal
/// pitch may lie between each other, other interleavings are refused.
void check_apart(const char* name, const ConstTensorView& tensor, const char* other_name,
                 const ConstTensorView& other);

/// Checks RoPE and its positions against a step, whose lengths are on the host unless it is
/// bounded. Positions of the caller's in a GPU's memory are not read.
kernels::RopeParams rope_params(const LayerInputs& inputs, std::int32_t head_dim,
                                const kernels::StepBatch& host, const StepShape& shape);

}  // namespace octavo::api
