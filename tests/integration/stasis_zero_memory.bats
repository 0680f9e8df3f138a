#!/usr/bin/env bats
# GPU memory that is zeros, as of a program that takes more than it uses: it costs neither the bus nor host memory, and is
# right afterwards. On the simulated driver, whose digests are computed as the GPU's are.

load helpers
load stasis_lib

setup() {
  setup_stasis
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
  export STASIS_ZEROS_FROM=1048576 STASIS_SIM_GPUS=2x512M
}
teardown() { end_stasis; }

start_sparse() { LD_PRELOAD=$agent start_target memory --size 4M --zeros "${ZEROS-96M}" "$@"; }
# Memory of the target's own, in MiB.
resident() { awk '/^RssAnon/ {print int($2 / 1024)}' "/proc/$TARGET/status"; }
# The phases of a report.
phases() { json '[p["name"] for p in d["phases"]]'; }

@test "what is zeros takes no host memory while a program is suspended, and is zeros again" {
  local i before
  start_sparse
  before=$(resident)
  for ((i = 0; i < $(times 2 3); ++i)); do
    done_by suspend "$TARGET" --json
    assert_equal "$(json 'd["path"]')" direct
    assert_contains "$(phases)" zeros
    assert_contains "$(phases)" "copy out"
    (($(resident) < before + 48)) || { echo "$(resident) MiB after $before"; return 1; }
    done_by resume "$TARGET"
    target_goes_on
  done
  target_verifies
}

@test "what seemed to be all the program has is made room for while it runs" {
  LD_PRELOAD=$agent start_target memory --size 64M --zeros 16M
  done_by suspend "$TARGET" --json
  assert_contains "$(phases)" "'zeros', 'prepare', 'close'"
  done_by resume "$TARGET"
  target_goes_on
  # It is remembered, also by what is restored.
  done_by suspend "$TARGET" --json
  [[ $(phases) != *zeros* ]]
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

# disk SIZE: the image is to be in a file system of its own.
disk() {
  mkdir "$BATS_TEST_TMPDIR/disk"
  mount -t tmpfs -o "size=$1" tmpfs "$BATS_TEST_TMPDIR/disk"
  echo "$BATS_TEST_TMPDIR/disk" >>"$BATS_TEST_TMPDIR/mounts"
  image=$BATS_TEST_TMPDIR/disk/image
}

# A process that the driver says has 640 MiB may have nothing but a context.
@test "a disk that has room for all but zeros has room for the image" {
  need_root "CRIU"
  export STASIS_SIM_GPUS=2x2G
  disk 160M
  LD_PRELOAD=$agent start_target memory --size 4M --zeros 800M
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  assert_equal "$(json 'd["path"]')" direct
  target_goes_on
  # By the driver they would take room.
  refused 11 no-space dump "$TARGET" --images-dir "$image.2" --path driver
  assert_contains "$err" "the image needs about" "is as it was"
  target_goes_on
  rm -r "$image"
  dump_it
  restore_it
  target_goes_on
  restored_verifies
  nothing_left
}

@test "a disk without room for what is no zeros is refused, and the program runs on" {
  need_root "CRIU"
  export STASIS_SIM_GPUS=2x2G
  disk 160M
  LD_PRELOAD=$agent start_target memory --size 4M --still 800M
  refused 11 no-space dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "the image needs about" "is as it was"
  target_goes_on
  no_image
  target_verifies
  # Without the agent it is not looked at.
  start_target memory --size 4M --zeros 800M
  refused 11 no-space dump "$TARGET" --images-dir "$image"
  target_goes_on
  target_verifies
  nothing_left
}

@test "a host that has room for all but zeros has room for a suspend" {
  local pid
  need_root "memory cgroups"
  ZEROS=192M start_sparse
  make_memory_cgroup $((112 << 20))
  echo "$TARGET" >"$CGROUP/cgroup.procs"
  capture stasis doctor "$TARGET"
  assert_contains "$out" "unless enough of it is zeros"
  done_by suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" direct
  done_by resume "$TARGET"
  target_goes_on
  # The driver would not leave them out.
  refused 11 out-of-host-memory suspend "$TARGET" --path driver
  target_goes_on
  target_verifies
  # And those of several processes.
  LD_PRELOAD=$agent start_tree --size 4M --zeros 96M
  for pid in "${CHILDREN[@]}"; do echo "$pid" >"$CGROUP/cgroup.procs"; done
  done_by suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" direct
  assert_contains "$(phases)" zeros
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
  # Where they are too few, it runs on.
  LD_PRELOAD=$agent start_target memory --size 160M --zeros 16M
  echo "$TARGET" >"$CGROUP/cgroup.procs"
  refused 11 out-of-host-memory suspend "$TARGET"
  assert_contains "$err" "does not fit under the memory limit" "is as it was"
  target_goes_on
  target_verifies
  rmdir "$CGROUP"
  nothing_left
}

@test "a program that is copied before the driver is asked leaves its zeros where they are, too" {
  start_sparse
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  local first=$TARGET first_status=$TARGET_STATUS
  start_sparse
  swapped_with "$first" "$first_status"
}

@test "an image of zeros is written without them, and restored by the GPU's own writing of them" {
  need_root "CRIU"
  start_sparse
  done_by dump "$TARGET" --images-dir "$image-1" --leave-running
  target_goes_on
  dump_it
  done_by inspect "$image" --json
  restore_it
  target_goes_on
  # Beside an earlier image, and as it was restored.
  done_by dump "$TARGET" --images-dir "$image-2" --base "$image-1"
  wait_until 60 number_is_free
  done_by restore --images-dir "$image-2" --detach
  target_goes_on
  restored_verifies
}

# bats test_tags=long
@test "a tool or a mover that is killed while zeros are looked for leaves a program that goes on" {
  local point
  start_sparse
  for point in direct.prepared direct.closed direct.emptied; do
    STASIS_FAULT=$point:kill capture stasis suspend "$TARGET"
    assert_equal "$status" 137 "$point"
    done_by recover --all
    target_goes_on
  done
  for point in direct.closed direct.kept; do
    STASIS_FAULT=$point:mover-dies done_by suspend "$TARGET"
    done_by resume "$TARGET"
    target_goes_on
  done
  target_verifies
}
