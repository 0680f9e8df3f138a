"""PyTorch training that is interrupted must give the losses of one that is not."""

import os
import sys
import time

from .core import Failure, Skip, case, expect
from .targets import Target

TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train.py")
STEPS = 150
GIB = 8
NEEDS = ("program stasis",)


def start(machine, name, *arguments):
    losses = os.path.join(machine.work, name + ".losses")
    target = Target(machine, [sys.executable, TRAIN, "--losses", losses, "--steps", str(STEPS), "--gib",
                              str(GIB), "--pause-ms", "20", *arguments], name)
    target.losses = losses
    return target


def losses(target):
    try:
        with open(target.losses, encoding="ascii") as file:
            lines = [line.split() for line in file if line.endswith("\n")]
    except OSError:
        return {}
    return {int(step): float.fromhex(loss) for step, loss in lines}


def wait_step(target, step):
    target.wait_for(lambda: len(losses(target)) >= step, f"step {step}", timeout=180)


def finish(target):
    target.wait_ended(300)
    if target.exit_status != 0 or "trained" not in target.output():
        said = target.output().strip().splitlines()[-1:] or ["nothing"]
        raise Failure(f"{target.name} ended with status {target.exit_status}; it said: {said[0]}")
    found = losses(target)
    expect(list(found) == list(range(1, STEPS + 1)), f"{target.name}: steps are missing or repeated")
    return found


def require_torch(machine):
    probe = machine.run(sys.executable, "-c",
                        "import torch; print(torch.__version__, torch.cuda.is_available())", timeout=180)
    if probe.status != 0:
        raise Skip("no PyTorch: " + (probe.err.strip().splitlines() or ["?"])[-1])
    version, available = probe.out.split()
    if available != "True":
        raise Skip(f"PyTorch {version} sees no GPU")
    return version


UNDISTURBED = {}


def undisturbed(machine):
    """Two runs that nothing interrupts, and how far they are apart. Once for all cases."""
    if not UNDISTURBED:
        first, second = (finish(start(machine, name)) for name in ("undisturbed1", "undisturbed2"))
        UNDISTURBED["losses"] = first
        UNDISTURBED["apart"] = max(abs(first[step] - second[step]) for step in first)
    return UNDISTURBED["losses"], UNDISTURBED["apart"]


def compare(machine, version, found, figures):
    wanted, apart = undisturbed(machine)
    worst = max(wanted, key=lambda step: abs(wanted[step] - found[step]))
    difference = abs(wanted[worst] - found[worst])
    expect(difference <= apart, f"step {worst}: the loss differs by {difference:.3g}; two undisturbed "
                                f"runs differ by {apart:.3g}")
    figures.update({"torch": version, "steps": STEPS, "gib": GIB, "difference": difference,
                    "run_to_run": apart, "first_loss": found[1], "last_loss": found[STEPS]})
    figures["note"] = (f"loss {found[1]:.4f} to {found[STEPS]:.4f}; differs by {difference:.3g}, "
                       f"undisturbed runs by {apart:.3g}")
    return figures


@case("torch.suspend_resume", simulated=False, needs=NEEDS)
def suspend_resume(machine):
    version = require_torch(machine)
    target = start(machine, "suspended")
    suspend, resume = [], []
    for step in (20, 60, 100):
        wait_step(target, step)
        suspend.append(machine.stasis("suspend", target.pid).must_succeed().seconds)
        held = len(losses(target))
        time.sleep(0.5)
        expect(len(losses(target)) == held, "it went on while suspended")
        resume.append(machine.stasis("resume", target.pid).must_succeed().seconds)
    return compare(machine, version, finish(target),
                   {"suspend_seconds": suspend, "resume_seconds": resume})


@case("torch.dump_restore", simulated=False, needs=NEEDS + ("criu", "root"))
def dump_restore(machine):
    version = require_torch(machine)
    before = machine.gpu_memory()
    target = start(machine, "dumped")
    wait_step(target, 50)
    images = os.path.join(machine.work, "image")
    dump = machine.stasis("dump", target.pid, "--images-dir", images).must_succeed()
    target.wait_ended()
    machine.expect_gpu_free(before)
    target.forget_exit()
    restore = machine.stasis("restore", "--images-dir", images, "--detach").must_succeed()
    return compare(machine, version, finish(target),
                   {"dump_seconds": dump.seconds, "restore_seconds": restore.seconds})


def loader(machine, method):
    """A tree as most training programs have it: one process with CUDA, four that prepare its data."""
    version = require_torch(machine)
    arguments = ("--gib", "2", "--workers", "4", "--start-method", method)
    undisturbed_run = finish(start(machine, "undisturbed", *arguments))
    target = start(machine, "dumped", *arguments)
    wait_step(target, 50)
    workers = len(target.tree()) - 1
    expect(workers >= 4, f"only {workers} processes beside the training's own")
    images = os.path.join(machine.work, "image")
    # What the processes pass to each other lies in shared memory without a name.
    dump = machine.stasis("dump", target.pid, "--images-dir", images, "--ghost-limit", "256M").must_succeed()
    target.forget_exit()
    restore = machine.stasis("restore", "--images-dir", images, "--detach").must_succeed()
    found = finish(target)
    worst = max(found, key=lambda step: abs(undisturbed_run[step] - found[step]))
    expect(found == undisturbed_run, f"step {worst}: the loss is {found[worst]} instead of {undisturbed_run[worst]}")
    return {"torch": version, "start_method": method, "processes": workers + 1, "dump_seconds": dump.seconds,
            "restore_seconds": restore.seconds, "last_loss": found[STEPS],
            "note": f"{workers + 1} processes, {STEPS} losses as undisturbed"}


for how in ("fork", "spawn"):
    case(f"torch.loader.{how}", simulated=False, needs=NEEDS + ("criu", "root"))(
        lambda machine, method=how: loader(machine, method))
