#!/usr/bin/env bats
# What a fleet reads of each operation: --metrics for Prometheus, --log-json for a collector of logs or the journal.

load helpers
load stasis_lib
load stasis_jobs_lib

setup() {
  setup_job
  metrics=$BATS_TEST_TMPDIR/metrics
  mkdir "$metrics"
  file=$metrics/stasis.prom
}
teardown() { end_stasis; }

# sample NAME LABELS: its value; nothing if it is not there.
sample() {
  python3 -S - "$file" "$1{uid=\"0\",$2}" <<'END'
import sys
for line in open(sys.argv[1]):
    name, _, value = line.rstrip("\n").rpartition(" ")
    if name == sys.argv[2]:
        print(value)
END
}

# records FILE EXPRESSION: of the records r there.
records() {
  python3 -S - "$1" "$2" <<'END'
import json, sys
r = [json.loads(line) for line in open(sys.argv[1])]
assert all({"time", "level", "message", "pid"} <= set(one) for one in r), r
print(eval(sys.argv[2]))
END
}

@test "operations add what they took, and failures their code" {
  start_target memory --size 8M
  done_by suspend "$TARGET" --metrics "$metrics"
  done_by suspend "$TARGET" --metrics "$metrics" # it was so
  done_by resume "$TARGET" --metrics "$metrics" --json
  done_by suspend "$TARGET" --metrics "$metrics" --quiet
  done_by resume "$TARGET" --metrics "$metrics"
  refused 3 no-such-process suspend 2147483647 --metrics "$metrics"
  assert_equal "$(sample stasis_operations_total 'verb="suspend",result="ok"')" 3
  assert_equal "$(sample stasis_operation_duration_seconds_count 'verb="suspend"')" 2
  assert_equal "$(sample stasis_operations_total 'verb="suspend",result="no-such-process"')" 1
  assert_equal "$(sample stasis_operations_total 'verb="resume",result="ok"')" 2
  assert_equal "$(sample stasis_downtime_seconds_count 'verb="suspend"')" 2
  (($(sample stasis_gpu_bytes_total 'verb="suspend"') >= 16 << 20))
  [[ -n $(sample stasis_phase_seconds_total 'verb="suspend",phase="checkpoint"') ]]
  assert_equal "$(stat -c %a "$file")" 644
  assert_equal "$(ls -A "$metrics")" "${file##*/}"
  target_verifies
}

@test "what cannot be added is said, and a directory that is not there is refused before anything is done" {
  start_target memory --size 8M
  refused 2 usage suspend "$TARGET" --metrics "$metrics/none"
  in_state running
  mkdir "$file"
  done_by suspend "$TARGET" --metrics "$metrics" --quiet
  assert_contains "$err" "no metrics: "
  done_by resume "$TARGET"
  target_verifies
}

restored_twice() { [[ $(sample stasis_operations_total 'verb="restore",result="ok"') == 2 ]]; }

@test "dumps and restores, by verbs and by a job, are in one file" {
  start_target memory --size 8M
  done_by dump "$TARGET" --images-dir "$image" --metrics "$metrics"
  wait_until 60 number_is_free
  done_by restore "$image" --detach --metrics "$metrics"
  restored_verifies
  (($(sample stasis_image_bytes_total 'verb="dump"') > 8 << 20))
  assert_equal "$(sample stasis_operations_total 'verb="restore",result="ok"')" 1
  TARGET_STATUS=$BATS_TEST_TMPDIR/job.status
  start_run --metrics "$metrics" --name measured
  job_is_up
  saves 000001
  done_by suspend measured --metrics "$metrics"
  done_by resume measured --metrics "$metrics"
  kill -TERM "$RUN"
  ends_with 75
  assert_equal "$(sample stasis_operations_total 'verb="dump",result="ok"')" 3
  assert_equal "$(sample stasis_operations_total 'verb="suspend",result="ok"')" 1
  start_run --metrics "$metrics" --log-json --name measured
  wait_until 60 restored_twice
  assert_equal "$(records "$RUN_LOG" '{(x["verb"], x["job"]) for x in r}')" "{('run', 'measured')}"
  kill -KILL "$RUN"
  ends_with 137
}

@test "a restored program that is attended is counted when it runs, not when it ends" {
  start_target memory --size 8M
  dump_it
  stasis restore "$image" --metrics "$metrics" --log-json >/dev/null 2>"$BATS_TEST_TMPDIR/restore.log" 3>&- &
  local restore=$!
  wait_until 60 test -e "$file"
  assert_equal "$(sample stasis_operations_total 'verb="restore",result="ok"')" 1
  target_goes_on
  kill -KILL "$TARGET"
  wait "$restore" || true
  assert_equal "$(sample stasis_operations_total 'verb="restore",result="ok"')" 1
  assert_equal "$(records "$BATS_TEST_TMPDIR/restore.log" '[x["image_bytes"] > 0 for x in r if x["message"] == "done"]')" "[True]"
}

@test "with --log-json each line of standard error is a record" {
  start_target memory --size 8M
  local log=$BATS_TEST_TMPDIR/log
  stasis suspend "$TARGET" --log-json -v 2>"$log"
  assert_equal "$(records "$log" '{x["verb"] for x in r}')" "{'suspend'}"
  assert_equal "$(records "$log" 'sorted({x["level"] for x in r})')" "['debug', 'note']"
  assert_equal "$(records "$log" '[x["result"] for x in r if x["message"] == "done" and 0 < x["standstill_seconds"] <= x["seconds"]]')" "['ok']"
  # Its result goes where it went, and is the same.
  stasis resume "$TARGET" --log-json --json 2>"$log" | python3 -IS -c 'import json, sys; assert json.load(sys.stdin)["ok"]'
  assert_equal "$(records "$log" 'r[-1]["message"]')" done
  (! stasis suspend 2147483647 --log-json 2>"$log")
  assert_equal "$(records "$log" '[x["code"] for x in r if x["level"] == "error" and x["remedy"]]')" "['no-such-process']"
  (! stasis run --log-json --json -- /nonexistent >"$BATS_TEST_TMPDIR/out" 2>"$log")
  assert_equal "$(records "$log" '[x["code"] for x in r if x["level"] == "error"]')" "['io']"
  (! stasis suspend --log-json 1 2 2>"$log")
  assert_equal "$(records "$log" '[x["code"] for x in r]')" "['usage']"
  target_verifies
}

@test "where standard error is the journal its fields are set" {
  start_target memory --size 8M
  cat >"$BATS_TEST_TMPDIR/journal.py" <<'END'
import os, socket, struct, subprocess, sys
os.makedirs("/run/systemd/journal", exist_ok=True)
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind("/run/systemd/journal/socket")
stream = open(sys.argv[1], "w")
where = os.fstat(stream.fileno())
env = dict(os.environ, JOURNAL_STREAM=f"{where.st_dev}:{where.st_ino}")
done = subprocess.run(["stasis", "suspend", sys.argv[2], "--log-json"], stderr=stream, env=env, timeout=60)
assert done.returncode == int(sys.argv[3]), done
s.settimeout(5)
records = []
while not records or "MESSAGE" not in records[-1] or records[-1].get("PRIORITY") == "5" and records[-1]["MESSAGE"] != "done":
    data, fields = s.recv(1 << 20), {}
    while data:
        name, data = data.split(b"\n", 1)
        size = struct.unpack("<Q", data[:8])[0]
        fields[name.decode()] = data[8:8 + size].decode()
        assert data[8 + size:9 + size] == b"\n"
        data = data[9 + size:]
    assert fields["SYSLOG_IDENTIFIER"] == "stasis" and fields["STASIS_VERB"] == "suspend", fields
    records.append(fields)
assert os.path.getsize(sys.argv[1]) == 0
print(records[-1])
END
  # shellcheck disable=SC2016
  local journal='mkdir -p /run/systemd && mount -t tmpfs tmpfs /run/systemd && exec python3 "$@"'
  capture unshare --mount bash -c "$journal" bash "$BATS_TEST_TMPDIR/journal.py" "$BATS_TEST_TMPDIR/stderr" "$TARGET" 0
  assert_equal "$status" 0
  assert_contains "$out" "'STASIS_RESULT': 'ok'"
  capture unshare --mount bash -c "$journal" bash "$BATS_TEST_TMPDIR/journal.py" "$BATS_TEST_TMPDIR/stderr" 2147483647 3
  assert_equal "$status" 0
  assert_contains "$out" "'PRIORITY': '3'"
  assert_contains "$out" "'STASIS_CODE': 'no-such-process'"
  done_by resume "$TARGET"
  target_verifies
}
