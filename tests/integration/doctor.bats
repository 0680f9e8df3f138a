#!/usr/bin/env bats
# stasis doctor, and what dump refuses by it: each red of a process is held against the real CRIU,
# which must refuse it too.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
}
teardown() { end_stasis; }

# start_with PYTHON: a tree of a CUDA process and a Python program that has done this.
start_with() {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  cat >"$BATS_TEST_TMPDIR/hold.py" <<END
import ctypes, fcntl, os, socket, sys, time
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
  wait_until 20 target_is_up
  wait_until 20 test -e "$BATS_TEST_TMPDIR/ready"
}

# lights ID: of the findings about the processes that have this id, in a line.
lights() { json "' '.join(f['light'] for f in d['processes'] if f['id'] == '$1')"; }

# undumpable ID TEXT: the doctor is red, dump refuses before it touches anything, CRIU would too.
undumpable() {
  capture stasis doctor "$TARGET" --no-trial --json
  ((status == 1))
  assert_equal "$(json '[d["ok"], d["light"]]')" "[False, 'red']"
  assert_equal "$(lights "$1")" red "$1"
  assert_contains "$out" "$2"
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "$2"
  refused 9 criu-failed dump "$TARGET" --images-dir "$image" --ignore-undumpable
  unharmed
}

unharmed() {
  target_goes_on
  no_image
  nothing_left
}

# --- This machine

@test "the doctor finds this machine fit, tries each GPU, and leaves nothing behind" {
  capture stasis doctor --json --images-dir "$BATS_TEST_TMPDIR/not/there"
  printf '%s\n' "$out"
  ((status == 0))
  [[ $(json 'd["light"]') =~ ^(green|yellow)$ ]]
  assert_equal "$(json "[f['light'] for f in d['machine'] if f['id'] in ('driver', 'criu', 'criu-check', 'state-directory')]")" \
    "['green', 'green', 'green', 'green']"
  (($(json "len([f for f in d['machine'] if f['id'].startswith('trial')])") >= 1))
  (($(json "len([f for f in d['machine'] if f['id'].startswith('disk')])") >= 1))
  assert_equal "$(json 'd["processes"]')" "[]"
  assert_equal "$(pgrep -x stasis || true)" ""
  gpu_is_free
  nothing_left
  done_by doctor --no-trial
  assert_contains "$out" "This machine"
  assert_contains "$out" "  green   "
}

@test "without a driver, or with one that cannot checkpoint, the doctor says so and ends with 1" {
  STASIS_LIBCUDA=/nonexistent capture stasis doctor --json
  ((status == 1))
  assert_equal "$(json "[f['light'] for f in d['machine'] if f['id'] == 'driver']")" "['red']"
  STASIS_SIM_FAULTS="checkpoint:error=999" capture stasis doctor
  ((status == 1))
  grep -q "  red     .*checkpoint" <<<"$out"
  gpu_is_free
  assert_equal "$(pgrep -x stasis || true)" ""
}

@test "a CRIU that is missing is red" {
  capture stasis doctor --no-trial --criu /nonexistent --json
  ((status == 1))
  assert_equal "$(json "[f['light'] for f in d['machine'] if f['id'] == 'criu']")" "['red']"
}

# --- A process tree

@test "a tree that can be dumped is green, and a dump of it succeeds" {
  start_with 'keep = [os.eventfd(0), os.pidfd_open(os.getpid()), os.open("/dev/full", os.O_RDWR),
    os.memfd_create("x"), socket.create_server(("127.0.0.1", 0)), socket.socketpair(), os.pipe(),
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW), open("/proc/self/status"), libc.timerfd_create(1, 0)]'
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(json "[f for f in d['processes'] if f['light'] != 'green']")" "[]"
  assert_equal "$(lights cuda-state)" green
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  target_goes_on
}

@test "children that come and go, with a pidfd and a socket each, are no red" {
  start_with 'import subprocess, threading
def children():
    while True:
        a, b = socket.socketpair()
        child = subprocess.Popen(["sleep", "0.05"], stdin=b); b.close()
        fd = os.pidfd_open(child.pid)
        time.sleep(0.1)
        child.wait(); os.close(fd); a.close()
threading.Thread(target=children, daemon=True).start()'
  for _ in 1 2 3 4 5 6; do
    capture stasis doctor "$TARGET" --no-trial --json
    assert_equal "$(json "[f for f in d['processes'] if f['light'] == 'red']")" "[]"
  done
}

@test "a process that is none, and one without CUDA" {
  refused 3 no-such-process doctor 2147483647 --no-trial
  sleep 100 3>&- &
  at_end_kill $!
  capture stasis doctor $! --no-trial --json
  assert_equal "$(lights cuda-state)" yellow
}

@test "red: an io_uring" {
  start_with 'fd = libc.syscall(425, 8, ctypes.create_string_buffer(120))
if fd < 0: open(folder + "/skip", "w").close()'
  [[ ! -e $BATS_TEST_TMPDIR/skip ]] || skip "this kernel allows no io_uring"
  undumpable io-uring "has an io_uring open"
}

@test "red: a device" {
  [[ -c /dev/loop-control ]] || skip "there is no /dev/loop-control"
  start_with 'fd = os.open("/dev/loop-control", os.O_RDWR)'
  undumpable device "/dev/loop-control (descriptor"
}

@test "red: a pidfd of a process outside" {
  start_with 'fd = os.pidfd_open(1)'
  undumpable pidfd "outside of the tree: process 1"
}

@test "red: System V shared memory" {
  start_with 'libc.shmat.restype = ctypes.c_void_p
number = libc.shmget(0, 4096, 0o1600); libc.shmat(number, None, 0); libc.shmctl(number, 0, None)'
  undumpable sysv-memory "unshare --ipc"
}

@test "red: memory that the kernel shows nobody" {
  start_with 'fd = libc.syscall(447, 0)
if fd < 0: open(folder + "/skip", "w").close()'
  [[ ! -e $BATS_TEST_TMPDIR/skip ]] || skip "this kernel has no memfd_secret"
  undumpable secret-memory "memfd_secret"
}

@test "red: a deleted file above the ghost limit, and not with a larger limit" {
  start_with 'f = open(folder + "/ghost", "w+b"); f.write(b"x" * (8 << 20)); f.flush(); os.unlink(folder + "/ghost")'
  refused 9 undumpable dump "$TARGET" --images-dir "$image" --ghost-limit 1M
  assert_contains "$err" "--ghost-limit, or close"
  refused 9 criu-failed dump "$TARGET" --images-dir "$image" --ghost-limit 1M --ignore-undumpable
  unharmed
  done_by dump "$TARGET" --images-dir "$image" --leave-running
}

@test "red: an open TCP connection, with the port, and not with --tcp-established" {
  start_with 'a = socket.create_server(("127.0.0.1", 0)); b = socket.create_connection(a.getsockname()); c = a.accept()'
  undumpable tcp-connection "--tcp-established"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --tcp-established --network-lock skip
}

@test "red: a datagram socket connected to somebody outside, and not with --ext-unix-sk" {
  python3 -c 'import socket, sys, time
a = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); a.bind(sys.argv[1]); time.sleep(300)' "$BATS_TEST_TMPDIR/outside" 3>&- &
  at_end_kill $!
  wait_until 10 test -S "$BATS_TEST_TMPDIR/outside"
  start_with 's = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect(folder + "/outside")'
  undumpable unix-socket "--ext-unix-sk"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --ext-unix-sk
}

@test "red: a file lock, and not with --file-locks" {
  start_with 'f = open(folder + "/locked", "w"); fcntl.flock(f, fcntl.LOCK_EX)'
  undumpable file-lock "--file-locks"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --file-locks
}

@test "red: somebody traces it; managed memory" {
  start_target managed
  capture stasis doctor "$TARGET" --no-trial --json
  ((status == 1))
  assert_equal "$(lights obstacle)" red
  # Its parent, which has no CUDA: nothing but this look would notice before the GPU is emptied.
  start_with 'pass'
  python3 -c 'import ctypes, sys, time
libc = ctypes.CDLL(None)
assert libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0
open(sys.argv[2], "w").close(); time.sleep(300)' "$TARGET" "$BATS_TEST_TMPDIR/traced" 3>&- &
  at_end_kill $!
  wait_until 10 test -e "$BATS_TEST_TMPDIR/traced"
  capture stasis doctor "$TARGET" --no-trial --json
  ((status == 1))
  assert_equal "$(lights tracer)" red
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "is being traced"
  unharmed
}

@test "yellow: inotify, and much reserved memory" {
  start_with 'fd = libc.inotify_init1(0); libc.inotify_add_watch(fd, folder.encode(), 0x100)
libc.mmap.restype = ctypes.c_void_p
libc.mmap(None, ctypes.c_size_t(1 << 40), 0, 0x4022, -1, ctypes.c_long(0))'
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights inotify) $(lights reserved-memory)" "yellow yellow"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
}
