#!/usr/bin/env bats
# What stasis doctor finds yellow and a dump tells, because a restore changes it without a sign.

load helpers
load stasis_lib
load doctor_lib

setup() { setup_doctor; }
teardown() { end_doctor; }

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
