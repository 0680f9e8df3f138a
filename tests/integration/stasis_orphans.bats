#!/usr/bin/env bats
# GPU memory that processes share, whose owner has ended or has freed it, or can be reached no more: on the simulated
# driver, which like the real one lets importers keep it, and export it to none.

load helpers
load stasis_lib
load stasis_sharing_lib

setup() { setup_sharing; }
teardown() { end_stasis; }

# dump_and_restore DIR
dump_and_restore() {
  done_by dump "$TARGET" --images-dir "$1"
  wait "$TARGET" || true
  done_by restore --images-dir "$1" --detach
  at_end_kill "$TARGET"
  target_goes_on
}

started=0
# start_orphans WAY COUNT: sets TARGET to the parent, and CHILDREN.
start_orphans() {
  TARGET_STATUS=$BATS_TEST_TMPDIR/orphans.$((++started))
  (LD_PRELOAD=$agent exec_on_gpu setsid python3 -S "$BATS_TEST_DIRNAME/../gpu/orphans.py" "$TARGET_STATUS" "$@") </dev/null >&2 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  target_goes_on
}

@test "memory that outlives its owner stays shared: the owner has ended, has freed it, or is reached no more" {
  local way i
  for way in ends frees closes; do
    start_orphans "$way" 2
    for ((i = 0; i < $(times 2 3); ++i)); do
      suspended_and_resumed
    done
    kill -9 "$TARGET" "${CHILDREN[@]}"
  done
}

@test "on the GPU of a peer, memory that outlives its owner needs no context there" {
  local way
  export STASIS_SIM_GPUS=2x256M
  for way in ends frees; do
    # As many contexts as the program makes itself.
    STASIS_SIM_FAULTS=context:error=2@2 start_orphans "$way" 2
    suspended_and_resumed
    kill -9 "$TARGET" "${CHILDREN[@]}"
  done
}

@test "of a GPU that no heir sees, memory that outlives its owner comes back on one that it does" {
  local way
  export STASIS_SIM_GPUS=2x256M
  for way in ends frees; do
    ONE_OF_SO_MANY_GPUS=2 start_orphans "$way" 1
    suspended_and_resumed
    suspended_and_resumed
    kill -9 "$TARGET" "${CHILDREN[@]}"
  done
}

@test "memory that outlives its owner is dumped and restored with those who share it" {
  need_root "CRIU"
  local way
  for way in ends frees; do
    start_orphans "$way" 2
    dump_and_restore "$image.$way"
    suspended_and_resumed
    kill -9 "$TARGET" "${CHILDREN[@]}"
  done
}

@test "memory that outlives its owner, and that a process of another tree has, too, is refused" {
  start_orphans ends 2
  refused 8 not-supported suspend "${CHILDREN[0]}"
  assert_contains "$err" "a process outside of the tree uses it, too: process ${CHILDREN[1]} (python3)"
  target_goes_on
  suspended_and_resumed
}

@test "the same when all of them were restored since" {
  need_root "CRIU"
  start_orphans ends 2
  dump_and_restore "$image"
  refused 8 not-supported suspend "${CHILDREN[1]}"
  assert_contains "$err" "uses it, too: process ${CHILDREN[0]} (python3)"
  target_goes_on
}

@test "memory that one has inherited, or whose owner is asked for it no more, is refused where a process of another tree has it" {
  local way child
  for way in ends $(sometimes frees) closes; do
    start_orphans "$way" 2
    [[ $way == closes ]] || done_by suspend "$TARGET"
    [[ $way == closes ]] || done_by resume "$TARGET"
    for child in "${CHILDREN[@]}"; do
      refused 8 not-supported suspend "$child"
      # The process that may still say of an owner that it is reached no more has inherited from it.
      [[ $way == closes && $err == *"no agent finds"* ]] || assert_contains "$err" "outside of the tree"
      refused 8 not-supported suspend "$child" --path driver
    done
    target_goes_on
    suspended_and_resumed
    kill -9 "$TARGET" "${CHILDREN[@]}"
  done
}

# Which has the pages of its job's agents in its memory.
@test "a tool that is at work on another job is not taken for an owner that has closed its sockets" {
  local first tool
  LD_PRELOAD=$agent start_target collective --children 2 --size 256K --pause-ms 2 --sharing
  first=$TARGET
  STASIS_FAULT=direct.closed:stop stasis suspend "$first" >/dev/null 2>&1 3>&- &
  tool=$!
  at_end_kill "$tool"
  wait_until 60 grep -q "^State:.T" "/proc/$tool/status"
  start_orphans ends 2
  suspended_and_resumed
  kill -CONT "$tool"
  wait "$tool"
  done_by resume "$first"
}

@test "a tool that is killed, or fails, when one process has saved what outlives its owner leaves a job that goes on" {
  local way
  for way in ends frees; do
    start_orphans "$way" 3
    STASIS_FAULT=direct.inherited:error capture stasis suspend "$TARGET"
    ((status != 0))
    target_goes_on
    kill -9 "$TARGET" "${CHILDREN[@]}"
    start_orphans "$way" 3
    STASIS_FAULT=direct.inherited:kill@2 capture stasis suspend "$TARGET"
    ((status == 137))
    done_by recover --all
    target_goes_on
    suspended_and_resumed
    kill -9 "$TARGET" "${CHILDREN[@]}"
  done
}

@test "memory of a process of another tree that has closed its sockets is not taken for memory that outlives its owner" {
  start_orphans closes 1
  # Its agent sees that it has none any more when its wait for them begins anew.
  kill -STOP "${CHILDREN[0]}"
  wait_until 10 grep -q "^State:.T" "/proc/${CHILDREN[0]}/status"
  kill -CONT "${CHILDREN[0]}"
  target_goes_on
  refused 8 not-supported suspend "${CHILDREN[1]}"
  assert_contains "$err" "may still use it: process ${CHILDREN[0]} (python3)"
  target_goes_on
  suspended_and_resumed
}

@test "an heir that ends while the job is suspended takes what it has saved along, and that is said" {
  start_orphans frees 2
  done_by suspend "$TARGET"
  kill -STOP "$TARGET" # which ends all of them when one has ended
  kill -KILL "${CHILDREN[1]}"
  refused 12 not-rolled-back resume "$TARGET"
  assert_contains "$err" "process ${CHILDREN[2]} has given up 4 pieces"
  assert_contains "$err" "no tool can bring that back"
  kill -KILL "$TARGET" "${CHILDREN[@]}" 2>/dev/null || true
}
