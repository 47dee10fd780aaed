# SPDX-License-Identifier: Apache-2.0
# Decides whether the CUDA part is built: sets OCTAVO_HAVE_CUDA and makes families of kernels into
# targets.

if(NOT OCTAVO_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "OCTAVO_CUDA: wanted AUTO, ON or OFF, got '${OCTAVO_CUDA}'")
endif()
set(OCTAVO_CUDA_ARCHITECTURES "75-real;80-real;90"
    CACHE STRING "Architectures of the kernels that run on every GPU; a family may know better")
set(OCTAVO_CUDA_ONLY_PTX ""
    CACHE STRING "Where set (80), all kernels are PTX for this architecture alone, compiled when they run: \
to run an older GPU's kernels on a newer one")

set(OCTAVO_HAVE_CUDA OFF)
if(NOT OCTAVO_CUDA STREQUAL "OFF")
  find_program(
    OCTAVO_NVCC nvcc
    HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda
    PATH_SUFFIXES bin)
  mark_as_advanced(OCTAVO_NVCC)
  if(OCTAVO_CUDA STREQUAL "ON" AND NOT OCTAVO_NVCC)
    message(FATAL_ERROR "OCTAVO_CUDA=ON: wanted nvcc, found none (set CUDACXX or CUDA_HOME)")
  elseif(NOT OCTAVO_NVCC)
    message(STATUS "octavo: CUDA off (no nvcc found)")
  else()
    set(CMAKE_CUDA_COMPILER "${OCTAVO_NVCC}")
    # Every target names its own architectures; this only satisfies the compiler check.
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    enable_language(CUDA)
    find_package(CUDAToolkit 12.8 REQUIRED)
    set(OCTAVO_HAVE_CUDA ON)
    if(OCTAVO_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER "${OCTAVO_CCACHE}")
    endif()
    # CMake 3.25.1 knows no C++20 for this nvcc and refuses the standard; it is told the flag.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
    endif()
    if(OCTAVO_DEVELOPER_MODE)
      target_compile_options(octavo_habits
                             INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings>")
    endif()
    # More than two of nvcc at once take more memory than a small machine has.
    set_property(GLOBAL APPEND PROPERTY JOB_POOLS octavo_nvcc=2)
  endif()
endif()

# octavo_cuda_family(NAME [ARCHITECTURES arch...]): the OBJECT library octavo_cuda_NAME of
# kernels/cuda/NAME, *.cu for the architectures and *.cpp for the host. Its objects join octavo.
function(octavo_cuda_family name)
  cmake_parse_arguments(PARSE_ARGV 1 family "" "" "ARCHITECTURES")
  if(NOT family_ARCHITECTURES)
    set(family_ARCHITECTURES ${OCTAVO_CUDA_ARCHITECTURES})
  endif()
  if(OCTAVO_CUDA_ONLY_PTX)
    set(family_ARCHITECTURES ${OCTAVO_CUDA_ONLY_PTX}-virtual)
  endif()
  set(target octavo_cuda_${name})
  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/kernels/cuda/${name}/*.cpp"
       "${CMAKE_CURRENT_SOURCE_DIR}/kernels/cuda/${name}/*.cu")
  add_library(${target} OBJECT ${sources})
  target_include_directories(
    ${target} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include"
                      "${PROJECT_BINARY_DIR}/include")
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(${target} PRIVATE octavo_habits fmt::fmt)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  set_target_properties(
    ${target}
    PROPERTIES POSITION_INDEPENDENT_CODE ON
               CXX_VISIBILITY_PRESET hidden
               CUDA_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               CUDA_ARCHITECTURES "${family_ARCHITECTURES}"
               JOB_POOL_COMPILE octavo_nvcc)
  set_property(GLOBAL APPEND PROPERTY OCTAVO_ROOM_OBJECTS $<TARGET_OBJECTS:${target}>)
endfunction()

# octavo_hold_kernel_resources(NAME): developers' builds of the family fail where a kernel takes more
# registers, stack or shared memory than tests/resources/NAME.txt says. Other people's compilers may do
# as they must.
function(octavo_hold_kernel_resources name)
  find_package(Python3 3.11 COMPONENTS Interpreter)
  if(NOT OCTAVO_DEVELOPER_MODE OR OCTAVO_CUDA_ONLY_PTX OR NOT Python3_FOUND)
    return()
  endif()
  set(target octavo_cuda_${name})
  set(script "${PROJECT_SOURCE_DIR}/tools/kernel_resources.py")
  set(table "${PROJECT_SOURCE_DIR}/tests/resources/${name}.txt")
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
  set_target_properties(
    ${target} PROPERTIES RULE_LAUNCH_COMPILE
                         "${Python3_EXECUTABLE} ${script} ${table} ${CMAKE_CUDA_COMPILER_VERSION}")
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cu$")
  set_source_files_properties(${sources} PROPERTIES OBJECT_DEPENDS "${script};${table}")
endfunction()
