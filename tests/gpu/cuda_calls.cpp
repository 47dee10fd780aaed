// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/cuda_calls.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>

namespace octavo::gpu_tests {
namespace {

std::atomic<int> memory_calls{0};
std::atomic<int> waiting_calls{0};
std::atomic<int> graph_launches{0};
std::atomic<int> event_calls{0};

}  // namespace

CudaCalls cuda_calls() { return {memory_calls, waiting_calls, graph_launches, event_calls}; }

}  // namespace octavo::gpu_tests

// The linker's names for the wrapper and for what it wraps.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
#define OCTAVO_COUNT(counter, name, parameters, arguments) \
  extern "C" cudaError_t __real_##name parameters;         \
  extern "C" cudaError_t __wrap_##name parameters {        \
    ++octavo::gpu_tests::counter;                          \
    return __real_##name arguments;                        \
  }

OCTAVO_COUNT(memory_calls, cudaMalloc, (void** memory, std::size_t bytes), (memory, bytes))
OCTAVO_COUNT(memory_calls, cudaMallocHost, (void** memory, std::size_t bytes), (memory, bytes))
OCTAVO_COUNT(memory_calls, cudaMallocManaged, (void** memory, std::size_t bytes, unsigned flags),
             (memory, bytes, flags))
OCTAVO_COUNT(memory_calls, cudaMallocAsync, (void** memory, std::size_t bytes, cudaStream_t stream),
             (memory, bytes, stream))
OCTAVO_COUNT(memory_calls, cudaHostAlloc, (void** memory, std::size_t bytes, unsigned flags),
             (memory, bytes, flags))
OCTAVO_COUNT(memory_calls, cudaFree, (void* memory), (memory))
OCTAVO_COUNT(memory_calls, cudaFreeHost, (void* memory), (memory))
OCTAVO_COUNT(memory_calls, cudaFreeAsync, (void* memory, cudaStream_t stream), (memory, stream))
OCTAVO_COUNT(waiting_calls, cudaDeviceSynchronize, (), ())
OCTAVO_COUNT(waiting_calls, cudaStreamSynchronize, (cudaStream_t stream), (stream))
OCTAVO_COUNT(waiting_calls, cudaEventSynchronize, (cudaEvent_t event), (event))
OCTAVO_COUNT(waiting_calls, cudaMemcpy,
             (void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind),
             (to, from, bytes, kind))
OCTAVO_COUNT(waiting_calls, cudaMemset, (void* memory, int value, std::size_t bytes),
             (memory, value, bytes))
OCTAVO_COUNT(graph_launches, cudaGraphLaunch, (cudaGraphExec_t graph, cudaStream_t stream),
             (graph, stream))
OCTAVO_COUNT(event_calls, cudaEventRecord, (cudaEvent_t event, cudaStream_t stream),
             (event, stream))
OCTAVO_COUNT(event_calls, cudaEventQuery, (cudaEvent_t event), (event))
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
