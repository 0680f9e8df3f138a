"""Jobs of several processes that wait for each other on their GPUs."""

import os
import statistics
import sys

from .case_torch import require_torch
from .core import case, expect
from .targets import Target

ALLREDUCE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "allreduce.py")
NEEDS = ("program stasis",)
CYCLES = 20
DUMPS = 5
# What a group may take longer than one of its ranks.
SPEED_TARGET = 1.2
SPEED_CYCLES = 5
WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1"}
# Transports that survive on driver 580, by the settings that select them.
TRANSPORTS = {
    "shared_memory": {**WITHOUT_P2P, "NCCL_CUMEM_HOST_ENABLE": "0"},
    "sockets": {**WITHOUT_P2P, "NCCL_SHM_DISABLE": "1"},
}


def start_job(machine, name, settings, ranks=2):
    target = Target(machine, [sys.executable, ALLREDUCE, "--status", "{status}", "--ranks", str(ranks),
                              "--mib", "16", "--pause-ms", "2"], name,
                    {**machine.target_env(), **settings})
    target.wait_rounds(3, timeout=180)
    return target


def cycle(machine, target, figures, progress=None):
    report = machine.stasis("suspend", target.pid, "--json", timeout=120).must_succeed().json()
    figures["lock_seconds"].append(next(phase["seconds"] for phase in report["phases"]
                                        if phase["name"] == "lock"))
    figures["lock_tries"].append(report["lock_tries"])
    figures["suspend_seconds"].append(report["seconds"])
    back = machine.stasis("resume", target.pid, "--json", timeout=120).must_succeed().json()
    figures["resume_seconds"].append(back["seconds"])
    if progress:
        progress()
    else:
        target.wait_rounds(2)


def new_figures():
    return {"lock_seconds": [], "lock_tries": [], "suspend_seconds": [], "resume_seconds": []}


def summary(figures):
    return (f"lock {statistics.median(figures['lock_seconds']) * 1000:.1f} ms, "
            f"{statistics.median(figures['lock_tries']):.0f} tries (most {max(figures['lock_tries'])})")


def survives(machine, name, settings):
    version = require_torch(machine)
    target = start_job(machine, name, settings)
    figures = new_figures()
    for _ in range(CYCLES):
        cycle(machine, target, figures)
    figures.update({"torch": version, "dump_seconds": [], "restore_seconds": []})
    for number in range(DUMPS):
        images = os.path.join(machine.work, f"image{number}")
        dump = machine.stasis("dump", target.pid, "--images-dir", images, "--sync", "none",
                              timeout=300).must_succeed()
        target.forget_exit()
        restore = machine.stasis("restore", "--images-dir", images, "--detach",
                                 timeout=300).must_succeed()
        figures["dump_seconds"].append(dump.seconds)
        figures["restore_seconds"].append(restore.seconds)
        target.wait_rounds(2)
        machine.run("rm", "-rf", images)
    rounds = target.finish()
    figures["note"] = f"{CYCLES} cycles, {DUMPS} dumps, {rounds} rounds of sums; {summary(figures)}"
    return figures


for transport, wanted in TRANSPORTS.items():
    case(f"group.nccl.{transport}", simulated=False, needs=NEEDS + ("two gpus", "criu", "root"))(
        lambda machine, name=transport, settings=wanted: survives(machine, name, settings))


@case("group.nccl.defaults_refused", simulated=False, needs=NEEDS + ("two gpus",))
def defaults(machine):
    """NCCL's own choice of transports cannot be restored: refused, and the job runs on."""
    require_torch(machine)
    notes = []
    for name, settings in (("defaults", {}), ("without_p2p", WITHOUT_P2P)):
        target = start_job(machine, name, settings)
        refused = machine.stasis("suspend", target.pid)
        expect(refused.status == 8 and "NCCL_P2P_DISABLE=1" in refused.err,
               f"not refused: {refused.brief()}")
        target.wait_rounds(3)
        notes.append(f"{name}: {target.finish()} rounds")
    return {"note": "refused; " + ", ".join(notes)}


@case("group.speed", simulated=False, needs=NEEDS + ("two gpus",))
def speed(machine):
    """Two ranks at once against one alone, with the same memory each."""
    require_torch(machine)
    medians = {}
    figures = {}
    for ranks in (1, 2):
        target = start_job(machine, f"ranks{ranks}", TRANSPORTS["shared_memory"], ranks)
        cycle(machine, target, new_figures())  # the first touches host memory for the first time
        found = new_figures()
        for _ in range(SPEED_CYCLES):
            cycle(machine, target, found)
        target.finish()
        figures[f"ranks{ranks}"] = found
        medians[ranks] = statistics.median(found["suspend_seconds"])
    ratio = medians[2] / medians[1]
    figures.update({"ratio": ratio, "target": SPEED_TARGET,
                    "note": f"suspend {medians[1]:.2f} s for one, {medians[2]:.2f} s for two: {ratio:.2f}"})
    expect(ratio <= SPEED_TARGET, "over the target: " + figures["note"])
    return figures


@case("group.collective", needs=NEEDS + ("program stasis-workload", "criu", "root"))
def collective(machine):
    """Four ranks on one GPU that wait for each other in host functions of their streams."""
    target = machine.workload("collective", "--children", "4", "--size", "8M", "--pause-ms", "2")
    target.wait_rounds(3)
    figures = new_figures()
    for _ in range(CYCLES):
        cycle(machine, target, figures)
    images = os.path.join(machine.work, "image")
    machine.stasis("dump", target.pid, "--images-dir", images).must_succeed()
    target.forget_exit()
    machine.stasis("restore", "--images-dir", images, "--detach").must_succeed()
    target.wait_rounds(3)
    figures["note"] = f"{CYCLES} cycles and a dump, {target.finish()} rounds; {summary(figures)}"
    return figures
