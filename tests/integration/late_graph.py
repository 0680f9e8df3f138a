"""A CUDA program that begins to capture a graph, and makes it, when it is told to.

    late_graph.py STATUS FOLDER

Does so when FOLDER/begin and FOLDER/make appear, which it removes. Writes "round N" to STATUS.
"""

import ctypes
import os
import sys
import time

driver = ctypes.CDLL("libcuda.so.1")


def call(name, *words):
    result = getattr(driver, name)(*words)
    if result:
        sys.exit(f"{name}: {result}")


def main(status, folder):
    def told(what):
        path = os.path.join(folder, what)
        if not os.path.exists(path):
            return False
        os.remove(path)
        return True

    context, stream, graph, executable = (ctypes.c_void_p() for _ in range(4))
    memory = ctypes.c_uint64()
    call("cuInit", 0)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(64 << 20))
    call("cuStreamCreate", ctypes.byref(stream), 1)
    for number in range(1, 10 ** 9):
        call("cuMemsetD8_v2", memory, ctypes.c_ubyte(number & 255), ctypes.c_size_t(4096))
        if told("begin"):
            call("cuStreamBeginCapture_v2", stream, 2)
        if told("make"):
            call("cuStreamEndCapture", stream, ctypes.byref(graph))
            call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        with open(status, "w", encoding="ascii") as out:
            out.write(f"round {number}\n")
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:3])
