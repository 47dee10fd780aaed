# SPDX-License-Identifier: Apache-2.0
# Decides whether the CUDA part is built and sets OCTAVO_HAVE_CUDA. The language is enabled only where
# there is a room to compile with it, since looking at nvcc costs every configure some seconds.

if(NOT OCTAVO_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "OCTAVO_CUDA: wanted AUTO, ON or OFF, got '${OCTAVO_CUDA}'")
endif()

set(OCTAVO_HAVE_CUDA OFF)
if(NOT OCTAVO_CUDA STREQUAL "OFF")
  find_program(
    OCTAVO_NVCC nvcc
    HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda
    PATH_SUFFIXES bin)
  mark_as_advanced(OCTAVO_NVCC)
  file(GLOB_RECURSE octavo_cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/*.cu")
  if(OCTAVO_CUDA STREQUAL "ON" AND NOT OCTAVO_NVCC)
    message(FATAL_ERROR "OCTAVO_CUDA=ON: wanted nvcc, found none (set CUDACXX or CUDA_HOME)")
  elseif(NOT OCTAVO_NVCC)
    message(STATUS "octavo: CUDA off (no nvcc found)")
  elseif(NOT octavo_cuda_sources)
    message(STATUS "octavo: nvcc found, but this version has no CUDA part; building for the CPU")
  else()
    set(CMAKE_CUDA_COMPILER "${OCTAVO_NVCC}")
    # Every target names its own architectures; this only satisfies the compiler check.
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(OCTAVO_HAVE_CUDA ON)
    # CMake 3.25 knows no C++20 for nvcc, so the flag is passed by hand.
    target_compile_options(octavo_habits INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
  endif()
endif()
