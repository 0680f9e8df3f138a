#!/usr/bin/env bats
# Memory of the host that the direct path wants, and what happens where it or the GPU's is short.

load helpers
load stasis_lib
load agent_lib

# What is short of memory here is so with the ring that users have.
test_ring=64M

teardown() {
  end_stasis
  [ -z "${disk:-}" ] || rm -rf "$disk"
}

# A limit on memory counts files that are in memory, too: images and the simulated GPU's memory go to the disk.
on_disk() {
  disk=$(mktemp -d /var/tmp/stasis-test.XXXXXX)
  cp -r "$STASIS_SIM_DIR" "$disk/sim"
  STASIS_SIM_DIR=$disk/sim
  image=$disk/image
}

@test "no room for the kernels' local memory at resume: said so, and it goes on when there is room" {
  # A suspend sets a limit, and so does each try to resume: the tool's, another one if it has prefetched content, and
  # then the agent's own.
  STASIS_SIM_FAULTS="limit:oom@2; limit:oom@3" start_agent memory --size 16M
  done_by suspend "$TARGET"
  refused 11 out-of-gpu-memory resume "$TARGET"
  assert_contains "$err" "cuCtxSetLimit"
  target_goes_on
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  nothing_left
}

@test "no room on the GPU at resume: said so, and it goes on when there is room" {
  STASIS_SIM_GPUS=1x256M start_agent memory --size 64M
  export STASIS_SIM_GPUS=1x256M
  done_by suspend "$TARGET"
  start_hog 220M
  refused 11 out-of-gpu-memory resume "$TARGET"
  stands_still
  kill -KILL "$HOG"
  wait "$HOG" 2>/dev/null || true
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "host memory is made ready by all processors" {
  start_agent memory --size 64M
  done_by suspend "$TARGET" --trace "$BATS_TEST_TMPDIR/trace"
  local threads
  threads=$(python3 -S - "$BATS_TEST_TMPDIR/trace" <<'END'
import json, sys
events = json.load(open(sys.argv[1]))
events = events if isinstance(events, list) else events["traceEvents"]
print(len({event["tid"] for event in events if event["name"] == "touch host memory"}))
END
)
  assert_equal "$threads" "$(($(nproc) < 16 ? $(nproc) : 16))" "threads"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "host memory that is short is told before anything happens, and a dump past it needs none" {
  need_root "CRIU"
  start_agent memory --size 128M
  make_memory_cgroup $((64 << 20))
  echo "$TARGET" >"$CGROUP/cgroup.procs"
  refused 11 out-of-host-memory suspend "$TARGET"
  assert_contains "$err" "does not fit under the memory limit of $CGROUP (64.0 MiB"
  has_obstacle host-memory stasis suspend "$TARGET"
  in_state running
  agent_is 0
  target_goes_on
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  went direct
  target_goes_on
  limit_cgroup $((1 << 30))
  cycles 1 direct
  target_verifies
  nothing_left
}

@test "the driver's path has the host memory that a mover had" {
  need_root "CRIU"
  local fault used
  on_disk
  start_agent memory --size 128M
  cycles 1 direct
  make_memory_cgroup $((4 << 30))
  echo "$TARGET" >"$CGROUP/cgroup.procs"
  # shellcheck disable=SC2016
  local within=(bash -c 'echo $$ >"$1/cgroup.procs" && exec timeout 60 stasis "${@:2}"' bash "$CGROUP")
  used=$(cat "$CGROUP/memory.usage_in_bytes" 2>/dev/null || cat "$CGROUP/memory.current")
  limit_cgroup $((used + (256 << 20)))
  for fault in STASIS_SIM_FAULTS="context:error=2" STASIS_FAULT=direct.prepared:error; do
    capture env "$fault" "${within[@]}" dump "$TARGET" --ring 192M --images-dir "$image" --force --leave-running --json
    went driver
    target_goes_on
  done
}

@test "a tool that may not have the memory to copy through leaves it to the driver" {
  start_agent memory --size 128M
  # Without the ring, 60 MB do.
  local limited=(bash -c 'ulimit -v 280000 && exec timeout 60 stasis "$@"' bash)
  capture "${limited[@]}" suspend "$TARGET" --ring 512M --json
  went driver
  assert_contains "$(json 'd["notes"]')" "the driver's path is taken: cannot get 2" " MiB of memory to copy through"
  done_by resume "$TARGET"
  target_goes_on
  need_root "CRIU, for the rest"
  capture "${limited[@]}" dump "$TARGET" --ring 512M --images-dir "$image" --leave-running --json
  went driver
  assert_contains "$(json 'd["notes"]')" "cannot get 2" " MiB of memory to copy through"
  target_goes_on
  refused_by 8 not-supported "${limited[@]}" suspend "$TARGET" --ring 512M --path direct
  assert_contains "$err" "ulimit -v"
  # What the content itself needs is asked of the target.
  prlimit --pid "$TARGET" --as=$(($(awk '/^VmSize:/ { print $2 }' "/proc/$TARGET/status") * 1024)):
  refused_by 11 out-of-host-memory "${limited[@]}" suspend "$TARGET"
  prlimit --pid "$TARGET" --as=unlimited:
  target_goes_on
  target_verifies
  nothing_left
}

@test "under a limit without room for the memory to copy through the kernel kills no process" {
  need_root "CRIU"
  on_disk
  start_agent memory --size 64M
  make_memory_cgroup $((116 << 20))
  echo "$TARGET" >"$CGROUP/cgroup.procs"
  # shellcheck disable=SC2016
  local within=(bash -c 'echo $$ >"$1/cgroup.procs" && exec timeout 60 stasis "${@:2}"' bash "$CGROUP")
  capture "${within[@]}" suspend "$TARGET" --json
  went driver
  assert_contains "$(json 'd["notes"]')" "64.0 MiB of host memory to copy through (--ring), besides 68.0 MiB to come, do not fit under the memory limit of $CGROUP (116 MiB"
  capture "${within[@]}" resume "$TARGET" --json
  went driver
  refused_by 8 not-supported "${within[@]}" suspend "$TARGET" --path direct
  assert_contains "$err" "--ring 8M"
  capture "${within[@]}" suspend "$TARGET" --path direct --json
  assert_equal "$(json '[(o["id"], o["pid"]) for o in d["error"]["obstacles"]]')" "[('mover-memory', 0)]" "$out"
  target_goes_on
  capture "${within[@]}" suspend "$TARGET" --ring 8M --json
  went direct
  # The rings of two GPUs are more than what is left now.
  capture "${within[@]}" resume "$TARGET" --json
  assert_contains "$(json 'd["notes"]')" "the processes copy by themselves: 128 MiB of host memory to copy through (--ring) do not fit"
  target_goes_on
  limit_cgroup $((64 << 20))
  refused_by 11 out-of-host-memory "${within[@]}" dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "64.0 MiB of host memory to copy through (--ring) do not fit"
  capture "${within[@]}" dump "$TARGET" --images-dir "$image" --ring 8M --json
  went direct
  wait_until 60 number_is_free
  refused_by 11 out-of-host-memory "${within[@]}" restore --images-dir "$image" --detach
  assert_contains "$err" "to copy takes 68.0 MiB"
  number_is_free
  capture "${within[@]}" restore --images-dir "$image" --detach --ring 8M --json
  went direct
  target_goes_on
  restored_verifies
  nothing_left
}

@test "a program that may not have as much memory as its GPU holds is told so, and runs on" {
  local size
  start_agent memory --size 128M
  size=$(awk '/^VmSize:/ { print $2 * 1024 }' "/proc/$TARGET/status")
  prlimit --pid "$TARGET" --as=$((size + (32 << 20))):
  refused 11 out-of-host-memory suspend "$TARGET"
  assert_contains "$err" "ulimit -v"
  in_state running
  agent_is 0
  target_goes_on
  prlimit --pid "$TARGET" --as=unlimited:
  cycles 1 direct
  target_verifies
  nothing_left
}

@test "a program that gets no more memory once it is made ready is not ended by its agent" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  start_agent memory --size 16M
  STASIS_FAULT=direct.prepared:target-no-memory refused 11 out-of-host-memory suspend "$TARGET"
  in_state running
  agent_is 0
  target_goes_on
  prlimit --pid "$TARGET" --as=unlimited: --data=unlimited:
  cycles 1 direct
  target_verifies
  nothing_left
}

ring_is() { (($(ring_of "$1") == $2)); }

# rings SIZE OUT BACK: with --ring SIZE so many MiB are taken to suspend TARGET and to resume it.
rings() {
  local size=$1 tool ring
  STASIS_SIM_FAULTS=checkpoint:delay=4s stasis suspend "$TARGET" --path direct --ring "$size" >/dev/null 2>&1 3>&- &
  tool=$!
  stopped_at_work "$tool"
  ring=$(ring_of "$tool")
  kill -CONT "$tool"
  wait "$tool"
  assert_equal "$ring" $(($2 << 20)) "$size"
  STASIS_SIM_FAULTS=unlock:delay=4s stasis resume "$TARGET" --ring "$size" >/dev/null 2>&1 3>&- &
  tool=$!
  wait_until 60 ring_is "$tool" $(($3 << 20))
  wait "$tool"
  target_goes_on
}

@test "the memory to copy through is as large as --ring says at most, and all of the content passes" {
  need_root "CRIU"
  start_agent memory --size 256K
  rings 64M 8 12 # what the driver has of it counts then, too
  # To bring it back it does not know for which GPUs: for two, and enough for sixteen.
  start_agent memory --size 64M
  rings 8M 8 32
  rings 64M 64 128
  dump_it --path direct --ring 8M
  restore_it --ring 8M --json
  went direct
  target_goes_on
  restored_verifies
  nothing_left
}

@test "a ring of no use is refused before anything is touched" {
  start_agent memory --size 16M
  local size
  for size in 100K 4G 8 much -1; do
    refused 2 usage suspend "$TARGET" --ring "$size"
    assert_contains "$err" "'$size' is no ring to copy through; take 2M to 2G"
    refused 2 usage dump "$TARGET" --images-dir "$image" --ring "$size"
  done
  refused 2 usage run --images-dir "$image" --ring 100K -- true
  in_state running
  target_goes_on
  no_image
  nothing_left
}
