#!/usr/bin/env bats
# Calls inside programs that run (docs/adr/0052-calls-inside.md): what they find, what they leave behind,
# whom they leave alone, and that a program runs on whatever becomes of the tool.
# Long because each of those it leaves alone is another program, looked at with the same helpers.

load helpers
load stasis_lib

setup() { setup_stasis; }
teardown() { end_stasis; }

# start_program MODE [ARGUMENT...]: stasis-inside-target; sets TARGET. `PROGRAM` is another one, `BY` a command before it.
start_program() {
  TARGET_LOG=$BATS_TEST_TMPDIR/program.log
  : >"$TARGET_LOG" # of the program before
  # shellcheck disable=SC2086
  (exec_on_gpu ${BY:-} "${PROGRAM:-stasis-inside-target}" "$@") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 grep -qs ready "$TARGET_LOG"
}
# It says that all came out right.
ends_right() {
  kill -TERM "$TARGET"
  wait_until 60 grep -qE "right|wrong" "$TARGET_LOG"
  assert_contains "$(<"$TARGET_LOG")" right
}

looks_into() {
  capture timeout 120 stasis-inside --simulated "$@"
  ((status == 0)) && return
  printf 'stasis-inside %s: status %s\n%s%s' "$*" "$status" "$out" "$err" >&2
  return 1
}
# left_alone REASON: it is not touched, and says why.
left_alone() {
  local before
  before=$(wc -l <"/proc/$TARGET/maps")
  capture timeout 60 stasis-inside --nothing "$TARGET"
  assert_equal "$status" 3
  assert_contains "$err" "$1"
  assert_equal "$(wc -l <"/proc/$TARGET/maps")" "$before" "mappings"
}
# Of the tool: code without a file.
own_mappings() { grep -c "r-xp 00000000 00:00 0 *$" "/proc/$TARGET/maps" || true; }
threads() { ls "/proc/$TARGET/task" | wc -l; }
descriptors() { ls "/proc/$TARGET/fd" | wc -l; }

# --- What it finds

@test "a program's own memory is told from what may be another's" {
  start_target memory --size 8M
  looks_into --memory "$TARGET"
  assert_contains "$out" ", clean;"
  [[ $out != *"may be imported)"* ]]
  target_goes_on
  target_verifies
  # Of cuMemCreate, that may be exported: what was imported may not.
  start_target vmm --size 8M
  looks_into --memory "$TARGET"
  assert_contains "$out" ", clean;"
  target_goes_on
  target_verifies
}

@test "memory of a pool is a program's own" {
  start_target pool --size 8M
  # A piece that it frees between two questions has no answer, and counts as one that may be imported.
  is_clean() {
    looks_into --memory "$TARGET"
    assert_contains "$out" "handle-result 0"
    [[ $out == *", clean;"* ]]
  }
  wait_until 30 is_clean
  target_goes_on
  target_verifies
}

# --- What it leaves behind

@test "fifty threads that work all the time, many calls: nothing is left, and all they did is right" {
  local times=$(times 10 100)
  start_program load 50
  looks_into --times "$times" "$TARGET"
  looks_into --nothing --times "$times" "$TARGET"
  # One, with what the C library has given a thread of ours to keep.
  (($(own_mappings) <= 1))
  assert_equal "$(cat "/proc/$TARGET/task"/*/comm 2>/dev/null | grep -c '^stasis-inside$' || true)" 0 "threads of the tool's"
  (($(threads) < 60 && $(descriptors) < 30))
  ends_right
}

@test "a program that waits has as many threads, mappings and descriptors after two hundred calls" {
  start_program idle
  looks_into --nothing --times 2 "$TARGET"
  local before
  before="$(threads) $(wc -l <"/proc/$TARGET/maps") $(descriptors)"
  looks_into --nothing --times 200 "$TARGET"
  assert_equal "$(threads) $(wc -l <"/proc/$TARGET/maps") $(descriptors)" "$before"
  ends_right
}

@test "a program that was looked into is suspended, dumped and restored, and looked into again" {
  need_root "CRIU"
  start_target threads
  looks_into --times 3 "$TARGET"
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  looks_into --times 3 "$TARGET"
  dump_it
  restore_it
  target_goes_on
  looks_into --times 3 "$TARGET"
  target_goes_on
  restored_verifies 1
}

@test "a library is loaded into a program that runs, also where it sees no file of ours" {
  local library=$STASIS_BUILD/tests/loaded_inside.so
  start_program load 20
  looks_into --load "$library" --call stasis_loaded "$TARGET"
  assert_contains "$out" "answers 1022"
  looks_into --load "$library" --call stasis_loaded "$TARGET"
  assert_contains "$out" "answers 1022"
  capture timeout 60 stasis-inside --load "$library" --call nothing_there "$TARGET"
  assert_equal "$status" 3
  assert_contains "$err" "undefined symbol: nothing_there"
  capture timeout 60 stasis-inside --load "$BATS_TEST_FILENAME" --call stasis_loaded "$TARGET"
  assert_equal "$status" 3
  assert_contains "$err" "cannot load"
  (($(descriptors) < 30))
  ends_right
}

# --- Whom it leaves alone

@test "a static program is left alone" {
  [[ -x $STASIS_BUILD/bin/stasis-inside-target-static ]] || skip "it is not built"
  PROGRAM=stasis-inside-target-static start_program idle
  left_alone "it is a static program"
  ends_right
}

# Two threads, and it is right when it is asked to end.
@test "a musl program, dynamic or static, is left alone, and attach and suspend say that it uses no CUDA" {
  command -v musl-gcc >/dev/null || skip "no musl-gcc (Debian: musl-tools)"
  local option reason verb
  cat >"$BATS_TEST_TMPDIR/program.c" <<'END'
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
static volatile sig_atomic_t ended;
static void end(int number) { ended = number; }
static void *work(void *counter) {
  while (!ended) ++*(volatile unsigned long *)counter, usleep(1000);
  return 0;
}
int main(void) {
  static unsigned long rounds;
  pthread_t thread;
  signal(SIGTERM, end);
  pthread_create(&thread, 0, work, &rounds);
  puts("ready"), fflush(stdout);
  pthread_join(thread, 0);
  puts(rounds > 0 ? "right" : "wrong"), fflush(stdout);
  return 0;
}
END
  for option in -pie -static; do
    musl-gcc -w "$option" "$BATS_TEST_TMPDIR/program.c" -o "$BATS_TEST_TMPDIR/program$option"
    PROGRAM=$BATS_TEST_TMPDIR/program$option start_program
    reason="it is musl"
    [[ $option != -static ]] || reason="it is a static program"
    left_alone "$reason"
    for verb in attach suspend; do
      refused 4 not-cuda "$verb" "$TARGET"
    done
    (($(own_mappings) == 0 && $(threads) == 2))
    ends_right
  done
}

@test "a program with one thread is left alone" {
  start_program alone
  left_alone "one thread"
  ends_right
}

@test "a filter of system calls that lets ours pass is no hindrance, and one that does not is left alone" {
  need_root "reading a filter"
  start_program filter
  looks_into --nothing "$TARGET"
  ends_right
  start_program refusing
  left_alone "system call 56"
  ends_right
}

@test "a program with other rights than its user's is left alone" {
  need_root "another user"
  start_program effective
  left_alone "other rights"
  ends_right
}

@test "a program that none may look into is left alone" {
  need_root "another user"
  chmod 711 "$BATS_TEST_TMPDIR"
  BY="setpriv --reuid 65534 --clear-groups" start_program private
  left_alone "PR_SET_DUMPABLE"
  ends_right
}

@test "no new privileges are no hindrance, nor are namespaces of its own" {
  need_root "namespaces"
  BY="setpriv --no-new-privs" start_program idle
  looks_into --nothing "$TARGET"
  ends_right
  BY="unshare --fork --pid --mount-proc --kill-child" start_program idle
  TARGET=$(children_of "$TARGET")
  looks_into --nothing --times 3 "$TARGET"
  ends_right
}

@test "a program that is stopped, traced or has ended is left alone" {
  start_program idle
  kill -STOP "$TARGET"
  wait_until 60 grep -q "^State:[[:space:]]*T" "/proc/$TARGET/status"
  left_alone "stopped by a signal"
  kill -CONT "$TARGET"
  start_tracer
  left_alone "traced by process"
  kill -KILL "$TRACER"
  wait_until 60 grep -q "^TracerPid:[[:space:]]*0" "/proc/$TARGET/status"
  looks_into --nothing "$TARGET"
  ends_right
  start_program leaderless
  wait_until 60 grep -q "^State:[[:space:]]*Z" "/proc/$TARGET/status"
  left_alone "has ended"
  ends_right
}

# SIGSTOP is what nothing holds back: a thread that makes a call for the tool has it, too.
@test "a program that is stopped while the tool is in it stays stopped, and goes on right" {
  local mode i tool
  for mode in idle "load 4"; do
    # shellcheck disable=SC2086
    start_program $mode
    for ((i = 0; i < 15; ++i)); do
      timeout 60 stasis-inside --nothing --times 20 "$TARGET" >"$BATS_TEST_TMPDIR/tool.log" 2>&1 3>&- &
      tool=$!
      sleep "0.0$((i * 4 / 10))$((i * 4 % 10))"
      kill -STOP "$TARGET"
      status=0
      wait "$tool" || status=$?
      # Left alone from then on, and that is said; or it was done.
      if ((status != 0)); then
        assert_equal "$status" 3
        assert_contains "$(<"$BATS_TEST_TMPDIR/tool.log")" "busy: "
      fi
      wait_until 60 grep -q "^State:[[:space:]]*T" "/proc/$TARGET/status"
      kill -CONT "$TARGET"
    done
    ends_right
  done
}

@test "a program that waits for a child of vfork, or becomes another one, is not harmed" {
  start_program vfork
  looks_into --nothing --times 10 "$TARGET"
  ends_right
  start_program exec
  local i
  for ((i = 0; i < 30; ++i)); do
    capture timeout 60 stasis-inside --nothing "$TARGET"
    ((status == 0 || status == 3))
  done
  kill -0 "$TARGET"
}

@test "a program that becomes one with more rights when it was just looked at is left alone" {
  need_root "another user"
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  local program=$BATS_TEST_TMPDIR/more-rights tool
  let_others_in
  install -m 4755 "$(command -v stasis-inside-target)" "$program"
  BY="setpriv --reuid 65534 --regid 65534 --clear-groups" PROGRAM=$(command -v stasis-inside-target) start_program become "$program"
  STASIS_FAULT=inside.checked:stop stasis-inside --nothing "$TARGET" >"$BATS_TEST_TMPDIR/tool.log" 2>&1 3>&- &
  tool=$!
  at_end_kill "$tool"
  wait_until 60 grep -q "^State:[[:space:]]*T" "/proc/$tool/status"
  : >"$TARGET_LOG"
  kill -TERM "$TARGET"
  wait_until 60 grep -qs ready "$TARGET_LOG"
  [[ $(stat -c %u "/proc/$TARGET/environ") == 0 ]] || skip "no setuid programs here"
  kill -CONT "$tool"
  status=0
  wait "$tool" || status=$?
  assert_equal "$status" 3
  assert_contains "$(<"$BATS_TEST_TMPDIR/tool.log")" "another program (exec)"
  ends_right
}

# --- Whatever becomes of the tool

@test "a tool that is killed at any step leaves the program running, and the next one goes on" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  start_program load 8
  local point
  for point in checked step mapped begun done after; do
    STASIS_FAULT=inside.$point:kill capture timeout 60 stasis-inside --simulated "$TARGET"
    assert_equal "$status" 137 "$point: $err"
    looks_into "$TARGET"
    STASIS_FAULT=inside.$point:error capture timeout 60 stasis-inside --simulated "$TARGET"
    assert_equal "$status" 3 "$point: $err"
    looks_into "$TARGET"
  done
  ends_right
}

@test "a library that is unloaded while the program makes a system call for the tool was not used for it" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  local tool
  start_program unload "$STASIS_BUILD/tests/loaded_inside.so"
  STASIS_FAULT=inside.step:stop stasis-inside --nothing "$TARGET" >"$BATS_TEST_TMPDIR/tool.log" 2>&1 3>&- &
  tool=$!
  at_end_kill "$tool"
  wait_until 60 grep -q "^State:[[:space:]]*T" "/proc/$tool/status"
  kill -USR1 "$TARGET"
  wait_until 60 grep -qs unloaded "$TARGET_LOG"
  kill -CONT "$tool"
  status=0
  wait "$tool" || status=$?
  assert_equal "$status" 0 "$(<"$BATS_TEST_TMPDIR/tool.log")"
  ends_right
}

@test "a tool that is held up inside gives up, the program runs on, and the next call is made" {
  local flag=$BATS_TEST_TMPDIR/slow before
  LD_PRELOAD=$STASIS_BUILD/tests/slow_calls.so STASIS_SLOW_MALLOC=$flag start_program idle
  before=$(threads)
  : >"$flag"
  capture timeout 60 stasis-inside --nothing --timeout 100 "$TARGET"
  assert_equal "$status" 3
  assert_contains "$err" "has not come back in time"
  assert_equal "$(threads)" $((before + 1)) "threads"
  # It is not touched while a thread of the tool's may use it.
  assert_equal "$(own_mappings)" 1 "mappings of the tool's"
  rm "$flag"
  no_thread_of_ours() { (($(threads) == before)); }
  wait_until 60 no_thread_of_ours
  looks_into --nothing --times 3 "$TARGET"
  ends_right
}

@test "a call that has no time is cancelled, and leaves nothing behind" {
  start_program load 4
  local i
  for ((i = 0; i < 20; ++i)); do
    capture timeout 60 stasis-inside --simulated --timeout 0 "$TARGET"
    ((status == 0)) || assert_contains "$err" "timeout"
  done
  looks_into "$TARGET"
  (($(own_mappings) <= 1))
  ends_right
}

# --- What comes of it

# refused_untouched VERB ARGUMENT...: the reason is named, and not even a lock was tried.
refused_untouched() {
  STASIS_SIM_FAULTS="lock:error=999" refused 8 not-supported "$@"
  assert_contains "$err" "may be another process's"
  assert_contains "$err" "--ignore-obstacles"
  target_goes_on
  nothing_left
}

@test "processes of one tree that may share GPU memory are refused, and consent loses the job as the driver does" {
  start_target ipc
  refused_untouched suspend "$TARGET"
  [[ $(id -u) != 0 ]] || refused_untouched dump "$TARGET" --images-dir "$image"
  capture stasis doctor "$TARGET" --json
  json "' '.join({f['light'] for f in d['processes'] if f['id'] == 'sharing-unknown'})"
  assert_contains "$(json "' '.join({f['light'] for f in d['processes'] if f['id'] == 'sharing-unknown'})")" red
  done_by suspend "$TARGET" --ignore-obstacles
  capture timeout 60 stasis resume "$TARGET"
  ((status != 0))
}

@test "processes that cannot be asked are suspended with a word, and refused if they share host memory" {
  # Two that use CUDA, both with a filter that does not let a thread of the tool's be made.
  [[ -x $STASIS_BUILD/bin/stasis-inside-target ]]
  TARGET_LOG=$BATS_TEST_TMPDIR/program.log
  # shellcheck disable=SC2016
  (exec_on_gpu bash -c 'stasis-inside-target cuda-refusing & stasis-inside-target cuda-refusing & wait') \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  both_ready() { (($(grep -c ready "$TARGET_LOG") == 2)); }
  wait_until 60 both_ready
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  done_by suspend "$TARGET"
  assert_contains "$err" "cannot be asked"
  in_state checkpointed "${CHILDREN[@]}"
  done_by resume "$TARGET"
  kill -KILL "${CHILDREN[@]}"
  : >"$TARGET_LOG" # or those of before count as ready
  (exec_on_gpu bash -c 'stasis-inside-target cuda-refusing /dev/shm/inside-$$ & stasis-inside-target cuda-refusing /dev/shm/inside-$$ & wait') \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 both_ready
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  STASIS_SIM_FAULTS="lock:error=999" refused 8 not-supported suspend "$TARGET"
  assert_contains "$err" "shares host memory"
  done_by suspend "$TARGET" --ignore-obstacles
  done_by resume "$TARGET"
}

# share_beside HOW: a program that shares what HOW makes, and one that has it open, in one tree and without agents.
share_beside() {
  TARGET_STATUS=$BATS_TEST_TMPDIR/$1 TARGET_LOG=$BATS_TEST_TMPDIR/$1.log
  : >"$BATS_TEST_TMPDIR/$1.go"
  # shellcheck disable=SC2016
  (exec_on_gpu setsid bash -c 'stasis-agent-target "$0" "$1" "$1.go" & until [[ -e $1.go.handle ]]; do sleep 0.01; done
    stasis-agent-target open-shared "$1.done" "$1.go" & wait' "$1" "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 test -s "$TARGET_STATUS.done"
  wait_until 60 test -s "$TARGET_STATUS"
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
}

@test "pieces as small as variables that may be another's are told, and larger ones refused" {
  share_beside share-small
  refused_untouched suspend "$TARGET"
  kill -KILL -- "-$TARGET"
  share_beside share-tiny
  # It goes on to the driver, which is told to refuse the lock: this program would not come back.
  STASIS_SIM_FAULTS="lock:error=999" capture stasis suspend "$TARGET"
  ((status != 0))
  assert_contains "$err" "note: "
  assert_contains "$err" "1 piece of GPU memory (64.0 KiB) that may be another process's"
  [[ $err != *"if they share none"* ]]
  target_goes_on
}

@test "an agent that is switched off, or keeps out of a CUDA tool's way, knows nothing" {
  STASIS_AGENT=off LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so start_target ipc
  refused_untouched suspend "$TARGET"
  kill -KILL -- "-$TARGET"
  CUDA_INJECTION64_PATH=/tool.so LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so start_target ipc
  refused_untouched suspend "$TARGET"
}

@test "two processes whose GPU memory is their own need no consent" {
  start_target collective --children 2 --size 256K --pause-ms 2
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_verifies
}

@test "memory that another process exported is recognised, also behind memory of a program's own" {
  start_target collective --children 2 --size 4M --sharing --pause-ms 2
  refused_untouched suspend "$TARGET"
  kill -KILL -- "-$TARGET"
  TARGET_STATUS=$BATS_TEST_TMPDIR/exporter TARGET_LOG=$BATS_TEST_TMPDIR/exporter.log
  (exec_on_gpu setsid stasis-agent-target export-to-child "$TARGET_STATUS" "$BATS_TEST_TMPDIR/import") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 test -s "$BATS_TEST_TMPDIR/import.done"
  wait_until 60 target_is_up
  refused_untouched suspend "$TARGET"
}

@test "one of several that share host memory is refused by itself, too" {
  local kind
  # Which of the two has memory of the other's is chance; the other one's is then open in this.
  for kind in d i; do
    start_target sharing --children 2 --pieces 8 --imports 20 --piece-kinds $kind --pause-ms 2
    mapfile -t CHILDREN < <(children_of "$TARGET")
    refused_untouched suspend "${CHILDREN[0]}"
    assert_contains "$err" "shares host memory with process ${CHILDREN[1]}"
    refused_untouched suspend "${CHILDREN[1]}"
    assert_contains "$err" "shares host memory with process ${CHILDREN[0]}"
    in_state running "${CHILDREN[@]}"
  done
}

@test "one that may have memory of a process it shares nothing else with is told of, by itself" {
  start_target ipc
  mapfile -t CHILDREN < <(children_of "$TARGET")
  # It goes on to the driver, which is told to refuse the lock: this program would not come back.
  STASIS_SIM_FAULTS="lock:error=999" capture stasis suspend "${CHILDREN[0]}"
  ((status != 0))
  assert_contains "$err" "note: "
  assert_contains "$err" "may be another process's"
  assert_contains "$err" ", which uses CUDA and is not in the tree: process ${CHILDREN[0]}"
  target_goes_on
  capture stasis doctor "${CHILDREN[0]}" --json
  assert_contains "$(json "' '.join({f['light'] for f in d['processes'] if f['id'] == 'sharing-unknown'})")" yellow
}

@test "the tool is no other process that uses CUDA" {
  start_target ipc
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  kill -KILL "$TARGET"
  wait_until 60 test ! -e "/proc/$TARGET/exe"
  STASIS_SIM_FAULTS="lock:error=999" capture stasis suspend "${CHILDREN[0]}"
  ((status != 0))
  [[ $err != *"(stasis)"* && $err != *"(stasis-mover)"* ]] || { echo "$err" >&2 && return 1; }
}

@test "one process needs no consent, whatever it has, also beside another that uses CUDA" {
  start_target memory --size 8M
  local other=$TARGET
  start_target vmm --size 8M
  done_by suspend "$TARGET"
  [[ $err != *"another process"* ]]
  done_by resume "$TARGET"
  target_verifies
  kill -KILL "$other"
}
