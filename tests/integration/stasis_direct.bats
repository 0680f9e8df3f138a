#!/usr/bin/env bats
# stasis run and the direct path: programs with the agent in them, on the simulated driver.

load helpers
load stasis_lib

setup() {
  setup_stasis
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
}
teardown() { end_stasis; }

# start_agent KIND [ARGUMENT...]: as start_target, with the agent in it.
start_agent() { LD_PRELOAD=$agent start_target "$@"; }

# went WORD: which path the verb before took; it was asked for --json.
went() { assert_equal "$(json 'd["path"]')" "$1" "path (${out})"; }

# cycles COUNT PATH: suspends and resumes TARGET that often, by that path.
cycles() {
  local i
  for ((i = 0; i < $1; ++i)); do
    done_by suspend "$TARGET" --json
    went "$2"
    gpu_is_free
    stands_still
    done_by resume "$TARGET" --json
    went "$2"
    target_goes_on
  done
}

# What the agent in TARGET says of itself: 0 running, 1 closed, 2 emptied, 3 held, 4 filling.
agent_page() { python3 "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" "$@"; }
agent_state() { agent_page state; }
agent_is() { [[ $(agent_state) == "$1" ]]; }

# phase_names: of what was done last, in order.
phase_names() { json '" ".join(p["name"].replace(" ", "-") for p in d["phases"])'; }
# Memory copied beside the driver's checkpoint, and, of a program that the driver has held, before it.
beside="prepare close empty lock checkpoint copy-out"
later="prepare close mover copy-out empty lock checkpoint"
# The agent's own descriptors of memory.
pieces_kept() { find "/proc/$TARGET/fd" -lname "$STASIS_SIM_DIR/*/mem-*" | wc -l; }

# --- stasis run

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
  capture python3 -c "$how" python3 -c "$tell"
  local before=$err
  assert_equal "$before" $'[2] 1\n'
  capture python3 -c "$how" stasis run -- python3 -c "$tell"
  assert_equal "$err" "$before"
}

@test "run is replaced by the program: one process, which gets the signals itself" {
  stasis run -- sh -c 'trap "exit 9" TERM; echo "$$" >"$0"; while :; do sleep 0.05; done' "$BATS_TEST_TMPDIR/pid" 3>&- &
  local pid=$!
  at_end_kill "$pid"
  wait_until 60 test -s "$BATS_TEST_TMPDIR/pid"
  assert_equal "$(cat "$BATS_TEST_TMPDIR/pid")" "$pid"
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
  capture stasis run -- python3 -c "$ask_for_io_uring"
  [[ $out == $'0\n' ]] || skip "the kernel allows no io_uring"
  capture stasis run --no-io-uring -- sh -c 'python3 -c "$1" | cat' x "$ask_for_io_uring"
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
  touch "$BATS_TEST_TMPDIR/no-program"
  capture stasis run -- "$BATS_TEST_TMPDIR/no-program"
  assert_equal "$status" 126
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
  need_root "a program of somebody else's that is setuid"
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

# --- suspend and resume

@test "the direct path takes the memory of plain programs out and in, several times" {
  local kind times=3
  for kind in "memory --size 24M" "threads --size 16M" "poll --size 16M --own-us 20"; do
    # shellcheck disable=SC2086
    start_agent $kind
    cycles "$times" direct
    times=1
    target_verifies
    nothing_left
  done
}

@test "streams and contexts with little that can leave are right by either path" {
  local kind
  for kind in streams contexts; do
    start_agent "$kind"
    done_by suspend "$TARGET" --json
    gpu_is_free
    stands_still
    done_by resume "$TARGET" --json
    target_goes_on
    target_verifies
  done
}

# suspend_with_slow_context WHEN [OPTION]...: the mover's is made early, while the program still runs, or late.
suspend_with_slow_context() {
  local when=$1 trace=$BATS_TEST_TMPDIR/trace
  shift
  STASIS_SIM_FAULTS="context:delay=300ms" done_by suspend "$TARGET" --json --trace "$trace" "$@"
  went direct
  python3 - "$when" "$trace" <<'END'
import json, sys
events = [e for e in json.load(open(sys.argv[2]))["traceEvents"] if e["ph"] == "X"]
def one(what): return next(e for e in events if (e["cat"], e["name"]) == what)
start, prepare, close = (one(what) for what in (("mover", "start"), ("mover", "prepare"), ("phase", "close")))
assert prepare["dur"] >= 3e5, "the context was not made there"
assert start["ts"] + start["dur"] <= close["ts"], "the driver was not started before the gate closed"
late = prepare["ts"] >= close["ts"]
assert late == (sys.argv[1] == "late"), f"the context came {'late' if late else 'early'}"
END
}

# A GPU cannot switch away from a kernel of a program that the driver has restored, and a context needs that.
@test "beside a program that the driver has held before no context is made while it runs" {
  local how
  for how in direct driver locked cuda-checkpoint dump; do
    start_agent memory --size 24M
    case $how in
      direct | driver)
        if [[ $how == direct ]]; then suspend_with_slow_context early; else done_by suspend "$TARGET" --path driver; fi
        done_by resume "$TARGET"
        ;;
      locked)
        cuda-checkpoint --action lock --pid "$TARGET"
        done_by suspend "$TARGET"
        done_by resume "$TARGET"
        ;;
      cuda-checkpoint)
        cuda-checkpoint --toggle --pid "$TARGET"
        cuda-checkpoint --toggle --pid "$TARGET"
        ;;
      dump)
        ((EUID == 0)) || continue # CRIU
        rm -rf "$image"
        done_by dump "$TARGET" --images-dir "$image" --json
        restore_it
        ;;
    esac
    target_goes_on
    suspend_with_slow_context late
    done_by resume "$TARGET"
    target_goes_on
    kill "$TARGET"
  done
}

# in_order TRACE: the mover was ready before the driver let anybody go on.
in_order() {
  python3 - "$1" <<'END'
import json, sys
events = [e for e in json.load(open(sys.argv[1]))["traceEvents"] if e["ph"] == "X"]
def one(what): return [e for e in events if (e["cat"], e["name"]) == what]
ready = one(("mover", "prepare"))[0]
early = ready["ts"] + ready["dur"] - min(e["ts"] for e in one(("driver", "unlock")))
assert early <= 0, f"one runs {early / 1e3:.1f} ms before the mover is ready"
END
}

@test "at a resume and a restore the mover is ready before anybody runs, on no GPU but theirs" {
  local trace=$BATS_TEST_TMPDIR/trace
  export STASIS_SIM_GPUS=2x256M
  start_agent memory --size 24M
  done_by suspend "$TARGET"
  # A context on the second GPU would be one too many.
  STASIS_SIM_FAULTS="context:delay=1s; context:error=2@2" done_by resume "$TARGET" --json --trace "$trace"
  went direct
  assert_equal "$(json 'd.get("notes", [])')" "[]"
  in_order "$trace"
  target_goes_on
  ((EUID == 0)) || skip "only root may do the rest: CRIU"
  done_by dump "$TARGET" --images-dir "$image"
  STASIS_SIM_FAULTS="context:delay=2s; context:error=2@2" \
    done_by restore --images-dir "$image" --detach --json --trace "$trace" 3>&-
  assert_equal "$(json 'd.get("notes", [])')" "[]"
  in_order "$trace"
  target_goes_on
}

@test "a tool that is killed while GPU memory is copied in leaves a mover that no agent copies beside" {
  local tool limit
  filling() { [[ $(agent_state) == 4 ]]; }
  start_agent memory --size 24M --pause-ms 2
  # By default, and where the mover may have few descriptors.
  for limit in "$(ulimit -n)" 512; do
    done_by suspend "$TARGET"
    (ulimit -n "$limit"; STASIS_SIM_FAULTS=transfer:delay=2s exec stasis resume "$TARGET") >/dev/null 2>&1 3>&- &
    tool=$!
    wait_until 60 filling
    kill -KILL "$tool"
    # It waits until the tool has gone, and the mover has ended what it does.
    done_by recover "$TARGET"
    target_goes_on
    sleep 3
    target_goes_on
  done
  target_verifies
}

# bats test_tags=long
@test "a mover that hangs in the driver outlives a tool that was killed by seconds" {
  start_agent memory --size 24M
  STASIS_SIM_FAULTS=context:hang stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$! movers
  wait_until 60 eval 'mover=$(pgrep -P "'"$tool"'" -x stasis-mover)'
  # And the one that would take its place.
  mapfile -t movers < <(pgrep -P "$tool" -x stasis-mover)
  at_end_kill "${movers[@]}"
  sleep 1
  kill -KILL "$tool"
  for mover in "${movers[@]}"; do wait_until 60 eval "! kill -0 $mover 2>/dev/null"; done
  target_goes_on
}

@test "a mover that cannot be made while the program stands still leaves the memory to the driver" {
  local fault
  start_agent memory --size 24M
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  for fault in context:die context:error=2; do
    STASIS_SIM_FAULTS=$fault done_by suspend "$TARGET" --json
    went driver
    done_by resume "$TARGET"
    target_goes_on
    STASIS_SIM_FAULTS=$fault capture stasis suspend "$TARGET" --path direct
    ((status != 0))
    agent_is 0
    target_goes_on
  done
  target_verifies
}

@test "a tree under the agent goes as one" {
  LD_PRELOAD=$agent start_tree --size 12M
  cycles 1 direct
  target_verifies
}

@test "dumped, killed and restored, the agent answers again" {
  need_root "CRIU"
  start_agent memory --size 16M
  done_by dump "$TARGET" --images-dir "$image" --json
  went direct
  wait_until 60 number_is_free
  gpu_is_free
  restore_it
  target_goes_on
  # Sealed as before, or the agent would be passed over.
  cycles 1 direct
  restored_verifies
}

@test "dump --leave-running goes on in the same process, with the image whole" {
  need_root "CRIU"
  start_agent memory --size 16M
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  went direct
  target_goes_on
  cycles 1 direct
  kill -KILL "$TARGET"
  wait "$TARGET" || true
  restore_it
  target_goes_on
  restored_verifies
}

# --- The tool is killed

# The program is held in front of its next call, and nobody says recover.
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

@test "ranks that wait for each other are suspended, and their memory past the driver" {
  local i
  start_agent collective --children 8 --size 4M --pause-ms 2
  for ((i = 0; i < 4; ++i)); do
    done_by suspend "$TARGET" --json --timeout 60000
    went direct
    gpu_is_free
    done_by resume "$TARGET" --json
    went direct
    target_goes_on
  done
  target_verifies
}

@test "a rank that has nothing to move, or no agent, does not keep the others from being suspended" {
  local how prefix size phases meeting=$BATS_TEST_TMPDIR/meeting
  for how in small bare; do
    TARGET_STATUS=$BATS_TEST_TMPDIR/$how.status
    TARGET_LOG=$BATS_TEST_TMPDIR/$how.log
    prefix=("env" "LD_PRELOAD=$agent") size=256K
    if [[ $how == bare ]]; then prefix=(env) size=4M; fi
    rm -f "$meeting"
    truncate -s 64K "$meeting"
    (
      # shellcheck disable=SC2016 # for bash
      exec_on_gpu setsid bash -c 'meeting=$1 status=$2 agent=$3 size=$4
        shift 4
        job=(--meeting "$meeting" --ranks 2 --seed 5 --pause-ms 2)
        LD_PRELOAD=$agent stasis-workload rank "${job[@]}" --rank 0 --size 4M --status "$status" &
        "$@" stasis-workload rank "${job[@]}" --rank 1 --size "$size" --status "$status.1" &
        wait' bash "$meeting" "$TARGET_STATUS" "$agent" "$size" "${prefix[@]}"
    ) </dev/null >"$TARGET_LOG" 2>&1 3>&- &
    TARGET=$!
    echo "$TARGET" >>"$targets"
    wait_until 60 target_is_up
    mapfile -t CHILDREN < <(children_of "$TARGET")
    at_end_kill "${CHILDREN[@]}"
    for phases in "$beside" "${beside/empty/mover empty}" "${beside/empty/mover empty}"; do
      # The lock of who is held back is slow: meanwhile the other must not go on to wait for it.
      STASIS_SIM_FAULTS="lock:delay=100ms pid=${CHILDREN[0]}" done_by suspend "$TARGET" --timeout 10000 --json
      in_state checkpointed "${CHILDREN[@]}"
      # No context is made beside who has no gate, and would run if the driver gave up.
      assert_equal "$(phase_names)" "$phases"
      done_by resume "$TARGET"
      target_goes_on
    done
    kill "${CHILDREN[@]}"
  done
}

@test "a program whose threads wait for each other on their GPUs is suspended, by either path" {
  local path
  start_agent threads --threads 4 --size 16M --meet
  for path in direct driver direct driver; do
    done_by suspend "$TARGET" --json --timeout 60000 --path "$path"
    went "$path"
    done_by resume "$TARGET"
    target_goes_on
  done
  target_verifies
}

@test "ranks that wait for each other are dumped past the driver, and restored" {
  need_root "CRIU"
  start_agent collective --children 3 --size 4M --pause-ms 2
  done_by dump "$TARGET" --images-dir "$image" --json --timeout 60000
  went direct
  gpu_is_free
  restore_it
  target_goes_on
  done_by suspend "$TARGET" --json --timeout 60000
  went direct
  done_by resume "$TARGET"
  restored_verifies 4
}

@test "what somebody writes into the page of the agent does not lead it to other memory" {
  start_agent memory --size 24M
  agent_page forge # and is gone: the agent gives back the buffer that it made, not what the page says
  sleep 0.5
  target_goes_on
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
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
  assert_equal "$status" 130 "$(cat "$BATS_TEST_TMPDIR/out")"
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
  done_by resume "$TARGET"
  status=0
  wait "$TARGET" || status=$?
  assert_equal "$status" 0
  grep -q '^verified' "$TARGET_LOG"
}

@test "no room for the kernels' local memory at resume: said so, and it goes on when there is room" {
  # A suspend sets a limit, and so does each try to resume: the tool's, another one if something came ahead, and
  # then the agent's own.
  STASIS_SIM_FAULTS="limit:oom@2; limit:oom@3" start_agent memory --size 16M
  done_by suspend "$TARGET"
  refused 11 out-of-gpu-memory resume "$TARGET"
  assert_contains "$err" "cuCtxSetLimit"
  target_goes_on
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  nothing_left
}

@test "no room on the GPU at resume: said so, and it goes on when there is room" {
  STASIS_SIM_GPUS=1x256M start_agent memory --size 64M
  export STASIS_SIM_GPUS=1x256M
  done_by suspend "$TARGET"
  start_hog 220M
  refused 11 out-of-gpu-memory resume "$TARGET"
  stands_still
  kill -KILL "$HOG"
  wait "$HOG" 2>/dev/null || true
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "ps tells who waits for GPU memory from who runs" {
  STASIS_SIM_GPUS=1x256M start_agent memory --size 64M
  export STASIS_SIM_GPUS=1x256M
  done_by suspend "$TARGET"
  let_go_without_room "there is room for its GPU memory"
  done_by ps
  [[ $out == *"$TARGET "*" waiting  direct  "* && $out == *"$HOG "*" running  driver  "* ]]
  assert_contains "$err" "process $TARGET stands still until there is room for its GPU memory"
  # Of one that it does not know stasis does not promise anything.
  agent_page version 1
  done_by ps
  assert_contains "$err" "use the stasis that came with it"
  agent_page version 4
  refused 11 out-of-gpu-memory recover "$TARGET"
  done_by ps --json
  assert_equal "$(json "[p['state'] for p in d['processes'] if p['pid'] == $TARGET]")" "['waiting']"
  assert_contains "$(json "[p['reason'] for p in d['processes'] if p['pid'] == $TARGET]")" "goes on by itself then"
  kill -KILL "$HOG"
  wait "$HOG" 2>/dev/null || true
  target_goes_on
  wait_until 60 agent_is 0
  done_by ps
  [[ $out == *"$TARGET "*" running  direct  "* && $err != *"stands still"* ]]
  target_verifies
}

@test "ps tells who waits because another tool has let it go on" {
  start_agent memory --size 16M
  done_by suspend "$TARGET"
  python3 -c 'import ctypes, os, sys
cuda = ctypes.CDLL(os.environ.get("STASIS_LIBCUDA", "libcuda.so.1"))
for call in cuda.cuCheckpointProcessRestore, cuda.cuCheckpointProcessUnlock:
    assert call(int(sys.argv[1]), None) == 0' "$TARGET"
  in_state running
  stands_still
  done_by ps
  [[ $out == *"$TARGET "*" waiting  direct  "* ]]
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

# hold_page: somebody else is the agent's peer; sets HOLDER.
hold_page() {
  python3 -c 'import fcntl, os, sys, time
for fd in os.listdir(f"/proc/{sys.argv[1]}/fd"):
    path = f"/proc/{sys.argv[1]}/fd/{fd}"
    if "memfd:stasis-agent" in os.readlink(path):
        page = os.open(path, os.O_RDWR)
        fcntl.flock(page, fcntl.LOCK_EX)
        print("locked", flush=True)
        time.sleep(600)' "$TARGET" >"$BATS_TEST_TMPDIR/holder" 3>&- &
  HOLDER=$!
  at_end_kill "$HOLDER"
  wait_until 60 grep -q locked "$BATS_TEST_TMPDIR/holder"
}
let_page_go() {
  kill -KILL "$HOLDER"
  wait "$HOLDER" 2>/dev/null || true
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
  took_less_than 22000 # and not twice
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

# bats test_tags=long
@test "without the agent, or with it told to keep out, the driver does it" {
  STASIS_AGENT=off start_agent memory --size 8M
  cycles 1 driver
  [[ $(<"$TARGET_LOG") != *"stasis:"* ]]
  target_verifies
  CUDA_INJECTION64_PATH=/a/profiler.so start_agent memory --size 8M
  cycles 1 driver
  target_verifies
}

# They step out of each other's way: both sit between the program and the driver.
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
# in_front WORD: a program under the agent, behind that tool or variable.
in_front() {
  env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" LD_PRELOAD="$agent" env "$1" \
    stasis-workload memory --size 4M --rounds 1 --status "$BATS_TEST_TMPDIR/front"
}

@test "what the direct path has suspended, cuda-checkpoint resumes" {
  start_agent memory
  done_by suspend "$TARGET" --json
  went direct
  capture cuda-checkpoint --toggle --pid "$TARGET"
  assert_equal "$status/$out/$err" "0//"
  target_goes_on
  done_by suspend "$TARGET" --json
  capture cuda-checkpoint --action restore --pid "$TARGET"
  assert_equal "$status" 0
  stands_still
  capture cuda-checkpoint --action unlock --pid "$TARGET"
  assert_equal "$status/$out/$err" "0//"
  target_goes_on
  done_by suspend "$TARGET" --json
  went direct
  done_by resume "$TARGET"
  target_goes_on
}

# --- Which path, and for how long

# path_in_ps: of TARGET.
path_in_ps() {
  done_by ps --json
  json "next(p['path'] for p in d['processes'] if p['pid'] == $TARGET)"
}

@test "ps shows the path of who runs and of who is suspended" {
  start_agent memory --size 8M
  assert_equal "$(path_in_ps)" direct
  done_by ps
  [[ $out == *PATH*$'\n'*"$TARGET "*" running  direct  "* ]]
  done_by suspend "$TARGET"
  assert_equal "$(path_in_ps)" direct
  done_by resume "$TARGET"
  # As a suspend by the driver has left it, though the agent is there.
  done_by suspend "$TARGET" --path driver
  assert_equal "$(path_in_ps)" driver
  done_by resume "$TARGET"
  start_target memory --size 8M
  assert_equal "$(path_in_ps)" driver
}

@test "with an agent of another version the driver does it, and brings it back as well" {
  start_agent memory --size 8M
  agent_page version 1
  assert_equal "$(path_in_ps)" driver
  done_by suspend "$TARGET" --json
  went driver
  assert_contains "$(json 'd["notes"]')" "version 1"
  done_by resume "$TARGET" --json
  went driver
  target_goes_on
  # With its memory away only its own version can help.
  agent_page version 4
  done_by suspend "$TARGET" --json
  went direct
  agent_page version 1
  assert_equal "$(path_in_ps)" direct
  refused 8 not-supported resume "$TARGET"
  agent_page version 4
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

# bats test_tags=long
@test "--path driver leaves the agent alone, and resume and restore follow" {
  start_agent memory --size 16M
  done_by suspend "$TARGET" --path driver --json
  went driver
  agent_is 0
  gpu_is_free
  done_by resume "$TARGET" --json
  went driver
  target_goes_on
  cycles 1 direct
  if ((EUID == 0)); then
    dump_it --path driver --json
    went driver
    restore_it --json
    went driver
    target_goes_on
    cycles 1 direct
    restored_verifies
  fi
}

@test "--path direct takes no other, and says why" {
  start_agent memory --size 16M
  done_by suspend "$TARGET" --path direct --json
  went direct
  done_by resume "$TARGET"
  refused 2 usage suspend "$TARGET" --path fast
  STASIS_AGENT=off start_agent memory --size 8M
  refused 8 not-supported suspend "$TARGET" --path direct
  assert_contains "$err" "process $TARGET"
  in_state running
  refused 8 not-supported dump "$TARGET" --path direct --images-dir "$image"
  no_image
  # A mover that dies is no reason to take the driver's path.
  start_agent memory --size 16M
  STASIS_SIM_FAULTS=transfer:die capture timeout 60 stasis suspend "$TARGET" --path direct
  ((status != 0))
  in_state running
  target_goes_on
  STASIS_SIM_FAULTS=transfer:die done_by suspend "$TARGET" --json
  went driver
  done_by resume "$TARGET"
  target_verifies
  nothing_left
}

@test "GPU memory is copied while the driver checkpoints, and is free when it is done" {
  start_agent memory --size 64M
  assert_equal "$(pieces_kept)" 0 "descriptors"
  STASIS_SIM_FAULTS="transfer:delay=1s" stasis suspend "$TARGET" --json >"$BATS_TEST_TMPDIR/out" 3>&- &
  local tool=$!
  wait_until 60 in_state checkpointed
  # What it was in is given up, and all that keeps it alive is a descriptor.
  (($(gpu_used) >= 64 << 20))
  (($(pieces_kept) > 0))
  wait "$tool"
  out=$(<"$BATS_TEST_TMPDIR/out")
  went direct
  assert_equal "$(phase_names)" "$beside"
  gpu_is_free
  assert_equal "$(pieces_kept)" 0 "descriptors"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "a mover that dies while the driver checkpoints: once more, and copied first" {
  start_agent memory --size 64M
  local tool
  # The agent brings back what it has kept, past the driver's restore; then another mover.
  STASIS_SIM_FAULTS="transfer:delay=1s" stasis suspend "$TARGET" --json \
    >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  tool=$!
  wait_until 60 in_state checkpointed
  pkill -KILL -n -P "$tool" -x stasis-mover # the other one takes its place
  wait "$tool"
  out=$(<"$BATS_TEST_TMPDIR/out")
  went direct
  assert_equal "$(phase_names)" "$beside $later"
  assert_contains "$out" "once more, with GPU memory copied before the driver is asked"
  gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
  nothing_left
}

@test "a driver that refuses while GPU memory is being copied is asked once more, with it copied first" {
  start_agent memory --size 24M
  STASIS_SIM_FAULTS=checkpoint:error=999@1 done_by suspend "$TARGET" --json
  went direct
  assert_equal "$(phase_names)" "${beside% copy-out} $later"
  gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  # Once, and not for ever; as it was.
  STASIS_SIM_FAULTS=checkpoint:error=999 capture timeout 60 stasis suspend "$TARGET"
  ((status != 0))
  in_state running
  target_goes_on
  target_verifies
  nothing_left
}

@test "what a killed suspend has left half-way is not taken for suspended, and recover mends it" {
  start_agent memory --size 64M
  STASIS_FAULT=checkpoint.after:kill STASIS_SIM_FAULTS="transfer:delay=1s" capture stasis suspend "$TARGET"
  in_state checkpointed
  (($(pieces_kept) > 0))
  refused 6 wrong-state dump "$TARGET" --images-dir "$image"
  target_goes_on
  STASIS_FAULT=checkpoint.after:kill STASIS_SIM_FAULTS="transfer:delay=1s" capture stasis suspend "$TARGET"
  done_by suspend "$TARGET"
  assert_contains "$err" "half-way"
  # When the mover of the killed one has ended what it was at.
  wait_until 60 gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  # Nobody knows that it was to run.
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

@test "a dump that leaves the program suspended has its memory copied before the driver is asked" {
  start_agent memory --size 24M
  done_by dump "$TARGET" --images-dir "$image" --leave-suspended --json
  went direct
  [[ $(phase_names) == *"copy-out empty lock checkpoint"* ]]
  gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "a program that may open few files has its memory copied before it is given up" {
  start_agent torture --size 200M --pause-ms 100
  done_by suspend "$TARGET" --json
  assert_equal "$(phase_names)" "$beside"
  done_by resume "$TARGET"
  # Half of them are the program's.
  prlimit --pid "$TARGET" --nofile=$(($(find "/proc/$TARGET/fd" | wc -l) + 40)):
  done_by suspend "$TARGET" --json
  went direct
  assert_equal "$(phase_names)" "$later"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
  nothing_left
}

@test "a mover that dies while it gets ready is no reason to do nothing: the driver moves the memory" {
  start_agent memory --size 16M
  STASIS_SIM_FAULTS=context:die done_by suspend "$TARGET"
  assert_contains "$err" "the driver's path is taken: the process that copies GPU memory was killed"
  done_by resume "$TARGET"
  target_goes_on
  STASIS_SIM_FAULTS=context:die refused 1 internal suspend "$TARGET" --path direct
  in_state running
  target_goes_on
  target_verifies
  nothing_left
}

# It is given a minute, in which the program runs.
# bats test_tags=long
@test "a mover that hangs while it gets ready is no reason to do nothing: the driver moves the memory" {
  start_agent memory --size 16M
  STASIS_SIM_FAULTS=context:hang done_by suspend "$TARGET" --json
  went driver
  assert_contains "$out" "the driver's path is taken: preparing to copy GPU memory"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
  nothing_left
}

@test "the time that the program stands still is told: the driver's part, and no preparation" {
  start_agent memory --size 24M
  STASIS_SIM_FAULTS=checkpoint:delay=500ms done_by suspend "$TARGET" --json
  json 'd["standstill_seconds"], d["seconds"]'
  [[ $(json '0.5 <= d["standstill_seconds"] <= d["seconds"] - sum(p["seconds"] for p in d["phases"] if p["name"] == "prepare")') == True ]]
  done_by resume "$TARGET" --json
  [[ $out != *standstill* ]]
  STASIS_SIM_FAULTS=checkpoint:delay=500ms done_by suspend "$TARGET"
  [[ $out =~ "standing still for "(0\.[5-9]|[1-9]) ]]
}

@test "host memory is made ready by all processors" {
  start_agent memory --size 64M
  done_by suspend "$TARGET" --trace "$BATS_TEST_TMPDIR/trace"
  local threads
  threads=$(python3 - "$BATS_TEST_TMPDIR/trace" <<'END'
import json, sys
events = json.load(open(sys.argv[1]))
events = events if isinstance(events, list) else events["traceEvents"]
print(len({event["tid"] for event in events if event["name"] == "touch host memory"}))
END
)
  assert_equal "$threads" "$(($(nproc) < 16 ? $(nproc) : 16))" "threads"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "a dump that lets the program go on tells how long it stood still" {
  need_root "CRIU"
  start_target memory --size 8M
  STASIS_SIM_FAULTS=checkpoint:delay=500ms done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  [[ $(json '0.5 <= d["standstill_seconds"] <= d["seconds"]') == True ]]
  target_goes_on
}

# --- Memory shared by legacy CUDA IPC

@test "a child opens its parent's memory by CUDA IPC, and the two are suspended together" {
  start_agent ipc
  target_goes_on
  cycles 2 driver
  # Its child alone would be lost, and so would what the two share.
  refused 8 not-supported suspend "$(pgrep -P "$TARGET")"
  target_goes_on
  pkill -KILL -P "$TARGET"
  wait "$TARGET" || true
}

@test "host memory that is short is told before anything happens, and a dump past it needs none" {
  need_root "CRIU"
  start_agent memory --size 128M
  make_memory_cgroup $((64 << 20))
  echo "$TARGET" >"$CGROUP/cgroup.procs"
  refused 11 out-of-host-memory suspend "$TARGET"
  assert_contains "$err" "does not fit under the memory limit of $CGROUP (64.0 MiB"
  in_state running
  agent_is 0
  target_goes_on
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  went direct
  target_goes_on
  limit_cgroup $((1 << 30))
  cycles 1 direct
  target_verifies
  nothing_left
}

@test "a program that finds the driver's functions by cuGetProcAddress, and with a default stream for each thread" {
  local option
  for option in --proc-address --per-thread-stream; do
    start_agent memory --size 24M "$option"
    cycles 2 direct
    target_verifies
  done
}

@test "the driver's path has the host memory that a mover had" {
  need_root "CRIU"
  local fault used
  start_agent memory --size 128M
  cycles 1 direct
  make_memory_cgroup $((4 << 30))
  echo "$TARGET" >"$CGROUP/cgroup.procs"
  # shellcheck disable=SC2016
  local within=(bash -c 'echo $$ >"$1/cgroup.procs" && exec timeout 60 stasis "${@:2}"' bash "$CGROUP")
  used=$(cat "$CGROUP/memory.usage_in_bytes" 2>/dev/null || cat "$CGROUP/memory.current")
  limit_cgroup $((used + (256 << 20)))
  for fault in STASIS_SIM_FAULTS="context:error=2" STASIS_FAULT=direct.prepared:error; do
    capture env "$fault" "${within[@]}" dump "$TARGET" --ring 192M --images-dir "$image" --force --leave-running --json
    went driver
    target_goes_on
  done
}

@test "a tool that may not have the memory to copy through leaves it to the driver" {
  start_agent memory --size 16M
  # Without the ring, 60 MB do.
  local limited=(bash -c 'ulimit -v 500000 && exec timeout 60 stasis "$@"' bash)
  capture "${limited[@]}" suspend "$TARGET" --ring 512M --json
  went driver
  assert_contains "$(json 'd["notes"]')" "the driver's path is taken: cannot get 512 MiB of memory to copy through"
  done_by resume "$TARGET"
  target_goes_on
  capture "${limited[@]}" dump "$TARGET" --ring 512M --images-dir "$image" --leave-running --json
  went driver
  assert_contains "$(json 'd["notes"]')" "512 MiB of memory to copy through"
  target_goes_on
  refused_by 8 not-supported "${limited[@]}" suspend "$TARGET" --ring 512M --path direct
  assert_contains "$err" "ulimit -v"
  # What the content itself needs is asked of the target.
  prlimit --pid "$TARGET" --as=$(($(awk '/^VmSize:/ { print $2 }' "/proc/$TARGET/status") * 1024)):
  refused_by 11 out-of-host-memory "${limited[@]}" suspend "$TARGET"
  prlimit --pid "$TARGET" --as=unlimited:
  target_goes_on
  target_verifies
  nothing_left
}

@test "a limit without room for the memory to copy through has nobody killed" {
  need_root "CRIU"
  start_agent memory --size 64M
  make_memory_cgroup $((116 << 20))
  echo "$TARGET" >"$CGROUP/cgroup.procs"
  # shellcheck disable=SC2016
  local within=(bash -c 'echo $$ >"$1/cgroup.procs" && exec timeout 60 stasis "${@:2}"' bash "$CGROUP")
  capture "${within[@]}" suspend "$TARGET" --json
  went driver
  assert_contains "$(json 'd["notes"]')" "64.0 MiB of host memory to copy through (--ring), besides 64.0 MiB to come, do not fit under the memory limit of $CGROUP (116 MiB"
  capture "${within[@]}" resume "$TARGET" --json
  went driver
  refused_by 8 not-supported "${within[@]}" suspend "$TARGET" --path direct
  assert_contains "$err" "--ring 8M"
  target_goes_on
  capture "${within[@]}" suspend "$TARGET" --ring 8M --json
  went direct
  # The rings of two GPUs are more than what is left now.
  capture "${within[@]}" resume "$TARGET" --json
  assert_contains "$(json 'd["notes"]')" "the processes copy by themselves: 128 MiB of host memory to copy through (--ring) do not fit"
  target_goes_on
  limit_cgroup $((64 << 20))
  refused_by 11 out-of-host-memory "${within[@]}" dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "64.0 MiB of host memory to copy through (--ring) do not fit"
  capture "${within[@]}" dump "$TARGET" --images-dir "$image" --ring 8M --json
  went direct
  wait_until 60 number_is_free
  refused_by 11 out-of-host-memory "${within[@]}" restore --images-dir "$image" --detach
  assert_contains "$err" "to copy takes 64.0 MiB"
  number_is_free
  capture "${within[@]}" restore --images-dir "$image" --detach --ring 8M --json
  went direct
  target_goes_on
  restored_verifies
  nothing_left
}

@test "a program that may not have as much memory as its GPU holds is told so, and runs on" {
  local size
  start_agent memory --size 128M
  size=$(awk '/^VmSize:/ { print $2 * 1024 }' "/proc/$TARGET/status")
  prlimit --pid "$TARGET" --as=$((size + (32 << 20))):
  refused 11 out-of-host-memory suspend "$TARGET"
  assert_contains "$err" "ulimit -v"
  in_state running
  agent_is 0
  target_goes_on
  prlimit --pid "$TARGET" --as=unlimited:
  cycles 1 direct
  target_verifies
  nothing_left
}

@test "a program that gets no more memory once it is made ready is not ended by its agent" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  start_agent memory --size 16M
  STASIS_FAULT=direct.prepared:target-no-memory refused 11 out-of-host-memory suspend "$TARGET"
  in_state running
  agent_is 0
  target_goes_on
  prlimit --pid "$TARGET" --as=unlimited: --data=unlimited:
  cycles 1 direct
  target_verifies
  nothing_left
}

@test "memory in more pieces than files may be open" {
  start_agent torture --size 600M --pause-ms 100
  # Each piece is a descriptor on its way to the mover.
  (ulimit -Sn 60 && done_by suspend "$TARGET" --path direct)
  (ulimit -Sn 60 && done_by resume "$TARGET")
  target_goes_on
  # The limit cannot be raised: the driver moves it.
  (ulimit -n 110 && capture stasis suspend "$TARGET" && assert_equal "$status" 0 && assert_contains "$err" "110 open files are allowed")
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

ring_is() { (($(ring_of "$1") == $2)); }

@test "the memory to copy through is as large as --ring says, and all of the content passes" {
  need_root "CRIU"
  start_agent memory --size 64M
  local size
  for size in 8M 256M; do
    STASIS_SIM_FAULTS=checkpoint:delay=4s stasis suspend "$TARGET" --path direct --ring "$size" >/dev/null 2>&1 3>&- &
    local tool=$!
    stopped_at_work "$tool"
    local ring
    ring=$(ring_of "$tool")
    kill -CONT "$tool"
    wait "$tool"
    assert_equal "$ring" $((${size%M} << 20)) "$size"
    # It does not know for which GPUs: for two, and enough for sixteen.
    STASIS_SIM_FAULTS=unlock:delay=4s stasis resume "$TARGET" --ring "$size" >/dev/null 2>&1 3>&- &
    tool=$!
    local twice=$((2 * ${size%M} << 20))
    wait_until 60 ring_is "$tool" $((twice < 32 << 20 ? 32 << 20 : twice))
    wait "$tool"
    target_goes_on
  done
  dump_it --path direct --ring 8M
  restore_it --ring 8M --json
  went direct
  target_goes_on
  restored_verifies
  nothing_left
}

@test "a ring of no use is refused before anything is touched" {
  start_agent memory --size 16M
  local size
  for size in 100K 4G 8 much -1; do
    refused 2 usage suspend "$TARGET" --ring "$size"
    assert_contains "$err" "'$size' is no ring to copy through; take 2M to 2G"
    refused 2 usage dump "$TARGET" --images-dir "$image" --ring "$size"
  done
  refused 2 usage run --images-dir "$image" --ring 100K -- true
  in_state running
  target_goes_on
  no_image
  nothing_left
}

# Of the private memory of no file, what is in huge pages, in KiB, without the buffer of the content.
huge_kib() {
  python3 - "$1" "$2" <<'END'
import re, sys
sum, counts = 0, False
for line in open(f"/proc/{sys.argv[1]}/smaps"):
    head = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *$", line)
    if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
        counts = head and (int(head[2], 16) - int(head[1], 16)) < int(sys.argv[2])
    elif counts and line.startswith("AnonHugePages:"):
        sum += int(line.split()[1])
print(sum)
END
}

@test "what the driver saves of a context is in huge pages" {
  grep -qs '\[always\]\|\[madvise\]' /sys/kernel/mm/transparent_hugepage/enabled || skip "this kernel has none"
  start_agent memory --size 64M
  local before
  before=$(huge_kib "$TARGET" $((64 << 20)))
  done_by suspend "$TARGET" --path direct
  (($(huge_kib "$TARGET" $((64 << 20))) >= before + 2048))
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}
