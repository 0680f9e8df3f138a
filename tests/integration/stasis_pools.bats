#!/usr/bin/env bats
# Stream-ordered memory: the agent serves pools from memory that can leave. The program's buffers live across rounds, are
# freed and allocated anew while others stay, and are verified word by word.

load helpers
load stasis_lib
load agent_lib

start_pool() { start_agent pool --pause-ms 5; }

@test "a program with stream-ordered memory is suspended past the driver again and again" {
  start_pool
  cycles "$(times 4 20)" direct
  done_by suspend "$TARGET" --json
  (($(json 'd["direct_bytes"]') >= 32 << 20))
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "a program with stream-ordered memory is dumped and restored, also beside an earlier image, and on another GPU" {
  need_root "CRIU"
  export STASIS_SIM_GPUS=2x512M
  start_pool
  done_by dump "$TARGET" --images-dir "$image-1" --leave-running
  target_goes_on
  dump_it --base "$image-1"
  done_by restore --images-dir "$image" --detach --device-map 0=1,1=0
  target_goes_on
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  restored_verifies
}

@test "a tool that is killed while a pool's memory is moved leaves a program that recover brings back" {
  start_pool
  STASIS_FAULT=direct.emptied:kill capture stasis suspend "$TARGET"
  assert_equal "$status" 137 "while it is given up"
  done_by recover --all
  target_goes_on
  done_by suspend "$TARGET"
  STASIS_FAULT=direct.filled:kill capture stasis resume "$TARGET"
  assert_equal "$status" 137 "while it is taken again"
  done_by recover --all
  target_goes_on
  target_verifies
}

@test "a program with stream-ordered memory gives way to another" {
  start_pool
  local first=$TARGET first_status=$TARGET_STATUS
  start_pool
  swapped_with "$first" "$first_status"
}
