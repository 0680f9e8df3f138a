#!/usr/bin/env bats
# stasis restore where the tree that comes back meets what is there: process numbers of our own, and a terminal that is
# not there any more. With the real CRIU, on the simulated driver.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU and namespaces"
  TARGET_STATUS=$BATS_TEST_TMPDIR/target.status
}
teardown() { end_stasis; }

# In a fresh PID namespace, as a container has it, where numbers begin at 1.
fresh=(unshare --pid --fork --mount-proc --kill-child)

# An image of a program with the number 2, which opens its files in there, and has none of ours. Its threads have none
# of the numbers that what starts stasis and stasis itself have at a restore.
dumped_in_fresh() {
  cat >"$BATS_TEST_TMPDIR/dump" <<'END'
for fd in /proc/self/fd/*; do ((${fd##*/} <= 2)) || eval "exec ${fd##*/}>&-"; done 2>/dev/null
(
  echo 50 >/proc/sys/kernel/ns_last_pid
  exec setsid stasis-workload memory --size 4M --pause-ms 20 --status "$1" </dev/null >"$1.log" 2>&1
) &
until grep -qs "^round 0*[1-9]" "$1"; do sleep 0.05; done
stasis dump $! --images-dir "$2"
END
  (exec_on_gpu "${fresh[@]}" bash "$BATS_TEST_TMPDIR/dump" "$TARGET_STATUS" "$image") </dev/null >"$BATS_TEST_TMPDIR/dumped" 2>&1 3>&- ||
    { cat "$BATS_TEST_TMPDIR/dumped" >&2; return 1; }
  [[ -e $image/criu/core-2.img ]]
  wait_until 60 gpu_is_free
}

# restored_in_fresh COMMAND...: goes on there.
restored_in_fresh() {
  local before
  before=$(target_round)
  (exec_on_gpu "${fresh[@]}" "$@") </dev/null >"$BATS_TEST_TMPDIR/restored" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 target_is_past "$before" || { cat "$BATS_TEST_TMPDIR/restored" >&2; return 1; }
  kill -KILL $!
  wait $! || true
  wait_until 60 gpu_is_free
}

@test "an image with the low numbers of a container is restored in a fresh PID namespace" {
  dumped_in_fresh
  restored_in_fresh stasis restore --images-dir "$image"
  # Stasis itself has the root's number: a namespace below is for the tree.
  # shellcheck disable=SC2016 # for the inner shells
  restored_in_fresh bash -c 'stasis restore --images-dir "$1"; exit $?' bash "$image"
  grep -q "the image needs process number 2, which is stasis's own" "$BATS_TEST_TMPDIR/restored"
  # That would end with stasis. What the message says instead helps.
  # shellcheck disable=SC2016
  refused_by 11 pid-in-use "${fresh[@]}" bash -c 'stasis restore --images-dir "$1" --detach; exit $?' bash "$image"
  # As the first line of a script, where a shell that it starts would get that very number.
  local line=${err#*"starts stasis: "}
  line=${line%%ns_last_pid*}ns_last_pid
  [[ $line == "echo "*" >/proc/sys/kernel/ns_last_pid" ]]
  restored_in_fresh bash -c "$line; stasis restore --images-dir '$image' --detach && sleep 60"
  # The same where it has the number of a thread.
  local thread
  thread=$(basename -s .img "$image"/criu/core-*.img | sed 's/core-//' | sort -n | tail -n 1)
  # shellcheck disable=SC2016
  refused_by 11 pid-in-use "${fresh[@]}" bash -c 'echo $(($2 - 1)) >/proc/sys/kernel/ns_last_pid
    stasis restore --images-dir "$1" --detach; exit $?' bash "$image" "$thread"
  assert_contains "$err" "the image needs thread number $thread, which is the one of this process"
  assert_contains "$err" "echo $thread >/proc/sys/kernel/ns_last_pid"
}

@test "what starts stasis may have the number that the image needs, and the message says what helps" {
  dumped_in_fresh
  # shellcheck disable=SC2016 # for the inner shells
  refused_by 11 pid-in-use "${fresh[@]}" bash -c 'timeout 60 stasis restore --images-dir "$1"; exit $?' bash "$image"
  assert_contains "$err" "in use by timeout, by which this stasis was started"
  assert_contains "$err" "unshare --pid --fork --mount-proc stasis restore"
  # The namespace would end with the tool.
  refused_by 2 usage unshare --pid --fork --mount-proc stasis restore --images-dir "$image" --detach
  [[ $err != *"still running"* ]]
  # shellcheck disable=SC2016
  restored_in_fresh bash -c 'timeout 60 unshare --pid --fork --mount-proc stasis restore --images-dir "$1"; exit $?' bash "$image"
}

# After its highest number the kernel goes on with the lowest. A job that has both leaves none of them
# to the helpers of a restore.
@test "a job whose numbers are on both sides of the highest one is restored" {
  cat >"$BATS_TEST_TMPDIR/both" <<'END'
for fd in /proc/self/fd/*; do ((${fd##*/} <= 2)) || eval "exec ${fd##*/}>&-"; done 2>/dev/null
echo $(($(</proc/sys/kernel/pid_max) - 3)) >/proc/sys/kernel/ns_last_pid
setsid stasis-workload tree --size 4M --pause-ms 20 --status "$1" </dev/null >"$1.log" 2>&1 &
until grep -qs "^round 0*[1-9]" "$1" && grep -qs "^round 0*[1-9]" "$1.1"; do sleep 0.05; done
stasis dump $! --images-dir "$2"
echo $(($(</proc/sys/kernel/pid_max) - 2)) >/proc/sys/kernel/ns_last_pid
exec stasis restore --images-dir "$2"
END
  (exec_on_gpu "${fresh[@]}" bash "$BATS_TEST_TMPDIR/both" "$TARGET_STATUS" "$image") </dev/null >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 grep -q "^restored" "$BATS_TEST_TMPDIR/said" || { cat "$BATS_TEST_TMPDIR/said" >&2; return 1; }
  compgen -G "$image/criu/core-3??.img"
  [[ -e $image/criu/core-$(($(</proc/sys/kernel/pid_max) - 2)).img ]]
  target_goes_on
}

@test "a restored CUDA process that has already ended is process-gone, and not ok" {
  start_target memory --size 4M --pause-ms 20
  done_by dump "$TARGET" --images-dir "$image"
  STASIS_FAULT=restore.kept:target-dies capture timeout 60 stasis restore --images-dir "$image" --detach --json
  assert_equal "$status" 3
  assert_equal "$(json 'd["ok"], d["error"]["code"]')" "False process-gone"
}

@test "of a tree whose first process runs, one that has already ended is told, and the restore has succeeded" {
  TARGET_STATUS=$BATS_TEST_TMPDIR/target.status
  TARGET_LOG=$BATS_TEST_TMPDIR/target.log
  # shellcheck disable=SC2016 # for the bash in it
  (exec_on_gpu setsid bash -c 'stasis-workload memory --size 4M --status "$0" & while :; do wait; sleep 0.1; done' \
    "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  local child
  child=$(children_of "$TARGET")
  done_by dump "$TARGET" --images-dir "$image"
  STASIS_FAULT=restore.kept:stop timeout 60 stasis restore --images-dir "$image" --detach >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
  local tool=$!
  wait_until 60 stopped_below "$tool"
  at_end_kill "$TARGET"
  kill -KILL "$child"
  kill -CONT "$(pgrep -P "$tool")"
  wait "$tool"
  assert_contains "$(<"$BATS_TEST_TMPDIR/said")" "process $child (stasis-workload) has ended since it was restored"
  kill -0 "$TARGET"
}

@test "a restore says in which audit session the processes were and are" {
  need_root "CRIU"
  start_target memory --size 1M
  dump_it
  restore_it --json
  assert_equal "$(json "[one for one in d['lost'] if 'audit' in one]")" "[]"
  kill -9 "$TARGET"
  wait_until 60 number_is_free
  rm -rf "$image"
  [[ -w /proc/self/loginuid && $(</proc/self/sessionid) == 4294967295 ]] || skip "no audit here, or a session already"
  eval "of_the_gpu() $(declare -f exec_on_gpu | tail -n +2)"
  exec_on_gpu() { echo 0 >"/proc/$BASHPID/loginuid" && of_the_gpu "$@"; }
  start_target memory --size 1M
  local session
  session=$(<"/proc/$TARGET/sessionid")
  [[ $session != 4294967295 ]] || skip "this kernel gives no audit session"
  dump_it
  restore_it --json
  assert_contains "$(json "'; '.join(d['lost'])")" "audit sessions (ausearch --session): process $TARGET: $session, now "
  assert_equal "$(<"/proc/$TARGET/loginuid")" 0
  target_goes_on
}
