#!/usr/bin/env bats
# stasis doctor, and what dump refuses by it: each red of a process is held against the real CRIU,
# which must refuse it too.
# Long because it is a list, with one test for each obstacle.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
}
teardown() {
  end_stasis
  # CRIU leaves the second where it was asked by itself; others' are not for us to remove.
  [[ -z $(compgen -G "$BATS_TEST_TMPDIR/criu-*") ]] || rm -f /dev/shm/sem.stasis-doctor-* /dev/shm/link_remap.*
  [[ ! -e $BATS_TEST_TMPDIR/cgroup ]] || wait_until 60 find "$(<"$BATS_TEST_TMPDIR/cgroup")" -depth -type d -delete
  [[ ! -s $BATS_TEST_TMPDIR/ping-range ]] || cat "$BATS_TEST_TMPDIR/ping-range" >/proc/sys/net/ipv4/ping_group_range
  [[ ! -e $BATS_TEST_TMPDIR/huge-pages ]] || cat "$BATS_TEST_TMPDIR/huge-pages" >/proc/sys/vm/nr_hugepages
}

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
  wait_until 60 target_is_up
  wait_until 60 test -e "$BATS_TEST_TMPDIR/ready"
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
  # The driver can suspend it all the same.
  assert_equal "$(json '[d["verdict"][verb]["possible"] for verb in ("suspend", "dump", "restore")]')" "[True, False, True]"
  assert_contains "$(json 'd["verdict"]["dump"]["because"]')" "'$1'"
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
  refused 9 criu-failed dump "$TARGET" --images-dir "$image" --ghost-limit 1M --ignore-undumpable
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

# start_cases: the same with a child for each function case_NAME of PYTHON, which is called NAME, has a
# session of its own and has done what its function says. One that raises is left out. Their numbers
# are those of the files "pid-NAME".
start_cases() {
  start_with "libc.mmap.restype = ctypes.c_void_p
libc.syscall.restype = ctypes.c_long
def other(act):  # a child that does this, and stays
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        act(); os.write(w, b'x'); time.sleep(300)
    os.read(r, 1); os.close(r); os.close(w)
    return pid
def unshare(flags):
    if libc.unshare(flags) != 0: raise OSError(ctypes.get_errno(), 'unshare')
def mapped(size, flags, fd):
    at = libc.mmap(None, ctypes.c_size_t(size), 3, flags, fd, ctypes.c_long(0))
    if at in (None, 2**64 - 1): raise OSError(ctypes.get_errno(), 'mmap')
    return at
def mount(name, kind):
    path = os.path.join(folder, name); os.mkdir(path)
    print(path, file=open(folder + '/mounts', 'a'), flush=True)
    if libc.mount(b't', path.encode(), kind, 0, None) != 0: raise OSError(ctypes.get_errno(), 'mount')
    return path
keep = []
$1
for name, act in [(key[5:], value) for key, value in list(globals().items()) if key.startswith('case_')]:
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(r); os.setsid(); libc.prctl(15, name.encode(), 0, 0, 0)
        try: keep.append(act())
        except OSError as e: os.write(w, str(e).encode()); os._exit(0)
        os.write(w, b'done'); os.close(w); time.sleep(300)
    os.close(w)
    said = os.read(r, 200).decode(); os.close(r)
    if said != 'done': print('not here:', name, said, flush=True)
    else: print(pid, file=open(folder + '/pid-' + name, 'w'))"
}

# light_of NAME ID: the worst of the findings about a process of that name.
light_of() {
  json "max(['', *{f['light'] for f in d['processes'] if f['id'] == '$2' and '($1)' in f['what']}], key=['', 'green', 'yellow', 'red'].index)"
}

# criu_dumps NAME [ARGUMENT...]: plain CRIU does it, with that child alone.
criu_dumps() {
  local images=$BATS_TEST_TMPDIR/criu-$1 pid
  pid=$(<"$BATS_TEST_TMPDIR/pid-$1")
  shift
  rm -rf "$images"
  mkdir "$images"
  "$(real_criu)" dump --no-default-config -t "$pid" -D "$images" -o log --leave-running --manage-cgroups=ignore \
    --network-lock skip --ghost-limit 256M "$@" >/dev/null 2>&1 3>&-
}

# each_is_red: of lines NAME|ID|WORDS: the doctor says so, and CRIU fails with these words.
each_is_red() {
  local name id words
  while IFS='|' read -r name id words; do
    if [[ ! -e $BATS_TEST_TMPDIR/pid-$name ]]; then
      grep "not here: $name" "$TARGET_LOG" | sed 's/^/# /' >&3
      continue
    fi
    assert_equal "$(light_of "$name" "$id")" red "$name"
    if criu_dumps "$name" --link-remap; then
      echo "CRIU dumps $name" >&2
      return 1
    fi
    grep -q "$words" "$BATS_TEST_TMPDIR/criu-$name/log" || {
      grep Error "$BATS_TEST_TMPDIR/criu-$name/log" >&2
      return 1
    }
  done
}

# bats test_tags=long
@test "red: watches, sockets, pipes, mounts, terminals and namespaces that CRIU cannot dump either" {
  python3 -IS -c 'import os, sys, time
m, s = os.openpty(); open(sys.argv[1], "w").write(os.ttyname(s)); time.sleep(300)' "$BATS_TEST_TMPDIR/tty" 3>&- &
  at_end_kill $!
  wait_until 60 test -s "$BATS_TEST_TMPDIR/tty"
  chmod 755 "$BATS_TEST_TMPDIR"
  start_cases 'def case_watch_proc(): libc.inotify_add_watch(libc.inotify_init1(0), b"/proc/self", 0x100)
def case_watch_gone():
    name = "/dev/shm/watched-%d" % os.getpid(); f = open(name, "w")
    libc.inotify_add_watch(libc.inotify_init1(0), name.encode(), 2); os.unlink(name)
    return f
def case_mark_proc():
    fd = libc.fanotify_init(0, 0)
    if fd < 0: raise OSError("no fanotify")
    libc.fanotify_mark(fd, 1, ctypes.c_ulong(2), -100, b"/proc/self")
def case_watch_fine(): libc.inotify_add_watch(libc.inotify_init1(0), b"/dev/shm", 0x100)
def case_mptcp(): return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
def case_watch_link():
    os.symlink("nothing", folder + "/link"); libc.inotify_add_watch(libc.inotify_init1(0), (folder + "/link").encode(), 0x2000002)
def case_in_proc(): os.chdir("/proc/self")
def case_vsock(): return socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
def case_packet_pipe(): os.pipe2(os.O_DIRECT)
def case_alarm_clock():
    if libc.timerfd_create(9, 0) < 0: raise OSError("no alarm clock")
def case_pidfd():
    if libc.syscall(434, os.getpid(), 0o200) < 0: raise OSError("no PIDFD_THREAD")
def case_perf():
    words = (1).to_bytes(4, "little") + (128).to_bytes(4, "little") + (1).to_bytes(8, "little")
    fd = libc.syscall(298, ctypes.create_string_buffer(words, 128), 0, -1, -1, 0)
    if fd < 0: raise OSError("no perf events")
    mapped(8192, 1, fd); os.close(fd)
def case_uts(): other(lambda: unshare(0x4000000))
def case_ipc(): other(lambda: unshare(0x8000000))
def case_user(): other(lambda: unshare(0x10000000))
def case_no_users(): unshare(0x10000000)
def case_time(): unshare(0x80)
def case_net(): other(lambda: unshare(0x40000000))
def case_net_file():
    pid = other(lambda: unshare(0x40000000)); os.open("/proc/%d/ns/net" % pid, os.O_RDONLY)
    os.kill(pid, 9); os.waitpid(pid, 0)
def case_unmounted():
    path = mount("gone", b"tmpfs"); f = open(path + "/x", "w"); libc.umount2(path.encode(), 2)
    return f
def case_covered():
    path = mount("top", b"tmpfs"); f = open(path + "/x", "w"); libc.mount(b"t", path.encode(), b"tmpfs", 0, None)
    print(path, file=open(folder + "/mounts", "a")); open(path + "/x", "w").close()
    return f
def case_hidden():
    path = mount("hidden", b"tmpfs"); f = open(path + "/x", "w")
    libc.mount(b"t", path.encode(), b"tmpfs", 0, None); print(path, file=open(folder + "/mounts", "a"))
    return f
def case_shown_console(): os.open("/dev/tty0", os.O_RDWR | os.O_NOCTTY)
def case_terminal(): os.open(open(folder + "/tty").read(), os.O_RDWR | os.O_NOCTTY)
def case_zombie():
    def act():
        import threading
        threading.Thread(target=lambda: (time.sleep(0.02), os.write(w, b"x"), time.sleep(300))).start(); libc.syscall(60, 0)
    r, w = os.pipe()
    if os.fork() == 0: act()
    os.read(r, 1); os.close(r); os.close(w)
def case_with_directory():
    if libc.syscall(56, 0x200 | 17, 0, 0, 0, 0) == 0:
        while True: time.sleep(300)
def case_with_memory():
    stack = mapped(1 << 16, 0x22, -1)
    libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), ctypes.c_void_p(stack + (1 << 16)), 0x100 | 17, None)
def case_long_path():
    here = os.getcwd(); os.chdir(folder)
    for _ in range(17):
        os.mkdir("d" * 250); os.chdir("d" * 250)
    fd = os.open("file", os.O_RDWR | os.O_CREAT); os.write(fd, b"x" * 4096)
    mapped(4096, 2, fd); os.close(fd); os.chdir(here)
def case_many_groups(): os.setgroups(range(4 * 10**9, 4 * 10**9 + 500))
def case_other_user():
    if int(open("/proc/self/status").read().split("CapEff:")[1].split()[0], 16) >> 24 & 1: raise OSError("CAP_SYS_RESOURCE")
    os.setgroups([]); os.setgid(65534); os.setuid(65534); libc.prctl(4, 1, 0, 0, 0)
def case_other_group():
    if int(open("/proc/self/status").read().split("CapEff:")[1].split()[0], 16) >> 24 & 1: raise OSError("CAP_SYS_RESOURCE")
    os.setresgid(11, 12, 13); libc.prctl(4, 1, 0, 0, 0)'
  capture stasis doctor "$TARGET" --no-trial --json
  ((status == 1))
  each_is_red <<'END'
watch_proc|inotify|Can't dump that handle
watch_gone|inotify|Can't find suitable path for handle
mark_proc|inotify|Can't dump that handle
mptcp|socket|Unsupported proto
with_directory|process-directory|Can't make FS id
with_memory|process-memory|Can't make VM id
vsock|socket|Unknown socket
packet_pipe|packet-pipe|packetized mode
long_path|long-line|bfd buffer is too small
many_groups|long-line|bfd buffer is too small
alarm_clock|timerfd|Unknown clock type
pidfd|pidfd|PIDFD_THREAD
perf|anonymous-file|anon_inode:\[perf_event\]
uts|namespace|Can't dump nested uts
ipc|namespace|Can't dump nested ipc
user|namespace|Can't dump nested user
no_users|namespace|Unable to convert uid or gid
time|namespace|Can't dump nested time
net_file|namespace-file|No NS ID with kid
unmounted|mount|Can't lookup mount
covered|covered-file|overmounted mounts
hidden|covered-file|overmounted mounts
terminal|terminal|without correspond master
shown_console|device|Can't dump file
other_user|other-user|Can't get rlimit
other_group|other-user|Can't get rlimit
END
  assert_equal "$(lights zombie-leader)" red
  if criu_dumps zombie; then return 1; fi
  assert_equal "$(json "[f for f in d['processes'] if f['light'] == 'red' and '(watch_fine)' in f['what']]")" "[]"
  criu_dumps watch_fine
  # CRIU dumps it, and cannot restore it.
  assert_equal "$(light_of net namespace)" red
  criu_dumps net
  # Where handles of files last, as on ext4.
  assert_equal "$(light_of watch_link inotify)" red
  assert_equal "$(light_of in_proc proc-file)" red
  criu_dumps in_proc
  criu_dumps terminal --shell-job
  capture stasis doctor "$(<"$BATS_TEST_TMPDIR/pid-no_users")" --no-trial --json
  assert_equal "$(lights user-namespace)" red
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "MPTCP"
  unharmed
}

@test "red: sockets in a state in which CRIU dumps none of their kind" {
  start_cases 'def netlink(bound, *groups):
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    if bound: s.bind((0, 0))
    for group in groups: s.setsockopt(270, 1, group)
    return s
def case_netlink_fine(): return netlink(True, 1, 5)
def case_high_group(): return netlink(True, 1, 33)
def case_not_bound(): return netlink(False, 1)
def case_unread_netlink():
    import select, struct
    s = netlink(True)
    s.send(struct.pack("IHHIIB3x", 20, 18, 0x301, 1, 0, 0))  # RTM_GETLINK of all
    if not select.select([s], [], [], 1)[0]: raise OSError("no answer")
    return s
def case_not_accepted():
    s = socket.create_server(("127.0.0.1", 0)); c = socket.create_connection(s.getsockname())
    return s, c
def case_unread_error():
    a, b = socket.socketpair(); a.send(b"abc"); b.send(b"x"); b.close()
    return a
def case_accepted_fine():
    s = socket.create_server(("127.0.0.1", 0)); c = socket.create_connection(s.getsockname())
    return s, c, s.accept()
def elsewhere(make):
    a, b = socket.socketpair()
    if os.fork() == 0:
        try: unshare(0x40000000); s = make(); socket.send_fds(b, [b"x"], [s.fileno()])
        finally: os._exit(0)
    os.wait(); b.close(); fds = socket.recv_fds(a, 1, 1)[1]; a.close()
    if not fds: raise OSError("no network namespace")
    return fds
def listening():
    s = socket.socket(); s.bind(("0.0.0.0", 7)); s.listen(); return s
def datagrams():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("0.0.0.0", 7)); return s
def case_else_listening(): return elsewhere(listening)
def case_else_packets(): return elsewhere(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0))
def case_else_unix(): return elsewhere(lambda: socket.socket(socket.AF_UNIX))
def case_else_netlink(): return elsewhere(lambda: netlink(True))
def case_else_udp(): return elsewhere(datagrams)
def case_filter():
    import struct
    code = ctypes.create_string_buffer(struct.pack("<BBhiBBhi", 0xb7, 0, 0, 0, 0x95, 0, 0, 0)); name = ctypes.create_string_buffer(b"GPL")
    what = struct.pack("<IIQQ", 1, 2, ctypes.addressof(code), ctypes.addressof(name)).ljust(128, b"\0")
    program = libc.syscall(321, 5, ctypes.create_string_buffer(what), len(what))
    if program < 0: raise OSError("no eBPF")
    s = datagrams_here(); s.setsockopt(socket.SOL_SOCKET, 50, program); os.close(program)
    return s
def case_filter_fine():
    import struct
    code = ctypes.create_string_buffer(struct.pack("<HBBI", 6, 0, 0, 0xffff)); s = datagrams_here()
    s.setsockopt(socket.SOL_SOCKET, 26, struct.pack("<HxxxxxxQ", 1, ctypes.addressof(code)))
    return s
def datagrams_here():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("127.0.0.1", 0)); return s'
  capture stasis doctor "$TARGET" --no-trial --json
  ((status == 1))
  # At some CRIU does not fail, and makes others.
  local name
  for name in else_udp else_netlink; do
    assert_equal "$(light_of "$name" foreign-socket)" red "$name"
    criu_dumps "$name"
  done
  each_is_red <<'END'
high_group|netlink-socket|more than 32 groups
not_bound|netlink-socket|bound to groups but not to portid
unread_netlink|unread-netlink|has data to read
not_accepted|unaccepted-connection|In-flight connection
unread_error|unread-error|recvmsg
else_listening|foreign-socket|obtained but expected
else_packets|foreign-socket|find packet socket
else_unix|foreign-socket|Unix socket .* not found
filter|socket-filter|socket filter len
END
  for name in netlink_fine accepted_fine filter_fine; do
    assert_equal "$(json "[f for f in d['processes'] if f['light'] == 'red' and '($name)' in f['what']]")" "[]"
    criu_dumps "$name" --tcp-established
  done
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "1 by descriptor"
  unharmed
}

# Each connection waits for a tenth of a second, and then there is none for another.
@test "a server that accepts its connections a moment later is not said to leave them" {
  start_with 'import threading
s = socket.create_server(("127.0.0.1", 0))
def serve():
    while True:
        c = socket.create_connection(s.getsockname()); time.sleep(.1); s.accept()[0].close(); c.close(); time.sleep(.1)
threading.Thread(target=serve, daemon=True).start()'
  local i
  for i in 1 2 3; do
    capture stasis doctor "$TARGET" --no-trial --json
    assert_equal "$(lights unaccepted-connection)" ""
  done
}

@test "yellow: sockets for pings, and raw ones, of which a restore loses addresses and identifier" {
  cat /proc/sys/net/ipv4/ping_group_range >"$BATS_TEST_TMPDIR/ping-range"
  echo "0 2147483647" >/proc/sys/net/ipv4/ping_group_range || skip "no sysctl here"
  start_with 's = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
s.bind(("127.0.0.1", 4321)); s.connect(("127.0.0.1", 0))
unused = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, 253); raw.connect(("127.0.0.2", 0))
raw6 = socket.socket(socket.AF_INET6, socket.SOCK_RAW, 253); raw6.bind(("::1", 0))
unused_raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, 253)'
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights ping-socket)" yellow
  assert_contains "$(json "[f['what'] for f in d['processes'] if f['id'] == 'ping-socket']")" "restore: identifier 4321 (descriptor 3)'"
  assert_equal "$(lights raw-socket)" yellow
  assert_contains "$(json "[f['what'] for f in d['processes'] if f['id'] == 'raw-socket']")" "from any: 127.0.0.1 (descriptor 6), ::1 (descriptor 7)'"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$err" "identifier 4321"
  assert_contains "$err" "raw sockets that are bound or connected"
  target_goes_on
}

@test "yellow: options of sockets that nothing shows, where the program may have set them" {
  start_with 'import struct
REUSE = (socket.SOL_SOCKET, 15)
def listens(name):
    s = socket.socket(); s.setsockopt(*REUSE, 1); s.bind(name); s.listen(); return s
def group(level, name, value):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(level, name, value); return s
alone = listens(("127.0.0.1", 0))
groups = [group(0, 33, 1), group(0, 34, 1), group(0, 32, struct.pack("4s4si", b"", socket.inet_aton("127.0.0.1"), 0))]'
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights unseen-options)" ""
  assert_equal "$(lights tcp-keys)" ""
  end_targets
  rm "$BATS_TEST_TMPDIR/ready"
  start_with 'import struct
REUSE = (socket.SOL_SOCKET, 15)
def listens(port):
    s = socket.socket(); s.setsockopt(*REUSE, 1); s.bind(("127.0.0.1", port)); s.listen(); return s
one = listens(0); two = listens(one.getsockname()[1])
open(folder + "/port", "w").write(str(one.getsockname()[1]))
far = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); far.setsockopt(0, 33, 4); far.setsockopt(0, 32, struct.pack("4s4si", b"", b"", 1))
packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0); packets.bind(("lo", 0x88b5)); packets.setsockopt(263, 18, 6 << 16 | os.getpid() & 0xffff)
member = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); member.setsockopt(0, 35, struct.pack("4s4si", socket.inet_aton("224.1.2.3"), b"", 1))'
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights unseen-options)" "yellow yellow yellow"
  assert_contains "$out" "PACKET_FANOUT_CBPF"
  assert_contains "$out" "port $(<"$BATS_TEST_TMPDIR/port") (2 sockets)"
  assert_equal "$(json "[f['what'].count('descriptor ') for f in d['processes'] if 'multicast' in f['what']]")" "[2]"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$err" "a program that chooses among them"
  target_goes_on
}

@test "red: what CRIU dumps without a word and a restore would take from the program" {
  start_cases 'def thread(act):
    import threading
    done = threading.Event()
    def run():
        try: act()
        except OSError as e: failed.append(e)
        done.set(); time.sleep(300)
    failed = []
    threading.Thread(target=run, daemon=True).start(); done.wait()
    if failed: raise failed[0]
def called(*words):
    if libc.syscall(*words) < 0: raise OSError(ctypes.get_errno(), "system call")
def case_uts(): thread(lambda: unshare(0x4000000))
def case_network(): thread(lambda: unshare(0x40000000))
def case_mounts(): thread(lambda: unshare(0x20000))
def case_files(): thread(lambda: unshare(0x400))
def case_directory(): thread(lambda: unshare(0x200))
def case_deadline():
    import struct
    thread(lambda: called(314, 0, struct.pack("IIQiIQQQ", 48, 6, 0, 0, 0, 10**7, 3 * 10**7, 10**8), 0))
def case_numbers(): unshare(0x20000000)
def case_numbers_gone():
    unshare(0x20000000)
    if os.fork() == 0: os._exit(0)
    os.wait()
def case_sealed():
    called(462, 0, 0, 0)
    called(462, ctypes.c_void_p(mapped(1 << 16, 0x22, -1)), ctypes.c_size_t(1 << 16), 0)
def case_keys():
    import struct
    s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
    s.setsockopt(socket.IPPROTO_TCP, 14, struct.pack("<HH4s120sBBHi80s", 2, 0, socket.inet_aton("127.0.0.1"), b"", 0, 0, 3, 0, b"key"))
    keep.append(s)
def case_provided():
    import fcntl, struct
    called(462, 0, 0, 0)
    fd = libc.syscall(323, 0)
    if fd < 0: raise OSError("no userfaultfd")
    fcntl.ioctl(fd, 0xc018aa3f, struct.pack("QQQ", 0xaa, 0, 0))
    fcntl.ioctl(fd, 0xc020aa00, struct.pack("QQQQ", mapped(1 << 16, 0x22, -1), 1 << 16, 1, 0))
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid(); os.closerange(0, fd); os.closerange(fd + 1, 1000); time.sleep(300)
        os._exit(0)
    os.wait(); os.close(fd)'
  capture stasis doctor "$TARGET" --no-trial --json
  ((status == 1))
  while IFS='|' read -r name id words; do
    [[ -e $BATS_TEST_TMPDIR/pid-$name ]] || {
      grep "not here: $name" "$TARGET_LOG" | sed 's/^/# /' >&3
      continue
    }
    assert_equal "$(light_of "$name" "$id")" red "$name"
    assert_contains "$(json "[f['what'] for f in d['processes'] if '($name)' in f['what']]")" "$words"
    criu_dumps "$name"
  done <<'END'
uts|thread-namespace|uts of thread
network|thread-namespace|net of thread
mounts|thread-namespace|mnt of thread
files|thread-files|thread
directory|thread-directory|thread
deadline|scheduler|SCHED_DEADLINE (thread
numbers|namespace|unshare --pid
numbers_gone|namespace|unshare --pid
sealed|sealed-memory|has sealed memory
provided|provided-memory|userfaultfd
keys|tcp-keys|keys that sign what they send
END
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "uts of thread"
  assert_contains "$err" "descriptors of their own"
  unharmed
  # Who insists is told.
  done_by dump "$TARGET" --images-dir "$image" --leave-running --ignore-undumpable
  assert_contains "$err" "descriptors of their own"
}

# Where there is one place for all memory, it is not looked for.
@test "memory that wants to lie elsewhere than all other is told at a dump, on a machine with several NUMA nodes" {
  need_root "mounts"
  local MPOL_PREFERRED=1 place
  place="import ctypes, mmap
pages = mmap.mmap(-1, 1 << 20)
place, nodes = ctypes.addressof(ctypes.c_char.from_buffer(pages)), ctypes.c_ulong(1)
assert ctypes.CDLL(None).syscall(237, ctypes.c_void_p(place), ctypes.c_size_t(1 << 20), $MPOL_PREFERRED, ctypes.byref(nodes), 8, 0) == 0"
  [[ -e /sys/devices/system/node/online ]] && python3 -c "$place" || skip "no NUMA here, or no mbind()"
  start_with "$place"
  echo 0-1 >"$BATS_TEST_TMPDIR/nodes"
  capture stasis doctor "$TARGET" --no-trial --json
  [[ $out != *numa-policy* ]]
  # Of the tests' own mounts: in others CRIU would pack all that is in file systems in memory.
  mount --bind "$BATS_TEST_TMPDIR/nodes" /sys/devices/system/node/online
  echo /sys/devices/system/node/online >>"$BATS_TEST_TMPDIR/mounts"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_contains "$out" '"numa-policy"'
  capture stasis dump "$TARGET" --images-dir "$image" --leave-running
  assert_equal "$status" 0 "$err"
  assert_contains "$err" "NUMA policy of its own (mbind)"
  target_goes_on
}

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

@test "told: what a process has taken by SEM_UNDO, its descriptor table, its time stamp counter, dispatched calls, attributes of a deleted file" {
  start_with 'import struct, threading
gone = os.open(folder + "/gone", os.O_RDWR | os.O_CREAT)
try: os.setxattr(folder + "/gone", "user.kept", b"1"); print("attribute set", flush=True)
except OSError as e: print(e, flush=True)
os.unlink(folder + "/gone")
sem = libc.semget(0, 1, 0o600); libc.semctl(sem, 0, 16, 5)
libc.semop(sem, struct.pack("hhh", 0, -2, 0x1000), 1)
libc.syscall(154, 1, struct.pack("IIII", 1, 0x1000, 0xfffff, 0x51), 16)
selector = ctypes.create_string_buffer(1)
def dispatched():
    print("dispatch", libc.prctl(59, 1, 0, 0, selector), flush=True)
    time.sleep(1)
    open(folder + "/sem", "w").write(str(sem)); open(folder + "/ready", "w").close()
    while True: time.sleep(.1)
threading.Thread(target=dispatched, daemon=True).start()
time.sleep(.2)
# From here on a look at the clock ends it, as one does that waits for the interpreter: this call does not let go of it.
ctypes.PyDLL(None).prctl(26, 2, 0, 0, 0)
while True: libc.pause()'
  local sem
  sem=$(<"$BATS_TEST_TMPDIR/sem")
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights sysv-semaphore)" yellow
  assert_contains "$out" "set $sem"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  ipcrm -s "$sem"
  assert_contains "$err" "SEM_UNDO"
  assert_contains "$err" "modify_ldt"
  ! grep -q "attribute set" "$TARGET_LOG" || assert_contains "$err" "user.kept of $BATS_TEST_TMPDIR/gone"
  assert_contains "$err" "PR_SET_TSC"
  ! grep -q "dispatch 0" "$TARGET_LOG" || assert_contains "$err" "PR_SET_SYSCALL_USER_DISPATCH"
  target_goes_on
}

@test "told: flags of watches, watches of deleted files, signals at a child's end, cgroups of parts, attributes of a memfd" {
  local cgroup base
  for base in /sys/fs/cgroup/unified /sys/fs/cgroup; do
    [[ -w $base/cgroup.procs ]] && cgroup=$(mktemp -d "$base/stasis-doctor-XXXXXX" 2>/dev/null) && break
    cgroup=
  done
  [[ -z $cgroup ]] || echo "$cgroup" >"$BATS_TEST_TMPDIR/cgroup"
  # On a tmpfs CRIU cannot dump it.
  local kept=
  case $(stat -f -c %T /var/tmp) in ext2/ext3 | xfs | btrfs) kept=$(mktemp /var/tmp/stasis-doctor-XXXXXX) ;; esac
  start_with "import signal
os.mkdir(folder + '/watched'); events = libc.inotify_init1(0)
libc.inotify_add_watch(events, (folder + '/watched').encode(), 0x84000100)  # IN_CREATE
if '$kept':
    deleted = open('$kept'); libc.inotify_add_watch(events, b'$kept', 2); os.unlink('$kept')
memory = os.memfd_create('named')
try: os.setxattr(memory, 'user.kept', b'1'); print('attribute set', flush=True)
except OSError as e: print(e, flush=True)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
if libc.syscall(56, signal.SIGUSR1, 0, 0, 0, 0) == 0:  # clone
    if '$cgroup': open('$cgroup/cgroup.procs', 'w').write('0')
    # Only below a cgroup of threads may one have another than its process.
    if '$cgroup':
        import threading
        os.mkdir('$cgroup/of-thread'); open('$cgroup/of-thread/cgroup.type', 'w').write('threaded')
        one = threading.Thread(target=lambda: time.sleep(300), daemon=True); one.start()
        open('$cgroup/of-thread/cgroup.threads', 'w').write(str(one.native_id))
    os.close(events); open(folder + '/in.new', 'w').write(str(os.getpid())); os.rename(folder + '/in.new', folder + '/in')
    while True: time.sleep(1)
while not os.path.exists(folder + '/in'): time.sleep(.01)"
  at_end_kill "$(<"$BATS_TEST_TMPDIR/in")"
  capture stasis doctor "$TARGET" --no-trial --json
  for id in watch-flags exit-signal; do assert_equal "$(lights $id)" yellow "$id"; done
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$err" "IN_ONESHOT, IN_EXCL_UNLINK of inode"
  assert_contains "$err" "has an exit signal other than SIGCHLD, or none (clone); a restored process has SIGCHLD: signal 10"
  [[ -z $kept ]] || assert_contains "$err" "watches deleted files"
  [[ -z $cgroup ]] || assert_contains "$err" "in another cgroup than the root of the tree"
  [[ -z $cgroup ]] || assert_contains "$err" "has threads in another cgroup than its own"
  ! grep -q "attribute set" "$TARGET_LOG" || assert_contains "$err" "user.kept of /memfd:named"
  target_goes_on
}

@test "told: what a restore of a network namespace leaves out" {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  (exec_on_gpu setsid unshare --net stasis-workload memory --size 1M --status "$TARGET_STATUS") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights own-network)" yellow
  # From within it is not CRIU's affair.
  capture nsenter --target "$TARGET" --net stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights own-network)" ""
}

@test "devices and routes of its own network that no restore brings back are told" {
  need_root "network namespaces"
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  (exec_on_gpu setsid unshare --net stasis-workload memory --size 1M --status "$TARGET_STATUS") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  inside() { nsenter --target "$TARGET" --net "$@"; }
  inside ip link add name inner type veth peer name outer
  inside ip address add 10.77.0.1/24 dev inner
  inside ip link set inner up
  inside ip link set outer up
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights network-route)" ""
  [[ $out != *"connects with nothing"* ]] || return 1
  inside ip link set outer down
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights network-route)" red
  assert_contains "$out" "no restore succeeds: inner"
  refused 9 undumpable dump "$TARGET" --images-dir "$image"
  inside ip address flush dev inner
  inside unshare --net sleep 300 3>&- &
  local other=$!
  echo "$other" >>"$targets"
  wait_until 60 test "$(readlink "/proc/$TARGET/ns/net")" != "$(readlink "/proc/$other/ns/net")"
  inside ip link set outer netns "$other"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_contains "$out" "connects with nothing: inner (veth)"
  if ! inside ip link add name above link inner type macvlan mode bridge; then skip "no macvlan here"; fi
  refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "that a restore cannot make: above (macvlan)"
  target_goes_on
}

@test "user and mount namespaces of its own are refused, and one of cgroups is told" {
  need_root "namespaces"
  local how
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  for how in "--user --map-root-user" --mount --cgroup; do
    # Opened in it: no file of it is on a mount of before.
    # shellcheck disable=SC2016,SC2086 # words; of the inner shell
    (exec_on_gpu setsid unshare $how bash -c 'for fd in {3..30}; do eval "exec $fd>&-"; done; exec </dev/null >"$1" 2>&1
      exec stasis-workload memory --size 1M --status "$2"' - "$TARGET_LOG" "$TARGET_STATUS") </dev/null >/dev/null 2>&1 3>&- &
    TARGET=$!
    echo "$TARGET" >>"$targets"
    wait_until 60 target_is_up
    capture stasis doctor "$TARGET" --no-trial --json
    case $how in
      --cgroup) assert_equal "$(lights cgroup)" yellow ;;
      --mount) assert_equal "$(lights namespace)" red ;;
      *) assert_equal "$(lights user-namespace)" red ;;
    esac
    [[ $how == --cgroup ]] || refused 9 undumpable dump "$TARGET" --images-dir "$image"
    target_goes_on
    if [[ $how == --mount ]]; then
      capture nsenter --target "$TARGET" --mount stasis doctor "$TARGET" --no-trial --json
      assert_equal "$(lights namespace)" ""
    fi
    end_targets
    rm "$TARGET_STATUS"
  done
}

@test "told: locks of files that are only mapped any more, and no others" {
  start_with 'import mmap, struct
held = []
def lock(name, how):
    at = os.open(folder + "/" + name, os.O_RDWR | os.O_CREAT); os.ftruncate(at, 4096); how(at); return at
def flock(at): fcntl.flock(at, fcntl.LOCK_EX)
def ofd(at): fcntl.fcntl(at, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
for name, how, is_closed in ("flocked", flock, True), ("ofd", ofd, True), ("open", flock, False):
    at = lock(name, how); libc.mmap(None, 4096, 3, 1, at, 0)
    if is_closed: os.close(at)
# Locked by descriptors that are open; /proc/PID/maps has another name for them.
at = lock("odd\nname", flock); libc.mmap(None, 4096, 3, 1, at, 0)
lock("first-name", flock); os.link(folder + "/first-name", folder + "/second-name")
at = os.open(folder + "/second-name", os.O_RDWR); libc.mmap(None, 4096, 3, 1, at, 0); os.close(at)
# One that a process outside has locked.
at = lock("of-another", lambda at: libc.mmap(None, 4096, 3, 1, at, 0)); os.close(at)'
  exec {lock}>>"$BATS_TEST_TMPDIR/of-another"
  flock "$lock"
  capture stasis doctor "$TARGET" --no-trial --json
  exec {lock}>&-
  assert_equal "$(lights mapped-lock)" yellow
  local told
  told=$(json "[f['what'] for f in d['processes'] if f['id'] == 'mapped-lock'][0]")
  assert_contains "$told" "a restore loses them: $BATS_TEST_TMPDIR/flocked (FLOCK), $BATS_TEST_TMPDIR/ofd (OFDLCK)"
  [[ $told != *"/open"* && $told != *of-another* && $told != *odd* && $told != *-name* ]]
  done_by dump "$TARGET" --images-dir "$image" --file-locks --leave-running
  assert_contains "$err" "$BATS_TEST_TMPDIR/ofd (OFDLCK)"
  target_goes_on
}

@test "told: that a child goes on again, which its parent has not seen" {
  start_with 'import signal
child = os.fork()
if child == 0:
    while True: signal.pause()
open(folder + "/child", "w").write(str(child))
os.kill(child, signal.SIGSTOP); os.waitpid(child, os.WUNTRACED); os.kill(child, signal.SIGCONT)
os.waitid(os.P_PID, child, os.WCONTINUED | os.WNOWAIT)'
  at_end_kill "$(<"$BATS_TEST_TMPDIR/child")"
  done_by dump "$TARGET" --images-dir "$image-first" --leave-running --json
  assert_contains "$(json "'; '.join(d['lost'])")" "that its child $(<"$BATS_TEST_TMPDIR/child") goes on again (wait with WCONTINUED)"
  # To ask has taken nothing away.
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  assert_contains "$(json "'; '.join(d['lost'])")" "(wait with WCONTINUED)"
  target_goes_on
}

@test "told: keys and dispatched calls of the last of many threads" {
  start_with 'import threading
threading.stack_size(65536)
selector = ctypes.create_string_buffer(1)
def wait(): time.sleep(300)
def last():
    print("dispatch", libc.prctl(59, 1, 0, 0, selector), flush=True)
    if libc.syscall(248, b"user", b"stasis-test", b"v", 1, -1) > 0: print("key", flush=True)  # add_key
    open(folder + "/thread", "w").write(str(threading.get_native_id())); done.set(); wait()
done = threading.Event()
for work in [wait] * 70 + [last]: threading.Thread(target=work, daemon=True).start()
done.wait()'
  local thread
  thread=$(<"$BATS_TEST_TMPDIR/thread")
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  local lost
  lost=$(json "'; '.join(d['lost'])")
  ! grep -q "dispatch 0" "$TARGET_LOG" || assert_contains "$lost" "(PR_SET_SYSCALL_USER_DISPATCH): $thread"
  ! grep -q key "$TARGET_LOG" || assert_contains "$lost" "the keys of threads other than the first (keyctl): $thread"
  target_goes_on
}

@test "told: memory that the kernel may drop, a child of another thread, a child that has left a core" {
  start_with 'import resource, subprocess, threading
libc.mmap.restype = ctypes.c_void_p
# MAP_DROPPABLE; a new process has some for its random numbers.
if libc.mmap(None, 2 << 20, 3, 0x28, -1, 0) != ctypes.c_void_p(-1).value: print("droppable", flush=True)
def make():
    open(folder + "/child", "w").write(str(subprocess.Popen(["sleep", "300"]).pid)); made.set(); time.sleep(300)
made = threading.Event(); threading.Thread(target=make, daemon=True).start(); made.wait()
child = os.fork()
if child == 0:
    os.chdir(folder); resource.setrlimit(resource.RLIMIT_CORE, (-1, -1)); libc.prctl(4, 1, 0, 0, 0); os.abort()
if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT).si_code == os.CLD_DUMPED: print("core", flush=True)
open(folder + "/core-of", "w").write(str(child))'
  local child
  child=$(<"$BATS_TEST_TMPDIR/child")
  at_end_kill "$child"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights thread-child)" yellow
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$err" "first thread has made them all"
  assert_contains "$err" ": process $child of thread "
  ! grep -q droppable "$TARGET_LOG" || assert_contains "$err" "(MAP_DROPPABLE): it comes back as zeros: 2.00 MiB"
  ! grep -q core "$TARGET_LOG" || assert_contains "$err" "without one: process $(<"$BATS_TEST_TMPDIR/core-of") (python3), signal 6"
  target_goes_on
}

@test "a supervisor of system calls, to which a restore would not connect the program, is refused" {
  cat >"$BATS_TEST_TMPDIR/supervised.py" <<'END'
import ctypes, os, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
# getpriority(2) is left to the supervisor.
program = b"".join(struct.pack("HBBI", *one) for one in
                   [(0x20, 0, 0, 0), (0x15, 0, 1, 140), (6, 0, 0, 0x7fc00000), (6, 0, 0, 0x7fff0000)])
text = ctypes.create_string_buffer(program)
filters = struct.pack("HxxxxxxQ", 4, ctypes.addressof(text))
libc.prctl(38, 1, 0, 0, 0)
listener = libc.syscall(317, 1, 8, filters)  # seccomp(2), SECCOMP_FILTER_FLAG_NEW_LISTENER
if listener < 0: open(sys.argv[1] + "/none", "w").close(); sys.exit()
if os.fork() == 0:
    # The supervisor's place: outside of the tree, and it never answers.
    os.setsid()
    if os.fork(): os._exit(0)
    open(sys.argv[1] + "/supervisor", "w").write(str(os.getpid()))
    for fd in 0, 1, 2: os.close(fd)
    time.sleep(300)
os.wait(); os.close(listener)
while not os.path.exists(sys.argv[1] + "/supervisor"): time.sleep(.01)
os.execvp("stasis-workload", ["stasis-workload", "memory", "--size", "1M", "--status", sys.argv[1] + "/status"])
END
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  (exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/supervised.py" "$BATS_TEST_TMPDIR") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 test -e "$BATS_TEST_TMPDIR/supervisor" -o -e "$BATS_TEST_TMPDIR/none"
  [[ ! -e $BATS_TEST_TMPDIR/none ]] || skip "this kernel gives no listener"
  at_end_kill "$(<"$BATS_TEST_TMPDIR/supervisor")"
  wait_until 60 target_is_up
  capture stasis dump "$TARGET" --images-dir "$image" --json
  assert_equal "$status $(json "d['error']['obstacles'][0]['id']")" "9 seccomp-listener"
  unharmed
  done_by dump "$TARGET" --images-dir "$image" --leave-running --ignore-undumpable
  assert_contains "$err" "the supervisor of its system calls"
  target_goes_on
}

# in_landlock WHO: a tree with a Python program that may make no FIFO any more, or a thread of it.
in_landlock() {
  start_with "def enter():
    rules = libc.syscall(444, (1 << 12).to_bytes(8, 'little'), 8, 0)
    libc.prctl(38, 1, 0, 0, 0)
    entered.append(rules >= 0 and libc.syscall(446, rules, 0) == 0)
    os.close(rules); done.set(); last()
import threading
entered, done, last = [], threading.Event(), lambda: None
if '$1' == 'thread':
    last = lambda: time.sleep(300)
    threading.Thread(target=enter, daemon=True).start(); done.wait()
else: enter()
print('in a domain:', entered[0], flush=True)"
  grep -q "in a domain: True" "$TARGET_LOG" || skip "this kernel has no Landlock"
  [[ ! -s /proc/self/attr/current ]] || grep -q unconfined /proc/self/attr/current || skip "a security module confines this"
}

@test "a sandbox by Landlock, of a process or of a thread, is not lost without a word" {
  local who
  for who in process thread; do
    rm -f "$BATS_TEST_TMPDIR/ready" "$BATS_TEST_TMPDIR/status"
    in_landlock "$who"
    refused 9 undumpable dump "$TARGET" --images-dir "$image"
    assert_contains "$err" "in a sandbox (a Landlock domain)"
    unharmed
    capture stasis dump "$TARGET" --images-dir "$image" --json
    assert_equal "$(json '[(o["id"], o["override"]) for o in d["error"]["obstacles"]]')" "[('landlock', '--ignore-obstacles')]"
    assert_equal "$(pgrep -x cat --parent "$TARGET" || true)" ""
    done_by dump "$TARGET" --images-dir "$image" --leave-running --ignore-undumpable --json
    assert_contains "$(json "'; '.join(d['lost'])")" "its sandbox (a Landlock domain)"
    rm -rf "$image"
    kill -9 -- "-$TARGET"
  done
}

@test "a program whose filter kills for what a dump asks of it is asked without the filter" {
  # Kills for keyctl (250) on x86-64, and lets all else pass.
  start_with 'import struct
rules = b"".join(struct.pack("HBBI", *rule) for rule in ((0x20, 0, 0, 0), (0x15, 0, 1, 250), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7fff0000)))
code = ctypes.create_string_buffer(rules, len(rules))
class Program(ctypes.Structure): _fields_ = [("n", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
libc.prctl(38, 1, 0, 0, 0)
open(folder + "/number", "w").write(str(os.getpid()))
assert libc.syscall(317, 1, 0, ctypes.byref(Program(4, ctypes.addressof(code)))) == 0'
  local program
  program=$(<"$BATS_TEST_TMPDIR/number")
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  kill -0 "$program"
  target_goes_on
}

@test "red: everything, for a stasis under a seccomp filter; a filter of the target alone is fine" {
  local filter='import ctypes, struct, sys, os
libc = ctypes.CDLL(None, use_errno=True)
rule = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000), 8)  # all is allowed
class Program(ctypes.Structure): _fields_ = [("n", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
libc.prctl(38, 1, 0, 0, 0)
assert libc.syscall(317, 1, 0, ctypes.byref(Program(1, ctypes.addressof(rule)))) == 0'
  start_with "$filter"
  local under=(python3 -IS -c "$filter
os.execvp(sys.argv[1], sys.argv[1:])" stasis)
  capture "${under[@]}" doctor "$TARGET" --no-trial --json
  ((status == 1))
  assert_equal "$(lights seccomp)" red
  assert_equal "$(json "[f['light'] for f in d['machine'] if f['id'] == 'seccomp']")" "['red']"
  refused_by 9 undumpable "${under[@]}" dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "seccomp=unconfined"
  refused_by 9 criu-failed "${under[@]}" dump "$TARGET" --images-dir "$image" --ignore-undumpable
  unharmed
  done_by dump "$TARGET" --images-dir "$image" --leave-running
}

# bats test_tags=long
@test "semaphores in /dev/shm and huge pages are told, and red where CRIU fails" {
  local before
  before=$(</proc/sys/vm/nr_hugepages)
  echo "$before" >"$BATS_TEST_TMPDIR/huge-pages"
  echo $((before + 3)) 2>/dev/null >/proc/sys/vm/nr_hugepages || true
  start_cases 'def case_semaphore():
    libc.sem_open.restype = ctypes.c_void_p
    if not libc.sem_open(b"/stasis-doctor-%d" % os.getpid(), 0o100, 0o600, 1): raise OSError("no semaphore")
def case_huge(): ctypes.memset(mapped(2 << 20, 0x40022, -1), 1, 2 << 20)
def case_huge_gone():
    path = mount("huge", b"hugetlbfs") + "/x"; fd = os.open(path, os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 2 << 20)
    ctypes.memset(mapped(2 << 20, 1, fd), 1, 2 << 20); os.unlink(path)'
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(light_of semaphore shared-memory)" yellow
  criu_dumps semaphore --link-remap
  if criu_dumps semaphore; then return 1; fi
  grep -q "link remap" "$BATS_TEST_TMPDIR/criu-semaphore/log"
  each_is_red <<<"huge_gone|deleted-file|Can't send ghost to image"
  if [[ -e $BATS_TEST_TMPDIR/pid-huge ]]; then
    assert_equal "$(light_of huge huge-pages)" yellow
    criu_dumps huge
    echo $((before + 2)) >/proc/sys/vm/nr_hugepages
    if [[ $before == 0 && ! -e /run/criu.kdat && -e $BATS_TEST_TMPDIR/pid-huge_gone ]]; then
      capture stasis doctor "$TARGET" --no-trial --json
      each_is_red <<<"huge|huge-pages|path=/anon_hugepage"
    fi
  fi
  refused 9 undumpable dump "$TARGET" --images-dir "$image" --no-link-remap
  assert_contains "$err" "/dev/shm/sem."
  unharmed
}

@test "memory of huge pages that is not mapped is red where CRIU does not know it" {
  start_cases 'def case_huge_memory():
    fd = libc.memfd_create(b"huge", 4)
    if fd < 0: raise OSError("no huge pages")
    return fd'
  [[ -e $BATS_TEST_TMPDIR/pid-huge_memory ]] || skip "no memory of huge pages"
  local expected=red
  if criu_dumps huge_memory; then expected=; fi
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(light_of huge_memory huge-pages)" "$expected"
}

@test "red: a PID namespace without its first process" {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  # shellcheck disable=SC2016
  (exec_on_gpu unshare --pid --fork --kill-child bash -c 'setsid stasis-workload memory --size 1M --status "$1" & wait' \
    bash "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 target_is_up
  TARGET=$(pgrep -f "stasis-workload memory --size 1M --status $TARGET_STATUS" | tail -n 1)
  undumpable pid-namespace "whose first process is not part of the tree"
}

# A restore gave it another number, and refused its own image after the job was gone.
@test "red: the first process of a PID namespace, from outside" {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  # shellcheck disable=SC2016
  (exec_on_gpu unshare --pid --fork --kill-child stasis-workload memory --size 1M --status "$TARGET_STATUS") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 target_is_up
  TARGET=$(pgrep -f "^stasis-workload memory --size 1M --status $TARGET_STATUS" | tail -n 1)
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights pid-namespace)" red
  refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "is the first process of a container's PID namespace"
  unharmed
}

# bats test_tags=long
@test "yellow: a restore from a cgroup that has no room for as many processes" {
  local group=/sys/fs/cgroup/pids/stasis-test-${BATS_RUN_TMPDIR##*/}
  [[ -d /sys/fs/cgroup/pids ]] || group=/sys/fs/cgroup/stasis-test-${BATS_RUN_TMPDIR##*/}
  mkdir "$group" 2>/dev/null || skip "no cgroup can be made here"
  cgroups+=("$group")
  start_with 'import threading
for _ in range(40): threading.Thread(target=lambda: time.sleep(300), daemon=True).start()'
  echo 30 2>/dev/null >"$group/pids.max" || skip "no limit of processes can be set here"
  # shellcheck disable=SC2016
  local inside=(bash -c 'echo $$ >"$1/cgroup.procs" && shift && exec stasis "$@"' bash "$group")
  capture "${inside[@]}" doctor "$TARGET" --no-trial --json
  assert_equal "$(lights limit-processes)" yellow
  assert_equal "$(json "[f['light'] for f in d['machine'] if f['id'] == 'limit-processes']")" "['yellow']"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights limit-processes)" green
  dump_it
  capture "${inside[@]}" restore --images-dir "$image" --detach
  ((status != 0))
  restore_it
  target_goes_on
}
