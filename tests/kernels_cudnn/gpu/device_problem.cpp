// SPDX-License-Identifier: Apache-2.0
#include "kernels_cudnn/gpu/device_problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>

#include "base/convert.h"

namespace octavo::test {
namespace {

constexpr std::uint16_t kNan = 0x7FFF;  // in both 16-bit formats
constexpr std::uint16_t kCanary = 0x4242;
constexpr float kLseCanary = 1234.5F;
constexpr std::int64_t kGuard = 256;
constexpr std::int32_t kBadPage = 0x7FFFFFF0;

}  // namespace

void cuda_check(cudaError_t error, const char* call) {
  if (error != cudaSuccess)
    throw std::runtime_error(fmt::format("{}: {}", call, cudaGetErrorString(error)));
}

DeviceArray::DeviceArray(std::size_t num_bytes) : num_bytes_(num_bytes) {
  cuda_check(cudaMalloc(&data_, std::max<std::size_t>(num_bytes, 16)), "cudaMalloc");
}
DeviceArray::~DeviceArray() { cudaFree(data_); }
DeviceArray::DeviceArray(DeviceArray&& other) noexcept { *this = std::move(other); }
DeviceArray& DeviceArray::operator=(DeviceArray&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

std::string Spec::name() const {
  std::string mask = causal ? "causal" : "full";
  if (window_left >= 0 || window_right >= 0)
    mask += fmt::format(" window {} {}", window_left, window_right);
  std::string sizes;
  for (const SeqLens& seq : lens) sizes += fmt::format(" {}:{}", seq.q, seq.kv);
  std::string kind = contiguous ? "contiguous" : "page";
  kind += std::to_string(page_size);
  if (contiguous && shuffled_rows) kind += " rows";
  if (head_major) kind += " head-major";
  if (keys_and_values) kind += " interleaved";
  if (unused_pages > 0) kind += fmt::format(" behind {} pages", unused_pages);
  return fmt::format("{} {} {} h{}/{} d{}/{} {} lens{}{}", to_string(dtype), to_string(format),
                     kind, num_q_heads, num_kv_heads, head_dim, head_dim_v, mask, sizes,
                     lse ? " lse" : "");
}

DeviceProblem::DeviceProblem(const Spec& spec) : spec_(spec) {
  for (const SeqLens& seq : spec.lens) {
    max_q_len_ = std::max(max_q_len_, seq.q);
    max_kv_len_ = std::max(max_kv_len_, seq.kv);
  }
  params_.scale = 1.0F / std::sqrt(static_cast<float>(spec.head_dim));
  params_.causal = spec.causal;
  params_.window_left = spec.window_left;
  params_.window_right = spec.window_right;
  params_.num_q_heads = spec.num_q_heads;
  params_.num_kv_heads = spec.num_kv_heads;
  params_.head_dim = spec.head_dim;
  params_.head_dim_v = spec.head_dim_v;
  params_.q_dtype = params_.out_dtype = params_.kv.dtype = spec.dtype;
  lens_ = spec.lens;
  make_cache();
  offsets_array_ = DeviceArray((lens_.size() + 1) * 4);
  kv_lens_array_ = DeviceArray(lens_.size() * 4 + 4);
  make_step(lens_);
  make_tokens();
}

float DeviceProblem::from_bits(std::uint16_t bits) const {
  return spec_.dtype == DType::F16 ? base::f16_to_float(bits) : base::bf16_to_float(bits);
}
std::uint16_t DeviceProblem::to_bits(float value) const {
  return spec_.dtype == DType::F16 ? base::float_to_f16(value) : base::float_to_bf16(value);
}

void DeviceProblem::make_cache() {
  std::mt19937 random(spec_.seed);
  const auto num_seqs = static_cast<std::int32_t>(lens_.size());
  const std::int32_t p = spec_.page_size;
  pages_per_seq_ = spec_.contiguous ? 1 : (max_kv_len_ + p - 1) / p + 2;
  const std::int32_t num_rows = num_seqs + 2;
  const std::int64_t num_pages = spec_.contiguous ? num_rows : num_rows * pages_per_seq_;

  auto& kv = params_.kv;
  const auto shape = [&](kernels::PagedTensor& tensor, std::int32_t dim) {
    tensor.head_stride = spec_.head_major ? std::int64_t{p} * dim : dim;
    tensor.slot_stride = spec_.head_major ? dim : std::int64_t{spec_.num_kv_heads} * dim;
    tensor.page_stride = std::int64_t{p} * spec_.num_kv_heads * dim;
  };
  shape(kv.k, spec_.head_dim);
  shape(kv.v, spec_.head_dim_v);
  std::int64_t num_elements = num_pages * (kv.k.page_stride + kv.v.page_stride);
  v_offset_ = num_pages * kv.k.page_stride;
  if (spec_.keys_and_values) {
    v_offset_ = kv.k.page_stride;
    kv.k.page_stride = kv.v.page_stride = kv.k.page_stride + kv.v.page_stride;
  }
  kv.num_pages = num_pages + spec_.unused_pages;
  kv.page_size = p;

  std::vector<std::int32_t> order(static_cast<std::size_t>(num_pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  rows_.resize(lens_.size());
  std::iota(rows_.begin(), rows_.end(), 0);
  if (spec_.shuffled_rows) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(num_rows));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    std::copy_n(all.begin(), lens_.size(), rows_.begin());
  }
  table_.assign(static_cast<std::size_t>(num_rows * pages_per_seq_), kBadPage);
  std::size_t next = 0;
  for (std::size_t b = 0; b < lens_.size(); ++b) {
    for (std::int32_t j = 0; j * p < lens_[b].kv; ++j)
      table_[static_cast<std::size_t>(rows_[b] * pages_per_seq_ + j)] =
          order[next++] + static_cast<std::int32_t>(spec_.unused_pages);
  }

  cache_.assign(static_cast<std::size_t>(num_elements), kNan);
  std::normal_distribution<float> normal;
  for (std::size_t b = 0; b < lens_.size(); ++b) {
    // Poison that starts later leaves finite garbage behind the end.
    for (std::int32_t pos = 0; pos < lens_[b].kv + 2 * p + 512; ++pos) {
      if (lens_[b].kv == 0 || pos / p > (lens_[b].kv - 1) / p) break;
      const auto fill = [&](const kernels::PagedTensor& tensor, std::int64_t base, std::int32_t dim,
                            bool poisoned) {
        const std::int32_t finite = lens_[b].kv + (poisoned ? spec_.first_poison : 1 << 30);
        if (pos >= finite && pos >= lens_[b].kv) return;
        for (std::int32_t h = 0; h < spec_.num_kv_heads; ++h) {
          for (std::int32_t c = 0; c < dim; ++c) {
            const std::int64_t at = base + slot_offset(tensor, b, pos) + h * tensor.head_stride + c;
            cache_[static_cast<std::size_t>(at)] = to_bits(normal(random));
          }
        }
      };
      fill(kv.k, 0, spec_.head_dim, spec_.poison_k);
      fill(kv.v, v_offset_, spec_.head_dim_v, spec_.poison_v);
    }
  }
  const std::int64_t unused = spec_.unused_pages * kv.k.page_stride;
  cache_array_ = DeviceArray(static_cast<std::size_t>(unused + num_elements) * 2);
  upload_cache();
  kv.k.data = cache_array_.as<std::uint16_t>();
  kv.v.data = cache_array_.as<std::uint16_t>() + v_offset_;
  table_array_ = on_device(table_);
  rows_array_ = on_device(rows_);
  params_.batch.page_table = spec_.contiguous ? nullptr : table_array_.as<std::int32_t>();
  params_.batch.page_table_stride = pages_per_seq_;
  params_.batch.rows = spec_.shuffled_rows ? rows_array_.as<std::int32_t>() : nullptr;
}

void DeviceProblem::upload_cache() {
  const std::int64_t unused = spec_.unused_pages * params_.kv.k.page_stride;
  cuda_check(cudaMemcpy(cache_array_.as<std::uint16_t>() + unused, cache_.data(), cache_.size() * 2,
                        cudaMemcpyHostToDevice),
             "upload of the cache");
  cuda_check(cudaStreamSynchronize(nullptr), "upload of the cache");
}

std::int64_t DeviceProblem::slot_offset(const kernels::PagedTensor& tensor, std::size_t b,
                                        std::int32_t position) const {
  const std::int32_t p = spec_.page_size;
  const std::int64_t page =
      spec_.contiguous ? rows_[b]
                       : table_[static_cast<std::size_t>(rows_[b] * pages_per_seq_ + position / p)];
  return (page - spec_.unused_pages) * tensor.page_stride + position % p * tensor.slot_stride;
}

void DeviceProblem::make_step(const std::vector<SeqLens>& lens) {
  token_offsets_.assign(1, 0);
  std::vector<std::int32_t> kv_lens;
  for (const SeqLens& seq : lens) {
    token_offsets_.push_back(token_offsets_.back() + seq.q);
    kv_lens.push_back(seq.kv);
  }
  upload(offsets_array_, token_offsets_);
  upload(kv_lens_array_, kv_lens);
  auto& batch = params_.batch;
  batch.num_seqs = static_cast<std::int32_t>(lens.size());
  batch.token_offsets = offsets_array_.as<std::int32_t>();
  batch.kv_lens = kv_lens_array_.as<std::int32_t>();
}

void DeviceProblem::shrink(const std::vector<SeqLens>& lens) {
  lens_ = lens;
  make_step(lens);
  upload_cache();  // what an earlier step cleared behind its ends
  std::fill(q_.begin(), q_.end(), kNan);
  make_tokens();
}

std::int64_t DeviceProblem::token_row(std::size_t b, std::int32_t i) const {
  const auto num_seqs = static_cast<std::int64_t>(spec_.lens.size());
  switch (spec_.format) {
    case TensorFormat::Thd:
      return token_offsets_[b] + i;
    case TensorFormat::Bshd:
      return static_cast<std::int64_t>(b) * max_q_len_ + i;
    case TensorFormat::Sbhd:
      return i * num_seqs + static_cast<std::int64_t>(b);
  }
  return 0;
}

void DeviceProblem::make_tokens() {
  const bool first = q_.empty();
  const auto num_seqs = static_cast<std::int64_t>(spec_.lens.size());
  std::mt19937 random(spec_.seed + 77);
  std::normal_distribution<float> normal;
  if (first) {
    params_.batch.num_tokens = token_offsets_.back();
    num_token_rows_ = spec_.format == TensorFormat::Thd ? token_offsets_.back() + spec_.padding_rows
                                                        : num_seqs * max_q_len_;
    q_.assign(static_cast<std::size_t>(num_token_rows_ * spec_.num_q_heads * spec_.head_dim), kNan);
  }
  const std::int64_t q_row = std::int64_t{spec_.num_q_heads} * spec_.head_dim;
  for (std::size_t b = 0; b < lens_.size(); ++b) {
    for (std::int32_t i = 0; i < lens_[b].q; ++i) {
      const std::int64_t at = token_row(b, i) * q_row;
      for (std::int64_t c = 0; c < q_row; ++c)
        q_[static_cast<std::size_t>(at + c)] = to_bits(normal(random));
    }
  }
  if (!first) {
    upload(q_array_, q_);
    return;
  }
  q_array_ = on_device(q_);
  const auto layout = [&](std::int32_t dim) {
    const std::int64_t row = std::int64_t{spec_.num_q_heads} * dim;
    kernels::TokenLayout tokens;
    tokens.ragged = spec_.format == TensorFormat::Thd;
    tokens.head_stride = dim;
    tokens.token_stride = spec_.format == TensorFormat::Sbhd ? num_seqs * row : row;
    tokens.batch_stride = spec_.format == TensorFormat::Sbhd ? row : max_q_len_ * row;
    tokens.num_batch_rows = static_cast<std::int32_t>(num_seqs);
    tokens.num_token_rows = tokens.ragged ? num_token_rows_ : max_q_len_;
    return tokens;
  };
  params_.q_layout = layout(spec_.head_dim);
  params_.out_layout = layout(spec_.head_dim_v);
  params_.q = q_array_.as<std::uint16_t>();
  const auto out_elements = num_token_rows_ * spec_.num_q_heads * spec_.head_dim_v;
  out_array_ = DeviceArray(static_cast<std::size_t>(out_elements + 2 * kGuard) * 2);
  params_.out = out_array_.as<std::uint16_t>() + kGuard;
  params_.num_lse_rows = token_offsets_.back() + spec_.padding_rows;
  lse_array_ = DeviceArray(
      static_cast<std::size_t>(params_.num_lse_rows * spec_.num_q_heads + 2 * kGuard) * 4);
  if (spec_.lse) params_.lse = lse_array_.as<float>() + kGuard;
  params_.lse_token_stride = spec_.num_q_heads;
}

void DeviceProblem::reset_results() {
  upload(out_array_, std::vector<std::uint16_t>(out_array_.size() / 2, kCanary));
  upload(lse_array_, std::vector<float>(lse_array_.size() / 4, kLseCanary));
}

std::vector<std::uint16_t> DeviceProblem::out_bits() const {
  return download<std::uint16_t>(out_array_, out_array_.size() / 2);
}

void DeviceProblem::judge_token(std::size_t b, std::int32_t i,
                                const std::vector<std::uint16_t>& out,
                                const std::vector<float>& lse, Verdict& verdict) const {
  const std::int32_t kv_len = lens_[b].kv;
  const auto range = kernels::visible_keys(spec_.causal, spec_.window_left, spec_.window_right,
                                           kv_len - lens_[b].q + i, kv_len);
  const std::int32_t group = spec_.num_q_heads / spec_.num_kv_heads;
  // Rounding of probabilities and of the output, with a factor of 2.
  const double eps = spec_.dtype == DType::F16 ? 0x1p-10 : 0x1p-7;
  std::vector<double> weights;
  for (std::int32_t h = 0; h < spec_.num_q_heads; ++h) {
    const std::int64_t q_at = (token_row(b, i) * spec_.num_q_heads + h) * spec_.head_dim;
    weights.clear();
    double largest = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = range.begin; j < range.end; ++j) {
      const std::int64_t k_at = slot_offset(params_.kv.k, b, static_cast<std::int32_t>(j)) +
                                h / group * params_.kv.k.head_stride;
      double score = 0;
      for (std::int32_t c = 0; c < spec_.head_dim; ++c)
        score += static_cast<double>(from_bits(q_[static_cast<std::size_t>(q_at + c)])) *
                 static_cast<double>(from_bits(cache_[static_cast<std::size_t>(k_at + c)]));
      weights.push_back(score * static_cast<double>(params_.scale));
      largest = std::max(largest, weights.back());
    }
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp(weight - largest);
    const std::int64_t out_at =
        kGuard + (token_row(b, i) * spec_.num_q_heads + h) * spec_.head_dim_v;
    std::vector<double> want(static_cast<std::size_t>(spec_.head_dim_v));
    std::vector<double> spread(want.size());
    for (std::int64_t j = range.begin; j < range.end; ++j) {
      const std::int64_t v_at = v_offset_ +
                                slot_offset(params_.kv.v, b, static_cast<std::int32_t>(j)) +
                                h / group * params_.kv.v.head_stride;
      const double weight = weights[static_cast<std::size_t>(j - range.begin)] / sum;
      for (std::size_t c = 0; c < want.size(); ++c) {
        const auto value =
            static_cast<double>(from_bits(cache_[static_cast<std::size_t>(v_at) + c]));
        want[c] += weight * value;
        spread[c] += weight * std::abs(value);
      }
    }
    for (std::size_t c = 0; c < want.size(); ++c) {
      const std::uint16_t bits = out[static_cast<std::size_t>(out_at) + c];
      const auto got = static_cast<double>(from_bits(bits));
      if (weights.empty()) {
        verdict.bad_padding += bits != 0 ? 1 : 0;
      } else if (!std::isfinite(got)) {
        ++verdict.nan_outputs;
      } else {
        const double allowed = eps * (spread[c] + std::abs(want[c])) / 2 + 1e-6;
        verdict.out_error = std::max(verdict.out_error, std::abs(got - want[c]) / allowed);
      }
    }
    if (!spec_.lse) continue;
    const float got = lse[static_cast<std::size_t>(
        kGuard + (token_offsets_[b] + i) * std::int64_t{spec_.num_q_heads} + h)];
    if (weights.empty()) {
      verdict.bad_padding += got != -std::numeric_limits<float>::infinity() ? 1 : 0;
    } else {
      const double wanted = largest + std::log(sum);
      const double error =
          std::abs(static_cast<double>(got) - wanted) / (1e-4 * std::max(1.0, std::abs(wanted)));
      verdict.lse_error = std::max(verdict.lse_error, std::isnan(error) ? 1e9 : error);
    }
  }
}

Verdict DeviceProblem::judge() const {
  const std::vector<std::uint16_t> out = out_bits();
  const auto lse = download<float>(lse_array_, lse_array_.size() / 4);
  Verdict verdict;
  const std::int64_t out_row = std::int64_t{spec_.num_q_heads} * spec_.head_dim_v;
  std::vector<bool> real(static_cast<std::size_t>(num_token_rows_));
  for (std::size_t b = 0; b < lens_.size(); ++b) {
    for (std::int32_t i = 0; i < lens_[b].q; ++i) {
      real[static_cast<std::size_t>(token_row(b, i))] = true;
      judge_token(b, i, out, lse, verdict);
    }
  }
  for (std::int64_t row = 0; row < num_token_rows_; ++row) {
    if (real[static_cast<std::size_t>(row)]) continue;
    for (std::int64_t c = 0; c < out_row; ++c)
      verdict.bad_padding += out[static_cast<std::size_t>(kGuard + row * out_row + c)] != 0 ? 1 : 0;
  }
  for (std::int64_t at = std::int64_t{token_offsets_.back()} * spec_.num_q_heads;
       spec_.lse && at < params_.num_lse_rows * spec_.num_q_heads; ++at) {
    verdict.bad_padding +=
        lse[static_cast<std::size_t>(kGuard + at)] != -std::numeric_limits<float>::infinity() ? 1
                                                                                              : 0;
  }
  for (std::size_t at = 0; at < kGuard; ++at) {
    verdict.changed_guard += out[at] != kCanary || out[out.size() - 1 - at] != kCanary ? 1 : 0;
    verdict.changed_guard +=
        lse[at] != kLseCanary || lse[lse.size() - 1 - at] != kLseCanary ? 1 : 0;
  }
  return verdict;
}

}  // namespace octavo::test
