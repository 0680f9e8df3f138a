#!/usr/bin/env bats
# cuda-checkpoint, case by case as NVIDIA's utility was seen to behave (driver 580.159.04). P is a
# CUDA process, running unless said; S one without CUDA.
# Long because it is a list, with the cases of NVIDIA's utility one after the other.

load helpers

setup() { setup_driver; }
teardown() { end_targets; }

# --- What the tests ask for.

# answers TEXT COMMAND...: that on standard output, nothing on standard error, success.
answers() {
  local expected=$1
  shift
  capture "$@"
  assert_equal "$err" "" "standard error"
  assert_equal "$out" "$expected" "standard output"
  assert_equal "$status" 0 "status"
}

# refuses LINE COMMAND...: nothing on standard output, that as the first line of standard error,
# status 1.
refuses() {
  local expected=$1
  shift
  capture "$@"
  assert_equal "$out" "" "standard output"
  assert_equal "${err%%$'\n'*}" "$expected" "first line of standard error"
  assert_equal "$status" 1 "status"
}

# As `refuses`, with the reason and the remedy below.
refuses_with_hint() {
  refuses "$@"
  assert_contains "$err" $'\nreason: '
  assert_contains "$err" $'\nhint: '
}

# As `refuses`, then an empty line and the whole help.
refuses_usage() {
  local expected=$1
  refuses "$@"
  assert_equal "$err" "$expected"$'\n\n'"$(cuda-checkpoint --help)"$'\n' "standard error"
}

state() { cuda-checkpoint --get-state --pid "$TARGET"; }

in_state() { assert_equal "$(state)" "$1" "state"; }

act() { cuda-checkpoint --action "$1" --pid "$TARGET"; }

illegal='"the operation cannot be performed in the present state"'
os_failed='"OS call failed or operation not supported on this OS"'

# A number that no process has.
unused_pid() {
  local pid
  pid=$(($(</proc/sys/kernel/pid_max) - 3))
  while [[ -e /proc/$pid ]]; do pid=$((pid - 1)); done
  echo "$pid"
}

# A process that has ended and that its parent does not collect: sets ZOMBIE.
start_zombie() {
  python3 -IS -c '
import os, sys, time
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(pid, flush=True)
time.sleep(600)' </dev/null >"$BATS_TEST_TMPDIR/zombie" 2>&1 3>&- &
  echo $! >>"$targets"
  wait_until 60 test -s "$BATS_TEST_TMPDIR/zombie"
  ZOMBIE=$(<"$BATS_TEST_TMPDIR/zombie")
}

# A target whose GPU is never idle: one kernel of ten seconds after the other, and the first of them under way.
start_busy_target() { start_target spin --busy-ms 10000 --pause-ms 0; }

a_thread_of() {
  ls "/proc/$1/task" | grep -vx "$1" | head -n 1
}

# The UUIDs of all GPUs, in the driver's order.
gpu_uuids() {
  python3 -IS -c '
import ctypes, os
cuda = ctypes.CDLL(os.environ.get("STASIS_LIBCUDA", "libcuda.so.1"))
assert cuda.cuInit(0) == 0
count = ctypes.c_int()
assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for i in range(count.value):
    raw = (ctypes.c_ubyte * 16)()
    assert cuda.cuDeviceGetUuid_v2(raw, i) == 0
    h = bytes(raw).hex()
    print(f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}")'
}

# --- The command line

@test "without an operation it is refused" {
  refuses_usage "No operation selected" cuda-checkpoint
  refuses_usage "No operation selected" cuda-checkpoint --pid $$
}

@test "the help names the utility and its version, and the simulated GPU" {
  capture cuda-checkpoint --help
  assert_equal "$status" 0
  assert_equal "$err" ""
  assert_equal "${out%%$'\n'*}" "CUDA checkpoint and restore utility."
  local second
  second=$(sed -n 2p <<<"$out")
  assert_contains "$second" "Version "
  if [[ -n ${STASIS_LIBCUDA:-} ]]; then assert_contains "$second" "simulated GPU"; fi
  local long=$out
  capture cuda-checkpoint -h
  assert_equal "$out" "$long"
}

@test "without a process number it is refused" {
  local missing="Missing pid to perform operation on"
  refuses_usage "$missing" cuda-checkpoint --get-state
  refuses_usage "$missing" cuda-checkpoint --toggle
  refuses_usage "$missing" cuda-checkpoint --get-restore-tid
  # The action is "--pid" here.
  refuses_usage "$missing" cuda-checkpoint --action --pid $$
}

@test "a process number that is none is refused" {
  local pid
  for pid in x -5 "" "12 " 0x10; do
    refuses_usage "pid must be a non-negative integer" cuda-checkpoint --get-state --pid "$pid"
  done
}

@test "two operations are refused" {
  local many="Too many operations selected"
  refuses_usage "$many" cuda-checkpoint --toggle --get-state
  refuses_usage "$many" cuda-checkpoint --toggle --get-state --pid $$
  refuses_usage "$many" cuda-checkpoint --action lock --get-restore-tid --pid $$
}

@test "an unknown action is refused" {
  refuses_usage "Invalid process state" cuda-checkpoint --action fly --pid $$
}

@test "an unknown option is named by getopt, then refused" {
  local line name
  name=$(command -v cuda-checkpoint)
  for line in "unrecognized option '--bogus'=--bogus" "invalid option -- 'z'=-z"; do
    refuses "$name: ${line%=*}" "$name" "${line##*=}" --pid $$
    assert_equal "$(sed -n 2p <<<"$err")" \
      "Invalid option(s) or option(s) not supported by this CUDA Driver"
    assert_equal "$(tail -n +4 <<<"$err")" "$("$name" --help)"
  done
  # The name is the one that it was called by.
  ln -s "$name" "$BATS_TEST_TMPDIR/mine"
  refuses "$BATS_TEST_TMPDIR/mine: unrecognized option '--bogus'" "$BATS_TEST_TMPDIR/mine" --bogus
}

@test "a device map goes with restore, a time-out with lock" {
  refuses_usage "Device remap only allowed for restore action" \
    cuda-checkpoint --action lock --pid $$ --device-map x=y
  refuses_usage "Device remap only allowed for restore action" \
    cuda-checkpoint --toggle --pid $$ -d x=y
  refuses_usage "Timeout is only valid for --action lock operation" \
    cuda-checkpoint --action unlock --pid $$ --timeout 5
  refuses_usage "Timeout is only valid for --action lock operation" \
    cuda-checkpoint --get-state --pid $$ -t 5
}

@test "a device map of another form is refused" {
  local map
  for map in x=y "" GPU-0=GPU-1 0=1; do
    refuses_usage "Invalid device remap" cuda-checkpoint --action restore --pid $$ -d "$map"
  done
}

@test "a time-out that is no number is refused, and not taken for 0" {
  refuses_usage "timeout must be a non-negative integer" \
    cuda-checkpoint --action lock --pid $$ -t x
  refuses_usage "timeout must be a non-negative integer" \
    cuda-checkpoint --action lock --pid $$ -t -1
  refuses_usage "timeout must not be larger than 4294967295 milliseconds" \
    cuda-checkpoint --action lock --pid $$ -t 4294967296
}

@test "options are spelled as getopt_long allows" {
  start_target idle
  local P=$TARGET
  answers $'running\n' cuda-checkpoint --get-state --pid="$P"
  answers $'running\n' cuda-checkpoint --get-state -p "$P"
  answers $'running\n' cuda-checkpoint --get-state -p"$P"
  answers $'running\n' cuda-checkpoint --get-s --pi "$P"
  answers $'running\n' cuda-checkpoint --pid "$P" extra --get-state words
  answers $'running\n' cuda-checkpoint --get-state --pid 1 --pid "$P"
}

# --- Questions

@test "the state of a CUDA process, in each state" {
  start_target memory
  answers $'running\n' cuda-checkpoint --get-state --pid "$TARGET"
  answers "" cuda-checkpoint --action lock --pid "$TARGET"
  answers $'locked\n' cuda-checkpoint --get-state --pid "$TARGET"
  answers "" cuda-checkpoint --action checkpoint --pid "$TARGET"
  answers $'checkpointed\n' cuda-checkpoint --get-state --pid "$TARGET"
  answers "" cuda-checkpoint --action restore --pid "$TARGET"
  answers $'locked\n' cuda-checkpoint --get-state --pid "$TARGET"
  answers "" cuda-checkpoint --action unlock --pid "$TARGET"
  answers $'running\n' cuda-checkpoint --get-state --pid "$TARGET"
  target_goes_on
  target_verifies
}

@test "the restore thread is a thread of the process" {
  start_target idle
  capture cuda-checkpoint --get-restore-tid --pid "$TARGET"
  assert_equal "$status" 0
  [[ $out =~ ^[0-9]+$'\n'$ ]]
  [[ -d /proc/$TARGET/task/${out%$'\n'} ]]
  [[ ${out%$'\n'} != "$TARGET" ]]
}

@test "a process without CUDA has no state, no restore thread and no lock" {
  start_target none
  local S=$TARGET
  refuses_with_hint "Error getting process state for process ID $S: \"initialization error\"" \
    cuda-checkpoint --get-state --pid "$S"
  refuses_with_hint "Could not find restore thread for process ID $S" \
    cuda-checkpoint --get-restore-tid --pid "$S"
  refuses_with_hint "Could not lock on process ID $S: \"initialization error\"" \
    cuda-checkpoint --action lock --pid "$S"
  refuses_with_hint "Error toggling CUDA in process ID $S: \"initialization error\"" \
    cuda-checkpoint --toggle --pid "$S"
}

@test "a zombie has no state" {
  start_zombie
  refuses_with_hint \
    "Error getting process state for process ID $ZOMBIE: \"initialization error\"" \
    cuda-checkpoint --get-state --pid "$ZOMBIE"
  assert_contains "$err" "has exited"
}

@test "no such process, and process 0" {
  local N
  for N in "$(unused_pid)" 0; do
    refuses_with_hint "Error getting process state for process ID $N: $os_failed" \
      cuda-checkpoint --get-state --pid "$N"
    refuses_with_hint "Could not find restore thread for process ID $N" \
      cuda-checkpoint --get-restore-tid --pid "$N"
    refuses_with_hint "Could not lock on process ID $N: $os_failed" \
      cuda-checkpoint --action lock --pid "$N"
    refuses_with_hint "Error toggling CUDA in process ID $N: $os_failed" \
      cuda-checkpoint --toggle --pid "$N"
  done
}

@test "a number too large for a process is not cut down to another process" {
  start_target idle
  # Cut down to 32 bits, this would be the target.
  local large=$((TARGET + 4294967296))
  refuses_with_hint "Error getting process state for process ID $large: $os_failed" \
    cuda-checkpoint --get-state --pid "$large"
  refuses_with_hint "Could not lock on process ID $large: $os_failed" \
    cuda-checkpoint --action lock --pid "$large"
  refuses_with_hint "Error getting process state for process ID 99999999999: $os_failed" \
    cuda-checkpoint --get-state --pid 99999999999
  in_state running
}

@test "a thread's number is refused, and its process named" {
  start_target idle
  local T
  T=$(a_thread_of "$TARGET")
  [[ -n $T ]]
  refuses_with_hint "Error getting process state for process ID $T: $os_failed" \
    cuda-checkpoint --get-state --pid "$T"
  assert_contains "$err" "thread of process $TARGET"
  refuses_with_hint "Could not lock on process ID $T: $os_failed" \
    cuda-checkpoint --action lock --pid "$T"
  in_state running
}

@test "another user's process is not permitted" {
  need_root "to become another user"
  start_target idle
  chmod 711 "$BATS_TEST_TMPDIR"
  refuses_with_hint "Error getting process state for process ID $TARGET: $os_failed" \
    setpriv --reuid 65534 --regid 65534 --clear-groups \
    "$(command -v cuda-checkpoint)" --get-state --pid "$TARGET"
  assert_contains "$err" "not permitted"
  assert_contains "$err" "CAP_SYS_PTRACE"
}

# --- Actions

@test "every action in every wrong state is refused and changes nothing" {
  start_target idle
  local wrong action
  wrong_actions() {
    for action in "$@"; do
      refuses_with_hint "Could not $action on process ID $TARGET: $illegal" \
        cuda-checkpoint --action "$action" --pid "$TARGET"
    done
  }
  wrong_actions checkpoint restore unlock
  in_state running
  act lock
  wrong_actions lock restore
  in_state locked
  act checkpoint
  wrong_actions lock checkpoint unlock
  in_state checkpointed
  act restore
  act unlock
  target_verifies
}

@test "a lock that times out leaves the process running" {
  start_busy_target
  refuses_with_hint "Could not lock on process ID $TARGET: \"device not ready\"" \
    cuda-checkpoint --action lock --pid "$TARGET" --timeout 100
  in_state running
  # Without a limit it waits for the kernel to end.
  answers "" cuda-checkpoint --action lock --pid "$TARGET"
  in_state locked
  act unlock
}

@test "a checkpoint with managed memory is refused, and the process runs on once unlocked" {
  start_target managed
  act lock
  refuses_with_hint "Could not checkpoint on process ID $TARGET: \"operation not supported\"" \
    cuda-checkpoint --action checkpoint --pid "$TARGET"
  in_state locked
  assert_contains "$err" "--action unlock --pid $TARGET"
  act unlock
  target_goes_on
  target_verifies
}

@test "a map that does not name every GPU is refused, and a plain restore still works" {
  need_simulated "a machine with two GPUs"
  export STASIS_SIM_GPUS=2x1G
  start_target memory
  local uuids
  mapfile -t uuids < <(gpu_uuids)
  ((${#uuids[@]} == 2))
  local a=${uuids[0]} b=${uuids[1]} map
  act lock
  act checkpoint
  for map in "$a=$b" "$a=$a" "$a=$b,$b=$b" "$a=$b,$a=$a" "$a=$b,$b=$a,$a=$a"; do
    refuses_with_hint "Could not restore on process ID $TARGET: \"invalid argument\"" \
      cuda-checkpoint --action restore --pid "$TARGET" --device-map "$map"
    in_state checkpointed
  done
  act restore
  act unlock
  target_goes_on
  # The whole bijection moves it.
  act lock
  act checkpoint
  answers "" cuda-checkpoint --action restore --pid "$TARGET" -d "$a=$b,$b=$a"
  act unlock
  target_goes_on
  target_verifies
}

# --- Toggle

@test "toggle goes there and back" {
  start_target memory
  answers "" cuda-checkpoint --toggle --pid "$TARGET"
  in_state checkpointed
  answers "" cuda-checkpoint --toggle --pid "$TARGET"
  in_state running
  target_goes_on
  target_verifies
}

@test "toggle of a locked process is refused and leaves it locked" {
  start_target idle
  act lock
  refuses_with_hint "Error toggling CUDA in process ID $TARGET: $illegal" \
    cuda-checkpoint --toggle --pid "$TARGET"
  in_state locked
}

# NVIDIA's leaves it locked.
@test "toggle of a process with managed memory leaves it running" {
  start_target managed
  refuses_with_hint "Error toggling CUDA in process ID $TARGET: \"operation not supported\"" \
    cuda-checkpoint --toggle --pid "$TARGET"
  assert_contains "$err" "process $TARGET is running now"
  in_state running
  target_goes_on
  target_verifies
}

# catches_signals PID: the utility has begun, and SIGINT does not just end it any more.
catches_signals() {
  [[ $(<"/proc/$1/comm") == cuda-checkpoint ]] && ((16#$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status") & 2))
}

@test "a signal while toggle waits for the GPU leaves the process running" {
  local signal expected
  for signal in INT TERM; do
    expected=$([[ $signal == INT ]] && echo 130 || echo 143)
    start_busy_target
    # A job in the background of a script ignores SIGINT unless told otherwise.
    env --default-signal=INT cuda-checkpoint --toggle --pid "$TARGET" \
      >"$BATS_TEST_TMPDIR/toggle" 2>&1 3>&- &
    local tool=$!
    wait_until 60 catches_signals "$tool"
    kill -"$signal" "$tool"
    status=0
    wait "$tool" || status=$?
    assert_equal "$status" "$expected" "status"
    assert_contains "$(<"$BATS_TEST_TMPDIR/toggle")" "stopped by signal"
    in_state running
    # A locked one would get no further than to the end of its kernel.
    wait_until 60 target_is_past "$(target_round)"
    end_targets
  done
}

@test "a toggle that was killed is brought back by toggling once more or by unlock" {
  start_busy_target
  env --default-signal=INT cuda-checkpoint --toggle --pid "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$! before
  wait_until 60 catches_signals "$tool"
  before=$(target_round)
  kill -KILL "$tool"
  wait "$tool" || true
  # The lock may come after the tool's end, when the kernel ends; whatever the state is, there is a way back.
  kernel_is_over() { target_is_past "$before" || [[ $(state) != running ]]; }
  wait_until 60 kernel_is_over
  case $(state) in
    running) ;;
    locked) act unlock ;;
    checkpointed) cuda-checkpoint --toggle --pid "$TARGET" ;;
  esac
  in_state running
  wait_until 60 target_is_past "$(target_round)"
}

# --- Jobs, and drivers of other versions

@test "launch-job is unknown to driver 580" {
  need_simulated "a driver of a certain version"
  local name
  name=$(command -v cuda-checkpoint)
  STASIS_SIM_DRIVER_VERSION=580 refuses "$name: unrecognized option '--launch-job'" \
    "$name" --launch-job true
  STASIS_SIM_DRIVER_VERSION=580 refuses "$name: invalid option -- 'j'" "$name" -j true
  capture cuda-checkpoint --help
  [[ $out != *launch-job* ]]
}

@test "launch-job is refused with the reason where the driver has jobs, and runs nothing" {
  need_simulated "a driver of a certain version"
  export STASIS_SIM_DRIVER_VERSION=590
  refuses_with_hint "Could not launch touch as a job" \
    cuda-checkpoint --launch-job touch "$BATS_TEST_TMPDIR/launched"
  [[ ! -e $BATS_TEST_TMPDIR/launched ]]
}

@test "device-map is unknown to driver 570" {
  need_simulated "a driver of a certain version"
  export STASIS_SIM_DRIVER_VERSION=570
  refuses "$(command -v cuda-checkpoint): unrecognized option '--device-map'" \
    "$(command -v cuda-checkpoint)" --action restore --pid $$ --device-map x=y
}

@test "a driver that is too old is named" {
  need_simulated "a driver of a certain version"
  export STASIS_SIM_DRIVER_VERSION=565
  capture cuda-checkpoint --get-state --pid $$
  assert_equal "$status" 1
  assert_equal "$out" ""
  assert_contains "$err" "570"
  assert_contains "$err" $'\nhint: '
}

@test "what an agent says the driver would lose is not checkpointed, and the program goes on" {
  LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so start_target collective --children 2 --size 4M --pause-ms 2 --sharing
  local rank
  read -r rank _ < <(pgrep -P "$TARGET" | xargs)
  refuses_with_hint "Error toggling CUDA in process ID $rank: \"OS call failed or operation not supported on this OS\"" \
    cuda-checkpoint --toggle --pid "$rank"
  assert_contains "$err" "shared with other processes"
  answers $'running\n' cuda-checkpoint --get-state --pid "$rank"
  cuda-checkpoint --action lock --pid "$rank"
  refuses_with_hint "Could not checkpoint on process ID $rank: \"OS call failed or operation not supported on this OS\"" \
    cuda-checkpoint --action checkpoint --pid "$rank"
  cuda-checkpoint --action unlock --pid "$rank"
  target_goes_on
}

@test "a lone process that may have memory of another's is warned of, and no hint promises that it comes back" {
  start_target ipc
  TARGET=$(pgrep -P "$TARGET")
  cuda-checkpoint --action lock --pid "$TARGET" 2>"$BATS_TEST_TMPDIR/said"
  assert_contains "$(<"$BATS_TEST_TMPDIR/said")" "warning: process $TARGET has 1 piece of GPU memory"
  assert_contains "$(<"$BATS_TEST_TMPDIR/said")" "may be another process's"
  answers "" cuda-checkpoint --action checkpoint --pid "$TARGET"
  refuses_with_hint "Could not restore on process ID $TARGET: \"invalid argument\"" \
    cuda-checkpoint --action restore --pid "$TARGET"
  assert_contains "$err" "as long as the driver refuses to restore it, nothing lets it run"
  [[ $err != *"--toggle"* ]]
  refuses_with_hint "Could not unlock on process ID $TARGET: $illegal" cuda-checkpoint --action unlock --pid "$TARGET"
  assert_contains "$err" "\`stasis recover $TARGET\` makes it run again, unless the driver refuses to restore it"
  assert_contains "$err" "\`cuda-checkpoint --toggle --pid $TARGET\` lets it run, unless the driver refuses to restore it"
  refuses_with_hint "Error toggling CUDA in process ID $TARGET: \"invalid argument\"" \
    cuda-checkpoint --toggle --pid "$TARGET"
  assert_contains "$err" "nothing lets it run"
}

@test "a driver that is missing is named" {
  STASIS_LIBCUDA=$BATS_TEST_TMPDIR/libcuda.so.1 capture cuda-checkpoint --get-state --pid $$
  assert_equal "$status" 1
  assert_equal "$out" ""
  assert_contains "$err" "$BATS_TEST_TMPDIR/libcuda.so.1"
  assert_contains "$err" $'\nhint: '
}

@test "an answer that cannot be written is a failure" {
  start_target idle
  run bash -c "cuda-checkpoint --get-state --pid $TARGET >/dev/full"
  assert_equal "$status" 1
}

@test "what a process calls itself does not command the terminal" {
  mkdir "$BATS_TEST_TMPDIR/bin"
  ln -s "$(command -v stasis-workload)" "$BATS_TEST_TMPDIR/bin/"$'\e[31mred'
  (exec_on_gpu setsid "$BATS_TEST_TMPDIR/bin/"$'\e[31mred' memory --size 1M --status "$BATS_TEST_TMPDIR/status") \
    </dev/null >"$BATS_TEST_TMPDIR/log" 2>&1 3>&- &
  TARGET=$! TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  kill -STOP "$TARGET"
  wait_until 10 grep -q '^State:.*stopped' "/proc/$TARGET/status"
  capture cuda-checkpoint --get-state --pid "$TARGET"
  kill -CONT "$TARGET"
  assert_contains "$err" "[31mred) is stopped"
  [[ $err != *$'\e'* ]]
}
