#!/usr/bin/env bats
# stasis run without images: what the program that it starts sees and has.

load helpers
load stasis_lib
load agent_lib

@test "run passes the exit code on, and the arguments as they are" {
  capture stasis run -- sh -c 'exit 37'
  assert_equal "$status" 37
  capture stasis run -- sh -c 'printf "<%s>" "$@"' x 'a b' '' --json -v
  assert_equal "$out" "<a b><><--json><-v>"
  capture stasis run --name brackets sh -c 'printf "<%s>" "$@"' x '[1,2]' '[]' '[[1], "a,b"]' -- -- '[x]' --name
  assert_equal "$out" '<[1,2]><[]><[[1], "a,b"]><--><--><[x]><--name>'
  capture stasis run -- '[1,2]'
  assert_equal "$status" 127
  assert_contains "$err" "cannot start [1,2]"
}

@test "run leaves signals and standard streams as they were" {
  local how='import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.close(0)
os.close(1)
os.execvp(sys.argv[1], sys.argv[1:])'
  local tell='import os, signal, sys
there = [n for n in range(3) if os.path.exists(f"/proc/self/fd/{n}")]
print(there, int(signal.getsignal(signal.SIGCHLD)), file=sys.stderr)'
  capture python3 -IS -c "$how" python3 -IS -c "$tell"
  local before=$err
  assert_equal "$before" $'[2] 1\n'
  capture python3 -IS -c "$how" stasis run -- python3 -IS -c "$tell"
  assert_equal "$err" "$before"
}

@test "run is replaced by the program: one process, which gets the signals itself" {
  stasis run -- sh -c 'trap "exit 9" TERM; echo "$$" >"$0"; while :; do sleep 0.05; done' "$BATS_TEST_TMPDIR/pid" 3>&- &
  local pid=$!
  at_end_kill "$pid"
  wait_until 60 test -s "$BATS_TEST_TMPDIR/pid"
  assert_equal "$(<"$BATS_TEST_TMPDIR/pid")" "$pid"
  kill -TERM "$pid"
  status=0
  wait "$pid" || status=$?
  assert_equal "$status" 9
}

# In Python: prints what io_uring_setup(2) answers.
ask_for_io_uring='import ctypes
library = ctypes.CDLL(None, use_errno=True)
print(0 if library.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0 else ctypes.get_errno())'

@test "run --no-io-uring: the program and all that it starts find none, also after a restore" {
  capture stasis run -- python3 -IS -c "$ask_for_io_uring"
  [[ $out == $'0\n' ]] || skip "the kernel allows no io_uring"
  capture stasis run --no-io-uring -- sh -c 'python3 -IS -c "$1" | cat' x "$ask_for_io_uring"
  assert_equal "$out" $'38\n' # ENOSYS
  need_root "CRIU"
  TARGET_STATUS=$BATS_TEST_TMPDIR/filtered TARGET_LOG=$BATS_TEST_TMPDIR/filtered.log
  (exec_on_gpu setsid stasis run --no-io-uring -- stasis-workload memory --size 16M --status "$TARGET_STATUS") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  dump_it
  restore_it
  target_goes_on
  grep -qx $'Seccomp:\t2' "/proc/$TARGET/status"
  grep -qx $'NoNewPrivs:\t0' "/proc/$TARGET/status"
  restored_verifies
}

@test "torchrun finds no io_uring where that costs it nothing, and is told of it elsewhere" {
  need_root "a filter that costs nothing"
  # Both stand in for others: the first tells how many filters of system calls it has, the second is a shell.
  local torchrun=$BATS_TEST_TMPDIR/torchrun python=$BATS_TEST_TMPDIR/python3 words
  local user=(setpriv --reuid=65534 --regid=65534 --clear-groups)
  printf '#!/bin/sh\n%s\n' "sed -n 's/^Seccomp_filters:[[:space:]]*//p' /proc/self/status" >"$torchrun"
  chmod 755 "$torchrun"
  ln -s /bin/sh "$python"
  let_others_in
  local none one
  none=$("$torchrun")
  one=$((none + 1))
  for words in "$torchrun" "$python $torchrun"; do
    # shellcheck disable=SC2086
    capture stasis run -- $words
    assert_equal "$status/$out/$err" "0/$one"$'\n/' "$words"
  done
  capture stasis run --io-uring -- "$torchrun"
  assert_equal "$status/$out/$err" "0/$none"$'\n/'
  capture stasis run -- sh "$torchrun"
  assert_equal "$status/$out/$err" "0/$none"$'\n/'
  capture "${user[@]}" stasis run -- "$torchrun"
  assert_equal "$status/$out" "0/$none"$'\n'
  assert_contains "$err" "start it with --no-io-uring"
  capture "${user[@]}" stasis run --no-io-uring -- "$torchrun"
  assert_equal "$status/$out/$err" "0/$one"$'\n/'
}

@test "run --no-io-uring without privileges gives up gaining any, and says nothing" {
  need_root "another user"
  capture setpriv --reuid=65534 --regid=65534 --clear-groups stasis run --no-io-uring -- \
    sh -c 'grep -E "^(NoNewPrivs|Seccomp):" /proc/self/status'
  assert_equal "$status" 0
  assert_equal "$err" ""
  assert_equal "$out" $'NoNewPrivs:\t1\nSeccomp:\t2\n'
  local program=$BATS_TEST_TMPDIR/setuid
  cp "$(type -P id)" "$program"
  chmod 4755 "$program"
  chmod a+rx "$BATS_RUN_TMPDIR" "$BATS_RUN_TMPDIR"/{file,test} "$BATS_TEST_TMPDIR"
  capture setpriv --reuid=65534 --regid=65534 --clear-groups stasis run --no-io-uring -- "$program" -u
  assert_equal "$status/$out" $'0/65534\n'
  assert_contains "$err" "$program is setuid, and gains nothing by that"
}

@test "run tells a program that is not there from one that cannot be started" {
  capture stasis run -- /no/such/program
  assert_equal "$status" 127
  assert_contains "$err" "/no/such/program"
  capture stasis run -- no-such-program-anywhere
  assert_equal "$status" 127
  assert_contains "$err" "on the PATH"
  touch "$BATS_TEST_TMPDIR/no-program"
  capture stasis run -- "$BATS_TEST_TMPDIR/no-program"
  assert_equal "$status" 126
  assert_contains "$err" "chmod +x"
  capture stasis run --json -- "$BATS_TEST_TMPDIR"
  assert_equal "$status" 126
  assert_contains "$(json 'd["error"]["remedy"]')" "not a directory"
}

@test "run refuses a library that LD_PRELOAD cannot name" {
  mkdir "$BATS_TEST_TMPDIR/a b"
  ln -s "$agent" "$BATS_TEST_TMPDIR/a b/agent.so"
  STASIS_PRELOAD="$BATS_TEST_TMPDIR/a b/agent.so" refused 2 usage run -- true
  STASIS_PRELOAD=/no/such/agent.so capture stasis run -- true
  ((status != 0))
  assert_contains "$err" "/no/such/agent.so"
}

@test "run says so where the loader would ignore the agent, and starts the program all the same" {
  need_root "a program of another user's that is setuid"
  local program=$BATS_TEST_TMPDIR/setuid
  cp "$(type -P true)" "$program"
  chmod 755 "$program"
  capture stasis run -- "$program"
  assert_equal "$status/$err" 0/
  chown 65534 "$program"
  chmod u+s "$program"
  PATH=$BATS_TEST_TMPDIR:$PATH capture stasis run -- setuid
  assert_equal "$status" 0
  assert_contains "$err" "$program is setuid"
}

@test "run keeps what was to be preloaded, and names itself once" {
  capture env LD_PRELOAD="$STASIS_LIBCUDA" stasis run -- stasis run -- printenv LD_PRELOAD
  assert_equal "${out%$'\n'}" "$(readlink -f "$agent"):$STASIS_LIBCUDA"
  local old
  old=$(readlink -f "$agent").1 # which is not there, and the loader says so
  capture env LD_PRELOAD="$old" stasis run -- printenv LD_PRELOAD
  assert_equal "${out%$'\n'}" "${old%.1}:$old"
}

@test "a program without CUDA is as it would be without the agent" {
  capture stasis run -- sh -c 'ls /proc/self/fd | wc -l; ls /proc/self/task | wc -l'
  local with=$out
  capture sh -c 'ls /proc/self/fd | wc -l; ls /proc/self/task | wc -l'
  assert_equal "$with" "$out"
  assert_equal "$err" ""
}

# They step out of each other's way: both sit between the program and the driver.
# in_front WORD: a program under the agent, behind that tool or variable.
in_front() {
  env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" LD_PRELOAD="$agent" env "$1" \
    stasis-workload memory --size 4M --rounds 1 --status "$BATS_TEST_TMPDIR/front"
}

@test "under the CUDA tools the agent says that it keeps out, and under others it does not" {
  local set
  for set in CUDA_INJECTION64_PATH=/a/profiler.so NV_SANITIZER_INJECTION_PORT_BASE=49152 \
    NV_COMPUTE_PROFILER_PERFWORKS_DIR=/a/profiler; do
    capture in_front "$set"
    assert_contains "$err" "stasis: a CUDA tool is at work here (${set:0:14}"
    assert_contains "$err" "so the direct path is left out"
  done
  # One that traces it, as debuggers do.
  cat >"$BATS_TEST_TMPDIR/tracer.c" <<'END'
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int count, char** words) {
  int status = 0;
  if (count < 2) return 2;
  pid_t child = fork();
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, 0, 0);
    execvp(words[1], words + 1);
    _exit(127);
  }
  while (waitpid(child, &status, 0) == child && WIFSTOPPED(status))
    ptrace(PTRACE_CONT, child, 0, WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status));
  return WIFEXITED(status) ? WEXITSTATUS(status) : 126;
}
END
  cc "$BATS_TEST_TMPDIR/tracer.c" -o "$BATS_TEST_TMPDIR/cuda-gdb-minimal"
  capture in_front "$BATS_TEST_TMPDIR/cuda-gdb-minimal"
  assert_contains "$err" "(cuda-gdb), so the direct path is left out"
  mv "$BATS_TEST_TMPDIR/cuda-gdb-minimal" "$BATS_TEST_TMPDIR/gdb"
  capture in_front "$BATS_TEST_TMPDIR/gdb"
  assert_equal "$status/$err" "0/"
}

@test "a job keeps its name over a dump and a restore, unless another one has it by then" {
  need_root "CRIU"
  start_named() {
    TARGET_STATUS=$BATS_TEST_TMPDIR/status-$RANDOM
    (exec_on_gpu setsid stasis run --name training -- stasis-workload memory --size 1M --status "$TARGET_STATUS") \
      </dev/null >"$BATS_TEST_TMPDIR/log" 2>&1 3>&- &
    TARGET=$!
    echo "$TARGET" >>"$targets"
    wait_until 60 target_is_up
  }
  local first status_of_first
  start_named
  first=$TARGET status_of_first=$TARGET_STATUS
  done_by dump training "$image"
  done_by inspect "$image"
  grep -qx "name      training" <<<"$out"
  refused 3 no-such-process suspend training
  done_by restore "$image" --detach
  at_end_kill "$first"
  refused 3 no-such-process suspend traning
  assert_contains "$err" "no job has the name traning; did you mean training?"
  refused 3 no-such-process dump image training
  assert_contains "$err" "write \`stasis dump training image\`: the process or job comes before the directory"
  done_by suspend training
  done_by doctor training --no-trial
  assert_contains "$out" "uses CUDA and is suspended"
  done_by resume training
  # By its number, too.
  done_by dump "$first" "$image-2"
  start_named
  done_by restore "$image-2" --detach
  assert_contains "$err" "does not get its name training back: another job has the name training: process $TARGET"
  done_by suspend training
  assert_contains "$out" "process $TARGET "
  TARGET_STATUS=$status_of_first TARGET=$first target_goes_on
}

@test "root finds the program of another user by its name, and believes no record that is not of it" {
  need_root "another user"
  local user=$((70000 + BASHPID % 10000)) record
  local state=/tmp/stasis-$user
  [[ ! -e $state ]] || skip "$state is there"
  as_other() { env -u STASIS_STATE_DIR -u XDG_RUNTIME_DIR setpriv --reuid="$user" --regid="$user" --clear-groups "$@" 3>&-; }
  as_other "$STASIS_BUILD/bin/stasis" --version >/dev/null 2>&1 || skip "the build folder is not open to others"
  as_other stasis run --name of-a-user -- sleep 60 </dev/null >/dev/null 2>&1 &
  at_end_kill $!
  wait_until 60 compgen -G "$state/jobs*/of-a-user.job" >/dev/null
  as_root() { capture env -u STASIS_STATE_DIR stasis "$@"; }
  # Found: what is wrong is that it does not use CUDA.
  as_root suspend of-a-user
  record=$(compgen -G "$state/jobs*/of-a-user.job")
  assert_equal "$status" 4
  assert_contains "$err" "process $(sed -n 's/.*"pid":\([0-9]*\).*/\1/p' "$record")"
  # Who has chosen a state directory has chosen whose names hold.
  capture stasis suspend of-a-user
  assert_equal "$status" 3
  # A record that names a process of root's, a link, and a name that is not the file's.
  sed "s/\"pid\":[0-9]*/\"pid\":$$/; s/\"start_ticks\":[0-9]*/\"start_ticks\":$(cut -d' ' -f22 /proc/$$/stat)/; s/of-a-user/forged/" "$record" >"${record%/*}/forged.job"
  cp "$record" "${record%/*}/other.job"
  chown "$user:$user" "${record%/*}"/*.job
  sed "s/of-a-user/link/" "$record" >"${record%/*}/elsewhere"
  chown "$user:$user" "${record%/*}/elsewhere"
  ln -s elsewhere "${record%/*}/link.job"
  as_other mkfifo "${record%/*}/fifo.job"
  local name
  for name in forged other link fifo; do
    as_root suspend "$name"
    assert_equal "$status" 3 "$name"
  done
  # Two others have more programs than are looked at of one, and hide none of this user's.
  local other jobs text i
  for other in $((user + 1)) $((user + 2)); do
    jobs=/tmp/stasis-$other/$(basename "${record%/*}")
    setpriv --reuid="$other" --regid="$other" --clear-groups sleep 60 3>&- &
    at_end_kill $!
    mkdir -p "$jobs"
    text=$(sed "s/\"pid\":[0-9]*/\"pid\":$!/; s/\"start_ticks\":[0-9]*/\"start_ticks\":$(cut -d' ' -f22 /proc/$!/stat)/" "$record")
    for ((i = 0; i < 1100; i++)); do echo "${text//of-a-user/a$i}" >"$jobs/a$i.job"; done
    chown -R "$other:$other" "/tmp/stasis-$other"
    chmod -R go= "/tmp/stasis-$other"
  done
  as_root suspend of-a-user
  local beside=$status
  rm -r "/tmp/stasis-$((user + 1))" "/tmp/stasis-$((user + 2))"
  chmod 666 "$record"
  as_root suspend of-a-user
  local last=$status
  rm -r "$state"
  assert_equal "$beside $last" "4 3"
}

# It takes that where there is NVSwitch, and could not be saved.
@test "NCCL gets no NVLink multicast unless its variable is set" {
  capture env -u NCCL_NVLS_ENABLE stasis run -- printenv NCCL_NVLS_ENABLE
  assert_equal "$status/$out" $'0/0\n' "$err"
  capture env NCCL_NVLS_ENABLE=2 stasis run -- printenv NCCL_NVLS_ENABLE
  assert_equal "$status/$out" $'0/2\n' "$err"
  ((EUID == 0)) || return 0
  capture env -u NCCL_NVLS_ENABLE stasis run --images-dir "$BATS_TEST_TMPDIR/images" -- printenv NCCL_NVLS_ENABLE
  assert_equal "$status/$out" $'0/0\n' "$err"
}
