#!/usr/bin/env bats
# stasis inspect and stasis logs: what is in an image, whether it can be restored here, and what CRIU said.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
}
teardown() { end_stasis; }

check_of() { json "[c['error']['code'] if not c['ok'] else 'ok' for c in d['checks'] if c['id'] == '$1'][0]"; }

@test "an image is described, and can be restored" {
  start_target memory --size 32M
  dump_it --file-locks
  capture stasis inspect "$image" --json
  assert_equal "$status" 0
  assert_equal "$(json 'd["restorable"]')" True
  assert_equal "$(json 'd["pid"]')" "$TARGET"
  assert_equal "$(json 'd["simulated"]')" True
  assert_equal "$(json 'd["image_bytes"] == sum(s["bytes"] for s in d["sizes"])')" True
  assert_equal "$(json '"; ".join(d["options"])')" --file-locks
  # What was on the GPU is in the process's memory.
  assert_equal "$(json "[s['bytes'] for s in d['sizes'] if s['what'] == 'memory of process $TARGET'][0] > 32 << 20")" True
  assert_equal "$(json '{p["name"] for p in d["phases"]} >= {"lock", "checkpoint", "criu"}')" True
  assert_equal "$(json 'all(c["ok"] for c in d["checks"]) and len(d["checks"])')" 10
  assert_equal "$(json '(d["here"]["kernel_release"], d["here"]["simulated"], d["here"]["criu_version"] == d["criu_version"])')" "('$(uname -r)', True, True)"
  capture stasis inspect "$image" --verify
  assert_equal "$status" 0
  [[ $out == *"tree "*" $TARGET "*"stasis-workload memory"*"[CUDA, running"* ]]
  [[ $out == *"can be restored here, as far as known"* ]]
  # And not the defaults.
  assert_contains "$out" "options   --file-locks"
  [[ $out != *"--ghost-limit"* && $out != *"--manage-cgroups"* ]]
  restore_it
  target_goes_on
}

@test "a directory without an option is the image's, and a job's stands for its newest image" {
  local jobs=$BATS_TEST_TMPDIR/job
  mkdir "$jobs"
  start_target memory --size 4M
  done_by dump "$TARGET" "$jobs/000001" --leave-running
  done_by dump "$TARGET" "$jobs/000002"
  mkdir "$jobs/000003" "$jobs/000004.partial-1" # no images
  capture stasis inspect "$jobs" --json
  assert_equal "$(json 'd["images_dir"]')" "$jobs/000002"
  assert_contains "$(json 'd["notes"]')" "the newest image of that job: $jobs/000002"
  done_by verify "$jobs"
  assert_contains "$err" "the newest image of that job: $jobs/000002"
  done_by restore "$jobs" --detach
  target_goes_on
  refused 10 image-incomplete verify "$jobs/000003"
  # By its name, also from within.
  capture bash -c 'cd "$1" && stasis inspect . --json' _ "$jobs/000002"
  assert_equal "$(json 'd["images_dir"]')" "$jobs/000002"
}

@test "why an image cannot be restored is said for each reason, and the first is the exit status" {
  start_target memory --size 4M
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  capture env STASIS_CRIU=/no/such/criu stasis inspect "$image" --json
  assert_equal "$status" 9
  assert_equal "$(json 'd["restorable"]')" False
  assert_equal "$(check_of criu)" criu-missing
  assert_equal "$(check_of process-numbers)" pid-in-use
  assert_equal "$(check_of files)" ok
  capture stasis inspect "$image"
  assert_equal "$status" 11
  [[ $out == *"cannot be restored: the image needs process number $TARGET, which is in use"*"what to do: "*unshare* ]]
  capture env STASIS_LIBCUDA=/no/such/driver stasis inspect "$image" --json
  assert_equal "$(check_of driver)" driver-missing
}

@test "the tree, its ports and its shared memory are shown" {
  start_target tree --children 2 --size 2M
  dump_it
  capture stasis inspect "$image"
  assert_equal "$status" 0
  assert_equal "$(grep -c 'CUDA, running' <<<"$out")" "$(stasis inspect "$image" --json | python3 -IS -c 'import json, sys; print(sum(p["cuda"] for p in json.load(sys.stdin)["processes"]))')"
  [[ $out == *"├─ "*"└─ "* ]]
}

@test "a damaged file is found by its size, or by --verify, and a damaged manifest at once" {
  start_target memory --size 4M
  dump_it
  local pages
  pages=$(find "$image/criu" -name 'pages-*' -size +1M | head -n 1)
  spoil_byte "$pages" 100000
  capture stasis inspect "$image" --json
  assert_equal "$status" 0
  capture stasis inspect "$image" --verify --json
  assert_equal "$status" 10
  assert_equal "$(check_of checksums)" image-corrupt
  truncate -s -1 "$pages"
  capture stasis inspect "$image" --json
  assert_equal "$(check_of files)" image-corrupt
  sed -i 's/"hostname": "/&x/' "$image/manifest.json"
  capture stasis inspect "$image" --json
  assert_equal "$status" 10
  assert_equal "$(json 'd["error"]["code"]')" image-corrupt
  capture stasis inspect "$BATS_TEST_TMPDIR"
  assert_equal "$status" 10
  [[ $err == *image-incomplete* ]]
}

@test "pagemaps that lie, are links or too short do no harm" {
  start_target memory --size 2M
  dump_it
  local map=$image/criu/pagemap-$TARGET.img
  cp "$map" "$BATS_TEST_TMPDIR/map"
  local damage
  for damage in 'truncate -s 13 "$map"' 'printf "\xff%.0s" {1..200} >"$map"' 'ln -sf /dev/zero "$map"' 'rm "$map" && mkfifo "$map"' 'rm "$map"'; do
    eval "$damage"
    capture timeout 60 stasis inspect "$image" --json
    assert_equal "$(check_of files)" image-corrupt "after $damage"
    assert_equal "$(json 'any("not known whose" in s["what"] for s in d["sizes"])')" True
    rm -f "$map"
    cp "$BATS_TEST_TMPDIR/map" "$map"
  done
}

@test "logs of a dump that failed and of a restore are shown with what they mean" {
  capture stasis logs "$BATS_TEST_TMPDIR/image"
  assert_equal "$status" 10
  start_target memory --size 2M
  capture stasis dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/image"
  assert_equal "$status" 0
  capture stasis logs "$BATS_TEST_TMPDIR/image"
  assert_equal "$status" 0
  [[ $out == "$BATS_TEST_TMPDIR/image/log/dump.log  (20"*"no errors"* ]]
  capture stasis logs "$BATS_TEST_TMPDIR/image" --full
  [[ $out == *"Dumping finished successfully"* ]]
  printf '%s\n' '(00.01) Error (criu/sk-inet.c:1): inet: Connected TCP socket, consider using --tcp-established option.' \
    $'(00.02) Error (criu/x.c:1): \e[31mred' >"$BATS_TEST_TMPDIR/image.failed-dump.log"
  capture stasis logs "$BATS_TEST_TMPDIR/image/" --json
  assert_equal "$(json 'd["logs"][0]["diagnosis"]["code"]')" criu-failed
  assert_equal "$(json 'len(d["logs"])')" 2
  capture stasis logs "$BATS_TEST_TMPDIR/image"
  [[ $out == "$BATS_TEST_TMPDIR/image.failed-dump.log"*"Connected TCP socket"*"what to do: dump it with --tcp-established"*"/log/dump.log"* ]]
  [[ $out != *$'\e'* ]]
  # By its own path, as messages name it: that one alone.
  done_by logs "$BATS_TEST_TMPDIR/image/log/dump.log"
  assert_contains "$out" "$BATS_TEST_TMPDIR/image/log/dump.log  (20"
  [[ $out != *"failed-dump"* ]]
  done_by logs "$BATS_TEST_TMPDIR/image.failed-dump.log" --full
  assert_contains "$out" "Connected TCP socket"
  # Of a job: the newest image's, and those of saves that failed, which lie in its folder.
  mkdir "$BATS_TEST_TMPDIR/job"
  mv "$BATS_TEST_TMPDIR/image" "$BATS_TEST_TMPDIR/job/000003"
  mv "$BATS_TEST_TMPDIR/image.failed-dump.log" "$BATS_TEST_TMPDIR/job/000004.failed-dump.log"
  capture stasis logs "$BATS_TEST_TMPDIR/job"
  assert_equal "$status" 0
  [[ $out == *"/job/000004.failed-dump.log"*"/job/000003/log/dump.log"* ]]
  assert_contains "$err" "the newest image of that job: $BATS_TEST_TMPDIR/job/000003"
}

# edited STATEMENTS: the manifest of a copy of the image is changed so; $edited is the copy.
edited() {
  edited=$BATS_TEST_TMPDIR/edited
  rm -rf "$edited"
  cp -r "$image" "$edited"
  python3 -S "$BATS_TEST_DIRNAME/edit_manifest.py" "$edited" "$1"
}

@test "what an image says is shown and not obeyed, and no size of it takes long" {
  start_target memory --size 1M
  dump_it
  edited 'm["processes"] += [process(1000000 + i, 1000000 + i - 1 if i else m["root_pid"]) for i in range('$(times 10000 30000)')]'
  capture timeout 60 stasis inspect "$edited"
  [[ $out == *"… and "*" more; --json shows all"* ]]
  ((${#out} < 300000))
  edited 'm["processes"] += [process(1000001, 1000002), process(1000002, 1000001)]'
  capture timeout 60 stasis inspect "$edited"
  assert_contains "$out$err" image-corrupt
  # It was quadratic.
  edited 'm["files"] = sorted(m["files"] + [{"path": f"criu/z{i}", "size": 0, "checksum": "0" * 32} for i in range(60000)], key=lambda f: f["path"])'
  capture timeout 60 stasis inspect "$edited" --json
  assert_equal "$(check_of files)" image-corrupt
  edited 'm["hostname"] = "h\nhere      forged\x1b[2J\u202e"; m["processes"][0]["command"] = ["a\nhere      forged"]; m["gpus"][0]["name"] = "g\nhere      forged"'
  capture stasis inspect "$edited"
  assert_equal "$status" 0
  [[ $out != *$'\e'* ]]
  assert_equal "$(grep -c '^ *here .*forged' <<<"$out")" 0
  [[ $out != *$'\xe2\x80\xae'* ]]
  edited 'm["gpus"][0]["uuid"] = "nonsense"; m["processes"][0]["gpu_memory"] = []'
  capture stasis inspect "$edited" --json
  assert_equal "$(check_of gpus)" image-corrupt
}

# listens_at ADDRESS PORT: another program does, from now on.
listens_at() {
  python3 -c 'import socket, sys, time
s = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
s.bind((sys.argv[1], int(sys.argv[2]))); s.listen(); open(sys.argv[3], "w"); time.sleep(300)' \
    "$1" "$2" "$BATS_TEST_TMPDIR/up" 3>&- &
  at_end_kill $!
  wait_until 60 test -e "$BATS_TEST_TMPDIR/up"
  rm "$BATS_TEST_TMPDIR/up"
}
@test "a port that the job needs is looked at, with its address, and so is who asks" {
  local port
  start_listening
  dump_it
  listens_at 127.0.0.2 "$port"
  capture stasis inspect "$image" --json
  assert_equal "$(check_of tcp-ports)" ok
  restore_it
  # A connection would be remembered for a minute.
  grep -q "0100007F:$(printf %04X "$port") 00000000:0000 0A " /proc/net/tcp
  target_goes_on
  kill -9 -- -"$TARGET"
  wait_until 60 number_is_free
  listens_at ::ffff:127.0.0.1 "$port"
  capture stasis inspect "$image" --json
  assert_equal "$(check_of tcp-ports)" busy
  assert_contains "$out" "TCP port 127.0.0.1:$port"
  refused 7 busy restore --images-dir "$image" --detach
  assert_contains "$err" "ss -anpt 'sport = :$port'"
  chmod -R a+rX "$image"
  let_others_in
  capture setpriv --reuid 65534 --regid 65534 --clear-groups env STASIS_STATE_DIR="$BATS_TEST_TMPDIR/other" "$(command -v stasis)" inspect "$image" --json
  ((status != 0))
  [[ $out == *not-permitted* || $err == *not-permitted* ]]
}

@test "of several reasons, inspect gives that one first for which a restore is refused" {
  start_target memory --size 4M
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  chmod -R a+rX "$image"
  let_others_in
  local other=(setpriv --reuid 65534 --regid 65534 --clear-groups env "STASIS_STATE_DIR=$BATS_TEST_TMPDIR/other")
  capture "${other[@]}" "$(command -v stasis)" inspect "$image" --json
  assert_equal "$(check_of process-numbers)" pid-in-use
  assert_equal "$(check_of permissions)" not-permitted
  local inspected=$status
  capture "${other[@]}" "$(command -v stasis)" restore "$image" --detach
  assert_equal "$status" "$inspected"
  target_verifies
}

@test "a log that may not be read is not one without errors" {
  start_target memory --size 1M
  dump_it
  echo '(00.01) Error (criu/x.c:1): No space left on device' >"$image/log/restore-20261122T040000Z.log.2"
  ln -s /etc/passwd "$image/log/link.log"
  mkfifo "$image/log/pipe.log"
  touch "$image/log/"$'zz.log  (2030)\n  Error: forged\n.log'
  capture timeout 60 stasis logs "$image"
  assert_equal "$status" 0
  [[ $out == *"/log/restore-20261122T040000Z.log.2  ("*"the disk is full"* ]]
  assert_equal "$(grep -c '^  Error: forged' <<<"$out")" 0
  assert_equal "$(stasis logs "$image" --json | python3 -IS -c 'import json, sys; print(len(json.load(sys.stdin)["logs"]))')" 3
  (cd "$image" && capture stasis logs . && [[ $out == *"$image/log/"* ]])
  chmod 0755 "$image" "$image/log"
  chmod 0600 "$image"/log/*.log
  let_others_in
  capture setpriv --reuid 65534 --regid 65534 --clear-groups "$(command -v stasis)" logs "$image"
  [[ $out != *"dump.log"*"no errors"*"/log/restore"* ]]
  [[ $out == *"cannot be read: "* ]]
  chmod 0700 "$image/log"
  capture setpriv --reuid 65534 --regid 65534 --clear-groups "$(command -v stasis)" logs "$image"
  assert_equal "$status" 5
  capture stasis logs "$image" --full --json
  assert_equal "$status" 2
}

@test "an image of an older writer is restored: what its manifest lacks counts as unknown" {
  start_target memory --size 1M
  dump_it
  # All that the format says may be missing, and this image need not have.
  edited '
for name in ("beside", "job_name", "socket_state"):
  m.pop(name, None)
for one in m["phases"]:
  one.pop("begins_microseconds", None)
for one in m["processes"]:
  for name in ("threads", "tcp_ports", "kernel_state"):
    one.pop(name, None)
'
  ! grep -qE '"(beside|socket_state|begins_microseconds|threads|kernel_state)"' "$edited/manifest.json" || return 1
  grep -q '"format": 1,' "$edited/manifest.json"
  grep -q '"kernel_state"' "$image/manifest.json" # so it was there
  done_by verify "$edited"
  done_by inspect "$edited"
  done_by restore "$edited" --detach
  target_goes_on
}
