"""A program with a context and 32 MiB of zeros of its own, whose address it writes to a file, and then waits."""
import ctypes
import mmap
import sys
import time

SIZE = 32 << 20

cuda = ctypes.CDLL("libcuda.so.1")
device = ctypes.c_int()
context = ctypes.c_void_p()
for result in (cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0),
               cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)):
    if result != 0:
        sys.exit(f"CUDA says {result}")
memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(bytes(SIZE))
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.write(str(ctypes.addressof(ctypes.c_char.from_buffer(memory))))
while True:
    time.sleep(0.1)
