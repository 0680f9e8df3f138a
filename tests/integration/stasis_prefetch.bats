#!/usr/bin/env bats
# The content of GPU memory that is on the GPU before the program has memory there: brought by a restore while
# CRIU and the driver are still at work, or left there by a dump. On the simulated driver with the real CRIU.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
  trace=$BATS_TEST_TMPDIR/trace
}
teardown() { end_stasis; }

# start_agent KIND [ARGUMENT...]: as start_target, with the agent in it.
start_agent() { LD_PRELOAD=$agent start_target "$@"; }

# Time for it: the driver's restore takes so long. The verb that is traced is given behind it.
with_time() { STASIS_SIM_FAULTS="restore:delay=${delay:-1s}" "$@" --trace "$trace"; }

# prefetched WHAT: of the MiB that the verb of the trace prefetched. came_in: of those that came in their turn.
prefetched() { came "prefetch" "$1"; }
came_in() { came "copy in" "$1"; }
came() {
  python3 -IS -c '
import json, sys
events = [e for e in json.load(open(sys.argv[1]))["traceEvents"] if e.get("name") == sys.argv[2]]
mib = sum(e["args"].get("bytes", 0) for e in events) / (1 << 20)
sys.exit(0 if eval(sys.argv[3]) else f"{sys.argv[2]}: {mib} MiB")' "$trace" "$1" "$2"
}

@test "a restore brings it while CRIU makes the processes; of a job that goes on while it is dumped it stays there" {
  start_agent memory --size 64M
  local i
  for i in 1 2; do
    done_by dump "$TARGET" --images-dir "$image.$i" --leave-running --trace "$trace"
    came_in "mib == 0"
    target_goes_on
  done
  dump_it --compress lz4
  with_time restore_it
  prefetched "mib >= 64"
  target_goes_on
  restored_verifies
  gpu_is_free
  nothing_left
}

# bats test_tags=long
@test "each GPU gets its own, also another one than before; a tree goes as one" {
  export STASIS_SIM_GPUS=2x8G
  start_agent contexts
  dump_it
  with_time restore_it --device-map "$(swapped_gpus)"
  prefetched "mib > 0"
  target_goes_on
  restored_verifies
  rm -rf "$image"
  LD_PRELOAD=$agent start_tree --size 12M
  dump_it
  with_time restore_it
  prefetched "mib > 0"
  target_goes_on
  restored_verifies 3
}
swapped_gpus() {
  stasis-sim-smi --json | python3 -IS -c 'import json, sys
a, b = (gpu["uuid"] for gpu in json.load(sys.stdin)["gpus"])
print(f"{a}={b},{b}={a}")'
}

# bats test_tags=long
@test "where the GPU has no room for both, it waits for its place" {
  export STASIS_SIM_GPUS=1x1G
  start_agent memory --size 512M
  dump_it
  with_time restore_it
  prefetched "mib == 0"
  target_goes_on
  done_by dump "$TARGET" --images-dir "$image.2" --leave-running --trace "$trace"
  came_in "mib > 64"
  target_goes_on
  restored_verifies
}

# bats test_tags=long
@test "a program takes the GPU's last memory meanwhile: prefetched content makes room" {
  export STASIS_SIM_GPUS=1x2G
  start_agent memory --size 256M
  dump_it
  restore_slowly "restore:delay=10s" "$image"
  wait_until 60 all_is_prefetched
  # All but what is prefetched and less than half of what is needed.
  start_hog $((2048 - 256 - 100))M
  has_ended "$RESTORE"
  prefetched "mib >= 256"
  target_goes_on
  kill -KILL "$HOG"
  restored_verifies
}
all_is_prefetched() { (($(gpu_used) >= 256 << 20)); }

@test "where the mover dies meanwhile, the agent copies by itself" {
  start_agent memory --size 64M
  dump_it
  STASIS_SIM_FAULTS="restore:delay=1s; transfer:die@3" \
    capture timeout 60 stasis restore --images-dir "$image" --detach
  assert_equal "$status" 0
  assert_contains "$err" "copy by themselves"
  target_goes_on
  restored_verifies
  gpu_is_free
}

@test "prefetched content that proves wrong is told when it is needed" {
  start_agent memory --size 64M
  dump_it
  spoil_byte "$(compgen -G "$image/gpu/data-*" | head -1)" 5000
  STASIS_SIM_FAULTS="restore:delay=1s" refused 10 image-corrupt restore --images-dir "$image" --detach
  assert_contains "$err" "gpu/data-"
  number_is_free
  gpu_is_free
}

# bats test_tags=long
@test "told to stop, or killed, in the midst of it: no process is left halfway, and the image is whole" {
  start_agent memory --size 64M
  dump_it
  local signal
  for signal in TERM KILL; do
    restore_slowly "restore:delay=6s" "$image"
    wait_until 60 some_is_used
    kill -"$signal" "$RESTORE"
    wait "$RESTORE" || true
    done_by recover --all
    # Killed after CRIU was done, it is recovered; and the image is there in any case.
    if ! number_is_free; then
      [[ $signal == KILL ]]
      target_goes_on
      kill -KILL "$TARGET"
    fi
    wait_until 60 number_is_free
    gpu_is_free
  done
  restore_it
  target_goes_on
  restored_verifies
}
some_is_used() { (($(gpu_used) > 0)); }

# bats test_tags=long
@test "what has stayed on the GPU makes room where a dump that failed is undone" {
  export STASIS_SIM_GPUS=1x2G
  start_agent memory --size 256M
  STASIS_FAULT=criu.post-dump:error STASIS_SIM_FAULTS="restore:delay=10s" \
    stasis dump "$TARGET" --images-dir "$image" --leave-running >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  local dump=$!
  at_end_kill "$dump"
  # The driver restores the process, and the agent has its memory to ask for yet.
  wait_until 60 works_on_it "$dump"
  wait_until 60 all_is_prefetched
  start_hog $((2048 - 256 - 100))M
  if wait "$dump"; then return 1; fi
  grep -q "rolled back: every process is as it was" "$BATS_TEST_TMPDIR/out" || { cat "$BATS_TEST_TMPDIR/out" >&2; return 1; }
  target_goes_on
  kill -KILL "$HOG"
  target_verifies
}

# Two programs on one GPU that has room for both but for little more: A, of which there is an image, and B, which
# the driver moves and which is suspended.
two_on_one_gpu() {
  export STASIS_SIM_GPUS=1x1G
  start_agent memory --size 128M
  A=$TARGET
  A_STATUS=$TARGET_STATUS
  dump_it
  start_target memory --size 780M
  B=$TARGET
  done_by suspend "$B"
}
# restore_slowly FAULTS DIR: in the background, with its output in DIR.out. Sets RESTORE.
restore_slowly() {
  STASIS_SIM_FAULTS=$1 stasis restore --images-dir "$2" --detach --trace "$trace" >"$2.out" 2>&1 3>&- &
  RESTORE=$!
  at_end_kill "$RESTORE"
}
has_ended() {
  wait "$1" && return
  cat "$BATS_TEST_TMPDIR"/*.out >&2
  return 1
}
both_go_on() {
  TARGET_STATUS=$A_STATUS target_goes_on
  target_goes_on
}
uses_mib() { (($(gpu_used) >= $1 << 20)); }

@test "a program that comes back beside it finds its room: prefetched content is let go of, and not held twice" {
  two_on_one_gpu
  # While the driver restores the one, the other has all of its memory twice, if it is prefetched: from
  # the 65th copy on, which takes that long.
  STASIS_SIM_FAULTS="restore:delay=4s" stasis resume "$B" >"$image.out" 2>&1 3>&- &
  local b=$!
  at_end_kill "$b"
  wait_until 60 works_on_it "$b"
  restore_slowly "restore:delay=1s; transfer:delay=4s@65" "$image"
  has_ended "$RESTORE"
  has_ended "$b"
  both_go_on
}

# bats test_tags=long
@test "a program that comes back while another has its memory twice waits for that" {
  two_on_one_gpu
  restore_slowly "restore:delay=1s; transfer:delay=3s@65" "$image"
  wait_until 60 uses_mib 256
  done_by resume "$B"
  has_ended "$RESTORE"
  both_go_on
}

# bats test_tags=long
@test "of two that come back at the same time one has its content prefetched" {
  export STASIS_SIM_GPUS=1x4G
  start_agent memory --size 128M
  A_STATUS=$TARGET_STATUS
  dump_it
  local first=$image
  image=$image.2
  start_agent memory --size 128M
  dump_it
  restore_slowly "restore:delay=8s" "$first"
  local a=$RESTORE
  wait_until 60 uses_mib 128
  trace=$trace.2 restore_slowly "restore:delay=1s" "$image"
  has_ended "$a"
  has_ended "$RESTORE"
  both_go_on
  prefetched "mib >= 128"
  trace=$trace.2 prefetched "mib == 0"
}

# Two programs in a tree: one that the driver moves, one whose content stays where it is. Sets TARGET, and pair for
# their files.
start_pair() {
  pair=$BATS_TEST_TMPDIR/pair
  (exec_on_gpu setsid bash -c "stasis-workload memory --size 384M --status $pair.driver &
    LD_PRELOAD=$agent stasis-workload memory --size 256M --status $pair.agent & echo \$! >$pair.number; wait") </dev/null >"$pair" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 both_are_up
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
}

# The driver's one at once, the other when the hog makes room.
fails_and_both_go_on() {
  if wait "$1"; then return 1; fi
  TARGET_STATUS=$pair.driver target_goes_on
  kill -KILL "$HOG"
  wait "$HOG" || true
  done_by recover "$TARGET"
  TARGET_STATUS=$pair.agent target_goes_on
}

# bats test_tags=long
@test "the driver fails at one when others have taken what is free: the other has its room" {
  export STASIS_SIM_GPUS=1x2G
  start_pair
  local number dump
  number=$(<"$pair.number")
  STASIS_SIM_FAULTS="checkpoint:delay=12s pid=$number; checkpoint:error=2 pid=$number" \
    stasis dump "$TARGET" --images-dir "$image" --leave-running >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  dump=$!
  at_end_kill "$dump"
  wait_until 60 works_on_it "$dump"
  wait_until 60 the_drivers_has_left
  start_hog $((2048 - 384 - 100))M
  fails_and_both_go_on "$dump"
}

# bats test_tags=long
@test "others take what is free during a dump: what has stayed is let go of before the driver wants it" {
  export STASIS_SIM_GPUS=1x2G
  start_pair
  # CRIU is stopped when it has started, and waits while the driver takes its time.
  STASIS_CRIU=$(criu_by_number) STASIS_SIM_FAULTS="checkpoint:delay=8s" \
    stasis dump "$TARGET" --images-dir "$image" --leave-running >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  local dump=$!
  at_end_kill "$dump"
  wait_until 60 works_on_it "$dump"
  kill -STOP "$(<"$BATS_TEST_TMPDIR/criu-number")"
  at_end_kill "$(<"$BATS_TEST_TMPDIR/criu-number")"
  wait_until 60 the_drivers_has_left
  # Room for the driver's part, but not with what has stayed, nor with the other part.
  start_hog $((2048 - 384 - 100))M
  kill -CONT "$(<"$BATS_TEST_TMPDIR/criu-number")"
  fails_and_both_go_on "$dump"
}
the_drivers_has_left() { (($(gpu_used) >= 256 << 20 && $(gpu_used) < 384 << 20)); }
both_are_up() { TARGET_STATUS=$BATS_TEST_TMPDIR/pair.driver target_is_up && TARGET_STATUS=$BATS_TEST_TMPDIR/pair.agent target_is_up; }
