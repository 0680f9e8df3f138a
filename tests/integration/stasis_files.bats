#!/usr/bin/env bats
# Files of a program that are not as they were when it is restored: those that it was writing when it was saved and ran
# on, and those that CRIU has given a name (link_remap).
# Long because they share one way to start a Python program that has a CUDA process below it.

load helpers
load stasis_lib
load stasis_jobs_lib

setup() {
  setup_job
  # Where sem_open(3) would use /dev/shm, in which other tests have files.
  shm=$BATS_TEST_TMPDIR/shm
  mkdir "$shm"
}
teardown() {
  end_stasis
  if mountpoint -q "$BATS_TEST_TMPDIR/mount"; then umount -l "$BATS_TEST_TMPDIR/mount"; fi
}

# start_python PYTHON: TARGET is a Python program that has done this, with a CUDA process below it.
start_python() {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status$((++programs)) TARGET_LOG=$BATS_TEST_TMPDIR/log$programs
  write_program "$1" >"$BATS_TEST_TMPDIR/hold$programs.py"
  (exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/hold$programs.py" "$TARGET_STATUS") </dev/null >>"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
}
write_program() {
  cat <<END
import mmap, os, subprocess, sys, time
# As sem_open(3) does it: the mapping has a name that is gone, and the file another one.
def semaphore(name, value):
    fd = os.open(name + '.XXXXXX', os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, bytes([value]) + bytes(31))
    at = mmap.mmap(fd, 32)
    os.close(fd)
    os.link(name + '.XXXXXX', name)
    os.unlink(name + '.XXXXXX')
    return at
here = sys.argv[1]
child = subprocess.Popen(["stasis-workload", "memory", "--size", "1M", "--status", here])
$1
child.wait()
END
}
# with_semaphore NAME VALUE: tells the value again and again.
with_semaphore() {
  start_python "turn = semaphore('$shm/$1', $2)
while child.poll() is None:
    open(here + '.value', 'a').write(f'{turn[0]}\n'); time.sleep(0.02)"
}
# says_value VALUE: from now on.
says_value() {
  : >"$TARGET_STATUS.value"
  wait_until 60 test -s "$TARGET_STATUS.value"
  assert_equal "$(sort -u "$TARGET_STATUS.value")" "$1"
}
kill_target() {
  kill -KILL -- "-$TARGET"
  wait_until 60 number_is_free
  wait_until 60 gpu_is_free 2>/dev/null
}
remaps() { compgen -G "$shm/link_remap.*" || true; }

@test "after a reboot a semaphore is made again from the image, and another program's is left alone" {
  with_semaphore one 11
  dump_it
  local first=$TARGET first_status=$TARGET_STATUS first_image=$image
  rm "$shm"/*
  image=$image-2
  with_semaphore two 22
  dump_it
  local second=$TARGET second_status=$TARGET_STATUS
  TARGET=$first TARGET_STATUS=$first_status image=$first_image
  done_by inspect "$image"
  [[ $out != *"only once"* ]]
  restore_it
  assert_contains "$err" "$shm/one was gone, and is made again"
  says_value 11
  TARGET=$second TARGET_STATUS=$second_status image=$image-2
  restore_it
  says_value 22
  assert_equal "$(remaps)" ""
  [[ -e $shm/one && -e $shm/two ]]
}

@test "two programs with semaphores are dumped beside each other, and each restored more than once" {
  with_semaphore one 11
  dump_it
  local first=$TARGET first_status=$TARGET_STATUS
  image=$image-2
  with_semaphore two 22
  dump_it
  restore_it
  says_value 22
  kill_target
  image=${image%-2} TARGET=$first TARGET_STATUS=$first_status
  restore_it
  says_value 11
  # Its semaphore is still there, with another value.
  kill_target
  python3 -IS -c "import mmap
with open('$shm/one', 'r+b') as file: mmap.mmap(file.fileno(), 0)[0] = 3"
  restore_it
  says_value 11
  kill_target
  # What another program uses stays as that needs it.
  python3 -IS -c "import mmap, time
with open('$shm/one', 'r+b') as file: memory = mmap.mmap(file.fileno(), 0)
memory[0] = 5
open('$BATS_TEST_TMPDIR/shared', 'w').close()
time.sleep(300)" 3>&- &
  local user=$!
  at_end_kill "$user"
  wait_until 60 test -e "$BATS_TEST_TMPDIR/shared"
  restore_it
  says_value 5
  kill_target
  kill "$user"
  # Another program has made one by that name since.
  rm "$shm/one"
  : >"$shm/one"
  refused 9 criu-failed restore --images-dir "$image" --detach
  assert_contains "$err" "$shm/one is another file"
  assert_contains "$err" "remove it if none needs it"
  rm "$shm/one"
  restore_it
  says_value 11
  assert_equal "$(remaps)" ""
}

@test "a name of CRIU's that an earlier image needs is found before the job is stopped" {
  local kept=$BATS_TEST_TMPDIR/kept
  start_python "fd = os.open('$kept', os.O_RDWR | os.O_CREAT, 0o644); os.link('$kept', '$kept-too'); os.unlink('$kept')"
  : >"$BATS_TEST_TMPDIR/link_remap.5"
  STASIS_SIM_FAULTS="lock:error=999" refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "$BATS_TEST_TMPDIR/link_remap.5"
  target_goes_on
  rm "$BATS_TEST_TMPDIR/link_remap.5"
  # A dump that fails leaves no name behind.
  STASIS_FAULT=dump.ending:error refused_with_any dump "$TARGET" --images-dir "$image"
  [[ -z $(compgen -G "$BATS_TEST_TMPDIR/link_remap.*") ]]
  target_goes_on
}
refused_with_any() {
  capture stasis "$@"
  ((status != 0))
}

@test "a file that was being written when the job was saved is made again, or cut to what it was" {
  local at=$BATS_TEST_TMPDIR
  start_python "new = open('$at/job.new', 'w'); new.write('round 1\n'); new.flush()
grows = open('$at/grows.log', 'w'); grows.write('before\n'); grows.flush()
appended = open('$at/appended.log', 'a'); appended.write('before\n'); appended.flush()
turned = open('$at/turned.log', 'a'); turned.write('before\n'); turned.flush()
anew = open('$at/anew', 'w'); anew.write('long\n'); anew.flush()
open('$at/ready', 'w').close()
while not os.path.exists('$at/go'): time.sleep(0.01)
new.write('whole\n'); new.close(); os.rename('$at/job.new', '$at/job')
for file in grows, appended, turned: file.write('after\n'); file.flush()"
  wait_until 60 test -e "$at/ready"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  assert_equal "$(json 'd.get("lost", [])')" "[]"
  touch "$at/go"
  wait_until 60 test -e "$at/job"
  wait_until 60 grep -q after "$at/turned.log"
  kill_target
  rm "$at/go" "$at/job"
  mv "$at/turned.log" "$at/turned.log.1"
  echo new >"$at/anew.next"
  mv "$at/anew.next" "$at/anew"
  done_by inspect "$image"
  # What fails after that is undone.
  STASIS_FAULT=restore.held:error refused_with_any restore --images-dir "$image" --detach
  [[ ! -e $at/job.new && ! -e $at/turned.log && ! -e $at/grows.log.after-checkpoint ]]
  assert_equal "$(cat "$at/grows.log" "$at/anew")" $'before\nafter\nnew'
  wait_until 60 gpu_is_free 2>/dev/null
  restore_it
  assert_contains "$err" "$at/grows.log has grown since the image was made: it is 7 B long again, and the 6 B that came after are in $at/grows.log.after-checkpoint"
  assert_contains "$err" "$at/job.new was gone, and is made again from the image"
  assert_contains "$err" "$at/anew was not as at the dump: what was there is $at/anew.after-checkpoint now"
  assert_equal "$(cat "$at/job.new" "$at/grows.log" "$at/anew" "$at/turned.log")" $'round 1\nbefore\nlong\nbefore'
  assert_equal "$(cat "$at/grows.log.after-checkpoint" "$at/anew.after-checkpoint")" $'after\nnew'
  assert_equal "$(<"$at/appended.log")" $'before\nafter'
  touch "$at/go"
  wait_until 60 test -e "$at/job"
  wait_until 60 grep -q after "$at/turned.log"
  assert_equal "$(cat "$at/job" "$at/grows.log" "$at/turned.log")" $'round 1\nwhole\nbefore\nafter\nbefore\nafter'
  # And again from the same image, also where the files were copied: what was set aside stays.
  kill_target
  rm "$at/go"
  mv "$at/anew" "$at/elsewhere"
  cp -p "$at/grows.log" "$at/copy"
  mv "$at/copy" "$at/grows.log"
  echo "other 1" >"$at/job.new" # as long as it was
  restore_it
  assert_equal "$(cat "$at/job.new" "$at/job.new.after-checkpoint")" $'round 1\nother 1'
  assert_equal "$(cat "$at/grows.log.after-checkpoint" "$at/grows.log.after-checkpoint.2")" $'after\nafter'
  target_goes_on
}

@test "a dump that is killed leaves no name beside a file once it is recovered" {
  local point
  with_semaphore one 11
  for point in criu.post-dump image.checksummed image.manifest-written; do
    STASIS_FAULT=$point:kill capture stasis dump "$TARGET" --images-dir "$image"
    assert_equal "$status" 137
    # CRIU takes back its own names when it gets no answer.
    [[ $point == criu.* || -n $(remaps) ]] || { echo "no name at $point" >&2; return 1; }
    done_by recover --all
    assert_equal "$(remaps)" "" "$point"
    target_goes_on
    [[ ! -e $image ]]
  done
}

@test "a file of another owner, behind a link, or of a job that was ended by its dump is not touched" {
  local at=$BATS_TEST_TMPDIR
  mkdir "$at/in"
  start_python "grows = open('$at/in/secret', 'w')"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  kill_target
  mkdir "$at/root"
  echo secret >"$at/root/secret"
  mv "$at/in" "$at/was"
  ln -s "$at/root" "$at/in"
  refused 9 criu-failed restore --images-dir "$image" --detach
  assert_contains "$err" "has 7 bytes, and had 0 at the dump"
  rm "$at/in"
  mv "$at/was" "$at/in"
  echo secret >"$at/in/secret"
  chown 65534 "$at/in/secret"
  refused 9 criu-failed restore --images-dir "$image" --detach
  assert_equal "$(cat "$at/root/secret" "$at/in/secret")" $'secret\nsecret'
  chown 0 "$at/in/secret"
  restore_it
  rm -r "$image"
  dump_it
  echo more >>"$at/in/secret"
  refused 9 criu-failed restore --images-dir "$image" --detach
  assert_contains "$err" "has 5 bytes, and had 0 at the dump"
}

@test "a file on a mount that is gone is not made again below it" {
  local at=$BATS_TEST_TMPDIR/mount
  mkdir "$at"
  mount -t tmpfs none "$at" || skip "no right to mount"
  start_python "log = open('$at/log', 'w')"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  kill_target
  umount "$at"
  refused 9 criu-failed restore --images-dir "$image" --detach
  assert_contains "$err" "$at/log is not there"
  assert_equal "$(ls "$at")" ""
  mount -t tmpfs none "$at"
  restore_it
  target_goes_on
  kill_target
  umount "$at"
}

@test "a file too large for the image, or whose name it cannot hold, is told at the dump" {
  local at=$BATS_TEST_TMPDIR
  start_python "large = open('$at/large', 'w'); large.truncate(65 << 20)
log = open('$at/large.log', 'a'); log.truncate(65 << 20); named = open(b'$at/no-\xe9', 'w'); small = open('$at/small', 'w')"
  wait_until 60 test -e "$at/small"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  assert_equal "$(json 'len(d["lost"])')" 2
  assert_contains "$out" ", which is open for writing, and whose name is no UTF-8: a restore needs the file as it is now"
  assert_contains "$out" "the content of $at/large (65.0 MiB), which is open for writing"
  kill_target
  rm "$at/small"
  mv "$at/large" "$at/renamed"
  refused 9 criu-failed restore --images-dir "$image" --detach
  assert_contains "$err" "$at/large is not there"
  [[ ! -e $at/small ]]
  mv "$at/renamed" "$at/large"
  printf x | dd of="$at/large" bs=1 seek=5 conv=notrunc status=none
  restore_it
  [[ -e $at/small ]]
  assert_contains "$err" "$at/large was written to after the dump"
}

@test "a file that a program writes to where it has mapped it comes back in each byte, also the first of many" {
  local at=$BATS_TEST_TMPDIR
  start_python "import ctypes
fd = os.open('$at/mapped', os.O_RDWR | os.O_CREAT); os.truncate(fd, 300000)
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
word = ctypes.c_long.from_address(libc.mmap(None, 300000, 3, 1, fd, ctypes.c_long(0)))
os.close(fd)
last = 0
while word.value == last:
    last += 1; word.value = last; time.sleep(0.01)
open('$at/wrong', 'w').write(f'{word.value} and not {last}')"
  wait_until 60 test -s "$at/mapped"
  done_by dump "$TARGET" --images-dir "$image" --leave-running --json
  assert_equal "$(json 'd.get("lost", [])')" "[]"
  target_goes_on
  kill_target
  restore_it
  assert_contains "$err" "$at/mapped was not as at the dump: what was there is $at/mapped.after-checkpoint now"
  target_goes_on
  [[ ! -e $at/wrong ]] || { cat "$at/wrong" && false; }
}

@test "a job saved while it writes its status anew goes on, also after the file was renamed" {
  local at=$BATS_TEST_TMPDIR
  job=(python3 -IS -c 'import os, subprocess, sys, time
status, at = sys.argv[1:]
child = subprocess.Popen(["stasis-workload", "memory", "--size", "4M", "--status", status + ".gpu"])
log = open(at + "/train.log", "w")
count = 0
while True:
    count += 1
    with open(status + ".new", "w") as file:
        file.write(f"round {count}\n"); file.flush()
        log.write(f"{count}\n"); log.flush()
        held = os.path.exists(at + "/hold")
        if held: open(at + "/held", "w").close()
        while os.path.exists(at + "/hold"): time.sleep(0.005)
    os.rename(status + ".new", status)
    time.sleep(0.02)' "$TARGET_STATUS" "$at")
  start_run
  job_is_up
  wait_until 60 test -s "$TARGET_STATUS.gpu"
  touch "$at/hold"
  wait_until 60 test -e "$at/held"
  saves 000001
  rm "$at/hold"
  target_goes_on
  kill -KILL "$RUN"
  wait_until 60 eval '! pgrep -f "^python3 .*$TARGET_STATUS" >/dev/null'
  ends_with 137
  local last
  last=$(tail -n1 "$at/train.log")
  start_run
  told "goes on from $images/000001 "
  told "$at/train.log has grown since the image was made"
  assert_equal "$(tail -n1 "$at/train.log.after-checkpoint")" "$last"
  target_goes_on
  # The image of a job that was ended: restored, gone on from, and restored again.
  kill -TERM "$RUN"
  ends_with 75
  start_run
  told "goes on from $images/000002 "
  target_goes_on
  kill -KILL "$RUN"
  wait_until 60 eval '! pgrep -f "^python3 .*$TARGET_STATUS" >/dev/null'
  ends_with 137
  start_run
  told "goes on from $images/000002 "
  told "$at/train.log has grown since the image was made"
  target_goes_on
  kill -INT "$RUN"
  wait "$RUN" || true
  # Each line once, in order.
  assert_equal "$(<"$at/train.log")" "$(seq "$(wc -l <"$at/train.log")")"
}

# As an upgrade of its package, or a log that is rotated, leaves a program.
@test "a program keeps the files whose names others have, open, mapped and executed" {
  need_root "CRIU"
  start_python "import shutil
at = here + '.files'
os.mkdir(at)
for name in ('open', 'mapped'): open(at + '/' + name, 'w').write('old ' + name)
opened = os.open(at + '/open', os.O_RDWR)
mapped = mmap.mmap(os.open(at + '/mapped', os.O_RDONLY), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
shutil.copy('/bin/sleep', at + '/program')
program = subprocess.Popen([at + '/program', '1000'])
for name in ('open', 'mapped', 'program'):
    open(at + '/new', 'w').write('new')
    os.rename(at + '/new', at + '/' + name)
while child.poll() is None:
    open(here + '.value', 'a').write(f'{os.pread(opened, 100, 0)} {mapped[:]} {program.poll()}\\n'); time.sleep(0.02)"
  local expected name
  expected="b'old open' b'old mapped' None"
  says_value "$expected"
  for _ in 1 2; do
    dump_it
    restore_it
    target_goes_on
    says_value "$expected"
    for name in open mapped program; do assert_equal "$(<"$TARGET_STATUS.files/$name")" new; done
    assert_equal "$(ls "$TARGET_STATUS.files" | wc -l)" 3 "names"
    rm -r "$image"
  done
}

# dump_refused ID: with its reason, before the program is touched, and doctor knows.
dump_refused() {
  capture stasis doctor "$TARGET" --no-trial --json
  assert_contains "$out" "\"$1\""
  refused 9 undumpable dump "$TARGET" --images-dir "$image"
  [[ ! -e $image ]]
  target_goes_on
}
@test "what an image could not be restored with is refused before: a program in memory, O_PATH of it, no room for descriptors" {
  need_root "CRIU"
  start_python "program = os.memfd_create('program')
os.write(program, open('/bin/sleep', 'rb').read())
subprocess.Popen([f'/proc/self/fd/{program}', '1000'], pass_fds=[program])"
  dump_refused program-without-file
  start_python "memory = os.memfd_create('memory')
path = os.open(f'/proc/self/fd/{memory}', os.O_PATH)"
  dump_refused path-only
  # With the right to raise it CRIU has as many as there may be at all.
  start_python "import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
os.dup2(1, 4095)"
  ulimit -n 4096
  by=(setpriv --bounding-set=-sys_resource --inh-caps=-sys_resource)
  capture "${by[@]}" stasis doctor "$TARGET" --no-trial --json
  assert_contains "$out" '"high-descriptor"'
}

@test "what CRIU dumps and cannot restore is refused before: namespaces of a child, a daemon's session, a closed terminal, sealed memory" {
  need_root "CRIU"
  local kind
  for kind in mount net; do
    unshare "--$kind" true || skip "no namespaces can be made here"
    start_python "subprocess.Popen(['unshare', '--$kind', 'sleep', '1000'])
time.sleep(0.2)"
    dump_refused namespace
  done
  start_python "import ctypes
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
leader = os.fork()
if leader == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1000)
    os._exit(0)
os.waitpid(leader, 0)"
  dump_refused dead-session
  start_python "end, other = os.openpty()
os.close(other)"
  dump_refused hung-up-terminal
  start_python "import fcntl
memory = os.memfd_create('memory', os.MFD_ALLOW_SEALING)
os.ftruncate(memory, 4096)
fcntl.fcntl(memory, 1033, 8)  # F_ADD_SEALS, F_SEAL_WRITE
mapped = mmap.mmap(memory, 4096, mmap.MAP_SHARED, mmap.PROT_READ)"
  dump_refused sealed-file
  # By a descriptor that cannot write it is restored.
  start_python "import fcntl
memory = os.memfd_create('memory', os.MFD_ALLOW_SEALING)
os.write(memory, b'content'.ljust(4096))
fcntl.fcntl(memory, 1033, 8)  # F_ADD_SEALS, F_SEAL_WRITE
reader = os.open(f'/proc/self/fd/{memory}', os.O_RDONLY)
os.close(memory)
mapped = mmap.mmap(reader, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
while child.poll() is None:
    open(here + '.value', 'a').write(f'{mapped[:7]}\\n'); time.sleep(0.02)"
  dump_it
  restore_it
  target_goes_on
  says_value "b'content'"
}

@test "a deleted file that is open through two mounts, which CRIU cannot make again, is refused before" {
  need_root "CRIU"
  unshare --mount true || skip "no namespaces can be made here"
  start_python "import ctypes
os.chdir(os.path.dirname(sys.argv[1]))
os.mkdir('one')
os.mkdir('other')
open('one/file', 'w').write('content')
ctypes.CDLL(None).unshare(0x20000)  # CLONE_NEWNS
subprocess.run(['mount', '--make-rprivate', '/'], check=True)
subprocess.run(['mount', '--bind', 'one', 'other'], check=True)
held = [open('one/file'), open('other/file')]
os.unlink('one/file')"
  dump_refused deleted-place
}

@test "deleted directories, files of deleted directories, and those with long names come back, whatever has their names by now" {
  need_root "CRIU"
  start_python "import shutil
at = here + '.at'
os.makedirs(at + '/outer/inner')
os.mkdir(at + '/work')
os.mkdir(at + '/folder')
folders = [os.open(at + '/' + name, os.O_DIRECTORY) for name in ('outer', 'outer/inner')]
file, long = [os.open(at + '/' + name, os.O_RDWR | os.O_CREAT) for name in ('folder/file', 'l' * 250)]
for one in (file, long): os.write(one, b'content')
os.chdir(at + '/work')
os.unlink(at + '/' + 'l' * 250)
for name in ('outer', 'work', 'folder'): shutil.rmtree(at + '/' + name)
for name in ('outer', 'work'):
    os.mkdir(at + '/' + name)
    open(at + '/' + name + '/new', 'w').write('new')
open(at + '/folder', 'w').write('a file')
while child.poll() is None:
    open(here + '.value', 'a').write(f'{[os.pread(one, 100, 0) for one in (file, long)]} {[os.listdir(one) for one in folders]} {os.listdir()}\\n'); time.sleep(0.02)"
  local expected="[b'content', b'content'] [[], []] []"
  says_value "$expected"
  for _ in 1 2; do
    dump_it
    restore_it
    target_goes_on
    says_value "$expected"
    assert_equal "$(cd "$TARGET_STATUS.at" && echo *)" "folder outer work"
    assert_equal "$(cat "$TARGET_STATUS.at"/*/new "$TARGET_STATUS.at/folder")" "newnewa file"
    assert_equal "$(readlink "/proc/$TARGET/cwd" | grep -o '[.]stasis-' | wc -l)" 1 "names do not grow"
    rm -r "$image"
  done
}

@test "a socket that is under way from one process to another is refused, and dumped when it has come" {
  need_root "CRIU"
  start_python "import socket
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
one, other = socket.socketpair()
accepted = listener.accept()[0]
socket.send_fds(one, [b'x'], [accepted.fileno()])
accepted.close()
while not os.path.exists(here + '.take'): time.sleep(0.02)
taken = socket.socket(fileno=socket.recv_fds(other, 1, 1)[1][0])
client.send(b'came')
open(here + '.taken', 'w').write(taken.recv(10).decode())
while child.poll() is None:
    client.send(b'c')
    taken.recv(10)
    open(here + '.value', 'a').write('c\\n'); time.sleep(0.02)"
  refused 7 busy dump "$TARGET" --images-dir "$image" --tcp-established
  assert_contains "$err" "is under way in a unix socket"
  touch "$TARGET_STATUS.take"
  wait_until 60 grep -qs came "$TARGET_STATUS.taken"
  dump_it --tcp-established
  restore_it
  target_goes_on
  says_value c
}

@test "names that sockets got later, files without one, and processes beside a session are told; names too long for CRIU are refused" {
  need_root "CRIU"
  local what
  start_python "import ctypes, socket
os.chdir(os.path.dirname(sys.argv[1]))
sockets = [socket.socket(socket.AF_UNIX) for _ in range(2)]
for number, one in enumerate(sockets):
    one.bind(f'{os.getcwd()}/bound{number}')
    one.listen()
os.rename('bound0', 'renamed')
os.link('bound1', 'linked')
nameless = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600)
if os.fork() == 0:
    if os.fork() == 0:
        os.closerange(0, 100)
        time.sleep(1000)
    os._exit(0)
os.wait()"
  capture stasis doctor "$TARGET" --no-trial --json
  for what in renamed-socket unnamed-file session-outside; do assert_contains "$out" "\"$what\""; done
  dump_it
  for what in "/renamed, bound as" "/linked, bound as" "files of O_TMPFILE" "a session in which processes outside"; do
    assert_contains "$err" "$what"
  done
  rm -r "$image"
  start_python "import resource, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
for _ in range(3): os.kill(os.getpid(), signal.SIGRTMIN)
resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 1000))"
  dump_refused signal-limit
  start_python "import socket
os.chdir(os.path.dirname(sys.argv[1]))
one = socket.socket(socket.AF_UNIX)
name = os.getcwd() + '/'
name += 'n' * (106 - len(name))
one.bind(name)
os.unlink(name)"
  dump_refused socket-name
}

# What programs of the next two tests begin with.
timers_and_epolls="import ctypes, select, signal, socket, struct, threading
libc = ctypes.CDLL(None, use_errno=True)
of_time, of_thread = 2, 6  # CPUCLOCK_SCHED, CPUCLOCK_PERTHREAD_MASK
def clock(number, kind): return (~number << 3) | kind
def timer(clock, notify=1, thread=0):  # SIGEV_NONE; 0: SIGEV_SIGNAL, 4: SIGEV_THREAD_ID
    event = ctypes.create_string_buffer(struct.pack('qiii', 0, signal.SIGRTMIN, notify, thread) + bytes(40))
    number = ctypes.c_int()
    if libc.syscall(222, clock, event, ctypes.byref(number)) != 0: raise OSError(ctypes.get_errno())
    return number
class Thread(threading.Thread):
    def __init__(self):
        super().__init__(target=lambda: self.over.wait(), daemon=True)
        self.over = threading.Event()
        self.start()
    def end(self):
        self.over.set()
        while os.path.exists(f'/proc/self/task/{self.native_id}'): time.sleep(0.001)
def process():
    number = os.fork()
    if number == 0: time.sleep(1000)
    return number
def end(number):
    os.kill(number, signal.SIGKILL)
    os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)
"
# start_with_timers PYTHON: TARGET is one that has done this, after timers_and_epolls.
start_with_timers() {
  start_python "$timers_and_epolls
$1
open(here + '.ready', 'w')"
  wait_until 60 test -e "$TARGET_STATUS.ready"
}
# What the kernel says of them in the target.
timers_of_target() { grep -v signal: "/proc/$TARGET/timers"; }
epolls_of_target() { cat "/proc/$TARGET"/fdinfo/* | grep tfd: | awk '{ print $2, $4, $6 }' | sort; }

@test "a timer that is about what has ended, and an epoll that has a file by a closed descriptor too, are refused" {
  need_root "CRIU"
  start_with_timers "one = Thread()
timer(1, 4, one.native_id)
one.end()"
  dump_refused ended-timer
  assert_contains "$err" "timer 0 signals thread"
  start_with_timers "one = Thread()
timer(clock(one.native_id, of_thread))
one.end()"
  dump_refused ended-timer
  assert_contains "$err" "timer 0 is by thread"
  # Also in a process without CUDA.
  export OUTSIDE=$$
  start_with_timers "if os.fork() == 0:
    other = process()
    timer(clock(other, of_time))
    end(other)
    os.wait()
    timer(clock(int(os.environ['OUTSIDE']), of_time))
    open(here + '.child', 'w')
    time.sleep(1000)
while not os.path.exists(here + '.child'): time.sleep(0.001)"
  dump_refused ended-timer
  assert_contains "$err" "timer 0 is by process"
  assert_contains "$err" "of a process outside of the tree"
  start_with_timers "epoll = select.epoll()
one, other = socket.socketpair()
epoll.register(one)
copy = os.dup(one.fileno())
epoll.register(copy)
one.close()"
  dump_refused epoll
  # Of a pipe, whose number is another file's by now; its other end is in the epoll as well.
  start_with_timers "epoll = select.epoll()
one, other = os.pipe()
epoll.register(other, 4)
epoll.register(one)
copies = [os.dup(one), os.dup(one)]
epoll.register(copies[0])
os.dup2(other, one)"
  dump_refused epoll
  # Two that are open, which CRIU confuses where a third is not.
  start_with_timers "epoll = select.epoll()
one, other = socket.socketpair()
for number in one.fileno(), os.dup(one.fileno()), other.fileno(): epoll.register(number)
copy = os.dup(other.fileno())
other.close()"
  dump_refused epoll
  start_with_timers "import resource
for _ in range(20): timer(1)
resource.setrlimit(resource.RLIMIT_SIGPENDING, (2, 1000))"
  dump_refused signal-limit
}

@test "timers about what lives, and epolls with a closed descriptor whose file is in them once, come back" {
  need_root "CRIU"
  start_with_timers "one = Thread()
timer(1, 4, one.native_id)
timer(clock(one.native_id, of_thread))
living, ended = process(), process()
timer(clock(living, of_time))
timer(clock(ended, of_time))
timer(clock(os.getpid(), of_time))
timer(-2)
timer(-6)
end(ended)
# One whose copy is in no epoll, one whose number is another file's, and one that is there twice.
closed, reused, twice = select.epoll(), select.epoll(), select.epoll()
one, other = socket.socketpair()
closed.register(other)
closed.register(one)
copy = os.dup(one.fileno())
one.close()
one, far = os.pipe()
reused.register(one)
copy = os.dup(one)
os.dup2(far, one)
reused.register(far, 4)
pair = socket.socketpair()
twice.register(pair[0])
twice.register(os.dup(pair[0].fileno()))"
  local timers epolls
  timers=$(timers_of_target)
  epolls=$(epolls_of_target)
  capture stasis doctor "$TARGET" --no-trial --json
  assert_contains "$out" '"thread-timer"'
  dump_it
  assert_contains "$err" "CLOCK_THREAD_CPUTIME_ID"
  restore_it
  target_goes_on
  assert_equal "$(timers_of_target)" "$timers"
  assert_equal "$(epolls_of_target | wc -l)" "$(wc -l <<<"$epolls")"
}

@test "that the signal of a periodic timer, which waits, comes twice after a restore is told" {
  need_root "CRIU"
  start_with_timers "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
times = (ctypes.c_long * 4)(0, 1000000, 0, 1000000)
libc.syscall(223, timer(1, 0), 0, times, None)
while signal.SIGRTMIN not in signal.sigpending(): time.sleep(0.001)"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_contains "$out" '"timer-signal"'
  dump_it
  assert_contains "$err" "two come after a restore"
  restore_it
  target_goes_on
}

@test "a timer, a watch or memory by O_PATH that is under way from one process to another is refused" {
  need_root "CRIU"
  local make
  for make in "libc.timerfd_create(1, 0)" "libc.inotify_init1(0)" \
    "os.open(f'/proc/self/fd/{os.memfd_create(chr(109))}', os.O_PATH)"; do
    start_python "import ctypes, socket
libc = ctypes.CDLL(None)
one, other = socket.socketpair()
file = $make
socket.send_fds(one, [b'x'], [file])
os.close(file)"
    refused 7 busy dump "$TARGET" --images-dir "$image"
    assert_contains "$err" "is under way in a unix socket"
    target_goes_on
  done
}
@test "that a restore gives a terminal of the program's own to its leader alone is told" {
  need_root "CRIU"
  start_python "if os.forkpty()[0] == 0: os.execlp('bash', 'bash', '-c', 'sleep 1000 & wait')
time.sleep(0.5)"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_contains "$out" '"terminal-session"'
  dump_it
  assert_contains "$err" "has a controlling terminal that is of the tree"
  restore_it
  target_goes_on
}

# lead_to FILE TARGET: in the place of FILE its user puts a link; the file is FILE.kept then.
lead_to() {
  mv "$1" "$1.kept"
  ln -s "$2" "$1"
  chown -h 65534 "$1"
}

@test "a restore gives a program no file to which another user's link leads" {
  need_root "CRIU"
  local theirs=$BATS_TEST_TMPDIR/theirs secret=$BATS_TEST_TMPDIR/secret file criu=$BATS_TEST_TMPDIR/criu
  mkdir "$theirs"
  # Of the same size and mode, so that CRIU takes it for what the program had.
  echo "what root has" >"$secret"
  for file in "$theirs"/{read,mapped,gone}; do echo "what they have" | head -c 13 >"$file"; echo >>"$file"; done
  chmod 600 "$secret" "$theirs"/*
  chown -R 65534:65534 "$theirs"
  start_python "opened = os.open('$theirs/read', os.O_RDWR)
mapped = mmap.mmap(os.open('$theirs/mapped', os.O_RDONLY), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
gone = open('$theirs/gone')
os.unlink('$theirs/gone')"
  dump_it
  for file in "$theirs"/{read,mapped}; do
    lead_to "$file" "$secret"
    refused 5 not-permitted restore --images-dir "$image" --detach
    assert_contains "$err" "file $file goes through $file, a link that belongs to user 65534"
    mv "$file.kept" "$file"
    # After the look, when CRIU begins.
    cat >"$criu" <<END
#!/usr/bin/env bash
if [[ \$1 == swrk ]]; then mv $file $file.kept && ln -s $secret $file && chown -h 65534 $file; fi
exec $(real_criu) "\$@"
END
    chmod +x "$criu"
    refused 5 not-permitted restore --images-dir "$image" --detach --criu "$criu"
    assert_contains "$err" "a link that belongs to user 65534"
    [[ ! -e /proc/$TARGET ]]
    mv "$file.kept" "$file"
  done
  # On the way to a deleted file, which CRIU makes again, and takes away.
  lead_to "$theirs" "$BATS_TEST_TMPDIR"
  refused 5 not-permitted restore --images-dir "$image" --detach
  assert_contains "$err" "goes through $theirs, a link that belongs to user 65534"
  rm "$theirs"
  # A link of root leads where root wants, also to a user whose namespace does not know root.
  ln -s "$theirs.kept" "$theirs"
  local way=$BATS_TEST_TMPDIR user=(setpriv --reuid 65533 --regid 65533 --clear-groups unshare --user --map-root-user)
  if "${user[@]}" true; then
    chmod -R a+rX "$image"
    while [[ $way != / ]]; do chmod a+x "$way" && way=$(dirname "$way"); done
    capture "${user[@]}" stasis inspect "$image"
    assert_contains "$out" "$image"
    [[ $out$err != *"a link of user"* ]] || { echo "$out$err" >&2; return 1; }
  fi
  restore_it
  target_goes_on
  assert_equal "$(<"$secret")" "what root has"
}
