// SPDX-License-Identifier: Apache-2.0
// One instruction each: products of 16-bit matrices by a warp, loads of their fragments from shared
// memory, copies to shared memory that run behind the thread's back, and what else C++ has no word
// for. sm80 and up. No layout of any kernel is known here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace octavo::kernels::cuda {

/// A byte's address in the block's shared memory.
using SmemAddress = std::uint32_t;

__device__ inline SmemAddress smem_address(const void* pointer) {
  return static_cast<SmemAddress>(__cvta_generic_to_shared(pointer));
}

/// Copies 16 bytes; where `valid` is false reads nothing and writes zeros (`from` is then any
/// aligned address). Part of the thread's open group.
__device__ inline void copy_async(SmemAddress to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

/// The same, or nothing at all.
__device__ inline void copy_async_if(bool wanted, SmemAddress to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "@p cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(bytes), "r"(static_cast<int>(wanted))
      : "memory");
}

/// Closes the thread's open group, empty or not.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

/// Waits until at most kPending of the thread's groups, the newest, are on their way.
template <int kPending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

/// A barrier of `threads` threads of the block, whole warps; `id` is 1 to 15.
__device__ inline void sync_some(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

/// Four matrices of 8 x 8 elements of 16 bits. Lane l gives the address of row l % 8 (16 bytes) of
/// matrix l / 8, and gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix.
__device__ inline void load_matrices(std::uint32_t (&to)[4], SmemAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

/// The same, each matrix transposed: elements of column l / 4.
__device__ inline void load_matrices_transposed(std::uint32_t (&to)[4], SmemAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

/// sums [16 x 8] += a [16 x 16] * b [16 x 8]. With r = l / 4 and c = 2 (l % 4), lane l holds
/// a (r, c..), (r + 8, c..), (r, c + 8..), (r + 8, c + 8..), b (c.., r), (c + 8.., r),
/// sums (r, c), (r, c + 1), (r + 8, c), (r + 8, c + 1).
template <typename T>
__device__ void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                             std::uint32_t b1);
template <>
__device__ inline void multiply_add<__half>(float (&sums)[4], const std::uint32_t (&a)[4],
                                            std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&sums)[4], const std::uint32_t (&a)[4],
                                                   std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two elements in a register, `low` in the lower half.
template <typename T>
__device__ std::uint32_t pack_pair(float low, float high);
template <>
__device__ inline std::uint32_t pack_pair<__half>(float low, float high) {
  union {
    __half2 pair;
    std::uint32_t bits;
  } packed = {__floats2half2_rn(low, high)};
  return packed.bits;
}
template <>
__device__ inline std::uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  union {
    __nv_bfloat162 pair;
    std::uint32_t bits;
  } packed = {__floats2bfloat162_rn(low, high)};
  return packed.bits;
}

/// 2^x to within 2 units of the last place; of -infinity 0.
__device__ inline float fast_exp2(float x) {
  float y = 0.0F;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x to within 1 unit of the last place.
__device__ inline float fast_reciprocal(float x) {
  float y = 0.0F;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

/// Adds 1 to a counter that blocks share, and says what it was. What the thread's block wrote
/// before a barrier in front of this is there for blocks that count later, and what those wrote
/// that counted before is there for the block behind the next barrier.
__device__ inline std::uint32_t count_arrival(std::uint32_t* counter) {
  std::uint32_t before = 0;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

/// The sum of the values of a warp's lanes up to and with the own; by all of them.
__device__ inline std::int32_t sum_up_to_lane(std::int32_t value) {
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .b32 other;\n"
        "shfl.sync.up.b32 other|p, %0, %1, 0, 0xffffffff;\n"
        "@p add.s32 %0, %0, other;\n"
        "}\n"
        : "+r"(value)
        : "r"(apart));
  }
  return value;
}

}  // namespace octavo::kernels::cuda
