#!/usr/bin/env bats
# stasis run --images-dir: a job that is saved, ended, killed, and goes on from there, with the real CRIU
# on the simulated driver.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU and namespaces"
  images=$BATS_TEST_TMPDIR/job
  TARGET_STATUS=$BATS_TEST_TMPDIR/job.status
  TARGET_LOG=$BATS_TEST_TMPDIR/job.out
  job=(stasis-workload memory --size 4M --pause-ms 20 --status "$TARGET_STATUS")
}
teardown() { end_stasis; }

# start_run [ARGUMENT...] : stasis run of $job, in the background; sets RUN. Its standard output goes to
# $TARGET_LOG, what it says itself to $RUN_LOG.
start_run() {
  RUN_LOG=$BATS_TEST_TMPDIR/run-$((++runs)).log
  (exec_on_gpu stasis run --images-dir "$images" "$@" -- "${job[@]}") \
    </dev/null >"$TARGET_LOG" 2>"$RUN_LOG" 3>&- &
  RUN=$!
  at_end_kill "$RUN"
}
job_is_up() { wait_until 20 target_is_up || { cat "$RUN_LOG" >&2; return 1; }; }
# told TEXT: stasis run comes to say so.
told() { wait_until 20 grep -qF "$1" "$RUN_LOG" || { cat "$RUN_LOG" >&2; return 1; }; }

# ends_with STATUS
ends_with() {
  local status=0
  wait "$RUN" || status=$?
  assert_equal "$status" "$1" "exit status ($(cat "$RUN_LOG"))"
}

# The process of the job out here: below init, which is below stasis run.
job_pid() { children_of "$(children_of "$RUN")"; }

saves() {
  kill -USR1 "$RUN"
  told "saved to $images/$1 "
}

nobody_is_left() { ! pgrep -f "stasis-workload .*$TARGET_STATUS" >/dev/null; }

@test "saved by USR1, killed with all it has, started again: it goes on from the image" {
  start_run
  job_is_up
  saves 000001
  grep -q 'standing still for' "$RUN_LOG"
  local saved
  saved=$(target_round)
  target_goes_on
  kill -KILL "$RUN"
  wait_until 10 nobody_is_left
  ends_with 137
  gpu_is_free
  local last
  last=$(target_round)
  start_run
  told "goes on from $images/000001 "
  # It verifies each round with what is in its memory, and would end at the first that is missing or
  # comes twice. The rounds since the image are done again, those before it are not.
  target_goes_on
  (($(target_round) >= saved - 2))
  kill -INT "$RUN" # not a signal to save: passed on, and the program has no handler
  ends_with 130
  nobody_is_left
  nothing_left
  ((last > saved))
}

@test "TERM saves it and ends it with 75; the same command line goes on; its own end is passed on" {
  start_run --exit-code 99
  job_is_up
  kill -TERM "$RUN"
  ends_with 99
  told "saved to $images/000001 "
  nobody_is_left
  gpu_is_free
  local saved
  saved=$(target_round)
  start_run --on-signal USR1
  told "goes on from $images/000001 "
  assert_equal "$(ls "$images")" $'000001\nlock'
  wait_until 10 target_is_past "$saved"
  # TERM is not taken here: the workload ends its round, and says that all were right.
  kill -TERM "$RUN"
  ends_with 0
  grep -q "^verified" "$TARGET_LOG"
  (($(target_round) > saved))
}

@test "a damaged image: the one before is taken, saying so; no sound one: refused" {
  start_run
  job_is_up
  saves 000001
  target_goes_on
  kill -TERM "$RUN"
  ends_with 75
  python3 - "$images/000002"/criu/pages-*.img <<'END'
import sys
for path in sys.argv[1:]:
    with open(path, "r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
END
  start_run
  told "the image $images/000002 is damaged"
  told "goes on from $images/000001 "
  target_goes_on
  saves 000003
  kill -TERM "$RUN"
  ends_with 75
  # The damaged one does not count among those that are kept, and is older than they are by now.
  assert_equal "$(ls "$images")" $'000003\n000004\nlock'
  rm "$images"/*/criu/pages-*.img
  start_run
  ends_with 10
  grep -q "none of the images in $images is sound" "$RUN_LOG"
}

@test "--every saves it again and again, and --keep says how many images stay" {
  start_run --every 700ms --keep 2
  told "removed 000001"
  told "removed 000002"
  assert_equal "$(ls "$images" | grep -cE '^[0-9]+$')" 2
  target_goes_on
  # A save that was cut short leaves nothing that hinders.
  wait_until 20 eval 'compgen -G "$images/*.partial-*" >/dev/null'
  kill -KILL "$RUN"
  wait_until 10 nobody_is_left
  ends_with 137
  start_run --every 10m
  told "goes on from $images/"
  target_goes_on
  assert_equal "$(find "$images" -maxdepth 1 -name '*partial*')" ""
  kill -TERM "$RUN"
  ends_with 75
}

@test "a second one on the same directory is refused, and so is another command" {
  start_run
  job_is_up
  capture timeout 20 stasis run --images-dir "$images" -- "${job[@]}"
  assert_equal "$status" 7
  assert_contains "$err" "process $RUN on"
  kill -TERM "$RUN"
  ends_with 75
  job+=(--rounds 1000000)
  start_run
  ends_with 2
  grep -q "is an image of another command: stasis-workload memory" "$RUN_LOG"
  assert_equal "$(ls "$images")" $'000001\nlock'
}

@test "exit status, signals and standard streams pass through" {
  local run=(stasis run --images-dir "$images" --)
  capture timeout 20 "${run[@]}" sh -c 'cat; echo "to error" >&2; exit 7' <<<"from input"
  assert_equal "$status" 7
  assert_equal "$out" $'from input\n'
  assert_equal "$err" $'to error\n'
  capture timeout 20 "${run[@]}" sh -c 'kill -USR2 $$'
  assert_equal "$status" 140
  capture timeout 20 "${run[@]}" "$BATS_TEST_TMPDIR/nothing"
  assert_equal "$status" 127
  # It has a namespace of its own, and what it leaves behind ends with it.
  capture timeout 20 "${run[@]}" sh -c 'sleep 1000 & echo $$; set -- /proc/[0-9]*; echo $#'
  assert_equal "$out" $'5000\n3\n'
  # More than a pipe holds, to a reader that stops early.
  capture bash -c '"$@" | head -c 5; exit "${PIPESTATUS[0]}"' bash timeout 20 "${run[@]}" \
    sh -c 'exec seq 1000000'
  assert_equal "$out" $'1\n2\n3'
  assert_equal "$status" 141
  nothing_left
}

@test "restored, its output goes on into the new file and the new pipe, and its input is the new one" {
  cat >"$BATS_TEST_TMPDIR/script" <<END
stasis-workload memory --size 4M --status $TARGET_STATUS &
n=0
while read -r -t 0.3 line || ((\$? > 128)); do
  [[ -z \$line ]] || echo "heard \$line"
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
  wait_until 10 grep -q "heard one" "$BATS_TEST_TMPDIR/out1"
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
  assert_equal "$(head -n 1 "$BATS_TEST_TMPDIR/out2")" "line $((last + 1))"
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
  wait_until 10 nobody_is_left
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

@test "a worker that is killed in the middle of a save: the job is brought back and goes on" {
  export STASIS_SIM_FAULTS="checkpoint:delay=500ms"
  start_run
  job_is_up
  kill -USR1 "$RUN"
  wait_until 10 pgrep -x stasis-worker
  sleep 0.3
  kill -KILL "$(pgrep -ox stasis-worker)"
  told "the process that saved the job was killed by signal 9"
  told "the job runs on"
  target_goes_on
  saves 000001 # what the killed one had begun is gone
  kill -TERM "$RUN"
  ends_with 75
}

@test "a signal that comes again ends it at once" {
  export STASIS_SIM_FAULTS="checkpoint:delay=20s"
  start_run
  job_is_up
  kill -TERM "$RUN"
  wait_until 10 pgrep -x stasis-worker
  kill -TERM "$RUN"
  ends_with 143
  nobody_is_left
  unset STASIS_SIM_FAULTS
  rm "$TARGET_STATUS" # for job_is_up to wait for the second one
  start_run
  job_is_up
  assert_equal "$(find "$images" -name '*.partial-*')" ""
  kill -INT "$RUN"
  ends_with 130
}

@test "without the right to make namespaces it is started without images, and not if there is one" {
  local weak=(setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin)
  capture timeout 20 "${weak[@]}" stasis run --images-dir "$images" -- sh -c 'exit 3'
  assert_equal "$status" 3
  assert_contains "$err" "nothing will be saved"
  start_run
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  refused_by 5 not-permitted "${weak[@]}" stasis run --images-dir "$images" -- "${job[@]}"
}
