# SPDX-License-Identifier: Apache-2.0
# Habits that hold for every target: the language, the build type, warnings, ccache.
# A project that embeds Octavo keeps its own build type, launcher and output folders.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
  find_program(OCTAVO_CCACHE ccache)
  mark_as_advanced(OCTAVO_CCACHE)
  if(OCTAVO_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${OCTAVO_CCACHE}")
  endif()
endif()

# Linked by every target of ours and by nobody else.
add_library(octavo_habits INTERFACE)
target_compile_features(octavo_habits INTERFACE cxx_std_20)
# Designated initialisers leave the other fields at their defaults on purpose; g++ warns all the same.
if(PROJECT_IS_TOP_LEVEL OR OCTAVO_DEVELOPER_MODE)
  target_compile_options(
    octavo_habits
    INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall
              -Wextra
              -Wno-missing-field-initializers
              -Wpedantic
              -Wconversion
              -Wsign-conversion
              -Wshadow
              -Wold-style-cast
              -Wnon-virtual-dtor
              -Wnull-dereference>)
  # `omp simd` is a permission; clang warns where it makes no use of it.
  target_compile_options(octavo_habits INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-pass-failed>)
endif()
if(OCTAVO_DEVELOPER_MODE)
  target_compile_options(octavo_habits INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(OCTAVO_ASSERTS)
  target_compile_definitions(octavo_habits INTERFACE OCTAVO_ENABLE_ASSERTS=1)
endif()
