#!/usr/bin/env bats
# A call of the driver that does not come back: it is given up after a while, the process is named, all is as
# it was, and nothing of the call comes to anything later.

load helpers
load stasis_lib

setup() { setup_stasis; }
teardown() {
  end_stasis
  [[ ! -e $BATS_TEST_TMPDIR/shared ]] || rm -rf "$(<"$BATS_TEST_TMPDIR/shared")"
}

# Given up after so long, in which every other call has to answer. Without it, the tests would take minutes.
soon="--driver-timeout 3000"

# no_caller_left: no process of a stasis of this test is there any more.
no_caller_left() {
  local pid
  for pid in $(pgrep -x stasis || true); do
    ! grep -qz "^STASIS_STATE_DIR=$STASIS_STATE_DIR\$" "/proc/$pid/environ" 2>/dev/null || return 1
  done
}

# hangs FAULT ARGUMENT...: stasis gives up with [no-answer], naming the target, before the minute that it gives a
# checkpoint or a restore by itself.
hangs() {
  local fault=$1 start=$SECONDS
  shift
  STASIS_SIM_FAULTS=$fault refused 7 no-answer "$@"
  ((SECONDS - start <= 55)) || { echo "it took $((SECONDS - start)) s" >&2; return 1; }
  assert_contains "$err" "process $TARGET"
  wait_until 20 no_caller_left || { echo "a process of it is left" >&2; return 1; }
}

@test "a suspend whose lock or checkpoint hangs is given up, and the process runs on" {
  start_target memory --size 4M
  for fault in lock:hang checkpoint:hang; do
    # shellcheck disable=SC2086
    hangs $fault suspend $soon "$TARGET"
    assert_contains "$err" "${fault%:*}"
    in_state running
    nothing_left
    target_goes_on
  done
  target_verifies
}

@test "a resume whose restore hangs is given up, and the process stays suspended" {
  start_target memory --size 4M
  done_by suspend "$TARGET"
  # shellcheck disable=SC2086
  hangs restore:hang resume $soon "$TARGET"
  assert_contains "$err" restore
  in_state checkpointed
  nothing_left
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "a resume whose unlock hangs for ever says what mends it; one that hangs once goes on" {
  start_target memory --size 4M
  done_by suspend "$TARGET"
  # shellcheck disable=SC2086
  STASIS_SIM_FAULTS=unlock:hang refused 12 not-rolled-back resume $soon "$TARGET"
  assert_contains "$err" "process $TARGET"
  assert_contains "$err" "stasis recover $TARGET"
  wait_until 20 no_caller_left
  in_state locked
  done_by recover --all
  in_state running
  done_by suspend "$TARGET"
  # The target counts the calls.
  # shellcheck disable=SC2086
  STASIS_SIM_FAULTS="unlock:hang@$(($(unlocks) + 1))" done_by resume $soon "$TARGET"
  assert_contains "$err" "at the second attempt"
  in_state running
  nothing_left
  target_goes_on
  target_verifies
}

# How often the target of the test above has been told to unlock by then: twice in vain, once by recover.
unlocks() { echo 3; }

@test "a dump whose checkpoint hangs is given up, leaving no image" {
  need_root "CRIU"
  start_target memory --size 4M
  # shellcheck disable=SC2086
  hangs checkpoint:hang dump $soon "$TARGET" --images-dir "$image"
  in_state running
  no_image
  nothing_left
  target_goes_on
  target_verifies
}

@test "a restore whose driver hangs is given up: the tree is ended, the image is intact" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  for fault in restore:hang unlock:hang; do
    # shellcheck disable=SC2086
    hangs $fault restore $soon --images-dir "$image" --detach
    wait_until 60 number_is_free
    nothing_left
  done
  restore_it
  target_goes_on
  restored_verifies
}

@test "a process that answers no question is named, by every verb, and left alone" {
  start_target memory --size 4M
  # While the driver works for one caller it answers no other.
  STASIS_SIM_FAULTS="lock:delay=600s" cuda-checkpoint --action lock --pid "$TARGET" >/dev/null 2>&1 3>&- &
  local locker=$!
  at_end_kill "$locker"
  wait_until 60 held_up
  for verb in suspend resume recover "dump --images-dir $image"; do
    # shellcheck disable=SC2086
    hangs "" $verb $soon "$TARGET"
    assert_contains "$err" get-state
    no_image
    nothing_left
  done
  kill -KILL "$locker"
  wait "$locker" 2>/dev/null || true
  in_state running
  target_goes_on
  target_verifies
}

@test "recover of a killed suspend is given up while the driver hangs, keeps its record, and works later" {
  start_target memory --size 4M
  STASIS_SIM_FAULTS="checkpoint:delay=20s" stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$!
  wait_until 60 works_on_it "$tool"
  kill -KILL "$tool"
  wait "$tool" 2>/dev/null || true
  # shellcheck disable=SC2086
  STASIS_SIM_FAULTS=unlock:hang capture timeout -k 5 120 stasis recover $soon --all
  assert_equal "$status" 12
  assert_contains "$err" "does not answer unlock for process $TARGET"
  in_state locked
  done_by recover --all
  in_state running
  nothing_left
  target_goes_on
  target_verifies
}

@test "nothing acts any more when stasis was killed in the middle of a call" {
  start_target memory --size 4M
  for fault in lock:delay=60s checkpoint:hang; do
    STASIS_SIM_FAULTS=$fault stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
    local tool=$!
    wait_until 60 works_on_it "$tool"
    kill -KILL "$tool"
    wait "$tool" 2>/dev/null || true
    wait_until 20 no_caller_left || { echo "a process of it is left" >&2; return 1; }
    wait_until 20 driver_is_idle
    done_by recover --all
    in_state running
    sleep 0.5
    in_state running
    nothing_left
  done
  target_goes_on
  target_verifies
}

driver_is_idle() { ! held_up; }

@test "a slow driver is no hanging one" {
  start_target memory --size 40M
  # Eight seconds of work, of which each moment shows: memory comes.
  STASIS_SIM_FAULTS="checkpoint:rate=5M" done_by suspend --driver-timeout 6000 "$TARGET"
  # Of a restore the simulated driver shows processor time only, and at this rate too little of it.
  STASIS_SIM_FAULTS="restore:rate=20M" done_by resume --driver-timeout 30000 "$TARGET"
  in_state running
  target_goes_on
  target_verifies
}

@test "a group of which one hangs is brought back whole" {
  start_tree --size 4M
  # shellcheck disable=SC2086
  STASIS_SIM_FAULTS="checkpoint:hang pid=${CHILDREN[1]}" refused 7 no-answer suspend $soon "$TARGET"
  assert_contains "$err" "process ${CHILDREN[1]}"
  in_state running "${CHILDREN[@]}"
  nothing_left
  target_goes_on
  target_verifies
}

# The mover's copy, of which the driver's calls know nothing.
@test "a copy past the driver that hangs is given up, and the memory goes another way" {
  local agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so image=$BATS_TEST_TMPDIR/hung start
  LD_PRELOAD=$agent start_target memory --size 24M
  # takes PATH WORD...: long before the minute that it would wait by itself, on that path, which is said.
  takes() {
    start=$SECONDS
    STASIS_SIM_FAULTS=transfer:hang@3 done_by "${@:2}" --json --driver-timeout 3000
    ((SECONDS - start <= 55)) || { echo "it took $((SECONDS - start)) s" >&2; return 1; }
    assert_equal "$(json 'd["path"]')" "$1"
    assert_contains "$out" "did nothing for"
  }
  takes driver suspend "$TARGET"
  # It is waited for once, not once more with another mover.
  assert_equal "$(json 'str(d["notes"]).count("did nothing for")')" 1
  done_by resume "$TARGET"
  target_goes_on
  need_root "CRIU, for the rest"
  takes driver dump "$TARGET" --leave-running --images-dir "$image"
  target_goes_on
  done_by suspend "$TARGET" --path direct
  takes direct resume "$TARGET"
  assert_contains "$out" "the processes copy by themselves"
  target_goes_on
  target_verifies
  nothing_left
}

# start_held_back [ARGUMENT...]: another user's program, $TARGET, with a file whose pages are held back; in $shared.
# `AS` is for other users than that.
start_held_back() {
  shared=$(mktemp -d /tmp/stasis-held-XXXXXX)
  echo "$shared" >"$BATS_TEST_TMPDIR/shared"
  export STASIS_SIM_DIR=$shared/sim
  mkdir -m 777 "$STASIS_SIM_DIR"
  chmod 777 "$shared"
  cp "$BATS_TEST_DIRNAME/held_back.py" "$shared"
  mknod -m 666 "$shared/fuse" c 10 229 || skip "no devices can be made here"
  # shellcheck disable=SC2086
  (exec_on_gpu setsid ${AS-setpriv --reuid 65534 --regid 65534 --clear-groups unshare --user --map-root-user} \
    unshare --mount python3 "$shared/held_back.py" "$shared" "$@") \
    </dev/null >"$shared/log" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 20 test -e "$shared/ready" -o -e "$shared/none" || { cat "$shared/log"; skip "no FUSE, or no user namespaces, for other users"; }
  [[ ! -e $shared/none ]] || skip "no FUSE here"
  at_end_kill "$(<"$shared/server")"
  chmod -R a+rwX "$STASIS_SIM_DIR"
}
@test "code of a file whose server, another user, holds its pages back holds no tool" {
  need_root "another user"
  local shared verb
  start_held_back
  for verb in "suspend $TARGET" ps "recover --all" "resume $TARGET"; do
    # Where it hangs, nothing but the server's end ends it.
    # shellcheck disable=SC2086
    stasis $verb </dev/null >"$shared/said" 2>&1 3>&- &
    wait_until 20 has_ended $! || { kill -9 "$(<"$shared/server")"; cat "$shared/said"; return 1; }
    wait $! || { cat "$shared/said"; return 1; }
  done
}
@test "code of a file whose file system does not answer, and may be used by all, holds no tool" {
  need_root "another user"
  local shared verb
  AS="" start_held_back all mute
  for verb in "suspend $TARGET" ps "recover --all" "resume $TARGET"; do
    # shellcheck disable=SC2086
    stasis $verb </dev/null >"$shared/said" 2>&1 3>&- &
    wait_until 20 has_ended $! || { kill -9 "$(<"$shared/server")"; cat "$shared/said"; return 1; }
    wait $! || { cat "$shared/said"; return 1; }
  done
}
# The kernel does not keep root out of it, as it does of the file system itself.
@test "files of an overlay that a user has mounted on what he serves himself hold no tool" {
  need_root "another user"
  local shared verb
  start_held_back overlay
  for verb in ps "dump $TARGET --images-dir $image" "doctor $TARGET --no-trial"; do
    # shellcheck disable=SC2086
    stasis $verb </dev/null >"$shared/said" 2>&1 3>&- &
    wait_until 20 has_ended $! || { kill -9 "$(<"$shared/server")"; cat "$shared/said"; return 1; }
  done
  assert_contains "$(<"$shared/said")" "watches files by inotify"
  in_state running "$TARGET"
}
@test "a program with files of a file system that answers nothing any more is told, by every verb, and not dumped" {
  need_root "another user"
  local shared verb
  AS="" start_held_back all silent
  in_time() {
    stasis "$@" </dev/null >"$shared/said" 2>&1 3>&- &
    wait_until 30 has_ended $! || { kill -9 "$(<"$shared/server")"; cat "$shared/said"; return 1; }
    status=0
    wait $! || status=$?
  }
  for verb in "suspend $TARGET" ps "recover --all" "resume $TARGET"; do
    # shellcheck disable=SC2086
    in_time $verb
    assert_equal "$status" 0 "$verb: $(<"$shared/said")"
  done
  in_time doctor "$TARGET" --no-trial
  assert_contains "$(<"$shared/said")" "a file system that does not answer"
  in_time dump "$TARGET" --images-dir "$image"
  assert_equal "$status" 9 "$(<"$shared/said")"
  assert_contains "$(<"$shared/said")" "a file system that does not answer"
  in_state running "$TARGET"
}
@test "a job of which a process waits where nothing interrupts it is not stopped for a dump" {
  need_root "another user"
  local shared
  start_held_back execute
  refused 7 busy dump "$TARGET" --images-dir "$image" --leave-running --ignore-obstacles
  assert_contains "$err" "is in a system call that nothing interrupts"
  nothing_left
}
@test "a pipe or an epoll whose lock in the kernel another process keeps holds no tool" {
  need_root "another user"
  local shared what verb
  for what in epoll pipe; do
    start_held_back $what
    # CRIU would wait there for ever, so that it is not to be tried either.
    for verb in "suspend $TARGET" "resume $TARGET" "doctor $TARGET --no-trial" "dump $TARGET --ignore-obstacles --images-dir $image"; do
      # shellcheck disable=SC2086
      stasis $verb </dev/null >"$shared/said" 2>&1 3>&- &
      wait_until 20 has_ended $! || { kill -9 "$(<"$shared/server")"; cat "$shared/said"; return 1; }
      status=0
      wait $! || status=$?
      case $verb in
        doctor*) assert_contains "$(<"$shared/said")" "whose lock in the kernel another process holds" ;;
        dump*) assert_equal "$status" 9 "$(<"$shared/said")" ;;
        *) assert_equal "$status" 0 "$(<"$shared/said")" ;;
      esac
    done
    in_state running "$TARGET"
    kill -9 "$TARGET" "$(<"$shared/server")"
  done
}
# bats test_tags=long
@test "a criu that waits in the kernel for what another process keeps is left behind, and the job runs again" {
  need_root "the lock of a pipe"
  local shared criu=$BATS_TEST_TMPDIR/criu
  AS="" start_held_back pipe late
  printf '#!/bin/sh\nexport LD_PRELOAD="%s" ASK_FIRST="%s"\nexec "%s" "$@"\n' "$STASIS_BUILD/tests/ask_first.so" "$shared" \
    "$(real_criu)" >"$criu"
  chmod +x "$criu"
  refused 12 not-rolled-back dump "$TARGET" --ignore-obstacles --images-dir "$image" --criu "$criu"
  assert_contains "$err" "waits in the kernel (pipe_"
  assert_contains "$err" "\`stasis recover $TARGET\`"
  kill -9 "$(<"$shared/server")"
  stasis recover "$TARGET"
  in_state running "$TARGET"
  stasis suspend "$TARGET"
  stasis resume "$TARGET"
}
has_ended() { [[ ! -e /proc/$1 ]] || grep -q '^State:.Z' "/proc/$1/status"; }

# CRIU may wait for it for ever: here it is one that does not go on.
@test "a program that is killed while CRIU dumps it does not hold the dump up" {
  need_root "CRIU"
  start_target host --size 96M --threads 3
  STASIS_FAULT=checkpoint.after:stop timeout -k 5 60 stasis dump "$TARGET" --images-dir "$image" >/dev/null 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  local tool criu status=0
  at_end_kill $!
  wait_until 60 eval 'tool=$(children_of $!) && grep -q "State:.*stopped" "/proc/$tool/status"'
  criu=$(for one in $(children_of "$tool"); do [[ $(<"/proc/$one/comm") == criu* ]] && echo "$one"; done)
  kill -STOP "$criu"
  kill -KILL "$TARGET"
  kill -CONT "$tool"
  wait $! || status=$?
  assert_equal "$status" 3 "$(<"$BATS_TEST_TMPDIR/err")"
  assert_contains "$(<"$BATS_TEST_TMPDIR/err")" "[process-gone]"
  no_image
}
