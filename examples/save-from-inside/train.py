"""A training that saves itself: every few steps a helper takes an image of it while it waits.

    stasis run -- python3 train.py --steps 1000 --every 100 --images images

A program cannot save itself, because it stands still meanwhile. So it starts a helper anew (no fork of a
process that uses CUDA), which is no child of it, so that it does not stand in the image, and has no pipe to
it. Later `stasis restore images/step-100` goes on at step 100. The steps are a counter in GPU memory, by the
driver alone; yours are `loss.backward(); optimizer.step()`. Its cells (# %%) are those of a notebook, for editors
that know them.
"""

# %% What it takes

import argparse
import ctypes
import os
import pathlib
import subprocess
import sys
import time

# %% The helper
# Run as `python3 -c HELPER PID IMAGE`: its parent ends at once, and the process that is left belongs to init.
HELPER = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
pid, image = int(sys.argv[1]), sys.argv[2]
try:
    import stasis
    stasis.dump(pid, image, after="running")
except Exception as error:
    with open(image + ".failed", "w") as file:
        file.write(str(error))
"""


# %% A save, from inside
def save(image):
    """Takes an image of this process. Comes back twice: here, and after each restore of it."""
    failed = pathlib.Path(f"{image}.failed")
    failed.unlink(missing_ok=True)
    # With no file of this process: one that another process writes too cannot be brought back.
    nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-c", HELPER, str(os.getpid()), str(image)], check=True, **nothing)
    # The process stands still while it is saved. The image has its name when it is complete.
    while not (image / "manifest.json").exists():
        if failed.exists():
            raise RuntimeError(f"no image: {failed.read_text()}")
        time.sleep(0.01)


# %% What stands for a training
class Counter:
    """A number in GPU memory."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.memory = ctypes.c_uint64()
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", ctypes.byref(self.memory), ctypes.c_size_t(1 << 20))
        self.call("cuMemsetD32_v2", self.memory, ctypes.c_uint(0), ctypes.c_size_t(1 << 18))

    def call(self, name, *arguments):
        result = getattr(self.cuda, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name}: {result}")

    def step(self):
        value = ctypes.c_uint()
        self.call("cuMemcpyDtoH_v2", ctypes.byref(value), self.memory, ctypes.c_size_t(4))
        self.call("cuMemsetD32_v2", self.memory, ctypes.c_uint(value.value + 1), ctypes.c_size_t(1 << 18))
        return value.value + 1


# %% The loop
def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--every", type=int, default=100)
    options.add_argument("--images", type=pathlib.Path, default=pathlib.Path("images"))
    given = options.parse_args()
    given.images.mkdir(exist_ok=True)
    counter = Counter()
    for _ in range(given.steps):
        step = counter.step()
        print(f"step {step}", flush=True)
        if step % given.every == 0 and step < given.steps:
            save(given.images / f"step-{step}")


if __name__ == "__main__":
    main()
