# SPDX-License-Identifier: Apache-2.0
# Decides whether the backend `fused` is built: sets OCTAVO_HAVE_CUDNN, or OCTAVO_WHY_NO_CUDNN to what is
# missing. Headers alone are wanted; cuDNN itself is opened at run time.

set(OCTAVO_CUDNN_FRONTEND_DIR
    ""
    CACHE PATH "Folder of cudnn-frontend's headers (cudnn_frontend.h); ./dev setup fetches them to .cache")
set(OCTAVO_CUDNN_FRONTEND_VERSION 1.32.0)

set(OCTAVO_HAVE_CUDNN OFF)
set(OCTAVO_WHY_NO_CUDNN "built without CUDA")
if(OCTAVO_HAVE_CUDA)
  file(GLOB octavo_venv_includes "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/include")
  find_path(
    OCTAVO_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h
    HINTS "${OCTAVO_CUDNN_FRONTEND_DIR}" "${OCTAVO_CUDNN_FRONTEND_DIR}/include"
    PATHS "${PROJECT_SOURCE_DIR}/.cache/cudnn-frontend-${OCTAVO_CUDNN_FRONTEND_VERSION}/include"
          ${octavo_venv_includes})
  find_path(OCTAVO_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ENV CUDNN_PATH
            PATH_SUFFIXES include)
  mark_as_advanced(OCTAVO_CUDNN_FRONTEND_INCLUDE OCTAVO_CUDNN_INCLUDE)
  if(NOT OCTAVO_CUDNN_FRONTEND_INCLUDE)
    set(OCTAVO_WHY_NO_CUDNN "cudnn-frontend headers not found")
  elseif(NOT OCTAVO_CUDNN_INCLUDE)
    set(OCTAVO_WHY_NO_CUDNN "cudnn.h not found")
  else()
    set(OCTAVO_HAVE_CUDNN ON)
  endif()
  if(NOT OCTAVO_HAVE_CUDNN)
    message(STATUS "octavo: backend fused off (${OCTAVO_WHY_NO_CUDNN})")
  endif()
endif()

# octavo_cudnn_room(): the room kernels/cudnn. Without the headers it only says why.
function(octavo_cudnn_room)
  set(folder "${CMAKE_CURRENT_SOURCE_DIR}/kernels/cudnn")
  set(sources "${folder}/library.cpp" "${folder}/sizes.cpp" "${folder}/support.cpp")
  if(OCTAVO_HAVE_CUDNN)
    list(APPEND sources "${folder}/fused.cpp" "${folder}/graph.cpp" "${folder}/step_arrays.cu")
  endif()
  add_library(octavo_kernels_cudnn OBJECT ${sources})
  target_include_directories(
    octavo_kernels_cudnn PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include"
                                 "${PROJECT_BINARY_DIR}/include")
  target_link_libraries(octavo_kernels_cudnn PRIVATE octavo_habits octavo_base fmt::fmt)
  set_target_properties(
    octavo_kernels_cudnn
    PROPERTIES POSITION_INDEPENDENT_CODE ON
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON)
  if(OCTAVO_HAVE_CUDNN)
    target_compile_definitions(octavo_kernels_cudnn PRIVATE OCTAVO_HAVE_CUDNN=1)
    target_include_directories(
      octavo_kernels_cudnn SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS} "${OCTAVO_CUDNN_INCLUDE}"
                                          "${OCTAVO_CUDNN_FRONTEND_INCLUDE}")
    target_compile_options(octavo_kernels_cudnn
                           PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
    set_source_files_properties(
      "${folder}/graph.cpp"
      PROPERTIES COMPILE_DEFINITIONS
                 "CUDNN_FRONTEND_SKIP_JSON_LIB;NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING"
                 # Nothing in it is hot, and -O2 takes the compiler twice as long.
                 # The warning is about the frontend's own code.
                 COMPILE_OPTIONS "-O1;-Wno-null-dereference")
    set_target_properties(
      octavo_kernels_cudnn PROPERTIES CUDA_VISIBILITY_PRESET hidden CUDA_ARCHITECTURES "80-real;90"
                                      JOB_POOL_COMPILE octavo_nvcc)
  else()
    target_compile_definitions(octavo_kernels_cudnn
                               PRIVATE OCTAVO_WHY_NO_CUDNN="${OCTAVO_WHY_NO_CUDNN}")
  endif()
  set_property(GLOBAL APPEND PROPERTY OCTAVO_ROOM_OBJECTS $<TARGET_OBJECTS:octavo_kernels_cudnn>)
endfunction()
