"""A CUDA program with host memory in huge pages, where the kernel has any.

    host_huge.py STATUS MIB

Writes "round N" to STATUS. Ends with 1, and says what is wrong, if the memory is not as it was left.
"""

import ctypes
import mmap
import sys
import time

MADV_HUGEPAGE = 14


def main():
    size = int(sys.argv[2]) << 20
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(MADV_HUGEPAGE)
    for at in range(0, size, 4096):
        memory[at:at + 8] = at.to_bytes(8, "little")
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0):
        sys.exit("no GPU")
    for number in range(1, 10 ** 9):
        if any(memory[at:at + 8] != at.to_bytes(8, "little") for at in range(0, size, 4096)):
            sys.exit("the memory is not as it was left")
        with open(sys.argv[1], "w", encoding="ascii") as status:
            status.write(f"round {number}\n")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
