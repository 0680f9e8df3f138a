#!/usr/bin/env bats
# What docs/operators.md gives to an operator: the units of systemd are ones that systemd takes, and do what
# they say as far as a machine without systemd as its first process shows it.

load helpers
load stasis_lib

setup() {
  setup_stasis
  UNITS=$BATS_TEST_DIRNAME/../../deploy/systemd
}
teardown() { end_stasis; }

# What stands in the comment of the unit for a job of a user.
drop_in_of_the_unit() { sed -n '/^#   \[Service\]$/,/^[^#]/s/^#   //p' "$UNITS/stasis-job@.service"; }

@test "the units are ones that systemd takes" {
  command -v systemd-analyze >/dev/null || skip "no systemd-analyze"
  mkdir "$BATS_TEST_TMPDIR/units"
  local unit
  for unit in "$UNITS"/*; do
    sed "s|/usr/bin/stasis|$STASIS_BUILD/bin/stasis|" "$unit" >"$BATS_TEST_TMPDIR/units/${unit##*/}"
  done
  cd "$BATS_TEST_TMPDIR/units"
  assert_equal "$(systemd-analyze verify --man=no ./stasis-job@train.service ./stasis-recover.service ./stasis-recover.timer 2>&1 |
    grep -E "$BATS_TEST_TMPDIR|stasis-" || true)" ""
  # The drop-in for a user, which the page has too.
  drop_in_of_the_unit >"$BATS_TEST_TMPDIR/user.conf"
  assert_equal "$(sed -n '/^```ini$/,/^```$/p' "$UNITS/../../docs/operators.md" | sed '1d;$d')" "$(cat "$BATS_TEST_TMPDIR/user.conf")"
  mkdir stasis-job@train.service.d
  sed "s|/usr/bin/stasis|$STASIS_BUILD/bin/stasis|" "$BATS_TEST_TMPDIR/user.conf" >stasis-job@train.service.d/user.conf
  assert_equal "$(systemd-analyze verify --man=no ./stasis-job@train.service 2>&1 | grep -E "$BATS_TEST_TMPDIR|stasis-" || true)" ""
  sed 's/^RuntimeDirectoryMode=.*/RuntimeDirectoryMode=none/' "$BATS_TEST_TMPDIR/user.conf" >stasis-job@train.service.d/user.conf
  assert_contains "$(systemd-analyze verify --man=no ./stasis-job@train.service 2>&1 || true)" "none"
  rm -r stasis-job@train.service.d
  # It would say so.
  sed -i 's/^KillMode=mixed/KillMode=sometimes/' stasis-job@.service
  assert_contains "$(systemd-analyze verify --man=no ./stasis-job@train.service 2>&1 || true)" "sometimes"
}

# The line that starts a job, with folders of the test, of the unit or of what stands in the file $1.
line_of() {
  local line
  line=$(sed -n 's/^ExecStart=\(..*\)/\1/p' "$1")
  line=${line//\/usr\/bin\/stasis/stasis}
  line=${line//\/var\/lib\/stasis-jobs\/%i/$BATS_TEST_TMPDIR\/state-of-it}
  printf '%s\n' "${line//%i/train}"
}

@test "the line of the unit starts a job, saves it at TERM with 75, and goes on" {
  need_root "CRIU"
  local line status_file=$BATS_TEST_TMPDIR/status run before
  line=$(line_of "$UNITS/stasis-job@.service")
  mkdir -m 700 "$BATS_TEST_TMPDIR/state-of-it"
  assert_equal "$(sed -n 's/^SuccessExitStatus=//p' "$UNITS/stasis-job@.service")" 75
  start() {
    # shellcheck disable=SC2086
    (COMMAND="stasis-workload memory --size 1M --status $status_file" exec_on_gpu setsid bash -c "exec $line") \
      </dev/null >"$BATS_TEST_TMPDIR/log" 2>&1 3>&- &
    run=$!
    at_end_kill "$run"
    TARGET_STATUS=$status_file wait_until 60 test -s "$status_file"
  }
  rounds() { sed -n 's/^round 0*\([0-9][0-9]*\).*/\1/p' "$status_file"; }
  goes_past() { (($(rounds) > $1)); }
  start
  wait_until 60 goes_past 2
  kill -TERM "$run"
  status=0
  wait "$run" || status=$?
  assert_equal "$status" 75
  before=$(rounds)
  start
  wait_until 60 goes_past "$before"
  # The program may run before the line that says so is written.
  wait_until 60 grep -q 'images/0' "$BATS_TEST_TMPDIR/log"
  kill -KILL "$run"
}

@test "a job of the unit that has ended with 0 is done until its images are removed, as root and in a user namespace" {
  need_root "CRIU"
  local line folder=$BATS_TEST_TMPDIR/state-of-it of
  # That folder is there when the job starts in it.
  assert_contains "$(cat "$UNITS/stasis-job@.service")" "WorkingDirectory=/var/lib/stasis-jobs/%i"
  assert_contains "$(cat "$UNITS/stasis-job@.service")" "StateDirectory=stasis-jobs/%i"
  drop_in_of_the_unit >"$BATS_TEST_TMPDIR/user.conf"
  mkdir -m 700 "$folder"
  for of in "$UNITS/stasis-job@.service" "$BATS_TEST_TMPDIR/user.conf"; do
    line=$(line_of "$of")
    if [[ $line == *unshare* ]] && ! unshare --user --map-root-user true; then continue; fi
    export COMMAND="touch $BATS_TEST_TMPDIR/ran"
    rm -rf "$folder/images"
    bash -c "exec $line" </dev/null 3>&-
    [[ -e $BATS_TEST_TMPDIR/ran ]]
    rm "$BATS_TEST_TMPDIR/ran"
    bash -c "exec $line" </dev/null 3>&-
    [[ ! -e $BATS_TEST_TMPDIR/ran ]]
    rm -r "$folder/images"
    bash -c "exec $line" </dev/null 3>&-
    [[ -e $BATS_TEST_TMPDIR/ran ]]
    rm "$BATS_TEST_TMPDIR/ran"
  done
}

@test "the line of the recovery finds nothing to do where nothing is left" {
  local line
  line=$(sed -n 's/^ExecStart=//p' "$UNITS/stasis-recover.service")
  # shellcheck disable=SC2086
  capture ${line//\/usr\/bin\/stasis/stasis}
  assert_equal "$status" 0
}
