#!/usr/bin/env bats
# stasis run --images-dir: what passes through to the job (signals, standard streams), signals that save it,
# notices to make room, saves and restores that take too long, and workers that are killed.

load helpers
load stasis_lib

load stasis_jobs_lib

setup() { setup_job; }
teardown() { end_stasis; }

@test "exit status, signals and standard streams pass through" {
  local run=(stasis run --images-dir "$images" --)
  capture timeout 60 "${run[@]}" sh -c 'cat; echo "to error" >&2; exit 7' <<<"from input"
  assert_equal "$status" 7
  assert_equal "$out" $'from input\n'
  assert_equal "$err" $'to error\n'
  capture timeout 60 "${run[@]}" sh -c 'kill -USR2 $$'
  assert_equal "$status" 140
  capture timeout 60 "${run[@]}" "$BATS_TEST_TMPDIR/nothing"
  assert_equal "$status" 127
  # It has a namespace of its own, and what it leaves behind ends with it.
  capture timeout 60 "${run[@]}" sh -c 'sleep 1000 & echo $$; set -- /proc/[0-9]*; echo $#'
  assert_equal "$out" $'5000\n3\n'
  # More than a pipe holds, to a reader that stops early.
  capture bash -c '"$@" | head -c 5; exit "${PIPESTATUS[0]}"' bash timeout 60 "${run[@]}" \
    sh -c 'exec seq 1000000'
  assert_equal "$out" $'1\n2\n3'
  assert_equal "$status" 141
  nothing_left
}

@test "restored, its output goes on into the new file and the new pipe, and its input is the new one" {
  cat >"$BATS_TEST_TMPDIR/script" <<END
stasis-workload memory --size 4M --status $TARGET_STATUS &
n=0 heard=
while :; do
  read -r -t 0.3 line
  how=\$? heard+=\$line # after 0.3 s it may be a part of it
  ((how == 0 || how > 128)) || break
  ((how != 0)) || { echo "heard \$heard" && heard=; }
  echo "line \$((++n))"
  echo "error \$n" >&2
done
kill %1
wait
echo "over at \$n"
END
  job=(bash "$BATS_TEST_TMPDIR/script")
  mkfifo "$BATS_TEST_TMPDIR/in"
  (exec_on_gpu stasis run --images-dir "$images" -- "${job[@]}") \
    <>"$BATS_TEST_TMPDIR/in" >"$BATS_TEST_TMPDIR/out1" 2>"$BATS_TEST_TMPDIR/err1" 3>&- &
  RUN=$! RUN_LOG=$BATS_TEST_TMPDIR/err1
  at_end_kill "$RUN"
  job_is_up
  echo one >"$BATS_TEST_TMPDIR/in"
  wait_until 60 grep -q "heard one" "$BATS_TEST_TMPDIR/out1"
  kill -TERM "$RUN"
  ends_with 75
  local last
  last=$(sed -n 's/^line //p' "$BATS_TEST_TMPDIR/out1" | tail -n 1)
  # Now standard output is a pipe, standard error another file, standard input a file with an end.
  { sleep 1; echo two; sleep 0.5; } >"$BATS_TEST_TMPDIR/in" 3>&- &
  at_end_kill $!
  local status=0
  (exec_on_gpu stasis run --images-dir "$images" -- "${job[@]}") \
    <"$BATS_TEST_TMPDIR/in" 2>"$BATS_TEST_TMPDIR/err2" 3>&- | cat >"$BATS_TEST_TMPDIR/out2"
  assert_equal "${PIPESTATUS[0]}" 0
  assert_equal "$(grep -m 1 '^line ' "$BATS_TEST_TMPDIR/out2")" "line $((last + 1))"
  grep -q "heard two" "$BATS_TEST_TMPDIR/out2"
  grep -q "^verified" "$BATS_TEST_TMPDIR/out2"
  local end
  end=$(sed -n 's/^over at //p' "$BATS_TEST_TMPDIR/out2")
  # Each line once, over both files.
  assert_equal "$(sed -n 's/^line //p' "$BATS_TEST_TMPDIR/out1" "$BATS_TEST_TMPDIR/out2")" "$(seq "$end")"
  assert_equal "$(sed -n 's/^error //p' "$BATS_TEST_TMPDIR/err1" "$BATS_TEST_TMPDIR/err2")" "$(seq "$end")"
}

@test "a save that cannot be made in time: the job gets the signal itself, and the last image stays" {
  start_run --grace 300ms
  job_is_up
  saves 000001
  kill -KILL "$RUN"
  wait_until 60 job_is_gone
  ends_with 137
  export STASIS_SIM_FAULTS="checkpoint:delay=2s"
  start_run --grace 300ms
  told "goes on from"
  target_goes_on
  kill -TERM "$RUN"
  ends_with 0 # the workload's own, when it has got the signal
  grep -q "the job is not saved: .*it gets SIGTERM itself" "$RUN_LOG"
  grep -q "^verified" "$TARGET_LOG"
  assert_equal "$(ls "$images" | grep -v log)" $'000001\nlock'
}

# bats test_tags=long
@test "a save whose time is over while its mover gets ready ends there, and takes no other path" {
  job=(env -u STASIS_SIM_FAULTS stasis-workload memory --size 16M --pause-ms 20 --status "$TARGET_STATUS")
  STASIS_SIM_FAULTS="context:hang" start_run --grace 10s
  job_is_up
  kill -TERM "$RUN"
  ends_with 0 # the workload's own, when it has got the signal
  grep -q "the job is not saved: .*not done within .*it gets SIGTERM itself" "$RUN_LOG"
  if grep -q "the driver's path is taken" "$RUN_LOG"; then cat "$RUN_LOG" >&2 && return 1; fi
}

@test "a worker that is killed in the middle of a save: the job is brought back and goes on" {
  start_run
  job_is_up
  held_save USR1 60s
  kill -KILL "$(pgrep -ox stasis-worker)"
  told "the process that saved the job was killed by signal 9"
  told "the job runs on"
  target_goes_on
  saves 000001 # what the killed one had begun is gone
  kill -TERM "$RUN"
  ends_with 75
}

@test "a notice that comes twice cuts no save off, and a kill ends all without it" {
  start_run
  job_is_up
  held_save TERM 4s
  kill -TERM "$RUN"
  wait_until 60 grep -qE "TERM once more: the save has 1[0-2][0-9] s left" "$RUN_LOG"
  ends_with 75
  told "saved to $images/000001 "
  start_run
  told "goes on from"
  target_goes_on
  held_save TERM 60s
  kill -KILL "$RUN"
  ends_with 137
  wait_until 60 job_is_gone
  start_run
  told "goes on from"
  target_goes_on
  assert_equal "$(find "$images" -name '*.partial-*')" ""
  kill -INT "$RUN"
  ends_with 130
}

@test "a signal that comes while it is saved is the job's, and not the image's" {
  start_run
  job_is_up
  held_save USR1 4s
  kill -INT "$RUN" # passed on, and the program has no handler
  ends_with 130
  grep -q "saved to $images/000001 " "$RUN_LOG"
  start_run
  told "goes on from $images/000001 "
  target_goes_on
  kill -TERM "$RUN"
  ends_with 75
}

@test "told to make room in the middle of a save that takes too long: no image has the signal" {
  start_run
  job_is_up
  saves 000001
  kill -TERM "$RUN"
  ends_with 75
  start_run --grace 300ms
  told "goes on from $images/000002 "
  target_goes_on
  held_save USR1 8s
  kill -TERM "$RUN"
  ends_with 0 # the workload's own, when it has got the signal
  grep -q "the job is not saved: the save that was under way has taken too long; it gets SIGTERM itself" "$RUN_LOG"
  assert_equal "$(ls "$images" | grep -v log)" $'000001\n000002\nlock'
  start_run
  told "goes on from $images/000002 "
  target_goes_on
  kill -TERM "$RUN"
  ends_with 75
}

worker_of_run() {
  local pid
  for pid in $(pgrep -x stasis-worker); do
    if grep -qz "$images" "/proc/$pid/cmdline"; then echo "$pid" && return; fi
  done
}

# bats test_tags=long
@test "a save that does not come to an end is killed, and the job gets the signal itself" {
  local worker
  for last in TERM USR1; do
    start_run --grace 1s
    [[ $last == TERM ]] || told "goes on from $images/000001 "
    job_is_up
    [[ $last == USR1 ]] || saves 000001
    held_save "$last" 4s
    worker=$(worker_of_run)
    kill -STOP "$worker"
    [[ $last == TERM ]] || kill -TERM "$RUN"
    ends_with 0
    grep -q "the save does not come to an end: its process is killed" "$RUN_LOG"
    grep -q "it gets SIGTERM itself" "$RUN_LOG"
    assert_equal "$(ls "$images" | grep -v log)" $'000001\nlock'
  done
}

@test "told to make room while a verb is at work on it: saved when that is done" {
  start_run --name trainer
  job_is_up
  STASIS_SIM_FAULTS="checkpoint:delay=5s" timeout 60 stasis suspend trainer >/dev/null 2>&1 3>&- &
  local verb=$!
  wait_until 60 in_the_middle
  kill -TERM "$RUN"
  told "not saved yet: "
  wait "$verb" || true
  ends_with 75
  start_run
  told "goes on from $images/000001 "
  target_goes_on
  kill -TERM "$RUN"
  ends_with 75
}
# Its record is there.
in_the_middle() { compgen -G "/proc/$(children_of "$RUN")/root$STASIS_STATE_DIR/*5000*" >/dev/null; }

@test "a worker that is killed when its image is complete and the job ended: saved all the same" {
  export STASIS_FAULT=dump.finish:kill
  start_run
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  unset STASIS_FAULT
  start_run
  told "goes on from $images/000001 "
  target_goes_on
  kill -TERM "$RUN"
  ends_with 75
}

@test "told to make room before it has been started: it never is, and goes back into the queue" {
  # What a killed one has left behind is waited for.
  sleep 1000 3>&- &
  at_end_kill $!
  mkdir "$images"
  echo "{\"host\": \"$(uname -n)\", \"pid\": 1, \"init\": $!, \"init_start\": $(start_of $!)}" >"$images/lock"
  start_run --exit-code 99
  wait_until 60 holds_term
  kill -TERM "$RUN"
  ends_with 99
  grep -q "SIGTERM: the job has not been started, and has lost nothing" "$RUN_LOG"
  [[ ! -e $TARGET_STATUS ]]
}
start_of() { sed 's/.*) //' "/proc/$1/stat" | cut -d ' ' -f 20; }
# `stasis run`, and not what becomes it, and TERM waits to be read.
holds_term() { [[ $(<"/proc/$RUN/comm") == stasis ]] && ((0x$(sed -n 's/^SigBlk:[[:space:]]*//p' "/proc/$RUN/status") & 1 << 14)); }

# preempted_late TEXT ARGUMENT...: told to make room while the driver restores it; then it ends with 75, saying TEXT.
# In the moments before that, the restore is given up instead.
preempted_late() {
  local try text=$1
  for try in 1 2 3 4 5; do
    start_run "${@:2}"
    wait_until 60 is_restored
    kill -TERM "$RUN"
    ends_with 75
    job_is_gone
    gpu_is_free
    grep -q "$text" "$RUN_LOG" && return
    grep -q "SIGTERM: the restore is given up; the image stays" "$RUN_LOG"
  done
  return 1
}
# It is there, and CRIU has gone.
is_restored() {
  pgrep -f "^stasis-workload .*$TARGET_STATUS" >/dev/null && ! pgrep -P "$(pgrep -ox stasis-worker)" -x criu >/dev/null
}

@test "told to make room while it is restored: the image is there, and it goes back into the queue" {
  # What an agent brings back is given up at any moment.
  export STASIS_AGENT=off
  start_run
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  export STASIS_SIM_FAULTS="restore:delay=20s"
  preempted_late "the restore does not stop, and is ended; the image stays" --grace 300ms
  # It is too late to stop it, and it cannot be saved again.
  export STASIS_SIM_FAULTS="restore:delay=3s; checkpoint:error=999"
  preempted_late "the job is not saved: .*; it is ended, and has lost what it did since SIGTERM"
  assert_equal "$(ls "$images" | grep -v log)" $'000001\nlock'
  # It can be, and does nothing twice.
  export STASIS_SIM_FAULTS="restore:delay=3s"
  preempted_late "saved to $images/000002 "
  unset STASIS_SIM_FAULTS
  start_run
  told "goes on from $images/000002 "
  target_goes_on
  kill -TERM "$RUN"
  ends_with 75
}

@test "the first process of its namespace is killed: what the job has written is not lost" {
  mkfifo "$BATS_TEST_TMPDIR/slow"
  exec 7<>"$BATS_TEST_TMPDIR/slow"
  (exec_on_gpu stasis run --images-dir "$images" -- \
    sh -c "seq 20000; touch $BATS_TEST_TMPDIR/written; exec sleep 1000") </dev/null >&7 2>"$BATS_TEST_TMPDIR/err" 3>&- 7>&- &
  RUN=$! RUN_LOG=$BATS_TEST_TMPDIR/err
  at_end_kill "$RUN"
  # More than one pipe holds, less than the two.
  wait_until 60 test -e "$BATS_TEST_TMPDIR/written"
  kill -KILL "$(children_of "$RUN")"
  wait_until 60 eval '! pgrep -P "$RUN" >/dev/null'
  exec 8<"$BATS_TEST_TMPDIR/slow" 7>&-
  cat <&8 >"$BATS_TEST_TMPDIR/out"
  ends_with 3
  grep -q "the first process of the job's namespace was killed" "$RUN_LOG"
  assert_equal "$(tail -n 1 "$BATS_TEST_TMPDIR/out")" 20000
  assert_equal "$(wc -l <"$BATS_TEST_TMPDIR/out")" 20000
}
