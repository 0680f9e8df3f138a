#!/usr/bin/env bats
# Memory that programs with the agent share by CUDA IPC, on the simulated driver.

load helpers
load stasis_lib
load agent_target_lib

# open_there, closed_there: another process has TARGET's memory open by CUDA IPC, or not any more.
open_there() { touch "$go"; wait_until 60 test -s "$go.done"; }
closed_there() {
  local done
  rm "$go"
  for done in "$go".done*; do wait_until 60 test ! -e "$done"; done
  wait_until 60 none_has_it
}
none_has_it() { [[ -z $(told_of_sharing) ]]; }

# What the doctor finds before a tool tries.
told_of_sharing() {
  capture stasis doctor "$TARGET" --no-trial --json
  json "' '.join({f['light'] for f in d['processes'] if f['id'] == 'shared-gpu-memory'})"
}

@test "memory shared by CUDA IPC leaves and comes back, open in a child and not" {
  go=$BATS_TEST_TMPDIR/go
  start_doing share "$go"
  cycle_by direct
  for _ in 1 2; do
    open_there
    assert_equal "$(told_of_sharing)" "green"
    # What another has open leaves as well, between two halves of the agents' work.
    cycle_by direct
    # By itself its child would be lost, and so would what the two share.
    refused 8 not-supported suspend "$(pgrep -P "$TARGET")"
    assert_contains "$err" "outside of the tree"
    target_goes_on
    refused 8 not-supported suspend "$TARGET" --path driver
    closed_there
    cycle_by direct
  done
  open_there
  pkill -KILL -P "$TARGET"
  # The agent learns of it by the end of a connection.
  wait_until 30 none_has_it
  cycle_by direct
  target_verifies
}

# opened_at POINT VERB ARGUMENT...: the child opens TARGET's memory while the tool is at that point. The tool's status in
# $status, what it says in $err.
opened_at() {
  local point=$1 tool
  shift
  STASIS_FAULT=$point:stop timeout -k 5 120 stasis "$@" >"$BATS_TEST_TMPDIR/late.out" 2>"$BATS_TEST_TMPDIR/late.err" 3>&- &
  tool=$!
  wait_until 60 stopped_below "$tool"
  open_there
  kill -CONT "$(pgrep -P "$tool")"
  status=0
  wait "$tool" || status=$?
  err=$(<"$BATS_TEST_TMPDIR/late.err")
}
@test "memory that a process opens when the agents were asked already is not lost" {
  go=$BATS_TEST_TMPDIR/go
  start_doing share "$go"
  opened_at direct.prepared suspend "$TARGET"
  ((status == 0)) || { echo "$err" >&2; return 1; }
  assert_contains "$err" "has begun to share GPU memory"
  done_by resume "$TARGET"
  target_goes_on
  closed_there
  # The driver is asked once nothing more is opened.
  opened_at lock.before suspend "$TARGET" --path driver
  assert_equal "$status" 8
  assert_contains "$err" "leave --path driver out"
  in_state running
  target_goes_on
  cycle_by direct
  target_verifies
}

@test "memory that a process opens when a dump has asked the agents already is dumped and restored" {
  need_root "CRIU"
  go=$BATS_TEST_TMPDIR/go
  start_doing share "$go"
  opened_at direct.prepared dump "$TARGET" --images-dir "$image"
  ((status == 0)) || { echo "$err" >&2; return 1; }
  wait_until 60 number_is_free
  restore_it
  target_goes_on
  restored_verifies
}

# open_beside COUNT: so many processes that are none of TARGET's, and have agents, open what it shares
# when they are told to. Sets OPENERS.
open_beside() {
  local number
  OPENERS=()
  for ((number = 0; number < $1; ++number)); do
    (LD_PRELOAD=$agent exec_on_gpu setsid stasis-agent-target open-shared "$go.done.$number" "$go") \
      </dev/null >"$BATS_TEST_TMPDIR/opener.$number" 2>&1 3>&- &
    OPENERS+=($!)
    at_end_kill "$!"
  done
}

@test "a small piece, which lies in a unit with others, leaves and comes back like a large one" {
  go=$BATS_TEST_TMPDIR/go
  start_doing share-piece "$go"
  cycle_by direct
  open_there
  assert_equal "$(told_of_sharing)" "green"
  # What else it has the agent moves.
  cycle_by direct
  # After the driver has restored its owner, too.
  closed_there
  open_there
  cycle_by direct
  target_verifies
}

# As where the addresses for a unit cannot be had.
@test "small memory that the driver shares itself keeps its owner alone while it is open elsewhere" {
  local path
  go=$BATS_TEST_TMPDIR/go
  STASIS_SIM_FAULTS=reserve:error=2@2 start_doing share-small "$go"
  open_beside 1
  touch "$go"
  wait_until 30 test -s "$go.done.0"
  assert_equal "$(told_of_sharing)" "red"
  for path in "" --path=driver; do
    # shellcheck disable=SC2086 # or no argument
    refused 8 not-supported suspend "$TARGET" $path
    assert_contains "$err" "CUDA IPC"
  done
  in_state running
  # One that ends has closed it.
  kill -KILL "${OPENERS[0]}"
  wait_until 30 none_has_it
  cycle_alone driver --path driver
  cycle_alone direct
  target_verifies
}

@test "small memory that the driver shares itself cannot be opened by others any more when it has restored the program" {
  go=$BATS_TEST_TMPDIR/go
  STASIS_SIM_FAULTS=reserve:error=2@2 start_doing share-small "$go"
  open_beside 1
  touch "$go"
  wait_until 30 test -s "$go.done.0"
  closed_there
  cycle_alone direct
  touch "$go"
  local status=0
  wait "${OPENERS[0]}" || status=$?
  assert_equal "$status" 7 "of cuIpcOpenMemHandle"
  target_goes_on
  cycle_alone direct
  target_verifies
}

@test "dumped and restored, memory that is shared by CUDA IPC is open as before, and can be opened" {
  need_root "CRIU"
  go=$BATS_TEST_TMPDIR/go
  start_doing share "$go"
  open_there
  closed_there
  dump_it
  restore_it
  target_goes_on
  open_there
  rm -rf "$image"
  dump_it
  restore_it
  target_goes_on
  closed_there
  cycle_by direct
  restored_verifies
}

# waits_for_owner PID: in front of a socket, for a place or for what its owner says.
waits_for_owner() { grep -Eqs '^4[257] ' "/proc/$1/syscall"; }  # connect, recvfrom, recvmsg

@test "dumped while others of its tree wait to open its memory, they open it after the restore" {
  need_root "CRIU"
  go=$BATS_TEST_TMPDIR/go
  TARGET_LOG=$BATS_TEST_TMPDIR/target.log
  TARGET_STATUS=$BATS_TEST_TMPDIR/target.status
  (LD_PRELOAD=$agent exec_on_gpu setsid bash -c '
    trap : TERM
    stasis-agent-target share-large "$1" "$2" &
    for number in 1 2 3; do stasis-agent-target open-shared "$2.done.$number" "$2" & done
    wait' - "$TARGET_STATUS" "$go") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 30 target_is_up
  local owner openers pid
  four_there() { (($(pgrep -c -P "$TARGET" -x stasis-agent-ta) == 4)); }
  wait_until 30 four_there
  owner=$(pgrep -P "$TARGET" -f share-large)
  mapfile -t openers < <(pgrep -P "$TARGET" -f open-shared)
  at_end_kill "$owner" "${openers[@]}"
  done_by suspend "$owner"
  touch "$go"
  for pid in "${openers[@]}"; do wait_until 30 waits_for_owner "$pid"; done
  dump_it
  restore_it
  done_by resume "$owner"
  for number in 1 2 3; do wait_until 30 test -s "$go.done.$number"; done
  target_goes_on
  refused 8 not-supported suspend "$owner"
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  rm "$go"
  for number in 1 2 3; do wait_until 30 test ! -e "$go.done.$number"; done
  kill -TERM "$owner"
  wait_until 30 grep -q '^verified' "$TARGET_LOG"
}

@test "dumped while others beside its tree wait to open its memory, they open it when it runs on" {
  need_root "CRIU"
  go=$BATS_TEST_TMPDIR/go
  start_doing share-large "$go"
  open_beside 2
  done_by suspend "$TARGET"
  touch "$go"
  local pid
  for pid in "${OPENERS[@]}"; do wait_until 30 waits_for_owner "$pid"; done
  done_by dump "$TARGET" --images-dir "$image" --leave-suspended
  done_by resume "$TARGET"
  for number in 0 1; do wait_until 30 test -s "$go.done.$number"; done
  closed_there
  for pid in "${OPENERS[@]}"; do lives "$pid"; done
  cycle_alone direct
  target_verifies
}

# Closed connections in its queue are what CRIU fails at.
@test "another user who connects to the owner's socket all the time, and gives up, stops no dump" {
  need_root "CRIU, and another user"
  go=$BATS_TEST_TMPDIR/go
  start_doing share "$go"
  python3 -S -c '
import os, socket, time
os.setgroups([])
os.setgid(65435)
os.setuid(65435)
names = [line.split()[-1][1:] for line in open("/proc/net/unix", errors="replace") if "@stasis-ipc-" in line]
while True:
    for name in names:
        other = socket.socket(socket.AF_UNIX)
        other.setblocking(False)
        try:
            other.connect("\0" + name)
        except OSError:
            pass
        other.close()
    time.sleep(0.002)' </dev/null >"$BATS_TEST_TMPDIR/flood" 2>&1 3>&- &
  local i flood=$!
  at_end_kill "$flood"
  for i in 1 2 3; do
    done_by dump "$TARGET" --images-dir "$image.$i" --leave-running
    target_goes_on
  done
  kill "$flood"
  assert_equal "$(cat "$BATS_TEST_TMPDIR/flood")" ""
  done_by dump "$TARGET" --images-dir "$image"
  wait_until 60 number_is_free
  restore_it
  target_goes_on
  restored_verifies
}

# The socket by which others come to the memory has a name, and that is taken.
@test "beside the one that runs on, a program that shares memory is restored in another network" {
  need_root "CRIU"
  go=$BATS_TEST_TMPDIR/go
  start_doing share "$go"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  # The numbers of the image are free, and are not those of who restores it.
  restore_beside() {
    timeout -k 5 60 unshare --pid --fork --mount-proc --kill-child "$@" bash -c '
      echo 10000 >/proc/sys/kernel/ns_last_pid
      [[ -z $3 ]] || python3 -c "$3"
      stasis restore --images-dir "$1" --detach || exit
      touch "$2"
      until [[ -s $2.done ]]; do sleep 0.02; done
      rm "$2"
      while [[ -e $2.done ]]; do sleep 0.02; done' bash "$image" "$go" "$up"
  }
  local up=
  capture restore_beside
  assert_equal "$status" 9
  assert_contains "$err" "the name of a unix socket of the job is in use here"
  target_goes_on
  # The files by which the test asks are the same.
  pkill -KILL -P "$TARGET"
  kill -KILL "$TARGET"
  wait "$TARGET" || true
  # ip link set lo up
  up='import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH22x", b"lo", 1))'
  capture restore_beside --net
  assert_equal "$status" 0 "$err"
}
