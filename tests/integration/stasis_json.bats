#!/usr/bin/env bats
# What each verb says with --json keeps to docs/schema, errors included.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
  python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("jsonschema") is None)' ||
    skip "no python3-jsonschema"
  outputs=()
}
teardown() { end_stasis; }

SCHEMAS=$BATS_TEST_DIRNAME/../../docs/schema

# as_in NAME STATUS ARGUMENT...: stasis ends so, and what it says has to be as that schema has it (keeps_to_schemas).
as_in() {
  local name=$1 expected=$2
  shift 2
  capture timeout -k 5 120 stasis "$@" --json
  ((status == expected)) || { printf '%s: status %s\n%s%s' "$*" "$status" "$out" "$err" >&2 && return 1; }
  outputs+=("$name" "$BATS_TEST_TMPDIR/said.${#outputs[@]}")
  printf '%s\n' "$out" >"${outputs[-1]}"
}

# All that as_in has seen, at once: Python's package takes long to start.
keeps_to_schemas() {
  ((${#outputs[@]} > 0))
  python3 "$BATS_TEST_DIRNAME/check_schema.py" "$SCHEMAS" "${outputs[@]}"
}

@test "the check of a schema can fail" {
  local said
  as_in version 0 --version
  keeps_to_schemas
  for said in 'version {"version": "1", "notes": [], "schema_version": 2}' 'suspend {"ok": true}' \
    'version {"version": "1", "notes": [], "schema_version": 1, "other": 1}'; do
    printf '%s' "${said#* }" >"$BATS_TEST_TMPDIR/wrong"
    outputs=(version "$BATS_TEST_TMPDIR/said.0" "${said%% *}" "$BATS_TEST_TMPDIR/wrong")
    run keeps_to_schemas
    assert_equal "$status" 1 "$said"
    assert_contains "$output" "${said%% *}: "
  done
}

@test "each verb keeps to its schema" {
  start_target memory --size 1M
  as_in ps 0 ps
  as_in doctor 0 doctor "$TARGET" --no-trial
  as_in attach 0 attach "$TARGET" --graphs-are-safe
  as_in attach 0 attach "$TARGET"
  assert_equal "$(json 'd["was_so"], len(d["attached"])')" "True 1"
  as_in suspend 0 suspend "$TARGET"
  assert_equal "$(json 'd["was_so"], d["standstill_seconds"] > 0')" "False True"
  as_in suspend 0 suspend "$TARGET"
  assert_equal "$(json 'd["was_so"], d["standstill_seconds"]')" "True None"
  as_in ps 0 ps
  as_in resume 0 resume "$TARGET"
  as_in dump 0 dump "$TARGET" "$image" --leave-running
  as_in inspect 11 inspect "$image"
  as_in dump 0 dump "$TARGET" "$image-2"
  as_in inspect 0 inspect "$image-2"
  as_in verify 0 verify "$image-2"
  as_in logs 0 logs "$image-2"
  as_in report 0 report "$image-2" -o "$BATS_TEST_TMPDIR/page.html"
  as_in restore 0 restore "$image-2" --detach
  as_in recover 0 recover "$TARGET"
  as_in recover 0 recover --all
  as_in explain 0 explain
  as_in explain 0 explain 801
  as_in explain 0 explain nccl
  as_in explain 0 explain "Error (criu/sk-inet.c:198): inet: Connected TCP socket"
  as_in config 0 config
  as_in version 0 --version
  keeps_to_schemas
}

@test "a program started by stasis run, its GPU content, a swap and what was left behind keep to the schemas" {
  start_agent_target_in_place() {
    TARGET_STATUS=$BATS_TEST_TMPDIR/status-$1 TARGET_LOG=$BATS_TEST_TMPDIR/log-$1
    (exec_on_gpu setsid stasis run --name "$1" -- stasis-workload memory --size 4M --status "$TARGET_STATUS") \
      </dev/null >"$TARGET_LOG" 2>&1 3>&- &
    TARGET=$!
    echo "$TARGET" >>"$targets"
    wait_until 60 target_is_up
  }
  start_agent_target_in_place first
  as_in ps 0 ps
  assert_contains "$(json '[(p["name"], p["since"][-1]) for p in d["processes"]]')" "('first', 'Z')"
  as_in dump 0 dump first "$image"
  as_in verify 0 verify "$image"
  as_in inspect 0 inspect "$image"
  assert_equal "$(json 'd["name"]')" first
  as_in restore 0 restore "$image" --detach
  at_end_kill "$(json 'd["pid"]')"
  start_agent_target_in_place second
  as_in suspend 0 suspend second
  as_in swap 0 swap first second
  STASIS_FAULT=checkpoint.after:kill capture stasis suspend second
  as_in ps 0 ps
  as_in recover 0 recover --all
  keeps_to_schemas
}

@test "errors keep to their schema" {
  as_in error 3 suspend 999999
  as_in error 2 dump 1
  as_in error 2 dmup
  as_in error 127 run --json -- /no/such/program
  as_in error 10 inspect /nonexistent
  as_in error 3 doctor 999999
  STASIS_LIBCUDA=/nonexistent as_in error 8 ps
  start_target managed
  as_in error 8 suspend "$TARGET"
  assert_equal "$(json 'd["error"]["obstacles"][0]["id"]')" managed-memory
  STASIS_SIM_FAULTS="lock:error=999" as_in error 8 suspend "$TARGET" --ignore-obstacles
  assert_equal "$(json 'd["error"]["driver"]["number"]')" 999
  keeps_to_schemas
}

@test "an error is JSON where --format json asks for it, too" {
  local given
  for given in "--format json" "--format=json"; do
    # shellcheck disable=SC2086
    capture stasis ps $given --timeout x
    assert_equal "$status" 2 "status"
    assert_equal "$(json 'd["error"]["code"]')" usage
  done
}

@test "ps --format csv has its columns by name" {
  start_target memory --size 1M
  done_by ps --format csv --columns pid,state,command
  assert_equal "$(head -1 <<<"$out")" "pid,state,command"
  grep -q "^$TARGET,running,stasis-workload memory" <<<"$out"
  done_by ps --format csv
  assert_equal "$(head -1 <<<"$out")" "pid,user,state,path,gpus,gpu_bytes,since,operation,name,command"
  # Watched, it has one header.
  stasis ps --watch 0.1 --format csv --columns pid,state >"$BATS_TEST_TMPDIR/csv" 3>&- &
  local watch=$!
  seen_thrice() { (($(grep -cx "$TARGET,running" "$BATS_TEST_TMPDIR/csv") >= 3)); }
  wait_until 60 seen_thrice
  kill "$watch"
  wait "$watch" || true
  assert_equal "$(head -1 "$BATS_TEST_TMPDIR/csv")" pid,state
  assert_equal "$(grep -c pid,state "$BATS_TEST_TMPDIR/csv")" 1
  assert_equal "$(grep -cvxE 'pid,state|[0-9]+,[a-z]+' "$BATS_TEST_TMPDIR/csv")" 0
  refused 2 usage ps --columns pid,colour
  assert_contains "$err" "'colour'"
  done_by ps --format json
  assert_equal "$(json "[p['state'] for p in d['processes'] if p['pid'] == $TARGET]")" "['running']"
}
