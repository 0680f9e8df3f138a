#!/usr/bin/env python3
"""Which of the driver's calls leave threads in the process that makes them, and what that keeps it from.

Takes a process with CUDA through lock, checkpoint, restore and unlock, loading and calling the libraries
as plugins/criu does, and prints as JSON, after each step, how many threads this process has and whether
it can enter a mount namespace (its own). A process whose threads share its root and working directory
cannot: the kernel says EINVAL.
"""

import argparse
import ctypes
import json
import os

CLONE_FS = 0x200
CLONE_NEWNS = 0x20000
CUDA_12_8 = 12080

libc = ctypes.CDLL(None, use_errno=True)


def look(step, result=None):
    file = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    failed = libc.setns(file, CLONE_NEWNS) != 0
    why = os.strerror(ctypes.get_errno()) if failed else "entered"
    os.close(file)
    return {"step": step, "result": result, "threads": len(os.listdir("/proc/self/task")), "setns": why}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pid", type=int, required=True, help="a process with CUDA, which runs")
    pid = parser.parse_args().pid
    cuda_name = os.environ.get("STASIS_LIBCUDA", "libcuda.so.1")
    steps = [look("begin")]
    cuda = ctypes.CDLL(cuda_name)
    steps.append(look("load libcuda"))
    found = ctypes.c_void_p()
    steps.append(look("cuGetProcAddress", cuda.cuGetProcAddress_v2(
        b"cuCheckpointProcessLock", ctypes.byref(found), CUDA_12_8, ctypes.c_uint64(0), None)))
    nvml = ctypes.CDLL(os.path.join(os.path.dirname(cuda_name), "libnvidia-ml.so.1"))
    steps.append(look("load NVML"))
    steps.append(look("nvmlInit", nvml.nvmlInit_v2()))
    count = ctypes.c_uint()
    steps.append(look("nvmlDeviceGetCount", nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))))
    device = ctypes.c_void_p()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
    users = ctypes.c_uint(64)
    room = ctypes.create_string_buffer(64 * 64)
    steps.append(look("nvmlDeviceGetComputeRunningProcesses", nvml.nvmlDeviceGetComputeRunningProcesses_v3(
        device, ctypes.byref(users), room)))
    state = ctypes.c_int()
    steps.append(look("state", cuda.cuCheckpointProcessGetState(pid, ctypes.byref(state))))
    lock = (ctypes.c_uint * 16)(10000)
    steps.append(look("lock", cuda.cuCheckpointProcessLock(pid, lock)))
    steps.append(look("checkpoint", cuda.cuCheckpointProcessCheckpoint(pid, None)))
    steps.append(look("cuInit", cuda.cuInit(0)))
    steps.append(look("restore", cuda.cuCheckpointProcessRestore(pid, None)))
    steps.append(look("unlock", cuda.cuCheckpointProcessUnlock(pid, None)))
    steps.append(look("unshare(CLONE_FS)", libc.unshare(CLONE_FS)))
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
