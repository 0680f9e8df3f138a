"""The Python package, compiled here against the libstasis.so of the build under test."""

import json
import os
import shutil
import sys

from .core import Failure, Skip, case, expect, expect_equal
from .case_devices import mebibytes
from .targets import Target

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD_PACKAGE = os.path.join(HERE, "..", "..", "..", "python", "build-package")
NEEDS = ("program stasis-workload",)


def pythons():
    """Those that may have what is needed: the one that was asked for, ours, and cuda.core's."""
    names = (os.environ.get("STASIS_PYTHON"), sys.executable, "python3", "python3.12")
    return list(dict.fromkeys(filter(None, (shutil.which(name) for name in names if name))))


def with_cuda_core(machine, python):
    return machine.run(python, "-c", "from cuda.core import checkpoint; checkpoint.Process").status == 0


class Package:
    """Built once for all cases, for the first Python that can."""

    def __init__(self, machine):
        self.folder = os.path.join(machine.root, "python")
        library = os.path.join(machine.build, "lib")
        if not os.path.exists(os.path.join(library, "libstasis.so.0")):
            raise Skip(f"there is no libstasis.so.0 in {library}")
        able, said = [], "there is no python3"
        for python in pythons():
            found = machine.run(BUILD_PACKAGE, "--check", "--python", python)
            if found.status == 0:
                able.append(python)
            said = found.err.strip()
        if not able:
            raise Skip(said)
        # One that has the other package too, so that both run on the same.
        self.python = next((one for one in able if with_cuda_core(machine, one)), able[0])
        machine.run(BUILD_PACKAGE, "--library", library, "--out", self.folder, "--python",
                    self.python).must_succeed()

    def run(self, machine, script, *arguments, timeout=300):
        env = {**machine.env, "PYTHONPATH": self.folder, "PYTHONDONTWRITEBYTECODE": "1"}
        return machine.run(self.python, "-c", script, *arguments, env=env, timeout=timeout)


def package(machine):
    if not hasattr(machine, "python_package"):
        machine.python_package = Package(machine)
    return machine.python_package


PROCESS = """
import json, sys, time, stasis
process = stasis.Process(int(sys.argv[1]))
seen, seconds = [process.state], {}
for call in (lambda: process.lock(timeout_ms=10000), process.checkpoint, process.restore, process.unlock):
    start = time.perf_counter()
    call()
    seconds[len(seen)] = time.perf_counter() - start
    seen.append(process.state)
start = time.perf_counter()
for _ in range(100):
    process.state
asked = (time.perf_counter() - start) / 100
with process.suspended() as same:
    seen.append(same.state)
seen.append(process.state)
print(json.dumps({"seen": seen, "seconds": list(seconds.values()), "asked": asked,
                  "thread": process.restore_thread_id, "driver": stasis.driver().version}))
"""


@case("python.process", needs=NEEDS)
def process(machine):
    """All six calls on a workload, and the state after each."""
    built = package(machine)
    target = machine.workload("memory", "--size", f"{mebibytes(machine)}M")
    target.wait_rounds(2)
    said = built.run(machine, PROCESS, target.pid).must_succeed().json()
    expect_equal(said["seen"], ["running", "locked", "checkpointed", "locked", "running", "checkpointed",
                                "running"], "the states")
    expect(os.path.exists(f"/proc/{target.pid}/task/{said['thread']}"), "the restore thread is none of its threads")
    target.wait_rounds(3)
    return {"seconds_of_calls": said["seconds"], "seconds_of_state": said["asked"],
            "note": f"driver {said['driver']}, state in {said['asked'] * 1e3:.2f} ms; {target.finish()} rounds verified"}


@case("python.same_program", needs=NEEDS, simulated=False)
def same_program(machine):
    """One program with `import stasis as checkpoint` and with `from cuda.core import checkpoint`."""
    built = package(machine)
    if not with_cuda_core(machine, built.python):
        raise Skip(f"{built.python} has no cuda.core.checkpoint")
    with open(os.path.join(HERE, "checkpoint_program.py"), encoding="utf-8") as file:
        body = file.read()
    uuids = [gpu["uuid"].removeprefix("GPU-") for gpu in machine.gpus()]
    said = {}
    # The other package leaves it to its user to initialise the driver, which a restore may need.
    theirs = "from cuda.bindings import driver; driver.cuInit(0)\nfrom cuda.core import checkpoint\n"
    for name, first in (("stasis", "import stasis as checkpoint\n"), ("cuda.core", theirs)):
        target = machine.workload("memory", "--size", "256M", name=name)
        target.wait_rounds(2)
        done = built.run(machine, first + body, target.pid, *uuids)
        if done.status != 0:
            raise Failure(f"with {name}: {done.err.strip().splitlines()[-1:]} after {done.out.splitlines()[-1:]}")
        said[name] = done.out.splitlines()
        target.wait_rounds(2)
        target.finish()
    if said["stasis"] != said["cuda.core"]:
        different = [f"{ours!r}, cuda.core {theirs!r}" for ours, theirs in zip(said["stasis"], said["cuda.core"])
                     if ours != theirs]
        raise Failure(f"the outputs differ in {len(different)} lines: {'; '.join(different[:5])}")
    return {"note": f"{len(said['stasis'])} lines of output, the same of both"}


SHUFFLE = """
import json, sys, stasis
mapping = json.loads(sys.argv[1])
for pid in map(int, sys.argv[2:]):
    process = stasis.Process(pid)
    with process.locked(timeout_ms=10000):
        process.checkpoint()
        process.restore(gpu_mapping=mapping)
"""


def fullest(machine, before):
    """The GPU with most more than before: contexts of the others take gigabytes on each real one."""
    now = machine.gpu_memory()
    return max(now, key=lambda uuid: now[uuid] - before.get(uuid, 0))


@case("python.shuffle", needs=NEEDS + ("two gpus",))
def shuffle(machine):
    """The state of each GPU to the next one, several times round; every byte verified by the workloads."""
    built = package(machine)
    uuids = [gpu["uuid"] for gpu in machine.gpus()]
    mapping = dict(zip(uuids, uuids[1:] + uuids[:1]))
    before = machine.gpu_memory()
    # Eight times as much on the first as on the second, so that it shows where that is.
    first = machine.workload("memory", "--size", f"{mebibytes(machine)}M", name="first")
    small = machine.workload("memory", "--size", f"{mebibytes(machine) // 8}M", name="second",
                             env={**machine.target_env(), "CUDA_VISIBLE_DEVICES": "1"})
    both = machine.workload("contexts", name="both")
    targets = (first, small, both)
    for target in targets:
        target.wait_rounds(2)
    times_round = 3
    for step in range(1, times_round * len(uuids) + 1):
        built.run(machine, SHUFFLE, json.dumps(mapping), *(target.pid for target in targets)).must_succeed()
        for target in targets:
            target.wait_rounds(2)
        expect_equal(fullest(machine, before), uuids[step % len(uuids)], f"where the memory lies after step {step}")
    rounds = [target.finish() for target in targets]
    return {"note": f"{times_round} times round {len(uuids)} GPUs; {sum(rounds)} rounds verified"}


@case("python.self_from_helper", needs=NEEDS)
def self_from_helper(machine):
    """A program that uses CUDA has a helper take its own state out of the GPU, three times."""
    built = package(machine)
    env = {**machine.target_env(), "PYTHONPATH": built.folder, "PYTHONDONTWRITEBYTECODE": "1"}
    target = Target(machine, [built.python, os.path.join(HERE, "self_helper.py")], "self", env)
    target.wait_ended(120)
    said = target.output()
    expect_equal((target.exit_status, said.splitlines()),
                 (0, ["content is right"] * 3 + ["helper ended with 0"]), "what it said")
    return {"note": "three times out and back, its memory right each time"}


DUMP = """
import json, sys, stasis
told = []
report = stasis.dump(int(sys.argv[1]), sys.argv[2], progress=lambda *given: told.append(given))
print(json.dumps({"bytes": report.image_bytes, "seconds": report.seconds, "told": len(told),
                  "restorable": stasis.inspect(sys.argv[2])["processes"][0]["cuda"]}))
"""
RESTORE = """
import json, sys, stasis
report = stasis.restore(sys.argv[1])
print(json.dumps({"pid": report.pid, "seconds": report.seconds, "state": stasis.Process(report.pid).state}))
"""


@case("python.dump_restore", needs=NEEDS + ("criu", "root"))
def dump_restore(machine):
    built = package(machine)
    before = machine.gpu_memory()
    target = machine.workload("memory", "--size", f"{mebibytes(machine) // 2}M")
    target.wait_rounds(2)
    images = os.path.join(machine.work, "image")
    dumped = built.run(machine, DUMP, target.pid, images).must_succeed().json()
    target.forget_exit()
    machine.expect_gpu_free(before)
    restored = built.run(machine, RESTORE, images).must_succeed().json()
    expect_equal((restored["pid"], restored["state"]), (target.pid, "running"), "what was restored")
    target.wait_rounds(3)
    return {"dump_seconds": dumped["seconds"], "restore_seconds": restored["seconds"],
            "image_bytes": dumped["bytes"], "note": f"{dumped['bytes'] >> 20} MiB; {target.finish()} rounds verified"}
