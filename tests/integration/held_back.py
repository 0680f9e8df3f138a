#!/usr/bin/env python3
"""held_back.py FOLDER [execute] [epoll] [pipe] [late] [all] [mute] [silent] [overlay]: a CUDA program with code of a file that a process of its own serves (FUSE), in a
user namespace of its own, and whose pages that one holds back. Run as root of that namespace, with the
FUSE device in FOLDER/fuse. With `execute` a child of it executes that file; with `epoll`
or `pipe` it has none of that file, but an epoll or a pipe whose lock in the kernel a process outside of its tree keeps,
which is told events there or writes from there, with `late` not before FOLDER/asks is there, and
the program itself in the mount namespace of what has started it; with `all` other users may use the file
system as well; with `mute` that does not even say what it is, as a network that is down; with `silent` it answers
nothing any more from FOLDER/ready on, and what it has said before is no longer believed; with `overlay` the program
has files of an overlay on top of the file system, by which its server is asked with the program's rights.
Writes its server's number to FOLDER/server, and FOLDER/ready, or FOLDER/none where the machine has no FUSE."""
import ctypes
import mmap
import os
import select
import struct
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
folder = sys.argv[1]
SIZE = 1 << 20
INIT, LOOKUP, GETATTR, OPEN, READ, STATFS = 26, 1, 3, 14, 15, 17
FORGETS, OF_OTHERS, ENOSYS = (2, 36, 42), (23, 27), 38  # OF_OTHERS: LISTXATTR, OPENDIR
FOLDERS = (1, 3)
BELIEVED = 0 if "silent" in sys.argv else 1000  # seconds


def attributes(node: int) -> bytes:
    mode, size = (0o40755, 0) if node in FOLDERS else (0o100755, SIZE)
    return struct.pack("6Q10I", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def serve(fuse: int) -> None:
    while True:
        request = os.read(fuse, 1 << 20)
        _, kind, unique, node = struct.unpack_from("IIQQ", request)
        error, answer = 0, b""
        if "silent" in sys.argv and os.path.exists(folder + "/ready"):
            continue
        if kind == INIT:
            answer = struct.pack("IIIIHHIIHHI28x", 7, 31, 4096, 0, 0, 0, 4096, 0, 0, 0, 0)
        elif kind == LOOKUP:
            found = 3 if request[40:].startswith(b"folder") else 2
            answer = struct.pack("QQQQII", found, 0, BELIEVED, BELIEVED, 0, 0) + attributes(found)
        elif kind == GETATTR:
            answer = struct.pack("QII", BELIEVED, 0, 0) + attributes(node)
        elif kind == OPEN:
            answer = struct.pack("QII", 1, 0, 0)
        elif kind == READ:
            open(folder + "/held", "w").close()
            continue
        elif kind == STATFS and "overlay" in sys.argv:
            answer = struct.pack("5Q10I", 0, 0, 0, 0, 0, 4096, 255, 0, 0, *[0] * 6)
        elif kind in FORGETS + OF_OTHERS or (kind == STATFS and "mute" in sys.argv):
            continue
        else:
            error = -ENOSYS
        os.write(fuse, struct.pack("IiQ", 16 + len(answer), error, unique) + answer)


def beside(act) -> None:
    """Runs it in a process outside of this one's tree."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            act()
        os._exit(0)
    os.waitpid(child, 0)


def run_on_gpu() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == 0
    open(folder + "/ready", "w").close()
    time.sleep(300)


if "begun" in sys.argv:
    run_on_gpu()
def wait_for_criu() -> None:
    while "late" in sys.argv and not os.path.exists(folder + "/asks"):
        time.sleep(0.01)


try:
    fuse = os.open(folder + "/fuse", os.O_RDWR)
except OSError:
    fuse = -1
os.mkdir(folder + "/served")
how = f"fd={fuse},rootmode=40000,user_id=0,group_id=0" + (",allow_other" if "all" in sys.argv else "")
if fuse < 0 or libc.mount(b"none", (folder + "/served").encode(), b"fuse", 0, how.encode()) != 0:
    open(folder + "/none", "w").close()
    sys.exit()


def server() -> None:
    open(folder + "/server", "w").write(str(os.getpid()))
    serve(fuse)


beside(server)
if "overlay" in sys.argv:
    os.close(fuse)
    for name in ("empty", "above"):
        os.mkdir(folder + "/" + name)
    layers = f"lowerdir={folder}/served:{folder}/empty,userxattr"
    if libc.mount(b"none", (folder + "/above").encode(), b"overlay", 0, layers.encode()) != 0:
        open(folder + "/none", "w").close()
        sys.exit()
    held = open(folder + "/above/file (deleted)", "rb", 0)
    watch = libc.inotify_init1(0)
    assert libc.inotify_add_watch(watch, (folder + "/above/folder").encode(), 0x100) == 1  # IN_CREATE
    run_on_gpu()
file = os.open(folder + "/served/code", os.O_RDONLY)
code = mmap.mmap(file, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
os.close(fuse)
if "epoll" in sys.argv or "pipe" in sys.argv:
    ends = os.pipe()
    events = select.epoll()
    events.register(ends[0], select.EPOLLIN)
    writable = mmap.mmap(file, SIZE, mmap.MAP_PRIVATE)
    place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(writable)) + SIZE // 2)
    if "pipe" in sys.argv:
        beside(lambda: (wait_for_criu(), libc.write(ends[1], place, 4096)))
    else:
        os.write(ends[1], b"x")
        beside(lambda: libc.epoll_wait(events.fileno(), place, 1, -1))
else:
    beside(lambda: code[SIZE - 1])
while "late" not in sys.argv and not os.path.exists(folder + "/held"):
    time.sleep(0.01)
if "execute" in sys.argv and os.fork() == 0:
    os.execv(folder + "/served/code", ["code"])
if "epoll" in sys.argv or "pipe" in sys.argv:
    libc.munmap(ctypes.c_void_p(place.value - SIZE // 2), ctypes.c_size_t(SIZE))
    code.close()
    os.close(file)
if "late" in sys.argv:
    for end in ends:
        os.set_inheritable(end, True)
    libc.setns(os.open(f"/proc/{os.getppid()}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), 0)
    os.execv(sys.executable, [sys.executable, sys.argv[0], folder, "begun"])
run_on_gpu()
