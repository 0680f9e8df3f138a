#!/usr/bin/env bats
# What open files are set to, and what is in them: before a dump and after a restore, and after a dump that was given up.

load helpers
load stasis_lib
load stasis_jobs_lib

setup() { setup_job; }
teardown() {
  end_stasis
  local at=$BATS_TEST_TMPDIR/mount
  if mountpoint -q "$at/all"; then umount -l "$at/all"; fi
  if mountpoint -q "$at"; then umount -l "$at"; fi
}

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

# start_with_unread: six terminals with what is not yet read of them, which is read when $TARGET_STATUS.read is there.
start_with_unread() {
  start_python "import signal
signal.signal(signal.SIGIO, signal.SIG_IGN)
ends, others = zip(*[os.openpty() for _ in range(6)])
os.write(others[0], b'hello\\nworld')
os.write(ends[1], b'a line\\nand more\\nrest')
os.write(others[2], b'stopped')
libc.ioctl(others[2], 0x540A, 0)  # TCXONC, TCOOFF
os.write(others[3], b'by typing')
os.write(ends[3], b'\\x13')
fcntl.ioctl(ends[4], 0x5420, struct.pack('i', 1))  # TIOCPKT
os.write(others[4], b'packet')
fcntl.fcntl(others[5], fcntl.F_SETFL, os.O_ASYNC)
def waits(file): return struct.unpack('i', fcntl.ioctl(file, 0x541B, bytes(4)))[0]
all = ends + others
while [waits(end) for end in ends[:5]] != [12, 22, 7, 9, 6] or waits(others[1]) != 16 or events(others[3]) != [0]: time.sleep(0.001)
def content(file):
    got = []
    while waits(file): got.append(os.read(file, 100))
    return b'|'.join(got)
def look():
    # Without O_LARGEFILE, with which CRIU opens all.
    told = [fcntl.fcntl(file, fcntl.F_GETFL) & ~0o100000 for file in all] + events(*all)
    if not os.path.exists(here + '.read'): return told
    told += [content(file) for file in all]
    # What of a line was typed is the beginning of the next one.
    os.write(ends[1], b'!\\n')
    while not waits(others[1]): time.sleep(0.001)
    return told + [content(others[1])]"
  look
  before=$told
}
# is_unread REST: all is as it was; REST of a line that was typed.
is_unread() {
  look
  assert_equal "$told" "$before"
  touch "$TARGET_STATUS.read"
  look
  assert_equal "$told" "${before%]}, b'hello\\r\\nworld', b'a line\\r\\nand more\\r\\nrest', b'stopped', b'by typing', b'\\x00packet', b'', b'', b'a line\\n|and more\\n', b'', b'', b'', b'', b'$1!\\n']"
}

@test "a dump that is given up late leaves terminals as they were, with what is not yet read of them" {
  need_root "CRIU"
  start_with_unread
  STASIS_FAULT=dump.ending:error refused 1 internal dump "$TARGET" --images-dir "$image"
  is_unread rest
}

@test "a dump that is killed leaves terminals as they were when it is recovered" {
  need_root "CRIU"
  local point
  for point in image.collected dump.ending; do
    start_with_unread
    STASIS_FAULT=$point:kill capture stasis dump "$TARGET" --images-dir "$image"
    assert_equal "$status" 137
    done_by recover --all
    is_unread rest
    end_targets
    rm -rf "$image" "$TARGET_STATUS".*
  done
}

@test "a program that runs on after a dump has what is not yet read of terminals as it was" {
  need_root "CRIU"
  start_with_unread
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  is_unread rest
}

# CRIU makes what it takes for terminals O_NONBLOCK and leaves them so.
@test "a controlling terminal that is open by /dev/tty, and a console, wait as before in a program that runs on after a dump" {
  need_root "CRIU"
  start_python "import termios
console = os.open('/dev/console', os.O_WRONLY | os.O_NOCTTY) if os.path.exists('/dev/console') else -1
if os.fork() == 0:
    os.setsid(); end, other = os.openpty(); fcntl.ioctl(other, termios.TIOCSCTTY, 0)
    tty = os.open('/dev/tty', os.O_RDWR); open(here + '.number', 'w').write(str(tty)); time.sleep(300)
while not os.path.exists(here + '.number') or not os.path.getsize(here + '.number'): time.sleep(0.001)
def look(): return ''"
  local holder descriptor before
  holder=$(pgrep -P "$TARGET" python3)
  descriptor=$(<"$TARGET_STATUS.number")
  before=$(grep ^flags: "/proc/$holder/fdinfo/$descriptor")
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  [[ $err != *"terminals are not as they were"* ]]
  assert_equal "$(grep ^flags: "/proc/$holder/fdinfo/$descriptor")" "$before"
  target_goes_on
}

@test "what is not yet read of terminals is as it was after a restore" {
  need_root "CRIU"
  start_with_unread
  dump_it
  restore_it
  is_unread ""
}

@test "a terminal, a FIFO and an inotify that signal when they can be read (O_ASYNC) do so after a restore" {
  need_root "CRIU"
  start_python "import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
os.mkfifo(here + '.fifo')
ends, others = zip(os.openpty(), os.openpty(), [os.open(here + '.fifo', os.O_RDWR)] * 2)
watch = libc.inotify_init1(0)
libc.inotify_add_watch(watch, os.path.dirname(here).encode(), 0x100)  # IN_CREATE
files = [ends[0], others[1], ends[2], watch]
for file in files:
    fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_RDWR | os.O_ASYNC)
def told():
    return signal.sigtimedwait([signal.SIGIO], 5) is not None
def look():
    os.write(others[0], b'x')
    os.read(ends[0], 1)
    signals = [told()]
    os.write(ends[1], b'x\n')
    os.read(others[1], 2)
    signals.append(told())
    while signal.sigtimedwait([signal.SIGIO], 0): pass
    os.write(ends[2], b'x')
    signals.append(told())
    os.read(ends[2], 1)
    while signal.sigtimedwait([signal.SIGIO], 0): pass
    os.close(os.open(here + '.made', os.O_CREAT))
    signals.append(told())
    os.unlink(here + '.made')
    os.read(watch, 4096)
    while signal.sigtimedwait([signal.SIGIO], 0): pass
    return signals + [fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ASYNC for file in files]"
  look
  assert_equal "$told" "[True, True, True, True, 8192, 8192, 8192, 8192]"
  dump_it
  restore_it
  look
  assert_equal "$told" "[True, True, True, True, 8192, 8192, 8192, 8192]"
}

@test "a FIFO that never had a writer says so after a restore, one that had some says that they have gone" {
  need_root "CRIU"
  start_python "for name in 'one', 'two', 'three': os.mkfifo(here + '.' + name)
def reader(name): return os.open(here + '.' + name, os.O_RDONLY | os.O_NONBLOCK)
never, again, had, waits = reader('one'), reader('one'), reader('two'), reader('three')
same = os.dup(never)
heir = subprocess.Popen(['sleep', '1000'], pass_fds=[never])
os.close(os.open(here + '.two', os.O_WRONLY))
os.set_blocking(waits, True)
def look():
    told = events(never, again, had, same) + [fcntl.fcntl(file, fcntl.F_GETFL) for file in (never, again, had, waits)]
    if os.path.exists(here + '.write'):
        writer = os.open(here + '.one', os.O_WRONLY | os.O_NONBLOCK)
        os.write(writer, b'x')
        told += events(never, again) + [os.read(same, 2)]
        os.close(writer)
        told += events(never, again, waits)
    return told"
  local hung_up=16
  look
  assert_equal "$told" "[0, 0, $hung_up, 0, 34816, 34816, 34816, 32768]"
  dump_it
  assert_contains "$err" "that the FIFO never had a writer"
  restore_it
  look
  assert_equal "$told" "[0, 0, $hung_up, 0, 34816, 34816, 34816, 32768]"
  touch "$TARGET_STATUS.write"
  look
  assert_equal "$told" "[0, 0, $hung_up, 0, 34816, 34816, 34816, 32768, 1, 1, b'x', $hung_up, $hung_up, $hung_up]"
}

@test "a file of an overlay that is mapped as it was before it was changed is told" {
  need_root "CRIU"
  local at=$BATS_TEST_TMPDIR/mount
  mkdir "$at"
  mount -t tmpfs none "$at" || skip "nothing can be mounted here"
  mkdir "$at"/{lower,upper,work,all}
  head -c 8192 /dev/zero >"$at/lower/changed"
  cp "$at/lower/changed" "$at/lower/other"
  touch -d yesterday "$at"/lower/*
  mount -t overlay overlay -o "lowerdir=$at/lower,upperdir=$at/upper,workdir=$at/work" "$at/all" || skip "no overlay can be made here"
  start_python "import mmap
files = [open('$at/all/' + name, 'rb') for name in ('changed', 'other')]
maps = [mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=4096) for file in files]
def look(): return [at[0] for at in maps]
look()
with open('$at/all/changed', 'r+b') as changed: changed.write(b'1' * 8192)
os.chmod('$at/all/other', 0o600)
with open('$at/all/other', 'rb') as again: maps.append(mmap.mmap(again.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ))"
  look
  assert_equal "$told" "[0, 0, 0]"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(json "[f['what'].count('/all/') for f in d['processes'] if f['id'] == 'copied-up-file']")" "[1]"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$err" "mapped as they were before they were changed"
  assert_contains "$err" "$at/all/changed"
  target_goes_on
}
