#!/usr/bin/env python3
"""Another program on the first GPU. Reads what to do, a word a line, and says what the driver said:
init, context, copy, destroy, exit."""

import ctypes
import sys

BYTES = 1 << 20
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
memory = ctypes.c_uint64()
content = ctypes.create_string_buffer(BYTES)


def copy():
    return (cuda.cuMemAlloc_v2(ctypes.byref(memory), BYTES) or cuda.cuMemcpyHtoD_v2(memory, content, BYTES)
            or cuda.cuMemcpyDtoH_v2(content, memory, BYTES))


STEPS = {
    "init": lambda: cuda.cuInit(0),
    "context": lambda: cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0),
    "copy": copy,
    "destroy": lambda: cuda.cuCtxDestroy_v2(context),
}
for line in sys.stdin:
    word = line.strip()
    if word == "exit":
        break
    print(word, STEPS[word](), flush=True)
