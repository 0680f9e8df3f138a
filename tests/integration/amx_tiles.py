"""Uses CUDA, and has what AMX's first tile holds in view: amx_tiles.py STATUS [THREADS].

With THREADS so many others are there, and the last one has the tile.
"""

import ctypes
import mmap
import sys
import threading
import time

PERMIT = 0x1023  # ARCH_REQ_XCOMP_PERM
TILE_DATA = 18
STORE_AT = 32

driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuInit(0) == 0
context = ctypes.c_void_p()
assert driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
memory = ctypes.c_uint64()
assert driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4 << 20)) == 0

assert ctypes.CDLL(None).syscall(158, PERMIT, TILE_DATA) == 0  # arch_prctl
code = mmap.mmap(-1, 4096, prot=7)
# ldtilecfg [rdi]; tileloadd tmm0, [rsi+rdx]; ret
code.write(bytes.fromhex("c4e27849 07 c4e27b4b 0416 c3").ljust(STORE_AT, b"\x90"))
# tilestored [rsi+rdx], tmm0; ret
code.write(bytes.fromhex("c4e27a4b 0416 c3"))
start = ctypes.addressof(ctypes.c_char.from_buffer(code))
call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
ROW = 64
CONFIGURATION = bytes([1]) + bytes(15) + bytes([ROW]) + bytes(31) + bytes([16]) + bytes(15)


def compute():
    configuration = ctypes.create_string_buffer(CONFIGURATION, 64)
    rows = ctypes.create_string_buffer(bytes(range(256)) * 4, 1024)
    seen = ctypes.create_string_buffer(1024)
    call(start)(ctypes.addressof(configuration), ctypes.addressof(rows), ROW)
    number = 0
    while True:
        number += 1
        time.sleep(0.02)
        call(start + STORE_AT)(0, ctypes.addressof(seen), ROW)
        with open(sys.argv[1], "w") as status:
            status.write(f"round {number} ok\n" if seen.raw == rows.raw else "round wrong\n")


for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 0):
    threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
worker = threading.Thread(target=compute, daemon=True)
worker.start()
worker.join()
