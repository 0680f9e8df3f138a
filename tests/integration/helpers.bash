# Common to the command-line tests: where the programs are, the simulated driver, targets to act on,
# and the end of everything that a test has started.
#
# A file of tests begins with
#   load helpers
#   setup() { setup_driver; }
#   teardown() { end_targets; }
#
# With STASIS_TEST_DRIVER=real the same tests run on the real driver of this machine; those that
# need something that only the simulated one can do call `need_simulated` first.
: "${STASIS_BUILD:?the build folder}"
# For a bats that makes no folders (run_bats): one for each of its processes, which is one for each test.
if [[ -z ${BATS_TEST_TMPDIR:-} || ${FOLDER_IS_OF:-$$} != "$$" ]]; then
  BATS_TEST_TMPDIR=$(mktemp -d "${BATS_FILE_TMPDIR:?run it by run_bats}/test.XXXXXX")
  export BATS_TEST_TMPDIR FOLDER_IS_OF=$$
  chmod 755 "$BATS_TEST_TMPDIR"
fi
# shellcheck source=tests/integration/cheap_trace.bash
source "${BASH_SOURCE[0]%/*}/cheap_trace.bash"

# Gives the test its own GPUs and its own state directory, both empty.
setup_driver() {
  PATH=$STASIS_BUILD/bin:$PATH
  targets=$BATS_TEST_TMPDIR/targets
  : >"$targets"
  export STASIS_STATE_DIR=$BATS_TEST_TMPDIR/state
  if [[ ${STASIS_TEST_DRIVER:-simulated} == real ]]; then
    unset STASIS_LIBCUDA STASIS_SIM_DIR
    return
  fi
  export STASIS_SIM_DIR=$BATS_TEST_TMPDIR/sim
  # Of 64 MiB most of the processor time of a suspend of little goes into taking it and giving it back.
  export STASIS_RING=${test_ring:-2M}
  export STASIS_LIBCUDA=$STASIS_BUILD/lib/stasis/sim/libcuda.so.1
  mkdir -p "$STASIS_SIM_DIR"
  [[ -e $STASIS_LIBCUDA ]] || {
    echo "there is no simulated driver at $STASIS_LIBCUDA" >&2
    return 1
  }
}

need_simulated() {
  [[ ${STASIS_TEST_DRIVER:-simulated} == simulated ]] || skip "needs the simulated driver: $1"
}

need_root() {
  [[ $(id -u) == 0 ]] || skip "needs root: $1"
}

# A memory cgroup with a limit of that many bytes; its directory in $CGROUP. Removed at the end.
make_memory_cgroup() {
  local base
  for base in /sys/fs/cgroup/memory /sys/fs/cgroup; do
    CGROUP=$base/stasis-test-${BATS_RUN_TMPDIR##*/}-$BATS_TEST_NUMBER
    mkdir "$CGROUP" 2>/dev/null || continue
    if limit_cgroup "$1"; then
      cgroups+=("$CGROUP")
      return 0
    fi
    rmdir "$CGROUP"
  done
  skip "no memory cgroup can be made on this machine"
}

limit_cgroup() {
  { echo "$1" >"$CGROUP/memory.limit_in_bytes" || echo "$1" >"$CGROUP/memory.max"; } 2>/dev/null
}

# Replaces this shell by a program on the driver under test. For a command in the foreground put it
# in brackets: (exec_on_gpu stasis-workload idle --rounds 1).
exec_on_gpu() {
  if [[ -n ${STASIS_LIBCUDA:-} ]]; then
    export LD_LIBRARY_PATH=${STASIS_LIBCUDA%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  fi
  exec "$@"
}

# times FEW MANY: how often a thing is done again and again; MANY where tools/test --all asks for all tests.
times() { echo $((${STASIS_ALL_TESTS:-0} ? $2 : $1)); }
# sometimes WORD...: nothing, or where tools/test --all asks for all tests the words: kinds that take the same way as another.
sometimes() { [[ ${STASIS_ALL_TESTS:-0} == 0 ]] || echo "$@"; }

# start_target KIND [ARGUMENT...]: starts a self-verifying workload in a session of its own, waits
# until it has finished its first round, and sets TARGET to its process number. Its output goes to
# $TARGET_LOG, its record of rounds to $TARGET_STATUS. An environment for it alone goes in front:
#   CUDA_VISIBLE_DEVICES=1 start_target memory
start_target() {
  local n
  n=$(wc -l <"$targets")
  TARGET_LOG=$BATS_TEST_TMPDIR/target-$n.log
  TARGET_STATUS=$BATS_TEST_TMPDIR/target-$n.status
  (exec_on_gpu setsid stasis-workload "$@" --status "$TARGET_STATUS") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up || {
    echo "the target ($*) did not come up:" >&2
    cat "$TARGET_LOG" >&2
    return 1
  }
}

# Asked fifty times a second, so without a program.
target_is_up() {
  local word='' number=''
  { read -r word number _ <"$TARGET_STATUS"; } 2>/dev/null || true
  [[ $word == round && $number =~ ^0*[1-9] ]]
}

# The number of the last round that the target has verified.
target_round() {
  local word='' number=''
  read -r word number _ <"${1:-$TARGET_STATUS}" || [[ -e ${1:-$TARGET_STATUS} ]] || return
  [[ $word != round || ! $number =~ ^[0-9]+$ ]] || echo "$((10#$number))"
}

# The target goes on verifying rounds: the proof that it runs and that nothing was lost.
target_goes_on() {
  local before
  before=$(target_round)
  wait_until 60 target_is_past $((before + 1)) || {
    echo "the target stands still at round $before:" >&2
    cat "$TARGET_LOG" >&2
    return 1
  }
}

target_is_past() {
  local word='' number=''
  { read -r word number _ <"$TARGET_STATUS"; } 2>/dev/null || true
  [[ $word == round && $number =~ ^[0-9]+$ ]] && ((10#$number > $1))
}

# Ends the target as its user would, and requires that all of its rounds were right.
target_verifies() {
  kill -TERM "$TARGET"
  local status=0
  wait "$TARGET" || status=$?
  ((status == 0)) && grep -q '^verified' "$TARGET_LOG" && return
  echo "the target ended with status $status:" >&2
  cat "$TARGET_LOG" >&2
  return 1
}

# wait_until SECONDS COMMAND...: until the command succeeds.
wait_until() {
  local deadline=$((SECONDS + $1)) tries=0
  shift
  until "$@"; do
    ((SECONDS <= deadline)) || return 1
    # What takes long is asked less often: the asking starts programs, and others need the processors.
    nap $((++tries < 10 ? 2 : 5))
  done
}

# has_text TEXT FILE...: one of the files has it. Asked fifty times a second, so without a program.
has_text() {
  local text=$1 file parts
  shift
  for file; do
    parts=() # between bytes 0, which a file has that was emptied while a program writes it
    { mapfile -d '' parts <"$file"; } 2>/dev/null || true
    [[ ${parts[*]} != *"$text"* ]] || return 0
  done
  return 1
}

# nap [HUNDREDTHS]: 20 ms. Starting a program for it takes a tenth of that time of a processor, which the tests that run beside
# need. The pipe is open only for that time: what a test starts does not inherit it.
nap() {
  local pipe=$BATS_RUN_TMPDIR/nap nothing
  [[ -p $pipe ]] || mkfifo "$pipe" 2>/dev/null || { sleep 0.02; return; }
  read -rt "0.0${1:-2}" nothing <>"$pipe" || true
}

# Kills every target with all that it has started. Each has a process group of its own.
end_targets() {
  local pid
  while read -r pid; do
    kill -KILL -- "-$pid" 2>/dev/null || kill -KILL "$pid" 2>/dev/null || true
  done <"$targets"
  wait 2>/dev/null || true
  for pid in ${cgroups+"${cgroups[@]}"}; do rmdir "$pid" 2>/dev/null || true; done
}

# Runs a command and keeps its standard output, standard error and status apart, exactly, in $out,
# $err and $status. Trailing newlines are kept, as "$" at the end of the text would show.
capture() {
  local parts
  status=0
  "$@" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- || status=$?
  # Without the zeros in it, which no variable holds, and without a program for it.
  mapfile -d '' -t parts <"$BATS_TEST_TMPDIR/out"
  printf -v out %s "${parts[@]}"
  mapfile -d '' -t parts <"$BATS_TEST_TMPDIR/err"
  printf -v err %s "${parts[@]}"
}

# assert_equal ACTUAL EXPECTED [WHAT]
assert_equal() {
  [[ $1 == "$2" ]] && return
  printf '%s\n  is:       %q\n  expected: %q\n' "${3:-value}" "$1" "$2" >&2
  return 1
}

# assert_contains TEXT PART...: all of them.
assert_contains() {
  local part
  for part in "${@:2}"; do
    [[ $1 != *"$part"* ]] || continue
    printf 'text\n  is:      %q\n  without: %q\n' "$1" "$part" >&2
    return 1
  done
}

# Changes the byte at an offset of a file, whatever it was.
spoil_byte() {
  python3 -IS - "$1" "$2" <<'EOF'
import sys
with open(sys.argv[1], "r+b") as file:
    file.seek(int(sys.argv[2]))
    byte = file.read(1)[0]
    file.seek(-1, 1)
    file.write(bytes([byte ^ 0xFF]))
EOF
}
