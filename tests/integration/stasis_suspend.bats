#!/usr/bin/env bats
# stasis ps, suspend, resume: real processes on the simulated driver.
# Long because ps, suspend and resume are tried on the same targets, in sections.

load helpers
load stasis_lib

setup() { setup_stasis; }
teardown() { end_stasis; }

# --- ps

# ps sees the whole machine, other tests' processes included.
@test "ps without any CUDA process prints the heading alone" {
  need_root "a PID namespace of its own"
  capture unshare --pid --fork --mount-proc stasis ps
  assert_equal "$status" 0
  assert_equal "$(wc -l <<<"${out%$'\n'}")" 1
  assert_contains "$out" "GPU MEMORY"
}

@test "ps lists each CUDA process with its state and GPU memory" {
  start_target memory --size 32M
  local first=$TARGET
  start_target memory --size 8M
  done_by suspend "$first"
  done_by ps --timeout 30000
  # What a suspended one gets back is in parentheses.
  [[ $out =~ $first\ +[a-z]+\ +suspended\ +driver\ +0\ +\([0-9.]+\ MiB\)\ +[0-9]+\ s(\ +-)+\ +stasis-workload ]]
  [[ $out =~ $TARGET\ +[a-z]+\ +running\ +driver\ +0\ +[0-9.]+\ MiB\ +[0-9]+\ s(\ +-)+\ +stasis-workload ]]
  done_by ps --json --timeout 30000
  assert_equal "$(json "[p['state'] for p in d['processes'] if p['pid'] == $first]")" "['checkpointed']"
  assert_equal "$(json "[p['gpu_bytes'] for p in d['processes'] if p['pid'] == $TARGET][0] >= 8 << 20")" True
  assert_equal "$(json "[(p['gpu_bytes'], p['gpu_memory'][0]['bytes'] >= 32 << 20, p['path']) for p in d['processes'] if p['pid'] == $first]")" "[(0, True, 'driver')]"
  assert_equal "$(json "all('$(date -u -d '-10 min' +%FT%TZ)' <= p['since'] <= '$(date -u +%FT%TZ)' for p in d['processes'] if p['pid'] in ($first, $TARGET))")" True
  done_by resume "$first"
}

@test "ps --watch lists again and again, into a file without screen commands" {
  start_target memory --size 2M
  local said=$BATS_TEST_TMPDIR/said
  stasis ps --watch 0.3 >"$said" 2>/dev/null 3>&- &
  at_end_kill $!
  has_lines() { (($(grep -c "$2" "$said") >= $1)); }
  wait_until 60 has_lines 3 '^PID '
  wait_until 60 has_lines 2 running
  ! grep -q $'\e' "$said" || return 1
  kill $!
  local wrong
  for wrong in 0 nan x 1e9 50ms 48h; do
    refused 2 usage ps --watch "$wrong"
  done
  # One object a line.
  stasis ps --watch 500ms --json >"$said" 2>/dev/null 3>&- &
  at_end_kill $!
  wait_until 60 has_lines 3 '}$'
  kill $!
  python3 -IS -c 'import json, sys; assert all([p["gpus"] for p in json.loads(line)["processes"] if p["pid"] == int(sys.argv[2])] == [[0]] for line in open(sys.argv[1]))' "$said" "$TARGET"
}

@test "ps --watch asks one that does not answer once, not at each look" {
  start_target memory --size 2M
  STASIS_SIM_FAULTS=checkpoint:delay=60s stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 stands_in_ps busy
  stasis ps --watch 0.1 -t 100 >"$BATS_TEST_TMPDIR/said" 2>/dev/null 3>&- &
  local watch=$!
  at_end_kill "$watch"
  wait_until 60 looked_often
  # The main thread and the one that waits for the answer; a few that end may be seen besides.
  few_threads() { (($(ls "/proc/$watch/task" | wc -l) <= 3)); }
  wait_until 60 few_threads
  kill "$watch"
}
looked_often() { (($(grep -c " busy " "$BATS_TEST_TMPDIR/said") >= 6)); }

# bats test_tags=long
@test "ps --watch shows no answer of an earlier look" {
  start_target memory --size 2M
  STASIS_SIM_FAULTS=checkpoint:delay=8s stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local suspend=$!
  wait_until 60 stands_in_ps busy
  stasis ps --watch 20 -t 300 >"$BATS_TEST_TMPDIR/said" 2>/dev/null 3>&- &
  at_end_kill $!
  wait_until 60 looked 1
  wait "$suspend"
  done_by resume "$TARGET"
  wait_until 60 looked 2
  kill $!
  assert_equal "$(states_seen)" "busy running "
}

states_seen() { awk -v pid="$TARGET" '$1 == pid { print $3 }' "$BATS_TEST_TMPDIR/said" | tr '\n' ' '; }
looked() { (($(states_seen | wc -w) == $1)); }

@test "ps names the operation under way, and the one that was cut short" {
  start_target memory --size 8M
  STASIS_SIM_FAULTS="checkpoint:delay=20s" stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$!
  at_end_kill "$tool"
  # Until its checkpoint has begun it answers, as running or locked.
  wait_until 60 stands_in_ps busy
  stands_in_ps "stasis suspend ($tool)"
  kill -KILL "$tool"
  wait_until 60 stands_in_ps "left behind by stasis suspend"
  done_by recover "$TARGET"
  done_by ps --timeout 30000
  [[ $out != *"left behind"* ]]
  target_goes_on
  target_verifies
}

stands_in_ps() { stasis ps 2>/dev/null | grep -qF "$1"; }

@test "ps does not let a program's name command the terminal" {
  local evil=$BATS_TEST_TMPDIR/$'\e[31mred\xff'
  cp "$(command -v stasis-workload)" "$evil"
  (exec_on_gpu setsid "$evil" idle --status "$BATS_TEST_TMPDIR/evil") </dev/null >/dev/null 2>&1 3>&- &
  local evil_pid=$!
  echo "$evil_pid" >>"$targets"
  TARGET_STATUS=$BATS_TEST_TMPDIR/evil wait_until 60 target_is_up # which uses CUDA by then
  done_by ps --timeout 30000
  [[ $out != *$'\e'* ]]
  done_by ps --json --timeout 30000
  assert_equal "$(json "len([p for p in d['processes'] if p['pid'] == $evil_pid])")" 1
  done_by suspend "$evil_pid" --json
  assert_equal "$(json 'd["ok"]')" True
  done_by resume "$evil_pid" --json
}

# --- suspend and resume

@test "suspend frees the GPU memory and resume brings it back, unharmed" {
  start_target memory --size 64M
  done_by suspend "$TARGET"
  assert_contains "$out" "suspended process $TARGET"
  assert_contains "$out" "of GPU memory are free again"
  in_state checkpointed
  gpu_is_free
  nothing_left
  done_by resume "$TARGET"
  in_state running
  (($(gpu_used) >= 64 << 20))
  target_goes_on
  target_verifies
  nothing_left
}

# bats test_tags=long
@test "100 cycles of suspend and resume lose nothing" {
  start_target memory --size 4M --pause-ms 1
  for ((i = 0; i < 100; ++i)); do
    stasis suspend -q "$TARGET" >/dev/null
    stasis resume -q "$TARGET" >/dev/null
  done
  target_goes_on
  target_verifies
  nothing_left
}

# bats test_tags=long
@test "threads that ask the driver all the time stand still while the GPU is away, 50 times" {
  start_target poll --size 4M --pause-ms 1 --own-us 20
  for ((i = 0; i < 50; ++i)); do
    stasis suspend -q "$TARGET" >/dev/null
    stasis resume -q "$TARGET" >/dev/null
  done
  target_goes_on
  target_verifies
  nothing_left
}

@test "a suspended process makes no step, and takes its signals when it goes on" {
  start_target poll --size 4M --pause-ms 1 --own-us 20
  done_by suspend "$TARGET"
  stands_still
  before=$(target_round)
  kill -TERM "$TARGET"
  sleep 0.3
  assert_equal "$(target_round)" "$before" "rounds"
  lives
  done_by resume "$TARGET"
  wait_until 60 number_is_free
}

@test "what stasis has suspended goes on when another tool unlocks it, or recover finds it" {
  start_target poll --size 4M --pause-ms 1 --own-us 20
  done_by suspend "$TARGET"
  cuda-checkpoint --toggle --pid "$TARGET"
  target_goes_on
  done_by suspend "$TARGET"
  # As NVIDIA's utility would: it knows nothing of threads that are kept still.
  stasis-raw-driver --pid "$TARGET" restore unlock
  in_state running
  stands_still
  done_by recover "$TARGET"
  target_goes_on
  target_verifies
}

@test "a tree of two CUDA processes and one without is suspended and resumed as one" {
  start_tree --size 8M
  done_by suspend "$TARGET"
  assert_contains "$out" "(3 processes, 2 with CUDA)"
  in_state checkpointed "${CHILDREN[@]}"
  gpu_is_free
  done_by resume "$TARGET"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  target_verifies
}

@test "a job that has stasis suspend it leaves that one out" {
  local script=$BATS_TEST_TMPDIR/job status=$BATS_TEST_TMPDIR/job.status
  cat >"$script" <<END
stasis run -- stasis-workload memory --size 8M --status $status &
until grep -qs '^round 0*[1-9]' $status; do sleep 0.1; done
unset LD_LIBRARY_PATH
for verb in suspend resume; do timeout 60 stasis \$verb \$\$; done
kill %1
END
  run exec_on_gpu setsid bash "$script" </dev/null
  assert_contains "$output" ", 1 with CUDA) in"
  assert_contains "$output" "resumed process"
  [[ $output != *"2 with CUDA"* ]]
}

@test "suspending what is suspended, and resuming what runs, is done already" {
  start_target idle
  done_by resume "$TARGET"
  in_state running
  done_by suspend "$TARGET"
  done_by suspend "$TARGET"
  in_state checkpointed
  done_by resume "$TARGET"
  target_goes_on
}

@test "suspend gives up after --timeout and leaves a busy process running" {
  start_target spin --busy-ms 10000 --pause-ms 0
  refused 7 timeout suspend "$TARGET" --timeout 300ms
  assert_contains "$err" "300 ms"
  in_state running
  nothing_left
  done_by suspend "$TARGET" --timeout 60000
  done_by resume "$TARGET"
  target_verifies
}

@test "a number without a unit is milliseconds for --timeout" {
  start_target spin --busy-ms 20000 --pause-ms 0
  local before=${EPOCHREALTIME/./}
  refused 7 timeout suspend "$TARGET" --timeout 300
  # Were it seconds, it would wait for the work's end.
  ((${EPOCHREALTIME/./} - before < 2000000)) || { echo "it gave up after $((${EPOCHREALTIME/./} - before)) us" >&2; return 1; }
  assert_contains "$err" "300 ms"
  in_state running
}

@test "a tree in which one is never quiet runs on as a whole" {
  start_tree --child-kind idle
  STASIS_SIM_FAULTS="lock:timeout pid=${CHILDREN[1]}" refused 7 timeout suspend "$TARGET" -t 700
  in_state running "${CHILDREN[@]}"
  target_goes_on
  target_verifies
}

@test "managed memory is refused, and the process runs on" {
  start_target managed
  refused 8 not-supported suspend "$TARGET"
  assert_contains "$err" "managed memory"
  in_state running
  target_goes_on
  target_verifies
  nothing_left
}

@test "what does not fit under the memory limit of its container is refused, and runs on" {
  start_target memory --size 128M
  make_memory_cgroup $((64 << 20))
  echo "$TARGET" >"$CGROUP/cgroup.procs"
  refused 11 out-of-host-memory suspend "$TARGET"
  assert_contains "$err" "does not fit under the memory limit of $CGROUP (64.0 MiB"
  in_state running
  target_goes_on
  limit_cgroup $((1 << 30))
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
  rmdir "$CGROUP"
  nothing_left
}

@test "a checkpoint that fails in one process brings all of the tree back" {
  start_tree --size 4M
  STASIS_SIM_FAULTS="checkpoint:error=801 pid=${CHILDREN[0]}" refused 8 not-supported suspend "$TARGET"
  assert_contains "$err" "rolled back"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  target_verifies
}

@test "a process that dies during the checkpoint is named, and the others run on" {
  start_tree --size 4M
  local dead=${CHILDREN[0]}
  STASIS_SIM_FAULTS="checkpoint:die pid=$dead" refused 3 process-gone suspend "$TARGET"
  assert_contains "$err" "process $dead"
  in_state running "${CHILDREN[1]}"
  nothing_left
}

@test "a process that the driver has given up is told from one in the wrong state" {
  start_target idle
  STASIS_SIM_FAULTS="checkpoint:failed" capture stasis suspend "$TARGET"
  ((status == 12 || status == 6))
  assert_contains "$err" "process $TARGET"
  refused 6 failed-state suspend "$TARGET"
}

@test "what another tool has locked stays locked when a suspend fails" {
  start_target managed
  cuda-checkpoint --action lock --pid "$TARGET"
  refused 8 not-supported suspend "$TARGET"
  in_state locked
  cuda-checkpoint --action unlock --pid "$TARGET"
  target_verifies
}

@test "resume without enough GPU memory leaves the process suspended, and it can be resumed later" {
  export STASIS_SIM_GPUS=1x256M
  start_target memory --size 100M
  done_by suspend "$TARGET"
  start_hog 200M
  refused 11 out-of-gpu-memory resume "$TARGET"
  assert_contains "$err" "MiB is needed"
  in_state checkpointed
  nothing_left
  kill -KILL "$HOG"
  wait_until 60 gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

# comes_back_slowly PID: its resume is under way, as BACK, and has asked the driver, which takes its time.
comes_back_slowly() {
  STASIS_SIM_FAULTS="restore:delay=1500ms" timeout -k 5 60 stasis resume "$1" >/dev/null 2>&1 3>&- &
  BACK=$!
  wait_until 60 compgen -G "$STASIS_STATE_DIR/GPU-*.lock" >/dev/null
}

# The driver gives one up that it finds no room for.
@test "of two processes that come back at once to the room of one, the driver is asked for one" {
  export STASIS_SIM_GPUS=1x120M
  local first way
  start_target memory --size 64M
  first=$TARGET
  done_by suspend "$first"
  start_target memory --size 64M
  done_by suspend "$TARGET"
  for way in "stasis resume" "cuda-checkpoint --action restore --pid" "cuda-checkpoint --toggle --pid"; do
    rm -f "$STASIS_STATE_DIR"/GPU-*.lock
    comes_back_slowly "$first"
    # shellcheck disable=SC2086
    capture timeout -k 5 60 $way "$TARGET"
    ((status != 0)) || return 1
    assert_contains "$err" "MiB of memory free, and 68.0 MiB is needed"
    in_state checkpointed "$TARGET"
    wait "$BACK"
    in_state running "$first"
    done_by suspend "$first"
  done
  comes_back_slowly "$first"
  wait "$BACK"
  kill -KILL "$first"
  wait_until 60 gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "resume that runs out of GPU memory in the driver leaves the whole tree suspended" {
  start_tree --size 4M
  done_by suspend "$TARGET"
  STASIS_SIM_FAULTS="restore:oom pid=${CHILDREN[1]}" refused 11 out-of-gpu-memory resume "$TARGET"
  in_state checkpointed "${CHILDREN[@]}"
  gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

# --- GPU maps

@test "resume --device-map 0=1 moves the memory to the other GPU" {
  export STASIS_SIM_GPUS=2x256M
  start_target memory --size 32M
  (($(gpu_used_of 0) > 0 && $(gpu_used_of 1) == 0))
  done_by suspend "$TARGET"
  done_by resume "$TARGET" --device-map 0=1
  (($(gpu_used_of 0) == 0 && $(gpu_used_of 1) > 0))
  target_goes_on
  done_by suspend "$TARGET"
  done_by resume "$TARGET" -d 1=0
  (($(gpu_used_of 0) > 0))
  target_goes_on
  target_verifies
}

@test "a map that names an unknown GPU, or one twice, or is none, is refused before anything is done" {
  export STASIS_SIM_GPUS=2x256M
  start_target memory --size 4M
  done_by suspend "$TARGET"
  refused 2 device-map-invalid resume "$TARGET" --device-map 0=7
  assert_contains "$err" "GPUs here: 0: GPU-"
  refused 2 device-map-invalid resume "$TARGET" --device-map 0=1,1=1
  refused 2 device-map-invalid resume "$TARGET" --device-map 0=1,0=0
  refused 2 device-map-invalid resume "$TARGET" --device-map 0
  refused 2 device-map-invalid resume "$TARGET" --device-map ""
  in_state checkpointed
  nothing_left
  done_by resume "$TARGET"
  target_verifies
}

@test "a map to a GPU without room is refused with the figures" {
  export STASIS_SIM_GPUS=256M,64M
  start_target memory --size 100M
  done_by suspend "$TARGET"
  refused 11 out-of-gpu-memory resume "$TARGET" --device-map 0=1
  in_state checkpointed
  done_by resume "$TARGET"
  target_verifies
}

@test "a driver that knows no maps still resumes, and refuses a map" {
  export STASIS_SIM_GPUS=2x256M STASIS_SIM_DRIVER_VERSION=570
  start_target memory --size 4M
  done_by suspend "$TARGET"
  refused 8 device-map-unsupported resume "$TARGET" --device-map 0=1
  in_state checkpointed
  done_by resume "$TARGET"
  target_verifies
}

# --- drivers

@test "a driver that is too old, or missing, is an error with its remedy" {
  STASIS_SIM_DRIVER_VERSION=565 refused 8 driver-too-old ps
  assert_contains "$err" "570"
  STASIS_LIBCUDA=/nonexistent refused 8 driver-missing ps
  assert_contains "$err" "STASIS_LIBCUDA"
  STASIS_LIBCUDA=/nonexistent refused 8 driver-missing suspend $$
  STASIS_LIBCUDA=/nonexistent refused 8 driver-missing dump $$ --images-dir "$image"
  no_image
}

# --- two at once

@test "a limit on open files that a roll-back could run into refuses before anything is done" {
  start_target memory --size 4M
  for limit in 12 15 20 40; do
    capture timeout -k 5 60 bash -c "ulimit -n $limit; exec stasis suspend $TARGET"
    assert_equal "$status" 1 "status with $limit open files"
    assert_contains "$err" "open files"
    in_state running
  done
  # Only the soft limit is low: it is raised.
  bash -c "ulimit -Sn 40; exec stasis suspend -q $TARGET" >/dev/null
  in_state checkpointed
  done_by resume "$TARGET"
  nothing_left
}

@test "a time limit on resume leaves everything as it was" {
  start_target memory --size 4M
  done_by suspend "$TARGET"
  refused 7 timeout resume --timeout 1 "$TARGET"
  in_state checkpointed
  nothing_left
  done_by resume --timeout 30000 "$TARGET"
  target_goes_on
}

@test "a time limit on recover leaves what there is to recover" {
  start_target memory --size 4M
  STASIS_SIM_FAULTS="checkpoint:delay=20s" stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$!
  wait_until 60 works_on_it "$tool"
  kill -KILL "$tool"
  wait_until 60 stands_in_ps "left behind by stasis suspend"
  refused 7 timeout recover --timeout 1 "$TARGET"
  stands_in_ps "left behind by stasis suspend"
  done_by recover --timeout 30000 "$TARGET"
  nothing_left
  target_goes_on
  target_verifies
}

@test "a toggle during another operation is refused, and does not undo it" {
  start_target memory --size 8M
  STASIS_SIM_FAULTS="checkpoint:delay=4s" stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$!
  stopped_at_work "$tool"
  capture timeout -k 5 60 cuda-checkpoint --toggle --pid "$TARGET"
  assert_equal "$status" 1
  assert_contains "$err" "is working on process $TARGET"
  kill -CONT "$tool"
  wait "$tool"
  in_state checkpointed
  done_by resume "$TARGET"
  nothing_left
}

@test "a second operation on the same process is refused, and names the first" {
  start_target memory --size 8M
  STASIS_SIM_FAULTS="checkpoint:delay=6s" stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$!
  stopped_at_work "$tool"
  for verb in suspend resume recover "dump --images-dir $image"; do
    [[ $verb != dump* || $(id -u) == 0 ]] || continue
    # shellcheck disable=SC2086
    refused 7 busy $verb "$TARGET"
    assert_contains "$err" "\`stasis suspend\` (process $tool)"
  done
  no_image
  done_by recover --all
  assert_contains "$out" "nothing to recover"
  kill -CONT "$tool"
  wait "$tool"
  in_state checkpointed
  done_by resume "$TARGET"
  target_verifies
  nothing_left
}

@test "operations on overlapping trees keep off each other" {
  start_tree --size 4M
  STASIS_SIM_FAULTS="checkpoint:delay=6s" stasis suspend "${CHILDREN[0]}" >/dev/null 2>&1 3>&- &
  local tool=$!
  stopped_at_work "$tool"
  refused 7 busy suspend "$TARGET"
  assert_contains "$err" "process ${CHILDREN[0]}"
  in_state running "${CHILDREN[1]}"
  kill -CONT "$tool"
  wait "$tool"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

# --- what people see

@test "results are on standard output; notes, phases and errors on standard error" {
  start_target idle
  capture stasis suspend -v "$TARGET"
  assert_equal "$(wc -l <<<"${out%$'\n'}")" 1
  assert_contains "$err" "simulated GPU"
  assert_contains "$err" "lock "
  capture stasis resume -q "$TARGET"
  assert_equal "$err" ""
}

# bats test_tags=long
@test "a long step draws progress on a terminal and nothing into a pipe" {
  start_target memory --size 64M
  export STASIS_SIM_FAULTS="checkpoint:rate=24M" TERM=xterm
  script -qec "stasis suspend $TARGET" /dev/null </dev/null >"$BATS_TEST_TMPDIR/seen" 3>&-
  grep -q 'checkpoint *\[#' "$BATS_TEST_TMPDIR/seen"
  grep -q 'MiB.*MB/s' "$BATS_TEST_TMPDIR/seen"
  done_by resume "$TARGET"
  done_by suspend "$TARGET"
  [[ $err != *$'\r'* && $err != *"["* ]]
  done_by resume "$TARGET"
  target_verifies
}

@test "--json of every verb is one object, and so is every error" {
  start_target memory --size 4M
  for words in "ps" "suspend $TARGET" "resume $TARGET" "recover $TARGET" "recover --all"; do
    # shellcheck disable=SC2086
    done_by $words --json
    assert_equal "$(json 'd["ok"]')" True
    assert_equal "$err" ""
  done
  sleep 60 3>&- &
  at_end_kill $!
  for words in "suspend 0" "suspend" "resume 99999999999" "suspend $!" "nonsense" \
    "dump $TARGET --images-dir /no/such/parent/x" "restore --images-dir /no/such"; do
    # shellcheck disable=SC2086
    capture stasis $words --json
    ((status != 0))
    assert_equal "$(json 'd["ok"]')" False
    assert_equal "$(json 'd["error"]["exit_status"]')" "$status"
    json 'd["error"]["code"] + d["error"]["message"] + d["error"]["remedy"]' >/dev/null
    assert_equal "$err" ""
  done
}

@test "what is suspended already, or runs already, is told so" {
  start_target memory --size 1M
  done_by suspend "$TARGET"
  assert_contains "$out" "suspended process $TARGET in "
  done_by suspend "$TARGET"
  assert_contains "$out" "process $TARGET was suspended already"
  done_by resume "$TARGET"
  assert_contains "$out" "resumed process $TARGET in "
  done_by resume "$TARGET"
  assert_contains "$out" "process $TARGET was running already"
  done_by recover "$TARGET"
  assert_equal "$out" "process $TARGET was running already"$'\n'
  done_by recover "$TARGET" --json
  assert_equal "$(json 'd["recovered"][0]["was_so"]')" True
  # Once only is the number said where it was not so, too.
  done_by suspend "$TARGET"
  done_by recover "$TARGET"
  assert_equal "$out" "process $TARGET is running"$'\n'
  target_goes_on
}
