#!/usr/bin/env bats
# Images that take over from an earlier one what has not changed: how much is written, that each is whole
# by itself whatever becomes of the others, and what cannot be a base. On the simulated driver with the
# real CRIU.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
}
teardown() { end_stasis; }

# Of the device memory 32 MiB never change, and some 6 do all the time.
start_agent() { LD_PRELOAD=$agent start_target memory --size 6M --still 32M "$@"; }

# dump_on BASE ARGUMENT... : one more image beside that one; sets NEXT.
dump_on() {
  NEXT=$image-$((++images))
  done_by dump "$TARGET" --images-dir "$NEXT" --base "$1" --leave-running --json "${@:2}"
}
need_fault_points() {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
}
# read_whole IMAGE: a second reader, written from the document alone, finds it sound too.
read_whole() {
  done_by verify "$1"
  python3 -S "$BATS_TEST_DIRNAME/../image/read_image.py" "$1"
}

@test "the second image writes what has changed, and needs neither the first nor the third" {
  start_agent
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  assert_equal "$(json 'd["taken_bytes"], d["written_bytes"] == d["image_bytes"]')" "0 True"
  dump_on "$image" --trace "$BATS_TEST_TMPDIR/trace"
  local second=$NEXT
  # By digests that the GPU computes the rest stayed where it was.
  local moved
  moved=$(python3 -IS -c 'import json, sys
print(sum(e["args"]["bytes"] for e in json.load(open(sys.argv[1]))["traceEvents"]
          if e["name"] == "copy out" and "bytes" in e.get("args", {})))' "$BATS_TEST_TMPDIR/trace")
  ((moved > 0 && moved <= 8 << 20)) || { echo "$moved bytes went over the bus" >&2; return 1; }
  # Those 32 MiB; and of the GPU's memory no more than the rest was written.
  assert_equal "$(json 'd["taken_bytes"] >= 32 << 20')" True
  assert_equal "$(json 'd["image_bytes"] - d["written_bytes"] >= d["taken_bytes"]')" True
  capture stasis inspect "$second" --json # its numbers are taken, so its status is not 0
  local data
  data=$(json 'd["gpu_content"]["stored_bytes"] - d["gpu_content"]["taken_bytes"]')
  ((data <= 7 << 20)) || { echo "$data bytes of GPU memory were written" >&2; return 1; }
  capture stasis verify "$second"
  assert_contains "$out" "are deduplicated against an earlier image"
  target_goes_on
  dump_on "$second"
  assert_equal "$(json 'd["taken_bytes"] >= 32 << 20')" True
  # What changes is in files of its own by now: of the second image nothing else is kept.
  capture stasis inspect "$NEXT" --json
  assert_equal "$(json 'd["gpu_content"]["unused_bytes"] < 8 << 20')" True
  rm -r "$image" "$NEXT"
  read_whole "$second"
  kill -KILL "$TARGET"
  wait_until 60 number_is_free
  done_by restore --images-dir "$second" --detach
  target_goes_on
  restored_verifies
  nothing_left
}

@test "a driver that compiles no kernels: all goes over the bus, and no more is written" {
  start_agent
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  STASIS_SIM_FAULTS="module:error=221" dump_on "$image"
  assert_contains "$(json 'd["notes"]')" "digests are computed by the processors"
  assert_equal "$(json 'd["taken_bytes"] >= 32 << 20')" True
  target_goes_on
  read_whole "$NEXT"
  nothing_left
}

@test "a driver that breaks down over its kernels: another mover, all over the bus, no more written" {
  start_agent
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  STASIS_SIM_FAULTS=module:die dump_on "$image" --path direct
  assert_contains "$(json 'd["notes"]')" "digests are computed by the processors"
  assert_equal "$(json 'd["taken_bytes"] >= 32 << 20')" True
  target_goes_on
  read_whole "$NEXT"
  nothing_left
}

@test "stasis run takes the image before by itself; what --keep removes is not needed" {
  local dir=$BATS_TEST_TMPDIR/job log=$BATS_TEST_TMPDIR/run.log
  TARGET_STATUS=$BATS_TEST_TMPDIR/status
  job() {
    : >"$log"  # what the one before has told is not to be waited for
    (exec_on_gpu stasis run --images-dir "$dir" --keep 2 "$@" -- stasis-workload memory --size 6M --still 32M \
      --pause-ms 20 --status "$TARGET_STATUS") </dev/null >"$BATS_TEST_TMPDIR/out" 2>"$log" 3>&- &
    RUN=$!
    at_end_kill "$RUN"
  }
  told() { wait_until 60 grep -qE "$1" "$log" || { cat "$log" >&2; return 1; }; }
  job --every 600ms
  told "saved to $dir/000001 \([^,]*\) in"
  told "saved to $dir/000002 \([^,]*, [0-9.]+ [KM]iB of it written\) in"
  told "saved to $dir/000004 .*of it written.*removed 000002"
  kill -KILL "$RUN"
  wait "$RUN" || true
  wait_until 60 job_has_gone
  local newest
  newest=$(find "$dir" -maxdepth 1 -regex '.*/[0-9]+' | sort | tail -1)
  # One whose removal was killed, and the others: the job does without them.
  local image
  for image in "$dir"/0*; do [[ $image == "$newest" ]] || mv "$image" "$image.removing"; done
  rm -f "$dir"/0*.removing/gpu/data-*
  read_whole "$newest"
  job
  told "goes on from $newest"
  target_goes_on
  # And the next one takes from what was restored.
  kill -TERM "$RUN"
  told "of it written.*the job has ended"
  wait "$RUN" || true
  assert_equal "$(find "$dir" -name '*.removing')" ""
  job --whole
  told "goes on from"
  target_goes_on
  kill -USR1 "$RUN"
  told "saved to $dir/[0-9]+ \([^,]*\) in"
}

# Neither the job nor its supervisor nor its worker.
job_has_gone() { ! pgrep -x 'stasis|stasis-worker|stasis-workload' >/dev/null; }

@test "a damaged base: what was in that file is written anew, and the job runs on" {
  start_agent
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  local data
  # A place in what never changes: the largest file has some.
  data=$(ls -S "$image"/gpu/data-* | head -1)
  spoil_byte "$data" $(($(stat -c %s "$data") / 2))
  dump_on "$image"
  assert_contains "$(json 'd["notes"]')" "is damaged, and what is in that file is written anew: gpu/${data##*/}: chunk"
  target_goes_on
  read_whole "$NEXT"
  # And what says which is which.
  spoil_byte "$image/gpu/index" 200
  dump_on "$image"
  assert_contains "$(json 'd["notes"]')" "all GPU memory is written, and none of it deduplicated against $image: gpu/index"
  assert_equal "$(json 'd["taken_bytes"], d["written_bytes"] == d["image_bytes"]')" "0 True"
  dump_on "$BATS_TEST_TMPDIR/nowhere"
  assert_contains "$(json 'd["notes"]')" "none of it deduplicated against $BATS_TEST_TMPDIR/nowhere"
  target_goes_on
  target_verifies
}

@test "on another file system all is written, and it says so" {
  mkdir "$BATS_TEST_TMPDIR/disk"
  mount -t tmpfs tmpfs "$BATS_TEST_TMPDIR/disk" || skip "no file system can be mounted here"
  echo "$BATS_TEST_TMPDIR/disk" >>"$BATS_TEST_TMPDIR/mounts"
  start_agent
  done_by dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/disk/image" --leave-running
  dump_on "$BATS_TEST_TMPDIR/disk/image"
  assert_contains "$(json 'd["notes"]')" "nothing deduplicated: cannot make a hard link"
  assert_equal "$(json 'd["taken_bytes"]')" 0
  read_whole "$NEXT"
  target_verifies
}

@test "a disk with no room for one more whole image has room for what has changed" {
  mkdir "$BATS_TEST_TMPDIR/disk"
  mount -t tmpfs -o size=76m tmpfs "$BATS_TEST_TMPDIR/disk" || skip "no file system can be mounted here"
  echo "$BATS_TEST_TMPDIR/disk" >>"$BATS_TEST_TMPDIR/mounts"
  image=$BATS_TEST_TMPDIR/disk/image
  start_agent
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  refused 11 no-space dump "$TARGET" --images-dir "$image-whole" --leave-running
  dump_on "$image"
  assert_equal "$(json 'd["taken_bytes"] >= 32 << 20')" True
  read_whole "$NEXT"
  target_goes_on
  target_verifies
}

@test "an image in place of its own base" {
  start_agent
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  done_by dump "$TARGET" --images-dir "$image" --base "$image" --force --json
  assert_equal "$(json 'd["taken_bytes"] >= 32 << 20')" True
  wait_until 60 number_is_free
  read_whole "$image"
  restore_it
  target_goes_on
  restored_verifies
  nothing_left
}

# The matrix of faults has more of them.
# bats test_tags=long
@test "a dump that is killed while it deduplicates: the job comes back, and the base is as it was" {
  need_fault_points
  start_agent
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  local point
  for point in content.linked content.named direct.held; do
    STASIS_FAULT=$point:kill capture timeout 60 stasis dump "$TARGET" --images-dir "$image-2" --base "$image"
    assert_equal "$status" 137 "$point"
    rm -r "$image" # what is in the half image is all there is of the memory, then
    done_by recover --all
    target_goes_on
    [[ ! -e $image-2 ]]
    nothing_left
    done_by dump "$TARGET" --images-dir "$image" --leave-running
  done
  target_verifies
}
