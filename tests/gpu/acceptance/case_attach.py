"""The agent for programs that already run (docs/adr/0053-attach.md): comes, takes their memory, and nothing is lost."""

from .case_direct_programs import framework, medians, through_everything, train
from .case_groups import TRANSPORTS, start_job
from .core import case, expect, expect_equal

NEEDS = ("program stasis", "program stasis-workload", "root")
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


def watched(machine, pid):
    # Of programs that are known to make no graphs: that the watch passes is part of the case.
    return attach(machine, pid, "--watch-graphs", "500ms")


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
    attempt = machine.stasis("attach", target.pid, "--watch-graphs", "2s")
    expect_equal(attempt.status, 8, "status")
    expect("launches CUDA graphs" in attempt.err, attempt.err)
    target.wait_rounds(2)
    machine.stasis("suspend", target.pid).must_succeed()
    machine.stasis("resume", target.pid).must_succeed()
    target.wait_rounds(2)
    target.finish()
    return {"note": "refused"}


def said(figures):
    one = figures["attach"]
    return (f"attached in {one['seconds']:.2f} s, still {one['standstill']:.2f} s, {share_of(one):.1%} of "
            f"{(sum(one['left'].values()) + one['converted']) / 2**30:.1f} GiB; {figures['note']}")


def torch(machine, env=None):
    """PyTorch: the agent comes after it has trained, then suspends and dumps, losses equal."""
    figures = train(machine, [], 8, env, attach=watched)
    expect(share_of(figures["attach"]) >= LEAST_SHARE, f"too little is the agent's: {figures['attach']}")
    return {**figures, "note": said(figures)}


case("attach.torch", simulated=False, needs=NEEDS + ("criu",))(torch)
case("attach.torch_expandable", simulated=False, needs=NEEDS + ("criu",))(
    lambda machine: torch(machine, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}))


def loop(machine, kind, rounds_before=5, env=None, more=5):
    """One of the loops that verify themselves. JAX and CuPy may launch graphs: the word of consent is given."""
    figures = framework(machine, kind, 2, rounds_before, env, more=more,
                        attach=lambda machine, pid: attach(machine, pid, "--graphs-are-safe"))
    return {**figures, "note": said(figures)}


case("attach.jax", simulated=False, needs=NEEDS + ("criu",))(
    lambda machine: loop(machine, "jax", 55, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                                              "XLA_FLAGS": "--xla_gpu_enable_command_buffer="}))
# Its command buffers are CUDA graphs, which it makes by itself.
case("attach.jax_command_buffers", simulated=False, needs=NEEDS + ("criu",))(
    lambda machine: loop(machine, "jax", 55, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}))
for one in ("cupy", "transformers"):
    case(f"attach.{one}", simulated=False, needs=NEEDS + ("criu",))(lambda machine, kind=one: loop(machine, kind))
# An answer takes a second.
case("attach.server", simulated=False, needs=NEEDS + ("criu",))(lambda machine: loop(machine, "server", more=2))


@case("attach.nccl", simulated=False, needs=NEEDS + ("two gpus", "criu"))
def nccl(machine):
    """Two ranks with NCCL's defaults hold imported memory: refused with the reason, and they run on."""
    target = start_job(machine, "defaults", {})
    attempt = machine.stasis("attach", target.pid, "--graphs-are-safe")
    expect_equal(attempt.status, 8, f"status ({attempt.brief()})")
    target.wait_rounds(5)
    return {"said": attempt.err, "note": f"refused; {target.finish()} rounds of sums"}


@case("attach.nccl.shared_memory", simulated=False, needs=NEEDS + ("two gpus", "criu"))
def nccl_without_imports(machine):
    """Two ranks that share memory of the host only get the agent in the middle of their collectives."""
    target = start_job(machine, "shared_memory", TRANSPORTS["shared_memory"])
    figures = {"attach": attach(machine, target.pid, "--graphs-are-safe")}
    figures.update(through_everything(machine, target, target.rounds, 2, 8, 2,
                                      dump_options=["--tcp-established"]))
    figures["note"] = f"{target.finish()} rounds of sums; {medians(figures)}"
    return {**figures, "note": said(figures)}


@case("attach.torch_workers", simulated=False, needs=NEEDS + ("criu",))
def torch_workers(machine):
    """The same with four workers that prepare its data, which were forked from it."""
    # A directory that is part of the job, for the sockets of the loader.
    figures = train(machine, ["--workers", "4", "--start-method", "fork"], 2, {"TMPDIR": "/dev/shm"}, watched)
    return {**figures, "note": said(figures)}


@case("attach.torch_graphs", simulated=False, needs=NEEDS + ("criu",))
def torch_graphs(machine):
    """With `torch.cuda.graph`: refused while it is watched; with consent it trains on, losses as undisturbed."""
    def refused_first(machine, pid):
        refused = machine.stasis("attach", pid, "--watch-graphs", "2s")
        expect_equal(refused.status, 8, "status without consent")
        return attach(machine, pid, "--graphs-are-safe")

    figures = train(machine, ["--graphs"], 2, attach=refused_first)
    return {**figures, "note": f"refused without consent; {said(figures)}"}
