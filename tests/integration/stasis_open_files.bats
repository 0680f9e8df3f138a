#!/usr/bin/env bats
# What open files are set to, and what is in them: before a dump and after a restore, and after a dump that was given up.

load helpers
load stasis_lib
load stasis_jobs_lib

setup() { setup_job; }
teardown() { end_stasis; }

# start_python PYTHON: TARGET is a Python program that has done this, with a CUDA process below it; `look()` is what
# it tells of itself.
start_python() {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status$((++programs)) TARGET_LOG=$BATS_TEST_TMPDIR/log$programs
  cat >"$BATS_TEST_TMPDIR/hold$programs.py" <<END
import ctypes, fcntl, os, select, struct, subprocess, sys, time
here = sys.argv[1]
child = subprocess.Popen(["stasis-workload", "memory", "--size", "1M", "--status", here])
libc = ctypes.CDLL(None)
def events(*files):
    def of(file):
        poll = select.poll()
        poll.register(file, select.POLLIN | select.POLLOUT | select.POLLPRI)
        return dict(poll.poll(0)).get(file, 0)
    return [of(file) for file in files]
$1
open(here + '.ready', 'w').close()
while child.poll() is None:
    if os.path.exists(here + '.ask'):
        os.unlink(here + '.ask')
        open(here + '.new', 'w').write(repr(look()))
        os.rename(here + '.new', here + '.told')
    time.sleep(0.01)
END
  (exec_on_gpu setsid python3 -S "$BATS_TEST_TMPDIR/hold$programs.py" "$TARGET_STATUS") </dev/null >>"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 test -e "$TARGET_STATUS.ready" || { cat "$TARGET_LOG" >&2; return 1; }
  wait_until 60 target_is_up
}
# What it tells now: in $told.
look() {
  touch "$TARGET_STATUS.ask"
  wait_until 60 test -e "$TARGET_STATUS.told" || { cat "$TARGET_LOG" >&2; return 1; }
  told=$(<"$TARGET_STATUS.told")
  rm "$TARGET_STATUS.told"
}

@test "a terminal under another line discipline, at which CRIU fails, is refused before" {
  need_root "CRIU"
  start_python "import termios
end, other = os.openpty()
try: fcntl.ioctl(other, termios.TIOCSETD, struct.pack('i', 27))  # N_NULL
except OSError: open(here + '.none', 'w').close()
def look(): pass"
  if [[ -e $TARGET_STATUS.none ]]; then skip "this kernel has no N_NULL"; fi
  capture stasis doctor "$TARGET" --no-trial --json
  assert_contains "$out" '"terminal-discipline"'
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "line discipline"
  target_goes_on
}

@test "how output to a terminal in packet mode is stopped cannot be told, and that is said" {
  need_root "CRIU"
  start_python "end, other = os.openpty()
fcntl.ioctl(end, 0x5420, struct.pack('i', 1))  # TIOCPKT
libc.ioctl(other, 0x540A, 0)  # TCXONC, TCOOFF
def look(): return [events(other), bool(events(end)[0] & select.POLLPRI)]"
  look
  assert_equal "$told" "[[0], True]"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$err" "whether by ^S or by TCOOFF cannot be told"
  target_goes_on
}
