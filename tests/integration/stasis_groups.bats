#!/usr/bin/env bats
# Groups of processes that wait for each other on their GPUs, and what is refused before anything is
# touched: real processes on the simulated driver.

load helpers
load stasis_lib

setup() { setup_stasis; }
teardown() { end_stasis; }

# start_ranks COUNT [ARGUMENT...]: sets TARGET to their parent and CHILDREN to them.
start_ranks() {
  local count=$1
  shift
  start_target collective --children "$count" --size 256K --pause-ms 2 "$@"
  mapfile -t CHILDREN < <(children_of "$TARGET")
  assert_equal "${#CHILDREN[@]}" "$count" "ranks"
  at_end_kill "${CHILDREN[@]}"
}

# refused_untouched VERB ARGUMENT...: not supported, and not even a lock was tried.
refused_untouched() {
  STASIS_SIM_FAULTS="lock:error=999" refused 8 not-supported "$@"
  [[ $err != *"rolled back"* ]]
  in_state running "${CHILDREN[@]}"
  target_goes_on
  nothing_left
}

# --- Ranks

@test "ranks that wait for each other are suspended and resumed again and again" {
  start_ranks 8
  for ((i = 0; i < $(times 4 10); ++i)); do
    done_by suspend "$TARGET" --timeout 20000
    in_state checkpointed "${CHILDREN[@]}"
    done_by resume "$TARGET"
    target_goes_on
  done
  target_verifies
}

@test "ranks are dumped together and restored together" {
  need_root "CRIU"
  start_ranks 4
  dump_it
  gpu_is_free
  restore_it
  in_state running "${CHILDREN[@]}"
  target_goes_on
  restored_verifies 5
}

@test "a shell that starts a process after the other does not keep its tree from being suspended" {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status
  TARGET_LOG=$BATS_TEST_TMPDIR/log
  # shellcheck disable=SC2016
  (exec_on_gpu setsid bash -c 'trap : USR1
    stasis-workload memory --size 4M --status "$1" &
    while :; do for _ in 1 2 3 4 5 6 7 8; do /bin/true & done; wait -n; done' bash "$TARGET_STATUS") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  for _ in 1 2 3; do
    done_by suspend "$TARGET" --timeout 10000
    gpu_is_free
    done_by resume "$TARGET" --timeout 10000
    target_goes_on
  done
}

@test "a helper that runs in a program's memory, and is no thread of it, does not keep it from being suspended" {
  local flags helper
  cat >"$BATS_TEST_TMPDIR/helper.c" <<'END'
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static int stay(void *none) {
  const struct timespec moment = {0, 50000000};
  for (;;) syscall(SYS_nanosleep, &moment, none);
}
static char stack[1 << 16] __attribute__((aligned(16)));
__attribute__((constructor)) static void begin(void) {
  if (strcmp(program_invocation_short_name, "stasis-workload") == 0)
    clone(stay, stack + sizeof stack, strtol(getenv("SHARES"), NULL, 0) | SIGCHLD, NULL);
}
END
  cc -shared -fPIC -o "$BATS_TEST_TMPDIR/helper.so" "$BATS_TEST_TMPDIR/helper.c"
  # Its memory; also its descriptors, by which the driver finds the parent.
  for flags in 0x100 0x500; do
    SHARES=$flags LD_PRELOAD=$BATS_TEST_TMPDIR/helper.so start_target memory --size 4M
    for helper in $(children_of "$TARGET"); do
      at_end_kill "$helper"
      # The simulated driver has a child that runs another program.
      [[ $(readlink "/proc/$helper/exe") == "$(readlink "/proc/$TARGET/exe")" ]] || continue
      refused 4 not-cuda suspend "$helper"
      assert_contains "$err" "give process $TARGET"
      capture stasis ps --json
      assert_equal "$(json "[p['pid'] for p in d['processes'] if p['pid'] in ($TARGET, $helper)]")" "[$TARGET]"
    done
    done_by suspend "$TARGET"
    in_state checkpointed "$TARGET"
    done_by resume "$TARGET"
    done_by attach "$TARGET" --graphs-are-safe
    done_by suspend "$TARGET"
    done_by recover "$TARGET"
    target_goes_on
    need_root "CRIU"
    refused 9 undumpable dump "$TARGET" --images-dir "$image"
    assert_contains "$err" "shares its memory with its parent"
    target_verifies
  done
}

@test "the lock of a group says how often it tried" {
  start_ranks 4
  done_by suspend "$TARGET" --json
  assert_equal "$(json "d['lock_tries'] >= 1")" True
  done_by resume "$TARGET"
  target_verifies
}

@test "ranks without a moment of rest run on after the time limit" {
  start_ranks 3
  STASIS_SIM_FAULTS="lock:timeout pid=${CHILDREN[1]}" refused 7 timeout suspend "$TARGET" -t 1500
  in_state running "${CHILDREN[@]}"
  target_goes_on
  target_verifies
}

# --- Obstacles

@test "managed memory is refused before anything is touched" {
  start_target managed
  CHILDREN=("$TARGET")
  refused_untouched suspend "$TARGET"
  assert_contains "$err" "managed memory"
  assert_contains "$err" "process $TARGET (stasis-workload)"
  capture stasis suspend "$TARGET" --json
  assert_equal "$(json '[(o["id"], o["pid"], o["override"]) for o in d["error"]["obstacles"]]')" \
    "[('managed-memory', $TARGET, '--ignore-obstacles')]"
  if [[ $(id -u) == 0 ]]; then
    refused_untouched dump "$TARGET" --images-dir "$image"
    assert_contains "$err" "managed memory"
    no_image
  fi
  target_verifies
}

@test "with --force the driver's own refusal of managed memory is rolled back" {
  start_target managed
  refused 8 not-supported suspend "$TARGET" --force
  assert_contains "$err" "note: ignored, as asked: "
  assert_contains "$err" "rolled back"
  in_state running
  target_goes_on
  target_verifies
}

@test "a refusal brings back what a killed operation had left locked" {
  start_target managed
  STASIS_FAULT=lock.after:kill capture timeout 60 stasis suspend "$TARGET" --force
  ((status == 137)) || skip "this build has no fault points"
  in_state locked
  refused 8 not-supported suspend "$TARGET"
  in_state running
  nothing_left
  target_goes_on
  target_verifies
}

@test "a program that a CUDA tool is at work in is refused, and runs on" {
  local library
  for library in libsanitizer-collection.so libcuda-injection.so; do
    cc -shared -x c /dev/null -o "$BATS_TEST_TMPDIR/$library"
    LD_PRELOAD=$BATS_TEST_TMPDIR/$library start_target memory --size 4M
    CHILDREN=("$TARGET")
    refused_untouched suspend "$TARGET"
    assert_contains "$err" "is at work in"
  done
}

@test "NCCL's ranks are refused unless their transports survive" {
  start_ranks 2 --like-nccl
  refused_untouched suspend "$TARGET"
  assert_contains "$err" "through NCCL"
  for rank in "${CHILDREN[@]}"; do assert_contains "$err" "$rank (exe)"; done
  assert_contains "$err" "NCCL_P2P_DISABLE=1"
  assert_contains "$err" "--ignore-obstacles"
  done_by suspend "$TARGET" --ignore-obstacles
  assert_contains "$err" "note: ignored, as asked: "
  done_by resume "$TARGET"
  target_verifies
}

@test "NCCL's transports are told by the environment" {
  local settings
  for settings in "NCCL_P2P_DISABLE=1" "NCCL_SHM_DISABLE=1" "NCCL_P2P_DISABLE=0 NCCL_SHM_DISABLE=1"; do
    # shellcheck disable=SC2086 # words
    export $settings
    start_ranks 2 --like-nccl
    refused_untouched suspend "$TARGET"
    target_verifies
    unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE
  done
  for settings in "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1" "NCCL_P2P_LEVEL=LOC NCCL_CUMEM_HOST_ENABLE=0" \
    "NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0"; do
    # shellcheck disable=SC2086 # words
    export $settings
    start_ranks 2 --like-nccl
    done_by suspend "$TARGET"
    done_by resume "$TARGET"
    target_verifies
    unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_P2P_LEVEL NCCL_CUMEM_HOST_ENABLE NCCL_CUMEM_ENABLE
  done
}

@test "a single rank of NCCL shares with no other process" {
  need_root "a network namespace of its own"
  # Others' tests have such sockets too, and a namespace keeps them apart.
  start_target() {
    TARGET_LOG=$BATS_TEST_TMPDIR/alone.log TARGET_STATUS=$BATS_TEST_TMPDIR/alone.status
    (exec_on_gpu unshare --net setsid stasis-workload "$@" --status "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
    TARGET=$!
    echo "$TARGET" >>"$targets"
    wait_until 60 target_is_up
  }
  start_ranks 1 --like-nccl
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_verifies
}

# ranks_on_hosts A B [GPU]: two programs with NCCL that are said to be on these hosts, the second one on that GPU.
ranks_on_hosts() {
  local library=$BATS_TEST_TMPDIR/libnccl.so.2
  cc -shared -x c /dev/null -o "$library"
  TARGET_STATUS=$BATS_TEST_TMPDIR/first TARGET_LOG=$BATS_TEST_TMPDIR/log
  rm -f "$TARGET_STATUS" "$TARGET_STATUS.other"
  # shellcheck disable=SC2016
  (LD_PRELOAD=$library exec_on_gpu setsid bash -c 'NCCL_HOSTID=$0 stasis-workload memory --size 4M --status "$3" &
    NCCL_HOSTID=$1 CUDA_VISIBLE_DEVICES=$2 stasis-workload memory --size 4M --status "$3.other" & wait' \
    "$1" "$2" "${3:-0}" "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  TARGET_STATUS=$TARGET_STATUS.other wait_until 60 target_is_up
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
}

@test "ranks of NCCL that share a GPU are refused, and run on" {
  ranks_on_hosts a b
  refused_untouched suspend "$TARGET"
  assert_contains "$err" "shares its GPU with another one (NCCL_HOSTID)"
  for rank in "${CHILDREN[@]}"; do assert_contains "$err" "$rank ("; done
  capture stasis suspend "$TARGET" --json
  assert_equal "$(json '[o["id"] for o in d["error"]["obstacles"]]')" "['ranks-share-gpu', 'ranks-share-gpu']"
  target_goes_on
  done_by suspend "$TARGET" --ignore-obstacles
  done_by resume "$TARGET"
  target_goes_on
}

@test "ranks of NCCL with a GPU each, or of one host, are not taken for such that share one" {
  export STASIS_SIM_GPUS=2x1G
  ranks_on_hosts a b 1
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  ranks_on_hosts a a
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
}

@test "a program on a GPU that is divided is refused" {
  start_target memory --size 4M
  CHILDREN=("$TARGET")
  STASIS_SIM_MIG=1 refused_untouched suspend "$TARGET"
  assert_contains "$err" "MIG"
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_verifies
}

@test "a program under MPS is refused, and one that is older than its daemon is not" {
  local daemon=$BATS_TEST_TMPDIR/nvidia-cuda-mps-control
  cp "$(command -v sleep)" "$daemon"
  # A pipe directory of its own: other tests run beside this one.
  export CUDA_MPS_PIPE_DIRECTORY=$BATS_TEST_TMPDIR/mps
  start_target memory --size 4M
  local older=$TARGET
  sleep 0.1
  "$daemon" 300 </dev/null >/dev/null 2>&1 3>&- &
  at_end_kill $!
  start_target memory --size 4M
  CHILDREN=("$TARGET")
  refused_untouched suspend "$TARGET"
  assert_contains "$err" "MPS"
  target_verifies
  unset CUDA_MPS_PIPE_DIRECTORY
  start_target memory --size 4M
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_verifies
  done_by suspend "$older"
  done_by resume "$older"
}
