# For the tests of `stasis run --images-dir`: besides helpers.bash and stasis_lib.bash, a job to be looked
# after. A file of tests loads all three, and has
#   setup() { setup_job; }
#   teardown() { end_stasis; }

setup_job() {
  setup_stasis
  need_root "CRIU and namespaces"
  images=$BATS_TEST_TMPDIR/job by=()
  TARGET_STATUS=$BATS_TEST_TMPDIR/job.status
  TARGET_LOG=$BATS_TEST_TMPDIR/job.out
  job=(stasis-workload memory --size 4M --pause-ms 20 --status "$TARGET_STATUS")
}

# start_run [ARGUMENT...] : stasis run of $job, in the background; sets RUN. Its standard output goes to
# $TARGET_LOG, what it says itself to $RUN_LOG. The command `by`, if there is one, runs it.
start_run() {
  RUN_LOG=$BATS_TEST_TMPDIR/run-$((++runs)).log
  (exec_on_gpu "${by[@]}" stasis run --images-dir "$images" "$@" -- "${job[@]}") \
    </dev/null >"$TARGET_LOG" 2>"$RUN_LOG" 3>&- &
  RUN=$!
  at_end_kill "$RUN"
}
job_is_up() { wait_until 60 target_is_up || { cat "$RUN_LOG" >&2; return 1; }; }
# told TEXT: stasis run comes to say so.
told() { wait_until 60 has_text "$1" "$RUN_LOG" || { cat "$RUN_LOG" >&2; return 1; }; }

# ends_with STATUS
ends_with() {
  local status=0
  wait "$RUN" || status=$?
  assert_equal "$status" "$1" "exit status ($(<"$RUN_LOG"))"
}

# The process of the job out here: below init, which is below stasis run, as is the worker.
job_pid() {
  local child pid
  for child in $(children_of "$RUN"); do
    for pid in $(children_of "$child"); do
      [[ $(sed -n 's/^NSpid:.*[[:space:]]//p' "/proc/$pid/status" 2>/dev/null) != 5000 ]] || echo "$pid"
    done
  done
}

saves() {
  kill -USR1 "$RUN"
  told "saved to $images/$1 "
}

# held_save SIGNAL DELAY: a save begins at that signal, and has come to its checkpoint, which takes so long. The file is
# taken away for what comes after it.
held_save() {
  echo "checkpoint:delay=$2" >"$STASIS_SIM_DIR/faults"
  kill "-$1" "$RUN"
  wait_until 60 held_up || { cat "$RUN_LOG" >&2; return 1; }
  rm "$STASIS_SIM_DIR/faults"
}

job_is_gone() { ! pgrep -f "stasis-workload .*$TARGET_STATUS" >/dev/null; }
