"""becomes_another.py STATUS: two processes that use CUDA. The second becomes another program, `sleep`, at SIGUSR1; the
first counts rounds in STATUS.
"""

import ctypes
import os
import signal
import sys
import time


def use_cuda():
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for result in (cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0),
                   cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)):
        if result != 0:
            sys.exit(f"CUDA says {result}")


ready, says_so = os.pipe()
if os.fork() == 0:
    signal.signal(signal.SIGUSR1, lambda *_: os.execv("/bin/sleep", ["sleep", "1000"]))
    use_cuda()
    os.write(says_so, b".")
    while True:
        signal.pause()
os.read(ready, 1)
use_cuda()
done = 0
while True:
    done += 1
    with open(sys.argv[1] + ".new", "w", encoding="utf-8") as file:
        file.write(f"round {done}\n")
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(0.02)
