#!/usr/bin/env bats
# Where stasis writes to: a terminal that hangs up, a full device, names that a terminal would obey. No
# operation fails because the tool cannot print its result; a result that is lost makes the status tell.

load helpers
load stasis_lib

setup() { setup_stasis; }
teardown() { end_stasis; }

# on_a_terminal SECONDS COMMAND...: runs it on a terminal of its own that hangs up then, or with WHEN=REGEX as soon as
# it has said that. Its status is in $BATS_TEST_TMPDIR/status (negative: the signal that killed it), what it had said
# till then in .../tty. With IGNORE_HUP=1 as under nohup. With STOP_FOR=SECONDS it is stopped for so long before, and
# meets the hang-up wherever it was.
on_a_terminal() {
  timeout 120 python3 -IS - "$BATS_TEST_TMPDIR" "$@" <<'PY' 3>&-
import os, pty, re, select, signal, sys, time
folder, seconds, command = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
tool, terminal = pty.fork()
if tool == 0:
    os.environ["TERM"] = "xterm"
    if os.environ.get("IGNORE_HUP"): signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.execvp(command[0], command)
said, start = b"", time.monotonic()
when = os.environ.get("WHEN", "").encode()
while time.monotonic() - start < seconds and not (when and re.search(when, said, re.DOTALL)):
    if select.select([terminal], [], [], 0.02)[0]:
        try: said += os.read(terminal, 4096)
        except OSError: break
stop = os.environ.get("STOP_FOR")
if stop:
    os.kill(tool, signal.SIGSTOP)
    time.sleep(float(stop))
os.close(terminal)
if stop: os.kill(tool, signal.SIGCONT)
open(folder + "/tty", "wb").write(said)
ended = os.waitpid(tool, 0)[1]
open(folder + "/status", "w").write(str(os.waitstatus_to_exitcode(ended)))
PY
  status=$(<"$BATS_TEST_TMPDIR/status")
}

# --- The size of a terminal

@test "ps on a terminal keeps to its width, and --watch to its screen" {
  need_root "a PID namespace of its own"
  start_target memory --size 2M
  WHEN='\[J.*\[J.*running.*\n' on_a_terminal 60 bash -c 'stty cols 50; exec stasis ps --watch 0.5'
  assert_equal "$status" -1
  (($(grep -c $'\e\[H\e\[J' "$BATS_TEST_TMPDIR/tty") >= 2))
  sed 's/\x1b\[[HJ]//g; s/\r$//' "$BATS_TEST_TMPDIR/tty" | grep -q "^$TARGET .*running"
  assert_equal "$(sed 's/\x1b\[[HJ]//g; s/\r$//; s/…/./g' "$BATS_TEST_TMPDIR/tty" | grep -v '^note: ' | awk '{ if (length > most) most = length } END { print most }')" 50
}

@test "ps on a narrow terminal leaves columns out, but no name; doctor and inspect keep to 60 columns" {
  need_root "a PID namespace of its own"
  local said=$BATS_TEST_TMPDIR/tty
  TARGET_STATUS=$BATS_TEST_TMPDIR/status-of-it TARGET_LOG=$BATS_TEST_TMPDIR/log-of-it
  # A path may be a word that is longer than a line.
  (cd "$BATS_TEST_TMPDIR" && exec_on_gpu setsid stasis run --name training-run-7 -- stasis-workload memory --size 1M --status status-of-it) \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  most_columns() { sed -E 's/\x1b\[[0-9;]*[a-zA-Z]//g; s/\r$//; s:/[^ ]{24,}:PATH:g; s/…/./g' "$said" | grep -v '^note: ' | awk '{ if (length > most) most = length } END { print most }'; }
  on_a_terminal 60 bash -c 'stty cols 60; exec stasis ps'
  grep -q "^$TARGET .*running .*training-run-7 " "$said"
  grep -q 'GPU MEMORY' "$said"
  ! grep -qE 'USER|PATH|OPERATION' "$said" || return 1
  grep -q '^'"$TARGET"' .*…' "$said" # a command that is longer than its room says so
  (($(most_columns) <= 60))
  # Narrower than the name, which is whole: `stasis suspend` takes it.
  on_a_terminal 60 bash -c 'stty cols 30; exec stasis ps'
  sed 's:\r$::' "$said" | grep -q "^$TARGET .*running .*training-run-7\$"
  on_a_terminal 60 bash -c 'stty cols 200; exec stasis ps'
  grep -q 'USER.*PATH.*OPERATION' "$said"
  # Columns that the user has chosen stay, and the name is whole all the same.
  on_a_terminal 60 bash -c 'stty cols 40; exec stasis ps --columns pid,user,state,gpus,gpu_bytes,since,name'
  grep -q 'USER.*GPU MEMORY.*NAME' "$said"
  sed 's:\r$::' "$said" | grep -q "^$TARGET .*running .*training-run-7\$"
  on_a_terminal 60 bash -c 'stty cols 60; exec stasis doctor -v --no-trial'
  grep -qF $'\e[32msuspend: yes\e[0m' "$said"
  (($(most_columns) <= 60))
  keeps_to_60 "$said"
  need_root "CRIU"
  done_by dump "$TARGET" "$image" --leave-running
  on_a_terminal 60 bash -c "cd '$BATS_TEST_TMPDIR'; stty cols 60; exec stasis inspect image"
  assert_equal "$(grep -c '^here' "$said")" 1
  (($(most_columns) <= 60))
  # A line does not begin with the unit of the number before, however wide it is.
  local columns
  for columns in {56..66}; do
    COLUMNS=$columns stasis inspect "$image" >"$said.$columns" 2>/dev/null || true
    ! grep -E '^ +(ms|s|KiB|MiB|GiB|%)([,)]|$| )' "$said.$columns" || return 1
  done
}

# keeps_to_60 FILE: a line is longer only by a word that is longer than the room behind the indent, alone in it.
keeps_to_60() {
  local long
  long=$(sed -E 's/\x1b\[[0-9;]*[a-zA-Z]//g; s/\r$//; s/…/./g' "$1" | grep -vE '^note: ' |
    awk 'length > 60 { match($0, /[^ ]+$/); if (RSTART > 11 || RLENGTH <= 50) print }')
  assert_equal "$long" ""
}

@test "COLUMNS says how wide lines may be, also through a pipe" {
  start_target memory --size 1M
  COLUMNS=60 capture stasis doctor -v --no-trial "$TARGET"
  echo "$out" >"$BATS_TEST_TMPDIR/doctor"
  keeps_to_60 "$BATS_TEST_TMPDIR/doctor"
  capture stasis doctor -v --no-trial "$TARGET"
  assert_contains "$(awk 'length > 60' <<<"$out")" " "
  COLUMNS=60 done_by ps
  [[ $out == *"GPU MEMORY"* && $out != *OPERATION* ]]
  local none
  for none in 0 -1 wide ''; do
    COLUMNS=$none done_by ps
    assert_contains "$out" OPERATION
  done
  # It is stronger than what the terminal says.
  COLUMNS=200 on_a_terminal 60 bash -c 'stty cols 60; exec stasis ps'
  grep -q 'USER.*PATH.*OPERATION' "$BATS_TEST_TMPDIR/tty"
}

@test "a phase that tells no progress is seen to go on when it takes over a second" {
  export STASIS_SIM_GPUS=2x8G # one for the trial
  start_target memory --size 1M
  STASIS_SIM_FAULTS=lock:delay=5s WHEN='lock +1 s' on_a_terminal 20 stasis suspend "$TARGET"
  grep -qaE 'lock +1 s' "$BATS_TEST_TMPDIR/tty"
  wait_until 60 in_state running
  # The direct path's, before the program stands still.
  LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so start_target memory --size 4M
  STASIS_SIM_FAULTS=context:delay=5s WHEN='prepare +1 s' on_a_terminal 20 stasis suspend "$TARGET"
  grep -qaE 'prepare +1 s' "$BATS_TEST_TMPDIR/tty"
  wait_until 60 in_state running
  # The doctor's, too.
  STASIS_SIM_FAULTS=lock:delay=3s WHEN='trial +1 s' on_a_terminal 20 stasis doctor
  grep -qaE 'trial +1 s' "$BATS_TEST_TMPDIR/tty"
}

@test "a swap that takes over a second is seen to go on, and to stop" {
  start_target memory --size 200M
  local b=$TARGET
  done_by suspend "$b"
  start_target memory --size 200M
  STASIS_SIM_FAULTS="checkpoint:delay=1500ms" on_a_terminal 60 stasis swap "$TARGET" "$b" --path driver
  assert_equal "$status" 0
  grep -qaE 'swap +(\[.*%|1 s)' "$BATS_TEST_TMPDIR/tty"
  STASIS_SIM_FAULTS="checkpoint:delay=3s" WHEN='swap +(\[|1 s)' on_a_terminal 60 stasis swap "$b" "$TARGET" --path driver
  in_state running "$b"
  in_state checkpointed "$TARGET"
}

@test "an error is red on a terminal, and nothing is with NO_COLOR, on a dumb one and through a pipe" {
  local said=$BATS_TEST_TMPDIR/tty plain
  on_a_terminal 60 stasis suspend 2147483647
  assert_equal "$status" 3
  grep -qF $'\e[1;31m' "$said"
  for plain in NO_COLOR=1 TERM=dumb; do
    on_a_terminal 60 env "$plain" stasis suspend 2147483647
    grep -q "no-such-process" "$said"
    ! grep -q $'\e' "$said" || { echo "$plain" >&2; return 1; }
  done
  refused 3 no-such-process suspend 2147483647
  [[ $err != *$'\e'* ]]
}

# --- A terminal that hangs up

@test "a terminal that hangs up during a suspend rolls it back" {
  start_target memory --size 100M
  # Late enough for the line that tells how far it has come.
  STASIS_SIM_FAULTS="checkpoint:rate=20M" WHEN='checkpoint *\[' on_a_terminal 60 stasis suspend "$TARGET"
  assert_equal "$status" 129
  in_state running
  nothing_left
  target_goes_on
  target_verifies
}

@test "a terminal that hangs up while CRIU writes rolls the dump back" {
  need_root "CRIU"
  start_target memory --size 16M
  # CRIU has started and waits; it is stopped then, so that it writes for as long as it is looked at.
  (wait_until 60 held_up && kill -STOP "$(<"$BATS_TEST_TMPDIR/criu-number")") 3>&- &
  STASIS_CRIU=$(criu_by_number) STASIS_SIM_FAULTS="checkpoint:delay=3s" WHEN='write +([0-9]+ s|.*MB/s)' \
    on_a_terminal 60 stasis dump "$TARGET" --images-dir "$image"
  assert_equal "$status" 129 "$(<"$BATS_TEST_TMPDIR/tty")"
  in_state running
  no_image
  nothing_left
  target_goes_on
  target_verifies
}

@test "a shell's job that is restored with --detach outlives the terminal on which that was said" {
  need_root "CRIU"
  TARGET_STATUS=$BATS_TEST_TMPDIR/target.status TARGET_LOG=$BATS_TEST_TMPDIR/tty
  # shellcheck disable=SC2016
  (LD_LIBRARY_PATH=${STASIS_LIBCUDA%/*} on_a_terminal 60 bash -c 'stasis-workload memory --size 4M --status "$1" & echo $! >"$1.number"; wait' bash "$TARGET_STATUS") &
  wait_until 60 grep -qs '^round 0*[1-9]' "$TARGET_STATUS"
  TARGET=$(<"$TARGET_STATUS.number")
  at_end_kill "$TARGET"
  done_by dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "--shell-job"
  wait_until 60 number_is_free
  # The tool leads the terminal's session, which ends with it.
  on_a_terminal 60 stasis restore "$image" --detach
  assert_equal "$status" 0 "$(<"$BATS_TEST_TMPDIR/tty")"
  target_goes_on
}

@test "under nohup, a dump goes on without the terminal, and only its result is lost" {
  need_root "CRIU"
  start_target memory --size 100M
  STASIS_SIM_FAULTS="checkpoint:rate=20M" WHEN='checkpoint *\[' IGNORE_HUP=1 on_a_terminal 60 stasis dump "$TARGET" --images-dir "$image"
  assert_equal "$status" 1
  nothing_left
  wait_until 60 number_is_free
  restore_it
  target_goes_on
  restored_verifies
}

# bats test_tags=long
@test "under nohup, a restore brings the whole job back without the terminal" {
  need_root "CRIU"
  start_target memory --size 300M
  dump_it --sync none
  # Stopped for longer than a step may take before it is shown.
  IGNORE_HUP=1 STOP_FOR=1.3 on_a_terminal 0.05 stasis restore --images-dir "$image" --detach
  ((status == 0 || status == 1)) || { echo "status $status" >&2; return 1; }
  in_state running
  nothing_left
  target_goes_on
  restored_verifies
}

# --- Standard output and standard error that take nothing

# lost STATUS TARGET ARGUMENT...: stasis with its standard output there. Sets err.
lost() {
  local expected=$1 to=$2
  shift 2
  status=0
  timeout -k 5 60 stasis "$@" >"$to" 2>"$BATS_TEST_TMPDIR/err" 3>&- || status=$?
  err=$(<"$BATS_TEST_TMPDIR/err")
  assert_equal "$status" "$expected" "status of $*: $err"
}

@test "a result that cannot be written is no success, and standard error says so" {
  start_target memory --size 4M
  lost 1 /dev/full ps
  assert_contains "$err" "No space left on device [io]"
  assert_contains "$err" "what to do: "
  lost 1 /dev/full ps --json
  lost 1 /dev/full --help
  lost 1 /dev/full --version
  lost 1 /dev/full recover --all
  lost 1 /dev/full suspend "$TARGET"
  # Done all the same.
  in_state checkpointed
  lost 1 /dev/full resume "$TARGET" --json
  assert_contains "$err" "cannot be written to standard output"
  in_state running
  # A refusal keeps its own status, and says the reason where it can.
  lost 2 /dev/full suspend 0 --json
  assert_contains "$err" "[usage]"
  nothing_left
  target_goes_on
}

@test "a result that cannot be written does not undo a dump or a restore" {
  need_root "CRIU"
  start_target memory --size 4M
  lost 1 /dev/full dump "$TARGET" --images-dir "$image" --json
  assert_contains "$err" "cannot be written to standard output"
  wait_until 60 number_is_free
  lost 1 /dev/full restore --images-dir "$image" --detach
  nothing_left
  target_goes_on
  restored_verifies
}

@test "notes, progress and errors that cannot be written change nothing" {
  need_root "CRIU"
  start_target memory --size 4M
  timeout 60 stasis suspend "$TARGET" -v 2>/dev/full 3>&-
  in_state checkpointed
  timeout 60 stasis resume "$TARGET" -v 2>&- 3>&-
  in_state running
  status=0
  timeout 60 stasis suspend 0 2>/dev/full 3>&- || status=$?
  assert_equal "$status" 2
  local to
  for to in /dev/full /dev/null; do
    status=0
    stasis run -- "$BATS_TEST_TMPDIR/none" 2>"$to" 3>&- || status=$?
    assert_equal "$status" 127 "$to"
  done
  timeout 60 stasis dump "$TARGET" --images-dir "$image" -v 2>/dev/full 3>&-
  wait_until 60 number_is_free
  restore_it
  target_goes_on
  restored_verifies
}

@test "with standard descriptors closed, nothing is written into the image" {
  need_root "CRIU"
  start_target memory --size 4M
  status=0
  timeout 60 stasis dump "$TARGET" --images-dir "$image" -v <&- >&- 2>&- 3>&- || status=$?
  assert_equal "$status" 1
  wait_until 60 number_is_free
  restore_it
  target_goes_on
  restored_verifies
}

@test "what stops stasis from within is one JSON object too" {
  start_target memory --size 4M
  # No room for the stack of a thread.
  status=0
  (ulimit -Ss 150000000000 && exec timeout 60 stasis ps --json) >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- || status=$?
  out=$(<"$BATS_TEST_TMPDIR/out")
  assert_equal "$status" 1
  assert_equal "$(json 'd["ok"], d["error"]["code"], d["error"]["exit_status"]')" "False internal 1"
  assert_equal "$(<"$BATS_TEST_TMPDIR/err")" ""
}

# --- What a success says

@test "a success tells the state that the processes are in, and not the one that was asked for" {
  need_root "CRIU"
  start_target memory --size 4M
  done_by dump "$TARGET" --images-dir "$image.0" --leave-running
  assert_contains "$out" "it runs on"
  done_by suspend "$TARGET"
  done_by dump "$TARGET" --images-dir "$image.1" --leave-running
  [[ $out != *"runs on"* ]]
  assert_contains "$out" "it is suspended; \`stasis resume $TARGET\`"
  dump_it
  assert_contains "$out" "it has ended"
  restore_it
  [[ $out != *"runs on"* ]]
  assert_contains "$out" "it is suspended; \`stasis resume $TARGET\`"
  done_by resume "$TARGET"
  cuda-checkpoint --action lock --pid "$TARGET"
  rm -r "$image"
  dump_it
  restore_it
  assert_contains "$out" "it is locked; \`stasis resume $TARGET\`"
  done_by resume "$TARGET"
  target_goes_on
  restored_verifies
}

@test "processes in different states are told apart" {
  need_root "CRIU"
  start_tree --size 4M
  cuda-checkpoint --toggle --pid "${CHILDREN[1]}"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$out" "process ${CHILDREN[0]} is running, process ${CHILDREN[1]} is checkpointed"
}

@test "a stopped and a traced process are shown as what they are" {
  start_target memory --size 4M
  kill -STOP "$TARGET"
  wait_until 60 grep -q "^State:.T" "/proc/$TARGET/status" # each thread stops when it gets there
  done_by ps
  assert_contains "$out" " stopped "
  done_by ps --json
  assert_equal "$(json "[p['state'] for p in d['processes'] if p['pid'] == $TARGET]")" "['stopped']"
  assert_equal "$(json "[p['reason'] != '' for p in d['processes'] if p['pid'] == $TARGET]")" "[True]"
  kill -CONT "$TARGET"
  python3 -IS - "$TARGET" "$BATS_TEST_TMPDIR/traced" <<'PY' 3>&- &
import ctypes, os, sys, time
libc, target = ctypes.CDLL(None), int(sys.argv[1])
PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
if libc.ptrace(PTRACE_SEIZE, target, 0, 0) == 0 and libc.ptrace(PTRACE_INTERRUPT, target, 0, 0) == 0:
    os.waitpid(target, 0x40000000)
    open(sys.argv[2], "w").close()
time.sleep(300)
PY
  local tracer=$!
  at_end_kill "$tracer"
  wait_until 60 test -e "$BATS_TEST_TMPDIR/traced"
  done_by ps --json
  assert_equal "$(json "[p['state'] for p in d['processes'] if p['pid'] == $TARGET]")" "['traced']"
  kill -KILL "$tracer"
  wait_until 60 ps_says running
  target_goes_on
}
ps_says() { [[ $(timeout 60 stasis ps -q) =~ $TARGET.*\ $1\  ]]; }

@test "--json, -v and -q mean the same before the verb" {
  start_target memory --size 4M
  done_by --json ps
  assert_equal "$(json 'd["ok"]')" True
  done_by -q ps
  assert_equal "$err" ""
  done_by -v suspend "$TARGET"
  assert_contains "$err" "driver path: "
  done_by --json resume "$TARGET"
  assert_equal "$(json 'd["ok"]')" True
  status=0
  out=$(timeout 60 stasis --json suspend 0) || status=$?
  assert_equal "$status" 2
  assert_equal "$(json 'd["error"]["code"]')" usage
}

@test "a name that a terminal would obey does not reach it" {
  need_root "CRIU"
  local name=$'job\e]0;owned\a\n\xc2\x9b31m' status_file=$BATS_TEST_TMPDIR/status_of_it
  (exec_on_gpu setsid bash -c 'exec -a "$1" stasis-workload memory --size 4M --status "$2"' bash "$name" \
    "$status_file") </dev/null >/dev/null 2>&1 3>&- &
  TARGET=$! TARGET_STATUS=$status_file
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  image=$image$'\e[31m'
  for verb in ps "ps --json" "suspend $TARGET" "resume $TARGET"; do
    # shellcheck disable=SC2086
    done_by $verb
    harmless
  done
  dump_it --json
  harmless
  assert_equal "$(json 'd["images_dir"].endswith("\x1b[31m")')" True
  restore_it
  harmless
  rm -r "$image"
  done_by dump "$TARGET" --images-dir "$image"
  harmless
  assert_contains "$out" "image?[31m"
  capture timeout 60 stasis restore --images-dir "$image.none"
  harmless
}
# Nothing but text and line ends, in $out and $err.
harmless() {
  python3 -IS -c 'import sys, unicodedata
sys.exit(any(unicodedata.category(c) in ("Cc", "Cs") and c != "\n" for c in sys.argv[1] + sys.argv[2]))' "$out" "$err"
}

@test "the help fits into 80 columns" {
  local verb
  for verb in "" ps suspend resume dump restore recover; do
    # shellcheck disable=SC2086
    done_by $verb --help
    assert_equal "$(grep -E '.{81}| $' <<<"$out" || true)" "" "too long in the help of '$verb'"
  done
}
