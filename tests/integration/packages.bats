#!/usr/bin/env bats
# The Debian packages, made of the build folder as it is: what is in them, that it runs from wherever it
# lies, that others compile against it, and that dpkg installs and removes it. tools/test-packages does the
# same on bare systems.

load helpers
load stasis_lib

kPackages='libstasis-dev python3-stasis stasis stasis-criu-plugin stasis-cuda-checkpoint stasis-simulator'
# Where the plugin for Slurm was built, by Slurm's header.
[[ ! -e $STASIS_BUILD/lib/stasis/slurm/stasis.so ]] || kPackages+=' stasis-slurm-plugin'
readonly kPackages

setup_file() {
  export SOURCE=$BATS_TEST_DIRNAME/../..
  export DEBS=$BATS_FILE_TMPDIR/debs ROOT=$BATS_FILE_TMPDIR/root
  "$SOURCE/tools/package" --build "$STASIS_BUILD" --only deb --out "$DEBS" >/dev/null 3>&-
  local deb
  for deb in "$DEBS"/*.deb; do dpkg-deb -x "$deb" "$ROOT"; done
}

setup() {
  setup_stasis
  # What is tested lies in $ROOT, and nothing is to be found in the build folder instead.
  PATH=$ROOT/usr/bin:${PATH#"$STASIS_BUILD/bin:"}
  export STASIS_LIBCUDA=$ROOT/usr/lib/stasis/sim/libcuda.so.1
}
teardown() {
  end_stasis
  [[ -z ${user:-} ]] || remove_user
}

# A user that may do everything by sudo, without a password, in $user.
make_user() {
  local name=stasis-test-$$
  command -v sudo >/dev/null && command -v runuser >/dev/null || skip "there is no sudo"
  useradd --no-create-home --no-user-group "$name"
  user=$name
  mkdir -p /etc/sudoers.d
  echo "$user ALL=(ALL) NOPASSWD: ALL" >"/etc/sudoers.d/$user"
  chmod 440 "/etc/sudoers.d/$user"
  chmod a+x "$BATS_RUN_TMPDIR"
  as_user sudo -n true || skip "sudo does not work here"
}

remove_user() {
  rm -f "/etc/sudoers.d/$user"
  userdel "$user"
}

as_user() { (cd / && exec runuser -u "$user" -- env -i "PATH=$PATH" HOME=/nonexistent "$@" 3>&-); }

control() { dpkg-deb -f "$DEBS/$1"_*.deb "$2"; }

# The counter; its process number in $TARGET, its port in $port.
start_counter() {
  local log=$BATS_TEST_TMPDIR/counter.log
  ("$@" env LD_LIBRARY_PATH="$ROOT/usr/lib/stasis/sim" setsid stasis-counter --port 0 --gpu-memory 16M </dev/null >"$log" 2>&1 3>&-) &
  wait_until 60 grep -q listening "$log"
  port=$(sed -n 's/^listening on .*[: ]\([0-9][0-9]*\)$/\1/p; s/^listening on \([0-9][0-9]*\)$/\1/p' "$log")
  TARGET=$(stasis ps --json | python3 -IS -c 'import json, sys; print([p["pid"] for p in json.load(sys.stdin)["processes"] if "stasis-counter" in p["command"]][0])')
  echo "$TARGET" >>"$targets"
}

@test "there are all packages, each with what it needs and what it stands for" {
  assert_equal "$(for deb in "$DEBS"/*.deb; do dpkg-deb -f "$deb" Package; done | sort | xargs)" "$kPackages"
  local version package
  version=$(sed -n 's/.*kVersion = "\(.*\)".*/\1/p' "$SOURCE/src/base/version.h")-1
  for package in $kPackages; do
    assert_equal "$(control "$package" Version)" "$version" "version of $package"
    assert_contains "$(control "$package" Maintainer)" "Stasis developers <"
    (($(control "$package" Installed-Size) > 20))
    [[ -s $ROOT/usr/share/doc/$package/copyright && -s $ROOT/usr/share/doc/$package/changelog.Debian.gz ]]
  done
  assert_equal "$(gzip -dc "$ROOT/usr/share/doc/stasis/changelog.Debian.gz" | sed -n '1s/.*(\(.*\)).*/\1/p')" "$version"
  assert_contains "$(gzip -dc "$ROOT/usr/share/doc/stasis/changelog.Debian.gz")" " -- $(control stasis Maintainer)  "
  # Without being told, no home page and no address that is none.
  assert_equal "$(control stasis Homepage)" ""
  [[ $(control stasis Maintainer) != *invalid* ]]
  assert_equal "$(control libstasis-dev Depends)" "stasis (= $version)"
  assert_contains "$(control python3-stasis Depends)" "stasis (= $version), python3 (>= 3."
  assert_contains "$(control stasis-simulator Depends)" "stasis (= $version)"
  assert_contains "$(control stasis Depends)" "libc6 (>= "
  assert_equal "$(control stasis-cuda-checkpoint Conflicts) $(control stasis-cuda-checkpoint Provides)" "cuda-checkpoint cuda-checkpoint"
  assert_equal "$(control stasis-criu-plugin Conflicts)" "criu-cuda-plugin"
  if [[ -e $STASIS_BUILD/lib/stasis/slurm/stasis.so ]]; then
    [[ -e $ROOT/usr/lib/stasis/slurm/stasis.so ]]
    assert_contains "$(control stasis-slurm-plugin Depends)" "stasis (= $version)"
    # That Slurm, and no other.
    local slurm
    slurm=$(dpkg-query -W -f '${Version}' libslurm-dev | grep -oE '^[0-9]+\.[0-9]+')
    assert_contains "$(control stasis-slurm-plugin Depends)" "slurmd (>= $slurm)"
    dpkg --compare-versions "$(control stasis-slurm-plugin Depends | sed -n 's/.*slurmd (<< \([^)]*\)).*/\1/p')" gt "$(dpkg-query -W -f '${Version}' libslurm-dev)"
  fi
  # What is compiled in tells its licence.
  zgrep -q '^==== libfmt-dev' "$ROOT/usr/share/doc/stasis/compiled-in-licences.txt.gz"
  zgrep -q '^==== pybind11-dev' "$ROOT/usr/share/doc/python3-stasis/compiled-in-licences.txt.gz"
  # What is licensed otherwise says so.
  grep -q '^License: GPL-2.0-or-later' "$ROOT/usr/share/doc/stasis-criu-plugin/copyright"
}

@test "every man page, completion and document is there, and nothing of the tests" {
  local page file
  for page in "$SOURCE"/docs/man/*; do
    page=${page##*/}
    [[ -s $ROOT/usr/share/man/man${page##*.}/$page.gz ]] || { echo "$page is missing" >&2; return 1; }
  done
  cmp "$SOURCE/docs/completions/stasis.bash" "$ROOT/usr/share/bash-completion/completions/stasis"
  cmp "$SOURCE/docs/completions/_stasis" "$ROOT"/usr/share/zsh/*/_stasis
  cmp "$SOURCE/docs/completions/stasis.fish" "$ROOT/usr/share/fish/vendor_completions.d/stasis.fish"
  cmp <(sed 's|(LICENSE)|(copyright)|' "$SOURCE/README.md") "$ROOT/usr/share/doc/stasis/README.md"
  cmp "$SOURCE/docs/errors.md" "$ROOT/usr/share/doc/stasis/docs/errors.md"
  assert_equal "$(cd "$ROOT/usr/bin" && ls | xargs)" "cuda-checkpoint stasis stasis-counter stasis-get-criu stasis-sim-smi stasis-task"
  cmp "$SOURCE/deploy/systemd/stasis-job@.service" "$ROOT/usr/lib/systemd/system/stasis-job@.service"
  # Slurm's plugin is compiled where it is to be used.
  assert_equal "$(find "$ROOT" -name '*workload*' -o -name '*.cc' ! -name stasis_spank.cc -o -name '*.a')" ""
  [[ -s $ROOT/usr/share/doc/stasis/deploy/slurm/spank/stasis_spank.cc && -s $ROOT/usr/share/doc/stasis/deploy/kubernetes/job.yaml ]]
  # Nothing runs with the rights of another.
  assert_equal "$(find "$ROOT" -perm /6000; getcap -r "$ROOT" 2>/dev/null || true)" ""
  # No path of this machine: neither of the source nor of the build folder.
  for file in $(find "$ROOT" -type f -perm -u+x) $(find "$ROOT" -name '*.so*' -type f); do
    ! readelf -d "$file" 2>/dev/null | grep -E 'R(UN)?PATH' || { echo "$file" >&2; return 1; }
  done
  ! grep -rlF "$STASIS_BUILD" "$ROOT/usr/lib/cmake" "$ROOT/usr/lib/pkgconfig" "$ROOT/usr/share" || return 1
}

# Each relative link of the pages below $1 that leads to nothing. The first line is the number of links.
dead_links() {
  python3 -S - "$1" <<'PY'
import os, re, sys
count, dead = 0, []
for folder, _, files in os.walk(sys.argv[1]):
    for name in files:
        if not name.endswith(".md"):
            continue
        with open(os.path.join(folder, name), encoding="utf-8") as page:
            text = re.sub(r"^ *```.*?^ *```", "", page.read(), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text):
            link = link[0] or link[1]
            if re.match(r"[a-z]+:|#", link):
                continue
            count += 1
            if not os.path.exists(os.path.join(folder, link.partition("#")[0])):
                dead.append(f"{os.path.join(folder, name)}: {link}")
print(count, *dead, sep="\n")
PY
}

@test "each relative link of an installed page leads to a file" {
  run dead_links "$ROOT/usr/share/doc"
  assert_equal "$status" 0
  ((lines[0] > 400))
  assert_equal "${lines[*]:1}" ""
  [[ -s $ROOT/usr/share/doc/stasis/docs/pictures/demo.svg && -x $ROOT/usr/share/doc/stasis/examples/two-servers/take-turns ]]
  # Without a home page what is not there is plain text, and nowhere is raw data.
  assert_equal "$(find "$ROOT/usr/share/doc" -path '*results*' ! -name '*.md' -type f)" ""
  ! grep -rlE '\]\([^):]*results/[^)]*\.(json|txt)\)' "$ROOT/usr/share/doc" || return 1
}

@test "links to what a package lacks lead to the home page, if it has one" {
  local folder=$BATS_TEST_TMPDIR/doc
  mkdir -p "$folder/docs/results"
  touch "$folder/copyright" "$folder/docs/there.md"
  local -r kFence='```'
  printf '%s\n' '[a](there.md#b), [*raw*](results/x.json#L3) and ![p](no.svg), [L](../LICENSE), [web](https://e.org/x)' \
    "${kFence}sh" '[a](b)' "$kFence" '`code` [`t`](../tests/t.py)' >"$folder/docs/page.md"
  cp -r "$folder" "$folder-2"
  "$SOURCE/packaging/links" "$folder" https://example.org/s/
  assert_equal "$(cat "$folder/docs/page.md")" '[a](there.md#b), [*raw*](https://example.org/s/blob/main/docs/results/x.json#L3) and ![p](https://example.org/s/blob/main/docs/no.svg), [L](../copyright), [web](https://e.org/x)
```sh
[a](b)
```
`code` [`t`](https://example.org/s/blob/main/tests/t.py)'
  run dead_links "$folder"
  assert_equal "${lines[*]}" 2
  "$SOURCE/packaging/links" "$folder-2"
  assert_equal "$(head -n 1 "$folder-2/docs/page.md")" '[a](there.md#b), *raw* and p, [L](../copyright), [web](https://e.org/x)'
}

# demo_runs COMMAND...: the demo of the installed files, by that command.
demo_runs() {
  local scratch=$BATS_TEST_TMPDIR/scratch
  mkdir -m 1777 "$scratch"
  run "$@" env TMPDIR="$scratch" "$ROOT/usr/share/stasis/tools/demo" --simulated --no-setup
  assert_equal "$status" 0 "status of: $output"
  assert_contains "$output" "It counted from 101 to 104, and lost nothing."
  assert_contains "$output" "The programs are in $ROOT/usr/bin. To go on"
  [[ $output != *"$STASIS_BUILD"* ]]
  assert_equal "$(ls -A "$scratch")" "" "left behind"
}

@test "the demo runs from the installed files, as root" {
  need_root "CRIU"
  unset STASIS_LIBCUDA STASIS_SIM_DIR STASIS_STATE_DIR
  demo_runs
}

@test "the demo runs from the installed files, as a user who has sudo" {
  need_root "a user is made for it"
  [[ $(real_criu) == /opt/stasis/* || $(real_criu) == /usr/* ]] || skip "the user is to have root's CRIU"
  make_user
  demo_runs as_user
}

@test "a CRIU that is missing is got by what the package has on PATH" {
  start_counter
  STASIS_CRIU=/no/such/criu refused 9 criu-missing dump "$TARGET" --images-dir "$image"
  assert_contains "$err" '`stasis-get-criu`'
  STASIS_CRIU=/no/such/criu capture stasis doctor
  assert_contains "$out" '`stasis-get-criu`'
  # It says of itself what it is called, and gives what the source gives.
  assert_contains "$(stasis-get-criu --help)" "Usage: stasis-get-criu "
  [[ $(stasis-get-criu --help) != *tools/get-criu* ]]
  assert_equal "$(stasis-get-criu --check 2>&1)" "$("$SOURCE/tools/get-criu" --check 2>&1 | sed 's,tools/get-criu,stasis-get-criu,')"
}

@test "stasis run finds the agent beside it, under any prefix" {
  start_counter stasis run --
  grep -q "$ROOT/usr/lib/stasis/libstasis-preload.so" "/proc/$TARGET/maps"
  done_by suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" direct
  gpu_is_free
  done_by resume "$TARGET"
  assert_equal "$(stasis-counter --ask "$port")" 101
}

# bats test_tags=long
@test "programs in C compile by pkg-config and by find_package, and find the library's helper" {
  local work=$BATS_TEST_TMPDIR/consumer place
  mkdir "$work" && cd "$work"
  sed -n '/^```c$/,/^```$/p' "$SOURCE/docs/c-api.md" | grep -v '^```' >main.c
  grep -q stasis_suspend main.c
  cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.22)
project(consumer LANGUAGES C)
find_package(stasis 0.2 REQUIRED)
add_executable(by-cmake main.c)
target_link_libraries(by-cmake PRIVATE stasis::stasis)
END
  cmake -S . -B . -DCMAKE_PREFIX_PATH="$ROOT/usr" >cmake.log && cmake --build . >>cmake.log || { cat cmake.log >&2; return 1; }
  export PKG_CONFIG_PATH=$ROOT/usr/lib/pkgconfig PKG_CONFIG_LIBDIR=/nowhere
  assert_equal "$(pkg-config --modversion stasis)" "$(stasis --version | grep -oE '[0-9]+\.[0-9]+\.[0-9]+' | head -n 1)"
  # shellcheck disable=SC2046
  cc -std=c11 -Wall -Wextra -Werror main.c -o by-pkg-config $(pkg-config --cflags --libs stasis)
  start_counter
  LD_LIBRARY_PATH=$ROOT/usr/lib capture ./by-pkg-config "$TARGET"
  assert_equal "$status $err" "0 "
  assert_contains "$out" "its GPU memory is free"
  # Where systems have their libraries elsewhere, the helper is still in lib/stasis.
  for place in lib64 lib/x86_64-linux-gnu; do
    mkdir -p "$work/usr/lib" "$work/usr/$place"
    cp -r "$ROOT/usr/lib/stasis" "$work/usr/lib/"
    cp -P "$ROOT"/usr/lib/libstasis.so.0* "$work/usr/$place/"
    LD_LIBRARY_PATH=$work/usr/$place capture ./by-cmake "$TARGET"
    assert_equal "$status $err" "0 " "from $place"
  done
  assert_equal "$(stasis-counter --ask "$port")" 101
  rm -r "$work/usr/lib/stasis"
  LD_LIBRARY_PATH=$work/usr/lib64 capture ./by-cmake "$TARGET"
  ((status != 0))
  assert_contains "$err" "stasis-driver-calls"
}

@test "Python has the package" {
  start_counter
  PYTHONPATH=$ROOT/usr/lib/python3/dist-packages LD_LIBRARY_PATH=$ROOT/usr/lib PYTHONDONTWRITEBYTECODE=1 \
    capture python3 -c 'import importlib.metadata, stasis, sys
print(stasis.__file__.startswith(sys.argv[1]), importlib.metadata.version("stasis") == stasis.__version__)
with stasis.Process(int(sys.argv[2])).suspended() as process: print(process.state)' "$ROOT" "$TARGET"
  assert_equal "$status $err" "0 "
  assert_equal "$out" $'True True\ncheckpointed\n'
  assert_equal "$(stasis-counter --ask "$port")" 101
}

# bats test_tags=long
@test "dpkg installs them, they run from /usr, and go without a trace" {
  need_root "a system of its own"
  local work=$BATS_TEST_TMPDIR/system
  mkdir -p "$work/layer" "$work/root"
  # This machine's own system with a layer on top, which takes what dpkg writes.
  mount -t tmpfs stasis-test "$work/layer" 2>/dev/null || skip "nothing can be mounted here"
  echo "$work/layer" >>"$BATS_TEST_TMPDIR/mounts"
  mkdir "$work/layer/upper" "$work/layer/work"
  mount -t overlay -o "lowerdir=/,upperdir=$work/layer/upper,workdir=$work/layer/work" stasis-test "$work/root" 2>/dev/null || skip "there is no overlay file system here"
  echo "$work/root" >>"$BATS_TEST_TMPDIR/mounts"
  mkdir "$work/root/debs"
  cp "$DEBS"/*.deb "$work/root/debs/"
  chroot_run() { unshare --mount bash -c 'mount --bind /proc "$1/proc" && mount --rbind /dev "$1/dev" && exec chroot "$@"' bash "$work/root" "$@" 3>&-; }
  capture chroot_run env -u STASIS_LIBCUDA PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -ec '
    dpkg -i /debs/*.deb
    /usr/bin/stasis --version
    ldconfig -p | grep libstasis.so.0
    python3 -c "import stasis; print(stasis.__file__)"
    ls /usr/lib/python3/dist-packages/stasis/__pycache__ | grep -c "^_core"
    export STASIS_LIBCUDA=/usr/lib/stasis/sim/libcuda.so.1 LD_LIBRARY_PATH=/usr/lib/stasis/sim STASIS_SIM_DIR=/sim
    mkdir /sim
    setsid stasis-counter --port 0 </dev/null >/counter.log 2>&1 &
    for i in $(seq 600); do ! grep -q listening /counter.log || break; sleep 0.1; done
    cuda-checkpoint --toggle --pid $!
    cuda-checkpoint --get-state --pid $!
    cuda-checkpoint --toggle --pid $!
    kill -9 $!
    test -e /usr/lib/criu/cuda_plugin.so
    dpkg -P '"$kPackages"'
    echo "installed until here"
    find /usr/lib/python3/dist-packages/stasis* /usr/lib/stasis /usr/lib/libstasis* /usr/share/stasis /usr/share/doc/stasis* /usr/bin/stasis* /usr/bin/cuda-checkpoint /usr/lib/criu/cuda_plugin.so /usr/include/stasis 2>/dev/null || true
    echo "nothing else"
  '
  ((status == 0)) || { printf '%s%s' "$out" "$err" >&2; return 1; }
  assert_contains "$out" "libstasis.so.0 (libc6,x86-64) => /lib/libstasis.so.0"
  assert_contains "$out" $'/usr/lib/python3/dist-packages/stasis/__init__.py\n1\n'
  assert_contains "$out" $'\ncheckpointed\n'
  assert_equal "$(sed '1,/^installed until here$/d' <<<"$out" | grep '^/usr')" "" "left behind"
  assert_contains "$out" $'\nnothing else\n'
}
