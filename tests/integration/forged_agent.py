"""forged_agent.py FOLDER USER HOW: a program on GPU 0, of the user of that number, with a page that only looks as if it
were an agent's (include/abi/agent_protocol.h), which says that the driver has held the program before. Makes
FOLDER/ready-PID. HOW:

  silent    it answers no command
  busy      it answers, and says of its GPU work at each deadline that it has not ended
  keeps     it says that it holds the program back, and answers nothing from then on
  unmapped  it answers nothing, and the program has the descriptor of the page only, in a user namespace
  locked    the program itself has the lock that a tool takes
  tool      the same, and its name is that of a tool
  many      it answers nothing, and the program has 100,000 descriptors more that are called like a page
"""
import ctypes
import fcntl
import mmap
import os
import resource
import struct
import sys
import time

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAGIC, ABI_VERSION = b"sasagent", 4
BYTES, SEGMENT_BYTES, SEGMENTS, SHARE_BYTES, SHARES = 328, 48, 64, 40, 16
PAGE = BYTES + SHARE_BYTES * SHARES + SEGMENT_BYTES * SEGMENTS
REQUEST, REPLY, COMMAND, ABANDONED, ARGUMENTS, RESULT, STATE, HELD_BEFORE = 24, 28, 32, 36, 40, 72, 240, 304
CLOSE, OPEN, NOT_READY = 2, 9, 600
MANY = 100000
CLONE_NEWUSER, PR_SET_DUMPABLE, PR_SET_NAME = 0x10000000, 4, 15

folder, user, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
libc = ctypes.CDLL(None, use_errno=True)


def use_gpu() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == 0


def number(at: int, form: str = "<I") -> int:
    return struct.unpack_from(form, page, at)[0]


def answer() -> None:
    request = number(REQUEST)
    if request == number(REPLY):
        return
    command, result = number(COMMAND), 0
    if how == "keeps" and command == OPEN:
        return
    if how == "busy" and command == CLOSE:
        end = time.monotonic() + number(ARGUMENTS, "<Q") / 1000
        while time.monotonic() < end and number(ABANDONED) != request:
            time.sleep(0.01)
        result = NOT_READY
    struct.pack_into("<I", page, RESULT, result)
    struct.pack_into("<I", page, REPLY, request)


use_gpu()
if how == "many":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    empty = os.memfd_create("stasis-agent")
    for _ in range(min(MANY, most - 100)):
        os.dup(empty)
file = os.memfd_create("stasis-agent", os.MFD_ALLOW_SEALING)
os.ftruncate(file, PAGE)
fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
page = mmap.mmap(file, PAGE)
if user != 0:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    libc.prctl(PR_SET_DUMPABLE, 1)
if how == "unmapped":
    libc.unshare(CLONE_NEWUSER)
struct.pack_into("<I", page, HELD_BEFORE, 1)
struct.pack_into("<8sIIii", page, 0, MAGIC, ABI_VERSION, PAGE, os.getpid(), os.getpid())
if how == "unmapped":
    page.close()
if how == "tool":
    libc.prctl(PR_SET_NAME, b"stasis-tool")
if how in ("locked", "tool"):
    fcntl.flock(file, fcntl.LOCK_EX)
os.close(os.open(f"{folder}/ready-{os.getpid()}", os.O_CREAT | os.O_WRONLY))
while True:
    if how in ("busy", "keeps"):
        answer()
    time.sleep(0.002)
