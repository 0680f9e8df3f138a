#!/usr/bin/env bats
# Managed memory: the driver refuses a process that has any, and from then on for ever; the agent gives it up before. The
# program has pieces of many sizes, verifies all of them and the advice for them, and has a thread that counts in managed
# memory and never calls the driver.

load helpers
load stasis_lib
load agent_lib

start_managed() { start_agent managed --pause-ms 5 "$@"; }
# Mappings of managed memory.
managed_pieces() { grep -c nvidia-uvm "/proc/$TARGET/maps" || true; }
# The driver was not asked: it would have answered 801, and then 999 for ever.
was_never_asked() {
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
}

@test "a program with managed memory is suspended and resumed again and again" {
  local i pieces
  start_managed
  pieces=$(managed_pieces)
  for ((i = 0; i < $(times 4 20); ++i)); do
    done_by suspend "$TARGET"
    assert_equal "$(managed_pieces)" 0 "pieces while it is suspended"
    done_by resume "$TARGET"
    target_goes_on
  done
  # One of them comes and goes.
  (($(managed_pieces) >= pieces - 1))
  target_verifies
}

@test "a program with managed memory is dumped and restored, also beside an earlier image" {
  need_root "CRIU"
  start_managed --size 64M
  done_by dump "$TARGET" --images-dir "$image-1" --leave-running
  target_goes_on
  dump_it --base "$image-1"
  restore_it
  target_goes_on
  was_never_asked
  restored_verifies
}

@test "a program with managed memory is dumped while it is suspended, and restored past CRIU's writing of it" {
  need_root "CRIU"
  start_managed --size 64M
  done_by suspend "$TARGET"
  dump_it --host-memory parallel
  done_by verify --images-dir "$image"
  restore_it
  done_by resume "$TARGET"
  target_goes_on
  restored_verifies
}

@test "a program with managed memory goes to another GPU, and gives way to another program" {
  local first
  export STASIS_SIM_GPUS=2x256M
  start_managed
  done_by suspend "$TARGET"
  done_by resume "$TARGET" --device-map 0=1,1=0
  target_goes_on
  first=$TARGET
  local first_status=$TARGET_STATUS
  start_managed
  swapped_with "$first" "$first_status"
}

@test "processes of a tree that have managed memory are suspended and dumped" {
  need_root "CRIU"
  LD_PRELOAD=$agent start_tree --child-kind managed --pause-ms 5
  done_by suspend "$TARGET"
  in_state checkpointed "${CHILDREN[@]}"
  done_by resume "$TARGET"
  target_goes_on
  dump_it
  restore_it
  target_goes_on
  restored_verifies 3
}

@test "without the agent, and by the driver's path, it is refused before anything is touched" {
  start_managed
  refused 8 not-supported suspend "$TARGET" --path driver
  assert_contains "$err" "only its agent can give up"
  target_goes_on
  was_never_asked
  target_verifies
  start_target managed
  refused 8 not-supported suspend "$TARGET"
  assert_contains "$err" "start it with \`stasis run\`"
  target_goes_on
  target_verifies
}

target_says() { wait_until 30 eval "[ \"\$(tail -n 1 $TARGET_LOG)\" = $1 ]"; }

# variable_is_refused WORDS...: its process is suspended without the module, and only then.
variable_is_refused() {
  refused 8 not-supported suspend "$TARGET"
  assert_contains "$err" "$@"
  target_goes_on
  kill -USR1 "$TARGET"
  target_says unloaded
  stasis suspend "$TARGET"
  stasis resume "$TARGET"
  kill -USR2 "$TARGET"
  target_says loaded
  target_goes_on
  refused 8 not-supported suspend "$TARGET"
  target_verifies
}

@test "a __managed__ variable is refused before anything is touched, and its program suspended without the module" {
  start_target variable
  variable_is_refused "start it with \`stasis run\`" "(not __managed__ variables)"
  start_agent variable
  variable_is_refused "a __managed__ variable of a module" "while no such module is loaded"
  # Beside managed memory that the agent gives up, whose areas have room for the variable.
  start_agent variable --still 4K
  variable_is_refused "a __managed__ variable of a module" "while no such module is loaded"
}

@test "managed memory for which the program's memory limit has no room stays, and the program runs on" {
  need_root "memory cgroups"
  make_memory_cgroup $((1 << 30))
  # Memory counts where the process was when it took it.
  echo "$BASHPID" >"$CGROUP/cgroup.procs"
  start_managed --size 48M
  echo "$BASHPID" >"${CGROUP%/*}/cgroup.procs"
  used=$(cat "$CGROUP/memory.usage_in_bytes" 2>/dev/null || cat "$CGROUP/memory.current")
  # Of these the tool leaves 32 MiB to the program. Memory of the simulated driver that was never
  # touched is there once it is read, up to 40 MiB at a time.
  limit_cgroup $((used + (60 << 20)))
  refused 11 out-of-host-memory suspend "$TARGET"
  assert_contains "$err" "room for managed memory on the host"
  target_goes_on
  # The program has more than the 68 MiB that this leaves, but most of the rest it never touched.
  limit_cgroup $((used + (100 << 20)))
  was_never_asked
  target_goes_on
  target_verifies
}

@test "cuda-checkpoint brings back what stasis has suspended, managed memory too" {
  start_managed
  done_by suspend "$TARGET"
  capture cuda-checkpoint --toggle --pid "$TARGET"
  assert_equal "$status" 0 "$err"
  target_goes_on
  done_by suspend "$TARGET"
  cuda-checkpoint --action restore --pid "$TARGET"
  cuda-checkpoint --action unlock --pid "$TARGET"
  target_goes_on
  was_never_asked
  target_verifies
}

@test "the doctor says what holds of it" {
  need_root "CRIU"
  start_managed
  done_by doctor "$TARGET" --json
  assert_equal "$(json '[f["light"] for f in d["processes"] if f["id"] == "managed-memory"]')" "['green']" "$out"
  target_verifies
}

@test "threads stay still while an agent replaces memory, also when the tool that asked is killed in the middle" {
  # What was never touched is copied by the GPU, which takes its time.
  STASIS_SIM_FAULTS="transfer:delay=60ms" start_managed
  STASIS_FAULT=direct.replacing:kill capture stasis suspend "$TARGET"
  assert_equal "$status" 137
  done_by recover --all
  target_goes_on
  done_by suspend "$TARGET"
  STASIS_FAULT=direct.replacing:kill capture stasis resume "$TARGET"
  assert_equal "$status" 137
  done_by recover --all
  target_goes_on
  # Another verb waits for the agent as well.
  STASIS_FAULT=direct.replacing:kill capture stasis suspend "$TARGET"
  assert_equal "$status" 137
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "a program that forks all the time is suspended with its managed memory" {
  # Between the agent's own handlers of a fork, which hold its locks, there is one that takes its time.
  local dir=$BATS_TEST_TMPDIR
  cat >"$dir/forks.c" <<'END'
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
#define CALL(name, ...) ((int (*)())dlsym(driver, name))(__VA_ARGS__)
static void late(void) { usleep(20000); }
int main(void) {
  pthread_atfork(0, late, 0);
  void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
  unsigned long long memory = 0;
  if (CALL("cuInit", 0) || CALL("cuCtxCreate_v2", &context, 0, 0) || CALL("cuMemAllocManaged", &memory, 4UL << 20, 1)) return 2;
  volatile unsigned long long *word = (void *)memory;
  puts("ready");
  fflush(stdout);
  for (unsigned long long number = 1;; ++number) {
    *word = number;
    int child = fork();
    if (child == 0) _exit(0);
    waitpid(child, 0, 0);
    if (*word != number) {
      puts("wrong");
      return 1;
    }
  }
}
END
  cc -w "$dir/forks.c" -o "$dir/forks" -ldl -lpthread
  (LD_PRELOAD=$agent exec_on_gpu setsid "$dir/forks") </dev/null >"$dir/forks.log" 2>&1 3>&- &
  local pid=$!
  at_end_kill "$pid"
  wait_until 60 grep -q ready "$dir/forks.log"
  for _ in 1 2 3 4 5; do
    done_by suspend "$pid"
    done_by resume "$pid"
  done
  lives "$pid"
  assert_equal "$(<"$dir/forks.log")" ready
}

# bats test_tags=long
@test "a tool that is killed while managed memory is given up or taken again leaves a program that recover brings back" {
  start_managed
  killed_in_the_middle "$TARGET"
  was_never_asked
  target_verifies
}
