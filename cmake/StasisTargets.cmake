# The few ways in which this project makes a target. Every target gets the same warnings.

add_library(stasis_options INTERFACE)
target_include_directories(stasis_options INTERFACE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src
                                                    ${CMAKE_SOURCE_DIR})
target_compile_options(stasis_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                                                -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-align
                                                -Wformat=2 -Wundef)
target_compile_definitions(stasis_options INTERFACE _FILE_OFFSET_BITS=64)
if(STASIS_FAULT_POINTS)
  target_compile_definitions(stasis_options INTERFACE STASIS_FAULT_POINTS)
endif()
if(STASIS_WERROR)
  target_compile_options(stasis_options INTERFACE -Werror)
endif()
if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # g++ takes a source that another file names for a header, and warns of what is in its unnamed namespaces, also where
  # two of them have the same name.
  target_compile_options(stasis_options INTERFACE -Wno-subobject-linkage -Wno-error=shadow)
endif()
if(NOT STASIS_LINES)
  target_compile_options(stasis_options INTERFACE -g0)
endif()
if(STASIS_SANITIZE)
  target_compile_options(stasis_options INTERFACE -fsanitize=${STASIS_SANITIZE}
                                                  -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(stasis_options INTERFACE -fsanitize=${STASIS_SANITIZE})
endif()
if(STASIS_STATIC_RUNTIME)
  target_link_options(stasis_options INTERFACE -static-libstdc++ -static-libgcc)
endif()

# Before the command of a test that restores processes.
set(STASIS_OWN_NUMBERS ${CMAKE_SOURCE_DIR}/tests/integration/own_numbers)

# Every unit test of the project, so that a sanitizer build can build just these.
add_custom_target(unittests)

# stasis_library(NAME DIR_DEPENDENCIES...): a static library of all .cc files of this folder but the
# tests; each *_unittest.cc beside them becomes a test of its own. STEM_target is the program that it is built into.
function(stasis_library name)
  file(GLOB sources CONFIGURE_DEPENDS *.cc)
  list(FILTER sources EXCLUDE REGEX "_(unittest|integrationtest|fuzzer)\\.cc$")
  add_library(stasis_${name} STATIC ${sources})
  set(deps "")
  foreach(dep IN LISTS ARGN)
    if(TARGET stasis_${dep} OR dep MATCHES "^(base|group|proc|attach|driver|checkpoint|rendezvous|image|criu|direct|doctor|operations|report)$")
      list(APPEND deps stasis_${dep})
    else()
      list(APPEND deps ${dep})
    endif()
  endforeach()
  target_link_libraries(stasis_${name} PUBLIC stasis_options ${deps})
  stasis_share_headers(stasis_${name} library_headers)
  if(STASIS_TESTS)
    file(GLOB tests CONFIGURE_DEPENDS *_unittest.cc)
    # A component's tests as one program, in a first build with the sanitizers: compiled one by one they take twice
    # the processor time. What ctest knows, and runs in a process of its own, is each file, as elsewhere.
    if(CMAKE_UNITY_BUILD AND STASIS_SANITIZE AND tests)
      stasis_test_program(${name}_unittests SOURCES ${tests} LIBS stasis_${name})
      set_target_properties(${name}_unittests PROPERTIES UNITY_BUILD ON)
    endif()
    foreach(test IN LISTS tests)
      get_filename_component(stem ${test} NAME_WE)
      if(TARGET ${name}_unittests)
        set(${stem}_target ${name}_unittests PARENT_SCOPE)
        stasis_test_of(${test} ${name}_unittests)
      else()
        set(${stem}_target ${stem} PARENT_SCOPE)
        stasis_test(${stem} SOURCES ${test} LIBS stasis_${name})
      endif()
    endforeach()
    if(TARGET ${name}_unittests)
      stasis_test_rest(${name}_unittests)
    endif()
  endif()
endfunction()

# Headers that take half of the time of a compilation, compiled once: for the libraries, for programs with options,
# and with GoogleTest for the unit tests. Only where files are compiled together anyway: what one lacks does not show then.
function(stasis_share_headers name with)
  if(NOT CMAKE_UNITY_BUILD OR NOT STASIS_TESTS)
    return()
  endif()
  if(NOT TARGET ${with})
    file(WRITE ${CMAKE_BINARY_DIR}/${with}.cc "int main() {}\n")
    # Libraries and programs are compiled differently (-fPIC, -fPIE).
    if(with STREQUAL library_headers)
      add_library(${with} STATIC EXCLUDE_FROM_ALL ${CMAKE_BINARY_DIR}/${with}.cc)
    else()
      add_executable(${with} EXCLUDE_FROM_ALL ${CMAKE_BINARY_DIR}/${with}.cc)
    endif()
    set(headers <chrono> <filesystem> <fstream> <functional> <string> <thread> <vector>)
    if(with STREQUAL gtest_headers)
      target_link_libraries(${with} PRIVATE GTest::gmock GTest::gtest)
      list(APPEND headers <gmock/gmock.h> <gtest/gtest.h>)
    else()
      target_link_libraries(${with} PRIVATE stasis_fmt nlohmann_json::nlohmann_json tl::expected)
      list(APPEND headers <fmt/format.h> <nlohmann/json.hpp> <tl/expected.hpp>)
    endif()
    if(with STREQUAL program_headers)
      target_link_libraries(${with} PRIVATE CLI11::CLI11)
      list(APPEND headers <CLI/CLI.hpp>)
    endif()
    target_link_libraries(${with} PRIVATE stasis_options)
    target_precompile_headers(${with} PRIVATE ${headers})
  endif()
  target_precompile_headers(${name} REUSE_FROM ${with})
endfunction()

# With lld a program is linked in a fifth of the processor time: 0.3 s for 1.4 s of bin/stasis. Only where there are
# tests: what is released is linked as ever.
include(CheckLinkerFlag)
set(CMAKE_REQUIRED_QUIET ON)
check_linker_flag(CXX -fuse-ld=lld STASIS_HAS_LLD)
unset(CMAKE_REQUIRED_QUIET)
function(stasis_link_fast name)
  if(STASIS_HAS_LLD AND STASIS_TESTS)
    target_link_options(${name} PRIVATE -fuse-ld=lld)
  endif()
endfunction()

# stasis_executable(NAME SOURCES...): a program in <build>/bin.
function(stasis_executable name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES} ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE stasis_options ${ARG_LIBS})
  stasis_link_fast(${name})
  if("CLI11::CLI11" IN_LIST ARG_LIBS)
    stasis_share_headers(${name} program_headers)
  endif()
endfunction()

# What --all runs and a plain run of tools/test does not is built when it is asked for.
option(STASIS_BUILD_ALL "Unit tests and benchmarks are part of all" ON)
function(stasis_build_on_demand name)
  if(NOT STASIS_BUILD_ALL)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endfunction()

# stasis_test_program(NAME SOURCES... LIBS...): a GoogleTest program, of which ctest knows nothing yet.
function(stasis_test_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  find_package(GTest REQUIRED)
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE stasis_options ${ARG_LIBS} GTest::gmock GTest::gtest GTest::gtest_main)
  # One by one also where others are compiled together, so that tools/check finds each.
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests UNITY_BUILD OFF)
  stasis_share_headers(${name} gtest_headers)
  stasis_build_on_demand(${name})
  stasis_link_fast(${name})
  add_dependencies(unittests ${name})
endfunction()

# stasis_test(NAME SOURCES... LIBS... [RUN_BY COMMAND]): one GoogleTest program, one ctest entry, label
# "unit".
function(stasis_test name)
  if(NOT STASIS_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS;RUN_BY" ${ARGN})
  stasis_test_program(${name} SOURCES ${ARG_SOURCES} LIBS ${ARG_LIBS})
  stasis_add_unit_test(${name} ${ARG_RUN_BY} $<TARGET_FILE:${name}>)
endfunction()

# stasis_test_of(FILE PROGRAM): the same of the suites in this file alone, where a program has those of many.
function(stasis_test_of file program)
  get_filename_component(stem ${file} NAME_WE)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(STRINGS ${file} lines REGEX "^(TEST|TEST_F|TEST_P|RC_GTEST_PROP|RC_GTEST_FIXTURE_PROP)\\(")
  set(filter "")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^[A-Z_]+\\(([A-Za-z0-9_]+).*" "\\1" suite "${line}")
    list(APPEND filter "${suite}.*" "*/${suite}.*")
    if(line MATCHES "^RC_GTEST_FIXTURE_PROP")
      list(APPEND filter "${suite}_RapidCheck.*")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES filter)
  list(JOIN filter ":" filter)
  stasis_add_unit_test(${stem} $<TARGET_FILE:${program}> "--gtest_filter=${filter}")
  # A filter that fits nothing is no error to GoogleTest.
  set_tests_properties(${stem} PROPERTIES FAIL_REGULAR_EXPRESSION "Running 0 tests")
  set_property(TARGET ${program} APPEND_STRING PROPERTY STASIS_FILTERS ":${filter}")
endfunction()

# stasis_test_rest(PROGRAM): fails if it has a test that none of the entries above runs.
function(stasis_test_rest program)
  get_target_property(filters ${program} STASIS_FILTERS)
  stasis_add_unit_test(${program} $<TARGET_FILE:${program}> "--gtest_filter=-${filters}")
  set_tests_properties(${program} PROPERTIES PASS_REGULAR_EXPRESSION "Running 0 tests")
endfunction()

function(stasis_add_unit_test name)
  add_test(NAME ${name} COMMAND ${ARGN})
  set_tests_properties(${name} PROPERTIES LABELS unit TIMEOUT 600)
  # First those that take longest: the last one to end has nothing beside it. A first run knows no times.
  if(name MATCHES "^(operations|process|group_part|tcp_rendezvous)_unittest$")
    set_tests_properties(${name} PROPERTIES COST 30)
  elseif(name MATCHES "^(manifest|content_base|parking|checksum|content|group|agent_client|address_space|awake_thread)_unittest$")
    set_tests_properties(${name} PROPERTIES COST 10)
  endif()
endfunction()

# stasis_fuzzer(NAME CORPUS FOLDER SOURCES... LIBS...): of these sources NAME.cc sees what an input has reached;
# FOLDER is in corpus/ beside it. It runs for seconds with the unit tests; for longer:
#   build/clang/tests/content_fuzzer -max_total_time=600 some/folder src/image/corpus/content
option(STASIS_FUZZ "Build the fuzzers (clang only)" OFF)
function(stasis_fuzzer name)
  if(NOT STASIS_FUZZ OR NOT STASIS_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "CORPUS" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${name}.cc ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LIBS})
  target_compile_options(${name} PRIVATE -fsanitize=fuzzer,address -O1)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer,address)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests UNITY_BUILD OFF)
  add_dependencies(unittests ${name})
  set(found ${CMAKE_BINARY_DIR}/fuzz/${name})
  file(MAKE_DIRECTORY ${found})
  add_test(NAME ${name} COMMAND ${name} -max_total_time=5 -timeout=20 -artifact_prefix=${found}/ ${found}
                                ${CMAKE_CURRENT_SOURCE_DIR}/corpus/${ARG_CORPUS})
  set_tests_properties(${name} PROPERTIES LABELS unit TIMEOUT 600)
endfunction()

# stasis_bats(FILE): a bats file as one ctest entry, label "integration", with process numbers of its
# own. It finds the build folder in STASIS_BUILD.
function(stasis_bats file)
  if(NOT STASIS_TESTS)
    return()
  endif()
  get_filename_component(stem ${file} NAME_WE)
  find_program(BATS bats REQUIRED)
  add_test(NAME ${stem}.bats COMMAND ${STASIS_OWN_NUMBERS} ${CMAKE_SOURCE_DIR}/tests/integration/run_bats ${file}
           WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
  # Those with most tests come first: the last one to end has nothing beside it. A first run knows no times.
  file(STRINGS ${file} cases REGEX "^@test ")
  list(LENGTH cases count)
  set_tests_properties(${stem}.bats PROPERTIES COST ${count})
  set_tests_properties(${stem}.bats PROPERTIES LABELS integration TIMEOUT 1200 ENVIRONMENT
                                               "STASIS_BUILD=${CMAKE_BINARY_DIR}")
endfunction()
