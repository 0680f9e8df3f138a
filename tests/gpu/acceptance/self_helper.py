"""A program that uses CUDA and has a helper take its state out of the GPU. Prints what it saw.

It has no CUDA package: the driver's own library by ctypes.
"""

import ctypes
import os
import subprocess
import sys

PR_SET_PTRACER = 0x59616D61
SIZE = 64 << 20

HELPER = """
import stasis, sys
process = stasis.Process(int(sys.argv[1]))
sys.stdin.readline()    # until it may trace us
for _ in range(3):
    with process.locked(timeout_ms=10000):
        process.checkpoint()
        print(process.state, flush=True)
        sys.stdin.readline()
    print(process.state, flush=True)
    sys.stdin.readline()
"""

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    if result != 0:
        sys.exit(f"{name} answers {result}")


def main():
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(SIZE))
    helper = subprocess.Popen([sys.executable, "-c", HELPER, str(os.getpid())],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    # Where Yama asks for it; its own children count too.
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(helper.pid), 0, 0, 0)
    content = ctypes.create_string_buffer(SIZE)
    for number in range(3):
        call("cuMemsetD8_v2", memory, ctypes.c_ubyte(17 + number), ctypes.c_size_t(SIZE))
        for expected in ("checkpointed", "running"):
            helper.stdin.write(b"go on\n")
            helper.stdin.flush()
            said = helper.stdout.readline().decode().strip()
            if said != expected:
                sys.exit(f"the helper says {said!r} instead of {expected!r}")
        call("cuMemcpyDtoH_v2", content, memory, ctypes.c_size_t(SIZE))
        print("content is", "right" if content.raw == bytes([17 + number]) * SIZE else "WRONG")
    helper.stdin.close()
    print("helper ended with", helper.wait())


if __name__ == "__main__":
    main()
