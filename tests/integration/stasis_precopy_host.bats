#!/usr/bin/env bats
# Host memory that is pre-copied while its program runs, on the simulated driver and real CRIU: what is in the image
# is what the program had when it stood still.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
}
teardown() { end_stasis; }

# start_writer MIB PART
start_writer() { start_script host_writer.py "$@"; }
runs_on() { script_goes_on; }
end_writer() {
  kill -KILL "$TARGET"
  wait_until 60 number_is_free
}
data_room() { du -s --block-size=1 "$image/host" | cut -f1; }

@test "of a program that writes little of its memory, little is copied while it stands still" {
  start_writer 96 0.1
  done_by dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on --json
  (($(json 'd["precopied_bytes"]') >= 64 << 20))
  assert_contains "$(json '[p["name"] for p in d["phases"]]')" "pre-copy"
  runs_on
  end_writer
  done_by verify --images-dir "$image"
  (($(data_room) <= 104 << 20))
  done_by restore --images-dir "$image" --detach
  runs_on
}

@test "of a program that writes all of it at full speed, all is as it was at one instant" {
  local i
  start_writer 80 1
  for i in 1 2; do
    done_by dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on --force
    runs_on
    end_writer
    # What was copied and has changed takes no room.
    (($(data_room) <= 84 << 20))
    done_by restore --images-dir "$image" --detach
    runs_on
  done
}

@test "that a program writes its memory as fast as it is pre-copied is told, and its dump succeeds" {
  # More than 64 MiB of it change while all is pre-copied.
  start_writer 192 1
  done_by dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on
  assert_contains "$err" "the job changes its host memory as fast as it is pre-copied (about "
  runs_on
}

@test "where the pre-copy takes too long, the dump goes on without the rest of it, and says so" {
  start_writer 96 0.1
  STASIS_PRECOPY_MS=1 done_by dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on --json
  assert_contains "$(json 'd["notes"]')" \
    "the host memory is not pre-copied after 0.001 s: the rest is copied while the job stands still"
  (($(json 'd["precopied_bytes"]') < 32 << 20))
  runs_on
  end_writer
  done_by verify --images-dir "$image"
  done_by restore --images-dir "$image" --detach
  runs_on
}

@test "beside an earlier image only what is in neither is written" {
  start_writer 96 0.05
  done_by dump "$TARGET" --images-dir "$image.1" --leave-running --pre-copy on
  done_by dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on --base "$image.1" --json
  (($(json 'd["written_bytes"]') < 48 << 20))
  end_writer
  done_by restore --images-dir "$image" --detach
  runs_on
}

@test "a dump that fails, or is killed, while it pre-copies host memory, leaves the program as it was, and no image" {
  start_writer 80 0.1
  STASIS_FAULT=host.precopied:error capture stasis dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on
  ((status != 0))
  assert_contains "$err" "as it was"
  runs_on
  STASIS_FAULT=host.precopied:kill capture stasis dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on
  assert_equal "$status" 137
  runs_on
  done_by recover --all
  [[ $(ls "$BATS_TEST_TMPDIR" | grep -c '^image') == 0 ]]
  # It ends while it is read.
  STASIS_FAULT=host.precopied:target-dies capture stasis dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on
  ((status != 0))
  [[ ! -e $image ]]
}

@test "what was pre-copied is not left in an image that has no use for it" {
  start_writer 32 0.1
  done_by dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on --json
  assert_equal "$(json 'd["precopied_bytes"]')" 0
  [[ ! -e $image/host ]]
  runs_on
  end_writer
  done_by restore --images-dir "$image" --detach
  runs_on
}

host_bytes() { python3 -S "$BATS_TEST_DIRNAME/../image/read_image.py" "$1" | python3 -IS -c 'import json, sys; d = json.load(sys.stdin)["host_content"]; print(d["bytes"] if d else 0)'; }

@test "pages that a program has never touched are not there either when it was saved, so that it is saved so again" {
  local i
  start_script host_sparse.py 96
  for i in 1 2 3; do
    done_by dump "$TARGET" --images-dir "$image" --leave-running --pre-copy on --force --host-memory parallel --json
    (($(host_bytes "$image") >= 80 << 20))
    (($(json 'd["precopied_bytes"]') >= 64 << 20))
    runs_on
  done
  end_writer
  done_by restore --images-dir "$image" --detach
  runs_on
}

@test "where the disk has room for the image, but not for what is copied in vain besides, nothing is pre-copied" {
  local small=$BATS_TEST_TMPDIR/small
  mkdir "$small"
  mount -t tmpfs -o size=270m tmpfs "$small"
  # 80 MiB, which could be pre-copied, and 120 that CRIU saves.
  start_script host_writer.py 80 0.1 120
  capture stasis dump "$TARGET" --images-dir "$small/image" --leave-running --pre-copy on --json
  umount -l "$small"
  assert_equal "$status" 0
  assert_equal "$(json 'd["precopied_bytes"]')" 0
  assert_contains "$(json 'd["notes"]')" "the host memory is copied while the job stands still: to pre-copy it takes "
  runs_on
}
