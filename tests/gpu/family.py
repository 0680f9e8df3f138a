#!/usr/bin/env python3
"""A parent that saves its own child and brings it back, over the socket pair that joins them.

The child holds GPU memory and asks NVML; it answers what it reads there. The parent asks it, has
plain criu with our plugin dump it, collects it, restores it with its end of the same socket pair,
and asks again. Prints one JSON object; fails if an answer differs.
"""

import argparse
import ctypes
import hashlib
import json
import os
import socket
import subprocess
import sys
import time

SIZE = 64 << 20
LIMIT = 60  # seconds for an answer


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Gpu:
    """The first GPU: memory of our own on it, and NVML's view of it where there is an NVML."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(SIZE))
        content = hashlib.shake_128(b"family").digest(SIZE)
        self.call("cuMemcpyHtoD_v2", self.address, content, ctypes.c_size_t(SIZE))
        self.nvml, self.device = None, ctypes.c_void_p()
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        self.ask_nvml("nvmlInit_v2")
        self.ask_nvml("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.device))

    def call(self, name, *arguments):
        result = getattr(self.cuda, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returned {result}")

    def ask_nvml(self, name, *arguments):
        result = getattr(self.nvml, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returned {result}")

    def figures(self):
        content = ctypes.create_string_buffer(SIZE)
        self.call("cuMemcpyDtoH_v2", content, self.address, ctypes.c_size_t(SIZE))
        found = {"pid": os.getpid(), "content": hashlib.sha256(content.raw).hexdigest()}
        if self.nvml:
            uuid, memory = ctypes.create_string_buffer(96), Memory()
            self.ask_nvml("nvmlDeviceGetUUID", self.device, uuid, 96)
            self.ask_nvml("nvmlDeviceGetMemoryInfo", self.device, ctypes.byref(memory))
            found["nvml"] = {"uuid": uuid.value.decode(), "total": memory.total, "in_use": memory.used >= SIZE}
        return found


def child(connection):
    os.setsid()
    gpu = Gpu()
    while True:
        if not connection.recv(16):
            return
        try:
            answer = gpu.figures()
        except RuntimeError as reason:
            answer = {"error": str(reason)}
        connection.sendall(json.dumps(answer).encode() + b"\n")


def ask(connection):
    connection.settimeout(LIMIT)
    connection.sendall(b"?")
    answer = b""
    while not answer.endswith(b"\n"):
        piece = connection.recv(4096)
        if not piece:
            sys.exit("the child closed the connection")
        answer += piece
    found = json.loads(answer)
    if "error" in found:
        sys.exit("the child says: " + found["error"])
    return found


def criu(options, verb, *arguments, pass_fds=()):
    start = time.monotonic()
    done = subprocess.run(
        [options.criu, verb, "--images-dir", options.images, "--log-file", verb + ".log", "-v4",
         "--libdir", options.libdir, *arguments],
        pass_fds=pass_fds, stdin=subprocess.DEVNULL, timeout=LIMIT, check=False)
    if done.returncode != 0:
        with open(os.path.join(options.images, verb + ".log"), encoding="utf-8", errors="replace") as log:
            wrong = [line.strip() for line in log if "Error" in line and "rlimit" not in line]
        sys.exit(f"criu {verb}: status {done.returncode}: " + " / ".join(wrong[:4]))
    return time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--criu", "--libdir", "--images"):
        parser.add_argument(name, required=True)
    parser.add_argument("--times", type=int, default=2, help="how often to go there and back")
    options = parser.parse_args()

    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        child(theirs)
        os._exit(0)
    first = ask(ours)
    figures = {"dump_seconds": [], "restore_seconds": []}
    for number in range(options.times):
        images = os.path.join(options.images, str(number))
        os.makedirs(images)
        now = argparse.Namespace(criu=options.criu, libdir=options.libdir, images=images)
        # Its end of the socket, by the number of its inode: what CRIU leaves out, and gets back from us.
        inode = os.fstat(theirs.fileno()).st_ino
        figures["dump_seconds"].append(criu(now, "dump", "--tree", str(pid), f"--ext-unix-sk={inode}"))
        ended, status = os.waitpid(pid, 0)
        if ended != pid or not os.WIFSIGNALED(status):
            sys.exit(f"the dumped child ended with {status}")
        figures["restore_seconds"].append(
            criu(now, "restore", "--restore-detached", "--restore-sibling", "--inherit-fd",
                 f"fd[{theirs.fileno()}]:socket:[{inode}]", pass_fds=(theirs.fileno(),)))
        again = ask(ours)
        if again != first:
            sys.exit(f"the child answered {first}, and after restore {number + 1} {again}")
    # It is our child again: it ends when we hang up, and we learn how.
    theirs.close()
    ours.close()
    ended, status = os.waitpid(pid, 0)
    if status != 0:
        sys.exit(f"the restored child ended with {status}")
    print(json.dumps({**figures, "answer": first}))


if __name__ == "__main__":
    main()
