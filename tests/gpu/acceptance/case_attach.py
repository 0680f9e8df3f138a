"""The agent for programs that already run (docs/adr/0053-attach.md): comes, takes their memory, and nothing is lost."""

import os

from . import case_torch
from .core import case, expect, expect_equal

NEEDS = ("program stasis", "program stasis-workload", "root")
SUSPENDS = 20
DUMPS = 5
LEAST_SHARE = 0.95  # of PyTorch's bytes
KINDS = ("memory", "threads", "torture", "streams", "contexts", "pool", "vmm", "pinned", "graph")


def attach(machine, pid, *words):
    done = machine.stasis("attach", pid, "--json", *words).must_succeed()
    report = done.json()
    converted = sum(one["converted_bytes"] for one in report["attached"])
    left = {}
    for one in report["attached"]:
        for part in one["left"]:
            left[part["why"]] = left.get(part["why"], 0) + part["bytes"]
    return {"seconds": done.seconds, "standstill": report["standstill_seconds"], "converted": converted, "left": left,
            "phases": {phase["name"]: phase["seconds"] for phase in report["phases"]}}


def share_of(found):
    """Of all that was found, in bytes."""
    whole = found["converted"] + sum(found["left"].values())
    return found["converted"] / whole if whole else 0.0


@case("attach.workloads", needs=NEEDS)
def workloads(machine):
    """Every kind of workload gets the agent while it verifies its memory, and is suspended after that."""
    found = {}
    for kind in KINDS:
        target = machine.workload(kind)
        target.wait_rounds(2)
        found[kind] = attach(machine, target.pid, "--graphs-are-safe")
        target.wait_rounds(2)
        for _ in range(3):
            machine.stasis("suspend", target.pid).must_succeed()
            machine.stasis("resume", target.pid).must_succeed()
            target.wait_rounds(2)
        target.finish()
    return {"found": found, "note": ", ".join(f"{kind}: {one['converted'] >> 20} MiB" for kind, one in found.items())}


@case("attach.graphs", needs=NEEDS)
def graphs(machine):
    """A program that launches a graph of before is refused, and runs on."""
    target = machine.workload("graph")
    target.wait_rounds(2)
    attempt = machine.stasis("attach", target.pid, "--watch", "2s")
    expect_equal(attempt.status, 8, "status")
    expect("launches CUDA graphs" in attempt.err, attempt.err)
    target.wait_rounds(2)
    machine.stasis("suspend", target.pid).must_succeed()
    machine.stasis("resume", target.pid).must_succeed()
    target.wait_rounds(2)
    target.finish()
    return {"note": "refused"}


def still_trains(target):
    return len(case_torch.losses(target)) < case_torch.STEPS - 15


def again_and_again(machine, target, figures):
    """Suspends, and dumps that leave it running, for as long as it trains."""
    figures["suspend_seconds"], figures["resume_seconds"], figures["dump_seconds"] = [], [], []
    for _ in range(SUSPENDS):
        if not still_trains(target):
            break
        done = machine.stasis("suspend", target.pid, "--json").must_succeed()
        expect_equal(done.json()["path"], "direct", "path")
        figures["suspend_seconds"].append(done.seconds)
        figures["resume_seconds"].append(machine.stasis("resume", target.pid).must_succeed().seconds)
    for number in range(DUMPS):
        if not still_trains(target):
            break
        images = os.path.join(machine.work, f"image-{number}")
        done = machine.stasis("dump", target.pid, "--images-dir", images, "--leave-running").must_succeed()
        figures["dump_seconds"].append(done.seconds)
        machine.run("rm", "-rf", images)


@case("attach.torch", simulated=False, needs=NEEDS + ("criu",))
def torch(machine):
    """PyTorch with its own allocator: the agent comes after it has trained, then suspends and dumps, losses equal."""
    version = case_torch.require_torch(machine)
    target = case_torch.start(machine, "attached")
    case_torch.wait_step(target, 10)
    figures = {"attach": attach(machine, target.pid, "--watch", "1s")}
    expect(share_of(figures["attach"]) >= LEAST_SHARE, f"too little is the agent's: {figures['attach']}")
    held = len(case_torch.losses(target))
    case_torch.wait_step(target, held + 5)
    again_and_again(machine, target, figures)
    compared = case_torch.compare(machine, version, case_torch.finish(target), figures)
    one = figures["attach"]
    compared["note"] = (f"attached in {one['seconds']:.2f} s, still {one['standstill']:.2f} s, "
                        f"{share_of(one):.1%} of {sum(one['left'].values()) + one['converted'] >> 20} MiB; "
                        f"{len(figures['suspend_seconds'])} suspends, {len(figures['dump_seconds'])} dumps; " + compared["note"])
    return compared


@case("attach.torch_workers", simulated=False, needs=NEEDS + ("criu",))
def torch_workers(machine):
    """The same with four workers that prepare its data, which were forked from it."""
    version = case_torch.require_torch(machine)
    arguments = ("--gib", "2", "--workers", "4", "--start-method", "fork")
    undisturbed = case_torch.finish(case_torch.start(machine, "undisturbed", *arguments))
    target = case_torch.start(machine, "attached", *arguments)
    case_torch.wait_step(target, 10)
    figures = {"torch": version, "attach": attach(machine, target.pid, "--watch", "1s")}
    for step in (30, 60, 90):
        case_torch.wait_step(target, step)
        machine.stasis("suspend", target.pid).must_succeed()
        machine.stasis("resume", target.pid).must_succeed()
    expect(case_torch.finish(target) == undisturbed, "the losses differ")
    figures["note"] = f"{share_of(figures['attach']):.1%} is the agent's; losses as undisturbed"
    return figures


@case("attach.torch_graphs", simulated=False, needs=NEEDS)
def torch_graphs(machine):
    """With `torch.cuda.graph`: refused while it is watched; with consent it trains on, losses as undisturbed."""
    version = case_torch.require_torch(machine)
    undisturbed = case_torch.finish(case_torch.start(machine, "undisturbed", "--graphs"))
    target = case_torch.start(machine, "attached", "--graphs")
    case_torch.wait_step(target, 10)
    refused = machine.stasis("attach", target.pid, "--watch", "2s")
    expect_equal(refused.status, 8, "status without consent")
    figures = {"torch": version, "attach": attach(machine, target.pid, "--graphs-are-safe")}
    for step in (40, 80, 120):
        case_torch.wait_step(target, step)
        machine.stasis("suspend", target.pid).must_succeed()
        machine.stasis("resume", target.pid).must_succeed()
    expect(case_torch.finish(target) == undisturbed, "the losses differ")
    figures["note"] = f"refused, then {share_of(figures['attach']):.1%} by consent; losses as undisturbed"
    return figures
