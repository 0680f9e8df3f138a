#!/usr/bin/env bats
# What a program has that is outside of its tree, or that is gone or changed when it is restored:
# said by the doctor and refused before anything is touched, or found by inspect and before a
# restore makes anything.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
}
teardown() {
  if [[ -n ${FROZEN:-} ]]; then thaw; fi
  end_stasis
  if [[ -n ${FROZEN:-} ]]; then wait_until 30 rmdir "$FROZEN" 2>/dev/null || true; fi
}

lights() { json "' '.join(f['light'] for f in d['processes'] if f['id'] == '$1')"; }

# said ID LIGHTS TEXT: by the doctor.
said() {
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights "$1")" "$2" "$1"
  assert_contains "$out" "$3"
}

# refused_at_dump ID TEXT: red, and refused before anything is touched.
refused_at_dump() {
  said "$1" red "$2"
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "$2"
  target_goes_on
  no_image
  nothing_left
}

# through_pipe: TARGET runs with its output in a pipe that process OTHER reads.
through_pipe() {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=/dev/null
  (echo "$BASHPID" >"$BATS_TEST_TMPDIR/pid" && exec_on_gpu setsid stasis-workload memory --size 1M --status \
    "$TARGET_STATUS") </dev/null 2>&1 3>&- | (echo "$BASHPID" >"$BATS_TEST_TMPDIR/other" && exec sleep 300) 3>&- &
  wait_until 60 target_is_up
  TARGET=$(<"$BATS_TEST_TMPDIR/pid") OTHER=$(<"$BATS_TEST_TMPDIR/other")
  echo "$TARGET" >>"$targets"
  at_end_kill "$OTHER"
}

# start_python PYTHON: TARGET is a Python program that has done this, with a CUDA process below it.
start_python() {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  cat >"$BATS_TEST_TMPDIR/hold.py" <<END
import os, subprocess, sys, time
$1
child = subprocess.Popen(["stasis-workload", "memory", "--size", "1M", "--status", sys.argv[1]])
child.wait()
END
  (exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/hold.py" "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
}

@test "a pipe that leads to a process outside is refused, with that process" {
  through_pipe
  refused_at_dump pipe "(descriptor 1, read by process $OTHER, sleep)"
  assert_contains "$err" "stasis run --images-dir"
  assert_contains "$err" "--ignore-obstacles"
}

@test "a pipe whose other end has been closed is dumped, and so it is if the user wants it" {
  through_pipe
  done_by dump "$TARGET" --images-dir "$image" --ignore-undumpable --leave-running
  rm -r "$image"
  kill "$OTHER"
  wait_until 60 number_is_free "$OTHER"
  said pipe "" '"ok"'
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  target_goes_on
}

@test "input from a process outside is refused; a FIFO is told" {
  mkfifo "$BATS_TEST_TMPDIR/fifo"
  sleep 300 3>&- 7<>"$BATS_TEST_TMPDIR/fifo" &
  local other=$!
  at_end_kill "$other"
  start_python "fifo = open('$BATS_TEST_TMPDIR/fifo')"
  said fifo yellow "$BATS_TEST_TMPDIR/fifo (descriptor 3, written by process $other, sleep)"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$err" "has FIFOs that a process outside of the tree uses"
  rm "$BATS_TEST_TMPDIR/fifo"
  rm -r "$image"
  refused_at_dump pipe "fifo (deleted) (descriptor 3, written by process $other, sleep)"
}

@test "a terminal of the program that a process outside uses is refused" {
  start_python "m, s = os.openpty(); os.set_inheritable(s, True)
if os.fork() == 0:
    os.setsid()
    user = os.fork()
    if user == 0: os.close(m); os.execvp('sleep', ['sleep', '300'])
    open('$BATS_TEST_TMPDIR/user', 'w').write(str(user))
    os._exit(0)
os.wait(); os.close(s)"
  local user
  user=$(<"$BATS_TEST_TMPDIR/user")
  at_end_kill "$user"
  refused_at_dump terminal "(process $user, sleep)"
}

# freeze VERSION: TARGET, in a cgroup of its own.
freeze() {
  local base
  for base in "${@:2}"; do
    [[ -w $base/cgroup.procs ]] || continue
    FROZEN=$base/stasis-test-${BATS_RUN_TMPDIR##*/}-$BATS_TEST_NUMBER
    mkdir "$FROZEN" 2>/dev/null || continue
    echo "$TARGET" >"$FROZEN/cgroup.procs"
    if [[ $1 == 1 ]]; then echo FROZEN >"$FROZEN/freezer.state"; else echo 1 >"$FROZEN/cgroup.freeze"; fi
    wait_until 10 is_frozen
    return
  done
  skip "no cgroup of version $1 can be made on this machine"
}
is_frozen() { grep -qsx FROZEN "$FROZEN/freezer.state" || grep -qsx "frozen 1" "$FROZEN/cgroup.events"; }
thaw() { echo THAWED >"$FROZEN/freezer.state" || echo 0 >"$FROZEN/cgroup.freeze"; } 2>/dev/null

# frozen_is_named FILE: every tool says so at once, and does not wait for the driver.
frozen_is_named() {
  local started=$SECONDS verb
  for verb in suspend "dump --images-dir $image"; do
    # shellcheck disable=SC2086
    refused 7 busy $verb "$TARGET"
    assert_contains "$err" "is frozen with its cgroup $FROZEN"
    assert_contains "$err" "$FROZEN/$1"
  done
  capture timeout 20 cuda-checkpoint --get-state --pid "$TARGET"
  assert_equal "$status" 1
  assert_contains "$err" "is frozen with its cgroup $FROZEN"
  capture timeout 20 cuda-checkpoint --toggle --pid "$TARGET"
  assert_equal "$status" 1
  done_by ps --json
  assert_contains "$out" '"frozen"'
  ((SECONDS - started < 9))
  thaw
  target_goes_on
  no_image
  nothing_left
}

@test "a process that is frozen with its cgroup is named at once, of version 2" {
  start_target memory --size 1M
  freeze 2 /sys/fs/cgroup/unified /sys/fs/cgroup
  frozen_is_named cgroup.freeze
}

@test "a process that is frozen with its cgroup is named at once, of version 1" {
  start_target memory --size 1M
  freeze 1 /sys/fs/cgroup/freezer
  frozen_is_named freezer.state
}

@test "a program that is frozen when its memory is its new agent's is named, and goes on by itself" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  local tool said=$BATS_TEST_TMPDIR/said
  start_target memory --size 64M
  STASIS_FAULT=attach.exchanged:stop stasis attach "$TARGET" --graphs-are-safe >"$said" 2>&1 3>&- &
  tool=$!
  at_end_kill "$tool"
  wait_until 60 grep -q '^State:[[:space:]]*T' "/proc/$tool/status"
  freeze 1 /sys/fs/cgroup/freezer
  kill -CONT "$tool"
  status=0
  wait "$tool" || status=$?
  assert_equal "$status" 12 "$(<"$said")"
  assert_contains "$(<"$said")" "process $TARGET is frozen with its cgroup $FROZEN, and the agent in it with it"
  thaw
  target_goes_on
  done_by recover "$TARGET"
  nothing_left
  suspended_and_resumed
}

# patch_code FUNCTION BYTE: that byte is the first of a function of libcuda that TARGET does not call, as a probe puts an
# int3 (204) there.
patch_code() {
  python3 -IS - "$TARGET" "$STASIS_LIBCUDA" "$@" <<'END'
import ctypes, sys
pid, path, name, byte = sys.argv[1:]
lib = ctypes.CDLL(path)
here = ctypes.cast(getattr(lib, name), ctypes.c_void_p).value
def start(who):
    lines = [l.split() for l in open(f"/proc/{who}/maps") if "libcuda.so" in l]
    return int(lines[0][0].split("-")[0], 16)
with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
    memory.seek(here - start("self") + start(pid))
    memory.write(bytes([int(byte)]))
END
}

@test "a breakpoint in the code of a library is refused; other code that a program has changed is not" {
  start_target memory --size 1M
  patch_code cuDeviceGetName 144
  said breakpoint "" '"ok"'
  patch_code cuDeviceGetName 204
  refused_at_dump breakpoint "/libcuda.so"
  assert_contains "$err" "breakpoints in its code"
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
}

# limit_descriptors NUMBER: those that TARGET may have.
limit_descriptors() { prlimit --pid "$TARGET" --nofile="$1:"; }

@test "too few spare descriptors for the way back are refused at the suspend, with the figures" {
  start_target memory --size 1M
  local limit
  limit=$(prlimit --pid "$TARGET" --nofile -o SOFT --noheadings | tr -d ' ')
  local fds=("/proc/$TARGET/fd/"*)
  limit_descriptors $((${#fds[@]} + 3))
  refused 8 not-supported suspend "$TARGET"
  assert_contains "$err" "spare descriptor(s) of the $((${#fds[@]} + 3)) that it may have"
  refused 8 not-supported dump "$TARGET" --images-dir "$image"
  said descriptors red "spare descriptor(s) of the"
  limit_descriptors 3  # which the standard streams have
  refused 8 driver-error suspend "$TARGET"
  assert_contains "$err" "descriptors open that it may have"
  # As it says: the soft limit alone.
  limit_descriptors $((${#fds[@]} + 3))
  capture stasis suspend "$TARGET"
  local hard
  hard=$(prlimit --pid "$TARGET" --nofile -o HARD --noheadings)
  $(grep -o "prlimit --pid [0-9]* --nofile=[0-9:]*" <<<"$err")
  assert_equal "$(prlimit --pid "$TARGET" --nofile -o HARD --noheadings)" "$hard"
  done_by suspend "$TARGET"
  limit_descriptors "$limit"
  done_by resume "$TARGET"
  target_goes_on
  no_image
}

@test "one rank of several that is never quiet: the process above all of them is named" {
  start_target collective --children 3
  mapfile -t ranks < <(children_of "$TARGET")
  # One that waits for another for ever.
  kill -STOP "${ranks[2]}"
  at_end_kill "${ranks[@]}"
  wait_until 30 no_round_for 0.3
  refused 7 timeout suspend "${ranks[0]}" --timeout 300
  assert_contains "$err" "name process $TARGET (stasis-workload), which is above all of them"
  assert_contains "$err" "${ranks[1]}"
  capture cuda-checkpoint --action lock --pid "${ranks[0]}" --timeout 300
  assert_equal "$status" 1
  assert_contains "$err" "stasis suspend $TARGET"
  kill -CONT "${ranks[2]}"
  target_goes_on
  # Where the driver locks it at once, the dump says it.
  STASIS_SIM_FAULTS="lock:error=999" capture stasis dump "${ranks[0]}" --images-dir "$image" --ignore-undumpable
  assert_contains "$err" "note: if it works together with other processes"
  assert_contains "$err" "name process $TARGET (stasis-workload), which is above all of them"
  target_goes_on
  nothing_left
}

# start_with_file PYTHON: TARGET is a Python program with a CUDA process below it, which has opened "$BATS_TEST_TMPDIR/data".
start_with_file() {
  mkdir "$BATS_TEST_TMPDIR/sub"
  echo hello >"$BATS_TEST_TMPDIR/data"
  ln -s data "$BATS_TEST_TMPDIR/link"
  start_python "data = open('$BATS_TEST_TMPDIR/data'); link = os.open('$BATS_TEST_TMPDIR/link', os.O_PATH | os.O_NOFOLLOW); os.chdir('$BATS_TEST_TMPDIR/sub'); log = open('../app.log', 'a')"
}

# in_the_way TEXT: found by inspect and, before anything is made, by a restore.
in_the_way() {
  capture stasis inspect "$image" --json
  assert_equal "$status $(json "[c['id'] for c in d['checks'] if not c['ok']]")" "9 ['open-files']"
  assert_contains "$out" "$1"
  refused 9 criu-failed restore --images-dir "$image" --detach
  assert_contains "$err" "$1"
  [[ ! -e $image/log ]] || ! compgen -G "$image/log/restore-*" >/dev/null
  nothing_left
}

@test "files and directories that are gone or changed are found before a restore makes anything" {
  local data=$BATS_TEST_TMPDIR/data
  start_with_file
  dump_it
  rm "$data"
  in_the_way "$data is not there"
  mkdir "$data"
  in_the_way "$data is a file of another kind"
  rmdir "$data"
  echo "hello, world" >"$data"
  in_the_way "$data has 13 bytes, and had 6 at the dump"
  echo hello >"$data"
  chmod 600 "$data"
  in_the_way "$data has the mode 600, and had 644 at the dump"
  chmod 644 "$data"
  rmdir "$BATS_TEST_TMPDIR/sub"
  in_the_way "$BATS_TEST_TMPDIR/sub is not there"
  mkdir "$BATS_TEST_TMPDIR/sub"
  rm "$BATS_TEST_TMPDIR/link"
  cp "$data" "$BATS_TEST_TMPDIR/link"
  in_the_way "$BATS_TEST_TMPDIR/link is a file of another kind"
  ln -sf data "$BATS_TEST_TMPDIR/link"
  # One that is only appended to may be another one.
  rm "$BATS_TEST_TMPDIR/app.log"
  echo more >"$BATS_TEST_TMPDIR/app.log"
  done_by inspect "$image"
  restore_it
  target_goes_on
}

@test "a file with another name is refused with --leave-running, and makes an image that is restored again" {
  local kept=$BATS_TEST_TMPDIR/kept
  start_python "fd = os.open('$kept', os.O_RDWR | os.O_CREAT, 0o644); os.write(fd, b'x'); os.link('$kept', '$kept-too'); os.unlink('$kept')"
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$err" "without --leave-running"
  target_goes_on
  dump_it
  capture stasis inspect "$image"
  assert_equal "$status" 0
  [[ $out != *"only once"* ]]
  restore_it
  target_goes_on
  kill -KILL -- "-$TARGET"
  wait_until 60 number_is_free
  wait_until 60 gpu_is_free 2>/dev/null
  echo other >"$kept-too"
  in_the_way "$kept-too is another file"
  assert_contains "$err" "remove it if none needs it"
}

@test "a file that has another name in another directory makes an image that is restored once" {
  local kept=$BATS_TEST_TMPDIR/kept
  mkdir "$BATS_TEST_TMPDIR/beside"
  start_python "fd = os.open('$kept', os.O_RDWR | os.O_CREAT, 0o644); os.link('$kept', '$BATS_TEST_TMPDIR/beside/kept'); os.unlink('$kept')"
  dump_it
  capture stasis inspect "$image"
  assert_contains "$out" "it can be restored only once, which uses up $BATS_TEST_TMPDIR/link_remap."
  restore_it
  target_goes_on
  kill -KILL -- "-$TARGET"
  wait_until 60 number_is_free
  wait_until 60 gpu_is_free 2>/dev/null
  in_the_way "link_remap."
  assert_contains "$err" "the first restore uses up"
}

@test "cuda-checkpoint does not restore to a GPU without room, with the figures, and the process stays suspended" {
  export STASIS_SIM_GPUS=1x256M
  start_target memory --size 64M
  cuda-checkpoint --toggle --pid "$TARGET"
  start_hog 220M
  local way
  for way in "--action restore" --toggle; do
    # shellcheck disable=SC2086
    capture cuda-checkpoint $way --pid "$TARGET"
    assert_equal "$status" 1
    assert_contains "$err" "out of memory"
    assert_contains "$err" "MiB of memory free, and 68.0 MiB is needed"
    in_state checkpointed
  done
  kill -KILL "$HOG"
  wait_until 60 gpu_is_free
  cuda-checkpoint --toggle --pid "$TARGET"
  target_goes_on
}

# CRIU opens them before it makes threads, and dumped them without a word: no restore succeeded.
@test "files of /proc of threads and mappings are refused; of processes outside, and asked pressure, are told" {
  local what
  for what in "open('/proc/self/task/%d/stat' % other)" "open('/proc/%d/comm' % other)" \
    "os.open('/proc/self/task/%d' % other, os.O_RDONLY)" \
    "os.open('/proc/self/map_files/' + open('/proc/self/maps').read().split('libc')[0].splitlines()[-1].split()[0], \
os.O_PATH | os.O_NOFOLLOW)"; do
    start_python "import threading
threading.Thread(target=lambda: time.sleep(300), daemon=True).start()
while len(os.listdir('/proc/self/task')) < 2: time.sleep(0.01)
other = max(int(name) for name in os.listdir('/proc/self/task'))
held = $what"
    refused_at_dump proc-file "which are not there when CRIU opens them again"
    end_targets
    : >"$targets"
    rm "$TARGET_STATUS"
  done
  # Both, as the process below has the directory too.
  start_python "import threading
threading.Thread(target=lambda: time.sleep(300), daemon=True).start()
while len(os.listdir('/proc/self/task')) < 2: time.sleep(0.01)
os.chdir('/proc/self/task/%d' % max(int(name) for name in os.listdir('/proc/self/task')))"
  said proc-file "red red" "(its directory)"
  end_targets
  : >"$targets"
  rm "$TARGET_STATUS"
  # That of a process itself; what is below it comes back.
  start_python "os.chdir('/proc/%d' % os.getpid())"
  said proc-file "red red" "the directory of a process in /proc as its working directory"
  refused 9 undumpable dump "$TARGET" --images-dir "$image"
  target_goes_on
  end_targets
  : >"$targets"
  rm "$TARGET_STATUS"
  start_python "held = [open('/proc/self/task/%d/stat' % os.getpid()), open('/proc/self/maps'), open('/proc/$$/stat')]
try:
    held.append(open('/proc/pressure/memory', 'r+'))
    held[-1].write('some 150000 2000000'); held[-1].flush()
except OSError: pass"
  said proc-file-outside yellow "/proc/$$/stat (descriptor "
  done_by dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "files of /proc open that are of processes outside of the tree"
  [[ ! -e /proc/pressure/memory ]] || assert_contains "$err" "pressure stall information"
  wait_until 60 number_is_free
  restore_it
  target_goes_on
}
