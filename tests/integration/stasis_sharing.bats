#!/usr/bin/env bats
# GPU memory that processes share: ranks that write into each other's memory, as NCCL's do, on the
# simulated driver, which loses a process that has another's memory at its checkpoint.

load helpers
load stasis_lib
load stasis_sharing_lib

setup() { setup_sharing; }
teardown() { end_stasis; }

@test "ranks that write into each other's memory are suspended and resumed again and again" {
  local i SIZE=4M
  start_ranks 2
  local used
  used=$(gpu_used)
  for ((i = 0; i < $(times 4 8); ++i)); do
    done_by suspend "$TARGET" --json
    # With what they share: 2 MiB of each are its context.
    assert_equal "$(json 'd["path"], d["direct_bytes"]')" "direct $((used - (4 << 20)))" "$out"
    in_state checkpointed "${CHILDREN[@]}"
    done_by resume "$TARGET"
    target_goes_on
  done
  target_verifies
}

@test "eight ranks that write into each other's memory, too" {
  start_ranks 8
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "ranks that write into each other's memory are dumped and restored" {
  need_root "CRIU"
  local SIZE=4M
  start_ranks 2
  dump_it
  # What the agents have open is no affair of the user's.
  [[ $err != *SO_PEERCRED* ]] || { echo "$err" >&2; return 1; }
  gpu_is_free
  restore_it
  in_state running "${CHILDREN[@]}"
  target_goes_on
  # What was restored can be suspended again.
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  restored_verifies 3
}

# go_on_and_on COUNT: so many ranks, fifty suspends and twenty dumps.
go_on_and_on() {
  local i
  need_root "CRIU"
  start_ranks "$1"
  for ((i = 0; i < 50; ++i)); do
    done_by suspend "$TARGET"
    in_state checkpointed "${CHILDREN[@]}"
    done_by resume "$TARGET"
    target_goes_on
  done
  for ((i = 0; i < 20; ++i)); do
    dump_it
    gpu_is_free
    restore_it
    in_state running "${CHILDREN[@]}"
    target_goes_on
    rm -rf "$image"
  done
  restored_verifies $(($1 + 1))
}

# bats test_tags=long
@test "two ranks that write into each other's memory go through fifty suspends and twenty dumps" { go_on_and_on 2; }

# bats test_tags=long
@test "eight ranks that write into each other's memory go through fifty suspends and twenty dumps" { go_on_and_on 8; }

@test "ranks that share memory of the host's are suspended, dumped and restored" {
  need_root "CRIU"
  start_ranks 2 --of-host
  local i
  for i in 1 2 3; do
    done_by suspend "$TARGET"
    done_by resume "$TARGET"
    target_goes_on
  done
  dump_it
  restore_it
  target_goes_on
  restored_verifies 3
}

@test "ranks share memory where the kernel forbids to execute files of memory, and are dumped and restored" {
  need_root "CRIU, PID namespaces"
  [[ -e /proc/sys/vm/memfd_noexec ]] || skip "this kernel has no vm.memfd_noexec"
  # The setting is that of the PID namespace, and its files have a seal more.
  cat >"$BATS_TEST_TMPDIR/inside" <<'END'
set -e
cd "$BATS_TEST_TMPDIR"
echo 1 >/proc/sys/vm/memfd_noexec
LD_PRELOAD=$1 setsid stasis-workload collective --children 2 --size 256K --pause-ms 2 --sharing --status ranks </dev/null >log 2>&1 3>&- 4>&- &
goes_on() {
  local before i
  before=$(cat ranks || true)
  for ((i = 0; i < 600; ++i)); do
    kill -0 "$pid"
    [[ $(cat ranks || true) == "$before" ]] || return 0
    sleep 0.1
  done
  return 1
}
pid=$!
goes_on; goes_on
stasis suspend $pid
stasis resume $pid
goes_on
stasis dump $pid --images-dir image
stasis restore --images-dir image --detach
goes_on; goes_on
kill $pid
while kill -0 $pid; do sleep 0.1; done
[[ $(grep -c "^verified" log) == 3 ]]
END
  export BATS_TEST_TMPDIR
  capture timeout 120 unshare --pid --fork --mount-proc --kill-child env LD_LIBRARY_PATH="${STASIS_LIBCUDA%/*}" bash "$BATS_TEST_TMPDIR/inside" "$agent"
  ((status == 0)) || { cat "$BATS_TEST_TMPDIR/log" >&2; echo "$out$err" >&2; return 1; }
}

@test "one of two ranks by itself is refused before anything is touched" {
  start_ranks 2
  STASIS_SIM_FAULTS="lock:error=999" refused 8 not-supported suspend "${CHILDREN[0]}"
  assert_contains "$err" "outside of the tree"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  # The driver would lose it.
  refused 8 not-supported suspend "$TARGET" --path driver
  assert_contains "$err" "leave --path driver out"
  target_goes_on
  target_verifies
}

# A program, "owner" or "other": two pieces of memory go from the one to the other by descriptors, over a socket at WAY.
write_pair() {
  cat >"$BATS_TEST_TMPDIR/pair.py" <<'END'
import ctypes, os, socket, sys, time
driver, context, data = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
def call(name, *words):
    result = getattr(driver, name)(*words)
    assert result == 0, (name, result)
class Place(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]
class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("handles", ctypes.c_uint), ("place", Place), ("rest", ctypes.c_uint64 * 2)]
class Right(ctypes.Structure):
    _fields_ = [("place", Place), ("flags", ctypes.c_uint)]
gpu, size, none, long = Place(1, 0), ctypes.c_size_t(2 << 20), ctypes.c_uint64(0), ctypes.c_uint64
what, status, way = sys.argv[1], sys.argv[2], sys.argv[3]
call("cuInit", 0)
call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
call("cuMemAlloc_v2", ctypes.byref(data), size)
handles = [long(), long()]
unix = socket.socket(socket.AF_UNIX)
if what == "owner":
    fds = []
    for handle in handles:
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(Prop(1, 1, gpu)), none)
        fd = ctypes.c_int()
        call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, none)
        fds.append(fd.value)
    unix.bind(way + ".new")
    unix.listen()
    os.rename(way + ".new", way)
    other = unix.accept()[0]
    socket.send_fds(other, [b"x"], fds)
else:
    while not os.path.exists(way):
        time.sleep(0.01)
    unix.connect(way)
    other, fds = None, socket.recv_fds(unix, 1, 2)[1]
    for handle, fd in zip(handles, fds):
        call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), 1)
for fd in fds:
    os.close(fd)
unix.close()
if other:
    other.close()
places = []
for handle in handles:
    place = long()
    call("cuMemAddressReserve", ctypes.byref(place), size, none, none, none)
    call("cuMemMap", place, size, none, handle, none)
    call("cuMemSetAccess", place, size, ctypes.byref(Right(gpu, 3)), ctypes.c_size_t(1))
    call("cuMemRelease", handle)
    places.append(place)
for round in range(1, 10**9):
    if what == "other" and places and os.path.exists(f"{status}.{len(places)}"):
        call("cuMemUnmap", places.pop(), size)
    call("cuMemsetD8_v2", data, 1, size)
    with open(status + ".new", "w") as file:
        file.write(f"round {round} {len(places)} mapped\n")
    os.rename(status + ".new", status)
    time.sleep(0.02)
END
}

@test "the owner of memory that a process of another tree has is refused as that one is, and both are named" {
  local owner other what
  write_pair
  for what in owner other; do
    TARGET_STATUS=$BATS_TEST_TMPDIR/$what
    (LD_PRELOAD=$agent exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/pair.py" "$what" "$TARGET_STATUS" "$BATS_TEST_TMPDIR/way") \
      </dev/null >&2 3>&- &
    TARGET=$!
    echo "$TARGET" >>"$targets"
    declare "$what=$TARGET"
  done
  wait_until 60 target_is_up
  STASIS_SIM_FAULTS="lock:error=999" refused 8 not-supported suspend "$other"
  assert_contains "$err" "process $other has imported 2 pieces (4.00 MiB) of process $owner (python3)"
  unshared() { STASIS_SIM_FAULTS="lock:error=999" refused 8 not-supported suspend "$owner" "$@" && assert_contains "$err" "process $owner has made it, and process $other (python3) has it"; }
  unshared
  unshared --path driver
  capture cuda-checkpoint --toggle --pid "$owner"
  ((status != 0))
  assert_contains "$err" "process $owner would be lost"
  in_state running "$owner"
  # It has one of the two, and then none.
  touch "$TARGET_STATUS.2"
  wait_until 60 grep -q " 1 mapped" "$TARGET_STATUS"
  unshared
  touch "$TARGET_STATUS.1"
  wait_until 60 grep -q " 0 mapped" "$TARGET_STATUS"
  TARGET=$owner TARGET_STATUS=$BATS_TEST_TMPDIR/owner
  done_by suspend "$owner"
  done_by resume "$owner"
  target_goes_on
  done_by suspend "$other"
  done_by resume "$other"
}

@test "an import whose owner cannot be reached says so" {
  write_pair
  need_root "network namespaces"
  (LD_PRELOAD=$agent exec_on_gpu python3 "$BATS_TEST_TMPDIR/pair.py" owner "$BATS_TEST_TMPDIR/owner" "$BATS_TEST_TMPDIR/way") </dev/null >&2 3>&- &
  echo $! >>"$targets"
  other() { (LD_PRELOAD=$agent exec_on_gpu unshare --net timeout 60 python3 "$BATS_TEST_TMPDIR/pair.py" other "$BATS_TEST_TMPDIR/other" "$BATS_TEST_TMPDIR/way"); }
  capture other
  ((status != 0))
  assert_contains "$err" "in another network namespace"
}

@test "ranks whose agents do not answer are refused, and not left to the driver" {
  # What holds for NCCL is said without the agents.
  local unheard=$BATS_TEST_TMPDIR/unheard way child LIKE=''
  start_ranks 2
  for child in "${CHILDREN[@]}"; do
    timeout 60 python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$child" unheard "$unheard.$child" 3>&- &
    wait_until 60 test -e "$unheard.$child"
  done
  for way in "" --path=driver; do
    # shellcheck disable=SC2086 # or no argument
    capture stasis suspend "$TARGET" $way
    ((status != 0))
    assert_contains "$err" "process ${CHILDREN[0]}"
    in_state running "${CHILDREN[@]}"
    target_goes_on
  done
  for child in "${CHILDREN[@]}"; do
    rm "$unheard.$child"
    wait_until 60 python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$child" heard
  done
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

# Its parent stands still, and does not end the others.
@test "a rank that is killed while the job is dumped fails the dump: an image without it would be of no use" {
  need_root "CRIU"
  local rc=0 tool
  start_ranks 2
  kill -STOP "$TARGET"
  STASIS_SIM_FAULTS="checkpoint:delay=2s pid=${CHILDREN[0]}" \
    stasis dump "$TARGET" --images-dir "$image" >/dev/null 2>"$BATS_TEST_TMPDIR/said" 3>&- &
  tool=$!
  wait_until 60 works_on_it "$tool"
  kill -KILL "${CHILDREN[1]}"
  wait "$tool" || rc=$?
  assert_equal "$rc" 12 "$(<"$BATS_TEST_TMPDIR/said")"
  assert_contains "$(<"$BATS_TEST_TMPDIR/said")" "process ${CHILDREN[0]} has given up 1 piece"
  assert_contains "$(<"$BATS_TEST_TMPDIR/said")" "end it (\`kill -9 ${CHILDREN[0]}\`), and start the job again"
  [[ ! -e $image/manifest.json ]]
  kill -KILL "${CHILDREN[0]}" "$TARGET"
  done_by recover --all
  nothing_left
}

@test "ranks whose agents are of another version are refused, and not left to the driver" {
  local way child LIKE=''
  start_ranks 2
  for child in "${CHILDREN[@]}"; do
    python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$child" version 9
  done
  for way in "" --path=driver; do
    # shellcheck disable=SC2086 # or no argument
    refused 8 not-supported suspend "$TARGET" $way
    assert_contains "$err" "use the stasis that came with that agent"
    in_state running "${CHILDREN[@]}"
    target_goes_on
  done
  for child in "${CHILDREN[@]}"; do
    python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$child" version 4
  done
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "a tool that is killed while memory is given up or taken again leaves a job that recover brings back" {
  start_ranks 2
  killed_in_the_middle "${CHILDREN[@]}"
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

# By the driver: the first two imports that each rank makes after those of its start fail.
@test "memory of another process that the driver does not give back is asked for again" {
  local how where rest
  local ways=("resume/resume \$TARGET" "resume/recover \${CHILDREN[1]}" "suspend/recover --all" "suspend/as it says")
  [[ ${STASIS_ALL_TESTS:-0} == 0 ]] || ways+=("resume/as it says" "resume/recover --all")
  for how in "${ways[@]}"; do
    where=${how%%/*}
    STASIS_SIM_FAULTS="import:error=2@2; import:error=2@3" start_ranks 2
    unset STASIS_SIM_FAULTS
    if [[ $where == resume ]]; then
      done_by suspend "$TARGET"
      refused 12 not-rolled-back resume "$TARGET"
    else
      STASIS_SIM_FAULTS="checkpoint:error=999" refused 12 not-rolled-back suspend "$TARGET"
    fi
    assert_contains "$err" "could not take other processes' memory again"
    [[ $err =~ \`stasis\ (recover\ [0-9]+)\` && $err != *"by itself"* ]]
    [[ $how != *says ]] || how=$where/${BASH_REMATCH[1]}
    done_by ps
    assert_contains "$err" "process ${CHILDREN[0]} stands still until \`stasis recover $TARGET\`"
    # The second fails, then.
    eval capture stasis "${how#*/}"
    assert_equal "$status" 12 "$err"
    eval done_by "${how#*/}"
    in_state running "${CHILDREN[@]}"
    target_goes_on
    done_by suspend "$TARGET"
    done_by resume "$TARGET"
    target_verifies
    nothing_left
  done
}

@test "a suspend that is interrupted when the ranks have given their memory up takes all of it back" {
  local tool status=0
  start_ranks 2
  STASIS_FAULT=direct.detached:stop timeout -k 5 60 stasis suspend "$TARGET" >/dev/null 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  tool=$!
  wait_until 60 stopped_below "$tool"
  kill -INT "$(pgrep -P "$tool")"
  kill -CONT "$(pgrep -P "$tool")"
  wait "$tool" || status=$?
  assert_equal "$status" 130 "$(<"$BATS_TEST_TMPDIR/err")"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_verifies
}

@test "a tool is killed when one process has the shared memory back and another does not: none runs until recover" {
  local child
  start_ranks 2
  done_by suspend "$TARGET"
  STASIS_FAULT=direct.attached_one:kill capture stasis resume "$TARGET"
  assert_equal "$status" 137
  sleep 0.5 # agents look for their peer each tenth of a second
  for child in "${CHILDREN[@]}"; do
    assert_equal "$(python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$child" state)" 4 "filling, process $child"
  done
  done_by recover --all
  target_goes_on
  target_verifies
}

@test "a program that has given out GPU memory as a dma-buf is refused until it is freed" {
  cat >"$BATS_TEST_TMPDIR/range.py" <<'END'
import ctypes, itertools, os, sys, time
driver, context, data, range, fd = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int()
size = ctypes.c_size_t(4 << 20)
assert driver.cuInit(0) == 0 and driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
assert driver.cuMemAlloc_v2(ctypes.byref(data), size) == 0 and driver.cuMemAlloc_v2(ctypes.byref(range), size) == 0
assert driver.cuMemGetHandleForAddressRange(ctypes.byref(fd), range, size, 1, ctypes.c_ulonglong(0)) == 0
os.close(fd.value)
for round in itertools.count(1):
    if range and os.path.exists(sys.argv[1] + ".free"):
        assert driver.cuMemFree_v2(range) == 0
        range = None
    assert driver.cuMemsetD8_v2(data, 1, size) == 0
    with open(sys.argv[1], "w") as status:
        status.write(f"round {round} {'freed' if range is None else 'there'}\n")
    time.sleep(0.02)
END
  TARGET_STATUS=$BATS_TEST_TMPDIR/range.status
  (LD_PRELOAD=$agent exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/range.py" "$TARGET_STATUS") </dev/null >&2 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  STASIS_SIM_FAULTS="lock:error=999" refused 8 not-supported suspend "$TARGET"
  assert_contains "$err" "a dma-buf"
  capture stasis doctor "$TARGET" --no-trial
  assert_contains "$out" "suspend: no, because GPU memory that a device"
  touch "$TARGET_STATUS.free"
  wait_until 60 grep -q freed "$TARGET_STATUS"
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
}
