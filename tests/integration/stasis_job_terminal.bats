#!/usr/bin/env bats
# A job of stasis run --images-dir on a terminal: it has one of its own, which lives through a restore.

load helpers
load stasis_lib
load stasis_jobs_lib

setup() {
  setup_job
  cat >"$BATS_TEST_TMPDIR/on_tty.py" <<'PY'
# Says what it sees of its terminal, and what is typed.
import os, signal, subprocess, sys, termios, threading, time
subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                 start_new_session=True)  # Ctrl-C is not for it
def say(text): print(text, flush=True)
def size(*_): say("size %dx%d" % tuple(reversed(os.get_terminal_size(1))))
signal.signal(signal.SIGINT, lambda *_: say("interrupted"))
signal.signal(signal.SIGWINCH, size)
say("terminals %s %s" % ([os.isatty(fd) for fd in range(3)], os.ttyname(1)))
say("foreground %s" % (os.tcgetpgrp(1) == os.getpgrp()))
size()
def tick():
    n = 0
    while True:
        n += 1
        say(f"tick {n}")
        time.sleep(0.1)
threading.Thread(target=tick, daemon=True).start()
while True:
    try: line = sys.stdin.readline()
    except InterruptedError: continue
    if not line: break
    say(f"heard {line.strip()}")
    if line.strip() == "quit": os._exit(3)
say("end")
os._exit(4)
PY
  job=(python3 "$BATS_TEST_TMPDIR/on_tty.py" stasis-workload memory --size 4M --status "$TARGET_STATUS")
}
teardown() { end_stasis; }

# on_a_terminal ROWS COLUMNS SCRIPT: runs stasis run of the job on a terminal of that size. SCRIPT: lines
# "wait TEXT", "type TEXT" (with \n, \x03), "size ROWS COLUMNS", "signal NAME". Its status is in $status,
# what it said in $BATS_TEST_TMPDIR/tty, the modes of the terminal afterwards in .../modes.
on_a_terminal() {
  status=0
  printf '%s\n' "$3" >"$BATS_TEST_TMPDIR/script"
  timeout 300 env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" python3 -S - "$BATS_TEST_TMPDIR" "$1" "$2" \
    ${under[@]+"${under[@]}"} stasis run --images-dir "$images" -- "${job[@]}" <<'PY' 3>&- || status=$?
import fcntl, os, pty, select, signal, struct, sys, termios, time
folder, rows, columns, command = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
def set_size(fd, rows, columns): fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
master, slave = pty.openpty()
set_size(master, rows, columns)
before = termios.tcgetattr(slave)
pid = os.fork()
if pid == 0:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for fd in range(3): os.dup2(slave, fd)
    os.closerange(3, 100)
    os.execvp(command[0], command)
said, ended = b"", None
def step(until):
    global said, ended
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.02)[0]: said += os.read(master, 4096)
        elif ended is not None: return until is None
        if until is not None and until in said: return True
        if ended is None:
            got, how = os.waitpid(pid, os.WNOHANG)
            if got: ended = os.waitstatus_to_exitcode(how)
    return False
for line in open(folder + "/script"):
    word, _, rest = line.strip().partition(" ")
    text = rest.encode().decode("unicode_escape").encode()
    if word == "wait":
        if not step(text):
            print(f"there is no {text} in {said}", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)
            sys.exit(99)
        said_at = said.index(text) + len(text)
        open(folder + "/tty", "ab").write(said[:said_at])
        said = said[said_at:]
    if word == "type": os.write(master, text)
    if word == "size": set_size(master, *map(int, rest.split()))
    if word == "signal": os.kill(pid, getattr(signal, "SIG" + rest))
step(None)
open(folder + "/tty", "ab").write(said)
after = termios.tcgetattr(slave)
open(folder + "/modes", "w").write("same" if after == before else f"{before} {after}")
sys.exit(ended if ended is not None and ended >= 0 else 128 - (ended or 0))
PY
}

@test "the job has a terminal: size, keys and what is typed, before a restore and after it, on another one" {
  on_a_terminal 31 97 'wait terminals [True, True, True] /dev/pts/0
wait foreground True
wait size 31x97
wait tick 3
type one\n
wait heard one
type \x03
wait interrupted
size 40 50
wait size 40x50
signal USR1
wait saved to
wait tick
signal TERM
wait the job has ended'
  assert_equal "$status" 75 "status ($(<"$BATS_TEST_TMPDIR/tty"))"
  assert_equal "$(<"$BATS_TEST_TMPDIR/modes")" same
  : >"$BATS_TEST_TMPDIR/tty"
  on_a_terminal 22 66 'wait goes on from
wait size 22x66
wait tick
type two\n
wait heard two
type \x03
wait interrupted
size 23 67
wait size 23x67
type quit\n'
  assert_equal "$status" 3 "status ($(<"$BATS_TEST_TMPDIR/tty"))"
  assert_equal "$(<"$BATS_TEST_TMPDIR/modes")" same
  nothing_left
}

@test "restored where there is no terminal it keeps its own, and its output goes where it is to" {
  on_a_terminal 31 97 'wait tick 2
signal TERM
wait the job has ended'
  assert_equal "$status" 75 "status ($(<"$BATS_TEST_TMPDIR/tty"))"
  : >"$BATS_TEST_TMPDIR/out"
  # Its input ends when it has said something, for then it ends too.
  it_ticks() { grep -q tick "$BATS_TEST_TMPDIR/out"; }
  (exec_on_gpu stasis run --images-dir "$images" -- "${job[@]}") < <(wait_until 60 it_ticks; echo "heard?") \
    >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- || status=$?
  assert_equal "$status" 4 "status ($(<"$BATS_TEST_TMPDIR/err"))" # at the end of its input
  grep -q "tick" "$BATS_TEST_TMPDIR/out"
  grep -q "heard heard?" "$BATS_TEST_TMPDIR/out"
}

@test "on a terminal a command that cannot be started, and its end by a signal, are told as elsewhere" {
  job=("$BATS_TEST_TMPDIR/nothing")
  on_a_terminal 24 80 ''
  assert_equal "$status" 127
  grep -q "cannot start" "$BATS_TEST_TMPDIR/tty"
  job=(sh -c 'kill -USR2 $$')
  on_a_terminal 24 80 ''
  assert_equal "$status" 140
  # Where /dev/ptmx is the machine's own (LXC), and not a node beside the job's.
  under=(unshare --mount bash -c 'mount --bind /dev/pts/ptmx /dev/ptmx && exec "$@"' -)
  on_a_terminal 24 80 ''
  assert_equal "$status" 140 "$(<"$BATS_TEST_TMPDIR/tty")"
}
