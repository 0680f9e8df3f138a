#!/usr/bin/env bats
# GPU memory that is pre-copied while its program runs, on the simulated driver and real CRIU: what is in the image is
# what the program had when it stood still, and a program that gives memory back has it back.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
}
teardown() { end_stasis; }

# Copies of the mover's, which has the tool's environment.
SLOWLY="transfer:delay=40ms"

start_under_agent() {
  LD_PRELOAD=$agent start_target "$@"
  target_goes_on
}
# precopy [OPTION...]
precopy() { capture stasis dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on "$@"; }
is_not_precopied() { ! python3 -S "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" precopied; }
was_precopied() { [[ $(json '[p["name"] for p in d["phases"]]') == *"GPU pre-copy"* ]]; }
restored_goes_on() {
  kill -KILL "$TARGET"
  wait_until 60 number_is_free
  done_by verify --images-dir "$image"
  done_by restore --images-dir "$image" --detach
  target_goes_on
}

@test "of a program that writes little of its GPU memory, little is copied while it stands still" {
  start_under_agent memory --size 4M --still 96M --pause-ms 5
  precopy --json
  assert_equal "$status" 0 "$err"
  was_precopied
  (($(json 'd["precopied_bytes"]') >= 90 << 20))
  target_goes_on
  restored_goes_on
}

# ms_of PHASE: of the report in $out.
ms_of() { json "[int(1000 * p['seconds']) for p in d['phases'] if p['name'] == '$1'][0]"; }

@test "what did not change stays on the GPU, and need not come back" {
  start_under_agent memory --size 4M --still 96M --pause-ms 5
  STASIS_SIM_FAULTS=transfer:delay=120ms precopy --json
  assert_equal "$status" 0 "$err"
  was_precopied
  # All of it went over the bus before, in some dozen transfers; what comes back is a copy within the GPU and what has
  # changed. Where nothing stays there it takes three quarters of that time, and a fifth otherwise.
  echo "out $(ms_of "GPU pre-copy") ms, back $(ms_of "copy in") ms" >&2
  ((2 * $(ms_of "copy in") < $(ms_of "GPU pre-copy")))
  target_goes_on
  restored_goes_on
}

@test "of a program that writes all of it without a pause, all is as it was at one instant" {
  start_under_agent memory --size 32M --pause-ms 0
  STASIS_SIM_FAULTS=$SLOWLY precopy --json
  assert_equal "$status" 0 "$err"
  was_precopied
  target_goes_on
  # What was copied and has changed takes no room.
  (($(du -s --block-size=1 "$image/gpu" | cut -f1) <= 40 << 20))
  restored_goes_on
}

@test "a program that gives GPU memory back while it is pre-copied gets it back at once" {
  # On a GPU that has room for no more.
  export STASIS_SIM_GPUS=1x56M
  start_under_agent churn --size 48M --threads 2
  STASIS_SIM_FAULTS=$SLOWLY precopy
  assert_equal "$status" 0 "$err"
  assert_contains "$err" "has freed GPU memory while that was pre-copied"
  target_goes_on
  restored_goes_on
}

@test "a dump that fails, or is killed, while it pre-copies GPU memory, leaves the program as it was, and no image" {
  start_under_agent churn --size 48M --threads 2
  STASIS_FAULT=direct.copied_ahead:error precopy --path direct
  ((status != 0))
  assert_contains "$err" "as it was"
  target_goes_on
  # The mover has the memory, and the program's threads wait to give some of it back.
  STASIS_SIM_FAULTS=transfer:delay=200ms setsid stasis dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on \
    >/dev/null 2>&1 3>&- &
  local tool=$!
  wait_until 60 python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" precopied
  kill -KILL "$tool"
  wait "$tool" || true
  wait_until 5 is_not_precopied
  target_goes_on
  done_by recover --all
  [[ $(ls "$BATS_TEST_TMPDIR" | grep -c '^image') == 0 ]]
  target_goes_on
}

@test "of a program that is killed while its GPU memory is pre-copied, that is said, and there is no image" {
  start_under_agent memory --size 96M --pause-ms 5
  (STASIS_SIM_FAULTS=$SLOWLY exec setsid stasis dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on >"$BATS_TEST_TMPDIR/said" 2>&1 3>&-) &
  local tool=$! status=0
  sleep 0.8
  kill -KILL "$TARGET"
  wait "$tool" || status=$?
  ((status == 3))
  assert_contains "$(<"$BATS_TEST_TMPDIR/said")" "has ended meanwhile"
  [[ $(<"$BATS_TEST_TMPDIR/said") != *"has freed GPU memory"* ]]
  [[ $(ls "$BATS_TEST_TMPDIR" | grep -c '^image') == 0 ]]
}

@test "where the mover dies while it pre-copies GPU memory, the dump goes on with another, and says so" {
  start_under_agent memory --size 4M --still 96M --pause-ms 5
  (STASIS_SIM_FAULTS="transfer:delay=100ms" exec setsid stasis dump "$TARGET" --images-dir "$image" --leave-running \
    --pre-copy on --path direct >"$BATS_TEST_TMPDIR/said" 2>&1 3>&-) &
  local tool=$! status=0
  wait_until 60 python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" precopied
  pkill -KILL -n -P "$tool" -x stasis-mover # the other one takes its place
  wait "$tool" || status=$?
  assert_equal "$status" 0 "$(<"$BATS_TEST_TMPDIR/said")"
  assert_contains "$(<"$BATS_TEST_TMPDIR/said")" "could not be pre-copied (the mover process was killed" \
    "the rest is copied while the job stands still"
  target_goes_on
  restored_goes_on
}

@test "where the pre-copy of GPU memory takes too long, the dump goes on without the rest of it, and says so" {
  start_under_agent memory --size 96M --pause-ms 20
  STASIS_PRECOPY_MS=1 STASIS_SIM_FAULTS=$SLOWLY precopy --json
  assert_equal "$status" 0 "$err"
  assert_contains "$(json 'd["notes"]')" \
    "the GPU memory is not pre-copied after 0.001 s: the rest is copied while the job stands still"
  target_goes_on
  restored_goes_on
}

@test "of a program that changes all of its GPU memory while that is pre-copied, that is said" {
  start_under_agent memory --size 96M --pause-ms 1
  STASIS_SIM_FAULTS=$SLOWLY precopy --json
  assert_equal "$status" 0 "$err"
  assert_contains "$(json 'd["notes"]')" "the job changes its GPU memory as fast as it is pre-copied"
  target_goes_on
}
