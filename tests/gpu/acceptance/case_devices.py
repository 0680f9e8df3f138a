"""Restoring to another GPU, and the simulated driver compared with the real one."""

import os

from .core import Failure, Skip, case, expect

NEEDS = ("program stasis", "program stasis-workload")
# Clearly more than a context needs, which is some hundred MiB on a real GPU.
SIMULATED_MIB, REAL_MIB = 64, 4096


def swap(machine):
    """The map that exchanges the first two GPUs and leaves the others. The driver demands that every
    GPU it sees is named, so the tool completes what is given."""
    first, second = (gpu["uuid"] for gpu in machine.gpus()[:2])
    return first, second, f"{first}={second},{second}={first}"


def mebibytes(machine):
    return SIMULATED_MIB if machine.simulated else REAL_MIB


def holders(machine, before):
    """On which GPUs there is clearly more than before."""
    now = machine.gpu_memory()
    threshold = (mebibytes(machine) << 20) // 2
    return {uuid for uuid, used in now.items() if used - before.get(uuid, 0) > threshold}


@case("device_map.swap_at_restore", needs=NEEDS + ("criu", "root", "two gpus"))
def at_restore(machine):
    first, second, pairs = swap(machine)
    before = machine.gpu_memory()
    target = machine.workload("memory", "--size", f"{mebibytes(machine)}M")
    target.wait_rounds(2)
    expect(holders(machine, before) == {first}, "the memory does not lie on the first GPU")
    images = os.path.join(machine.work, "image")
    machine.stasis("dump", target.pid, "--images-dir", images).must_succeed()
    target.forget_exit()
    machine.stasis("restore", "--images-dir", images, "--detach", "--device-map",
                   pairs).must_succeed()
    target.wait_rounds(3)
    found = holders(machine, before)
    expect(found == {second}, f"after the restore the memory lies on {found or 'no GPU'}")
    return {"note": f"moved; {target.finish()} rounds verified"}


@case("device_map.swap_and_back", needs=NEEDS + ("two gpus",))
def swap_and_back(machine):
    first, second, pairs = swap(machine)
    before = machine.gpu_memory()
    target = machine.workload("memory", "--size", f"{mebibytes(machine)}M")
    target.wait_rounds(2)
    for wanted in (second, first):
        machine.stasis("suspend", target.pid).must_succeed()
        resumed = machine.stasis("resume", target.pid, "--device-map", pairs).must_succeed()
        target.wait_rounds(2)
        found = holders(machine, before)
        expect(found == {wanted}, f"after the resume the memory lies on {found or 'no GPU'}")
    return {"seconds": resumed.seconds, "note": f"{target.finish()} rounds verified"}


@case("device_map.contexts_on_both", needs=NEEDS + ("two gpus",))
def contexts_on_both(machine):
    """A process with contexts on all GPUs: each context's memory follows its own GPU."""
    _, _, pairs = swap(machine)
    target = machine.workload("contexts")
    target.wait_rounds(2)
    machine.stasis("suspend", target.pid).must_succeed()
    machine.stasis("resume", target.pid, "--device-map", pairs).must_succeed()
    target.wait_rounds(3)
    return {"note": f"{target.finish()} rounds verified"}


@case("device_map.refused", needs=NEEDS)
def refused(machine):
    """A map that names no GPU of this machine: refused, and a plain resume still works."""
    target = machine.workload("idle")
    target.wait_rounds(2)
    machine.stasis("suspend", target.pid).must_succeed()
    wrong = ("GPU-00000000-0000-0000-0000-000000000001=GPU-00000000-0000-0000-0000-000000000002")
    attempt = machine.stasis("resume", target.pid, "--device-map", wrong)
    expect(attempt.status in (2, 8, 11), f"not refused: {attempt.brief()}")
    machine.expect_state(target.pid, "checkpointed")
    machine.stasis("resume", target.pid).must_succeed()
    target.wait_rounds(2)
    return {"note": f"{attempt.first_error()[:70]}; {target.finish()} rounds verified"}


@case("conformance", simulated=False, needs=("program conformance",))
def conformance(machine):
    """The simulated driver answers as the real one does. The real answers are kept in --out."""
    program = machine.program("conformance")
    if not os.path.exists(machine.sim_library):
        raise Skip(f"no simulated driver at {machine.sim_library}")
    real = os.path.join(machine.out or machine.work, "conformance-real.jsonl")
    simulated = os.path.join(machine.out or machine.work, "conformance-simulated.jsonl")
    for path, env in ((real, machine.env), (simulated, simulated_env(machine))):
        done = machine.run(program, "--run", timeout=400, env=env).must_succeed()
        with open(path, "w", encoding="utf-8") as file:
            file.write(done.out)
    compared = machine.run(program, "--compare", real, simulated)
    with open(real, encoding="utf-8") as file:
        cases = sum(1 for line in file if line.strip())
    if compared.status != 0:
        lines = (compared.out + compared.err).strip().splitlines()
        raise Failure(f"{cases} cases; {len(lines)} lines of differences: {' / '.join(lines[:3])}", {"differences": lines})
    return {"cases": cases, "note": f"{cases} cases, the same answers"}


def simulated_env(machine):
    env = dict(machine.env)
    env["STASIS_LIBCUDA"] = machine.sim_library
    env["LD_LIBRARY_PATH"] = os.path.dirname(machine.sim_library)
    env["STASIS_SIM_DIR"] = os.path.join(machine.work, "gpus")
    env["STASIS_SIM_GPUS"] = f"{len(machine.gpus())}x8G"
    return env
