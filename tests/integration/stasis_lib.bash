# For the tests of `stasis`: besides helpers.bash, the program itself, trees, images, and proof that
# nothing is left behind. A file of tests begins with
#   load helpers
#   load stasis_lib
#   setup() { setup_stasis; }
#   teardown() { end_stasis; }
#
# Standard output goes to $out and standard error to $err (see `capture`), the status to $status.

setup_stasis() {
  unset COLUMNS
  need_simulated "the verbs are tested on it; tests/gpu does the same on the real one"
  setup_driver
  others=$BATS_TEST_TMPDIR/others
  : >"$others"
  image=$BATS_TEST_TMPDIR/image
}

end_stasis() {
  local pid
  [[ -n ${targets:-} ]] || return 0
  while read -r pid; do
    kill -KILL "$pid" 2>/dev/null || true
  done <"$others"
  end_targets
  if [[ -e $BATS_TEST_TMPDIR/mounts ]]; then
    while read -r mount; do umount -l "$mount" 2>/dev/null || true; done <"$BATS_TEST_TMPDIR/mounts"
  fi
}

# To be killed at the end, besides targets.
at_end_kill() { printf '%s\n' "$@" >>"$others"; }

# --- Running stasis.

# done_by ARGUMENT...: stasis does it.
done_by() {
  capture timeout -k 5 120 stasis "$@"
  ((status == 0)) && return
  printf 'stasis %s: status %s\n%s%s' "$*" "$status" "$out" "$err" >&2
  # What CRIU did last, before the test's files go.
  [[ ! $err =~ "the whole log is "([^[:space:];]+) ]] || tail -n 60 "${BASH_REMATCH[1]}" >&2 || true
  return 1
}
suspended_and_resumed() {
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
}

# refused STATUS CODE ARGUMENT...: stasis refuses, with that status and code; something on standard
# error says what to do, and nothing is on standard output.
refused() {
  local expected=$1 code=$2
  shift 2
  refused_by "$expected" "$code" stasis "$@"
}

# The same of a command that runs stasis.
refused_by() {
  local expected=$1 code=$2
  shift 2
  capture timeout -k 5 120 "$@"
  if ((status != expected)) || [[ $err != *"[$code]"* || -n $out ]]; then
    printf '%s\n  status %s, expected %s [%s]\n%s%s' "$*" "$status" "$expected" "$code" "$out" "$err" >&2
    return 1
  fi
  [[ $code == interrupted ]] || assert_contains "$err" "what to do: "
}

# has_obstacle ID COMMAND...: that is refused because of such an obstacle, as a program reads it.
has_obstacle() {
  local id=$1
  shift
  capture timeout -k 5 120 "$@" --json
  assert_equal "$(json '[o["id"] for o in d["error"]["obstacles"]]')" "['$id']" "$out$err"
}

# What json.loads() ends in: the package that is around it takes as long to import as Python to start, thrice that for
# some two thousand questions.
json_reader='import _json, sys
class Strictly:
    strict, parse_float, parse_int = True, float, int
    object_hook = object_pairs_hook = parse_constant = None
text = sys.argv[1].strip()
d, end = _json.make_scanner(Strictly)(text, 0)
if end != len(text): raise ValueError("more than one JSON value")'

# json EXPRESSION: of $out, which must be one JSON object; Python's words, the object is d.
json() {
  python3 -IS -c "$json_reader
print($1)" "$out" && return
  printf 'of: %s\n' "$out" >&2
  return 1
}

# The bytes through which a tool that runs copies GPU memory.
ring_of() {
  python3 -IS -c 'import sys
print(sum(int(b, 16) - int(a, 16) for line in open(f"/proc/{sys.argv[1]}/maps") if "memfd:stasis-ring" in line
          for a, b in [line.split()[0].split("-")]))' "$1"
}

# trace FILE CATEGORY:NAME...: has these, and what is in one row lies beside or within each other.
trace() { python3 -IS -c "import json, sys
events = [e for e in json.load(open(sys.argv[1]))['traceEvents'] if e['ph'] == 'X']
assert all(e['dur'] >= 0 and e['ts'] >= 0 for e in events)
rows = {}
for e in sorted(events, key=lambda e: (e['ts'], -e['dur'])):
    row = rows.setdefault((e['pid'], e['tid']), [])
    while row and row[-1]['ts'] + row[-1]['dur'] <= e['ts'] + 0.01:
        row.pop()
    assert not row or e['ts'] + e['dur'] <= row[-1]['ts'] + row[-1]['dur'] + 0.01, (row[-1], e)
    row.append(e)
names = {(e['cat'], e['name']) for e in events}
missing = {tuple(word.split(':')) for word in sys.argv[2:]} - names
sys.exit(f'{missing} not in {names}' if missing else 0)" "$@"; }

# The CRIU that stasis takes.
real_criu() {
  local path
  path=${STASIS_CRIU:-$(command -v criu || true)}
  [[ -x $path ]] || path=/opt/stasis/criu/usr/sbin/criu
  echo "$path"
}

# Another user may come as far as the folder of this test, and to the program.
let_others_in() {
  local folder=$BATS_TEST_TMPDIR
  chmod a+rx "$folder"
  until [[ $folder == "$BATS_RUN_TMPDIR" || $folder == / ]]; do
    folder=$(dirname "$folder")
    chmod a+rx "$folder"
  done
  setpriv --reuid 65534 --regid 65534 --clear-groups test -x "$BATS_TEST_TMPDIR" -a -x "$(command -v stasis)" ||
    skip "another user cannot come here"
}

# --- What is so.

state_of() { cuda-checkpoint --get-state --pid "${1:-$TARGET}"; }

# in_state STATE [PID...]
in_state() {
  local expected=$1 pid
  shift
  for pid in "${@:-$TARGET}"; do assert_equal "$(state_of "$pid")" "$expected" "state of $pid"; done
}

# held_up: some target is at this moment in a call of the driver that a fault draws out (docs/simulated-driver.md).
# Neither `ps` nor the driver is asked: the driver answers no caller while it works for another.
# How many threads of this test's are in a call that a fault draws out.
count_held_up() {
  local one name count=0
  for one in /proc/[0-9]*/task/*/comm; do
    name=
    { read -r name <"$one"; } 2>/dev/null || true
    [[ $name == sim-held-up ]] || continue
    ! tr '\0' '\n' 2>/dev/null <"${one%/task/*}/environ" | grep -qxF "STASIS_SIM_DIR=$STASIS_SIM_DIR" || count=$((count + 1))
  done
  echo "$count"
}
held_up() { (($(count_held_up) > 0)); }
# works_on_it TOOL: that stasis has begun, and has come to the call that a fault draws out.
works_on_it() { has_text "\"owner\":$1," "$STASIS_STATE_DIR"/*.json && held_up; }
# stopped_at_work TOOL: it has come there, and stays until `kill -CONT`, however long what the test does meanwhile takes.
stopped_at_work() { wait_until 60 works_on_it "$1" && at_end_kill "$1" && kill -STOP "$1"; }
# The path of one that leaves its number in $BATS_TEST_TMPDIR/criu-number.
criu_by_number() {
  cat >"$BATS_TEST_TMPDIR/criu" <<END
#!/bin/bash
[[ \$1 != swrk ]] || echo \$\$ >"$BATS_TEST_TMPDIR/criu-number"
exec "$(real_criu)" "\$@"
END
  chmod +x "$BATS_TEST_TMPDIR/criu"
  echo "$BATS_TEST_TMPDIR/criu"
}

# Bytes in use on all simulated GPUs.
gpu_used() {
  local out
  out=$(stasis-sim-smi --json) && json 'sum(gpu["used_bytes"] for gpu in d["gpus"])'
}
# gpu_used_of INDEX
gpu_used_of() {
  local out
  out=$(stasis-sim-smi --json) && json "d['gpus'][$1]['used_bytes']"
}
gpu_is_free() { assert_equal "$(gpu_used)" 0 "GPU memory in use"; }

# No record of an operation, no half image, no criu that recover has to clear away.
nothing_left() {
  local left
  # A lock file without a record, of a tool killed between the two, means nothing.
  left=$(find "$STASIS_STATE_DIR" -name '*.json' -o -name '*.json.new' 2>/dev/null || true)
  left+=$(find "$BATS_TEST_TMPDIR" -maxdepth 2 -name '*.partial-*' -o -maxdepth 2 -name '*.replaced-*')
  assert_equal "$left" "" "left behind"
}

no_image() {
  [[ ! -e $image ]] || { echo "there is an image" >&2; ls -la "$image" >&2; return 1; }
}

# no_round_for SECONDS [FILE]: of TARGET, or of who keeps its rounds in that file.
no_round_for() {
  local before
  before=$(target_round "${2:-$TARGET_STATUS}")
  sleep "$1"
  [[ $(target_round "${2:-$TARGET_STATUS}") == "$before" ]]
}
# A round that was over when it was stopped may be told late.
stands_still() {
  no_round_for 0.3 || wait_until 30 no_round_for 1 || { echo "it runs: round $(target_round)" >&2; return 1; }
}

# There, and not just waiting to be collected.
lives() {
  local word state=''
  while read -r word state _ && [[ $word != State: ]]; do :; done 2>/dev/null <"/proc/${1:-$TARGET}/status" || return 1
  [[ $word == State: && $state != [ZX] ]]
}
# Reaped too: an image can be restored only when its numbers are free.
number_is_free() { [[ ! -e /proc/${1:-$TARGET} ]]; }

# The children of a process.
children_of() {
  local file children
  for file in /proc/"$1"/task/*/children; do
    children=()
    { read -ra children <"$file"; } 2>/dev/null || true
    ((${#children[@]} == 0)) || printf '%s\n' "${children[@]}"
  done
}

# A root without CUDA, two CUDA children, and below it one process without CUDA. Sets TARGET, CHILDREN.
start_tree() {
  start_target tree --children 2 "$@"
  mapfile -t CHILDREN < <(children_of "$TARGET")
  assert_equal "${#CHILDREN[@]}" 2 "children"
  at_end_kill "${CHILDREN[@]}"
}

# start_with PYTHON: below TARGET a CUDA process and a Python program that has done this. Sets CHILDREN.
start_with() {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  cat >"$BATS_TEST_TMPDIR/hold.py" <<END
import ctypes, fcntl, os, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
folder = sys.argv[1]
$1
open(folder + "/ready", "w").close()
time.sleep(300)
END
  # shellcheck disable=SC2016
  (exec_on_gpu setsid bash -c 'stasis-workload memory --size 1M --status "$1/status" & python3 "$1/hold.py" "$1" & wait' \
    bash "$BATS_TEST_TMPDIR") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  wait_until 60 test -e "$BATS_TEST_TMPDIR/ready"
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
}

# start_script FILE ARGUMENT...: a program of this folder as TARGET, which gets the status file and ARGUMENT, and says
# what is wrong before it ends. BEFORE: words before the program's.
start_script() {
  TARGET_LOG=$BATS_TEST_TMPDIR/target.log
  TARGET_STATUS=$BATS_TEST_TMPDIR/target.status
  rm -f "$TARGET_STATUS"
  # shellcheck disable=SC2086
  (exec_on_gpu setsid ${BEFORE:-} python3 -S "$BATS_TEST_DIRNAME/$1" "$TARGET_STATUS" "${@:2}") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
}
script_goes_on() {
  target_goes_on
  assert_equal "$(<"$TARGET_LOG")" ""
}

# start_tracer: of TARGET, as TRACER.
start_tracer() {
  python3 -IS - "$TARGET" <<'END' 3>&- &
import ctypes, sys, time
libc = ctypes.CDLL(None)
assert libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0  # PTRACE_SEIZE
time.sleep(60)
END
  TRACER=$!
  at_end_kill "$TRACER"
  wait_until 60 grep -q "^TracerPid:[[:space:]]*$TRACER" "/proc/$TARGET/status"
}

# restored_verifies [COUNT]: after a restore TARGET is no child of the test any more: ends it and
# reads its own verdict, or those of COUNT processes.
restored_verifies() {
  local lines
  kill -TERM "$TARGET"
  wait_until 60 number_is_free || { echo "it does not end" >&2; return 1; }
  lines=$(grep -c '^verified' "$TARGET_LOG") || true
  ((lines == ${1:-1})) && return
  cat "$TARGET_LOG" >&2
  return 1
}

# killed_in_the_middle PID...: the tool is killed, or fails, while memory of TARGET's that the driver cannot restore is given
# up or taken again: these processes run on, or `recover` makes them.
killed_in_the_middle() {
  local point
  for point in direct.detached direct.emptied direct.held checkpoint.after; do
    STASIS_FAULT=$point:kill capture stasis suspend "$TARGET"
    assert_equal "$status" 137 "$point"
    done_by recover --all
    target_goes_on
  done
  for point in direct.refill direct.filled direct.attach direct.attached; do
    done_by suspend "$TARGET"
    STASIS_FAULT=$point:kill capture stasis resume "$TARGET"
    assert_equal "$status" 137 "$point"
    done_by recover --all
    target_goes_on
  done
  for point in direct.closed direct.detached direct.emptied direct.held; do
    STASIS_FAULT=$point:error capture stasis suspend "$TARGET"
    ((status != 0))
    in_state running "$@"
    target_goes_on
  done
}

# swapped_with FIRST STATUS: TARGET is suspended and takes the place of FIRST, whose status file that is; then both run on.
swapped_with() {
  done_by suspend "$TARGET"
  done_by swap "$1" "$TARGET"
  target_goes_on
  done_by resume "$1"
  target_verifies
  TARGET=$1 TARGET_STATUS=$2 target_goes_on
}

# dump_it ARGUMENT...: dumps TARGET to $image; its number is free afterwards.
dump_it() {
  done_by dump "$TARGET" --images-dir "$image" "$@"
  wait_until 60 number_is_free
}

restore_it() {
  done_by restore --images-dir "$image" --detach "$@"
}

# stopped_below PID: its child has stopped itself.
stopped_below() { grep -qsE "^State:[[:space:]]+T" "/proc/$(pgrep -P "$1")/status"; }

# A GPU memory hog that takes what is free but for SIZE: for lack of room. Sets HOG.
start_hog() {
  local log=$BATS_TEST_TMPDIR/hog.log
  (exec_on_gpu setsid stasis-counter --gpu-memory "$1") </dev/null >"$log" 2>&1 3>&- &
  HOG=$!
  echo "$HOG" >>"$targets"
  wait_until 60 grep -q listening "$log"
}

# let_go_without_room WHEN: TARGET, which has 64 MiB and is suspended, is let go by the driver while its GPU of 256 MiB is
# full; cuda-checkpoint says until when it stands still.
let_go_without_room() {
  start_hog 220M
  cuda-checkpoint --action restore --pid "$TARGET"
  capture cuda-checkpoint --action unlock --pid "$TARGET"
  assert_equal "$status" 1
  assert_contains "$err" "running now; it stands still until $1"
  in_state running
  stands_still
}

# start_listening: a target of which a process listens on a port, in $port, to which a connection was closed just now.
# HALF=1: it has closed its side of another one, too, which the other side has not.
start_listening() {
  cat >"$BATS_TEST_TMPDIR/server.py" <<'EOF'
import socket, sys
server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen(8)
client = socket.socket()
client.connect(server.getsockname())
accepted, _ = server.accept()
accepted.close()  # first: it is the server's side that remembers
client.recv(1)
client.close()
if sys.argv[2:]:
    client = socket.create_connection(server.getsockname()); server.accept()[0].close(); client.recv(1)
with open(sys.argv[1], "w") as file:
    print(server.getsockname()[1], file=file)
while True:
    accepted, _ = server.accept()
    accepted.send(b"here")
    accepted.close()
EOF
  TARGET_LOG=$BATS_TEST_TMPDIR/listening.log TARGET_STATUS=$BATS_TEST_TMPDIR/listening.status
  # shellcheck disable=SC2016 # words of the inner shell
  (exec_on_gpu setsid bash -c 'python3 "$1" "$2" $4 & exec stasis-workload memory --size 4M --status "$3"' - \
    "$BATS_TEST_TMPDIR/server.py" "$BATS_TEST_TMPDIR/port" "$TARGET_STATUS" "${HALF-}") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  wait_until 60 test -s "$BATS_TEST_TMPDIR/port"
  port=$(<"$BATS_TEST_TMPDIR/port")
}
# closed_just_now: the kernel still remembers that connection.
closed_just_now() {
  grep -q ":$(printf %04X "$port") [0-9A-F]*:[0-9A-F]* 06 " /proc/net/tcp || skip "no connection is in TIME_WAIT here"
}
it_listens() {
  assert_equal "$(timeout 60 python3 -IS -c 'import socket, sys
print(socket.create_connection(("127.0.0.1", int(sys.argv[1]))).recv(9).decode())' "$port")" here
}
