#!/usr/bin/env bats
# Ctrl-C and its like at any moment: everything is rolled back. SIGKILL at any moment: `stasis recover`
# brings the job back.
# Long because each verb is interrupted at each step with the same helpers.

load helpers
load stasis_lib

setup() { setup_stasis; }
teardown() { end_stasis; }

# Each step is slowed down to some tenths of a second, so that a signal falls into each of them.
# A shell without job control lets its background commands ignore Ctrl-C.
with_signals() { exec env --default-signal=INT --default-signal=QUIT "$@"; }
slow_steps="lock:delay=100ms;checkpoint:rate=100M;restore:rate=200M;unlock:delay=50ms"

status_of_signal() { echo $((128 + $(kill -l "$1"))); }

# interrupt_at SECONDS SIGNAL ARGUMENT...: runs stasis and signals it so long after its start, or with a + in front
# after it has entered its operation into the journal. Sets status, out, err.
interrupt_at() {
  local seconds=$1 signal=$2
  shift 2
  # Here: the signal may come before the command has made them, and must find none of the last time.
  : >"$BATS_TEST_TMPDIR/out"
  : >"$BATS_TEST_TMPDIR/err"
  STASIS_SIM_FAULTS=$slow_steps with_signals stasis "$@" \
    >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  local tool=$!
  at_end_kill "$tool"
  [[ $seconds != +* ]] || wait_until 60 has_begun "$tool"
  sleep "${seconds#+}"
  # Late is too late: it has ended then.
  kill "-$signal" "$tool" 2>/dev/null || true
  status=0
  wait "$tool" || status=$?
  out=$(<"$BATS_TEST_TMPDIR/out") err=$(<"$BATS_TEST_TMPDIR/err")
}

has_begun() { ! lives "$1" || grep -qs "\"owner\":$1," "$STASIS_STATE_DIR"/*.json; }

# hits COUNT COMMAND...: on a busy machine most signals may come too early or too late; once more then, at other moments,
# until as many as that have come in the middle. The command is given a moment, and counts them in $hit.
hits() {
  local count=$1 i
  shift
  for ((i = 0; i < 60 && hit < count; ++i)); do "$@" "+0.$((i % 4))"; done
  ((hit >= count)) || { echo "only $hit signals came in the middle" >&2; return 1; }
}

@test "a signal at any moment of a suspend brings the process back, and the status says so" {
  start_target memory --size 20M
  local hit=0
  # signals SIGNAL MOMENT
  signals() {
    interrupt_at "$2" "$1" suspend "$TARGET"
    if ((status == 0)); then
      in_state checkpointed
      stasis resume -q "$TARGET" >/dev/null
      return
    fi
    assert_equal "$status" "$(status_of_signal "$1")" "status at $2: $err"
    # Before its handlers are there, nothing has been done either, and nothing can be said.
    [[ -z $err || $err == *"[interrupted]"* || $err != *error* ]]
    [[ $err != *"[interrupted]"* ]] || hit=$((hit + 1))
    in_state running
    nothing_left
  }
  for at in 0.02 0.06 +0 +0.05 +0.1 +0.2 0.3; do
    for signal in INT TERM HUP QUIT; do signals "$signal" "$at"; done
  done
  hits 5 signals TERM
  target_goes_on
  target_verifies
}

@test "a second signal does not break the roll-back" {
  start_target memory --size 20M
  STASIS_SIM_FAULTS="checkpoint:delay=4s;$slow_steps" with_signals stasis suspend "$TARGET" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  local tool=$! status=0
  wait_until 60 held_up
  for _ in 1 2 3 4 5 6; do
    kill -INT "$tool" 2>/dev/null || true
    kill -TERM "$tool" 2>/dev/null || true
    sleep 0.04
  done
  wait "$tool" || status=$?
  # Of two that are pending the kernel may give us either first.
  ((status == 130 || status == 143)) || { cat "$BATS_TEST_TMPDIR/out" >&2; return 1; }
  in_state running
  nothing_left
  target_goes_on
  target_verifies
}

@test "a signal is obeyed at once while a lock is pending" {
  start_tree --size 4M
  local tool begun
  STASIS_SIM_FAULTS="lock:timeout pid=${CHILDREN[1]}" with_signals stasis suspend "$TARGET" --timeout 30000 \
    >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  tool=$!
  at_end_kill "$tool"
  echo "$tool" >"$BATS_TEST_TMPDIR/tool"
  wait_until 60 works_on_it_now "$BATS_TEST_TMPDIR/tool"
  # The tries take 0.5, 1, 2, 4 and 8 s: into the fifth.
  sleep 8.5
  begun=$(date +%s%N) status=0
  kill -INT "$tool"
  wait "$tool" || status=$?
  assert_equal "$status" 130 "$(<"$BATS_TEST_TMPDIR/out")"
  (($(date +%s%N) - begun < 5500000000)) || { echo "it took $((($(date +%s%N) - begun) / 1000000)) ms" >&2; return 1; }
  in_state running "${CHILDREN[@]}"
  nothing_left
  target_goes_on
  target_verifies
}

# interrupt_settling ARGUMENT...: TERM for a stasis that looks whether the driver still works for another caller.
interrupt_settling() {
  local reached=$BATS_TEST_TMPDIR/reached
  rm -f "$reached"
  STASIS_FAULT_LOG=$reached stasis "$@" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  local tool=$!
  wait_until 60 grep -qs "^recover.alone " "$reached"
  kill -TERM "$tool" 2>/dev/null || true
  status=0
  wait "$tool" || status=$?
  out=$(<"$BATS_TEST_TMPDIR/out") err=$(<"$BATS_TEST_TMPDIR/err")
}

@test "a signal during a recover leaves what there is to recover, and the status says so" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  start_target memory --size 8M
  local tool i
  for words in "--all" "$TARGET"; do
    # It looks for half a second whether the driver still works for the one that was killed. Late is too late.
    status=0
    for ((i = 0; i < 10 && status == 0; ++i)); do
      STASIS_SIM_FAULTS="checkpoint:delay=20s" stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
      tool=$!
      wait_until 60 works_on_it "$tool"
      kill -KILL "$tool"
      wait "$tool" 2>/dev/null || true
      # shellcheck disable=SC2086
      interrupt_settling recover $words
    done
    assert_equal "$status" 143 "recover $words: $out$err"
    assert_contains "$err" "[interrupted]"
    in_state locked
    done_by recover --all
    in_state running
    nothing_left
  done
  target_goes_on
  target_verifies
}

@test "a signal during a resume leaves it suspended, or running when it was too late" {
  start_target memory --size 20M
  for at in 0.02 0.06 +0 +0.1; do
    stasis suspend -q "$TARGET" >/dev/null
    interrupt_at "$at" INT resume "$TARGET"
    if ((status == 0)); then
      in_state running
    else
      assert_equal "$status" 130 "$err"
      in_state checkpointed
    fi
    nothing_left
    stasis resume -q "$TARGET" >/dev/null
  done
  target_goes_on
  target_verifies
}

@test "a signal at any moment of a dump leaves the process running and no image, or the image alone" {
  need_root "CRIU"
  start_target memory --size 20M
  local hit=0
  terminates() {
    interrupt_at "$1" TERM dump "$TARGET" --images-dir "$image"
    if ((status == 0)); then
      wait_until 60 number_is_free
      restore_it
      rm -rf "$image"
      return
    fi
    assert_equal "$status" 143 "status at $1: $err"
    [[ $err != *"[interrupted]"* ]] || hit=$((hit + 1))
    in_state running
    no_image
    nothing_left
    [[ ! -e $image.failed-dump.log ]]
  }
  for at in 0.05 0.15 +0 +0.05 +0.1 +0.2 +0.3 +0.35 +0.4 +0.5 +0.6; do terminates "$at"; done
  hits 3 terminates
  target_goes_on
  restored_verifies
}

@test "a signal at any moment of a restore leaves the image alone, or the process" {
  need_root "CRIU"
  start_target memory --size 20M
  dump_it
  cp "$TARGET_STATUS" "$BATS_TEST_TMPDIR/rounds"
  local hit=0
  interrupts() {
    interrupt_at "$1" INT restore --images-dir "$image" --detach
    if ((status == 0)); then
      in_state running
      kill -KILL "$TARGET"
      wait_until 60 number_is_free
    else
      assert_equal "$status" 130 "status at $1: $err"
      [[ $err != *"[interrupted]"* ]] || hit=$((hit + 1))
      wait_until 60 number_is_free
      nothing_left
    fi
    cat "$BATS_TEST_TMPDIR/rounds" >"$TARGET_STATUS"
  }
  for at in 0.02 0.05 +0 +0.03 +0.06 +0.1 0.3; do interrupts "$at"; done
  hits 1 interrupts
  restore_it
  target_goes_on
  restored_verifies
}

# interrupted_at POINT ARGUMENT...: stasis gets INT while it has stopped itself there. Sets status, out, err.
interrupted_at() {
  local point=$1 tool
  shift
  STASIS_FAULT=$point:stop with_signals stasis "$@" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  tool=$!
  at_end_kill "$tool"
  wait_until 60 grep -qs "^State:[[:space:]]T" "/proc/$tool/status"
  kill -INT "$tool"
  kill -CONT "$tool"
  status=0
  wait "$tool" || status=$?
  out=$(<"$BATS_TEST_TMPDIR/out") err=$(<"$BATS_TEST_TMPDIR/err")
  ((status == 130)) && [[ $err == *"[interrupted]"* ]] && return
  printf 'at %s: status %s\n%s%s' "$point" "$status" "$out" "$err" >&2
  return 1
}

@test "a signal while host memory is pre-copied, saved or filled leaves the program as it was, or the image" {
  need_root "CRIU"
  local point way
  start_script host_memory.py 24
  # While it is written, before the stop and in it, and before and after that.
  for point in "content.write on" "host.precopied on" "host.hidden on" "content.write off" "host.saved off"; do
    read -r point way <<<"$point"
    interrupted_at "$point" dump "$TARGET" --images-dir "$image" --leave-running --pre-copy "$way" --host-memory parallel
    no_image
    nothing_left
    script_goes_on
  done
  dump_it --host-memory parallel
  # Before it is filled, and after.
  for point in criu.post-restore host.back; do
    interrupted_at "$point" restore --images-dir "$image" --detach
    wait_until 60 number_is_free
    nothing_left
  done
  restore_it
  script_goes_on
}

@test "Ctrl-C at a terminal rolls back" {
  start_target memory --size 40M
  local fifo=$BATS_TEST_TMPDIR/keys
  mkfifo "$fifo"
  STASIS_SIM_FAULTS="checkpoint:rate=10M" with_signals script -qec "trap : INT; stasis suspend $TARGET; echo ended with \$?" \
    /dev/null <"$fifo" >"$BATS_TEST_TMPDIR/tty" 3>&- &
  at_end_kill $!
  exec 8>"$fifo"
  wait_until 60 held_up
  printf '\003' >&8
  wait_until 60 grep -q "ended with 130" "$BATS_TEST_TMPDIR/tty"
  exec 8>&-
  in_state running
  target_goes_on
  target_verifies
}

@test "Ctrl-Z at a terminal does not stop an operation in the middle, and says what to do" {
  start_target memory --size 40M
  local fifo=$BATS_TEST_TMPDIR/keys
  mkfifo "$fifo"
  # A shell with job control, as people have it.
  STASIS_SIM_FAULTS="checkpoint:rate=8M" with_signals script -qec "bash -mc 'stasis suspend $TARGET; echo ended with \$?'" \
    /dev/null <"$fifo" >"$BATS_TEST_TMPDIR/tty" 3>&- &
  at_end_kill $!
  exec 8>"$fifo"
  wait_until 60 held_up
  printf '\032' >&8
  sleep 0.2
  printf '\032' >&8
  wait_until 60 grep -q "ended with" "$BATS_TEST_TMPDIR/tty"
  exec 8>&-
  grep -q "ended with 0" "$BATS_TEST_TMPDIR/tty"
  assert_equal "$(grep -c "cannot be stopped in the middle; Ctrl-C" "$BATS_TEST_TMPDIR/tty")" 1
  in_state checkpointed
  stasis resume -q "$TARGET" >/dev/null
  target_goes_on
  target_verifies
}

# can_be_stopped FILE ARGUMENT...: runs stasis in a process group that the kernel lets be stopped, for its
# parent is in another one of the session. Its number is in FILE, its status at its end in FILE.status.
can_be_stopped() {
  setsid bash -c 'file=$1; shift
    python3 -IS -c "import os, sys
os.setpgid(0, 0)
os.execvp(sys.argv[1], sys.argv[1:])" stasis "$@" >/dev/null & echo $! >"$file"
    wait $!; echo $? >"$file.status"' bash "$@" 3>&- &
  at_end_kill $!
}

# works_on_it_now FILE: stasis, whose number is in the file, has entered its operation into the journal.
works_on_it_now() { grep -qs "\"owner\":$(cat "$1" 2>/dev/null || echo none)," "$STASIS_STATE_DIR"/*.json; }

@test "a signal that is not for stasis does not end an operation in the middle" {
  start_target memory --size 20M
  local ready=$BATS_TEST_TMPDIR/ready
  for signal in USR1 USR2 ALRM VTALRM PROF IO TSTP TTIN TTOU PIPE XFSZ; do
    STASIS_SIM_FAULTS=$slow_steps can_be_stopped "$ready" suspend -q "$TARGET"
    wait_until 60 works_on_it_now "$ready"
    at_end_kill "$(<"$ready")"
    kill "-$signal" "$(<"$ready")" 2>/dev/null || true # late is too late
    wait_until 60 test -s "$ready.status"
    assert_equal "$(<"$ready.status")" 0 "status after $signal"
    in_state checkpointed
    stasis resume -q "$TARGET" >/dev/null
    rm "$ready" "$ready.status"
  done
  nothing_left
  target_goes_on
  target_verifies
}

stopped_by_key() { kill -TSTP "$1" && sleep 0.1 && grep -q "^State:[[:space:]]T" "/proc/$1/status"; }

@test "who stays attached to a restored job can be stopped and goes on" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  local ready=$BATS_TEST_TMPDIR/ready
  can_be_stopped "$ready" restore -q --images-dir "$image"
  wait_until 60 test -s "$ready"
  at_end_kill "$(<"$ready")"
  wait_until 60 lives
  target_goes_on
  # Before it has come to the waiting, it does not let itself be stopped.
  wait_until 60 stopped_by_key "$(<"$ready")"
  target_goes_on
  kill -CONT "$(<"$ready")"
  kill -ALRM "$(<"$ready")"
  wait_until 60 test -s "$ready.status"
  assert_equal "$(<"$ready.status")" $((128 + 14)) "it passes a signal on, and tells of the job's end"
  ! lives || return 1
}

@test "a limit on the size of files is an error that names it" {
  start_target memory --size 4M
  local verb
  for verb in suspend "dump --images-dir $image"; do
    [[ $verb != dump* || $(id -u) == 0 ]] || continue
    status=0
    # Standard error is a pipe: a file would take nothing either.
    # shellcheck disable=SC2086
    err=$({ (ulimit -f 0 && exec timeout 60 stasis $verb "$TARGET") 2>&1 >/dev/null 3>&- || echo "status $?"; } | cat)
    assert_contains "$err" "File too large"
    assert_contains "$err" "ulimit -f"
    assert_contains "$err" "status 1"
    in_state running
    no_image
    nothing_left
  done
  target_goes_on
  target_verifies
}

# --- SIGKILL

# kill_at SECONDS ARGUMENT...: kills stasis then, and lets CRIU see it.
kill_at() {
  local seconds=$1
  shift
  : >"$BATS_TEST_TMPDIR/said"
  STASIS_SIM_FAULTS=$slow_steps stasis "$@" >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
  local tool=$!
  sleep "$seconds"
  kill -KILL "$tool" 2>/dev/null || true
  wait "$tool" 2>/dev/null || true
}

recovered() {
  capture timeout 60 stasis recover --all
  ((status == 0))
}

# CRIU outlives stasis for a moment, in which it lets go of the process, or ends it if it had the word.
settled() { recovered && ! criu_runs && { ! lives || [[ $(state_of) == running ]]; }; }

# A criu of this test's stasis, and of no other test's.
criu_runs() {
  local pid
  for pid in $(pgrep -f "^$(real_criu) swrk" || true); do
    ! grep -qz "^STASIS_STATE_DIR=$STASIS_STATE_DIR\$" "/proc/$pid/environ" 2>/dev/null || return 0
  done
  return 1
}

@test "a resume that was killed is finished by recover --all" {
  start_target memory --size 20M
  done_by suspend "$TARGET"
  STASIS_SIM_FAULTS="restore:delay=1s" stasis resume "$TARGET" >/dev/null 2>&1 3>&- &
  local resume=$!
  wait_until 60 held_up
  kill -KILL "$resume"
  wait "$resume" || true
  done_by recover --all
  assert_contains "$out" "process $TARGET (cut short: stasis resume) is running"
  in_state running
  nothing_left
  target_goes_on
}

@test "a resume that was killed and has no room now leaves its process suspended, and says so" {
  start_target memory --size 80M
  done_by suspend "$TARGET"
  STASIS_SIM_FAULTS="restore:delay=1s" stasis resume "$TARGET" >/dev/null 2>&1 3>&- &
  local resume=$!
  wait_until 60 held_up
  kill -KILL "$resume"
  wait "$resume" || true
  STASIS_SIM_FAULTS="restore:error=2" capture stasis recover --all
  ((status == 11)) || { echo "status $status $out $err" >&2; false; }
  assert_contains "$out" "suspended as before"
  assert_contains "$err" "out-of-gpu-memory"
  in_state checkpointed
  done_by resume "$TARGET"
  nothing_left
  target_goes_on
}

@test "in another time namespace a record counts, and its process is recovered" {
  need_root "namespaces"
  unshare --time --boottime 100000 true 2>/dev/null || skip "no time namespaces"
  start_target memory --size 20M
  STASIS_FAULT=checkpoint.after:kill capture stasis suspend "$TARGET"
  in_state checkpointed
  capture unshare --time --boottime 100000 --monotonic 5000 --fork stasis recover --all
  ((status == 0))
  assert_contains "$out" "process $TARGET (cut short: stasis suspend) is running"
  in_state running
  # And what was remembered there of a suspended one is known here.
  capture unshare --time --boottime 100000 --fork stasis suspend "$TARGET"
  [[ $(find "$STASIS_STATE_DIR" -name "$TARGET-*.suspended" | wc -l) == 1 ]]
  done_by resume "$TARGET"
  [[ $(find "$STASIS_STATE_DIR" -name "$TARGET-*.suspended" | wc -l) == 0 ]]
  nothing_left
}

@test "what was cut short in a container is said by a recover outside of it, and the other way round" {
  need_root "namespaces"
  start_target memory --size 20M
  export INNER_STATUS=$BATS_TEST_TMPDIR/inner
  # shellcheck disable=SC2016
  (exec_on_gpu unshare --pid --fork --mount-proc --kill-child bash -c '
    stasis-workload memory --size 20M --status "$INNER_STATUS" &
    until [[ -s $INNER_STATUS ]]; do sleep 0.05; done
    STASIS_FAULT=checkpoint.after:kill stasis suspend -q $! || true
    touch "$INNER_STATUS.killed"
    until [[ -e $INNER_STATUS.go ]]; do sleep 0.05; done
    stasis recover --all >"$INNER_STATUS.said" 2>&1
    kill $!') </dev/null >"$BATS_TEST_TMPDIR/container.log" 2>&1 3>&- &
  local container=$!
  echo "$container" >>"$targets"
  wait_until 60 test -e "$INNER_STATUS.killed"
  capture stasis recover --all
  ((status == 0))
  assert_contains "$out" "nothing to recover"
  assert_contains "$err" "\`stasis suspend\` was cut short in another PID namespace, that of process"
  assert_contains "$err" "run \`stasis recover --all\` in that container"
  STASIS_FAULT=checkpoint.after:kill capture stasis suspend "$TARGET"
  touch "$INNER_STATUS.go"
  wait "$container" || true
  local said
  said=$(<"$INNER_STATUS.said")
  assert_contains "$said" "process 2 (cut short: stasis suspend) is running"
  assert_contains "$said" "another PID namespace, which is not seen from here"
  # That namespace is gone, and nothing is left to say of it.
  capture stasis recover --all
  assert_contains "$out" "process $TARGET (cut short: stasis suspend) is running"
  [[ $err != *"PID namespace"* ]] || { echo "$err" >&2; false; }
  nothing_left
}

# bats test_tags=long
@test "killed at any moment of a suspend or resume, the process is recovered" {
  start_target memory --size 20M
  for at in 0.01 0.03 0.06 0.1 0.13 0.16 0.2 0.25 0.3; do
    kill_at "$at" suspend "$TARGET"
    # What was done to the end is no case for recovery.
    if [[ -n $(grep -E "^(suspended|resumed)" "$BATS_TEST_TMPDIR/said") ]]; then stasis resume -q "$TARGET" >/dev/null; fi
    wait_until 60 recovered
    in_state running
    nothing_left
  done
  for at in 0.01 0.04 0.08 0.12 0.16; do
    stasis suspend -q "$TARGET" >/dev/null
    kill_at "$at" resume "$TARGET"
    wait_until 60 recovered
    # Killed before it had written what it was about to do: suspended, and nothing is said of it.
    if [[ $out != "nothing to recover"* ]]; then in_state running; fi
    done_by recover "$TARGET"
    in_state running
    nothing_left
  done
  target_goes_on
  target_verifies
}

# bats test_tags=long
@test "killed at any moment of a dump, the process is recovered, or the image is whole" {
  need_root "CRIU"
  start_target memory --size 20M
  for at in 0.05 0.15 0.25 0.3 0.34 0.38 0.42 0.46 0.5 0.55 0.6 0.7 0.8; do
    kill_at "$at" dump "$TARGET" --images-dir "$image"
    wait_until 60 settled
    if ! lives; then
      [[ -e $image/manifest.json ]]
      wait_until 60 number_is_free
      restore_it
    fi
    target_goes_on
    rm -rf "$image" "$image".*
    nothing_left
  done
  restored_verifies
}

# bats test_tags=long
@test "killed at any moment of a restore, the process is recovered, or the image restored again" {
  need_root "CRIU"
  start_target memory --size 20M
  dump_it
  cp "$TARGET_STATUS" "$BATS_TEST_TMPDIR/rounds"
  for at in 0.02 0.05 0.08 0.11 0.14 0.17 0.2 0.24 0.28 0.35; do
    kill_at "$at" restore --images-dir "$image" --detach
    wait_until 60 settled
    if lives; then
      target_goes_on
      kill -KILL "$TARGET"
    fi
    wait_until 60 number_is_free
    nothing_left
    cat "$BATS_TEST_TMPDIR/rounds" >"$TARGET_STATUS"
  done
  restore_it
  target_goes_on
  restored_verifies
}

@test "a suspend after a killed one rolls back to where that one began" {
  start_target memory --size 8M
  STASIS_SIM_FAULTS="checkpoint:delay=20s" stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$!
  wait_until 60 works_on_it "$tool"
  kill -KILL "$tool"
  wait "$tool" 2>/dev/null || true
  in_state locked
  STASIS_SIM_FAULTS="checkpoint:error=801" refused 8 not-supported suspend "$TARGET"
  in_state running
  nothing_left
  target_goes_on
  target_verifies
}

@test "recover --all without anything to recover says so" {
  done_by recover --all
  assert_contains "$out" "nothing to recover"
}

@test "recover makes run again what another tool left locked or suspended" {
  start_tree --size 4M
  cuda-checkpoint --action lock --pid "${CHILDREN[0]}"
  cuda-checkpoint --toggle --pid "${CHILDREN[1]}"
  done_by recover "$TARGET"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  target_verifies
}

@test "recover --all forgets an operation whose processes have all ended, and names its image" {
  need_root "CRIU"
  start_target memory --size 8M
  STASIS_SIM_FAULTS="checkpoint:delay=20s" stasis dump "$TARGET" --images-dir "$image" >/dev/null 2>&1 3>&- &
  local tool=$!
  wait_until 60 works_on_it "$tool"
  kill -KILL "$tool" "$TARGET"
  wait_until 60 number_is_free
  done_by recover --all
  assert_contains "$out" "none of its CUDA processes lives any more"
  assert_contains "$out" "$image"
  rm -rf "$image".*
  nothing_left
}
