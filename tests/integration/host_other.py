"""A CUDA program into whose host memory a child without CUDA writes, as MPI does (process_vm_writev(2)).

    host_other.py STATUS MIB

The child gives page after page of the first 4 MiB the number of its sweep, and notices one that has not the number of
the sweep before.
Writes "round N" to STATUS; ends with 1, and says what is wrong, if so.
"""

import ctypes
import os
import sys
import time

from host_memory import MADV_DONTFORK, PAGE, region
from host_writer import open_gpu

LIBC = ctypes.CDLL(None, use_errno=True)


class Vector(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def move(call, pid, address, number):
    here, there = Vector(ctypes.addressof(number), 8), Vector(address, 8)
    if call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != 8:
        os._exit(0)  # the parent has ended


def write_into(pid, start, size, status):
    number = ctypes.c_uint64()
    for sweep in range(1, 1 << 30):
        for at in range(start, start + size, PAGE):
            move(LIBC.process_vm_readv, pid, at, number)
            if number.value != sweep - 1:
                print(f"sweep {sweep}: the page at {at - start} has {number.value}", flush=True)
                os._exit(1)
            number.value = sweep
            move(LIBC.process_vm_writev, pid, at, number)
        with open(status, "w", encoding="ascii") as file:
            file.write(f"round {sweep}\n")


def main():
    size = int(sys.argv[2]) << 20
    memory = region(size)
    memory.madvise(MADV_DONTFORK)  # else its pages were the child's, too
    for at in range(0, size, PAGE):
        memory[at:at + PAGE] = bytes(8) + b"\1" * (PAGE - 8)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        write_into(parent, start, min(size, 4 << 20), sys.argv[1])
    driver = open_gpu()
    while driver:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            sys.exit("the child has ended")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
