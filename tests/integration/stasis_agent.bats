#!/usr/bin/env bats
# What a program under the agent sees and may do, on the simulated driver.

load helpers
load stasis_lib
load agent_target_lib

@test "a program sees the same with the agent and without, line by line" {
  export STASIS_SIM_GPUS=2x512M
  (exec_on_gpu stasis-agent-calls) >"$BATS_TEST_TMPDIR/without" 2>&1
  (LD_PRELOAD=$agent exec_on_gpu stasis-agent-calls) >"$BATS_TEST_TMPDIR/with" 2>&1
  (($(wc -l <"$BATS_TEST_TMPDIR/without") > 500))
  diff "$BATS_TEST_TMPDIR/without" "$BATS_TEST_TMPDIR/with"
}

@test "a program that forks all the time is suspended and goes on" {
  start_doing fork
  # What forked a moment ago may still be there, and is suspended with it.
  for _ in 1 2 3; do cycle_by direct; done
  target_verifies
}

# Programs that write a crash report or a trace so. It comes while the agent is looking something up, too, in time.
@test "a program may fork in a handler of a signal, whatever it was about to do" {
  local dir=$BATS_TEST_TMPDIR preload
  cat >"$dir/program.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define CALL(name, ...) (((int (*)())dlsym(driver, name))(__VA_ARGS__))
static volatile int forks, wrong, is_child;
static void fork_here(int number) {
  int status = 0;
  const pid_t child = fork();
  // Every other one goes on with what was interrupted.
  if (child == 0 && forks % 2) _exit(0);
  if (child == 0) { is_child = 1; return; }
  if (child < 0 || waitpid(child, &status, 0) != child || status) ++wrong;
  ++forks;
}
int main(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
  unsigned long long memory = 0, base = 0, size = 0;
  if (CALL("cuInit", 0) || CALL("cuCtxCreate_v2", &context, 0, 0) || CALL("cuMemAlloc_v2", &memory, 4UL << 20)) return 2;
  int (*look)(void*, void*, unsigned long long) = dlsym(driver, "cuMemGetAddressRange_v2");
  const time_t end = time(0) + 2;
  struct itimerval often = {{0, 700}, {0, 700}}, never = {{0, 0}, {0, 0}};
  signal(SIGALRM, fork_here);
  setitimer(ITIMER_REAL, &often, 0);
  while (time(0) < end) {
    const int result = look(&base, &size, memory);
    if (is_child) _exit(0);
    if (result || base != memory || size != 4UL << 20) return 3;
  }
  setitimer(ITIMER_REAL, &never, 0);
  if (forks < 100) return 4;
  return wrong;
}
END
  cc -w "$dir/program.c" -o "$dir/program" -ldl
  for preload in "" "$agent"; do
    capture timeout --signal=KILL 60 env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" LD_PRELOAD="$preload" "$dir/program"
    assert_equal "$status/$out" "0/" "with '$preload' ($err)"
  done
}

@test "a worker that is forked while memory leaves does not keep it" {
  local go=$BATS_TEST_TMPDIR/go when
  # The agent's descriptors of it are there, and a tool is about to take them; or they are all that keeps it.
  for when in export keep; do
    start_doing fork-once "$go"
    timeout 60 python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" "$when" "$go"
    assert_equal "$(find "/proc/$(<"$go.child")/fd" -lname "$STASIS_SIM_DIR/*" -printf '%l ')" ""
    target_goes_on
    cycle_by direct
    target_verifies
  done
}

@test "a program whose threads wait for each other is suspended, by and by" {
  start_doing wait-for-others
  local i
  for i in {1..3}; do
    done_by suspend "$TARGET" --timeout 60000
    done_by resume "$TARGET"
  done
  target_verifies
}

@test "a program that takes more GPU memory than the host has room for, while it is made ready, runs on" {
  need_root "a memory cgroup"
  local go=$BATS_TEST_TMPDIR/go before tool
  start_doing grow "$go"
  make_memory_cgroup $((160 << 20))
  echo "$TARGET" >"$CGROUP/cgroup.procs"
  mapped() { awk '/^VmSize/ { print $2 }' "/proc/$TARGET/status"; }
  before=$(mapped)
  # Where the GPU computes no digests: otherwise all that it takes would be zeros.
  STASIS_SIM_FAULTS="context:delay=10s; module:error=221" stasis suspend "$TARGET" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  tool=$!
  buffer_is_there() { (($(mapped) >= before + (16 << 10))); }
  wait_until 60 buffer_is_there
  touch "$go"
  wait_until 60 test ! -e "$go"
  status=0
  wait "$tool" || status=$?
  assert_equal "$status" 11 "$(<"$BATS_TEST_TMPDIR/out")"
  grep -q "does not fit under the memory limit" "$BATS_TEST_TMPDIR/out"
  in_state running
  target_goes_on
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  limit_cgroup $((1 << 30))
  cycle_by direct
  target_verifies
}

@test "a program that closes the driver's library and opens it again is suspended and goes on" {
  # The simulated driver is linked to stay (DF_1_NODELETE); this copy goes when no library holds it.
  local copy=$BATS_TEST_TMPDIR/driver/libcuda.so.1
  mkdir "${copy%/*}"
  python3 -IS -c 'import struct, sys
content = open(sys.argv[1], "rb").read()
stays, goes = (struct.pack("<QQ", 0x6ffffffb, flags) for flags in (8, 0))
assert content.count(stays) == 1
open(sys.argv[2], "wb").write(content.replace(stays, goes))' "$STASIS_LIBCUDA" "$copy"
  STASIS_LIBCUDA=$copy start_doing reopen
  cycle_by direct
  cycle_by direct
  target_verifies
}

@test "a program that has closed the agent's descriptor goes by the driver" {
  start_doing close-page
  cycle_by driver
  done_by suspend "$TARGET"
  assert_contains "$err" "the driver's path is taken: process $TARGET has an agent, and has closed the descriptor"
  done_by resume "$TARGET"
  target_goes_on
  refused 8 not-supported suspend "$TARGET" --path direct
  target_verifies
}

# A tool has had the agent close the gate.
held_back() { [[ $(python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" state) != 0 ]]; }

# By a thread that calls no driver, which nothing keeps from that before its memory has gone.
# unheard: the thread of TARGET's agent has not run yet, until $unheard is gone.
unheard() {
  unheard=$BATS_TEST_TMPDIR/unheard
  timeout 60 python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" unheard "$unheard" 3>&- &
  wait_until 60 test -e "$unheard"
}

@test "an agent whose thread has not run yet, on a busy machine, is waited for" {
  start_doing plain
  unheard
  { sleep 1; rm "$unheard"; } 3>&- &
  cycle_by direct
  target_verifies
}

@test "what a tool asks before the agent's thread comes to listen is answered" {
  local flag=$BATS_TEST_TMPDIR/flag
  touch "$flag"
  (LD_PRELOAD=$STASIS_BUILD/tests/slow_calls.so:$agent STASIS_SLOW_AGENT=$flag exec_on_gpu setsid stasis-workload memory \
    --size 24M --pause-ms 20 --status "$BATS_TEST_TMPDIR/status") </dev/null >&2 3>&- &
  TARGET=$! TARGET_STATUS=$BATS_TEST_TMPDIR/status
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  wait_until 60 heard
  { sleep 1; rm "$flag"; } 3>&- &
  done_by suspend "$TARGET" --json
  # After five seconds the tool would ask once more.
  assert_equal "$(json 'd["path"], d["seconds"] < 4')" "direct True" "$out"
  done_by resume "$TARGET"
  target_goes_on
}

# leaves_it_to_driver WHY [ARGUMENT...]: the driver moves TARGET's memory, and the result says why.
leaves_it_to_driver() {
  done_by suspend "$TARGET" --json "${@:2}"
  assert_equal "$(json 'd["path"]')" driver "path ($out)"
  assert_contains "$(json 'str(d.get("notes"))')" "the driver's path is taken: "
  assert_contains "$(json 'str(d.get("notes"))')" "$1"
  done_by resume "$TARGET" --json
  target_goes_on
}

@test "whenever the driver moves the memory of a program that has the agent, it is said why" {
  start_doing plain
  leaves_it_to_driver "process $TARGET (stasis-agent-ta): asked for (--path driver)" --path driver
  cuda-checkpoint --action lock --pid "$TARGET"
  leaves_it_to_driver "process $TARGET (stasis-agent-ta): locked before, by another tool"
  unheard
  leaves_it_to_driver "process $TARGET has an agent that has not begun to listen"
  rm "$unheard"
  wait_until 60 heard
  cycle_by direct
  target_verifies
  # Memory that the agent does not serve, and an agent that has served some and has none now.
  LD_PRELOAD=$agent start_target idle
  leaves_it_to_driver "process $TARGET has the agent's library and no agent: it has allocated no GPU memory by it"
  cat >"$BATS_TEST_TMPDIR/freed.py" <<'END'
import ctypes, sys, time
driver, context, large = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert driver.cuInit(0) == 0 and driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
assert driver.cuMemAlloc_v2(ctypes.byref(large), ctypes.c_size_t(4 << 20)) == 0 and driver.cuMemFree_v2(large) == 0
for round in range(1, 10**9):
    assert driver.cuCtxSynchronize() == 0
    with open(sys.argv[1], "w") as status:
        status.write(f"round {round}\n")
    time.sleep(0.02)
END
  TARGET_STATUS=$BATS_TEST_TMPDIR/freed.status
  (LD_PRELOAD=$agent exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/freed.py" "$TARGET_STATUS") </dev/null >&2 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  leaves_it_to_driver "process $TARGET (python3): no GPU memory that an agent can move"
}

heard() { python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" heard; }

@test "a program that closes the agent's descriptor while it is suspended or dumped is not lost" {
  need_root "CRIU"
  local go=$BATS_TEST_TMPDIR/go verb
  for verb in "suspend --json" "dump --images-dir $BATS_TEST_TMPDIR/image"; do
    start_doing close-page-later "$go"
    # shellcheck disable=SC2086 # words
    STASIS_SIM_FAULTS="lock:delay=8s@1" stasis $verb "$TARGET" >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
    wait_until 60 held_back
    touch "$go"
    status=0
    wait $! || status=$?
    [[ ! -e $go ]]
    if [[ $verb == dump* ]]; then
      ((status != 0))
      assert_contains "$(<"$BATS_TEST_TMPDIR/said")" "has closed the descriptor"
    else
      assert_equal "$status" 0 "$(<"$BATS_TEST_TMPDIR/said")"
      assert_contains "$(<"$BATS_TEST_TMPDIR/said")" '"path": "driver"'
      done_by resume "$TARGET" --json
    fi
    target_goes_on
    cycle_by driver
    target_verifies
    nothing_left
  done
}

@test "after exec there is another agent, with the new program's memory" {
  start_doing exec "$BATS_TEST_TMPDIR/go"
  cycle_by direct
  touch "$BATS_TEST_TMPDIR/go"
  gone() { [[ ! -e $BATS_TEST_TMPDIR/go ]]; }
  wait_until 60 gone
  target_goes_on
  cycle_by direct
  target_verifies
}

# By a thread that calls no driver, which nothing keeps from that.
# bats test_tags=long
@test "a program that becomes another by exec while it stands still does not keep the tool waiting" {
  local verb file start stopped said=$BATS_TEST_TMPDIR/said
  for verb in suspend "dump --leave-running --images-dir $BATS_TEST_TMPDIR/left"; do
    file=$BATS_TEST_TMPDIR/go.${verb%% *}
    # A suspend keeps its threads still while their memory is copied, but not before it is locked.
    stopped=held_back
    [[ $verb != suspend ]] || { export STASIS_SIM_FAULTS="lock:delay=8s@1" && stopped=held_up; }
    start_doing exec-by-thread "$file"
    start=$SECONDS
    # shellcheck disable=SC2086 # words
    STASIS_SIM_FAULTS="transfer:delay=8s@1" stasis $verb "$TARGET" >"$said" 2>&1 3>&- &
    wait_until 60 "$stopped"
    touch "$file"
    status=0
    wait $! || status=$?
    assert_equal "$status" 3 "$verb ($(<"$said"))"
    unset STASIS_SIM_FAULTS
    assert_contains "$(<"$said")" "has become another program"
    ((SECONDS - start < 60)) || { echo "it took $((SECONDS - start)) s" >&2; return 1; }
    target_goes_on
    cycle_by direct
    target_verifies
    nothing_left
  done
}

@test "the agent's page can neither shrink nor grow" {
  start_doing plain
  assert_equal "$(python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" seals)" 7
  target_verifies
}

@test "another user can neither suspend a program under the agent nor open the agent's page" {
  need_root "another user"
  start_doing plain
  chmod 711 "$BATS_TEST_TMPDIR"
  local unprivileged=(setpriv --reuid=65534 --regid=65534 --clear-groups) page how
  local own=/tmp/stasis-unprivileged-${BATS_RUN_TMPDIR##*/}
  "${unprivileged[@]}" "$STASIS_BUILD/bin/stasis" --version || skip "another user may not run the program"
  STASIS_STATE_DIR=$own refused_by 5 not-permitted "${unprivileged[@]}" "$STASIS_BUILD/bin/stasis" suspend "$TARGET"
  assert_contains "$err" "process $TARGET"
  STASIS_STATE_DIR=$own has_obstacle permissions "${unprivileged[@]}" "$STASIS_BUILD/bin/stasis" suspend "$TARGET"
  rm -rf "$own"
  page=$(find "/proc/$TARGET/fd" -lname '*memfd:stasis-agent*')
  [[ -n $page ]]
  for how in '<' '<>'; do
    bash -c "exec 9$how$page"
    capture "${unprivileged[@]}" bash -c "exec 9$how$page"
    assert_contains "$err" "Permission denied"
  done
  in_state running
  target_goes_on
  target_verifies
}

# preloaded LIBRARY: its path, if it is installed.
preloaded() { ldconfig -p | awk -v name="$1" '$1 == name && /x86-64/ { print $NF; exit }'; }

# bats test_tags=long
@test "beside other allocators that are preloaded, programs are suspended and dumped as ever" {
  local first second
  first=$(preloaded libjemalloc.so.2)
  second=$(preloaded libtcmalloc_minimal.so.4)
  [[ -n $first$second ]] || skip "neither libjemalloc2 nor libtcmalloc-minimal4 is there (tools/setup --for test)"
  if [[ -n $second ]]; then
    agent=$agent:$second start_doing fork
    grep -q "$second" "/proc/$TARGET/maps"
    cycle_by direct
    target_verifies
  fi
  [[ -n $first ]] || return 0
  agent=$first:$agent start_doing plain
  grep -q "$first" "/proc/$TARGET/maps"
  cycle_by direct
  ((EUID == 0)) || return 0
  dump_it
  restore_it
  target_goes_on
  restored_verifies
}

@test "a program whose filter of system calls ends it at one that the agent could do without" {
  cat >"$BATS_TEST_TMPDIR/filtered" <<'END'
import ctypes, os, struct, sys
# unshare(2), by its number: SECCOMP_RET_KILL_PROCESS
code = b"".join(struct.pack("HBBI", *line) for line in ((0x20, 0, 0, 0), (0x15, 0, 1, 272), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7fff0000)))
room = ctypes.create_string_buffer(code)
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
if libc.prctl(22, 2, struct.pack("HxxxxxxP", 4, ctypes.addressof(room)), 0, 0) != 0: sys.exit("no filters here")
os.execvp(sys.argv[1], sys.argv[1:])
END
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  (LD_PRELOAD=$agent exec_on_gpu setsid python3 -IS "$BATS_TEST_TMPDIR/filtered" stasis-workload memory --size 128M \
    --status "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  grep -q '^Seccomp_filters:.1$' "/proc/$TARGET/status"
  cycle_by direct
  target_verifies
}

@test "memory that the driver's restore has made leaves by the direct path, too, where there is room to replace it" {
  export STASIS_SIM_EXPORTS_RESTORED_BELOW=32M
  by_driver() {
    done_by suspend "$TARGET" --path driver
    done_by resume "$TARGET"
    target_goes_on
  }
  # Pieces of 32 MiB, and many small ones; memory that the program makes itself, mapped here and there.
  LD_PRELOAD=$agent start_target memory --size 96M
  by_driver
  cycle_by direct
  cycle_by direct
  by_driver
  if ((EUID == 0)); then
    dump_it --json
    assert_equal "$(json 'd["path"]')" direct "$out"
    restore_it
    target_goes_on
    # And what plain criu has restored with the plugin, by the driver.
    cycle_by direct
  fi
  restored_verifies
  LD_PRELOAD=$agent start_target vmm --size 96M
  by_driver
  cycle_by direct
  target_verifies
  # The GPU has no room for a second one of that size.
  export STASIS_SIM_GPUS=1x96M
  LD_PRELOAD=$agent start_target memory --size 80M
  by_driver
  capture stasis suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" driver "$out"
  assert_contains "$out" "could not export its device memory"
  done_by resume "$TARGET"
  target_verifies
}

@test "memory that the program has exported leaves by the direct path as well" {
  local with
  start_doing plain
  done_by suspend "$TARGET" --json
  with=$(json 'd["direct_bytes"]')
  start_doing export
  done_by suspend "$TARGET" --path direct --json
  assert_equal "$(json 'd["direct_bytes"]')" $((with + (2 << 20)))
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "memory that a program puts to sleep and wakes itself leaves and comes back, asleep and awake" {
  local bytes awake=0 asleep=0 tries=0
  LD_PRELOAD=$agent start_target sleep --size 12M --pause-ms 30
  while ((awake < 2 || asleep < 2)); do
    ((++tries <= 60)) || { echo "suspended $awake times awake and $asleep asleep" >&2; return 1; }
    done_by suspend "$TARGET" --json
    gpu_is_free
    bytes=$(json 'd.get("direct_bytes", 0)')
    case $bytes in
      # What it keeps lies in one unit.
      $((2 << 20))) asleep=$((asleep + 1)) ;;
      $((14 << 20))) awake=$((awake + 1)) ;;
      # On its way from the one to the other.
      *) ((bytes < 14 << 20 && bytes % (2 << 20) == 0)) || { echo "$bytes bytes" >&2; return 1; } ;;
    esac
    done_by resume "$TARGET" --json
    target_goes_on
  done
  need_root "CRIU, for the rest"
  dump_it
  gpu_is_free
  restore_it
  restored_verifies
}

# churns COUNT ARGUMENT...: TARGET's threads allocate and free all the time, and it is suspended and
# resumed that often; it verifies itself.
churns() {
  local count=$1 i direct=0 ring
  shift
  LD_PRELOAD=$agent start_target churn --pause-ms 5 "$@"
  for ((i = 1; i <= count; ++i)); do
    # All of the ring is zeroed by the kernel each time, half of what the tools cost here.
    ring=(--ring 8M)
    ((i % 10 != 1)) || ring=()
    done_by suspend "$TARGET" --json "${ring[@]}"
    # At some moments they have nothing.
    [[ $out != *'"path": "direct"'* ]] || ((direct += 1))
    ((i % 10 != 1)) || gpu_is_free
    done_by resume "$TARGET" --json "${ring[@]}"
    ((i % 10 != 1)) || target_goes_on
  done
  ((direct >= count * 3 / 4)) || { echo "$direct of $count by the direct path" >&2; return 1; }
  target_goes_on
  target_verifies
}

@test "recover does not wait until a program that allocates and frees all the time has done" {
  LD_PRELOAD=$agent start_target churn --pause-ms 5 --threads 2 --size 28M
  # What it allocates in between may have one go by the driver, which the fault does not meet.
  local i
  for ((i = 0; i < 20; ++i)); do
    capture env STASIS_FAULT=direct.emptied:kill stasis suspend "$TARGET"
    ((status == 0)) || break
    done_by resume "$TARGET"
  done
  assert_equal "$status" 137
  local start=$SECONDS
  done_by recover "$TARGET"
  ((SECONDS - start < 40)) || { echo "it took $((SECONDS - start)) s" >&2; return 1; }
  target_goes_on
  target_verifies
  nothing_left
}

@test "threads that allocate and free all the time are suspended many times" {
  churns "$(times 12 200)" --threads 4 --size 56M
}
