#!/usr/bin/env bats
# Where /proc is not the usual one: it hides other users' processes (hidepid), is that of another PID namespace, has
# processes alone (subset=pid), or is not there. What is not seen is never taken for what is not there.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "mounts"
}
teardown() { end_stasis; }

# In front of mount options for /proc, and a command.
# shellcheck disable=SC2016
with_proc=(unshare --mount bash -c 'mount -t proc -o "$1" proc /proc && shift && exec "$@"' bash)
# The user of number 65534, with a state directory of its own: in front of what it is to run.
other_may_come() {
  let_others_in
  other=(setpriv --reuid 65534 --regid 65534 --clear-groups env STASIS_STATE_DIR="$BATS_TEST_TMPDIR/other")
  mkdir "$BATS_TEST_TMPDIR/other"
  chmod 700 "$BATS_TEST_TMPDIR/other"
  chown 65534 "$BATS_TEST_TMPDIR/other"
}

@test "a process that /proc hides is not said to be gone, and ps says that it may not see all" {
  local options verb id
  other_may_come
  start_target memory --size 1M
  for options in hidepid=1 hidepid=2; do
    for verb in "suspend $TARGET" "resume $TARGET" "recover $TARGET" "attach $TARGET" "dump $TARGET --images-dir $BATS_TEST_TMPDIR/other/image"; do
      # shellcheck disable=SC2086
      refused_by 5 not-permitted "${with_proc[@]}" $options "${other[@]}" "$(command -v stasis)" $verb
    done
    # hidepid=1 shows that it exists, and nothing more.
    [[ $options == hidepid=1 ]] && id=permissions || id=proc
    has_obstacle $id "${with_proc[@]}" $options "${other[@]}" "$(command -v stasis)" suspend "$TARGET"
    capture "${with_proc[@]}" $options "${other[@]}" "$(command -v stasis)" ps
    assert_equal "$status" 0
    assert_contains "$err" hidepid
    capture "${with_proc[@]}" $options "${other[@]}" "$(command -v stasis)" doctor --no-trial --json
    assert_contains "$out" hidepid
    # Root is shown all.
    capture "${with_proc[@]}" $options stasis ps
    assert_contains "$out" "$TARGET"
    [[ $err != *hidepid* ]]
  done
  target_verifies
}

@test "of a tree with a process that /proc hides nothing is touched" {
  other_may_come
  TARGET_STATUS=$BATS_TEST_TMPDIR/tree.status
  : >"$TARGET_STATUS"
  chmod 666 "$TARGET_STATUS"
  chmod 777 "$STASIS_SIM_DIR"
  # shellcheck disable=SC2016
  (exec_on_gpu setsid bash -c 'sleep 300 & exec "$@"' bash "${other[@]}" stasis-workload memory --size 1M --status "$TARGET_STATUS") \
    </dev/null >"$BATS_TEST_TMPDIR/log" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up || { cat "$BATS_TEST_TMPDIR/log" && return 1; }
  for options in hidepid=1 hidepid=2; do
    refused_by 5 not-permitted "${with_proc[@]}" $options "${other[@]}" "$(command -v stasis)" suspend "$TARGET"
    assert_contains "$err" "child of process $TARGET"
  done
  in_state running
  target_goes_on
}

@test "a program that /proc hides is told of where one comes back to the GPU that it uses" {
  other_may_come
  export STASIS_SIM_DIR=$BATS_TEST_TMPDIR/other/sim
  "${other[@]}" mkdir "$STASIS_SIM_DIR"
  TARGET_STATUS=$BATS_TEST_TMPDIR/other/status
  (exec_on_gpu setsid "${other[@]}" "$(command -v stasis-workload)" memory --size 1M --status "$TARGET_STATUS") \
    </dev/null >"$BATS_TEST_TMPDIR/log" 2>&1 3>&- &
  local one=$!
  echo "$one" >>"$targets"
  wait_until 60 target_is_up
  start_target memory --size 1M
  # The simulated NVML reads of each process what it may; the real one knows of all.
  chmod -R a+rwX "$STASIS_SIM_DIR"
  for options in hidepid=1 hidepid=2; do
    capture "${with_proc[@]}" $options "${other[@]}" "$(command -v stasis)" suspend "$one"
    assert_equal "$status" 0 "$err"
    capture "${with_proc[@]}" $options "${other[@]}" "$(command -v stasis)" resume "$one"
    assert_equal "$status" 0 "$err"
    assert_contains "$err" "process $TARGET (of another user)"
  done
}

@test "a number that another user's hidden process has is in use" {
  local number
  other_may_come
  start_target memory --size 1M
  number=$TARGET
  dump_it
  chown -R 65534 "$image"
  # The number again, of another program of root's.
  python3 -IS -c 'import os, sys, time
with open("/proc/sys/kernel/ns_last_pid", "w") as last: last.write(str(int(sys.argv[1]) - 1))
if os.fork() == 0: time.sleep(300)' "$number"
  at_end_kill "$number"
  [[ -e /proc/$number ]] || skip "the number was not to be had"
  capture "${with_proc[@]}" hidepid=2 "${other[@]}" "$(command -v stasis)" inspect "$image" --json
  assert_contains "$(json '[c["error"]["code"] + ": " + c["error"]["message"] for c in d["checks"] if c["id"] == "process-numbers"]')" \
    "pid-in-use: the image needs process number $number,"
}

@test "nothing is done by the numbers of another PID namespace's /proc, or without one" {
  local way
  start_target memory --size 1M
  STASIS_FAULT=checkpoint.after:kill stasis suspend "$TARGET" || true
  in_state checkpointed
  # shellcheck disable=SC2016
  local none=(unshare --mount bash -c 'while mountpoint -q /proc; do umount -l /proc; done; exec "$@"' bash)
  local inner=(unshare --pid --fork --kill-child)
  for way in none inner; do
    local -n command=$way
    for verb in ps "recover --all" "recover $TARGET" "resume $TARGET" "suspend $TARGET" "dump $TARGET --images-dir $image"; do
      # shellcheck disable=SC2086
      refused_by 8 not-supported "${command[@]}" stasis $verb
    done
    capture "${command[@]}" stasis doctor --no-trial --json
    assert_equal "$(json 'd["verdict"]["suspend"]["possible"]')" False
  done
  in_state checkpointed
  done_by recover --all
  target_verifies
  nothing_left
}

@test "a /proc of processes alone (subset=pid) is enough to suspend and resume" {
  start_target memory --size 1M
  capture "${with_proc[@]}" subset=pid stasis suspend "$TARGET"
  assert_equal "$status" 0 "$err"
  gpu_is_free
  capture "${with_proc[@]}" subset=pid stasis resume "$TARGET"
  assert_equal "$status" 0 "$err"
  target_verifies
}
