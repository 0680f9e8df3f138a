"""Stream-ordered memory (cuMemAllocAsync), which the agent serves from pools of its own."""

from .case_direct import NEEDS, start
from .case_direct_programs import DUMPS, framework, medians, through_everything, train
from .core import case, expect, expect_equal


def calls(machine, kind):
    """A program of driver calls gets the same answers with the agent and without."""
    said = []
    for prefix in ([], [machine.program("stasis"), "run", "--"]):
        done = machine.run(*prefix, machine.program("stasis-agent-calls"), kind)
        expect_equal(done.status, 0, f"status ({done.brief()})")
        said.append(done.out.splitlines())
    different = [f"{number}: {a} | {b}" for number, (a, b) in enumerate(zip(*said), 1) if a != b]
    expect(len(said[0]) == len(said[1]) and not different,
           f"with the agent otherwise: {len(different)} of {len(said[0])}, {different[:20]}")
    return {"note": f"{len(said[0])} answers, all the same"}


for one in ("pools", "managed"):
    case(f"{one}.calls", needs=("program stasis", "program stasis-agent-calls"))(
        lambda machine, kind=one: calls(machine, kind))


@case("pools.workload", needs=NEEDS + DUMPS)
def workload(machine):
    """Buffers that live across rounds, and are freed and allocated anew while others stay."""
    target = start(machine, "pool", ["--size", "16M" if machine.simulated else "1G", "--pause-ms", "5"])
    counts = (3, 1) if machine.simulated else (20, 5)
    figures = through_everything(machine, target, target.rounds, 2, *counts)
    figures["note"] = (f"{target.finish()} rounds verified, {figures['direct_bytes'] / 2**20:.0f} MiB; "
                       f"{medians(figures)}")
    return figures


case("pools.cupy", simulated=False, needs=NEEDS + DUMPS)(
    lambda machine: framework(machine, "cupy", 5, options=["--stream-ordered"]))
BACKEND = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
case("pools.torch", simulated=False, needs=NEEDS + DUMPS)(lambda machine: train(machine, [], 5, BACKEND))
# What is allocated within a capture becomes a node of the graph, whose memory is the driver's.
case("pools.torch.graphs", simulated=False, needs=NEEDS + DUMPS)(
    lambda machine: train(machine, ["--graphs"], 2, BACKEND))
