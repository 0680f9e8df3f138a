#!/usr/bin/env bats
# The direct path: programs with the agent in them, on the simulated driver, and which path is taken.

load helpers
load stasis_lib
load agent_lib

# --- suspend and resume
@test "the direct path takes the memory of plain programs out and in, several times" {
  local kind times=3
  for kind in "memory --size 24M" "threads --size 16M" "poll --size 16M --own-us 20"; do
    # shellcheck disable=SC2086
    start_agent $kind
    cycles "$times" direct
    times=1
    target_verifies
    nothing_left
  done
}

@test "streams and contexts with little that can leave are right by either path" {
  local kind
  for kind in streams contexts; do
    start_agent "$kind"
    done_by suspend "$TARGET" --json
    gpu_is_free
    stands_still
    done_by resume "$TARGET" --json
    target_goes_on
    target_verifies
  done
}

@test "a tree under the agent goes as one" {
  LD_PRELOAD=$agent start_tree --size 12M
  cycles 1 direct
  target_verifies
}

@test "dumped, killed and restored, the agent answers again" {
  need_root "CRIU"
  start_agent memory --size 16M
  done_by dump "$TARGET" --images-dir "$image" --json
  went direct
  wait_until 60 number_is_free
  gpu_is_free
  restore_it
  target_goes_on
  # Sealed as before, or the agent would be passed over.
  cycles 1 direct
  restored_verifies
}

@test "dump --leave-running goes on in the same process, with the image whole" {
  need_root "CRIU"
  start_agent memory --size 16M
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  went direct
  target_goes_on
  cycles 1 direct
  kill -KILL "$TARGET"
  wait "$TARGET" || true
  restore_it
  target_goes_on
  restored_verifies
}

@test "ranks that wait for each other are suspended, and their memory past the driver" {
  local i
  start_agent collective --children 8 --size 4M --pause-ms 2
  for ((i = 0; i < $(times 2 4); ++i)); do
    done_by suspend "$TARGET" --json --timeout 60000
    went direct
    gpu_is_free
    done_by resume "$TARGET" --json
    went direct
    target_goes_on
  done
  target_verifies
}

@test "a rank that has next to nothing to move, or no agent, does not keep the others from being suspended" {
  local how prefix size phases later meeting=$BATS_TEST_TMPDIR/meeting
  for how in small bare; do
    TARGET_STATUS=$BATS_TEST_TMPDIR/$how.status
    TARGET_LOG=$BATS_TEST_TMPDIR/$how.log
    prefix=("env" "LD_PRELOAD=$agent") size=256K later=$beside
    if [[ $how == bare ]]; then prefix=(env) size=4M later=${beside/evict/mover evict}; fi
    rm -f "$meeting"
    truncate -s 64K "$meeting"
    (
      # shellcheck disable=SC2016 # for bash
      exec_on_gpu setsid bash -c 'meeting=$1 status=$2 agent=$3 size=$4
        shift 4
        job=(--meeting "$meeting" --ranks 2 --seed 5 --pause-ms 2)
        LD_PRELOAD=$agent stasis-workload rank "${job[@]}" --rank 0 --size 4M --status "$status" &
        "$@" stasis-workload rank "${job[@]}" --rank 1 --size "$size" --status "$status.1" &
        wait' bash "$meeting" "$TARGET_STATUS" "$agent" "$size" "${prefix[@]}"
    ) </dev/null >"$TARGET_LOG" 2>&1 3>&- &
    TARGET=$!
    echo "$TARGET" >>"$targets"
    wait_until 60 target_is_up
    mapfile -t CHILDREN < <(children_of "$TARGET")
    at_end_kill "${CHILDREN[@]}"
    for phases in "$beside" "$later" "$later"; do
      # The lock of who is held back is slow: meanwhile the other must not go on to wait for it.
      STASIS_SIM_FAULTS="lock:delay=100ms pid=${CHILDREN[0]}" done_by suspend "$TARGET" --timeout 10000 --json
      in_state checkpointed "${CHILDREN[@]}"
      # No context is made beside who has no gate, and would run if the driver gave up.
      assert_equal "$(phase_names)" "$phases"
      done_by resume "$TARGET"
      target_goes_on
    done
    kill "${CHILDREN[@]}"
  done
}

@test "a program whose threads wait for each other on their GPUs is suspended, by either path" {
  local path
  start_agent threads --threads 4 --size 16M --meet
  for path in direct driver direct driver; do
    done_by suspend "$TARGET" --json --timeout 60000 --path "$path"
    went "$path"
    done_by resume "$TARGET"
    target_goes_on
  done
  target_verifies
}

@test "ranks that wait for each other are dumped past the driver, and restored" {
  need_root "CRIU"
  start_agent collective --children 3 --size 4M --pause-ms 2
  done_by dump "$TARGET" --images-dir "$image" --json --timeout 60000
  went direct
  gpu_is_free
  restore_it
  target_goes_on
  done_by suspend "$TARGET" --json --timeout 60000
  went direct
  done_by resume "$TARGET"
  restored_verifies 4
}

@test "what a process writes into the page of the agent does not lead it to other memory" {
  start_agent memory --size 24M
  agent_page forge # and is gone: the agent gives back the buffer that it made, not what the page says
  sleep 0.5
  target_goes_on
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

# bats test_tags=long
@test "without the agent, or with it told to keep out, the driver does it" {
  STASIS_AGENT=off start_agent memory --size 8M
  cycles 1 driver
  [[ $(<"$TARGET_LOG") != *"stasis:"* ]]
  target_verifies
  CUDA_INJECTION64_PATH=/a/profiler.so start_agent memory --size 8M
  cycles 1 driver
  target_verifies
}

@test "what the direct path has suspended, cuda-checkpoint resumes" {
  start_agent memory
  done_by suspend "$TARGET" --json
  went direct
  capture cuda-checkpoint --toggle --pid "$TARGET"
  assert_equal "$status/$out/$err" "0//"
  target_goes_on
  done_by suspend "$TARGET" --json
  capture cuda-checkpoint --action restore --pid "$TARGET"
  assert_equal "$status" 0
  stands_still
  capture cuda-checkpoint --action unlock --pid "$TARGET"
  assert_equal "$status/$out/$err" "0//"
  target_goes_on
  done_by suspend "$TARGET" --json
  went direct
  done_by resume "$TARGET"
  target_goes_on
}

# --- Which path, and for how long

# path_in_ps: of TARGET.
path_in_ps() {
  done_by ps --json --timeout 30000
  json "next(p['path'] for p in d['processes'] if p['pid'] == $TARGET)"
}

@test "suspending what is suspended says by what its GPU memory went, and resuming what runs by nothing" {
  local path
  start_agent memory --size 16M
  for path in direct driver; do
    done_by suspend "$TARGET" --path "$path" --json
    assert_equal "$(json 'd["was_so"], d["path"]')" "False $path"
    done_by suspend "$TARGET" --json
    assert_equal "$(json 'd["was_so"], d["path"], d["direct_bytes"]')" "True $path 0"
    done_by resume "$TARGET" --json
    assert_equal "$(json 'd["path"]')" "$path"
    done_by resume "$TARGET" --json
    assert_equal "$(json 'd["was_so"], d["path"]')" "True None"
  done
  target_goes_on
}

@test "ps shows the path of who runs and of who is suspended" {
  start_agent memory --size 8M
  assert_equal "$(path_in_ps)" direct
  done_by ps --timeout 30000
  grep -q PATH <<<"$out"
  grep -q "^$TARGET .* running  *direct  " <<<"$out"
  done_by suspend "$TARGET"
  assert_equal "$(path_in_ps)" direct
  done_by resume "$TARGET"
  # As a suspend by the driver has left it, though the agent is there.
  done_by suspend "$TARGET" --path driver
  assert_equal "$(path_in_ps)" driver
  done_by resume "$TARGET"
  start_target memory --size 8M
  assert_equal "$(path_in_ps)" driver
}

@test "with an agent of another version the driver does it, and brings it back as well" {
  start_agent memory --size 8M
  agent_page version 1
  assert_equal "$(path_in_ps)" driver
  done_by suspend "$TARGET" --json
  went driver
  assert_contains "$(json 'd["notes"]')" "version 1"
  done_by resume "$TARGET" --json
  went driver
  target_goes_on
  # With its memory away only its own version can help.
  agent_page version 4
  done_by suspend "$TARGET" --json
  went direct
  agent_page version 1
  assert_equal "$(path_in_ps)" direct
  refused 8 not-supported resume "$TARGET"
  agent_page version 4
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

# bats test_tags=long
@test "--path driver leaves the agent alone, and resume and restore follow" {
  start_agent memory --size 16M
  done_by suspend "$TARGET" --path driver --json
  went driver
  agent_is 0
  gpu_is_free
  done_by resume "$TARGET" --json
  went driver
  target_goes_on
  cycles 1 direct
  if ((EUID == 0)); then
    dump_it --path driver --json
    went driver
    restore_it --json
    went driver
    target_goes_on
    cycles 1 direct
    restored_verifies
  fi
}

@test "--path direct takes no other, and says why" {
  start_agent memory --size 16M
  done_by suspend "$TARGET" --path direct --json
  went direct
  done_by resume "$TARGET"
  refused 2 usage suspend "$TARGET" --path fast
  STASIS_AGENT=off start_agent memory --size 8M
  refused 8 not-supported suspend "$TARGET" --path direct
  assert_contains "$err" "process $TARGET"
  in_state running
  capture stasis suspend "$TARGET" --path direct --json
  assert_equal "$(json '[(o["id"], o["pid"], o["override"]) for o in d["error"]["obstacles"]]')" "[('no-agent', $TARGET, None)]"
  need_root "CRIU, for the rest"
  refused 8 not-supported dump "$TARGET" --path direct --images-dir "$image"
  no_image
  # A mover that dies is no reason to take the driver's path.
  start_agent memory --size 16M
  STASIS_SIM_FAULTS=transfer:die capture timeout 60 stasis suspend "$TARGET" --path direct
  ((status != 0))
  in_state running
  target_goes_on
  STASIS_SIM_FAULTS=transfer:die done_by suspend "$TARGET" --json
  went driver
  done_by resume "$TARGET"
  target_verifies
  nothing_left
}

# --- Memory shared by legacy CUDA IPC
@test "a child opens its parent's memory by CUDA IPC, and the two are suspended together" {
  start_agent ipc
  target_goes_on
  cycles 2 direct
  # Its child alone would be lost, and so would what the two share.
  refused 8 not-supported suspend "$(pgrep -P "$TARGET")"
  target_goes_on
  pkill -KILL -P "$TARGET"
  wait "$TARGET" || true
}

@test "a program that finds the driver's functions by cuGetProcAddress, and with a default stream for each thread" {
  local option
  for option in --proc-address --per-thread-stream; do
    start_agent memory --size 24M "$option"
    cycles 2 direct
    target_verifies
  done
}

# bats test_tags=long
@test "memory in more pieces than files may be open" {
  start_agent torture --size 600M --pause-ms 100
  # Each piece is a descriptor on its way to the mover.
  (ulimit -Sn 60 && done_by suspend "$TARGET" --path direct)
  (ulimit -Sn 60 && done_by resume "$TARGET")
  target_goes_on
  # The limit cannot be raised: the driver moves it.
  (ulimit -n 110 && capture stasis suspend "$TARGET" && assert_equal "$status" 0 && assert_contains "$err" "110 open files are allowed")
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

# Of the private memory of no file, what is in huge pages, in KiB, without the buffer of the content.
huge_kib() {
  python3 -IS - "$1" "$2" <<'END'
import re, sys
sum, counts = 0, False
for line in open(f"/proc/{sys.argv[1]}/smaps"):
    head = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *$", line)
    if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
        counts = head and (int(head[2], 16) - int(head[1], 16)) < int(sys.argv[2])
    elif counts and line.startswith("AnonHugePages:"):
        sum += int(line.split()[1])
print(sum)
END
}

@test "what the driver saves of a context is in huge pages" {
  grep -qs '\[always\]\|\[madvise\]' /sys/kernel/mm/transparent_hugepage/enabled || skip "this kernel has none"
  start_agent memory --size 64M
  local before
  before=$(huge_kib "$TARGET" $((64 << 20)))
  done_by suspend "$TARGET" --path direct
  (($(huge_kib "$TARGET" $((64 << 20))) >= before + 2048))
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "after a suspend that was killed when the driver had the memory, the next one leaves it there" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  start_agent memory --size 8M
  for point in park.after checkpoint.before checkpoint.after; do
    STASIS_FAULT=$point:kill capture timeout 60 stasis suspend "$TARGET" --path driver
    assert_equal "$status" 137
    refused 7 busy suspend "$TARGET" --path direct
    assert_contains "$err" "make it run first: \`stasis recover $TARGET\`"
    STASIS_FAULT=$point:kill capture timeout 60 stasis suspend "$TARGET" --path driver
    # The agent is parked, and would be asked in vain.
    done_by suspend "$TARGET" --json -t 10s
    assert_equal "$(json 'd["path"]')" driver
    assert_contains "$(json 'd["notes"]')" "left with the driver by a tool that was killed"
    in_state checkpointed
    done_by resume "$TARGET"
    target_goes_on
  done
  target_verifies
}

@test "a program at its limit of memory is suspended, or refused, and lives on" {
  local limit
  for limit in --as=4096:unlimited --data=4096:unlimited; do
    start_agent memory --size 32M
    prlimit --pid "$TARGET" "$limit"
    capture stasis suspend "$TARGET" --timeout 20000
    ((status == 0)) || assert_contains "$err" "memory"
    prlimit --pid "$TARGET" --as=unlimited: --data=unlimited:
    done_by resume "$TARGET"
    target_goes_on
    cycles 1 direct
    target_verifies
  done
}

@test "of two programs with the agent that come back at once to the room of one, the other stays suspended" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  export STASIS_SIM_GPUS=1x256M
  local first tool
  start_agent memory --size 100M
  first=$TARGET
  done_by suspend "$first"
  start_agent memory --size 100M
  done_by suspend "$TARGET"
  start_hog 100M
  STASIS_FAULT=direct.refill:stop timeout -k 5 60 stasis resume "$first" >/dev/null 2>&1 3>&- &
  tool=$!
  wait_until 60 stopped_below "$tool"
  # The driver has brought the first back, and its agent has yet to take what was moved out.
  timeout -k 5 60 stasis resume "$TARGET" >"$BATS_TEST_TMPDIR/second" 2>&1 3>&- &
  wait_until 60 grep -q "another operation brings GPU memory back" "$BATS_TEST_TMPDIR/second"
  pkill -CONT -P "$tool"
  wait "$tool"
  status=0
  wait $! || status=$?
  assert_equal "$status" 11
  assert_contains "$(<"$BATS_TEST_TMPDIR/second")" "MiB is needed"
  in_state running "$first"
  in_state checkpointed "$TARGET"
  kill -KILL "$first"
  wait "$first" 2>/dev/null || true # its memory is free only when it has ended
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}
