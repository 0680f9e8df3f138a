#!/usr/bin/env bats
# stasis report: an image as one HTML page, and what a browser makes of it.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
  page=$BATS_TEST_TMPDIR/report.html
}
teardown() { end_stasis; }

# edited STATEMENTS: the manifest of a copy of the image is changed so; $edited is the copy.
edited() {
  edited=$BATS_TEST_TMPDIR/edited
  rm -rf "$edited"
  cp -r "$image" "$edited"
  python3 -S "$BATS_TEST_DIRNAME/edit_manifest.py" "$edited" "$1"
}

has() { grep -qF -- "$1" "$page" || { echo "the page does not say: $1" >&2; return 1; }; }

# Nothing of a page that could not be written, in the folder of $page.
no_page() {
  assert_equal "$(find "${page%/*}" -maxdepth 1 -name '*report*')" "" "left"
}

need_browser() {
  BROWSER=$(command -v chromium-headless-shell || command -v chromium) ||
    skip "no chromium-headless-shell and no chromium"
}

# Opens $page; $out is what browser.py saw. In every view nothing may stand out of the page or its drawing, nothing
# may be asked for but the page itself, and the browser may have nothing to complain of.
opens() {
  capture timeout -k 5 120 python3 "$BATS_TEST_DIRNAME/browser.py" "$BROWSER" "$page"
  ((status == 0)) || { printf '%s%s' "$out" "$err" >&2; return 1; }
  assert_equal "$(json 'd["requests"]')" "['file://$page']"
  assert_equal "$(json 'd["messages"]')" "[]"
  assert_equal "$(json '{n: v for n, v in d["views"].items() if v["overflow"] or v["out"] or v["bars_out"] or v["texts_out"]}')" "{}"
  assert_equal "$(json 'len(d["views"])')" 9
  assert_equal "$(json 'd["tree"].get("nameless", 0)')" 0
}

# drawn BARS PARTS, in each view.
drawn() { assert_equal "$(json '{(v["drawings"], v["bars"], v["amounts"]) for v in d["views"].values()}')" "{(1, $1, $2)}" "drawings, bars, parts"; }

@test "an image becomes one page, for its owner alone" {
  start_target tree --children 2 --size 2M
  dump_it --file-locks
  (umask 0 && done_by report "$image" -o "$page")
  assert_equal "$(stat -c %a "$page")" 600
  for words in 'Can be restored on this machine' 'Simulated GPU.' "Process $TARGET:" '--file-locks' 'checkpoint' \
    "memory of process $TARGET" "$(uname -r)" 'CUDA, running' 'dump.log' 'No errors.' 'The memory pages were not read'; do
    has "$words"
  done
  assert_equal "$(find "$BATS_TEST_TMPDIR" -maxdepth 1 -name '.stasis*')" ""
  done_by report "$image" -o "$page" --verify --force --json
  assert_equal "$(json '(d["ok"], d["restorable"], d["exit_status"], d["report"])')" "(True, True, 0, '$page')"
  has 'Every byte was read and compared.'
  # The image is as it was.
  restore_it
}

@test "a page goes to standard output, and nothing else does" {
  start_target memory --size 1M
  dump_it
  done_by report "$image" -o -
  [[ $out == '<!DOCTYPE html>'*'</html>'* ]]
  [[ $err == *"simulated GPU"* ]]
  printf '%s' "$out" >"$page"
  has 'lock'
  capture stasis report "$image" -o - --json
  assert_equal "$status" 2
  capture bash -c 'stasis report "$1" -o - >/dev/full' _ "$image"
  assert_equal "$status" 1
  refused 2 usage report "$image"
}

@test "no file is replaced unasked, and nothing but a file ever" {
  start_target memory --size 1M
  dump_it
  echo mine >"$page"
  refused 2 usage report "$image" -o "$page"
  assert_contains "$err" --force
  assert_equal "$(<"$page")" mine
  chmod 0644 "$page"
  done_by report "$image" -o "$page" -f
  has '<!DOCTYPE html>'
  assert_equal "$(stat -c %a "$page")" 600
  local other=$BATS_TEST_TMPDIR/other
  mkdir "$other"
  mkfifo "$other/pipe"
  ln -s "$page" "$other/link"
  for output in "$other" "$other/pipe" "$other/link" /dev/null "$BATS_TEST_TMPDIR/none/page"; do
    capture timeout 60 stasis report "$image" -o "$output" --force
    ((status == 2 || status == 1)) && [[ $err == *"what to do: "* ]] || { echo "$output: $status $err" >&2; return 1; }
  done
  [[ -c /dev/null && -p $other/pipe && -L $other/link ]]
  # There it would be taken for damage.
  for output in "$image/report.html" "$image/criu/report.html" "$image/../image/log/report.html"; do
    refused 2 usage report "$image" -o "$output"
  done
  refused 2 usage report "$image" -o ..
  assert_contains "$err" ".. is no file's name"
  done_by inspect "$image"
}

@test "why an image cannot be restored is in the page, and the exit status is that of inspect" {
  start_target memory --size 1M
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  capture env STASIS_CRIU=/no/such/criu stasis report "$image" -o "$page"
  assert_equal "$status" 9
  assert_contains "$out" "the image cannot be restored here: "
  assert_contains "$out" "1 more in the page"
  for words in 'Cannot be restored here, now' criu-missing pid-in-use "the image needs process number $TARGET" '2 of 10 checks'; do has "$words"; done
  capture env STASIS_LIBCUDA=/no/such/driver stasis report "$image" -o "$page" -f
  capture env STASIS_LIBCUDA=/no/such/driver stasis inspect "$image"
  assert_equal "$status" 8
  has driver-missing
}

@test "a job that runs on and is itself in the way leaves the exit status 0, with its port and most of the GPU in use" {
  export STASIS_SIM_GPUS=1x64M
  local log=$BATS_TEST_TMPDIR/counter.log
  (exec_on_gpu setsid stasis-counter --port 0 --gpu-memory 36M) </dev/null >"$log" 2>&1 3>&- &
  TARGET=$!
  at_end_kill "$TARGET"
  wait_until 60 grep -q listening "$log"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  capture stasis inspect "$image"
  assert_equal "$status" 11
  for code in out-of-gpu-memory pid-in-use busy; do assert_contains "$out" "($code)"; done
  done_by report "$image" -o "$page"
  assert_contains "$out" "the image cannot be restored here as long as the job runs: the image needs process number $TARGET"
  assert_contains "$out" "2 more in the page"
  done_by report "$image" -o "$page" --force --json
  assert_equal "$(json '(d["restorable"], d["exit_status"])')" "(False, 0)"
}

@test "so does a job in namespaces of its own, which is told by its name" {
  [[ $(id -u) == 0 ]] || skip "needs root: namespaces, CRIU"
  local log=$BATS_TEST_TMPDIR/counter.log port=$((20000 + RANDOM % 9000))
  (exec_on_gpu setsid stasis run --images-dir "$BATS_TEST_TMPDIR/job" --name "with-port-$$" -- stasis-counter --port "$port") \
    </dev/null >"$log" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 grep -q listening "$log"
  done_by dump "with-port-$$" --images-dir "$image" --leave-running
  capture stasis inspect "$image"
  assert_equal "$status" 7
  done_by report "$image" -o "$page"
  assert_contains "$out" "the image cannot be restored here as long as the job runs: a socket"
  kill -KILL $!
  wait_until 60 eval '! stasis ps --format csv | grep -q "with-port-$$"'
  done_by report "$image" -o "$page" --force
  [[ $out != *"cannot be restored"* ]]
}

@test "a damaged image has a page that says so; what is no image has none" {
  start_target memory --size 1M
  dump_it
  local pages
  pages=$(find "$image/criu" -name 'pages-*' -size +900k | head -n 1)
  spoil_byte "$pages" 100000
  capture stasis report "$image" -o "$page" --verify
  assert_equal "$status" 10
  has image-corrupt
  rm "$pages"
  capture stasis report "$image" -o "$page" -f
  assert_equal "$status" 10
  has "${pages##*/}"
  rm "$page"
  sed -i 's/"hostname": "/&x/' "$image/manifest.json"
  refused 10 image-corrupt report "$image" -o "$page"
  rm "$image/manifest.json"
  refused 10 image-incomplete report "$image" -o "$page"
  no_page
}

@test "a full disk is an error and leaves nothing, or what was there" {
  start_target memory --size 1M
  dump_it
  local small=$BATS_TEST_TMPDIR/small
  mkdir "$small"
  mount -t tmpfs -o size=16k tmpfs "$small" || skip "no file system can be mounted"
  echo "$small" >>"$BATS_TEST_TMPDIR/mounts"
  page=$small/report.html
  refused 11 no-space report "$image" -o "$page"
  no_page
  assert_equal "$(find "$small" -mindepth 1)" ""
  echo mine >"$page"
  refused 11 no-space report "$image" -o "$page" --force
  assert_equal "$(<"$page")" mine
  assert_equal "$(find "$small" -mindepth 1)" "$page"
  page=$BATS_TEST_TMPDIR/report.html
  capture bash -c 'ulimit -f 8; stasis report "$1" -o "$2"' _ "$image" "$page"
  ((status != 0 && status < 128))
  no_page
}

@test "logs are in the page with what they mean" {
  start_target memory --size 1M
  dump_it
  printf '%s\n' '(00.01) Error (criu/sk-inet.c:1): inet: Connected TCP socket, consider using --tcp-established option.' \
    '(00.02) Error (criu/x.c:1): <script>alert(1)</script>' >"$image/log/restore-20261122T040000Z.log"
  ln -s /etc/passwd "$image/log/link.log"
  done_by report "$image" -o "$page"
  has 'dump it with --tcp-established'
  has '&lt;script&gt;alert(1)&lt;/script&gt;'
  ! grep -q '<script\|link.log' "$page" || return 1
}

@test "a browser shows the page of an image at any width and on paper, and asks for nothing" {
  need_browser
  start_target tree --children 2 --size 8M
  dump_it
  done_by report "$image" -o "$page"
  done_by inspect "$image" --json
  local bars parts
  bars=$(json 'len(d["phases"]) + len(d["beside"])')
  # What each process has of the driver stands there, within the phase of that name.
  assert_equal "$(json 'sum(w["name"].startswith("driver: checkpoint ") for w in d["beside"])')" 2
  parts=$(json 'len(d["sizes"])')
  opens
  drawn "$bars" "$parts"
  # Tab leads to each bar, each table that may be wider than the page, and each link; a bar then tells
  # of itself.
  assert_equal "$(json 'sum(f.endswith("|visible") for f in d["focus"])')" "$bars"
  assert_equal "$(json 'sum("as a table" in f for f in d["focus"])')" 6
  assert_equal "$(json 'len(d["focus"])')" "$((bars + 6 + 1 + 9))"
  assert_equal "$(json '[d["tree"][r] for r in ("main", "navigation", "table", "group")]')" "[1, 1, 7, 1]"
}

@test "a browser shows an image's words and obeys none of them" {
  need_browser
  start_target memory --size 1M
  dump_it
  edited '
bad = "</title></style></script><script>document.title = 1</script><img src=http://127.0.0.1/x onerror=alert(1)>\" onfocus=\"document.title = 2\" style=\"color:red" + "\x1b[2J\u202e\u0000" + "W" * 3000
m["hostname"] = m["kernel_release"] = m["driver_version"] = m["stasis_version"] = bad
m["processes"][0]["command"] = [bad, bad]
m["processes"] += [dict(process(1000000 + i, 999999 + i if i else m["root_pid"]), command=[bad]) for i in range(40)]
m["phases"] = [{"name": bad, "microseconds": 2**53 - 1}, {"name": "none", "microseconds": 0}] * 30
m["gpus"][0]["name"] = m["gpus"][0]["pci_bus_id"] = bad
m["criu_options"]["external"] = [bad]
'
  mv "$edited" "$BATS_TEST_TMPDIR/"'<b onclick="x">&amp;'
  edited=$BATS_TEST_TMPDIR/'<b onclick="x">&amp;'
  printf '(00.01) Error (criu/x.c:1): %s\n' '<svg onload=alert(1)>' >"$edited/log/<i>.log"
  capture stasis report "$edited" -o "$page"
  # Some of it is no driver that there could be here.
  [[ -s $page ]] || { echo "$err" >&2; return 1; }
  opens
  drawn 40 "$(stasis inspect "$edited" --json | python3 -IS -c 'import json, sys; print(len(json.load(sys.stdin)["sizes"]))')"
  assert_equal "$(json 'd["title"]')" '<b onclick="x">&amp;: Stasis image report'
}
