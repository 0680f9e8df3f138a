"""A CUDA program with much host memory of several kinds, which verifies all of it in every round.

    host_memory.py STATUS MIB

Writes "round N" to STATUS. Ends with 1, and says what is wrong, if anything is not as it was left.
"""

import ctypes
import mmap
import os
import random
import sys
import time
import zlib

PAGE = 4096
MADV_DONTFORK = 10
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
SHARED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS


def region(size, flags=PRIVATE):
    return mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


class Sums:
    """Of a region, block by block, so that a page that is written has one block added up again."""

    BLOCK = 1 << 20

    def __init__(self, memory):
        self.memory = memory
        self.sums = [self.sum(at) for at in range(0, len(memory), self.BLOCK)]

    def sum(self, at):
        with memoryview(self.memory) as view:
            return zlib.crc32(view[at:at + self.BLOCK])

    def check(self, what):
        if any(self.sum(number * self.BLOCK) != wanted for number, wanted in enumerate(self.sums)):
            sys.exit(f"{what} is not as it was left")

    def written(self, at):
        self.sums[at // self.BLOCK] = self.sum(at // self.BLOCK * self.BLOCK)


class Program:
    def __init__(self, mib):
        self.random = random.Random(7)
        size = mib << 20
        self.regions = {"dense": region(size), "sparse": region(size), "shared": region(32 << 20),
                        "locked": region(16 << 20)}
        for at in range(0, size, 1 << 20):
            # Every fourth of zeros, every fourth the same as the one before.
            kind = at >> 20 & 3
            if kind:
                content = self.random.randbytes(1 << 20) if kind != 3 else content
                self.regions["dense"][at:at + (1 << 20)] = content
        # Of the first half every other page, of the second fewer.
        for at in [*range(0, size // 2, 2 * PAGE), *range(size // 2, size, 5 * PAGE)]:
            self.regions["sparse"][at:at + 8] = at.to_bytes(8, "little")
        for name in ("shared", "locked"):
            self.regions[name][:] = self.random.randbytes(len(self.regions[name]))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.regions["locked"]))
        if ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(16 << 20)):
            del self.regions["locked"]  # a limit
        # Else all pages would be the child's, too.
        for name in ("dense", "sparse"):
            self.regions[name].madvise(MADV_DONTFORK)
        # One object, which the child reads and neither writes.
        self.regions["together"] = region(18 << 20, SHARED)
        self.regions["together"][:] = self.random.randbytes(18 << 20)
        # And one that the child has and does not touch.
        self.regions["inherited"] = region(20 << 20, SHARED)
        self.regions["inherited"][:] = self.random.randbytes(20 << 20)
        self.sums = {name: Sums(memory) for name, memory in self.regions.items()}
        self.child = self.fork()
        # Mapped as shared, as pinned memory is, and no other's. Every fourth part was never written.
        self.regions["alone"] = region(24 << 20, SHARED)
        for at in range(0, 24 << 20, 1 << 20):
            if at >> 20 & 3:
                self.regions["alone"][at:at + (1 << 20)] = self.random.randbytes(1 << 20)
        self.sums["alone"] = Sums(self.regions["alone"])
        self.open_gpu()

    # Has the memory as it was, whatever the parent writes there.
    def fork(self):
        child = os.fork()
        if child:
            return child
        while True:
            for name in ("shared", "together"):
                self.sums[name].check("what the child shares")
            time.sleep(0.6)

    def open_gpu(self):
        self.driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        self.gpu = ctypes.c_uint64()
        if self.driver.cuInit(0) or self.driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0):
            sys.exit("no GPU")
        if self.driver.cuMemAlloc_v2(ctypes.byref(self.gpu), ctypes.c_size_t(4 << 20)):
            sys.exit("no GPU memory")

    def round(self, number):
        if os.waitpid(self.child, os.WNOHANG) != (0, 0):
            sys.exit("the child has ended")
        for name, memory in self.regions.items():
            self.sums[name].check(name)
            if name == "together":
                continue
            at = self.random.randrange(len(memory) // PAGE) * PAGE
            # A page that was not there comes to be, and one that was becomes zeros.
            memory[at:at + PAGE] = self.random.randbytes(PAGE) if number % 10 else bytes(PAGE)
            self.sums[name].written(at)
        value = ctypes.c_ubyte(number & 255)
        if self.driver.cuMemcpyHtoD_v2(self.gpu, ctypes.byref(value), ctypes.c_size_t(1)):
            sys.exit("the GPU does not take memory")


def main():
    program = Program(int(sys.argv[2]))
    for number in range(1, 10 ** 9):
        began = time.process_time()
        program.round(number)
        with open(sys.argv[1], "w", encoding="ascii") as status:
            status.write(f"round {number}\n")
        # For others: tests run side by side. A restored program's processor time begins anew.
        time.sleep(min(0.6, max(0, 3 * (time.process_time() - began))))


if __name__ == "__main__":
    main()
