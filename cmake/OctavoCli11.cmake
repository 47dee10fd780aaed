# SPDX-License-Identifier: Apache-2.0
# CLI11 as programs use it. g++ 12 sees a null pointer in the strings that CLI11 moves about, where
# there is none; the option stands in an interface so that it comes after the one it takes back.
include_guard(GLOBAL)

find_package(CLI11 2.1 REQUIRED)
add_library(octavo_cli11 INTERFACE)
target_link_libraries(octavo_cli11 INTERFACE CLI11::CLI11)
target_compile_options(octavo_cli11
                       INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-null-dereference>)

# octavo_reads_command_line(SOURCE): the one file of a program that includes CLI11. A third of its
# compile time is debug information about CLI11's templates; it goes without. (A lower -O would save
# more, but its copies of the standard library's functions could win over optimised ones at link time.)
function(octavo_reads_command_line source)
  set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS -g0)
endfunction()
