# A check that can't fail proves nothing: each of tools/check's is shown a small tree with one fault.

setup() {
  TOOLS=$BATS_TEST_DIRNAME
  TREE=$(mktemp -d)/tree
  mkdir -p "$TREE"
  cp -r "$TOOLS" "$TREE/tools"
  # What is not part of the check would be looked at by it.
  find "$TREE/tools" -maxdepth 1 -type f ! -name check -delete
  cp "$TOOLS/../.clang-format" "$TOOLS/../.clang-tidy" "$TOOLS/../.shellcheckrc" "$TREE/"
  mkdir -p "$TREE/include/stasis" "$TREE"/src/{base,proc,driver,checkpoint,cli} "$TREE"/{sim,compat,preload}
  write include/stasis/public.h '#pragma once'
  write src/base/error.h '#pragma once'
  write src/base/fd.h '#pragma once'
  write src/proc/maps.h '#pragma once' '' '#include "base/error.h"' '#include "base/fd.h"'
  write include/abi/cuda_abi.h '#pragma once'
  write src/driver/driver.h '#pragma once' '' '#include "base/error.h"' '#include "base/fd.h"'
  write src/checkpoint/process.h '#pragma once' '' '#include "driver/driver.h"' '#include "proc/maps.h"'
  write src/cli/main.cc '#include <cstdio>' '' '#include "checkpoint/process.h"' '' 'int main() { return std::puts("hello") < 0; }'
  write sim/sim.cc '#include "abi/cuda_abi.h"'
}

teardown() { rm -rf "${TREE%/tree}"; }

# write FILE LINE...
write() {
  local file=$TREE/$1
  shift
  mkdir -p "${file%/*}"
  printf '%s\n' "$@" >"$file"
}

check() {
  run "$TREE/tools/check" "$@"
  printf '%s\n' "$output"
}

# The check named is the one that failed, and it named the place.
caught() {
  [ "$status" -eq 1 ]
  [[ $output == *"FAILED   $1"* ]]
  [[ $output == *"$2"* ]]
}

need_clang() { command -v "$1-14" >/dev/null || skip "$1-14 is not installed"; }

@test "a clean tree passes" {
  check --only format,layering,output,privacy,scripts,extra
  [ "$status" -eq 0 ]
  [[ $output == *", 0 failed"* ]]
}

@test "format: a line that clang-format would change" {
  need_clang clang-format
  write src/base/ugly.cc 'int   f( ){return 1;}'
  check --only format
  caught format src/base/ugly.cc
  "$TREE/tools/check" --fix
  check --only format
  [ "$status" -eq 0 ]
}

@test "layering: every include that points the wrong way is caught" {
  cases=(
    'src/base/a.h|"proc/maps.h"|base may not include proc'
    'src/base/a.h|"../proc/maps.h"|base may not include proc'
    'src/base/a.h|"src/proc/maps.h"|base may not include proc'
    'src/proc/a.h|"driver/driver.h"|proc may not include driver'
    'src/driver/a.h|"checkpoint/process.h"|driver may not include checkpoint'
    'src/checkpoint/a.h|"cli/verbs.h"|checkpoint may not include cli'
    'compat/a.cc|"cli/verbs.h"|compat may not include cli'
    'sim/a.cc|"base/fd.h"|sim may not include base'
    'sim/a.cc|"driver/driver.h"|sim may not include driver'
    'sim/a.cc|<stasis/public.h>|sim may not include include'
    'preload/a.cc|"base/fd.h"|preload may not include base'
    'include/stasis/a.h|"base/fd.h"|include may not include base'
    'capi/a.cc|"cli/verbs.h"|capi may not include cli'
    'python/a.cc|"base/fd.h"|python may not include base'
  )
  for case in "${cases[@]}"; do
    IFS='|' read -r file header message <<<"$case"
    write src/cli/verbs.h '#pragma once'
    write "$file" "#  include $header"
    check --only layering
    caught layering "$file:1: $message"
    rm "$TREE/$file"
  done
}

@test "layering: a new part of the source must be given a place" {
  write src/extra/a.h '#include "base/fd.h"'
  check --only layering
  caught layering '"extra" is no known part'
}

@test "layering: a test may use the helpers in tests/, the code beside it may not" {
  write tests/helper.h '#pragma once'
  write src/base/fd_unittest.cc '#include "tests/helper.h"'
  check --only layering
  [ "$status" -eq 0 ]
  write src/base/fd.cc '#include "tests/helper.h"'
  check --only layering
  caught layering 'src/base/fd.cc:1: base may not include tests'
}

@test "output: the library may not print, exit or abort" {
  for code in 'std::printf("x");' 'fprintf(stderr, "x");' 'std::cout << 1;' 'std::cerr << 1;' 'exit(1);' \
    'std::abort();' 'perror("x");' 'fmt::print("x");' 'std::terminate();'; do
    write src/base/loud.cc "void f() { $code }"
    check --only output
    caught output src/base/loud.cc:1
  done
}

@test "output: speaking of printing, formatting into memory and a child's _exit are fine" {
  write src/base/quiet.cc '// exit(1) and printf() are not for us.' 'const char* k = "exit(1)";' \
    'void f(char* b) { snprintf(b, 1, "x"); }' 'void g() { _exit(1); }' 'void h(S s) { s.exit(); p->abort(); }'
  write src/cli/print.cc 'void f() { std::printf("x"); }'
  write src/base/fd_unittest.cc 'void f() { std::printf("x"); }'
  check --only output
  [ "$status" -eq 0 ]
}

@test "registration: a test that ctest does not know" {
  command -v cmake >/dev/null || skip "cmake is not installed"
  write CMakeLists.txt 'cmake_minimum_required(VERSION 3.22)' 'project(t NONE)' 'enable_testing()' \
    'add_test(NAME fd_unittest COMMAND true)' 'add_test(NAME cli.bats COMMAND true)'
  cmake -S "$TREE" -B "$TREE/build/dev" >/dev/null
  write src/base/fd_unittest.cc ''
  write tests/cli.bats '@test "x" { true; }'
  check --only registration
  [ "$status" -eq 0 ]
  write src/base/other_unittest.cc ''
  check --only registration
  caught registration src/base/other_unittest.cc
  rm "$TREE/src/base/other_unittest.cc"
  write tests/more.bats '@test "x" { true; }'
  check --only registration
  caught registration tests/more.bats
  rm "$TREE/tests/more.bats"
  # Part of a known name is not the name.
  write src/base/d_unittest.cc ''
  check --only registration
  caught registration src/base/d_unittest.cc
}

@test "registration: a test that is one of several in a program" {
  command -v cmake >/dev/null && command -v ninja >/dev/null || skip "cmake or ninja is not installed"
  write CMakeLists.txt 'cmake_minimum_required(VERSION 3.22)' 'project(t CXX)' 'enable_testing()' \
    'set(CMAKE_EXPORT_COMPILE_COMMANDS ON)' 'add_executable(all_unittest src/base/a_unittest.cc)' \
    'add_executable(lost src/base/b_unittest.cc)' 'add_test(NAME all_unittest COMMAND all_unittest)'
  write src/base/a_unittest.cc ''
  write src/base/b_unittest.cc ''
  cmake -G Ninja -S "$TREE" -B "$TREE/build/dev" >/dev/null
  check --only registration
  caught registration src/base/b_unittest.cc
  [[ $output != *a_unittest.cc* ]]
}

@test "privacy: a path of this machine, a registry host" {
  write docs/page.md "see ${TREE%/*}/notes"
  check --only privacy
  caught privacy docs/page.md:1
  rm "$TREE/docs/page.md"
  for host in "http://deb""".example.org/debian "registry""".example.com "ghcr""".io/x/y; do
    write docs/page.md "from $host"
    check --only privacy
    caught privacy docs/page.md:1
  done
}

@test "scripts: one that does not parse, one that can't be started" {
  write tools/broken.sh '#!/bin/bash' 'if true; then'
  chmod +x "$TREE/tools/broken.sh"
  check --only scripts
  caught scripts broken.sh
  write tools/broken.sh '#!/bin/bash' 'true'
  chmod -x "$TREE/tools/broken.sh"
  check --only scripts
  caught scripts "not executable"
}

@test "extra: a program in tools/check.d that finds something" {
  write tools/check.d/always '#!/bin/sh' 'echo "docs/x.1: differs from --help"; exit 1'
  chmod +x "$TREE/tools/check.d/always"
  check --only extra
  caught extra "differs from --help"
}

@test "extra: a variable that the code reads, and no page has" {
  write docs/environment.md '`STASIS_CRIU`' '`HOME`' '`STASIS_BUILD`'
  write src/base/a.cc 'const char* a() { return getenv("STASIS_CRIU"); }' 'const char* b() { return ::secure_getenv("SUDO_UID"); }'
  write src/base/a_unittest.cc 'const char* parts() { return std::getenv("STASIS_GROUP_PARTS"); }'
  write deploy/script 'echo "${STASIS_CRIU:-}"'
  write CMakeLists.txt 'set(home $ENV{HOME})'
  write tests/one.bats ': "${STASIS_BUILD:?}"'
  git -C "$TREE" init -q
  run "$TREE/tools/check.d/environment"
  [ "$status" -eq 1 ]
  [[ $output == *"read, and not in docs/environment.md:"*STASIS_GROUP_PARTS*SUDO_UID* ]]
  [[ $output != *STASIS_CRIU* ]]
}

@test "extra: a C interface that is not what it was" {
  command -v cc >/dev/null || skip "there is no C compiler"
  mkdir -p "$TREE/capi"
  local good='#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#define STASIS_API
typedef enum stasis_code { STASIS_OK = 0, STASIS_USAGE = 1 } stasis_code;
typedef struct stasis_call {
  size_t size;
  uint32_t a; /* one; or two */
  void (*progress)(const char* phase, void* data);
} stasis_call;
STASIS_API void stasis_free(char* text);'
  write include/stasis/stasis.h "$good"
  (cd "$TREE" && tools/check.d/c-abi --update)
  check --only extra
  [ "$status" -eq 0 ]
  for change in 's/uint32_t a;/uint64_t a;/' 's/= 1/= 2/' 's/char\* text/const char* text/' 's/ a;/ a; uint32_t b;/' '/stasis_free/d'; do
    write include/stasis/stasis.h "$(sed "$change" <<<"$good")"
    check --only extra
    caught extra capi/abi.txt
  done
}

@test "tidy: a name against the house style, and names of the driver left alone" {
  need_clang clang-tidy
  mkdir -p "$TREE/build/dev"
  touch "$TREE/build/dev/CMakeCache.txt"
  write src/base/good.cc 'namespace stasis {' 'class Good {' ' public:' '  [[nodiscard]] int get() const { return x_; }' '' \
    ' private:' '  int x_ = 0;' '};' '}  // namespace stasis' 'extern "C" int cuInit(unsigned flags) { return static_cast<int>(flags); }'
  printf '[\n{\n  "directory": "%s",\n  "command": "c++ -std=c++20 -c src/base/good.cc",\n  "file": "%s"\n}\n]\n' \
    "$TREE" "$TREE/src/base/good.cc" >"$TREE/build/dev/compile_commands.json"
  check --only tidy
  [ "$status" -eq 0 ]
  write src/base/good.cc 'int BadName() { return 1; }'
  check --only tidy
  caught tidy BadName
}

@test "fast leaves out tidy; an unknown check is a usage error" {
  check --fast --only tidy,scripts
  [ "$status" -eq 0 ]
  [[ $output != *tidy* ]]
  check --only nonsense
  [ "$status" -eq 2 ]
}

@test "without git, the files are found all the same" {
  write src/base/loud.cc 'void f() { exit(1); }'
  [ ! -e "$TREE/.git" ]
  check --only output
  caught output src/base/loud.cc
  git -C "$TREE" init -q && git -C "$TREE" add src tools include
  check --only output
  caught output src/base/loud.cc
}
