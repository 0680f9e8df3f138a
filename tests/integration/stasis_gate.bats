#!/usr/bin/env bats
# While the gate is closed or the memory away: signals, tools that are killed, programs that end, two tools at
# once, and what ps says.

load helpers
load stasis_lib
load agent_lib

# --- The tool is killed

# The program is held in front of its next call, and no tool recovers it.
@test "a tool that is killed while the gate is closed leaves a program that goes on by itself" {
  start_agent memory --size 24M
  local caught=0 start=$SECONDS
  while ((caught < 5 && SECONDS - start < 120)); do
    if ! agent_page kill-away stasis suspend -q "$TARGET"; then
      done_by recover "$TARGET"
      target_goes_on
      continue
    fi
    caught=$((caught + 1))
    # Before the agent has seen that its peer is dead. What was to be copied in has not been copied out.
    if ((caught % 2)); then
      done_by recover "$TARGET"
      target_goes_on
      continue
    fi
    wait_until 60 target_is_past "$(target_round)" || { echo "it stands still, in state $(agent_state)" >&2; return 1; }
    done_by recover "$TARGET"
  done
  ((caught >= 3)) || { echo "caught only $caught times" >&2; return 1; }
  target_verifies
}

# bats test_tags=long
@test "a tool that is killed at any moment leaves a program that recover makes run" {
  start_agent memory --size 24M
  local delay
  for delay in 0.02 0.05 0.08 0.11 0.15; do
    timeout -s KILL "$delay" stasis suspend -q "$TARGET" >/dev/null 2>&1 || true
    done_by recover "$TARGET"
    target_goes_on
  done
  for delay in 0.02 0.06 0.1 0.15; do
    done_by suspend "$TARGET"
    timeout -s KILL "$delay" stasis resume -q "$TARGET" >/dev/null 2>&1 || true
    # One that was killed before it began has left nothing to recover from.
    done_by recover --all
    done_by resume "$TARGET"
    in_state running
    target_goes_on
  done
  target_verifies
  nothing_left
}

@test "host memory made ready for a tool that dies is given back" {
  start_agent memory --size 24M
  mapped() { awk '/^VmSize/ { print $2 }' "/proc/$TARGET/status"; }
  local before
  # What the agent's thread allocates for the first time stays.
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  before=$(mapped)
  # As a tool does first, and then it is gone.
  agent_page prepare
  as_before() { (($(mapped) <= before + 4096)); }
  wait_until 60 as_before
  target_goes_on
  target_verifies
}

@test "host memory made ready is kept by a program that is let go on and asked again" {
  start_agent memory --size 24M
  agent_page go-on
  target_goes_on
  target_verifies
}

@test "SIGTERM and SIGINT end a suspend with 143 and 130, and the program runs on" {
  start_agent memory --size 24M
  local signal expected
  for signal in "TERM 143" "INT 130"; do
    expected=${signal#* } signal=${signal% *}
    # With the checkpoint drawn out, so that all of the direct path lies behind it.
    STASIS_SIM_FAULTS=checkpoint:delay=4s env --default-signal=INT stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
    local tool=$!
    wait_until 60 works_on_it "$tool"
    kill -"$signal" "$tool"
    status=0
    wait "$tool" || status=$?
    assert_equal "$status" "$expected" "after SIG$signal"
    in_state running
    agent_is 0
    target_goes_on
  done
  target_verifies
  nothing_left
}

# start_other: OTHER, one of two ranks. The other is to be started with "${RANK[@]}" --rank 0.
start_other() {
  local meeting=$BATS_TEST_TMPDIR/meeting
  RANK=(rank --meeting "$meeting" --ranks 2 --seed 5 --pause-ms 2 --size 4M)
  truncate -s 64K "$meeting"
  (exec_on_gpu setsid stasis-workload "${RANK[@]}" --rank 1 --status "$BATS_TEST_TMPDIR/other.status") \
    </dev/null >"$BATS_TEST_TMPDIR/other.log" 2>&1 3>&- &
  OTHER=$!
  echo "$OTHER" >>"$targets"
}
# stop_other FILE: from now on its mate, which keeps its rounds in the file, waits on its GPU.
stop_other() {
  kill -STOP "$OTHER"
  wait_until 60 no_round_for 1 "$1"
}
# suspend_in_vain PID MS: to the slice in which the gate of the process is to close within more than so long; each is
# twice as long as the one before, up to 8 s.
suspend_in_vain() {
  env --default-signal=INT stasis suspend "$TARGET" --timeout 60000 >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  TOOL=$!
  TARGET=$1 agent_page closing "$2"
}
took_less_than() {
  (($(date +%s%N) - begun < $1 * 1000000)) || { echo "it took $((($(date +%s%N) - begun) / 1000000)) ms" >&2; return 1; }
}

@test "a gate that does not close is given up at once: for a signal, and when the tool is killed" {
  local begun
  start_other
  start_agent "${RANK[@]}" --rank 0
  stop_other "$TARGET_STATUS"
  suspend_in_vain "$TARGET" 7000
  begun=$(date +%s%N) status=0
  kill -INT "$TOOL"
  wait "$TOOL" || status=$?
  assert_equal "$status" 130 "$(<"$BATS_TEST_TMPDIR/out")"
  took_less_than 5000
  suspend_in_vain "$TARGET" 7000
  begun=$(date +%s%N)
  kill -KILL "$TOOL"
  wait_until 60 agent_page idle
  took_less_than 5000
  kill -CONT "$OTHER"
  target_goes_on
  done_by recover --all
  done_by suspend "$TARGET" --json
  went direct
  done_by resume "$TARGET"
  target_goes_on
}

# --- The program ends, or changes
@test "a rank that ends while the gates close is no reason to give up" {
  TARGET_STATUS=$BATS_TEST_TMPDIR/target.status TARGET_LOG=$BATS_TEST_TMPDIR/target.log
  start_other
  (
    # shellcheck disable=SC2016 # for bash
    LD_PRELOAD=$agent exec_on_gpu setsid bash -c 'stasis-workload memory --size 4M --status "$1" & shift
      stasis-workload "$@" --rank 0 & wait' bash "$TARGET_STATUS" "${RANK[@]}" --status "$TARGET_STATUS.0"
  ) </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  TARGET_STATUS=$TARGET_STATUS.0 wait_until 60 target_is_up
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  stop_other "$TARGET_STATUS.0"
  local rank
  rank=$(pgrep -P "$TARGET" -f -- "--rank 0")
  suspend_in_vain "$rank" 3000
  kill -KILL "$rank"
  wait "$TOOL" || { cat "$BATS_TEST_TMPDIR/out" >&2; return 1; }
  done_by resume "$TARGET"
  target_goes_on
  kill "${CHILDREN[@]}" 2>/dev/null || true
}

@test "one that is killed while its memory is away is gone, and nothing is left of it" {
  start_agent memory --size 24M
  done_by suspend "$TARGET"
  kill -KILL "$TARGET"
  wait "$TARGET" || true
  gpu_is_free
  capture timeout 60 stasis resume "$TARGET"
  ((status != 0))
  assert_contains "$err" "$TARGET"
}

@test "one that is to end while its memory is away ends when it is back, with its own status" {
  start_agent poll --size 8M --own-us 20
  done_by suspend "$TARGET" --json
  went direct
  kill -TERM "$TARGET"
  sleep 0.3
  lives
  # It may have ended before the tool has had its last answer.
  capture timeout 60 stasis resume "$TARGET"
  ((status == 0)) || assert_contains "$err" "process $TARGET has ended [process-gone]"
  status=0
  wait "$TARGET" || status=$?
  assert_equal "$status" 0
  grep -q '^verified' "$TARGET_LOG"
}

@test "ps tells who waits for GPU memory from who runs" {
  STASIS_SIM_GPUS=1x256M start_agent memory --size 64M
  export STASIS_SIM_GPUS=1x256M
  done_by suspend "$TARGET"
  let_go_without_room "there is room for its GPU memory"
  done_by ps --timeout 30000
  grep -q "^$TARGET .* waiting  *direct  " <<<"$out"
  grep -q "^$HOG .* running  *driver  " <<<"$out"
  assert_contains "$err" "process $TARGET stands still until there is room for its GPU memory"
  # Of one that it does not know stasis does not promise anything.
  agent_page version 1
  done_by ps --timeout 30000
  assert_contains "$err" "use the stasis that came with it"
  agent_page version 4
  refused 11 out-of-gpu-memory recover "$TARGET"
  done_by ps --json --timeout 30000
  assert_equal "$(json "[p['state'] for p in d['processes'] if p['pid'] == $TARGET]")" "['waiting']"
  assert_contains "$(json "[p['reason'] for p in d['processes'] if p['pid'] == $TARGET]")" "goes on by itself then"
  kill -KILL "$HOG"
  wait "$HOG" 2>/dev/null || true
  target_goes_on
  wait_until 60 agent_is 0
  done_by ps --timeout 30000
  grep -q "^$TARGET .* running  *direct  " <<<"$out"
  [[ $err != *"process $TARGET stands still"* ]]
  target_verifies
}

@test "ps tells who waits because another tool has let it go on" {
  start_agent memory --size 16M
  done_by suspend "$TARGET"
  python3 -IS -c 'import ctypes, os, sys
cuda = ctypes.CDLL(os.environ.get("STASIS_LIBCUDA", "libcuda.so.1"))
for call in cuda.cuCheckpointProcessRestore, cuda.cuCheckpointProcessUnlock:
    assert call(int(sys.argv[1]), None) == 0' "$TARGET"
  in_state running
  stands_still
  done_by ps --timeout 30000
  grep -q "^$TARGET .* waiting  *direct  " <<<"$out"
  assert_contains "$err" "process $TARGET stands still until \`stasis recover $TARGET\`"
  done_by recover "$TARGET"
  target_goes_on
  target_verifies
}

# --- Two at once, and no agent
@test "two tools at once: one does it, the other is told" {
  start_agent memory --size 24M
  STASIS_SIM_FAULTS=checkpoint:delay=4s stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local first=$!
  stopped_at_work "$first"
  capture timeout 60 stasis suspend "$TARGET"
  assert_contains "$err" "[busy]"
  kill -CONT "$first"
  wait "$first"
  done_by resume "$TARGET"
  target_verifies
}

@test "who waits for another tool to let go of the agent sees on a terminal that he does" {
  start_agent memory --size 8M
  local verb tool
  for verb in suspend resume; do
    hold_page
    TERM=xterm script -qfec "stasis $verb $TARGET" "$BATS_TEST_TMPDIR/shown" >/dev/null 2>&1 </dev/null 3>&- &
    tool=$!
    wait_until 60 grep -qE "waiting +[0-9]+ s" "$BATS_TEST_TMPDIR/shown"
    let_page_go
    wait "$tool"
    rm "$BATS_TEST_TMPDIR/shown"
  done
  in_state running
  target_goes_on
  target_verifies
}

@test "who waits for another tool to let go of the agent ends when he is asked to, and by himself" {
  start_agent memory --size 8M
  local begun tool
  hold_page
  stasis suspend "$TARGET" >/dev/null 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  tool=$!
  sleep 2
  begun=$(date +%s%N)
  kill -TERM "$tool"
  capture wait "$tool"
  assert_equal "$status" 143
  took_less_than 8000 # of the twelve seconds that it would have waited
  in_state running
  begun=$(date +%s%N)
  refused 7 busy suspend "$TARGET"
  took_less_than 18000 # and not twice
  assert_contains "$err" "has another peer, process $HOLDER"
  begun=$(date +%s%N)
  refused 7 busy resume "$TARGET"
  took_less_than 18000
  let_page_go
  # A lock in the way of the driver's own way out is none of the agent's.
  done_by suspend "$TARGET"
  hold_page
  capture cuda-checkpoint --action lock --pid "$TARGET"
  assert_equal "$status" 1
  [[ $err != *"stands still"* ]]
  let_page_go
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "a program that is no tool and has the lock of the agent's page is named, and not waited for" {
  start_agent memory --size 8M
  local begun verb
  hold_page impostor
  for verb in suspend resume "dump --images-dir $image"; do
    [[ $verb != resume ]] || { let_page_go; done_by suspend "$TARGET"; hold_page impostor; }
    begun=$(date +%s%N)
    # shellcheck disable=SC2086 # words
    refused 7 busy $verb "$TARGET"
    took_less_than 8000
    assert_contains "$err" "process $HOLDER (impostor), which is no stasis, holds a lock on the page of the agent in process $TARGET"
    assert_contains "$err" "end it (\`kill $HOLDER\`)"
    [[ $verb != resume ]] || { let_page_go; done_by resume "$TARGET"; hold_page impostor; }
  done
  let_page_go
  target_goes_on
  target_verifies
}

@test "what a killed suspend has left half-way is not taken for suspended, and recover mends it" {
  start_agent memory --size 64M
  STASIS_FAULT=checkpoint.after:kill STASIS_SIM_FAULTS="transfer:delay=1s" capture stasis suspend "$TARGET"
  in_state checkpointed
  (($(pieces_kept) > 0))
  need_root "CRIU, for the rest"
  refused 6 wrong-state dump "$TARGET" --images-dir "$image"
  target_goes_on
  STASIS_FAULT=checkpoint.after:kill STASIS_SIM_FAULTS="transfer:delay=1s" capture stasis suspend "$TARGET"
  done_by suspend "$TARGET"
  assert_contains "$err" "half-way"
  # When the mover of the killed one has ended what it was at.
  wait_until 60 gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  # No record says that it was to run.
  STASIS_FAULT=checkpoint.after:kill STASIS_SIM_FAULTS="transfer:delay=1s" capture stasis suspend "$TARGET"
  rm -r "${STASIS_STATE_DIR:?}/"*
  refused 6 wrong-state suspend "$TARGET"
  assert_contains "$err" "stasis recover $TARGET"
  done_by recover "$TARGET"
  target_goes_on
  # Copied, and then killed: that is suspended, to go on or to be finished. Whatever fails then, it is to run.
  local verb
  for verb in "STASIS_FAULT=suspend.verified:error stasis suspend" \
    "STASIS_FAULT=suspend.verified:error stasis suspend --path driver" "STASIS_FAULT=resume.planned:error stasis resume" \
    "stasis resume --images-dir /nowhere" "STASIS_FAULT=image.created:error stasis dump --images-dir $image"; do
    STASIS_FAULT=suspend.verified:kill capture stasis suspend "$TARGET"
    in_state checkpointed
    # shellcheck disable=SC2086 # words
    capture env $verb "$TARGET"
    ((status != 0)) || { echo "$verb has not failed" >&2; return 1; }
    in_state running
    target_goes_on
  done
  STASIS_FAULT=suspend.verified:kill capture stasis suspend "$TARGET"
  done_by suspend "$TARGET"
  gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
  nothing_left
}
