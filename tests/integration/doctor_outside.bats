#!/usr/bin/env bats
# What stasis doctor says of what processes outside of the tree have too.

load helpers
load stasis_lib
load doctor_lib

setup() { setup_doctor; }
teardown() { end_doctor; }

# start_shared PYTHON AFTER: a Python program outside does PYTHON, forks the tree, as start_with has it, and does AFTER.
start_shared() {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  cat >"$BATS_TEST_TMPDIR/outside.py" <<END
import ctypes, mmap, os, select, socket, subprocess, sys, time
folder = sys.argv[1]
$1
if os.fork():
$2
    while True: time.sleep(300)
os.setsid()
# The first process of the tree has none of it, the second is as it was forked.
if os.fork() == 0:
    open(folder + "/holder", "w").write(str(os.getpid()))
    while True: time.sleep(300)
while not os.path.exists(folder + "/holder"): time.sleep(.01)
subprocess.Popen(["stasis-workload", "memory", "--size", "1M", "--status", folder + "/status"])
open(folder + "/root", "w").write(str(os.getpid()))
os.execvp("sleep", ["sleep", "300"])
END
  (exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/outside.py" "$BATS_TEST_TMPDIR") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 test -s "$BATS_TEST_TMPDIR/root"
  TARGET=$(<"$BATS_TEST_TMPDIR/root")
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
}

@test "red: what processes outside of the tree have too, by which a restore would cut the program off" {
  local id words
  start_shared 'def deleted(name):
    fd = os.open(folder + "/" + name, os.O_RDWR | os.O_CREAT); os.unlink(folder + "/" + name); os.ftruncate(fd, 4096); return fd
memory = mmap.mmap(-1, 4096); memory[0] = 1
named = os.memfd_create("outer"); os.ftruncate(named, 4096); by_descriptor = mmap.mmap(named, 4096)
gone = mmap.mmap(deleted("mapped"), 4096)
only_open = deleted("open")
events = os.eventfd(0)
waits = select.epoll()
place = os.open(folder + "/place", os.O_RDWR | os.O_CREAT); os.write(place, b"some")
tcp = socket.socket(); tcp.bind(("127.0.0.1", 0)); tcp.listen()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(("127.0.0.1", 0))
unix = socket.socket(socket.AF_UNIX); unix.bind(folder + "/listens"); unix.listen()' '    pass'
  capture stasis doctor "$TARGET" --no-trial --json
  ((status == 1))
  while IFS='|' read -r id light words; do
    assert_equal "$(lights "$id")" "$light" "$id"
    assert_contains "$(json "[f['what'] for f in d['processes'] if f['id'] == '$id']")" "$words"
  done <<'END'
outside-memory|red|, python3)
outside-memory|red|/memfd:outer (deleted)
outside-file|red|/mapped (deleted)
outside-file|red|/open (deleted)
outside-eventfd|red|[eventfd] (descriptor
outside-socket|red|TCP port
outside-socket|red|UDP port
outside-socket|red|/listens
outside-events|yellow|[eventpoll]
outside-offset|yellow|/place
END
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "shares eventfds with processes outside"
  capture stasis dump "$TARGET" --images-dir "$image" --json
  assert_equal "$(json "[sorted(o['id'] for o in d['error']['obstacles'] if o['id'].startswith('outside'))]")" \
    "[['outside-eventfd', 'outside-file', 'outside-memory', 'outside-socket']]"
  unharmed
  # Who insists is told.
  done_by dump "$TARGET" --images-dir "$image" --leave-running --ignore-undumpable
  assert_contains "$err" "shares eventfds with processes outside"
  assert_contains "$err" "shares the offset of files"
}

@test "what a shell gives its programs, and what only the tree shares, is no sign of a process outside" {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  cat >"$BATS_TEST_TMPDIR/tree.py" <<'END'
import mmap, os, select, socket, subprocess, sys, time
memory = mmap.mmap(-1, 4096); named = os.memfd_create("inner"); os.ftruncate(named, 4096)
events, waits, listens = os.eventfd(0), select.epoll(), socket.socket()
gone = os.open(sys.argv[1] + "/gone", os.O_RDWR | os.O_CREAT); os.unlink(sys.argv[1] + "/gone")
if os.fork() == 0:
    open(sys.argv[1] + "/holder", "w").write(f"/proc/{os.getpid()}/fd/{gone}")
    while True: time.sleep(300)
listens.bind(("127.0.0.1", 0)); listens.listen()
if os.fork() == 0:
    while True: memory[0] = 1; time.sleep(.1)
subprocess.run(["stasis-workload", "memory", "--size", "1M", "--status", sys.argv[1] + "/status"])
END
  # Its input, output and errors, a file that is appended to, a file to be locked, one that is read.
  cat >"$BATS_TEST_TMPDIR/script" <<'END'
exec >"$1/log" 2>&1 5>>"$1/appended" 6>"$1/lock" 7<"$1/tree.py" </dev/null
read -r line <&7
echo before; echo before >&5
(exec setsid python3 "$1/tree.py" "$1") &
echo $! >"$1/root"
wait
END
  (exec_on_gpu bash "$BATS_TEST_TMPDIR/script" "$BATS_TEST_TMPDIR") 3>&- &
  at_end_kill $!
  wait_until 60 test -s "$BATS_TEST_TMPDIR/root"
  TARGET=$(<"$BATS_TEST_TMPDIR/root")
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  wait_until 60 test -s "$BATS_TEST_TMPDIR/holder"
  # What looks at a file, and cannot read or write it.
  (exec python3 -IS -c 'import os, sys, time
held = os.open(sys.argv[1], os.O_PATH)
open(sys.argv[2], "w")
time.sleep(300)' "$(<"$BATS_TEST_TMPDIR/holder")" "$BATS_TEST_TMPDIR/looked") </dev/null >/dev/null 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 test -e "$BATS_TEST_TMPDIR/looked"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(json "[f['what'] for f in d['processes'] if f['id'].startswith('outside')]")" "[]"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  [[ $err != *outside* ]]
}
