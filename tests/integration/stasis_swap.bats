#!/usr/bin/env bats
# stasis swap: one job makes room for another, in one step or not at all.

load helpers
load stasis_lib

setup() {
  setup_stasis
  export STASIS_SIM_GPUS=8G
}
teardown() { end_stasis; }

# two_servers SIZE: A and B, of which B is suspended. A_STATUS and B_STATUS are their rounds.
two_servers() {
  start_target memory --size "$1"
  B=$TARGET B_STATUS=$TARGET_STATUS
  done_by suspend "$B"
  start_target memory --size "$1"
  A=$TARGET A_STATUS=$TARGET_STATUS
}
a_runs() { in_state running "$A"; in_state checkpointed "$B"; TARGET_STATUS=$A_STATUS target_goes_on; }
b_runs() { in_state running "$B"; in_state checkpointed "$A"; TARGET_STATUS=$B_STATUS target_goes_on; }

@test "where both fit they pass each other, and back" {
  two_servers 100M
  done_by swap "$A" "$B" --json
  assert_equal "$(json 'd["at_once"]')" True
  assert_equal "$(json 'd["suspended"]["pid"], d["resumed"]["pid"]')" "$A $B"
  b_runs
  done_by swap "$B" "$A"
  assert_contains "$out" "suspended $B (process $B) in "
  a_runs
  nothing_left
}

# A GPU cannot switch away from a kernel of a program that the driver has restored (docs/adr/0031).
@test "while one that was suspended before is quiesced, nothing is done on its GPUs" {
  local trace=$BATS_TEST_TMPDIR/trace path
  two_servers 100M
  for path in driver direct; do
    if [[ $path == direct ]]; then
      LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so start_target memory --size 100M
      A=$TARGET A_STATUS=$TARGET_STATUS
      done_by suspend "$A"
      done_by resume "$A"
    fi
    TARGET_STATUS=$A_STATUS target_goes_on
    STASIS_SIM_FAULTS="lock:delay=300ms pid=$A" done_by swap "$A" "$B" --json --trace "$trace"
    assert_equal "$(json 'd["suspended"]["path"], d["at_once"]')" "$path True"
    python3 -IS - "$trace" "$A" "$B" "$path" <<'END'
import json, sys
trace, out, into, path = sys.argv[1:]
events = json.load(open(trace))["traceEvents"]
names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
def done(who, what):
    return [e for e in events if names[e["pid"]] == "stasis swap: " + who and (e.get("cat"), e["name"]) == what]
rest = done(out, {"driver": ("driver", "lock"), "direct": ("mover", "prepare")}[path])[0]
early = rest["ts"] + rest["dur"] - done(into, ("driver", "restore"))[0]["ts"]
assert early <= 0, f"IN is restored {early / 1e3:.1f} ms before OUT is quiesced"
END
    b_runs
    kill "$A"
    done_by suspend "$B"
  done
}

@test "where they do not, one goes after the other" {
  export STASIS_SIM_GPUS=120M
  two_servers 80M
  done_by swap "$A" "$B" --json
  assert_equal "$(json 'd["at_once"]')" False
  b_runs
  nothing_left
}

@test "the direct path swaps too" {
  (exec_on_gpu setsid stasis run --name b -- stasis-workload memory --size 100M --status "$BATS_TEST_TMPDIR/b") \
    </dev/null >/dev/null 2>&1 3>&- &
  B=$! B_STATUS=$BATS_TEST_TMPDIR/b
  (exec_on_gpu setsid stasis run --name a -- stasis-workload memory --size 100M --status "$BATS_TEST_TMPDIR/a") \
    </dev/null >/dev/null 2>&1 3>&- &
  A=$! A_STATUS=$BATS_TEST_TMPDIR/a
  at_end_kill "$A" "$B"
  TARGET_STATUS=$A_STATUS wait_until 60 target_is_up
  TARGET_STATUS=$B_STATUS wait_until 60 target_is_up
  done_by suspend b
  done_by swap a b --ring 8M --json
  assert_equal "$(json 'd["suspended"]["path"], d["resumed"]["path"], d["at_once"]')" "direct direct True"
  # Of two at once the driver does one after the other: copied before it is asked, not beside.
  assert_equal "$(json '*[p["name"] for p in d["suspended"]["phases"]]')" "prepare close copy out evict lock checkpoint"
  b_runs
  done_by resume a
  done_by suspend b --json
  assert_equal "$(json 'd["phases"][-1]["name"]')" "copy out"
}

# side FILE NAME CATEGORY:NAME...: what one process of a trace has done, the one of that name.
side() {
  python3 -IS -c "import json, sys
events = json.load(open(sys.argv[1]))['traceEvents']
pids = [e['pid'] for e in events if e['name'] == 'process_name' and e['args']['name'] == 'stasis ' + sys.argv[2]]
assert len(pids) == 1, (sys.argv[2], pids, [e for e in events if e['ph'] == 'M'])
names = {e['cat'] + ':' + e['name'] for e in events if e['ph'] == 'X' and e['pid'] == pids[0]}
assert names >= set(sys.argv[3:]), names" "$@"
}

@test "a trace of a swap has what was done on each side, also of one that fails" {
  two_servers 100M
  local trace=$BATS_TEST_TMPDIR/trace
  done_by swap "$A" "$B" --trace "$trace"
  trace "$trace" phase:lock phase:unlock
  side "$trace" "swap: $A" phase:lock driver:checkpoint
  side "$trace" "swap: $B" phase:restore driver:unlock
  STASIS_SIM_FAULTS="checkpoint:error=999 pid=$B" capture timeout 60 stasis swap "$B" "$A" --trace "$trace"
  ((status != 0))
  side "$trace" "swap: $B" phase:lock
  side "$trace" "swap: $A" phase:restore
  b_runs
}

@test "two jobs with namespaces of their own swap by their names" {
  need_root "CRIU and namespaces"
  local name
  for name in a b; do
    (exec_on_gpu stasis run --name $name --images-dir "$BATS_TEST_TMPDIR/images-$name" -- \
      stasis-workload memory --size 100M --status "$BATS_TEST_TMPDIR/$name") </dev/null >/dev/null 2>&1 3>&- &
    at_end_kill $!
  done
  for name in a b; do TARGET_STATUS=$BATS_TEST_TMPDIR/$name wait_until 60 target_is_up; done
  done_by suspend b
  done_by swap a b
  TARGET_STATUS=$BATS_TEST_TMPDIR/b target_goes_on
  refused 6 wrong-state swap a b
  done_by swap b a --trace "$BATS_TEST_TMPDIR/trace"
  side "$BATS_TEST_TMPDIR/trace" "swap: b" driver:checkpoint
  side "$BATS_TEST_TMPDIR/trace" "swap: a" driver:restore
  TARGET_STATUS=$BATS_TEST_TMPDIR/a target_goes_on
}

@test "what is not as it must be is refused, and nothing is touched" {
  two_servers 100M
  refused 2 usage swap "$A" "$A"
  refused 6 wrong-state swap "$B" "$A"
  assert_contains "$err" "$B does not run"
  refused 3 no-such-process swap "$A" no-such-job
  refused 3 no-such-process swap "$A" 2147483647
  assert_contains "$err" "there is no process 2147483647 ["
  refused 2 device-map-invalid swap "$A" "$B" --device-map 0
  a_runs
  nothing_left
}

@test "a failure on either side leaves both as they were, at once and one after the other" {
  local room fault
  for room in 8G 120M; do
    export STASIS_SIM_GPUS=$room
    two_servers 80M
    for fault in "checkpoint:error=999 pid=$A" "restore:error=999 pid=$B" "lock:timeout pid=$A"; do
      echo "$fault" >"$STASIS_SIM_DIR/faults"
      capture timeout 60 stasis swap "$A" "$B" --timeout 300
      ((status != 0)) || { echo "$fault: it succeeds" >&2; false; }
      rm "$STASIS_SIM_DIR/faults"
      a_runs
    done
    nothing_left
    kill -KILL "$A" "$B"
    wait_until 60 number_is_free "$A"
  done
}

@test "Ctrl-C in the middle leaves both as they were" {
  two_servers 100M
  STASIS_SIM_FAULTS="checkpoint:delay=4s; restore:delay=4s" timeout 60 stasis swap "$A" "$B" >/dev/null 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  local tool=$!
  wait_until 60 held_up
  kill -INT "$(pgrep -P "$tool" -x stasis)"
  local status=0
  wait "$tool" || status=$?
  assert_equal "$status" 130 "$(<"$BATS_TEST_TMPDIR/err")"
  a_runs
  nothing_left
}

# bats test_tags=long
@test "Ctrl-C twice ends a swap whose second program does not answer any more" {
  local tool inner status=0
  LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so two_servers 100M
  python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$B" stop-filling 3>&- &
  at_end_kill $!
  sleep 1 # it watches
  timeout 100 stasis swap "$A" "$B" >/dev/null 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  tool=$!
  wait_until 60 grep -q "^State:.T" "/proc/$B/status"
  inner=$(pgrep -P "$tool" -x stasis)
  local begun=$SECONDS
  kill -INT "$inner"
  sleep 1.5
  kill -INT "$inner"
  wait "$tool" || status=$?
  ((status != 0 && SECONDS - begun < 40)) || { echo "$status after $((SECONDS - begun)) s"; cat "$BATS_TEST_TMPDIR/err"; false; }
  kill -CONT "$B"
  done_by recover --all
}

@test "Ctrl-C while a failure is undone: it is undone to the end" {
  two_servers 100M
  echo "checkpoint:error=999 pid=$A; checkpoint:delay=4s pid=$B" >"$STASIS_SIM_DIR/faults"
  timeout 60 stasis swap "$A" "$B" >/dev/null 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  local tool=$!
  wait_until 60 held_up # B, which had come back, has to go again
  kill -INT "$(pgrep -P "$tool" -x stasis)"
  local status=0
  wait "$tool" || status=$?
  ((status != 0 && status != 12)) || { cat "$BATS_TEST_TMPDIR/err" >&2; false; }
  rm "$STASIS_SIM_DIR/faults"
  a_runs
  nothing_left
}

@test "killed in the middle, stasis recover makes the first one run again" {
  two_servers 80M
  STASIS_SIM_FAULTS="checkpoint:delay=60s" timeout 60 stasis swap "$A" "$B" >/dev/null 2>&1 3>&- &
  local tool=$!
  wait_until 60 held_up
  kill -KILL "$(pgrep -P "$tool" -x stasis)"
  wait "$tool" || true
  wait_until 60 swap_has_ended
  done_by recover --all
  in_state running "$A"
  TARGET_STATUS=$A_STATUS target_goes_on
  nothing_left
}

@test "killed on both sides, what mends each is named" {
  two_servers 80M
  echo "checkpoint:delay=20s pid=$A; restore:delay=20s pid=$B" >"$STASIS_SIM_DIR/faults"
  timeout 60 stasis swap "$A" "$B" >/dev/null 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  local tool=$! status=0
  wait_until 60 both_at_work
  # shellcheck disable=SC2046
  kill -KILL $(sides_of "$tool")
  wait "$tool" || status=$?
  assert_equal "$status" 12
  assert_contains "$(<"$BATS_TEST_TMPDIR/err")" "\`stasis recover $A\`"
  assert_contains "$(<"$BATS_TEST_TMPDIR/err")" "\`stasis recover $B\`"
  rm "$STASIS_SIM_DIR/faults"
  done_by recover "$A"
  done_by recover "$B"
  in_state running "$A"
  TARGET_STATUS=$A_STATUS target_goes_on
  nothing_left
}

both_at_work() { (($(count_held_up) >= 2)); }
# sides_of TOOL: of the swap that `timeout` has started.
sides_of() { pgrep -P "$(pgrep -P "$1" -x stasis)" -x stasis-swap; }

swap_has_ended() { ! pgrep -x stasis-swap >/dev/null; }

@test "the example: two servers take turns on one GPU" {
  capture timeout 300 env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" \
    "$BATS_TEST_DIRNAME/../../examples/two-servers/take-turns" --counter --turns 4 --requests 3 --gib 0.05
  assert_equal "$status" 0 "status ($out$err)"
  assert_contains "$out" "turn 4: turns-one has answered 106"
}

@test "where the second finds no room beside the first after all, one goes after the other" {
  two_servers 100M
  # By what was looked at there was room; the driver finds none.
  echo "restore:oom@1 pid=$B" >"$STASIS_SIM_DIR/faults"
  done_by swap "$A" "$B" --json
  assert_equal "$(json 'd["at_once"], "memory" in d["no_room_at_once"]')" "False True"
  b_runs
  echo "restore:oom@1 pid=$A" >"$STASIS_SIM_DIR/faults"
  done_by swap "$B" "$A"
  assert_contains "$out" "one after the other"
  assert_contains "$err" "there was no room for $A beside $B after all: "
  a_runs
  # Nor when the first has gone: both are as they were.
  echo "restore:oom pid=$B" >"$STASIS_SIM_DIR/faults"
  refused 11 out-of-gpu-memory swap "$A" "$B"
  rm "$STASIS_SIM_DIR/faults"
  a_runs
  nothing_left
}

# killed_swap FAULT [recover PID...]: a swap of A and B is killed while the simulated driver draws a call out (FAULT); it
# is recovered by `recover --all`, after what is given.
killed_swap() {
  STASIS_SIM_FAULTS=$1 stasis swap "$A" "$B" >/dev/null 2>&1 3>&- &
  local swap=$!
  wait_until 60 held_up
  kill -KILL "$swap"
  wait "$swap" || true
  local pid
  for pid in "${@:3}"; do done_by recover "$pid"; done
  done_by recover --all
  local recovered=$out
  done_by recover --all
  assert_equal "${out%$'\n'}" "nothing to recover: no operation was cut short"
  out=$recovered
}

@test "a swap that was killed between its two parts is brought to its end" {
  export STASIS_SIM_GPUS=120M # so that one goes after the other
  two_servers 80M
  killed_swap "restore:delay=1s pid=$B"
  assert_contains "$out" "swap (cut short): $A is suspended and $B runs, as asked for"
  b_runs
  nothing_left
}

@test "a swap that was killed, and of which one has ended since, is decided for the other" {
  export STASIS_SIM_GPUS=120M
  two_servers 80M
  STASIS_SIM_FAULTS="restore:delay=1s pid=$B" stasis swap "$A" "$B" >/dev/null 2>&1 3>&- &
  local swap=$!
  wait_until 60 held_up
  kill -KILL "$swap" "$A"
  wait "$swap" || true
  done_by recover --all
  assert_contains "$out" "$B runs, as asked for; $A has ended"
  in_state running "$B"
  TARGET_STATUS=$B_STATUS target_goes_on
  done_by recover --all
  assert_equal "${out%$'\n'}" "nothing to recover: no operation was cut short"
}

@test "a swap that was killed while it suspended is taken back" {
  export STASIS_SIM_GPUS=120M
  two_servers 80M
  killed_swap "checkpoint:delay=1s pid=$A"
  assert_contains "$out" "swap (cut short): $A runs and $B is suspended, as before"
  a_runs
  nothing_left
}

@test "a swap of two at once that was killed leaves one that runs" {
  local fault
  two_servers 100M
  for fault in "checkpoint:delay=1s pid=$A" "restore:delay=1s pid=$B" "unlock:delay=1s pid=$B"; do
    killed_swap "$fault"
    if [[ $(state_of "$A") == running ]]; then
      a_runs
    else
      b_runs
      done_by swap "$B" "$A"
    fi
    nothing_left
  done
}

@test "two jobs with namespaces of their own are brought back after a killed swap, by recover --all outside" {
  need_root "namespaces"
  export STASIS_SIM_GPUS=120M
  local name
  for name in b a; do
    (exec_on_gpu stasis run --name $name --images-dir "$BATS_TEST_TMPDIR/images-$name" -- \
      stasis-workload memory --size 80M --status "$BATS_TEST_TMPDIR/$name") </dev/null >/dev/null 2>&1 3>&- &
    at_end_kill $!
    TARGET_STATUS=$BATS_TEST_TMPDIR/$name wait_until 60 target_is_up
    if [[ $name == b ]]; then done_by suspend b; fi
  done
  A=a B=b
  killed_swap "restore:delay=1s"
  assert_contains "$out" "swap (cut short): a is suspended and b runs, as asked for"
  TARGET_STATUS=$BATS_TEST_TMPDIR/b target_goes_on
}

@test "the user who makes one of them run after a killed swap has decided about it" {
  two_servers 100M
  # Both by hand.
  killed_swap "restore:delay=1s pid=$B" recover "$A" "$B"
  [[ $out != *swap* ]]
  in_state running "$A" "$B"
}
