# SPDX-License-Identifier: Apache-2.0
# Installs the library, its headers, a CMake package and a pkg-config file; all paths relocatable.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(OCTAVO_PACKAGE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/octavo")

install(
  TARGETS octavo
  EXPORT octavoTargets
  RUNTIME COMPONENT Runtime
  LIBRARY COMPONENT Runtime NAMELINK_COMPONENT Development
  ARCHIVE COMPONENT Development
  FILE_SET HEADERS COMPONENT Development)
if(TARGET octavo_tool)
  install(TARGETS octavo_tool RUNTIME COMPONENT Runtime)
endif()

install(
  EXPORT octavoTargets
  NAMESPACE octavo::
  DESTINATION "${OCTAVO_PACKAGE_DIR}"
  COMPONENT Development)

get_target_property(OCTAVO_LIBRARY_TYPE octavo TYPE)
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/octavoConfig.cmake.in" "${PROJECT_BINARY_DIR}/octavoConfig.cmake"
  INSTALL_DESTINATION "${OCTAVO_PACKAGE_DIR}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/octavoConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(
  FILES "${PROJECT_BINARY_DIR}/octavoConfig.cmake"
        "${PROJECT_BINARY_DIR}/octavoConfigVersion.cmake"
  DESTINATION "${OCTAVO_PACKAGE_DIR}"
  COMPONENT Development)

file(RELATIVE_PATH OCTAVO_PC_PREFIX "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
set(OCTAVO_PC_CUDA)
if(OCTAVO_HAVE_CUDA)
  set(OCTAVO_PC_CUDA " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lcublasLt -ldl -lpthread -lrt")
endif()
configure_file("${PROJECT_SOURCE_DIR}/cmake/octavo.pc.in" "${PROJECT_BINARY_DIR}/octavo.pc" @ONLY)
install(
  FILES "${PROJECT_BINARY_DIR}/octavo.pc"
  DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig"
  COMPONENT Development)
