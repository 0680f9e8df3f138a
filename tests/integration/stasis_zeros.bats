#!/usr/bin/env bats
# What the driver saves of zeros is not in the image; the program's own zeros are left alone.
# On the simulated driver, which marks some of what it saves of a context, and fails a restore that brings back other
# than that.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
  export STASIS_SIM_CONTEXT=24M
}
teardown() { end_stasis; }

# Bytes of the image's pages files.
pages_bytes() { cat "$1"/criu/pages-*.img | wc -c; }

@test "an image has nothing of the zeros that the driver saves, and the program goes on from it" {
  start_target idle
  done_by dump "$TARGET" --images-dir "$image" --json
  wait_until 60 number_is_free
  # 24 MiB, of which 12 of 1024 pages are marked, and what lies between some of them is too little.
  assert_equal "$(json 'd["dropped_zero_bytes"] > 23 << 20')" True
  (($(pages_bytes "$image") < 20 << 20))
  # Saved again as it was restored.
  restore_it
  target_goes_on
  done_by dump "$TARGET" --images-dir "$image.2" --json
  wait_until 60 number_is_free
  assert_equal "$(json 'd["dropped_zero_bytes"] > 23 << 20')" True
  (($(pages_bytes "$image.2") < 20 << 20))
  done_by restore --images-dir "$image.2" --detach
  target_goes_on
  restored_verifies
  nothing_left
}

@test "what runs on, or stays suspended, after a dump goes on without the zeros" {
  start_target memory --size 4M
  done_by dump "$TARGET" --images-dir "$image" --leave-running -v
  assert_contains "$err" "of zeros that the driver had saved are left out"
  (($(pages_bytes "$image") < 20 << 20))
  target_goes_on
  done_by dump "$TARGET" --images-dir "$image.2" --leave-suspended
  (($(pages_bytes "$image.2") < 20 << 20))
  in_state checkpointed
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
  nothing_left
}

@test "a suspended process keeps what the driver has saved, and so does its image" {
  start_target idle
  done_by suspend "$TARGET"
  done_by dump "$TARGET" --images-dir "$image" --json
  wait_until 60 number_is_free
  assert_equal "$(json 'd["dropped_zero_bytes"]')" 0
  (($(pages_bytes "$image") > 24 << 20))
  restore_it
  done_by resume "$TARGET"
  target_goes_on
  restored_verifies
}

@test "a program that was locked before, and one by the agent, and a group: all without the zeros" {
  start_target memory --size 4M
  cuda-checkpoint --action lock --pid "$TARGET"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  assert_equal "$(json 'd["dropped_zero_bytes"] > 23 << 20')" True
  in_state locked
  cuda-checkpoint --action unlock --pid "$TARGET"
  target_goes_on
  target_verifies

  LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so start_target memory --size 16M
  done_by dump "$TARGET" --images-dir "$image.direct" --leave-running --json
  assert_equal "$(json 'd["path"], d["dropped_zero_bytes"] > 23 << 20')" "direct True"
  target_goes_on
  target_verifies

  start_tree --size 4M
  done_by dump "$TARGET" --images-dir "$image.tree" --leave-running --json
  assert_equal "$(json 'd["dropped_zero_bytes"] > 46 << 20')" True
  target_goes_on
  target_verifies
}

@test "zeros of the program's own stay where they are" {
  # Beside a context, 32 MiB of zeros whose physical pages are looked at before and after.
  (exec_on_gpu setsid python3 "${BATS_TEST_DIRNAME}/own_zeros.py" "$BATS_TEST_TMPDIR/zeros") \
    </dev/null >"$BATS_TEST_TMPDIR/zeros.log" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 test -s "$BATS_TEST_TMPDIR/zeros"
  local before
  before=$(page_numbers)
  assert_equal "$(wc -l <<<"$before")" 8192
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  assert_equal "$(json 'd["dropped_zero_bytes"] > 23 << 20')" True
  (($(pages_bytes "$image") > 32 << 20))
  [[ $(page_numbers) == "$before" ]]
}

# The number of each physical page of the target's zeros.
page_numbers() {
  python3 -S - "$TARGET" "$(<"$BATS_TEST_TMPDIR/zeros")" <<'P'
import struct, sys
with open(f"/proc/{sys.argv[1]}/pagemap", "rb") as file:
    file.seek(int(sys.argv[2]) // 4096 * 8)
    for (entry,) in struct.iter_unpack("Q", file.read(8192 * 8)):
        if entry >> 63:
            print(entry & (1 << 55) - 1)
P
}
