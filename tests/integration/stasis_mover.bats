#!/usr/bin/env bats
# The mover: when it is made, what it copies beside, and what happens when it dies or hangs.

load helpers
load stasis_lib
load agent_lib

# Faults of the simulated driver delay each copy, which the ring that users have makes larger.
test_ring=64M

# suspend_with_slow_context WHEN [OPTION]...: the mover's is made early, while the program still runs, or late.
suspend_with_slow_context() {
  local when=$1 trace=$BATS_TEST_TMPDIR/trace
  shift
  STASIS_SIM_FAULTS="context:delay=300ms" done_by suspend "$TARGET" --json --trace "$trace" "$@"
  went direct
  python3 -IS - "$when" "$trace" <<'END'
import json, sys
events = [e for e in json.load(open(sys.argv[2]))["traceEvents"] if e["ph"] == "X"]
def one(what): return next(e for e in events if (e["cat"], e["name"]) == what)
start, prepare, close = (one(what) for what in (("mover", "start"), ("mover", "prepare"), ("phase", "close")))
assert prepare["dur"] >= 3e5, "the context was not made there"
assert start["ts"] + start["dur"] <= close["ts"], "the driver was not started before the gate closed"
late = prepare["ts"] >= close["ts"]
# Beside a context that is being made the driver takes several times as long for it.
give = one(("agent", "give its device memory back"))
assert not late or give["ts"] + give["dur"] <= prepare["ts"], "a context was made while memory was given up"
assert late == (sys.argv[1] == "late"), f"the context came {'late' if late else 'early'}"
END
}

# A GPU cannot switch away from a kernel of a program that the driver has restored, and a context needs that.
@test "beside a program that the driver has held before no context is made while it runs" {
  local how
  for how in direct driver locked cuda-checkpoint dump; do
    start_agent memory --size 24M
    case $how in
      direct | driver)
        if [[ $how == direct ]]; then suspend_with_slow_context early; else done_by suspend "$TARGET" --path driver; fi
        done_by resume "$TARGET"
        ;;
      locked)
        cuda-checkpoint --action lock --pid "$TARGET"
        done_by suspend "$TARGET"
        done_by resume "$TARGET"
        ;;
      cuda-checkpoint)
        cuda-checkpoint --toggle --pid "$TARGET"
        cuda-checkpoint --toggle --pid "$TARGET"
        ;;
      dump)
        ((EUID == 0)) || continue # CRIU
        rm -rf "$image"
        done_by dump "$TARGET" --images-dir "$image" --json
        restore_it
        ;;
    esac
    target_goes_on
    suspend_with_slow_context late
    done_by resume "$TARGET"
    target_goes_on
    kill "$TARGET"
  done
}

@test "that another program uses the GPU to which one comes back is said" {
  local other
  export STASIS_SIM_GPUS=2x1G
  start_target memory --size 24M
  other=$TARGET
  start_agent memory --size 24M
  told() { [[ $err == *"comes back to a GPU that another program uses: process $other ("*"Xid 109"* ]]; }
  done_by suspend "$TARGET"
  ! told || return 1
  done_by resume "$TARGET"
  told
  # Not where it is away, or on another one.
  done_by suspend "$TARGET"
  done_by suspend "$other"
  done_by resume "$TARGET"
  ! told || return 1
  done_by suspend "$TARGET"
  done_by resume "$other"
  done_by resume "$TARGET" --device-map 0=1,1=0
  ! told || return 1
}

# beside_long_kernels: HELD, restored before, runs one kernel of 0.6 s after the other on the GPU of TARGET, and is lost
# when a context is made there that lasts half of that.
beside_long_kernels() {
  export STASIS_SIM_LONG_KERNEL=300ms
  local other status_of_other log_of_other
  start_agent memory --size 24M
  other=$TARGET status_of_other=$TARGET_STATUS log_of_other=$TARGET_LOG
  start_agent spin --busy-ms 600
  HELD=$TARGET STATUS_OF_HELD=$TARGET_STATUS LOG_OF_HELD=$TARGET_LOG
  done_by suspend "$HELD"
  done_by resume "$HELD"
  target_goes_on
  TARGET=$other TARGET_STATUS=$status_of_other TARGET_LOG=$log_of_other
}
held_goes_on() { TARGET=$HELD TARGET_STATUS=$STATUS_OF_HELD target_goes_on; }

@test "a program of another tree that was restored before is held while a context is made on its GPU" {
  local verb
  beside_long_kernels
  for verb in suspend resume suspend resume "suspend --path=driver" resume; do
    # shellcheck disable=SC2086
    done_by $verb "$TARGET"
    [[ $err != *"Xid 109"* ]]
    held_goes_on
  done
  # A killed tool holds it no more, and what it was at comes back beside it, too.
  STASIS_FAULT=checkpoint.after:kill capture stasis suspend "$TARGET" --path driver
  done_by recover "$TARGET"
  held_goes_on
  target_goes_on
  # All others that begin there do to it what the real driver does.
  start_target memory --size 1M
  wait_until 60 grep -q 719 "$LOG_OF_HELD"
}

@test "a program of another tree that was restored before is held by dump and restore" {
  ((EUID == 0)) || skip "needs root" # CRIU
  beside_long_kernels
  dump_it
  held_goes_on
  restore_it
  held_goes_on
  target_goes_on
  rm -rf "$image"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  held_goes_on
  target_goes_on
  restored_verifies
}

@test "a program of another tree that was restored before, and cannot be held, is told" {
  local other
  start_agent memory --size 24M
  other=$TARGET
  start_agent memory --size 24M
  HELD=$TARGET
  done_by suspend "$HELD"
  done_by resume "$HELD"
  hold_page
  TARGET=$other
  told() { [[ $err == *"cannot hold meanwhile: process $HELD ("*"Xid 109"* ]]; }
  done_by suspend "$TARGET"
  told
  done_by resume "$TARGET"
  told
  let_page_go
  done_by suspend "$TARGET"
  ! told || return 1
  # One that a signal has stopped begins no kernel, and its agent would not answer.
  kill -STOP "$HELD"
  done_by resume "$TARGET"
  told
  done_by suspend "$TARGET" --path driver
  told
  kill -CONT "$HELD"
  done_by resume "$TARGET"
  ! told || return 1
  target_goes_on
}

# in_order TRACE: the mover was ready before the driver let any process go on.
in_order() {
  python3 -IS - "$1" <<'END'
import json, sys
events = [e for e in json.load(open(sys.argv[1]))["traceEvents"] if e["ph"] == "X"]
def one(what): return [e for e in events if (e["cat"], e["name"]) == what]
ready = one(("mover", "prepare"))[0]
early = ready["ts"] + ready["dur"] - min(e["ts"] for e in one(("driver", "unlock")))
assert early <= 0, f"one runs {early / 1e3:.1f} ms before the mover is ready"
END
}

@test "at a resume and a restore the mover is ready before any process runs, on no GPU but theirs" {
  local trace=$BATS_TEST_TMPDIR/trace
  export STASIS_SIM_GPUS=2x256M
  start_agent memory --size 24M
  done_by suspend "$TARGET"
  # A context on the second GPU would be one too many.
  STASIS_SIM_FAULTS="context:delay=1s; context:error=2@2" done_by resume "$TARGET" --json --trace "$trace"
  went direct
  assert_equal "$(json 'd.get("notes", [])')" "[]"
  in_order "$trace"
  target_goes_on
  ((EUID == 0)) || skip "only root may do the rest: CRIU"
  done_by dump "$TARGET" --images-dir "$image"
  STASIS_SIM_FAULTS="context:delay=2s; context:error=2@2" \
    done_by restore --images-dir "$image" --detach --json --trace "$trace" 3>&-
  assert_equal "$(json 'd.get("notes", [])')" "[]"
  in_order "$trace"
  target_goes_on
}

@test "a tool that is killed while GPU memory is copied in leaves a mover that no agent copies beside" {
  local tool limit
  filling() { [[ $(agent_state) == 4 ]]; }
  start_agent memory --size 24M --pause-ms 2
  # By default, and where the mover may have few descriptors.
  for limit in "$(ulimit -n)" 512; do
    done_by suspend "$TARGET"
    (ulimit -n "$limit"; STASIS_SIM_FAULTS=transfer:delay=2s exec stasis resume "$TARGET") >/dev/null 2>&1 3>&- &
    tool=$!
    wait_until 60 filling
    kill -KILL "$tool"
    # It waits until the tool has gone, and the mover has ended what it does.
    done_by recover "$TARGET"
    target_goes_on
    sleep 3
    target_goes_on
  done
  target_verifies
}

# bats test_tags=long
@test "a mover that hangs in the driver outlives a tool that was killed by seconds" {
  start_agent memory --size 24M
  STASIS_SIM_FAULTS=context:hang stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$! movers
  wait_until 60 eval 'mover=$(pgrep -P "'"$tool"'" -x stasis-mover)'
  # And the one that would take its place.
  mapfile -t movers < <(pgrep -P "$tool" -x stasis-mover)
  at_end_kill "${movers[@]}"
  sleep 1
  kill -KILL "$tool"
  for mover in "${movers[@]}"; do wait_until 60 eval "! kill -0 $mover 2>/dev/null"; done
  target_goes_on
}

@test "a mover that cannot be made while the program stands still leaves the memory to the driver" {
  local fault
  start_agent memory --size 24M
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  for fault in context:die context:error=2; do
    STASIS_SIM_FAULTS=$fault done_by suspend "$TARGET" --json
    went driver
    done_by resume "$TARGET"
    target_goes_on
    STASIS_SIM_FAULTS=$fault capture stasis suspend "$TARGET" --path direct
    ((status != 0))
    agent_is 0
    target_goes_on
  done
  target_verifies
}

@test "GPU memory is copied while the driver checkpoints, and is free when it is done" {
  start_agent memory --size 64M
  assert_equal "$(pieces_kept)" 0 "descriptors"
  STASIS_SIM_FAULTS="transfer:delay=1s" stasis suspend "$TARGET" --json >"$BATS_TEST_TMPDIR/out" 3>&- &
  local tool=$!
  wait_until 60 in_state checkpointed
  # What it was in is given up, and all that keeps it alive is a descriptor.
  (($(gpu_used) >= 64 << 20))
  (($(pieces_kept) > 0))
  wait "$tool"
  out=$(<"$BATS_TEST_TMPDIR/out")
  went direct
  assert_equal "$(phase_names)" "$beside"
  gpu_is_free
  assert_equal "$(pieces_kept)" 0 "descriptors"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "a mover that dies while the driver checkpoints: once more, and copied first" {
  start_agent memory --size 64M
  local tool
  # The agent brings back what it has kept, past the driver's restore; then another mover.
  STASIS_SIM_FAULTS="transfer:delay=1s" stasis suspend "$TARGET" --json \
    >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  tool=$!
  wait_until 60 in_state checkpointed
  pkill -KILL -n -P "$tool" -x stasis-mover # the other one takes its place
  wait "$tool"
  out=$(<"$BATS_TEST_TMPDIR/out")
  went direct
  assert_equal "$(phase_names)" "$beside $later"
  assert_contains "$out" "once more, with GPU memory copied before the driver is asked"
  gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
  nothing_left
}

@test "a driver that refuses while GPU memory is being copied is asked once more, with it copied first" {
  start_agent memory --size 24M
  STASIS_SIM_FAULTS=checkpoint:error=999@1 done_by suspend "$TARGET" --json
  went direct
  assert_equal "$(phase_names)" "${beside% copy-out} $later"
  gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  # Once, and not for ever; as it was.
  STASIS_SIM_FAULTS=checkpoint:error=999 capture timeout 60 stasis suspend "$TARGET"
  ((status != 0))
  in_state running
  target_goes_on
  target_verifies
  nothing_left
}

@test "a dump that leaves the program suspended has its memory copied before the driver is asked" {
  need_root "CRIU"
  start_agent memory --size 24M
  done_by dump "$TARGET" --images-dir "$image" --leave-suspended --json
  went direct
  [[ $(phase_names) == *"copy-out evict lock checkpoint"* ]]
  gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "a program that may open few files has its memory copied before it is given up" {
  start_agent torture --size 200M --pause-ms 100
  done_by suspend "$TARGET" --json
  assert_equal "$(phase_names)" "$beside"
  done_by resume "$TARGET"
  # Half of them are the program's.
  prlimit --pid "$TARGET" --nofile=$(($(find "/proc/$TARGET/fd" | wc -l) + 40)):
  done_by suspend "$TARGET" --json
  went direct
  assert_equal "$(phase_names)" "$later"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
  nothing_left
}

@test "a mover that dies while it gets ready is no reason to do nothing: the driver moves the memory" {
  start_agent memory --size 16M
  STASIS_SIM_FAULTS=context:die done_by suspend "$TARGET"
  assert_contains "$err" "the driver's path is taken: the mover process was killed"
  done_by resume "$TARGET"
  target_goes_on
  STASIS_SIM_FAULTS=context:die refused 1 internal suspend "$TARGET" --path direct
  in_state running
  target_goes_on
  target_verifies
  nothing_left
}

# It is given a minute, in which the program runs.
# bats test_tags=long
@test "a mover that hangs while it gets ready is no reason to do nothing: the driver moves the memory" {
  start_agent memory --size 16M
  STASIS_SIM_FAULTS=context:hang done_by suspend "$TARGET" --json
  went driver
  assert_contains "$out" "the driver's path is taken: preparing to copy GPU memory"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
  nothing_left
}

@test "the time that the program stands still is told: the driver's part, and no preparation" {
  start_agent memory --size 24M
  STASIS_SIM_FAULTS=checkpoint:delay=500ms done_by suspend "$TARGET" --json
  json 'd["standstill_seconds"], d["seconds"]'
  [[ $(json '0.5 <= d["standstill_seconds"] <= d["seconds"] - sum(p["seconds"] for p in d["phases"] if p["name"] == "prepare")') == True ]]
  done_by resume "$TARGET" --json
  assert_equal "$(json 'd["standstill_seconds"]')" None
  STASIS_SIM_FAULTS=checkpoint:delay=500ms done_by suspend "$TARGET"
  [[ $out =~ "standing still for "(0\.[5-9]|[1-9]) ]]
}

@test "a dump that lets the program go on tells how long it stood still" {
  need_root "CRIU"
  start_target memory --size 8M
  STASIS_SIM_FAULTS=checkpoint:delay=500ms done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  [[ $(json '0.5 <= d["standstill_seconds"] <= d["seconds"]') == True ]]
  target_goes_on
}
