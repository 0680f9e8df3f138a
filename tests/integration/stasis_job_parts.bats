#!/usr/bin/env bats
# stasis run --group: the parts of a job of several nodes, which hear of each other by TCP in every round, start, are
# saved and go on together. (What a save itself comes to is in stasis_nodes_dump.bats.)

load helpers
load stasis_lib
load stasis_jobs_lib

setup() {
  setup_job
  port=$((5000 + RANDOM % 5000)) # below those that the kernel gives out
  starts=0
}
teardown() { end_stasis; }

# begin I [ARGUMENT...]: part I of a start of the two.
begin() {
  local i=$1
  shift
  mkdir -p "$BATS_TEST_TMPDIR/sim$i"
  images=$BATS_TEST_TMPDIR/images$i TARGET_LOG=$BATS_TEST_TMPDIR/out$i
  job=(stasis-workload rank --meeting "tcp:127.0.0.1:$port" --rank "$i" --ranks 2 --size 256K --seed 7 --pause-ms 5
    --status "$BATS_TEST_TMPDIR/status$i")
  STASIS_SIM_DIR=$BATS_TEST_TMPDIR/sim$i start_run --group "$BATS_TEST_TMPDIR/group.$starts" --parts 2 --part "node$i" "$@"
  RUNS[i]=$RUN LOGS[i]=$RUN_LOG
}
# begin_both [ARGUMENT...]
begin_both() {
  starts=$((starts + 1))
  begin 0 "$@"
  begin 1 "$@"
}
# said I TEXT
said() { RUN_LOG=${LOGS[$1]} told "$2"; }
# end_with STATUS: both.
end_with() {
  local i
  for i in 0 1; do RUN=${RUNS[$i]} RUN_LOG=${LOGS[$i]} ends_with "$1"; done
  [[ ! -e $BATS_TEST_TMPDIR/group.$starts ]]
}
round() { target_round "$BATS_TEST_TMPDIR/status$1" 2>/dev/null || echo 0; }
are_past() { (($(round 0) > $1 && $(round 1) > $1)); }
go_on() { wait_until 60 are_past $(($(round 0) + 2)) || { cat "${LOGS[@]}" >&2; return 1; }; }
images_of() { ls "$BATS_TEST_TMPDIR/images$1" | grep -v lock | xargs; }
dump_of() { stasis inspect "$BATS_TEST_TMPDIR/images$1/$2" --json | python3 -IS -c 'import json, sys; print(json.load(sys.stdin)["group"]["id"])'; }
same_dump() { assert_equal "$(dump_of 0 "$1")" "$(dump_of 1 "$1")" "the dump of $1"; }

@test "one part is told to make room: both are saved and end, and go on together" {
  local i before
  begin_both
  go_on
  for i in 1 2; do
    kill -TERM "${RUNS[$((i % 2))]}"
    end_with 75
    said $(((i + 1) % 2)) "another part of the job saves it"
    same_dump "00000$i"
    before=$(round 0)
    begin_both
    said 0 "goes on from"
    said 1 "goes on from"
    wait_until 60 are_past $((before + 1))
  done
  kill -TERM "$(RUN=${RUNS[0]} job_pid)"
  end_with 0
  grep -q '^verified' "$BATS_TEST_TMPDIR/out0"
  grep -q '^verified' "$BATS_TEST_TMPDIR/out1"
}

@test "by the clock of one: saved together, killed, and on from the same moment" {
  starts=1
  begin 0 --every 2s
  begin 1
  go_on
  said 0 "saved to $BATS_TEST_TMPDIR/images0/000002"
  said 1 "saved to $BATS_TEST_TMPDIR/images1/000002"
  go_on
  kill -KILL "${RUNS[@]}"
  wait "${RUNS[@]}" || true
  wait_until 60 job_is_gone
  begin_both
  said 0 "goes on from"
  said 1 "goes on from"
  go_on
  local newest
  newest=$(images_of 0 | awk '{ print $NF }')
  same_dump "$newest"
  kill -TERM "$(RUN=${RUNS[1]} job_pid)"
  end_with 0
}

@test "a part without its image: none begins, and both say so" {
  begin_both
  go_on
  kill -TERM "${RUNS[0]}"
  end_with 75
  rm -r "$BATS_TEST_TMPDIR/images1/000001"
  begin_both
  end_with 2
  grep -q "part node0 goes on from an image, and part node1 has none" "${LOGS[0]}"
  grep -q "part node0 goes on from an image, and part node1 has none" "${LOGS[1]}"
  assert_equal "$(images_of 0)" 000001
}

@test "a part that does not come is waited for, for so long, and not when the job is to end" {
  starts=1
  begin 0
  sleep 1
  kill -TERM "${RUNS[0]}"
  RUN=${RUNS[0]} RUN_LOG=${LOGS[0]} ends_with 75
  starts=2
  begin 1 --grace 1s
  RUN=${RUNS[1]} RUN_LOG=${LOGS[1]} ends_with 7
  said 1 "1 of 2 parts have come"
  [[ ! -e $BATS_TEST_TMPDIR/out1 || ! -s $BATS_TEST_TMPDIR/out1 ]]
}
