"""A CUDA program that writes its host memory as fast as it can, and notices a page that is not as it was left.

    host_writer.py STATUS MIB PART [LOCKED]

LOCKED MiB besides are locked, and never change.
Page after page gets the number of the sweep, of PART of the memory (1: all). Each must have the number of the sweep
before, when it is its turn, and what is in no part must never change. Writes "round N" to STATUS; ends with 1, and
says what is wrong, if a page has another number.
"""

import ctypes
import random
import struct
import sys

from host_memory import PAGE, region

TEXT = 16  # bytes of a page that the numbers take; the rest is random, so that no page equals another


def address_of(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def open_gpu():
    driver, context, memory = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
    if driver.cuInit(0) or driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0):
        sys.exit("no GPU")
    if driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4 << 20)):
        sys.exit("no GPU memory")
    return driver


def main():
    size = int(sys.argv[2]) << 20
    memory = region(size)
    numbers = random.Random(5)
    for at in range(0, size, 1 << 20):
        memory[at:at + (1 << 20)] = numbers.randbytes(1 << 20)
    for at in range(0, size, PAGE):
        struct.pack_into("<QQ", memory, at, 0, at)
    locked = region((int(sys.argv[4]) if len(sys.argv) > 4 else 1) << 20)
    locked[:] = numbers.randbytes(len(locked))
    ctypes.CDLL(None).mlock(ctypes.c_void_p(address_of(locked)), ctypes.c_size_t(len(locked)))
    written = int(size * float(sys.argv[3])) // PAGE * PAGE
    driver = open_gpu()
    sweep = 0
    while driver:
        sweep += 1
        for at in range(0, written, PAGE):
            if struct.unpack_from("<QQ", memory, at) != (sweep - 1, at):
                sys.exit(f"sweep {sweep}: the page at {at} has {struct.unpack_from('<QQ', memory, at)}")
            struct.pack_into("<QQ", memory, at, sweep, at)
        for at in range(written, size, PAGE):
            if struct.unpack_from("<QQ", memory, at) != (0, at):
                sys.exit(f"sweep {sweep}: the page at {at} was changed")
        with open(sys.argv[1], "w", encoding="ascii") as status:
            status.write(f"round {sweep}\n")


if __name__ == "__main__":
    main()
