#!/usr/bin/env bats
# What a program under the agent sees and may do, on the simulated driver.

load helpers
load stasis_lib

setup() {
  setup_stasis
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
}
teardown() { end_stasis; }

# start_doing WHAT [ARGUMENT...]: stasis-agent-target under the agent. As start_target.
start_doing() {
  TARGET_LOG=$BATS_TEST_TMPDIR/target.log
  TARGET_STATUS=$BATS_TEST_TMPDIR/target.status
  local what=$1
  shift
  rm -f "$TARGET_STATUS"
  (LD_PRELOAD=$agent exec_on_gpu setsid stasis-agent-target "$what" "$TARGET_STATUS" "$@") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
}

cycle_by() {
  done_by suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" "$1" "path ($out)"
  gpu_is_free
  done_by resume "$TARGET" --json
  target_goes_on
}

# The round is written anew each time, so at a moment the file may be empty.
target_round() { local n=; until [[ -n $n ]]; do n=$(sed -n 's/^round 0*\([0-9][0-9]*\).*/\1/p' "$TARGET_STATUS"); done; echo "$n"; }

@test "a program sees the same with the agent and without, line by line" {
  export STASIS_SIM_GPUS=2x512M
  (exec_on_gpu stasis-agent-calls) >"$BATS_TEST_TMPDIR/without" 2>&1
  (LD_PRELOAD=$agent exec_on_gpu stasis-agent-calls) >"$BATS_TEST_TMPDIR/with" 2>&1
  (($(wc -l <"$BATS_TEST_TMPDIR/without") > 500))
  diff "$BATS_TEST_TMPDIR/without" "$BATS_TEST_TMPDIR/with"
}

# bats test_tags=long
@test "a program that forks all the time is suspended and goes on" {
  start_doing fork
  # What forked a moment ago may still be there, and is suspended with it.
  for _ in 1 2 3; do cycle_by direct; done
  target_verifies
}

@test "a program that closes the driver's library and opens it again is suspended and goes on" {
  # The simulated driver is linked to stay (DF_1_NODELETE); this copy goes when nobody holds it.
  local copy=$BATS_TEST_TMPDIR/driver/libcuda.so.1
  mkdir "${copy%/*}"
  python3 -c 'import struct, sys
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
  cycle_by driver
  target_verifies
}

# bats test_tags=long
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

@test "the agent's page can neither shrink nor grow" {
  start_doing plain
  assert_equal "$(python3 "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" seals)" 7
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

@test "memory that the program has exported stays, and --path direct says so" {
  start_doing export
  refused 8 not-supported suspend "$TARGET" --path direct
  assert_contains "$err" "2.00 MiB"
  assert_contains "$err" "exported"
  in_state running
  target_goes_on
  cycle_by direct
  target_verifies
}

# open_there, closed_there: another process has TARGET's memory open by CUDA IPC, or not any more.
open_there() { touch "$go"; wait_until 60 test -s "$go.done"; }
closed_there() { rm "$go"; wait_until 60 test ! -e "$go.done"; sleep 0.1; }

# What the doctor finds before anybody tries.
told_of_sharing() {
  capture stasis doctor "$TARGET" --no-trial --json
  json "' '.join({f['light'] for f in d['processes'] if f['id'] == 'shared-gpu-memory'})"
}

@test "memory shared by CUDA IPC stays for as long as it is open elsewhere, and leaves before and after" {
  go=$BATS_TEST_TMPDIR/go
  start_doing share "$go"
  cycle_by direct
  for _ in 1 2; do
    open_there
    refused 8 not-supported suspend "$TARGET"
    assert_contains "$err" "CUDA IPC"
    target_goes_on
    assert_equal "$(told_of_sharing)" "red"
    closed_there
    assert_equal "$(told_of_sharing)" ""
    cycle_by direct
  done
  open_there
  pkill -KILL -P "$TARGET"
  cycle_by direct
  target_verifies
}

# bats test_tags=long
@test "dumped and restored, memory that was shared by CUDA IPC is opened as before" {
  need_root "CRIU"
  go=$BATS_TEST_TMPDIR/go
  start_doing share "$go"
  open_there
  closed_there
  dump_it
  restore_it
  target_goes_on
  open_there
  refused 8 not-supported suspend "$TARGET"
  closed_there
  cycle_by direct
  restored_verifies
}

# churns COUNT ARGUMENT...: TARGET's threads allocate and free all the time, and it is suspended and
# resumed that often; it verifies itself.
churns() {
  local count=$1 i direct=0
  shift
  LD_PRELOAD=$agent start_target churn --pause-ms 5 "$@"
  for ((i = 1; i <= count; ++i)); do
    done_by suspend "$TARGET" --json
    # At some moments they have nothing but small pieces, which are the driver's.
    [[ $out != *'"path": "direct"'* ]] || ((direct += 1))
    ((i % 10 != 1)) || gpu_is_free
    done_by resume "$TARGET" --json
    ((i % 10 != 1)) || target_goes_on
  done
  ((direct >= count * 3 / 4)) || { echo "$direct of $count by the direct path" >&2; return 1; }
  target_goes_on
  target_verifies
}

@test "threads that allocate and free all the time are suspended twenty times" {
  churns 20 --threads 2 --size 28M
}

@test "recover does not wait until a program that allocates and frees all the time has done" {
  LD_PRELOAD=$agent start_target churn --pause-ms 5 --threads 2 --size 28M
  capture env STASIS_FAULT=direct.emptied:kill stasis suspend "$TARGET"
  assert_equal "$status" 137
  local start=$SECONDS
  done_by recover "$TARGET"
  ((SECONDS - start < 40)) || { echo "it took $((SECONDS - start)) s" >&2; return 1; }
  target_goes_on
  target_verifies
  nothing_left
}

# bats test_tags=long
@test "threads that allocate and free all the time are suspended two hundred times" {
  churns 200 --threads 4 --size 56M
}
