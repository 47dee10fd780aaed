// SPDX-License-Identifier: Apache-2.0
// Asks the driver about a pointer without starting CUDA: where the process has not loaded the
// driver, no memory is a GPU's, and work on the CPU alone must not make a context.
#include <cuda.h>
#include <dlfcn.h>
#include <link.h>

#include <array>
#include <atomic>

#include "device/gpu.h"

namespace octavo::device {
namespace {

using AskDriver = decltype(&cuPointerGetAttributes);

/// How many libraries the process has ever loaded.
unsigned long long libraries_loaded() {
  unsigned long long count = 0;
  const auto read = [](dl_phdr_info* info, std::size_t /*size*/, void* to) {
    *static_cast<unsigned long long*>(to) = info->dlpi_adds;
    return 1;  // the first knows it already
  };
  dl_iterate_phdr(read, &count);
  return count;
}

/// Null as long as the driver is not loaded. Looked for again only when something was loaded.
AskDriver loaded_driver() {
  static std::atomic<AskDriver> known{nullptr};
  static std::atomic<unsigned long long> looked_at{0};
  AskDriver ask = known.load(std::memory_order_acquire);
  if (ask != nullptr) return ask;
  const unsigned long long count = libraries_loaded();
  if (count == looked_at.load(std::memory_order_relaxed)) return nullptr;
  // Stays open: the driver is never unloaded.
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver != nullptr) {
    ask = reinterpret_cast<AskDriver>(dlsym(driver, "cuPointerGetAttributes"));
    known.store(ask, std::memory_order_release);
  }
  looked_at.store(count, std::memory_order_relaxed);
  return ask;
}

}  // namespace

Place known_place_of(const void* pointer) {
  const AskDriver ask = loaded_driver();
  if (ask == nullptr) return {};
  std::array attributes{CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  unsigned type = 0;
  unsigned managed = 0;
  int index = 0;
  std::array<void*, 3> answers{&type, &managed, &index};
  // An error is the answer of a driver that nobody has started.
  if (ask(static_cast<unsigned>(attributes.size()), attributes.data(), answers.data(),
          reinterpret_cast<CUdeviceptr>(pointer)) != CUDA_SUCCESS ||
      type != CU_MEMORYTYPE_DEVICE) {
    return {};
  }
  return {DeviceType::Cuda, index, managed != 0};
}

}  // namespace octavo::device
