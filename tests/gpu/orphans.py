#!/usr/bin/env python3
"""Processes that go on with GPU memory whose owner has ended, has freed it, or has closed the agent's sockets.

    orphans.py STATUS ends|frees|closes IMPORTERS

Five pieces: one of the device's and one of the host's by descriptors, a large one and two small ones by CUDA IPC. In every round each process
that has them writes its round into its word of each piece, waits until the others have written theirs, and checks
what the owner wrote behind these words; so one that has a copy of its own stands still. STATUS.N says the round of
process N, 0 being the owner, and STATUS that of the last. Runs until SIGTERM; ends with 1 if one of them does.
With several GPUs the processes take turns, and reach what the owner's GPU has as its peers; with
ONE_OF_SO_MANY_GPUS=N each sees one of them alone.
"""
import ctypes
import os
import signal
import socket
import sys
import time

SIZE = 4 << 20
SIZES = [SIZE, SIZE, SIZE, 64 << 10, 300 << 10]
WORDS = 16  # of 8 bytes, for the rounds; the content is behind them
long = ctypes.c_uint64
none, size = long(0), ctypes.c_size_t(SIZE)


class Place(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("handles", ctypes.c_uint), ("place", Place), ("rest", ctypes.c_uint64 * 2)]


class Right(ctypes.Structure):
    _fields_ = [("place", Place), ("flags", ctypes.c_uint)]


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


PR_SET_PDEATHSIG = 1
GPU, HOST = Place(1, 0), Place(3, 0)


def call(name, *words):
    result = getattr(driver, name)(*words)
    assert result == 0, (os.getpid(), name, result)


def mapped(handle):
    place = long()
    call("cuMemAddressReserve", ctypes.byref(place), size, none, none, none)
    call("cuMemMap", place, size, none, handle, none)
    call("cuMemSetAccess", place, size, ctypes.byref(Right(Place(1, device), 3)), ctypes.c_size_t(1))
    call("cuMemRelease", handle)
    return place


def begin(number):
    global driver, device
    # They wait for each other for ever.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gpus = int(os.environ.get("ONE_OF_SO_MANY_GPUS", 0))
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    call("cuInit", 0)
    devices = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(devices))
    device = number % devices.value
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)


def content(piece):
    return bytes([17 * (piece + 1)]) * (SIZES[piece] - 8 * WORDS)


class Sharer:
    def __init__(self, number, count, places):
        self.number, self.count, self.places = number, count, places
        self.contents = [content(piece) for piece in range(len(SIZES))]
        self.compare = ctypes.CDLL(None).memcmp

    def rounds(self, first):
        """In which all of 0 to count take part, but for the owner where `first` is 1."""
        words, buffer = (ctypes.c_uint64 * WORDS)(), ctypes.create_string_buffer(SIZE)
        for number in range(1, 10**9):
            begun = time.monotonic()
            for piece, place in enumerate(self.places):
                mine = ctypes.c_uint64(number)
                call("cuMemcpyHtoD_v2", long(place.value + 8 * self.number), ctypes.byref(mine), ctypes.c_size_t(8))
                while True:
                    call("cuMemcpyDtoH_v2", words, place, ctypes.c_size_t(ctypes.sizeof(words)))
                    if all(words[other] >= number for other in range(first, self.count + 1)):
                        break
                    time.sleep(0.002)
                # Without a copy in Python: the tests that look at this program need the processors.
                rest = ctypes.c_size_t(len(self.contents[piece]))
                call("cuMemcpyDtoH_v2", buffer, long(place.value + 8 * WORDS), rest)
                assert self.compare(buffer, self.contents[piece], rest) == 0, (self.number, piece, "content")
            write_status(f"{status}.{self.number}", f"round {number}\n")
            if self.number == self.count:
                write_status(status, f"round {number} ok\n")
            # Asleep for most of the time: the processors are free for the tests beside this one.
            time.sleep(min(max(0.02, 4 * (time.monotonic() - begun)), 0.25))


def write_status(path, text):
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)


def close_agents_sockets():
    """As a program does that closes all that it has not opened; the driver's stay."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            one = socket.socket(fileno=fd)
        except OSError:
            continue
        name = one.getsockname()
        if not isinstance(name, bytes) or not name.startswith(b"\0stasis-ipc-"):
            one.detach()
        else:
            one.close()


def own(sockets):
    begin(0)
    places, fds = [], []
    for place in GPU, HOST:
        handle, fd = long(), ctypes.c_int()
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(Prop(1, 1, place)), none)
        call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, none)
        places.append(mapped(handle))
        fds.append(fd.value)
    handles = b""
    for bytes_of_piece in SIZES[2:]:
        places.append(long())
        call("cuMemAlloc_v2", ctypes.byref(places[-1]), ctypes.c_size_t(bytes_of_piece))
        handle = Handle()
        call("cuIpcGetMemHandle", ctypes.byref(handle), places[-1])
        handles += bytes(handle)
    for piece, place in enumerate(places):
        call("cuMemcpyHtoD_v2", place, bytes(8 * WORDS) + content(piece), ctypes.c_size_t(SIZES[piece]))
    for one in sockets:
        socket.send_fds(one, [handles], fds)
        assert one.recv(1) == b"x"
        one.close()
    for fd in fds:
        os.close(fd)
    if what == "ends":
        os._exit(0)
    if what == "closes":
        close_agents_sockets()
        Sharer(0, count, places).rounds(0)
    for place in places[:2]:
        call("cuMemUnmap", place, size)
    for place in places[2:]:
        call("cuMemFree_v2", place)
    write_status(status + ".0", "round 0\n")
    while True:
        time.sleep(1)


def take(number, owner, ready):
    begin(number)
    content, fds, _, _ = socket.recv_fds(owner, 64 * len(SIZES[2:]), 2)
    places = []
    for fd in fds:
        handle = long()
        call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), 1)
        os.close(fd)
        places.append(mapped(handle))
    for at in range(0, len(content), 64):
        places.append(long())
        call("cuIpcOpenMemHandle_v2", ctypes.byref(places[-1]), Handle.from_buffer_copy(content, at), 1)
    owner.send(b"x")
    owner.close()
    while not ready():
        time.sleep(0.005)
    Sharer(number, count, places).rounds(0 if what == "closes" else 1)


def end(children, failed):
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if not failed:
        with open(status) as file:
            print("verified", file.read().split()[1], "rounds", flush=True)
    os._exit(1 if failed else 0)


def main():
    # Each child has its end of one pair alone: the first message of the owner's is for it.
    pairs = [socket.socketpair() for _ in range(count)]
    owner = os.fork()
    if owner == 0:
        for _, theirs in pairs:
            theirs.close()
        own([mine for mine, _ in pairs])
    children = [owner]
    for number, (mine, theirs) in enumerate(pairs, 1):
        children.append(os.fork())
        if children[-1] == 0:
            for other_mine, other_theirs in pairs:
                other_mine.close()
                if other_theirs is not theirs:
                    other_theirs.close()
            take(number, theirs, lambda: what == "closes" or os.path.exists(f"{status}.owner"))
    for mine, theirs in pairs:
        mine.close()
        theirs.close()
    if what == "ends":
        os.waitpid(owner, 0)
        children.remove(owner)
    while what == "frees" and not os.path.exists(status + ".0"):
        time.sleep(0.01)
    write_status(status + ".owner", "gone\n")
    signal.signal(signal.SIGTERM, lambda *_: end(children, False))
    os.wait()
    end(children, True)


status, what, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
main()
