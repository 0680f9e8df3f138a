"""A CUDA program whose host memory lies in small pieces in the arenas that malloc(3) makes for threads, and which
verifies all of it in every round.

    host_arenas.py STATUS MIB

Writes "round N" to STATUS. Ends with 1, and says what is wrong, if anything is not as it was left.
"""

import ctypes
import sys
import threading
import time
import zlib

THREADS = 4
PIECE = 120 << 10  # below what malloc() maps by itself


class Pieces:
    """Of one thread, which goes on to live: its arena would be another thread's."""

    def __init__(self, malloc, number, size):
        self.number, self.ready, self.ends = number, threading.Event(), threading.Event()
        self.views, self.sums = [], []
        self.thread = threading.Thread(target=self.fill, args=(malloc, size), daemon=True)
        self.thread.start()
        self.ready.wait()

    def fill(self, malloc, size):
        for at in range(0, size, PIECE):
            view = memoryview((ctypes.c_char * PIECE).from_address(malloc(PIECE))).cast("B")
            view[:] = (b"%d of %d " % (at, self.number)).ljust(32, b".") * (PIECE // 32)
            self.views.append(view)
            self.sums.append(zlib.crc32(view))
        self.ready.set()
        self.ends.wait()

    def check(self, number):
        if any(zlib.crc32(view) != wanted for view, wanted in zip(self.views, self.sums)):
            sys.exit(f"the arena of thread {self.number} is not as it was left")
        at = number % len(self.views)
        self.views[at][number % PIECE] = number & 255
        self.sums[at] = zlib.crc32(self.views[at])


def main():
    libc, driver, context = ctypes.CDLL(None), ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    arenas = [Pieces(libc.malloc, number, (int(sys.argv[2]) << 20) // THREADS) for number in range(THREADS)]
    if driver.cuInit(0) or driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0):
        sys.exit("no GPU")
    for number in range(1, 10 ** 9):
        for arena in arenas:
            arena.check(number)
        with open(sys.argv[1], "w", encoding="ascii") as status:
            status.write(f"round {number}\n")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
