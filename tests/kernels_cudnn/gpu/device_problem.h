// SPDX-License-Identifier: Apache-2.0
// One attention over a poisoned cache in device memory, with its answer in float64 from plain
// loops. For the program that tests and times `fused` on a GPU; knows nothing of cuDNN.
#pragma once

#include <cuda_runtime_api.h>
#include <octavo/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/params.h"

namespace octavo::test {

/// Throws std::runtime_error with the call's name.
void cuda_check(cudaError_t error, const char* call);

class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t num_bytes);
  ~DeviceArray();
  DeviceArray(DeviceArray&& other) noexcept;
  DeviceArray& operator=(DeviceArray&& other) noexcept;

  template <typename T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }
  [[nodiscard]] std::size_t size() const { return num_bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t num_bytes_ = 0;
};

template <typename T>
void upload(const DeviceArray& to, const std::vector<T>& from) {
  cuda_check(cudaMemcpy(to.as<T>(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
             "upload");
  // A copy from pageable memory may still be under way, and other streams don't wait for it.
  cuda_check(cudaStreamSynchronize(nullptr), "upload");
}
template <typename T>
DeviceArray on_device(const std::vector<T>& from) {
  DeviceArray array(from.size() * sizeof(T) + 16);
  upload(array, from);
  return array;
}
template <typename T>
std::vector<T> download(const DeviceArray& from, std::size_t count) {
  std::vector<T> to(count);
  cuda_check(cudaMemcpy(to.data(), from.as<T>(), count * sizeof(T), cudaMemcpyDeviceToHost),
             "download");
  return to;
}

struct SeqLens {
  std::int32_t q = 0;
  std::int32_t kv = 0;  ///< New tokens included.
};

struct Spec {
  DType dtype = DType::BF16;
  TensorFormat format = TensorFormat::Thd;
  std::int32_t page_size = 16;
  bool contiguous = false;  ///< One page of page_size slots a row, no table.
  bool shuffled_rows = true;
  bool head_major = false;        ///< Pages are [heads, slots, dim].
  bool keys_and_values = false;   ///< A page of K and its page of V lie side by side.
  std::int64_t unused_pages = 0;  ///< In front of the others, in device memory alone.
  std::int32_t head_dim = 128;
  std::int32_t head_dim_v = 128;
  std::int32_t num_q_heads = 8;
  std::int32_t num_kv_heads = 2;
  bool causal = true;
  std::int32_t window_left = -1;
  std::int32_t window_right = -1;
  std::vector<SeqLens> lens;
  bool lse = true;
  std::int32_t padding_rows = 5;  ///< Rows of out and LSE behind the step's tokens.
  std::int32_t first_poison = 0;  ///< Slots behind a sequence's end that hold finite garbage.
  bool poison_k = true;
  bool poison_v = true;
  std::uint32_t seed = 1;

  [[nodiscard]] std::string name() const;
};

/// What was wrong with a result; errors as shares of what is allowed.
struct Verdict {
  double out_error = 0;
  double lse_error = 0;
  std::int64_t nan_outputs = 0;
  std::int64_t bad_padding = 0;  ///< Padding and keyless rows that aren't 0 and -inf.
  std::int64_t changed_guard = 0;
  std::int64_t changed_bits = 0;  ///< Between two runs.
  std::size_t first_changed = 0;

  [[nodiscard]] bool ok() const {
    return out_error <= 1 && lse_error <= 1 && nan_outputs == 0 && bad_padding == 0 &&
           changed_guard == 0 && changed_bits == 0;
  }
};

class DeviceProblem {
 public:
  explicit DeviceProblem(const Spec& spec);

  [[nodiscard]] const kernels::AttendParams& params() const { return params_; }
  [[nodiscard]] std::int32_t max_q_len() const { return max_q_len_; }
  [[nodiscard]] std::int32_t max_kv_len() const { return max_kv_len_; }

  /// Fills out and LSE with a canary.
  void reset_results();
  [[nodiscard]] Verdict judge() const;
  [[nodiscard]] std::vector<std::uint16_t> out_bits() const;

  /// Other lengths for the same sequences, as a captured graph meets them: never longer.
  void shrink(const std::vector<SeqLens>& lens);

 private:
  void make_cache();
  void upload_cache();
  void make_step(const std::vector<SeqLens>& lens);
  void make_tokens();
  [[nodiscard]] float from_bits(std::uint16_t bits) const;
  [[nodiscard]] std::uint16_t to_bits(float value) const;
  [[nodiscard]] std::int64_t token_row(std::size_t b, std::int32_t i) const;
  [[nodiscard]] std::int64_t slot_offset(const kernels::PagedTensor& tensor, std::size_t b,
                                         std::int32_t position) const;
  void judge_token(std::size_t b, std::int32_t i, const std::vector<std::uint16_t>& out,
                   const std::vector<float>& lse, Verdict& verdict) const;

  Spec spec_;
  std::vector<SeqLens> lens_;
  std::int32_t max_q_len_ = 0;
  std::int32_t max_kv_len_ = 0;
  std::int32_t pages_per_seq_ = 0;
  std::int64_t num_token_rows_ = 0;
  std::vector<std::int32_t> table_, rows_, token_offsets_;
  std::vector<std::uint16_t> cache_, q_;
  std::int64_t v_offset_ = 0;
  DeviceArray cache_array_, q_array_, out_array_, lse_array_;
  DeviceArray table_array_, rows_array_, offsets_array_, kv_lens_array_;
  kernels::AttendParams params_;
};

}  // namespace octavo::test
