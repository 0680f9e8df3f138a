"""A CUDA program whose host memory lies in the heap of brk(2), and which verifies all of it in every round.

    host_heap.py STATUS MIB

Writes "round N" to STATUS. Ends with 1, and says what is wrong, if anything is not as it was left.
"""

import ctypes
import random
import sys
import time
import zlib


def main():
    size = int(sys.argv[2]) << 20
    libc, driver, context = ctypes.CDLL(None), ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    libc.sbrk.restype = ctypes.c_void_p
    # What malloc() does for small pieces; it goes on behind it.
    heap = memoryview((ctypes.c_char * size).from_address(libc.sbrk(ctypes.c_ssize_t(size)))).cast("B")
    content = random.Random(7)
    for at in range(0, size, 1 << 20):
        heap[at:at + (1 << 20)] = content.randbytes(1 << 20)
    if driver.cuInit(0) or driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0):
        sys.exit("no GPU")
    wanted = zlib.crc32(heap)
    for number in range(1, 10 ** 9):
        if zlib.crc32(heap) != wanted:
            sys.exit("the heap is not as it was left")
        heap[content.randrange(size)] = number & 255
        wanted = zlib.crc32(heap)
        with open(sys.argv[1], "w", encoding="ascii") as status:
            status.write(f"round {number}\n")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
