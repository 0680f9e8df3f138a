#!/usr/bin/env bats
# GPU memory that processes share in ways of their own, or much of it, by small programs, on the simulated driver.

load helpers
load stasis_lib
load stasis_sharing_lib

setup() { setup_sharing; }
teardown() { end_stasis; }

# start_program NAME: sets TARGET to the Python program NAME.py of the test's folder, under the agent.
start_program() {
  TARGET_STATUS=$BATS_TEST_TMPDIR/$1
  (LD_PRELOAD=$agent exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/$1.py" "$TARGET_STATUS") </dev/null >&2 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
}

# pieces_of_another COUNT
pieces_of_another() {
  cat >"$BATS_TEST_TMPDIR/many.py" <<'END'
import ctypes, os, socket, sys, time
COUNT, SIZE, status = int(os.environ["COUNT"]), 2 << 20, sys.argv[1]
long = ctypes.c_uint64
none, size = long(0), ctypes.c_size_t(SIZE)
class Place(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]
class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("handles", ctypes.c_uint), ("place", Place), ("rest", long * 2)]
class Right(ctypes.Structure):
    _fields_ = [("place", Place), ("flags", ctypes.c_uint)]
def call(name, *words):
    result = getattr(driver, name)(*words)
    assert result == 0, (name, result)
ours, theirs = socket.socketpair()
is_owner = os.fork() != 0
driver, context, data = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), long()
call("cuInit", 0)
call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
call("cuMemAlloc_v2", ctypes.byref(data), size)
(theirs if is_owner else ours).close()
if not is_owner:
    ctypes.CDLL(None).prctl(1, 9)
    places = long()
    call("cuMemAddressReserve", ctypes.byref(places), ctypes.c_size_t(COUNT * SIZE), none, none, none)
for number in range(COUNT):
    handle, fd = long(), ctypes.c_int()
    if is_owner:
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(Prop(1, 1, Place(1, 0))), none)
        call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, none)
        socket.send_fds(ours, [b"x"], [fd.value])
        assert ours.recv(1) == b"x"
    else:
        fd.value = socket.recv_fds(theirs, 1, 1)[1][0]
        call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd.value), 1)
        place = long(places.value + number * SIZE)
        call("cuMemMap", place, size, none, handle, none)
        call("cuMemSetAccess", place, size, ctypes.byref(Right(Place(1, 0), 3)), ctypes.c_size_t(1))
        call("cuMemRelease", handle)
        theirs.send(b"x")
    os.close(fd.value)
for round in range(1, 10**9):
    call("cuMemsetD8_v2", data, 1, size)
    if is_owner:
        with open(status + ".new", "w") as file:
            file.write(f"round {round}\n")
        os.rename(status + ".new", status)
    time.sleep(0.02)
END
  export STASIS_SIM_GPUS=1x8G
  COUNT=$1 start_program many
  suspended_and_resumed
}
@test "a process that has more pieces of another's than it may have files open is suspended and resumed" {
  ulimit -Sn 256
  pieces_of_another 300
}
# bats test_tags=long
@test "a process that has two thousand pieces of another's is suspended and resumed" {
  pieces_of_another 2000
}

@test "a process that has inherited another's memory is left to the driver by no tool while a third one has it" {
  cat >"$BATS_TEST_TMPDIR/heirs.py" <<'END'
import ctypes, os, socket, sys, time
status, size = sys.argv[1], ctypes.c_size_t(4 << 20)
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
def call(name, *words):
    result = getattr(driver, name)(*words)
    assert result == 0, (name, result)
def begin():
    global driver
    ctypes.CDLL(None).prctl(1, 9)
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
place, pairs = ctypes.c_uint64(), [socket.socketpair() for _ in range(2)]
owner = os.fork()
if owner == 0:
    begin()
    call("cuMemAlloc_v2", ctypes.byref(place), size)
    handle = Handle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), place)
    for mine, _ in pairs:
        mine.send(bytes(handle))
        mine.recv(1)
    os._exit(0)
for number, (_, theirs) in enumerate(pairs):
    if os.fork() == 0:
        begin()
        call("cuIpcOpenMemHandle_v2", ctypes.byref(place), Handle.from_buffer_copy(theirs.recv(64)), 1)
        theirs.send(b"x")
        for round in range(1, 10**9):
            call("cuMemsetD8_v2", place, 1, size)
            with open(f"{status}.{number}.new", "w") as file:
                file.write(f"round {round}\n")
            os.rename(f"{status}.{number}.new", f"{status}.{number}")
            time.sleep(0.02)
for _ in range(3):
    os.wait()
END
  local child
  TARGET_STATUS=$BATS_TEST_TMPDIR/heirs.1
  (LD_PRELOAD=$agent exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/heirs.py" "${TARGET_STATUS%.1}") </dev/null >&2 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  two_left() { mapfile -t CHILDREN < <(children_of "$TARGET") && ((${#CHILDREN[@]} == 2)); }
  wait_until 60 two_left
  at_end_kill "${CHILDREN[@]}"
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  for child in "${CHILDREN[@]}"; do
    capture cuda-checkpoint --toggle --pid "$child"
    ((status != 0))
    assert_contains "$err" "process $child would be lost"
    in_state running "$child"
  done
  # When no other process has it.
  kill -KILL "${CHILDREN[1]}"
  wait_until 60 test ! -e "/proc/${CHILDREN[1]}"
  TARGET_STATUS=${TARGET_STATUS%.1}.0
  capture cuda-checkpoint --toggle --pid "${CHILDREN[0]}"
  assert_equal "$status" 0 "$err"
  capture cuda-checkpoint --toggle --pid "${CHILDREN[0]}"
  assert_equal "$status" 0 "$err"
  target_goes_on
}

@test "what is opened by CUDA IPC is open to the devices that were let into its context before and after" {
  cat >"$BATS_TEST_TMPDIR/peers.py" <<'END'
import ctypes, os, socket, sys, time
status, size, word = sys.argv[1], ctypes.c_size_t(4 << 20), ctypes.c_uint64
driver = ctypes.CDLL("libcuda.so.1")
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
class Place(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]
def call(name, *words):
    result = getattr(driver, name)(*words)
    assert result == 0, (name, result)
def context(device):
    made = ctypes.c_void_p()
    call("cuCtxCreate_v2", ctypes.byref(made), 0, device)
    return made
def may(device):
    flags = word()
    call("cuMemGetAccess", ctypes.byref(flags), ctypes.byref(Place(1, device)), place)
    return flags.value
mine, theirs = socket.socketpair()
place = word()
if os.fork() == 0:
    ctypes.CDLL(None).prctl(1, 9)
    call("cuInit", 0)
    context(0)
    call("cuMemAlloc_v2", ctypes.byref(place), size)
    handle = Handle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), place)
    mine.send(bytes(handle))
    time.sleep(1000)
call("cuInit", 0)
first, second, third = context(0), context(1), context(2)
call("cuCtxSetCurrent", second)
call("cuCtxEnablePeerAccess", first, 0)
call("cuCtxSetCurrent", first)
call("cuIpcOpenMemHandle_v2", ctypes.byref(place), Handle.from_buffer_copy(theirs.recv(64)), 1)
assert (may(0), may(1), may(2)) == (3, 3, 0), (may(0), may(1), may(2))
call("cuCtxSetCurrent", third)
call("cuCtxEnablePeerAccess", first, 0)
for round in range(1, 10**9):
    assert (may(0), may(1), may(2)) == (3, 3, 3), (may(0), may(1), may(2))
    with open(status + ".new", "w") as file:
        file.write(f"round {round}\n")
    os.rename(status + ".new", status)
    time.sleep(0.02)
END
  export STASIS_SIM_GPUS=3x1G
  start_program peers
  suspended_and_resumed
}

@test "memory of a process without an agent that one with an agent has open is refused, and both are to have one" {
  local what
  cat >"$BATS_TEST_TMPDIR/open.py" <<'END'
import ctypes, os, sys, time
what, status, way = sys.argv[1:]
driver, context, place, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(4 << 20)
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
def call(name, *words):
    result = getattr(driver, name)(*words)
    assert result == 0, (name, result)
def write(path, content):
    with open(path + ".new", "wb") as file:
        file.write(content)
    os.rename(path + ".new", path)
call("cuInit", 0)
call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
if what == "owner":
    handle = Handle()
    call("cuMemAlloc_v2", ctypes.byref(place), size)
    call("cuIpcGetMemHandle", ctypes.byref(handle), place)
    write(way, bytes(handle))
else:
    while not os.path.exists(way):
        time.sleep(0.01)
    with open(way, "rb") as file:
        call("cuIpcOpenMemHandle_v2", ctypes.byref(place), Handle.from_buffer_copy(file.read()), 1)
for round in range(1, 10**9):
    call("cuMemsetD8_v2", place, 1, size)
    write(status, b"round %d\n" % round)
    time.sleep(0.02)
END
  for what in owner other; do
    TARGET_STATUS=$BATS_TEST_TMPDIR/$what
    ([[ $what == owner ]] || export LD_PRELOAD=$agent
      exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/open.py" "$what" "$TARGET_STATUS" "$BATS_TEST_TMPDIR/way") </dev/null >&2 3>&- &
    TARGET=$!
    echo "$TARGET" >>"$targets"
    wait_until 60 target_is_up
  done
  STASIS_SIM_FAULTS="lock:error=999" refused 8 not-supported suspend "$TARGET"
  assert_contains "$err" "start both with \`stasis run\`"
  in_state running
  target_goes_on
}

@test "an import that one GPU may write and another only read comes back so, in each of its maps" {
  cat >"$BATS_TEST_TMPDIR/rights.py" <<'END'
import ctypes, os, socket, sys, time
status, size, word = sys.argv[1], ctypes.c_size_t(2 << 20), ctypes.c_uint64
class Place(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]
class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("handles", ctypes.c_uint), ("place", Place), ("rest", word * 2)]
class Right(ctypes.Structure):
    _fields_ = [("place", Place), ("flags", ctypes.c_uint)]
def call(name, *words):
    result = getattr(driver, name)(*words)
    assert result == 0, (name, result)
def begin(device):
    global driver
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
def mapped(handle, rights):
    place = word()
    call("cuMemAddressReserve", ctypes.byref(place), size, word(), word(), word())
    call("cuMemMap", place, size, word(), handle, word())
    given = (Right * len(rights))(*[Right(Place(1, device), flags) for device, flags in rights])
    call("cuMemSetAccess", place, size, given, ctypes.c_size_t(len(rights)))
    return place
def may(place, device):
    flags = word()
    call("cuMemGetAccess", ctypes.byref(flags), ctypes.byref(Place(1, device)), place)
    return flags.value
ours, theirs = socket.socketpair()
handle, fd, buffer = word(), ctypes.c_int(), ctypes.create_string_buffer(8)
if os.fork() == 0:
    ctypes.CDLL(None).prctl(1, 9)
    begin(0)
    call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(Prop(1, 1, Place(1, 0))), word())
    call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, word())
    socket.send_fds(ours, [b"x"], [fd.value, fd.value])
    time.sleep(1000)
begin(1)
fds = socket.recv_fds(theirs, 1, 2)[1]
handles = [word() for _ in fds]
for handle, fd in zip(handles, fds):
    call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), 1)
writes = mapped(handles[0], [(1, 3), (0, 1)])
reads = [mapped(handles[0], [(1, 1)]), mapped(handles[1], [(0, 3), (1, 1)])]
for round in range(1, 10**9):
    call("cuMemcpyHtoD_v2", writes, ctypes.byref(word(round)), ctypes.c_size_t(8))
    for place in reads:
        call("cuMemcpyDtoH_v2", buffer, place, ctypes.c_size_t(8))
        assert word.from_buffer(buffer).value == round
    rights = [(may(place, 0), may(place, 1)) for place in [writes, *reads]]
    assert rights == [(1, 3), (0, 1), (3, 1)], rights
    with open(status + ".new", "w") as file:
        file.write(f"round {round}\n")
    os.rename(status + ".new", status)
    time.sleep(0.02)
END
  export STASIS_SIM_GPUS=2x256M
  start_program rights
  suspended_and_resumed
  suspended_and_resumed
}

@test "a program that has an object of NVLink multicast is refused, and told what to set" {
  local what
  cat >"$BATS_TEST_TMPDIR/multicast.py" <<'END'
import ctypes, os, sys, time
driver, context, data, object, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
assert driver.cuInit(0) == 0 and driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
assert driver.cuMemAlloc_v2(ctypes.byref(data), ctypes.c_size_t(4 << 20)) == 0
class Prop(ctypes.Structure):
    _fields_ = [("devices", ctypes.c_uint), ("size", ctypes.c_size_t), ("types", ctypes.c_ulonglong), ("flags", ctypes.c_ulonglong)]
size = ctypes.c_size_t(2 << 20)
assert driver.cuMulticastCreate(ctypes.byref(object), ctypes.byref(Prop(1, 2 << 20, 1, 0))) == 0
def map_and_release():
    assert driver.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0)) == 0
    assert driver.cuMemMap(address, size, ctypes.c_size_t(0), object, ctypes.c_ulonglong(0)) == 0
    assert driver.cuMemRelease(object) == 0
def retain_and_unmap():
    assert driver.cuMemRetainAllocationHandle(ctypes.byref(object), address) == 0
    assert driver.cuMemUnmap(address, size) == 0
def release():
    assert driver.cuMemRelease(object) == 0
steps = [map_and_release, retain_and_unmap, release]
for round in range(1, 10**9):
    if steps and os.path.exists(f"{sys.argv[1]}.{steps[0].__name__}"):
        steps.pop(0)()
    assert driver.cuMemsetD8_v2(data, 1, ctypes.c_size_t(4096)) == 0
    with open(sys.argv[1], "w") as status:
        status.write(f"round {round} {len(steps)} to go\n")
    time.sleep(0.02)
END
  start_program multicast
  refused_as_multicast() {
    STASIS_SIM_FAULTS="lock:error=999" refused 8 not-supported suspend "$TARGET"
    assert_contains "$err" "NCCL_NVLS_ENABLE=0"
  }
  refused_as_multicast
  # A handle that is released leaves the object where it is mapped.
  for what in "map_and_release, 2" "retain_and_unmap, 1"; do
    touch "$TARGET_STATUS.${what%,*}"
    wait_until 60 grep -q " ${what#*, } to go" "$TARGET_STATUS"
    refused_as_multicast
  done
  # Nor would the driver alone bring it back.
  capture cuda-checkpoint --toggle --pid "$TARGET"
  ((status != 0))
  assert_contains "$err" "NCCL_NVLS_ENABLE=0"
  in_state running
  touch "$TARGET_STATUS.release"
  wait_until 60 grep -q " 0 to go" "$TARGET_STATUS"
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
}

# As ranks of NCCL with NVLS: one makes the object, and each adds its device and binds memory of its own.
@test "ranks that share an object of NVLink multicast start under the agent, and each is refused" {
  cat >"$BATS_TEST_TMPDIR/nvls.py" <<'END'
import array, ctypes, os, socket, sys, time
here, there = socket.socketpair()
importer = os.fork() == 0
sock = there if importer else here
driver, context, data = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
size, zero, none = ctypes.c_size_t(2 << 20), ctypes.c_size_t(0), ctypes.c_ulonglong(0)
def done(result):
    assert result == 0, result
class Prop(ctypes.Structure):
    _fields_ = [("devices", ctypes.c_uint), ("size", ctypes.c_size_t), ("types", ctypes.c_ulonglong), ("flags", ctypes.c_ulonglong)]
class Memory(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("asked", ctypes.c_int), ("location", ctypes.c_int), ("device", ctypes.c_int), ("rest", ctypes.c_ulonglong * 2)]
done(driver.cuInit(0)), done(driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
done(driver.cuMemAlloc_v2(ctypes.byref(data), ctypes.c_size_t(4 << 20)))
object, memory, address, unbound = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
done(driver.cuMemAlloc_v2(ctypes.byref(unbound), ctypes.c_size_t(4 << 20)))
if importer:
    fds = array.array("i")
    fds.frombytes(sock.recvmsg(1, socket.CMSG_LEN(fds.itemsize))[1][0][2])
    done(driver.cuMemImportFromShareableHandle(ctypes.byref(object), ctypes.c_void_p(fds[0]), 1))
    os.close(fds[0])
else:
    fd = ctypes.c_int()
    done(driver.cuMulticastCreate(ctypes.byref(object), ctypes.byref(Prop(2, 4 << 20, 1, 0))))
    done(driver.cuMemExportToShareableHandle(ctypes.byref(fd), object, 1, none))
    sock.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.value]))])
    os.close(fd.value)
done(driver.cuMulticastAddDevice(object, 0))
done(driver.cuMemCreate(ctypes.byref(memory), size, ctypes.byref(Memory(1, 0, 1, 0)), none))
done(driver.cuMulticastBindMem(object, zero, memory, zero, size, none))
done(driver.cuMulticastBindAddr(object, size, data, size, none))
done(driver.cuMemAddressReserve(ctypes.byref(address), ctypes.c_size_t(4 << 20), zero, ctypes.c_uint64(0), none))
done(driver.cuMemMap(address, ctypes.c_size_t(4 << 20), zero, object, none))
status = sys.argv[1] + (".importer" if importer else "")
for round in range(1, 10**9):
    if address.value and os.path.exists(sys.argv[1] + ".end"):
        done(driver.cuMulticastUnbind(object, 0, zero, size)), done(driver.cuMulticastUnbind(object, 0, size, size))
        done(driver.cuMemUnmap(address, ctypes.c_size_t(4 << 20))), done(driver.cuMemRelease(object))
        address.value = 0
    done(driver.cuMemsetD8_v2(data, 1, ctypes.c_size_t(4096)))
    with open(status, "w") as out:
        out.write(f"round {round} {'has it' if address.value else 'without'}\n")
    time.sleep(0.02)
END
  start_program nvls
  local importer=$TARGET_STATUS.importer child pid
  wait_until 60 grep -qs "has it" "$importer"
  child=$(pgrep -P "$TARGET")
  for pid in "$TARGET" "$child"; do
    STASIS_SIM_FAULTS="lock:error=999" refused 8 not-supported suspend "$pid"
    assert_contains "$err" "NCCL_NVLS_ENABLE=0"
    capture cuda-checkpoint --toggle --pid "$pid"
    ((status != 0))
    assert_contains "$err" "NCCL_NVLS_ENABLE=0"
  done
  touch "$TARGET_STATUS.end"
  wait_until 60 grep -qs without "$TARGET_STATUS"
  wait_until 60 grep -qs without "$importer"
  # Hardware has had it, and the agent does not learn when it has no more.
  refused 8 not-supported suspend "$TARGET" --path direct
  assert_contains "$err" "bound to hardware"
  capture stasis suspend "$TARGET" --path direct --json
  assert_equal "$(json '[(o["id"], o["override"]) for o in d["error"]["obstacles"]]')" "[('staying-memory', None)]"
  in_state running "$TARGET" "$child"
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  # Without the agent it is known as what may be another process's.
  kill -KILL "$TARGET" "$child"
  rm "$TARGET_STATUS" "$TARGET_STATUS.end" "$importer"
  agent='' start_program nvls
  wait_until 60 grep -qs "has it" "$importer"
  for pid in "$TARGET" "$(pgrep -P "$TARGET")"; do
    STASIS_SIM_FAULTS="lock:error=999" refused 8 not-supported suspend "$TARGET"
    assert_contains "$err" "may be another process's"
    in_state running "$pid"
    target_goes_on
  done
}
