#!/usr/bin/env bats
# Managed memory: the driver refuses a process that has any, and from then on for ever; the agent gives it up before. The
# program has pieces of many sizes, verifies all of them and the advice for them, and has a thread that counts in managed
# memory and never calls the driver.

load helpers
load stasis_lib

setup() {
  setup_stasis
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
}
teardown() { end_stasis; }

start_managed() { LD_PRELOAD=$agent start_target managed --pause-ms 5 "$@"; }
# Mappings of managed memory.
managed_pieces() { grep -c nvidia-uvm "/proc/$TARGET/maps" || true; }
# The driver was not asked: it would have answered 801, and then 999 for ever.
was_never_asked() {
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
}

@test "a program with managed memory is suspended and resumed again and again" {
  local i pieces
  start_managed
  pieces=$(managed_pieces)
  for ((i = 0; i < (${STASIS_ALL_TESTS:-0} ? 20 : 5); ++i)); do
    done_by suspend "$TARGET"
    assert_equal "$(managed_pieces)" 0 "pieces while it is suspended"
    done_by resume "$TARGET"
    target_goes_on
  done
  # One of them comes and goes.
  (($(managed_pieces) >= pieces - 1))
  target_verifies
}

@test "a program with managed memory is dumped and restored, also beside an earlier image" {
  need_root "CRIU"
  start_managed --size 64M
  done_by dump "$TARGET" --images-dir "$image-1" --leave-running
  target_goes_on
  dump_it --base "$image-1"
  restore_it
  target_goes_on
  was_never_asked
  restored_verifies
}

@test "a program with managed memory is dumped while it is suspended, and restored past CRIU's writing of it" {
  need_root "CRIU"
  start_managed --size 64M
  done_by suspend "$TARGET"
  dump_it --host-memory parallel
  done_by verify --images-dir "$image"
  restore_it
  done_by resume "$TARGET"
  target_goes_on
  restored_verifies
}

@test "a program with managed memory goes to another GPU, and gives way to another program" {
  local first
  export STASIS_SIM_GPUS=2x256M
  start_managed
  done_by suspend "$TARGET"
  done_by resume "$TARGET" --device-map 0=1,1=0
  target_goes_on
  first=$TARGET
  local first_status=$TARGET_STATUS
  start_managed
  done_by suspend "$TARGET"
  done_by swap "$first" "$TARGET"
  target_goes_on
  done_by resume "$first"
  target_verifies
  TARGET=$first TARGET_STATUS=$first_status target_goes_on
}

@test "processes of a tree that have managed memory are suspended and dumped" {
  need_root "CRIU"
  LD_PRELOAD=$agent start_tree --child-kind managed --pause-ms 5
  done_by suspend "$TARGET"
  in_state checkpointed "${CHILDREN[@]}"
  done_by resume "$TARGET"
  target_goes_on
  dump_it
  restore_it
  target_goes_on
  restored_verifies 3
}

@test "without the agent, and by the driver's path, it is refused before anything is touched" {
  start_managed
  refused 8 not-supported suspend "$TARGET" --path driver
  assert_contains "$err" "only its agent can give up"
  target_goes_on
  was_never_asked
  target_verifies
  start_target managed
  refused 8 not-supported suspend "$TARGET"
  assert_contains "$err" "start it with \`stasis run\`"
  target_goes_on
  target_verifies
}

@test "the doctor says what holds of it" {
  start_managed
  done_by doctor "$TARGET" --json
  assert_equal "$(json '[f["light"] for f in d["processes"] if f["id"] == "managed-memory"]')" "['green']" "$out"
  target_verifies
}

@test "threads stay still while an agent replaces memory, also when the tool that asked is killed in the middle" {
  # What was never touched is copied by the GPU, which takes its time.
  STASIS_SIM_FAULTS="transfer:delay=60ms" start_managed
  STASIS_FAULT=direct.replacing:kill capture stasis suspend "$TARGET"
  assert_equal "$status" 137
  done_by recover --all
  target_goes_on
  done_by suspend "$TARGET"
  STASIS_FAULT=direct.replacing:kill capture stasis resume "$TARGET"
  assert_equal "$status" 137
  done_by recover --all
  target_goes_on
  # Another verb waits for the agent as well.
  STASIS_FAULT=direct.replacing:kill capture stasis suspend "$TARGET"
  assert_equal "$status" 137
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "a program that forks all the time is suspended with its managed memory" {
  local forks
  start_managed
  forks=$BATS_TEST_TMPDIR/forks.py
  cat >"$forks" <<'END'
import ctypes, os, sys, time
driver, context, data = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert driver.cuInit(0) == 0 and driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
assert driver.cuMemAllocManaged(ctypes.byref(data), ctypes.c_size_t(4 << 20), 1) == 0
words = (ctypes.c_uint64 * 512).from_address(data.value)
print("ready", flush=True)
for number in range(1, 1 << 30):
    words[7] = number
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    if words[7] != number:
        print("wrong", flush=True)
        sys.exit(1)
END
  (LD_PRELOAD=$agent exec_on_gpu setsid python3 -IS "$forks") </dev/null >"$BATS_TEST_TMPDIR/forks.log" 2>&1 3>&- &
  local pid=$!
  at_end_kill "$pid"
  wait_until 60 grep -q ready "$BATS_TEST_TMPDIR/forks.log"
  for _ in 1 2 3 4 5; do
    done_by suspend "$pid"
    done_by resume "$pid"
  done
  lives "$pid"
  assert_equal "$(cat "$BATS_TEST_TMPDIR/forks.log")" ready
}

@test "a tool that is killed while managed memory is given up or taken again leaves a program that recover brings back" {
  local point
  start_managed
  for point in direct.detached direct.emptied direct.held checkpoint.after; do
    STASIS_FAULT=$point:kill capture stasis suspend "$TARGET"
    assert_equal "$status" 137 "$point"
    done_by recover --all
    target_goes_on
  done
  for point in direct.refill direct.filled direct.attach direct.attached; do
    done_by suspend "$TARGET"
    STASIS_FAULT=$point:kill capture stasis resume "$TARGET"
    assert_equal "$status" 137 "$point"
    done_by recover --all
    target_goes_on
  done
  for point in direct.closed direct.detached direct.emptied direct.held; do
    STASIS_FAULT=$point:error capture stasis suspend "$TARGET"
    ((status != 0))
    in_state running "$TARGET"
    target_goes_on
  done
  was_never_asked
  target_verifies
}
