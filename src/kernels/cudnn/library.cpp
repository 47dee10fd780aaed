// SPDX-License-Identifier: Apache-2.0
#include "kernels/cudnn/library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdlib>

namespace octavo::kernels::fused {
namespace {

Library open_library() {
  const char* named = std::getenv("OCTAVO_CUDNN");
  const char* file = named != nullptr && *named != '\0' ? named : "libcudnn.so.9";
  Library found;
  // Global, since cuDNN's own parts look for each other's symbols.
  void* handle = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    found.why_not = fmt::format("cuDNN not found: {} (set OCTAVO_CUDNN to its path)",
                                reason != nullptr ? reason : file);
    return found;
  }
  auto* get_version = reinterpret_cast<std::size_t (*)()>(dlsym(handle, "cudnnGetVersion"));
  if (get_version == nullptr) {
    found.why_not = fmt::format("cuDNN not found: {} has no cudnnGetVersion", file);
    dlclose(handle);
    return found;
  }
  found.handle = handle;
  found.version = static_cast<std::int32_t>(get_version());
  found.version_text = version_text(found.version);
  return found;
}

}  // namespace

const Library& library() {
  static const Library found = open_library();
  return found;
}

std::string version_text(std::int32_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace octavo::kernels::fused
