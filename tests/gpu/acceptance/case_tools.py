"""NVIDIA's own tools on programs that have the agent: they work, and it steps aside and says so."""

import os
import shutil

from .core import Skip, case, expect, expect_equal
from .targets import Target

NEEDS = ("program stasis", "program stasis-workload")
TOOLS = {
    "compute-sanitizer": [],
    "ncu": ["--clock-control", "none", "--launch-count", "1"],
    "cuda-gdb": ["--batch", "-ex", "run", "--args"],
}
SAYS = "stasis: a CUDA tool is at work here"


def find(tool):
    path = shutil.which(tool, path=os.environ.get("PATH", os.defpath) + ":/usr/local/cuda/bin")
    if not path:
        raise Skip(f"no {tool} here")
    return [path, *TOOLS[tool]]


def workload(machine, *options):
    return [machine.program("stasis-workload"), "memory", "--size", "256M", "--pause-ms", "20", *options]


def under(machine, tool):
    """The tool starts the program under the agent, or is itself started under it; then a suspend."""
    run = [machine.program("stasis"), "run", "--"]
    for argv in ([*find(tool), *run], [*run, *find(tool)]):
        done = machine.run(*argv, *workload(machine, "--rounds", "3"))
        said = done.out + done.err
        expect_equal(done.status, 0, f"status ({done.brief()})")
        expect("verified 3 rounds" in said, f"no rounds verified: {said[-1000:]}")
        expect(SAYS in said, f"the agent does not say that it steps aside: {said[-1000:]}")
    target = Target(machine, [*find(tool), *run, *workload(machine, "--status", "{status}")], tool)
    target.wait_rounds(2)
    attempt = machine.stasis("suspend", target.pid)
    expected = 7 if tool == "cuda-gdb" else 8  # who traces it keeps it busy
    expect_equal(attempt.status, expected, f"status of a suspend ({attempt.brief()})")
    expect("rolled back" not in attempt.err, f"not refused before anything was touched: {attempt.err}")
    target.wait_rounds(2)
    target.kill()
    return {"note": attempt.first_error()[:200]}


@case("tools.attached", simulated=False, needs=NEEDS)
def attached(machine):
    """cuda-gdb attached to a program under the agent, and detached: it runs on, and is refused in both."""
    target = Target(machine, [machine.program("stasis"), "run", "--", *workload(machine, "--status", "{status}")],
                    "attached")
    target.wait_rounds(2)
    debugger = Target(machine, [find("cuda-gdb")[0], "--batch", "-p", str(target.pid), "-ex", "shell sleep 5",
                                "-ex", "detach"], "debugger")

    def is_traced():
        with open(f"/proc/{target.pid}/status", encoding="ascii", errors="replace") as file:
            return "\nTracerPid:\t0\n" not in file.read()

    debugger.wait_for(is_traced, "debugger at work")
    during = machine.stasis("suspend", target.pid)
    expect_equal(during.status, 7, f"status of a suspend meanwhile ({during.brief()})")
    debugger.wait_ended(60)
    target.wait_rounds(2)
    later = machine.stasis("suspend", target.pid)
    target.wait_rounds(2)
    rounds = target.finish()
    return {"during": during.first_error(), "afterwards": f"status {later.status}: {later.first_error()}",
            "note": f"a suspend afterwards: status {later.status}; {rounds} rounds verified"}


for one in TOOLS:
    case(f"tools.{one}", simulated=False, needs=NEEDS)(lambda machine, tool=one: under(machine, tool))
