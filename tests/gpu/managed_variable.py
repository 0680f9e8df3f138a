#!/usr/bin/env python3
"""A program whose module has a `__managed__` variable: a kernel counts in it, and the CPU reads it, until SIGTERM.

    managed_variable.py STATUS

STATUS is a file of one record, as stasis-workload writes (tests/workloads/README.md). SIGUSR1 unloads the module,
SIGUSR2 loads it again, and counts from 0. Needs Python and a GPU, no packages. Ends with 1 at a wrong count.
"""

import ctypes
import os
import signal
import sys
import time

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .global .attribute(.managed) .align 8 .u64 counted;
.visible .entry count()
{
  .reg .u64 %rd<3>;
  ld.global.u64 %rd1, [counted];
  add.u64 %rd2, %rd1, 1;
  st.global.u64 [counted], %rd2;
  ret;
}
"""


class Cuda:
    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name, *arguments):
        answer = getattr(self.library, name)(*arguments)
        if answer != 0:
            sys.exit(f"{name}: {answer}")


class Module:
    def __init__(self, cuda):
        self.cuda = cuda
        self.module, self.kernel = ctypes.c_void_p(), ctypes.c_void_p()
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        cuda.call("cuModuleLoadData", ctypes.byref(self.module), PTX)
        cuda.call("cuModuleGetFunction", ctypes.byref(self.kernel), self.module, b"count")
        cuda.call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), self.module, b"counted")
        self.counted = ctypes.c_uint64.from_address(address.value)
        self.expected = 0

    def round(self):
        self.cuda.call("cuLaunchKernel", self.kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
        self.cuda.call("cuCtxSynchronize")
        self.expected += 1
        if self.counted.value != self.expected:
            print(f"MISMATCH: counted {self.counted.value} instead of {self.expected}", flush=True)
            sys.exit(1)

    def unload(self):
        self.cuda.call("cuModuleUnload", self.module)


def main():
    wanted = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: wanted.append(number))
    status = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    cuda = Cuda()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    cuda.call("cuInit", 0)
    cuda.call("cuDeviceGet", ctypes.byref(device), 0)
    cuda.call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    module = Module(cuda)
    rounds = 0
    while signal.SIGTERM not in wanted:
        if signal.SIGUSR1 in wanted and module:
            wanted.remove(signal.SIGUSR1)
            module.unload()
            module = None
            print("unloaded", flush=True)
        if signal.SIGUSR2 in wanted and not module:
            wanted.remove(signal.SIGUSR2)
            module = Module(cuda)
        if module:
            module.round()
            rounds += 1
            os.pwrite(status, f"round {rounds} ok".ljust(63).encode() + b"\n", 0)
        time.sleep(0.01)
    print(f"verified {rounds} rounds", flush=True)


if __name__ == "__main__":
    main()
