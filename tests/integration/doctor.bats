#!/usr/bin/env bats
# stasis doctor: this machine, and of a process tree each obstacle by itself, which dump refuses. Each
# red is held against the real CRIU, which must refuse it too; more of them are in doctor_*.bats.

load helpers
load stasis_lib
load doctor_lib

setup() { setup_doctor; }
teardown() { end_doctor; }

# --- This machine

@test "no trial is made on a GPU that a process uses: one that was suspended before could lose it" {
  start_target memory --size 4M
  capture stasis doctor --json
  ((status == 0))
  assert_contains "$(json "[f['what'] for f in d['machine'] if f['id'] == 'trial' and f['light'] == 'yellow'][0]")" \
    "was not tested, because a program is using it"
  target_goes_on
}

@test "the doctor finds this machine fit, tries each GPU, and leaves nothing behind" {
  capture stasis doctor --json --images-dir "$BATS_TEST_TMPDIR/there"
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
  # The verdict first; what is fine only if asked for.
  done_by doctor --no-trial
  assert_equal "$(head -3 <<<"$out")" "suspend: yes
dump: yes
restore here: yes"
  [[ $out != *"  green   "* ]]
  assert_contains "$out" "-v shows them"
  done_by doctor --no-trial -v
  assert_contains "$out" "This machine"
  assert_contains "$out" "  green   "
}

@test "a reader that goes away ends the doctor without a word, as it ends ps" {
  { stasis doctor --no-trial -v 2>"$BATS_TEST_TMPDIR/err" || echo $? >"$BATS_TEST_TMPDIR/ended"; } | (exec <&-)
  assert_equal "$(<"$BATS_TEST_TMPDIR/ended")" 141
  [[ $(<"$BATS_TEST_TMPDIR/err") != *error* ]]
}

@test "a disk on which no image can be made is told so: dump: no, with what is needed, and restore: yes" {
  capture stasis doctor --no-trial --images-dir "$BATS_TEST_TMPDIR/not/there"
  ((status == 1))
  assert_equal "$(head -3 <<<"$out")" "suspend: yes
dump: no, because $BATS_TEST_TMPDIR/not does not exist, and a dump does not make it
restore here: yes"
  mkdir "$BATS_TEST_TMPDIR/disk"
  mount -t tmpfs -o size=1m tmpfs "$BATS_TEST_TMPDIR/disk" || skip "no file system can be mounted here"
  echo "$BATS_TEST_TMPDIR/disk" >>"$BATS_TEST_TMPDIR/mounts"
  capture stasis doctor --no-trial --images-dir "$BATS_TEST_TMPDIR/disk/image"
  ((status == 1))
  assert_equal "$(sed -n '2,3p' <<<"$out")" "dump: no, because 1.00 MiB free in $BATS_TEST_TMPDIR/disk, and an image needs 64.0 MiB at least
restore here: yes"
}

has_a_record_of() { grep -qs "\"owner\":$1," "$STASIS_STATE_DIR"/*.json; }
@test "a process on which another stasis works is told as busy, with the tool" {
  start_target memory --size 4M
  STASIS_SIM_FAULTS="checkpoint:delay=4s" stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$!
  wait_until 60 has_a_record_of "$tool"
  capture timeout -s KILL 60 stasis doctor --no-trial "$TARGET"
  wait "$tool"
  ((status == 1))
  assert_equal "$(sed -n '1,2p' <<<"$out" | sed 's/ (process [0-9]*)//')" \
    "suspend: no, because \`stasis suspend\` is working on process $TARGET
dump: no, for the same reason"
  stasis resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "to a user without capabilities the verdict says that suspend works, and dump does not" {
  need_root "setpriv"
  capture setpriv --bounding-set=-sys_admin,-checkpoint_restore stasis doctor --no-trial --json
  ((status == 1))
  assert_equal "$(json '[d["verdict"][verb]["possible"] for verb in ("suspend", "dump", "restore")]')" "[True, False, False]"
  assert_contains "$(json 'd["verdict"]["dump"]["because"]')" "'permissions'"
  start_target memory --size 4M
  setpriv --bounding-set=-sys_admin,-checkpoint_restore stasis suspend "$TARGET"
  setpriv --bounding-set=-sys_admin,-checkpoint_restore stasis resume "$TARGET"
  # Before anything is touched, its directory too.
  STASIS_SIM_FAULTS="lock:error=999" refused_by 5 not-permitted setpriv --bounding-set=-sys_admin,-checkpoint_restore \
    stasis dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/image"
  assert_contains "$err" "neither CAP_SYS_ADMIN nor CAP_CHECKPOINT_RESTORE"
  [[ ! -e $BATS_TEST_TMPDIR/image && ! -e $BATS_TEST_TMPDIR/image.failed-dump.log ]]
  target_goes_on
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
  capture stasis doctor --no-trial --criu /nonexistent
  ((status == 1))
  assert_contains "$out" "suspend: yes
dump: no, because "
  assert_contains "$out" "restore here: no, for the same reason"
  assert_contains "$(sed -n '/^This machine/{n;p;}' <<<"$out")" "  red     "
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
  # As what it would say to a suspend and a dump.
  capture stasis doctor $! --no-trial --json
  assert_equal "$status" 1
  assert_equal "$(lights cuda-state)" red
  assert_equal "$(json '[d["verdict"][v]["because"] for v in ("suspend", "dump", "restore")]')" "[['cuda-state'], ['cuda-state'], []]"
  refused 4 not-cuda suspend $!
  assert_contains "$err" "if it was started just now, wait until it uses its GPU"
}

@test "red: an io_uring" {
  start_with 'fd = libc.syscall(425, 8, ctypes.create_string_buffer(120))
if fd < 0: open(folder + "/skip", "w").close()'
  [[ ! -e $BATS_TEST_TMPDIR/skip ]] || skip "this kernel allows no io_uring"
  undumpable io-uring "has an io_uring open"
}

@test "red: a POSIX message queue, with what helps" {
  start_with 'name = b"/stasis-doctor-%d" % os.getpid()
fd = libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None); libc.mq_unlink(name)
if fd < 0: open(folder + "/skip", "w").close()'
  [[ ! -e $BATS_TEST_TMPDIR/skip ]] || skip "this kernel has no message queues"
  undumpable message-queue "mq_close"
  assert_equal "$(lights mount)" ""
}

@test "red: a BPF map" {
  start_with 'fd = libc.syscall(321, 0, ctypes.create_string_buffer(__import__("struct").pack("IIII", 2, 4, 4, 1), 120), 120)
if fd < 0: open(folder + "/skip", "w").close()'
  [[ ! -e $BATS_TEST_TMPDIR/skip ]] || skip "this kernel allows no BPF map"
  undumpable anonymous-file "bpf-map"
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

@test "several reds: a dump lists them, each with what to do" {
  start_with 'libc.shmat.restype = ctypes.c_void_p
number = libc.shmget(0, 4096, 0o1600); libc.shmat(number, None, 0); libc.shmctl(number, 0, None)
fd = os.pidfd_open(1)'
  refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "stasis: error: 2 things stand in the way of a dump (rolled back: every process is as it was) [undumpable]"
  grep -A1 '^- .*outside of the tree: process 1' <<<"$err" | grep -q '^  what to do: '
  grep -A1 '^- .*System V shared memory' <<<"$err" | grep -q '^  what to do: .*unshare --ipc'
  assert_contains "$err" "to let CRIU try all the same: --ignore-obstacles"
  capture stasis dump "$TARGET" --images-dir "$image" --json
  assert_equal "$(json "len(d['error']['obstacles'])")" 2
}

@test "red: memory that the kernel shows to no other process" {
  start_with 'fd = libc.syscall(447, 0)
if fd < 0: open(folder + "/skip", "w").close()'
  [[ ! -e $BATS_TEST_TMPDIR/skip ]] || skip "this kernel has no memfd_secret"
  undumpable secret-memory "memfd_secret"
}

@test "red: a deleted file above the ghost limit, and not with a larger limit" {
  start_with 'f = open(folder + "/ghost", "w+b"); f.write(b"x" * (8 << 20)); f.flush(); os.unlink(folder + "/ghost")'
  refused 9 undumpable dump "$TARGET" --images-dir "$image" --ghost-limit 1M
  assert_contains "$err" "--ghost-limit, or close"
  # What CRIU itself refuses has the same name for programs.
  capture stasis dump "$TARGET" --images-dir "$image" --ghost-limit 1M --ignore-undumpable --json
  assert_equal "$status $(json 'd["error"]["code"]')" "9 criu-failed"
  assert_equal "$(json '[(o["id"], o["remedy"]) for o in d["error"]["obstacles"]]')" \
    "[('deleted-file', 'dump it with a larger --ghost-limit')]"
  unharmed
  done_by dump "$TARGET" --images-dir "$image" --leave-running
}

@test "red: an open TCP connection to a program outside, with the port, and not with --tcp-established" {
  python3 -IS -c 'import socket, sys, time
a = socket.create_server(("127.0.0.1", 0)); print(a.getsockname()[1], file=open(sys.argv[1], "w"), flush=True)
b = a.accept(); time.sleep(300)' "$BATS_TEST_TMPDIR/port" 3>&- &
  at_end_kill $!
  wait_until 60 test -s "$BATS_TEST_TMPDIR/port"
  start_with 'b = socket.create_connection(("127.0.0.1", int(open(folder + "/port").read())))'
  undumpable tcp-connection "--tcp-established"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --tcp-established --network-lock skip
}

@test "red: a datagram socket connected to a process outside, and not with --ext-unix-sk" {
  python3 -IS -c 'import socket, sys, time
a = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); a.bind(sys.argv[1]); time.sleep(300)' "$BATS_TEST_TMPDIR/outside" 3>&- &
  at_end_kill $!
  wait_until 60 test -S "$BATS_TEST_TMPDIR/outside"
  start_with 's = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect(folder + "/outside")'
  undumpable unix-socket "--ext-unix-sk"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --ext-unix-sk
}

@test "red: a file lock, and not with --file-locks" {
  start_with 'f = open(folder + "/locked", "w"); fcntl.flock(f, fcntl.LOCK_EX)'
  undumpable file-lock "--file-locks"
  capture stasis dump "$TARGET" --images-dir "$image" --json
  assert_equal "$(json '[(o["id"], o["pid"] > 0, o["override"]) for o in d["error"]["obstacles"]]')" \
    "[('file-lock', True, '--ignore-obstacles')]"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --file-locks
}

# CRIU writes such a lock down only where it meets the open file first.
@test "red: a lock of a process by a descriptor of its parent, which is lost; one of the parent itself is not" {
  start_with 'f = open(folder + "/locked", "w")
if not os.fork(): fcntl.lockf(f, fcntl.LOCK_EX); time.sleep(300)
g = open(folder + "/own", "w"); fcntl.lockf(g, fcntl.LOCK_EX)
if not os.fork(): time.sleep(300)'
  refused 9 undumpable dump "$TARGET" --images-dir "$image" --leave-running --file-locks
  assert_contains "$err" "locks (fcntl) by descriptors that it has from another process of the tree, which CRIU loses: $BATS_TEST_TMPDIR/locked"
  [[ $err != *"/own "* ]]
  unharmed
}

@test "red: a debugger traces it; managed memory" {
  start_target managed
  capture stasis doctor "$TARGET" --no-trial --json
  ((status == 1))
  assert_equal "$(lights managed-memory)" red
  # Its parent, which has no CUDA: nothing but this look would notice before the GPU memory is evicted.
  start_with 'pass'
  python3 -IS -c 'import ctypes, sys, time
libc = ctypes.CDLL(None)
assert libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0
open(sys.argv[2], "w").close(); time.sleep(300)' "$TARGET" "$BATS_TEST_TMPDIR/traced" 3>&- &
  at_end_kill $!
  wait_until 60 test -e "$BATS_TEST_TMPDIR/traced"
  capture stasis doctor "$TARGET" --no-trial --json
  ((status == 1))
  assert_equal "$(lights tracer)" red
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "is being traced"
  unharmed
}

@test "all that is red stands before all that is yellow, of the process and of the machine" {
  start_with 'libc.mmap.restype = ctypes.c_void_p
libc.mmap(None, ctypes.c_size_t(1 << 40), 0, 0x4022, -1, ctypes.c_long(0))'
  capture stasis doctor "$TARGET" --no-trial --criu /nonexistent
  assert_equal "$status" 1
  assert_equal "$(grep -oE '^  (red|yellow|green) ' <<<"$out" | uniq | xargs)" "red yellow"
  # Each heading again where its part goes on.
  assert_contains "$out" "This machine"$'\n'"  red"
  assert_contains "$out" "Process $TARGET and what is below it"$'\n'"  yellow"
  capture stasis doctor "$TARGET" --no-trial --criu /nonexistent -v
  assert_equal "$(grep -oE '^  (red|yellow|green) ' <<<"$out" | uniq | xargs)" "red yellow green"
}

@test "yellow: much reserved memory; a watch that CRIU finds again is fine" {
  start_with 'fd = libc.inotify_init1(0); libc.inotify_add_watch(fd, b"/dev/shm", 0x100)
libc.mmap.restype = ctypes.c_void_p
libc.mmap(None, ctypes.c_size_t(1 << 40), 0, 0x4022, -1, ctypes.c_long(0))'
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights inotify) $(lights reserved-memory)" " yellow"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
}
