# SPDX-License-Identifier: Apache-2.0
# How rooms and programs are made. A room is a folder whose *.cpp files are picked up by themselves;
# it becomes a target when it has something to hold.

# octavo_add_folder(FOLDER): add_subdirectory once the folder has a CMakeLists.txt.
function(octavo_add_folder folder)
  if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${folder}/CMakeLists.txt")
    add_subdirectory(${folder})
  endif()
endfunction()

# octavo_room(NAME [FOLDER folder] [USES room...] [LINKS target...])
#
# Makes the OBJECT library octavo_NAME from FOLDER/*.cpp (FOLDER: NAME unless given) and adds its
# objects to octavo. USES names the rooms below it; tools/check_includes.py holds every #include to
# the same direction.
function(octavo_room name)
  cmake_parse_arguments(PARSE_ARGV 1 room "" "FOLDER" "USES;LINKS")
  if(NOT room_FOLDER)
    set(room_FOLDER ${name})
  endif()
  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${room_FOLDER}/*.cpp")
  if(NOT sources)
    add_library(octavo_${name} INTERFACE)
    return()
  endif()

  add_library(octavo_${name} OBJECT ${sources})
  list(TRANSFORM room_USES PREPEND octavo_)
  target_include_directories(
    octavo_${name} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include"
                           "${PROJECT_BINARY_DIR}/include")
  target_link_libraries(octavo_${name} PRIVATE octavo_habits ${room_USES} ${room_LINKS})
  set_target_properties(
    octavo_${name}
    PROPERTIES POSITION_INDEPENDENT_CODE ON
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON)
  set_property(GLOBAL APPEND PROPERTY OCTAVO_ROOM_OBJECTS $<TARGET_OBJECTS:octavo_${name}>)
endfunction()

# octavo_user(TARGET...): a target outside src/ that sees the public headers and, by paths from the
# top ("testing/oracle.h"), its neighbours.
function(octavo_user)
  foreach(target IN LISTS ARGN)
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}")
    target_link_libraries(${target} PRIVATE octavo_habits octavo::octavo)
  endforeach()
endfunction()
