# For tests of stasis-agent-target, which does what programs with the agent in them may do.

setup() {
  setup_stasis
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
}
teardown() { end_stasis; }

# start_doing WHAT [ARGUMENT...]: stasis-agent-target under the agent. As start_target.
start_doing() {
  TARGET_LOG=$BATS_TEST_TMPDIR/target.log
  TARGET_STATUS=$BATS_TEST_TMPDIR/target.status
  local what=$1
  shift
  rm -f "$TARGET_STATUS"
  (LD_PRELOAD=$agent exec_on_gpu setsid stasis-agent-target "$what" "$TARGET_STATUS" "$@") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
}

cycle_by() {
  done_by suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" "$1" "path ($out)"
  gpu_is_free
  done_by resume "$TARGET" --json
  target_goes_on
}

# The same of TARGET beside others that have GPU memory.
cycle_alone() {
  done_by suspend "$TARGET" --json "${@:2}"
  assert_equal "$(json 'd["path"]')" "$1" "path ($out)"
  done_by resume "$TARGET" --json
  target_goes_on
}

# The round is written anew each time, so at a moment the file may be empty.
target_round() {
  local number=
  until [[ $number =~ ^[0-9]+$ ]]; do read -r _ number _ <"$TARGET_STATUS" || true; done
  echo "$((10#$number))"
}
