#!/usr/bin/env bats
# What stasis doctor finds red, many cases of each kind side by side: each is held against the real CRIU,
# which fails with the words that stand beside it, or dumps it and a restore would lose it.

load helpers
load stasis_lib
load doctor_lib

setup() { setup_doctor; }
teardown() { end_doctor; }

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
