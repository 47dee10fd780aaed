// SPDX-License-Identifier: Apache-2.0
// The loops are compiled for every instruction set that Highway knows and the best one is chosen at
// run time, as the CPU kernels do it: a bound of a lesser instruction set would flatter them.
#include "bench/roofline.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/roofline.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace octavo::bench {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Reads all of it; the sum keeps the compiler from leaving anything out.
float read_all(const float* HWY_RESTRICT data, std::int64_t count) {
  const hn::ScalableTag<float> tag;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(tag));
  auto sum0 = hn::Zero(tag);
  auto sum1 = hn::Zero(tag);
  auto sum2 = hn::Zero(tag);
  auto sum3 = hn::Zero(tag);
  for (std::int64_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    sum0 = hn::Add(sum0, hn::LoadU(tag, data + i));
    sum1 = hn::Add(sum1, hn::LoadU(tag, data + i + lanes));
    sum2 = hn::Add(sum2, hn::LoadU(tag, data + i + 2 * lanes));
    sum3 = hn::Add(sum3, hn::LoadU(tag, data + i + 3 * lanes));
  }
  return hn::GetLane(hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3)));
}

// Twelve independent chains hide the latency of two units with four or five cycles each.
// Returns the floating-point operations done; `sink` [12] starts the chains and keeps them alive.
double multiply_add(std::int64_t rounds, float* sink) {
  const hn::ScalableTag<float> tag;
  const auto factor = hn::Set(tag, 0.999F);
  const auto term = hn::Set(tag, 1e-3F);
  // Twelve starts that the compiler can't know: chains that it finds equal it computes once.
  const auto start = [&](int chain) { return hn::Set(tag, sink[chain]); };
  auto a0 = start(0), a1 = start(1), a2 = start(2), a3 = start(3), a4 = start(4), a5 = start(5);
  auto b0 = start(6), b1 = start(7), b2 = start(8), b3 = start(9), b4 = start(10), b5 = start(11);
  for (std::int64_t round = 0; round < rounds; ++round) {
    a0 = hn::MulAdd(a0, factor, term);
    a1 = hn::MulAdd(a1, factor, term);
    a2 = hn::MulAdd(a2, factor, term);
    a3 = hn::MulAdd(a3, factor, term);
    a4 = hn::MulAdd(a4, factor, term);
    a5 = hn::MulAdd(a5, factor, term);
    b0 = hn::MulAdd(b0, factor, term);
    b1 = hn::MulAdd(b1, factor, term);
    b2 = hn::MulAdd(b2, factor, term);
    b3 = hn::MulAdd(b3, factor, term);
    b4 = hn::MulAdd(b4, factor, term);
    b5 = hn::MulAdd(b5, factor, term);
  }
  const auto a = hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(a4, a5));
  const auto b = hn::Add(hn::Add(hn::Add(b0, b1), hn::Add(b2, b3)), hn::Add(b4, b5));
  *sink = hn::GetLane(hn::Add(a, b));
  return 2.0 * 12.0 * static_cast<double>(rounds) * static_cast<double>(hn::Lanes(tag));
}

#if HWY_TARGET == HWY_AVX3
// The same by the processor's BF16 products, two multiply-adds a lane. Highway 1.0.3 has no target
// with these instructions.
__attribute__((target(HWY_TARGET_STR ",avx512bf16"))) double multiply_pairs(std::int64_t rounds,
                                                                            float* sink) {
  constexpr int kChains = 12;
  __m512 sums[kChains];
  for (int chain = 0; chain < kChains; ++chain) sums[chain] = _mm512_set1_ps(sink[chain]);
  const auto pairs = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3A83));  // 0.001
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, pairs, pairs);
  }
  for (int chain = 1; chain < kChains; ++chain) sums[0] = _mm512_add_ps(sums[0], sums[chain]);
  *sink = _mm512_cvtss_f32(sums[0]);
  return 2.0 * kChains * static_cast<double>(rounds) * 32.0;
}
#endif

// By BF16 products where the processor has them, else as above.
double multiply_add_bf16(std::int64_t rounds, float* sink) {
#if HWY_TARGET == HWY_AVX3
  if (__builtin_cpu_supports("avx512bf16") != 0) return multiply_pairs(rounds, sink);
#endif
  return multiply_add(rounds, sink);
}

}  // namespace HWY_NAMESPACE
}  // namespace octavo::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

namespace octavo::bench {

namespace {

HWY_EXPORT(read_all);
HWY_EXPORT(multiply_add);
HWY_EXPORT(multiply_add_bf16);

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Free {
  void operator()(float* block) const { std::free(block); }
};
using Block = std::unique_ptr<float[], Free>;

// In huge pages where the system grants them, as the caches have it: with small ones the walk over
// page tables would be the bound.
Block block_of(std::int64_t count) {
  constexpr std::size_t kHugePage = std::size_t{1} << 21U;
  const std::size_t bytes =
      (static_cast<std::size_t>(count) * sizeof(float) / kHugePage + 1) * kHugePage;
  Block block(static_cast<float*>(std::aligned_alloc(kHugePage, bytes)));
  if (block == nullptr) throw std::bad_alloc();
  static_cast<void>(madvise(block.get(), bytes, MADV_HUGEPAGE));  // a wish
  return block;
}

}  // namespace

double peak_flops_per_s(std::int32_t num_threads, DType dtype) {
  constexpr std::int64_t kRounds = 5'000'000;
  const int threads = num_threads > 0 ? num_threads : omp_get_max_threads();
  double best = 0.0;
#pragma omp parallel num_threads(threads)
  {
    float sink[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    for (int reading = 0; reading < 8; ++reading) {
#pragma omp barrier
      const Clock::time_point start = Clock::now();
      const double flops = dtype == DType::BF16
                               ? HWY_DYNAMIC_DISPATCH(multiply_add_bf16)(kRounds, sink)
                               : HWY_DYNAMIC_DISPATCH(multiply_add)(kRounds, sink);
#pragma omp barrier
      const double seconds = seconds_since(start);
#pragma omp critical
      best = std::max(best, flops * threads / seconds);
    }
  }
  return best;
}

struct DramReader::Parts {
  std::vector<Block> blocks;  // one for each thread
  std::int64_t count = 0;     // floats in each
};

DramReader::DramReader(std::int32_t num_threads, std::int64_t cache_bytes)
    : num_threads_(num_threads > 0 ? num_threads : omp_get_max_threads()),
      parts_(std::make_unique<Parts>()) {
  const std::int64_t bytes = std::max(4 * cache_bytes, std::int64_t{256} << 20);
  parts_->count = bytes / num_threads_ / static_cast<std::int64_t>(sizeof(float));
  for (int thread = 0; thread < num_threads_; ++thread) {
    parts_->blocks.push_back(block_of(parts_->count));
  }
#pragma omp parallel num_threads(num_threads_)
  {
    // Filled by the thread that reads it: on machines of several memories, in its own.
    const auto self = static_cast<std::size_t>(omp_get_thread_num());
    std::fill_n(parts_->blocks[self].get(), parts_->count, 1.0F);
  }
}

DramReader::~DramReader() = default;

double DramReader::bytes_per_s(double seconds) const {
  const double bytes = static_cast<double>(parts_->count) * sizeof(float) * num_threads_;
  std::vector<float> sums(static_cast<std::size_t>(num_threads_));
  double fastest = std::numeric_limits<double>::infinity();
  const Clock::time_point start = Clock::now();
  do {
    const Clock::time_point start_of_reading = Clock::now();
#pragma omp parallel num_threads(num_threads_)
    {
      const auto self = static_cast<std::size_t>(omp_get_thread_num());
      sums[self] = HWY_DYNAMIC_DISPATCH(read_all)(parts_->blocks[self].get(), parts_->count);
    }
    fastest = std::min(fastest, seconds_since(start_of_reading));
  } while (seconds_since(start) < seconds);
  return bytes / fastest;
}

}  // namespace octavo::bench

#endif  // HWY_ONCE
