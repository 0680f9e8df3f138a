# tools/test's counting: its last line must not be able to hide a failure.

setup() {
  command -v ninja >/dev/null && command -v cmake >/dev/null || skip "cmake or ninja is not installed"
  TREE=$(mktemp -d)
  mkdir -p "$TREE/tools"
  cp -r "$BATS_TEST_DIRNAME/lib" "$BATS_TEST_DIRNAME/test" "$TREE/tools/"
  cp "$BATS_TEST_DIRNAME/../CMakePresets.json" "$TREE/"
  program tools/setup 'echo /usr/sbin/criu'
  program tools/check 'echo "checks: 3 passed, 0 failed, 1 skipped"'
  program gtest 'echo "[ RUN      ] A.One" && echo "[       OK ] A.One (0 ms)"' 'echo "a.cc:4: Skipped" && echo "no GPU here"' \
    'echo "[  SKIPPED ] A.Two (0 ms)" && echo "[  SKIPPED ] A.Two"'
  program bats 'echo 1..2 && echo "ok 1 first" && echo "ok 2 second # skip no GPU"'
  tests 'add_test(NAME gtest COMMAND ${CMAKE_SOURCE_DIR}/gtest)' 'set_tests_properties(gtest PROPERTIES LABELS unit)' \
    'add_test(NAME bats COMMAND ${CMAKE_SOURCE_DIR}/bats)'
}

teardown() { rm -rf "$TREE"; }

program() {
  local file=$TREE/$1
  shift
  printf '%s\n' '#!/bin/bash' "$@" >"$file"
  chmod +x "$file"
}

# The project: these lines after the usual beginning, a program that no unit test needs among it.
tests() {
  printf '%s\n' 'cmake_minimum_required(VERSION 3.22)' 'project(t CXX)' 'enable_testing()' \
    'add_executable(main main.cc)' 'add_custom_target(unittests COMMAND true)' "$@" >"$TREE/CMakeLists.txt"
  echo 'int main() {}' >"$TREE/main.cc"
}

run_test() {
  run env -u CXX "$TREE/tools/test" "$@"
  printf '%s\n' "$output"
  last=$(printf '%s\n' "$output" | tail -n 1)
}

@test "cases are counted, not programs, and skipped ones are named with their reason" {
  run_test --quick
  [ "$status" -eq 0 ]
  [ "$last" = "5 passed, 0 failed, 3 skipped" ]
  [[ $output == *"skipped: gtest: A.Two: no GPU here"* ]]
  [[ $output == *"skipped: bats: second: no GPU"* ]]
}

@test "a sanitizer runs the unit tests, and with --all so do another and dev" {
  run_test
  [ "$status" -eq 0 ]
  [ "$last" = "5 passed, 0 failed, 3 skipped" ]
  [ "$(grep -c "Passed" <<<"$output")" -eq 2 ]
  # The first build of dev was by clang++, and the sanitizer's checks are those that compile quickly.
  if grep -q "== clang:" <<<"$output"; then
    grep '^CMAKE_CXX_COMPILER:' "$TREE/build/dev/CMakeCache.txt" | grep clang++
    [[ $(grep '^STASIS_SANITIZE:' "$TREE/build/clang/CMakeCache.txt") == *=address,bool,* ]]
  fi
  run_test --all
  [ ! -d "$TREE/build/clang" ] || [[ $(grep '^STASIS_SANITIZE:' "$TREE/build/clang/CMakeCache.txt") == *=address,undefined ]]
  [ "$(grep -c "Passed" <<<"$output")" -eq 4 ]
}

@test "a failing case, a crash, a time-out and a missing program are failures" {
  tests 'foreach(t case crash slow)' '  add_test(NAME ${t} COMMAND ${CMAKE_SOURCE_DIR}/${t})' 'endforeach()' \
    'add_test(NAME missing COMMAND ${CMAKE_SOURCE_DIR}/missing)' 'set_tests_properties(slow PROPERTIES TIMEOUT 1)' \
    'add_test(NAME gtest COMMAND ${CMAKE_SOURCE_DIR}/gtest)' 'set_tests_properties(gtest PROPERTIES LABELS unit)' \
    'add_test(NAME bats COMMAND ${CMAKE_SOURCE_DIR}/bats)'
  program case 'echo "[ RUN      ] A.One" && echo "1 is not < 2" && echo "[  FAILED  ] A.One (0 ms)" && exit 1'
  program bats 'echo 1..3 && echo "ok 1 first" && echo "not ok 2 second" && echo "# why it is" && echo "ok 3 # skip no GPU" && exit 1'
  program crash 'echo "[       OK ] A.One (0 ms)" && kill -ABRT $$'
  program slow 'exec sleep 20'
  run_test --quick
  [ "$status" -eq 1 ]
  [ "$last" = "6 passed, 5 failed, 3 skipped" ]
  # Once more at the end.
  output=${output##*== What failed}
  [[ $output == *"failed: case: A.One"*"  1 is not < 2"*"failed: crash"*"failed: missing"* ]]
  [[ $output == *"failed: bats: 2 second"*"  # why it is"* ]]
}

@test "a build that fails is a failure, and the rest still runs" {
  tests 'if(NOT STASIS_SANITIZE)' '  add_executable(broken broken.cc)' 'endif()' \
    'add_test(NAME gtest COMMAND ${CMAKE_SOURCE_DIR}/gtest)' 'set_tests_properties(gtest PROPERTIES LABELS unit)'
  echo 'int main() { return nonsense; }' >"$TREE/broken.cc"
  run_test
  [ "$status" -eq 1 ]
  [[ $output == *"nonsense"* ]]
  [ "$last" = "4 passed, 1 failed, 2 skipped" ]
}

@test "what clang++ alone finds wrong in a source that no unit test needs is a failure" {
  clang++ --version >/dev/null 2>&1 || skip "no clang++"
  printf '%s\n' '#ifdef __clang__' '#error clang sees it' '#endif' 'int main() {}' >"$TREE/main.cc"
  run_test --all
  [ "$status" -eq 1 ]
  [[ $output == *"clang sees it"* ]]
}

@test "no tests at all is a failure" {
  tests ''
  run_test --quick
  [ "$status" -eq 1 ]
}

@test "a failing check is a failure, and so is one that dies" {
  program tools/check 'echo "FAILED   format" && echo "checks: 3 passed, 1 failed, 0 skipped" && exit 1'
  run_test --quick
  [ "$status" -eq 1 ]
  [ "$last" = "5 passed, 1 failed, 2 skipped" ]
  program tools/check 'exit 1'
  run_test --quick
  [ "$status" -eq 1 ]
  [ "$last" = "2 passed, 1 failed, 2 skipped" ]
}

@test "a failing set-up ends the run" {
  program tools/setup 'echo "no packages" >&2 && exit 1'
  run_test --quick
  [ "$status" -eq 1 ]
  [[ $output == *"could not be made ready"* ]]
}

@test "-R takes the matching tests only; none matching is a failure" {
  run_test --quick -R '^gtest$'
  [ "$status" -eq 0 ]
  [ "$last" = "1 passed, 0 failed, 1 skipped" ]
  run_test --quick -R nonsense
  [ "$status" -eq 1 ]
}
