"""Managed memory, which the driver refuses to checkpoint, and the agent gives up before."""

import os
import signal
import sys

from .case_direct import NEEDS, resume, run_under_agent, start, suspend
from .case_direct_programs import LOOPS, dump_and_restore, medians
from .core import Failure, case, expect, expect_equal
from .case_devices import swap

CYCLES, DUMPS = 20, 5


def through(machine, target, cycles, dumps):
    """Suspends and resumes, then dumps and restores; after each the program has verified two rounds more."""
    figures = {}
    for _ in range(cycles):
        suspend(machine, target, figures)
        machine.expect_gpu_free(target.before)
        resume(machine, target, figures)
        target.wait_rounds(2)
    for _ in range(dumps):
        dump_and_restore(machine, target, figures)
        target.wait_rounds(2)
    return figures


def counts(machine):
    return (3, 1) if machine.simulated else (CYCLES, DUMPS)


@case("managed.workload", needs=NEEDS + ("criu", "root"))
def workload(machine):
    """Pieces of many sizes, written by GPU and CPU; a thread that counts in one and never calls the driver."""
    size = "8M" if machine.simulated else "512M"
    target = start(machine, "managed", ["--size", size, "--pause-ms", "10"])
    figures = through(machine, target, *counts(machine))
    figures["note"] = f"{target.finish()} rounds verified; {medians(figures)}"
    return figures


@case("managed.device_map", needs=NEEDS + ("two gpus",))
def device_map(machine):
    _, _, pairs = swap(machine)
    target = start(machine, "managed", ["--size", "64M", "--pause-ms", "10"])
    for _ in range(2):
        machine.stasis("suspend", target.pid).must_succeed()
        machine.stasis("resume", target.pid, "--device-map", pairs).must_succeed()
        target.wait_rounds(2)
    return {"note": f"there and back, {target.finish()} rounds verified"}


def framework(machine, kind):
    before = machine.gpu_memory()
    target = run_under_agent(machine, [sys.executable, LOOPS, kind, "--status", "{status}", "--gib", 1, "--managed"],
                             kind)
    target.before = before
    try:
        target.wait_rounds(3)
    except Failure as reason:
        raise Failure(f"before the first suspend: {reason}") from reason
    figures = through(machine, target, CYCLES, DUMPS)
    rounds = target.finish()
    figures["note"] = f"{target.output().splitlines()[0]}: {rounds} rounds verified; {medians(figures)}"
    return figures


for one in ("cupy", "numba"):
    case(f"managed.{one}", simulated=False, needs=NEEDS + ("criu", "root"))(
        lambda machine, kind=one: framework(machine, kind))


@case("managed.more_than_fits", simulated=False, needs=NEEDS)
def more_than_fits(machine):
    """The GPU is full but for a little, so that not all of the managed memory is on it."""
    total = int(machine.run("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", "0")
                .must_succeed().out)
    hog = machine.workload("memory", "--size", f"{total - 2048}M", "--pause-ms", "5000", name="hog")
    hog.wait_rounds(1)
    target = run_under_agent(machine, [machine.program("stasis-workload"), "managed", "--status", "{status}", "--size",
                                       "2G", "--pause-ms", "100"], "managed")
    target.wait_rounds(2)
    figures = {}
    for _ in range(5):
        suspend(machine, target, figures)
        resume(machine, target, figures)
        target.wait_rounds(2)
    rounds = target.finish()
    figures["note"] = f"2 GiB beside {total - 2048} of {total} MiB; {rounds} rounds verified; {medians(figures)}"
    return figures


@case("managed.variable", needs=NEEDS)
def variable(machine):
    """A `__managed__` variable of a module, which is the driver's own: refused before anything is touched, with the
    agent and without. With its module unloaded the program is suspended, and after that it has one again."""
    figures = {}
    ways = (("bare", (), "(not __managed__ variables)"), ("agent", (), "a __managed__ variable of a module"),
            ("agent, managed memory besides", ("--still", "4K"), "a __managed__ variable of a module"))
    for name, options, word in ways:
        words = ["--pause-ms", "10", *options]
        target = machine.workload("variable", *words) if name == "bare" else start(machine, "variable", words)
        target.wait_rounds(3)
        done = machine.stasis("suspend", target.pid)
        expect_equal(done.status, 8, f"{name}: status ({done.brief()})")
        expect(word in done.err, f"not said: {done.err}")
        target.wait_rounds(3)
        os.kill(target.pid, signal.SIGUSR1)
        target.wait_for(lambda of=target: "unloaded" in of.output(), "the module unloaded")
        for _ in range(3):
            machine.stasis("suspend", target.pid).must_succeed()
            machine.stasis("resume", target.pid).must_succeed()
            target.wait_rounds(2)
        os.kill(target.pid, signal.SIGUSR2)
        target.wait_for(lambda of=target: of.output().endswith("unloaded\nloaded\n"), "a module loaded anew")
        target.wait_rounds(3)
        figures[name] = {"said": done.err.strip(), "rounds": target.finish()}
    return {**figures, "note": "refused, and suspended without its module"}


@case("managed.refused", needs=NEEDS)
def refused(machine):
    """Without the agent, and by the driver's path, before anything is touched."""
    bare = machine.workload("managed")
    bare.wait_rounds(2)
    target = start(machine, "managed", ["--pause-ms", "10"], name="with-agent")
    for pid, options, words in ((bare.pid, (), "stasis run"), (target.pid, ("--path", "driver"), "only its agent")):
        done = machine.stasis("suspend", pid, *options)
        expect_equal(done.status, 8, "status")
        expect(words in done.err, f"not said: {done.brief()}")
    bare.wait_rounds(2)
    machine.stasis("suspend", target.pid).must_succeed()
    machine.stasis("resume", target.pid).must_succeed()
    return {"note": f"{bare.finish()} and {target.finish()} rounds verified"}
