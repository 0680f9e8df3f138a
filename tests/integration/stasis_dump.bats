#!/usr/bin/env bats
# stasis dump and restore, with the real CRIU, on the simulated driver.
# Long because dump and restore are tried on the same targets, in sections.

load helpers
load stasis_lib

setup() { setup_stasis; }
teardown() { end_stasis; }

# --- there and back

@test "the counter: 101, dump, gone, GPU free, restore, 102" {
  need_root "CRIU"
  local log=$BATS_TEST_TMPDIR/counter.log
  (exec_on_gpu setsid stasis-counter --gpu-memory 32M) </dev/null >"$log" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 grep -q listening "$log"
  local port
  port=$(sed 's/.*://' "$log")
  assert_equal "$(stasis-counter --ask "$port")" 101
  dump_it
  gpu_is_free
  nothing_left
  restore_it
  assert_equal "$(stasis-counter --ask "$port")" 102
  (($(gpu_used) > 32 << 20))
  nothing_left
}

there_and_back() {
  need_root "CRIU"
  start_target "$@"
  dump_it
  gpu_is_free
  restore_it
  target_goes_on
  restored_verifies
  nothing_left
}

@test "there and back: device memory" { there_and_back memory --size 32M; }
# bats test_tags=long
@test "there and back: pinned, mapped and registered host memory" { there_and_back pinned --size 8M; }
# bats test_tags=long
@test "there and back: streams and events in flight" { there_and_back streams; }
@test "there and back: stream-ordered pools" { there_and_back pool --size 8M; }
# bats test_tags=long
@test "there and back: virtual memory management" { there_and_back vmm --size 8M; }
# bats test_tags=long
@test "there and back: several contexts on two GPUs" { STASIS_SIM_GPUS=2x256M there_and_back contexts; }
# bats test_tags=long
@test "there and back: threads that launch at the same time" { there_and_back threads; }
# bats test_tags=long
@test "there and back: a context and nothing else" { there_and_back idle; }

@test "there and back: threads that ask the driver all the time" { there_and_back poll --own-us 20; }

@test "there and back: a tree of two CUDA processes and one without" {
  need_root "CRIU"
  start_tree --size 8M
  dump_it
  wait_until 60 number_is_free "${CHILDREN[0]}"
  wait_until 60 number_is_free "${CHILDREN[1]}"
  assert_contains "$out" "3 processes, 2 with CUDA"
  gpu_is_free
  restore_it
  assert_contains "$out" "3 processes, 2 with CUDA"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  restored_verifies 3 # the root says so when its children have
  nothing_left
}

@test "a restored job is dumped and restored again and again" {
  need_root "CRIU"
  start_target memory --size 8M
  for n in 1 2 3; do
    done_by dump "$TARGET" --images-dir "$image-$n"
    wait_until 60 number_is_free
    done_by restore --images-dir "$image-$n" --detach
    target_goes_on
  done
  restored_verifies
}

@test "one image is restored twice, one after the other" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  local status_copy=$BATS_TEST_TMPDIR/copy
  cp "$TARGET_STATUS" "$status_copy"
  restore_it
  target_goes_on
  kill -KILL "$TARGET"
  wait_until 60 number_is_free
  cat "$status_copy" >"$TARGET_STATUS"
  restore_it
  target_goes_on
  restored_verifies
}

@test "a process that was suspended before the dump is suspended after the restore" {
  need_root "CRIU"
  start_target memory --size 8M
  done_by suspend "$TARGET"
  dump_it
  restore_it
  in_state checkpointed
  done_by resume "$TARGET"
  target_goes_on
  restored_verifies
}

@test "dump --leave-running saves it and lets it go on" {
  need_root "CRIU"
  start_target memory --size 8M
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$out" "it runs on"
  in_state running
  target_goes_on
  target_verifies
  nothing_left
}

# The names of the phases of the last verb, which said --json.
phases() { python3 -IS -c 'import json, sys; print(*(p["name"] for p in json.load(sys.stdin)["phases"]))' <<<"$out"; }

@test "what runs on waits neither for checksums nor for the disk, except where its image takes another's place" {
  need_root "CRIU"
  [[ $(stat -f -c %T "$BATS_TEST_TMPDIR") =~ ^(ext2/ext3|xfs|tmpfs)$ ]] || skip "not on this file system"
  start_target memory --size 8M
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  [[ $(phases) == *" finish"*" sync" ]]
  assert_contains "$(<"$image/manifest.json")" '"sync": "disk"'
  done_by verify "$image"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --force --json
  [[ $(phases) == *" sync finish"* ]]
  done_by dump "$TARGET" --images-dir "$image.fast" --leave-running --sync none --json
  [[ $(phases) != *sync* ]]
  target_goes_on
  # Checksums, a manifest or a sync that fails: the job runs on, and nothing that may be torn is left.
  local point refused_by_fault
  for point in image.collected image.manifest dump.complete image.synced; do
    refused_by_fault=$(STASIS_FAULT=$point:error stasis dump "$TARGET" --images-dir "$image.torn" --leave-running 2>&1) && return 1
    assert_contains "$refused_by_fault" "the job runs on, and has no image"
    [ ! -e "$image.torn" ]
    in_state running
    target_goes_on
    nothing_left
  done
  # It runs before they are begun, also if no tool brings it back.
  STASIS_FAULT=image.collected:kill capture timeout 60 stasis dump "$TARGET" --images-dir "$image.torn" --leave-running
  assert_equal "$status" 137
  in_state running
  target_goes_on
  done_by recover --all
  [ ! -e "$image.torn" ]
  target_goes_on
  target_verifies
  nothing_left
}

@test "dump --leave-suspended saves it and leaves it suspended" {
  need_root "CRIU"
  start_target memory --size 8M
  done_by dump "$TARGET" --images-dir "$image" --leave-suspended
  in_state checkpointed
  gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "restore --leave-suspended brings it back without its GPU memory" {
  need_root "CRIU"
  start_target memory --size 8M
  dump_it
  refused 2 usage restore --images-dir "$image" --detach --leave-suspended --device-map 0=0
  restore_it --leave-suspended
  in_state checkpointed
  gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  restored_verifies
}

# --- the image

@test "the manifest says what the image is" {
  need_root "CRIU"
  start_tree --size 8M
  dump_it --sync none --json
  assert_equal "$(json 'd["images_dir"]')" "$image"
  assert_equal "$(json "sorted(p['state'] for p in d['processes'] if p['cuda'])")" "['ended', 'ended']"
  out=$(<"$image/manifest.json")
  assert_equal "$(json 'd["root_pid"]')" "$TARGET"
  assert_equal "$(json 'len(d["processes"])')" 3
  assert_equal "$(json "[p['cuda'] for p in d['processes']]")" "[False, True, True]"
  assert_equal "$(json "d['processes'][1]['parent_pid']")" "$TARGET"
  assert_equal "$(json "d['processes'][1]['command'][1]")" memory
  assert_equal "$(json "d['processes'][1]['cuda_state']")" running
  (($(json "d['processes'][1]['gpu_memory'][0]['bytes']") >= 8 << 20))
  assert_equal "$(json 'd["simulated"], d["sync"], d["cuda_version"]')" "True none 13000"
  assert_equal "$(json 'd["gpus"][0]["total_memory"]')" $((8 << 30))
  assert_equal "$(json 'sorted(f["path"][5:] for f in d["files"])')" \
    "$(cd "$image/criu" && python3 -IS -c 'import os; print(sorted(os.listdir()))')"
  json '[p["name"] for p in d["phases"]]' | grep -q "'lock', 'checkpoint', 'criu', 'checksums'"
  [[ $(json '[p["name"] for p in d["phases"]]') != *"'sync'"* ]]
  assert_equal "$(stat -c %a "$image" "$image/manifest.json" "$image/criu" | tr '\n' ' ')" "700 600 700 "
  assert_equal "$(find "$image/criu" -type f ! -perm 600)" ""
}

@test "a command line of any length is saved, and cut only for people" {
  need_root "CRIU"
  TARGET_STATUS=$BATS_TEST_TMPDIR/target.status
  TARGET_LOG=$BATS_TEST_TMPDIR/target.log
  # shellcheck disable=SC2016,SC2046 # for the bash in it; a word each
  (exec_on_gpu setsid bash -c 'stasis-workload memory --size 4M --status "$0" & wait' "$TARGET_STATUS" \
    "$(head -c 100000 /dev/zero | tr '\0' x)" $(seq 5000)) </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  at_end_kill "$(children_of "$TARGET")"
  dump_it
  done_by verify "$image"
  out=$(<"$image/manifest.json")
  assert_equal "$(json "d['processes'][0]['command'][-1]")" …
  assert_equal "$(json "d['processes'][0]['command'][5:8]")" "['1', '2', '3']"
  restore_it
  target_goes_on
  nothing_left
}

@test "an image is not overwritten without --force, and another directory not even with it" {
  need_root "CRIU"
  start_target memory --size 4M
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  local before
  before=$(<"$image/manifest.json")
  refused 10 image-exists dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$err" "--force"
  assert_equal "$(<"$image/manifest.json")" "$before"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --force
  [[ $(<"$image/manifest.json") != "$before" ]]
  mkdir "$BATS_TEST_TMPDIR/precious"
  echo content >"$BATS_TEST_TMPDIR/precious/file"
  refused 10 image-exists dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/precious" --force
  assert_equal "$(<"$BATS_TEST_TMPDIR/precious/file")" content
  nothing_left
  target_goes_on
  dump_it --force
  restore_it
  target_goes_on
  restored_verifies
}

@test "an empty directory is taken, and a link to a directory is not replaced" {
  need_root "CRIU"
  start_target memory --size 4M
  mkdir "$image"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  [[ -e $image/manifest.json ]]
  ln -s "$BATS_TEST_TMPDIR" "$BATS_TEST_TMPDIR/link"
  refused 10 image-exists dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/link" --leave-running --force
  [[ -L $BATS_TEST_TMPDIR/link ]]
  # On the way to the image a link is as good as any directory; and a restore takes one, too.
  done_by dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/link/second"
  wait_until 60 number_is_free
  ln -s "$BATS_TEST_TMPDIR/second" "$BATS_TEST_TMPDIR/to-image"
  done_by restore --images-dir "$BATS_TEST_TMPDIR/to-image" --detach
  target_goes_on
  restored_verifies
}

@test "stasis that is part of the tree refuses to dump it" {
  need_root "CRIU"
  start_target tree --children 1 --size 4M
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  local script=$BATS_TEST_TMPDIR/job
  cat >"$script" <<END
stasis-workload idle --status $BATS_TEST_TMPDIR/job.status &
until grep -qs '^round 0*[1-9]' $BATS_TEST_TMPDIR/job.status; do sleep 0.1; done
unset LD_LIBRARY_PATH
timeout 60 stasis dump \$\$ --images-dir $image
echo "status \$?"
kill %1
END
  (exec_on_gpu setsid bash "$script") </dev/null >"$BATS_TEST_TMPDIR/job.log" 2>&1 3>&-
  local said
  said=$(<"$BATS_TEST_TMPDIR/job.log")
  assert_contains "$said" "cannot be dumped from within"
  assert_contains "$said" "status 2"
  no_image
}

# --- CRIU's start

# criu_that LINE...: the path of one that does this first when it is started for a dump, and not for its version.
criu_that() {
  {
    echo '#!/bin/bash'
    echo "if [[ \$1 == swrk ]] && compgen -G '$image.partial-*' >/dev/null; then"
    printf '%s\n' "$@"
    echo 'fi'
    echo "exec '$(real_criu)' \"\$@\""
  } >"$BATS_TEST_TMPDIR/criu"
  chmod +x "$BATS_TEST_TMPDIR/criu"
  echo "$BATS_TEST_TMPDIR/criu"
}
at_criu_start() { test -e "$BATS_TEST_TMPDIR/criu-starts"; }
# The dump has not touched it, and nothing is left of an attempt to.
untouched() {
  in_state running
  target_goes_on
  no_image
  nothing_left
}

@test "the job runs on until CRIU has started, and that is no part of its downtime" {
  need_root "CRIU"
  LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so start_target memory --size 16M
  STASIS_CRIU=$(criu_that "touch '$BATS_TEST_TMPDIR/criu-starts'" \
    "until [[ -e '$BATS_TEST_TMPDIR/go-on' ]]; do sleep 0.02; done") \
    stasis dump "$TARGET" --images-dir "$image" --json >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  local dump=$!
  at_end_kill "$dump"
  wait_until 60 at_criu_start
  untouched_yet
  touch "$BATS_TEST_TMPDIR/go-on"
  wait "$dump" || { cat "$BATS_TEST_TMPDIR/out" >&2; return 1; }
  wait_until 60 number_is_free
  out=$(<"$BATS_TEST_TMPDIR/out")
  [[ $(json '{p["name"]: p["seconds"] for p in d["phases"]}["criu start"] + d["standstill_seconds"] <= d["seconds"]') == True ]]
  [[ $(json '[p["name"] for p in d["phases"]]') == *"'criu start', 'prepare', 'close', "*"'checkpoint', 'criu', 'checksums'"* ]]
  restore_it
  target_goes_on
  restored_verifies
}
# While a dump waits.
untouched_yet() {
  target_goes_on
  in_state running
}

@test "a CRIU that fails at its start has touched no process" {
  need_root "CRIU"
  start_target memory --size 4M
  # Whatever was asked of the driver would fail otherwise.
  export STASIS_SIM_FAULTS="lock:error=999"
  STASIS_CRIU=$(criu_that "echo 'Error (criu/x.c:1): no such thing' >&2; exit 3") \
    refused 9 criu-failed dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "no such thing"
  assert_contains "$err" "rolled back: every process is as it was"
  untouched
  STASIS_CRIU=$(criu_that 'kill -KILL $$') refused 9 criu-failed dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "killed by signal 9"
  untouched
  # And the other way round: what is wrong elsewhere is told as such, without CRIU's log.
  refused 8 driver-error dump "$TARGET" --images-dir "$image"
  [[ ! -e $image.failed-dump.log ]]
  untouched
}

@test "told to stop, or killed, while CRIU starts, a dump has touched no process" {
  need_root "CRIU"
  start_target memory --size 4M
  local signal dump status
  for signal in TERM KILL; do
    rm -f "$BATS_TEST_TMPDIR/criu-starts"
    # It takes the request and says nothing.
    STASIS_SIM_FAULTS="lock:error=999" STASIS_CRIU=$(criu_that "echo \$\$ >'$BATS_TEST_TMPDIR/criu-starts'" \
      "cat <&3 >/dev/null") stasis dump "$TARGET" --images-dir "$image" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
    dump=$!
    at_end_kill "$dump"
    wait_until 60 test -s "$BATS_TEST_TMPDIR/criu-starts"
    kill -"$signal" "$dump"
    status=0
    wait "$dump" || status=$?
    assert_equal "$status" $((128 + $(kill -l "$signal")))
    wait_until 60 number_is_free "$(<"$BATS_TEST_TMPDIR/criu-starts")"
    [[ $signal == TERM ]] || done_by recover "$TARGET"
    untouched
  done
  target_verifies
}

# bats test_tags=long
@test "CRIU waits for a job that takes longer to quiesce than CRIU's own time limit" {
  need_root "CRIU"
  start_target memory --size 4M
  STASIS_SIM_FAULTS="checkpoint:delay=15s" dump_it
  restore_it
  target_goes_on
  restored_verifies
}

# --- attached restores

@test "an attached restore ends with the exit status of the job" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  stasis restore --images-dir "$image" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  local tool=$!
  wait_until 60 grep -q "it runs on" "$BATS_TEST_TMPDIR/out"
  target_goes_on
  kill -TERM "$TARGET"
  local status=0
  wait "$tool" || status=$?
  assert_equal "$status" 0
  grep -q '^verified' "$TARGET_LOG"
}

@test "an attached restore ends with 128 and the signal that ended the job" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  stasis restore --images-dir "$image" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  local tool=$!
  wait_until 60 grep -q "it runs on" "$BATS_TEST_TMPDIR/out"
  kill -KILL "$TARGET"
  local status=0
  wait "$tool" || status=$?
  assert_equal "$status" 137
}

@test "an attached restore passes signals on to the job" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  for signal in TERM USR1; do
    stasis restore --images-dir "$image" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
    local tool=$! status=0
    wait_until 60 grep -q "it runs on" "$BATS_TEST_TMPDIR/out"
    cp "$TARGET_STATUS" "$BATS_TEST_TMPDIR/rounds"
    target_goes_on
    kill "-$signal" "$tool"
    wait "$tool" || status=$?
    # The workload finishes its round at TERM, and has no handler for USR1.
    if [[ $signal == TERM ]]; then assert_equal "$status" 0; else assert_equal "$status" 138; fi
    wait_until 60 number_is_free
    cp "$TARGET_LOG" "$TARGET_LOG.$signal"
    : >"$TARGET_LOG"
  done
  grep -q '^verified' "$TARGET_LOG.TERM"
}

@test "a signal is passed on from the moment at which an attached restore says that the job runs" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  for i in 1 2 3 4 5; do
    local said tool status=0
    mkfifo "$BATS_TEST_TMPDIR/said$i"
    stasis restore --images-dir "$image" >"$BATS_TEST_TMPDIR/said$i" 2>/dev/null 3>&- &
    tool=$!
    at_end_kill "$tool"
    # Without a pause, as the tool goes on to the program that attends.
    while read -r said && [[ $said != *"it runs on"* ]]; do :; done <"$BATS_TEST_TMPDIR/said$i"
    kill -USR1 "$tool"
    wait_until 20 eval "! kill -0 $tool 2>/dev/null"
    wait "$tool" || status=$?
    assert_equal "$status" 138
    wait_until 60 number_is_free
  done
}

@test "who stays attached to a restored job is no CUDA process itself" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  stasis restore --images-dir "$image" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  local tool=$!
  wait_until 60 grep -q "it runs on" "$BATS_TEST_TMPDIR/out"
  wait_until 60 grep -qz "^attend$" "/proc/$tool/cmdline"
  done_by ps --json --timeout 30000
  assert_equal "$(json "[p['pid'] for p in d['processes'] if p['pid'] in ($tool, $TARGET)]")" "[$TARGET]"
  ! grep -q libcuda "/proc/$tool/maps" || return 1
  assert_equal "$(<"/proc/$tool/comm")" stasis
  target_goes_on
  kill -KILL "$TARGET"
  wait "$tool" || true
}

# --- terminals

@test "a job of a terminal is recognised, dumped and restored onto another terminal" {
  need_root "CRIU"
  TARGET_STATUS=$BATS_TEST_TMPDIR/job.status
  local pidfile=$BATS_TEST_TMPDIR/job.pid
  cat >"$BATS_TEST_TMPDIR/session" <<END
trap '' HUP
LD_LIBRARY_PATH=${STASIS_LIBCUDA%/*} stasis-workload memory --size 4M --status $TARGET_STATUS &
echo \$! >$pidfile
wait
END
  script -qec "bash -i $BATS_TEST_TMPDIR/session" /dev/null </dev/null >"$BATS_TEST_TMPDIR/tty" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 target_is_up
  TARGET=$(<"$pidfile")
  at_end_kill "$TARGET"
  done_by dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "--shell-job is set"
  wait_until 60 number_is_free
  out=$(<"$image/manifest.json")
  assert_equal "$(json 'd["criu_options"]["shell_job"]')" True
  script -qec "stasis restore --images-dir $image; echo restore ended with \$?" /dev/null </dev/null \
    >"$BATS_TEST_TMPDIR/tty2" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 grep -q "it runs on" "$BATS_TEST_TMPDIR/tty2"
  target_goes_on
  kill -TERM "$TARGET"
  wait_until 60 grep -q "restore ended with 0" "$BATS_TEST_TMPDIR/tty2"
  grep -q '^verified' "$BATS_TEST_TMPDIR/tty2"
}

@test "a job whose room another program has taken during a dump is not asked back of the driver, but stays suspended" {
  need_root "CRIU"
  export STASIS_SIM_GPUS=1x256M
  local tool status=0
  start_target memory --size 100M
  STASIS_FAULT=dump.ending:stop timeout -k 5 60 stasis dump "$TARGET" "$image" --leave-running \
    >/dev/null 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  tool=$!
  wait_until 60 stopped_below "$tool"
  start_hog 200M
  kill -CONT "$(pgrep -P "$tool")"
  wait "$tool" || status=$?
  assert_equal "$status" 12 "$(<"$BATS_TEST_TMPDIR/err")"
  assert_contains "$(<"$BATS_TEST_TMPDIR/err")" "process $TARGET stays suspended: GPU-" "104 MiB is needed" \
    "free GPU memory, then run \`stasis recover $TARGET\`" "the image $image is complete"
  in_state checkpointed
  refused 11 out-of-gpu-memory recover "$TARGET"
  assert_contains "$err" "104 MiB is needed" "stays suspended: free GPU memory, then run"
  in_state checkpointed
  refused 12 not-rolled-back resume "$TARGET"
  assert_contains "$err" "104 MiB is needed" "process $TARGET stays suspended"
  in_state checkpointed
  kill -KILL "$HOG"
  wait_until 60 eval '(($(gpu_used_of 0) == 0))'
  done_by recover "$TARGET"
  target_goes_on
  target_verifies
  nothing_left
}

# --- another machine

@test "an image is restored on another machine, whose GPUs are others" {
  need_root "CRIU"
  export STASIS_SIM_GPUS=2x256M
  start_target memory --size 16M
  dump_it
  STASIS_SIM_MACHINE=other STASIS_SIM_DIR=$BATS_TEST_TMPDIR/sim2
  export STASIS_SIM_MACHINE STASIS_SIM_DIR
  mkdir "$STASIS_SIM_DIR"
  restore_it
  (($(gpu_used_of 0) > 16 << 20 && $(gpu_used_of 1) == 0))
  target_goes_on
  restored_verifies
}

@test "a restore on another machine takes a map, by indices of the old and the new one" {
  need_root "CRIU"
  export STASIS_SIM_GPUS=2x256M
  start_target memory --size 16M
  dump_it
  STASIS_SIM_MACHINE=other STASIS_SIM_DIR=$BATS_TEST_TMPDIR/sim2
  export STASIS_SIM_MACHINE STASIS_SIM_DIR
  mkdir "$STASIS_SIM_DIR"
  restore_it --device-map 0=1
  (($(gpu_used_of 0) == 0 && $(gpu_used_of 1) > 16 << 20))
  target_goes_on
  restored_verifies
}

@test "restored suspended on another machine, it is resumed there" {
  need_root "CRIU"
  export STASIS_SIM_GPUS=2x256M
  start_target memory --size 16M
  dump_it
  STASIS_SIM_MACHINE=other STASIS_SIM_DIR=$BATS_TEST_TMPDIR/sim2
  export STASIS_SIM_MACHINE STASIS_SIM_DIR
  mkdir "$STASIS_SIM_DIR"
  restore_it --leave-suspended
  done_by resume "$TARGET" --device-map 0=1
  (($(gpu_used_of 1) > 16 << 20))
  target_goes_on
  restored_verifies
}

@test "a GPU that is too small, or too few of them, refuse a restore before anything is made" {
  need_root "CRIU"
  export STASIS_SIM_GPUS=2x256M
  start_target memory --size 100M
  dump_it
  STASIS_SIM_GPUS=256M refused 11 gpu-mismatch restore --images-dir "$image" --detach
  STASIS_SIM_GPUS=2x64M refused 11 out-of-gpu-memory restore --images-dir "$image" --detach
  STASIS_SIM_GPUS=none refused 8 driver-error restore --images-dir "$image" --detach
  wait_until 60 number_is_free
  start_hog 200M
  refused 11 out-of-gpu-memory restore --images-dir "$image" --detach
  wait_until 60 number_is_free
  restore_it --device-map 0=1
  target_goes_on
  restored_verifies
}

@test "another driver than the image's refuses a restore" {
  need_root "CRIU"
  start_target idle
  dump_it
  STASIS_SIM_DRIVER_VERSION=590 refused 8 driver-unsupported restore --images-dir "$image" --detach
  assert_contains "$err" "13.0"
  assert_contains "$err" "13.1"
  wait_until 60 number_is_free
}

@test "a restore works in a new PID namespace while the number is in use here" {
  need_root "CRIU"
  start_target memory --size 4M
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  refused 11 pid-in-use restore --images-dir "$image" --detach
  assert_contains "$err" "$TARGET"
  assert_contains "$err" "unshare"
  # The very advice of the message.
  unshare --pid --fork --mount-proc --kill-child stasis restore --images-dir "$image" \
    >"$BATS_TEST_TMPDIR/out" 2>&1 </dev/null 3>&- &
  local tool=$! status=0
  at_end_kill "$tool"
  wait_until 60 grep -q "it runs on" "$BATS_TEST_TMPDIR/out"
  kill -KILL "$TARGET" # the one here
  target_goes_on
  kill -TERM "$(children_of "$(children_of "$tool")")"
  wait "$tool" || status=$?
  assert_equal "$status" 0
  grep -q '^verified' "$TARGET_LOG"
}

@test "a process number is in use as long as a process outside is of its session" {
  need_root "CRIU"
  TARGET_STATUS=$BATS_TEST_TMPDIR/status
  TARGET_LOG=$BATS_TEST_TMPDIR/log
  # shellcheck disable=SC2016
  (exec_on_gpu setsid bash -c '(sleep 300 & echo $! >"$1.other"); exec stasis-workload memory --size 8M --status "$1"' \
    bash "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 grep -qs ok "$TARGET_STATUS"
  at_end_kill "$(<"$TARGET_STATUS.other")"
  dump_it
  refused 11 pid-in-use restore --images-dir "$image" --detach
  assert_contains "$err" "process number $TARGET, which is in use as that of the session of process $(<"$TARGET_STATUS.other") (sleep)"
  kill -KILL "$(<"$TARGET_STATUS.other")"
  # Until it is waited for, which may take a moment.
  restore_it
  target_goes_on
}

# start_loader: a program with two workers that it forked when it used CUDA. Sets TARGET, CHILDREN.
start_loader() {
  start_target loader
  mapfile -t CHILDREN < <(children_of "$TARGET")
  assert_equal "${#CHILDREN[@]}" 2 "workers"
  at_end_kill "${CHILDREN[@]}"
}
# has_device_files PID: which cannot be dumped.
has_device_files() { ls -l "/proc/$1/fd" | grep -qE 'userfaultfd|landlock|perf_event' && grep -q nvidiactl "/proc/$1/maps"; }

@test "workers that were forked from a process with CUDA are dumped and restored with it" {
  need_root "CRIU"
  start_loader
  has_device_files "${CHILDREN[0]}"
  dump_it
  wait_until 60 number_is_free "${CHILDREN[0]}"
  wait_until 60 number_is_free "${CHILDREN[1]}"
  gpu_is_free
  restore_it
  in_state running
  target_goes_on
  restored_verifies
}

# bats test_tags=long
@test "workers that the program starts all the time are dumped and restored with it" {
  start_target loader --restless
  for _ in 1 2 3; do
    done_by suspend "$TARGET"
    done_by resume "$TARGET"
    target_goes_on
    done_by dump "$TARGET" --images-dir "$image" --leave-running
    target_goes_on
    rm -r "$image"
  done
  dump_it
  gpu_is_free
  restore_it
  target_goes_on
  restored_verifies
}

@test "such workers go on after a dump that leaves the program running, and can be dumped again" {
  need_root "CRIU"
  start_loader
  local numbers
  numbers=$(ls "/proc/${CHILDREN[0]}/fd")
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  target_goes_on
  assert_equal "$(ls "/proc/${CHILDREN[0]}/fd")" "$numbers" "open files"
  [[ $(grep -c nvidiactl "/proc/${CHILDREN[0]}/maps") == 0 ]]
  done_by dump "$TARGET" --images-dir "$image" --leave-running --force
  target_goes_on
  in_state running
  target_verifies
}

@test "such workers can be dumped after a suspend, or while the program is suspended" {
  need_root "CRIU"
  start_loader
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  target_goes_on
  done_by suspend "$TARGET"
  done_by dump "$TARGET" --images-dir "$image" --leave-suspended --force
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "workers of a program that another tool has suspended cannot be told from others, and are refused" {
  start_loader
  cuda-checkpoint --toggle --pid "$TARGET"
  refused 8 not-supported dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "forked from a process with CUDA that"
  in_state checkpointed
  cuda-checkpoint --toggle --pid "$TARGET"
  target_goes_on
  target_verifies
}

@test "a dump that fails, or is killed, keeps no later one from such workers" {
  need_root "CRIU"
  start_loader
  kill -STOP "${CHILDREN[0]}"
  refused 7 busy dump "$TARGET" --images-dir "$image"
  kill -CONT "${CHILDREN[0]}"
  target_goes_on
  STASIS_SIM_FAULTS="checkpoint:error=999" refused 8 not-supported dump "$TARGET" --images-dir "$image"
  target_goes_on
  dump_it
  restore_it
  target_goes_on
  restored_verifies
}
