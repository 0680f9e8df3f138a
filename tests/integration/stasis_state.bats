#!/usr/bin/env bats
# What the kernel keeps for a process, over a suspend, over a dump and over plain CRIU with the plugin: `stasis-workload
# state` sets it in a CUDA process and in a child without CUDA, and says of each item whether it was kept.

load helpers
load stasis_lib
load stasis_jobs_lib

setup() { setup_stasis; }
teardown() {
  end_stasis
  local kind id
  cat "$BATS_TEST_TMPDIR"/*-file 2>/dev/null | while read -r kind id; do ipcrm "$kind" "$id" 2>/dev/null || true; done
}

# start_probe [OPTION...]
start_probe() {
  report=$BATS_TEST_TMPDIR/report
  start_target state --report "$report" --locks "$@"
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "$TARGET" "${CHILDREN[@]}"
}

# Those that a dump says it loses.
known='at a time of day$|mbind|F_NOTIFY|PR_SET_TSC|PR_SET_SYSCALL_USER_DISPATCH'

# ask NAME: what each has become of goes to $report.NAME.cuda and $report.NAME.plain.
ask() {
  local which
  touch "$report.ask"
  wait_until 60 eval '[[ -e $report.cuda && -e $report.plain ]]' || { cat "$TARGET_LOG" >&2; return 1; }
  rm "$report.ask"
  for which in cuda plain; do mv "$report.$which" "$report.$1.$which"; done
}

# lost_of FILE [SUBJECT]: the items that were lost, without the reasons.
lost_of() {
  grep -h ^lost "$1" >&2 || true  # with the reasons, where the test fails
  awk -F'\t' -v of="${2-}" '$1 == "lost" && (of == "" || $2 == of) { print $2 ": " $3 }' "$1"
}

@test "docs/what-survives.md says what a suspend and a dump keep" {
  need_root "CRIU"
  local lost
  start_probe --signal-threads
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  ask suspend
  # What is known to be lost is said before.
  capture stasis doctor "$TARGET" --no-trial --json
  assert_contains "$out" '"posix-timer"'
  assert_contains "$out" '"dnotify"'
  dump_it --file-locks
  assert_contains "$err" "timers by the clock of the day"
  assert_contains "$err" "(fcntl with F_NOTIFY)"
  capture stasis inspect "$image" --json
  lost=$(json "'; '.join(d['lost'])")
  assert_contains "$lost" "time stamp counter of threads other than the first (PR_SET_TSC)"
  assert_contains "$lost" "that system calls of threads become signals (PR_SET_SYSCALL_USER_DISPATCH)"
  assert_contains "$lost" "personality, NUMA policy and machine check policy"
  # Deadlines by the clock of the day are missed by so much where they move.
  sleep 0.5
  restore_it
  [[ $err != *"not as at the dump"* ]] || { echo "$err" >&2; return 1; }
  ask dump
  cat "$report".dump.* >&2
  local check=--check
  [[ ${STATE_TABLE-} != write ]] || check=
  "$BATS_TEST_DIRNAME/../../tools/state-table" $check --suspend "$report".suspend.* --dump "$report".dump.*
  nothing_left
}

@test "a program that was suspended is dumped, restored and resumed, and keeps as much" {
  need_root "CRIU"
  start_probe --signal-threads
  done_by suspend "$TARGET"
  dump_it --file-locks
  # Attached: the program's parent lives as long as it does, and so sends no signal either.
  stasis restore --images-dir "$image" >"$BATS_TEST_TMPDIR/attached" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 grep -q "^restored" "$BATS_TEST_TMPDIR/attached" || { cat "$BATS_TEST_TMPDIR/attached" >&2; return 1; }
  done_by resume "$TARGET"
  ask dump
  local which
  for which in cuda plain; do
    assert_equal "$(lost_of "$report.dump.$which" | grep -vE "$known")" "" "lost ($which)"
  done
}

@test "a program that runs on after a dump keeps as much, and its calls that wait go on" {
  need_root "CRIU"
  start_probe --signal-threads
  done_by dump "$TARGET" --images-dir "$image-first" --leave-running --file-locks --json
  # Who opened that would break the lease, and a signal would end the program.
  assert_contains "$(json "'; '.join(d['lost'])")" "report.lease.plain-file, which is open for writing"
  # Of calls that the kernel has made again once by restart_syscall.
  done_by dump "$TARGET" --images-dir "$image" --leave-running --file-locks
  ask running
  local which
  for which in cuda plain; do
    assert_equal "$(lost_of "$report.running.$which" | grep -vE "$known")" "" "lost ($which)"
  done
}

@test "system calls that wait are made again after plain CRIU with the plugin" {
  need_root "CRIU"
  start_probe
  local criu which
  criu=$(real_criu)
  mkdir "$image"
  "$criu" dump -D "$image" -t "$TARGET" -j --file-locks --libdir "$STASIS_BUILD/lib/stasis/criu" -o dump.log -v4
  wait_until 60 number_is_free
  "$criu" restore -D "$image" -j -d --file-locks --libdir "$STASIS_BUILD/lib/stasis/criu" -o restore.log -v4
  ask plugin
  for which in cuda plain; do
    assert_equal "$(lost_of "$report.plugin.$which" "system calls that wait")" "" "lost ($which)"
  done
}

@test "the plugin refuses a program whose files signal a thread, which plain CRIU cannot restore" {
  need_root "CRIU"
  start_probe --signal-threads
  mkdir "$image"
  if "$(real_criu)" dump -D "$image" -t "$TARGET" -j --file-locks --libdir "$STASIS_BUILD/lib/stasis/criu" -o dump.log -v4; then return 1; fi
  grep -q "has a file that signals a thread (descriptor" "$image/dump.log"
  target_goes_on
}

@test "a job that goes on from an image keeps as much, and gets no signal of its parent's end" {
  setup_job
  report=$BATS_TEST_TMPDIR/report
  job=(stasis-workload state --signal-threads --status "$TARGET_STATUS" --report "$report")
  start_run
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  start_run
  told "goes on from $images/000001 "
  ask job
  local which
  for which in cuda plain; do
    assert_equal "$(lost_of "$report.job.$which" | grep -vE "$known")" "" "lost ($which)"
  done
}

@test "a timerfd that was not read for long has all its expirations after a restore" {
  need_root "CRIU"
  setup_job
  cat >"$BATS_TEST_TMPDIR/timer.py" <<'END'
import ctypes, os, subprocess, sys, time
here = sys.argv[1]
child = subprocess.Popen(["stasis-workload", "memory", "--size", "1M", "--status", here])
libc = ctypes.CDLL(None)
timer = libc.timerfd_create(1, 0)
libc.timerfd_settime(timer, 0, (ctypes.c_long * 4)(0, 2000000, 0, 2000000), None)
time.sleep(1)
open(here + ".ready", "w")
while not os.path.exists(here + ".ask"): time.sleep(0.01)
with open(here + ".told.new", "w") as told: told.write(str(int.from_bytes(os.read(timer, 8), sys.byteorder)))
os.rename(here + ".told.new", here + ".told")
child.wait()
END
  (exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/timer.py" "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 test -e "$TARGET_STATUS.ready"
  wait_until 60 target_is_up
  dump_it
  python3 -S - "$image/manifest.json" <<'END'
import json, sys
timers = [t for p in json.load(open(sys.argv[1]))["processes"] for t in p["kernel_state"].get("timers", [])]
assert any(t["ticks"] >= 500 for t in timers), timers
END
  restore_it
  touch "$TARGET_STATUS.ask"
  wait_until 60 test -e "$TARGET_STATUS.told"
  (($(<"$TARGET_STATUS.told") >= 500))
}

@test "what cannot be put right is told, and the restore goes on" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  python3 -S "$BATS_TEST_DIRNAME/edit_manifest.py" "$image" '
p = m["processes"][0]
p["kernel_state"] = {"core_dump_filter": 0x7b, "threads": [{"tid": p["pid"], "cpus": "8000-8001",
    "memory_policy": "wild:0", "io_priority": 65535}],
    "timers": [{"fd": 0, "clock": 1, "flags": 1, "left": 5, "interval": 0, "ticks": 0, "clock_at_dump": 2**53 - 1}]}'
  restore_it --json
  json '"\n".join(d["notes"])' >"$BATS_TEST_TMPDIR/notes"
  cat "$BATS_TEST_TMPDIR/notes" >&2
  grep -q "process $TARGET: what a thread is bound to is not as at the dump" "$BATS_TEST_TMPDIR/notes"
  grep -q "IO priority" "$BATS_TEST_TMPDIR/notes"
  grep -q "'wild:0' is no policy that is known" "$BATS_TEST_TMPDIR/notes"
  grep -q "descriptor 0 is no timerfd" "$BATS_TEST_TMPDIR/notes"
  assert_equal "$(cat /proc/"$TARGET"/coredump_filter)" 0000007b
  target_goes_on
  restored_verifies
}

@test "a restore fails where the program could not run, or not as protected as it was" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  python3 -S "$BATS_TEST_DIRNAME/edit_manifest.py" "$image" 'm["processes"][0]["kernel_state"]["processor_state"] = [60]'
  refused 8 not-supported restore --images-dir "$image" --detach
  assert_contains "$err" "process $TARGET uses processor state 60"
  [[ ! -e /proc/$TARGET ]]
  python3 -S "$BATS_TEST_DIRNAME/edit_manifest.py" "$image" 'k = m["processes"][0]["kernel_state"]
del k["processor_state"]; k["deny_new_code"] = 1 << 30'
  refused 8 not-supported restore --images-dir "$image" --detach
  assert_contains "$err" "PR_SET_MDWE"
  python3 -S "$BATS_TEST_DIRNAME/edit_manifest.py" "$image" 'del m["processes"][0]["kernel_state"]["deny_new_code"]'
  restore_it
  target_goes_on
  restored_verifies
}

@test "an image of before, which says nothing of it, is restored" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  python3 -S "$BATS_TEST_DIRNAME/edit_manifest.py" "$image" 'for p in m["processes"]: del p["kernel_state"]'
  restore_it
  target_goes_on
  restored_verifies
}

# CRIU takes the tiles from a thread that it stops, and does not save them.
@test "a thread in the middle of a computation with AMX has its tiles after a refused dump and a suspend" {
  need_root "CRIU"
  grep -qw amx_tile /proc/cpuinfo || skip "this processor has no AMX"
  start_script amx_tiles.py
  for way in "" --leave-running "--host-memory criu"; do
    # shellcheck disable=SC2086
    refused 7 busy dump "$TARGET" --images-dir "$image" $way
    assert_contains "$err" "is in the middle of a computation with AMX"
    assert_contains "$err" "the dump is tried again"
    script_goes_on
    no_image
  done
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  script_goes_on
  # The last of more threads than are asked before: criu is kept from it.
  end_targets
  : >"$targets"
  start_script amx_tiles.py 80
  refused 7 busy dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "is in the middle of a computation with AMX"
  script_goes_on
  no_image
  nothing_left
}
