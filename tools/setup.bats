# tools/setup, without installing anything.

setup() {
  T=$(mktemp -d)
  mkdir -p "$T/bin"
  ROOT=$(cd "$BATS_TEST_DIRNAME/.." && pwd)
  fake criu 'case $1 in --version) echo "Version: 4.2.1" ;; check) echo "Looks good." ;; esac'
  fake apt-get 'echo "apt-get $*" >&2; exit 100'
  fake sudo 'exit 1'
}

teardown() { rm -rf "$T"; }

fake() {
  printf '#!/bin/bash\n%s\n' "$2" >"$T/bin/$1"
  chmod +x "$T/bin/$1"
}

run_setup() {
  run env -u CXX PATH="$T/bin:$PATH" "$ROOT/tools/setup" "$@"
  printf '%s\n' "$output"
}

all_installed() {
  fake dpkg-query 'echo -n installed'
  fake g++ 'echo 12'
  fake cmake 'echo "cmake version 3.22.1"'
  fake ninja ''
}

@test "with everything there, nothing is installed and the CRIU is named" {
  all_installed
  run_setup --for check
  [ "$status" -eq 0 ]
  [[ $output == *"All packages are installed."* ]]
  [[ $output == *"$T/bin/criu"* ]]
  [[ $output != *"apt-get "* ]]
}

@test "--check names what is missing and installs nothing" {
  all_installed
  fake dpkg-query 'case ${!#} in libfmt-dev) exit 1 ;; esac; echo -n installed'
  run_setup --check
  [ "$status" -eq 1 ]
  [[ $output == *"missing: libfmt-dev"* ]]
  [[ $output != *"apt-get "* ]]
}

@test "a CMake or a g++ that is too old counts as missing" {
  all_installed
  fake cmake 'echo "cmake version 3.18.4"'
  for version in '' -12 -13 -14; do fake "g++$version" 'echo 10'; done
  fake apt-cache 'printf "  Candidate: 4:11.2.0\n"'
  run_setup --check
  [ "$status" -eq 1 ]
  [[ $output == *"missing: g++-12 cmake"* ]]
}

@test "when apt fails, what it said is shown, with the command to run" {
  all_installed
  fake dpkg-query 'case ${!#} in libfmt-dev) exit 1 ;; esac; echo -n installed'
  fake apt-cache 'printf "  Candidate: 1.0\n"'
  fake sudo 'while [[ $1 == -* ]]; do shift; done; exec "$@"'
  run_setup
  [ "$status" -eq 1 ]
  [[ $output == *"apt-get"*"install"*"libfmt-dev"* ]]
}

@test "a package that apt does not know is named" {
  all_installed
  fake dpkg-query 'case ${!#} in libexpected-dev) exit 1 ;; esac; echo -n installed'
  fake apt-cache 'printf "  Candidate: (none)\n"'
  fake sudo 'while [[ $1 == -* ]]; do shift; done; exec "$@"'
  run_setup
  [ "$status" -eq 1 ]
  [[ $output == *"apt knows no package libexpected-dev"* ]]
}

@test "another processor is refused at once" {
  fake uname '[ "$1" = -m ] && echo aarch64 || echo Linux'
  run_setup
  [ "$status" -eq 1 ]
  [[ $output == *"x86_64"*"aarch64"* ]]
}

@test "a wrong purpose or option is a usage error" {
  run_setup --for fun
  [ "$status" -eq 2 ]
  run_setup --nonsense
  [ "$status" -eq 2 ]
}
