#!/usr/bin/env bats
# What a job of stasis run --images-dir has for itself wherever it is restored: shared memory,
# semaphores, what of System V it shares.

load helpers
load stasis_lib
load stasis_jobs_lib

setup() { setup_job; }
teardown() { end_stasis; }

# A parent and a forked child that count in turns, in memory with a name, in memory of System V and under
# semaphores with a name, without one, and of System V. Says each ten rounds in $1 what it has seen.
write_sharing_job() {
  cat >"$BATS_TEST_TMPDIR/sharing.py" <<'PY'
import ctypes, multiprocessing, os, subprocess, sys, time
from multiprocessing import shared_memory

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.sem_open.restype = ctypes.c_void_p
status, workload = sys.argv[1], sys.argv[2:]
child = subprocess.Popen(workload)
named = shared_memory.SharedMemory("stasis-counter", create=True, size=1 << 20)
anonymous = multiprocessing.Semaphore(1)
O_CREAT = os.O_CREAT
semaphore = ctypes.c_void_p(libc.sem_open(b"/stasis-turn", O_CREAT, 0o600, 1))
assert semaphore.value
key = libc.shmget(0x57a515, 4096, 0o1600)
sets = libc.semget(0x57a515, 1, 0o1600)
assert key >= 0 and sets >= 0, ctypes.get_errno()
assert libc.semctl(sets, 0, 16, 7) == 0  # SETVAL
sysv = ctypes.c_uint64.from_address(libc.shmat(key, None, 0))
counter = ctypes.c_uint64.from_buffer(named.buf)

def take_turns(rounds=0):
    seen = 0
    while True:
        assert libc.sem_wait(semaphore) == 0
        with anonymous:
            assert counter.value == sysv.value, (counter.value, sysv.value)
            assert counter.value >= seen
            counter.value += 1
            sysv.value += 1
            seen = counter.value
        assert libc.sem_post(semaphore) == 0
        # By name, as a process that comes now finds them.
        other = shared_memory.SharedMemory("stasis-counter")
        assert int.from_bytes(bytes(other.buf[:8]), "little") >= seen
        other.close()
        again = ctypes.c_void_p(libc.sem_open(b"/stasis-turn", 0))
        assert again.value
        libc.sem_close(again)
        assert libc.shmget(0x57a515, 0, 0) == key
        assert libc.semctl(sets, 0, 12) == 7  # GETVAL
        if rounds is not None and seen % 10 < 3:
            with open(status + ".new", "w") as file: file.write(f"round {seen}\n")
            os.rename(status + ".new", status)
        time.sleep(0.01)

second = multiprocessing.Process(target=take_turns, args=(None,), daemon=True)
second.start()
try:
    take_turns()
except BaseException as why:
    open(status + ".failed", "w").write(repr(why))
    raise
PY
}

@test "shared memory and semaphores, of POSIX and of System V, are there after a restore, and out here never" {
  write_sharing_job
  local status=$BATS_TEST_TMPDIR/sharing
  job=(python3 "$BATS_TEST_TMPDIR/sharing.py" "$status" stasis-workload memory --size 4M --status "$TARGET_STATUS")
  start_run
  job_is_up
  wait_until 60 grep -q round "$status"
  [[ ! -e /dev/shm/stasis-counter && ! -e /dev/shm/sem.stasis-turn ]]
  if ipcs -m | grep -q 57a515; then false; fi
  local saved
  saved=$(target_round "$status")
  saves 000001
  kill -KILL "$RUN"
  wait_until 60 job_is_gone
  ends_with 137
  start_run
  told "goes on from"
  rm "$status"
  wait_until 60 grep -q round "$status"
  (($(target_round "$status") >= saved))
  TARGET_STATUS=$status target_goes_on
  target_goes_on
  kill -TERM "$RUN"
  ends_with 75
  start_run
  told "goes on from"
  TARGET_STATUS=$status target_goes_on
  [[ ! -e $status.failed ]] || { cat "$status.failed"; false; }
  [[ ! -e /dev/shm/stasis-counter ]]
  # By its name, and gone on from by its number: by nothing else, since that would be without all this.
  local sharing=$status # which what follows sets, too
  done_by dump "job-$RUN" --images-dir "$image"
  ends_with 137
  refused 2 usage restore --images-dir "$image"
  done_by inspect "$image"
  assert_contains "$out" "give the job's directory to \`stasis run --images-dir\` or \`stasis restore\`"
  done_by inspect "$image" --json
  assert_equal "$(json 'd["restorable"], d["needs_stasis_run"]')" "True True"
  mv "$image" "$images/000099"
  start_run
  told "goes on from $images/000099 "
  TARGET_STATUS=$sharing target_goes_on
  [[ ! -e $sharing.failed ]]
  kill -INT "$RUN"
  nothing_left
}

@test "pipes with a name in /dev/shm are there after a restore, with what is in them" {
  job=(python3 -c 'import os, sys, time
status, opened, closed = sys.argv[1], "/dev/shm/opened", "/dev/shm/closed"
os.mkfifo(opened)
os.mkfifo(closed)
end = os.open(opened, os.O_RDWR)
count = 0
while True:
    os.write(end, b"%d" % count)
    time.sleep(0.02)
    assert os.read(end, 99) == b"%d" % count
    assert os.path.samestat(os.fstat(end), os.stat(opened)) and os.path.exists(closed)
    count += 1
    with open(status + ".new", "w") as file: file.write(f"round {count}\n")
    os.rename(status + ".new", status)' "$TARGET_STATUS")
  start_run
  job_is_up
  saves 000001
  kill -KILL "$RUN"
  ends_with 137
  start_run
  told "goes on from $images/000001 "
  target_goes_on
  kill -INT "$RUN"
  ends_with 130
}

@test "an images directory and a working directory below /dev/shm are seen as they are" {
  local here
  here=$(mktemp -d /dev/shm/stasis-test-XXXXXX)
  images=$here/deep/images
  mkdir "$here/deep"
  job=(sh -c "echo here >in-there; exec stasis-workload memory --size 4M --status $TARGET_STATUS")
  cd "$here"
  start_run
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  assert_equal "$(<in-there)" here
  assert_equal "$(ls "$images")" $'000001\nlock'
  start_run
  told "goes on from $images/000001"
  target_goes_on
  kill -TERM "$RUN"
  ends_with 75
  assert_equal "$(ls "$images")" $'000001\n000002\nlock'
  cd /
  rm -r "$here"
}

@test "what it starts after a restore sees the variables that were to be refreshed as they are now" {
  cat >"$BATS_TEST_TMPDIR/printing" <<END
stasis-workload memory --size 4M --status $TARGET_STATUS &
while sleep 0.1; do
  {
    env
    sh -c 'echo "NESTED=\$SLURM_JOB_ID"'
    [ ! -e $BATS_TEST_TMPDIR/other ] || setpriv --reuid 65534 env | sed -n 's/^SLURM_JOB_ID=/OTHER_USER=/p'
  } >$BATS_TEST_TMPDIR/seen.new
  mv $BATS_TEST_TMPDIR/seen.new $BATS_TEST_TMPDIR/seen
done
END
  job=(bash "$BATS_TEST_TMPDIR/printing")
  seen() { [[ $(sed -n "s/^$1=//p" "$BATS_TEST_TMPDIR/seen") == "$2" ]]; }
  SLURM_JOB_ID=1 SLURM_GONE=x OWN=1 start_run --refresh-env 'SLURM_*,FRESH'
  job_is_up
  wait_until 60 seen SLURM_JOB_ID 1
  kill -TERM "$RUN"
  ends_with 75
  SLURM_JOB_ID=2 FRESH="a b" OWN=2 start_run --refresh-env 'SLURM_*,FRESH'
  told "goes on from"
  wait_until 60 seen SLURM_JOB_ID 2
  seen NESTED 2
  # Another user's process is not dumped everywhere, also by root (CAP_SYS_RESOURCE), so not while it is saved.
  touch "$BATS_TEST_TMPDIR/other"
  wait_until 60 seen OTHER_USER 2
  rm "$BATS_TEST_TMPDIR/other"
  wait_until 60 seen OTHER_USER ""
  seen FRESH "a b"
  seen SLURM_GONE ""
  seen OWN 1
  kill -TERM "$RUN"
  ends_with 75
  SLURM_JOB_ID=3 start_run
  told "goes on from"
  wait_until 60 seen SLURM_JOB_ID 1 # nothing was listed
  refused 2 usage run --images-dir "$images" --refresh-env LD_PRELOAD -- true
  refused 2 usage run --images-dir "$images" --refresh-env 'STASIS_*' -- true # STASIS_ENV_FILE goes with them
}

@test "another user of the job cannot give its programs variables" {
  # shellcheck disable=SC2016 # for the inner shells
  job=(bash -c '
    setpriv --reuid 65534 --regid 65534 --clear-groups sh -c "$1" sh 2>/dev/null && echo written
    sh -c "echo seen:\$GIVEN"' bash 'printf "GIVEN=by another user\0" >/dev/shm/.stasis-environment')
  start_run
  ends_with 0
  assert_equal "$(<"$TARGET_LOG")" "seen:"
}

# What PyTorch's data loader does on Linux by default: four workers, forked when CUDA is in use, get the numbers of
# batches by queues (pipes, semaphores, threads), and send each as a file of /dev/shm without a name, whose descriptor
# goes over a socket in TMPDIR. The parent takes them in order, two ahead for each worker, and adds each to what it
# has in GPU memory. Says how many in $1, ends when there is $1.stop, and says what has become of them.
write_loading_job() {
  cat >"$BATS_TEST_TMPDIR/loading.py" <<'PY'
import ctypes, hashlib, mmap, multiprocessing, os, queue, sys, threading, time
from multiprocessing import reduction

status = sys.argv[1]
SIZE, WORKERS, AHEAD, SLOTS = 1 << 16, 4, 2, 64
cuda = ctypes.CDLL("libcuda.so.1")

def call(name, *words):
    code = getattr(cuda, name)(*words)
    assert code == 0, (name, code)

def content(index, seed):
    return hashlib.sha256(b"%d of %d" % (index, seed)).digest() * (SIZE // 32)

def work(worker, seed, orders, results):
    number = 0
    while (index := orders.get()) is not None:
        path = f"/dev/shm/torch_{os.getpid()}_{(number := number + 1)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
        os.ftruncate(fd, SIZE)
        with mmap.mmap(fd, SIZE) as memory:
            memory[:] = content(index, seed)
        results.put((index, reduction.DupFd(fd)))  # which has a copy of it
        os.close(fd)

def receive(results, batches):
    while True:
        index, handle = results.get()
        fd = handle.detach()
        with mmap.mmap(fd, SIZE) as memory:
            batches.put((index, memory[:]))
        os.close(fd)

device, context, base = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(base), ctypes.c_size_t(SIZE * (SLOTS + 1)))
sum_at = ctypes.c_uint64(base.value + SIZE * SLOTS)

def to_gpu(at, data):
    call("cuMemcpyHtoD_v2", at, ctypes.c_char_p(data), ctypes.c_size_t(len(data)))

def from_gpu(at, size):
    data = ctypes.create_string_buffer(size)
    call("cuMemcpyDtoH_v2", data, at, ctypes.c_size_t(size))
    return data.raw

to_gpu(sum_at, bytes(32))
fork = multiprocessing.get_context("fork")
results = fork.Queue()
orders = [fork.Queue() for _ in range(WORKERS)]
workers = [fork.Process(target=work, args=(i, 17, orders[i], results), daemon=True) for i in range(WORKERS)]
for worker in workers:
    worker.start()
batches = queue.Queue()
threading.Thread(target=receive, args=(results, batches), daemon=True).start()
for index in range(WORKERS * AHEAD):
    orders[index % WORKERS].put(index)
early, index = {}, 0
while not os.path.exists(status + ".stop"):
    while index not in early:
        number, data = batches.get()
        assert number not in early and number >= index, f"batch {number} twice"
        early[number] = data
    slot = ctypes.c_uint64(base.value + SIZE * (index % SLOTS))
    to_gpu(slot, early.pop(index))
    to_gpu(sum_at, hashlib.sha256(from_gpu(sum_at, 32) + from_gpu(slot, SIZE)).digest())
    orders[index % WORKERS].put(index + WORKERS * AHEAD)
    index += 1
    with open(status + ".new", "w") as file:
        file.write(f"round {index}\n")
    os.rename(status + ".new", status)
    time.sleep(0.02)
expected = bytes(32)
for one in range(index):
    expected = hashlib.sha256(expected + content(one, 17)).digest()
print("verified" if expected == from_gpu(sum_at, 32) else "wrong", index, flush=True)
for one in orders:
    one.put(None)
for worker in workers:
    worker.join()
    assert worker.exitcode == 0, worker.exitcode
print("workers have ended", flush=True)
os._exit(0)
PY
}

# bats test_tags=long
@test "a data loader's workers, with their shared memory and sockets, are saved by the clock and go on, twice" {
  write_loading_job
  export TMPDIR=/dev/shm # the job's own
  job=(python3 "$BATS_TEST_TMPDIR/loading.py" "$TARGET_STATUS")
  start_run --every 500ms
  job_is_up
  # One may have begun before the workers had.
  local saves
  saves=$(grep -c "saved to" "$RUN_LOG") || true
  wait_until 60 eval '(($(grep -c "saved to" "$RUN_LOG") >= saves + 2))'
  kill -KILL "$RUN"
  wait_until 20 eval '! pgrep -f "^python3 .*$TARGET_STATUS" >/dev/null'
  ends_with 137
  start_run --every 500ms
  told "goes on from $images/"
  target_goes_on
  wait_until 60 grep -qF "saved to $images/" "$RUN_LOG"
  kill -TERM "$RUN"
  ends_with 75
  start_run
  told "goes on from $images/"
  target_goes_on
  assert_equal "$(children_of "$(job_pid)" | wc -l)" 4 "workers"
  touch "$TARGET_STATUS.stop"
  ends_with 0
  assert_equal "$(<"$TARGET_LOG")" $'verified '"$(target_round)"$'\nworkers have ended'
}
