"""stasis swap: one program makes room for another on the same GPU."""

import os
import statistics
import time

from .case_direct import NEEDS, run_under_agent, start
from .core import Failure, case, expect, expect_equal
from .targets import Target

ROUNDS = 3
# Of a suspend and a resume one after the other. Less than what their steps allow (host memory made
# ready; one copied out while the driver restores the other; one checkpointed while the other is copied
# in) is not to be had: a suspend alone copies while the driver checkpoints, which is one step less.
TARGET_RATIO = 0.9


def timed(machine, figures, name, *argv):
    """One command of stasis: its report, and how long it took from outside, driver's start included."""
    begin = time.monotonic()
    report = machine.stasis(*argv, "--json").must_succeed().json()
    figures.setdefault(name, []).append(round(time.monotonic() - begin, 4))
    return report


def swap(machine, gib):
    """Two programs of that size: suspend alone, resume alone, and both at once."""
    size = "64M" if machine.simulated else f"{gib}G"
    first, second = (start(machine, "memory", ["--size", size, "--pause-ms", "200"], name=name)
                     for name in ("first", "second"))
    seconds = {}
    for _ in range(ROUNDS):  # the first time host memory is touched for the first time
        for target in (first, second):
            expect_equal(timed(machine, seconds, "suspend", "suspend", target.pid)["path"], "direct", "path")
            expect_equal(timed(machine, seconds, "resume", "resume", target.pid)["path"], "direct", "path")
            target.wait_rounds(1)
    machine.stasis("suspend", second.pid).must_succeed()
    phases = []
    for _ in range(ROUNDS):
        for out, back in ((first, second), (second, first)):
            report = timed(machine, seconds, "swap", "swap", out.pid, back.pid)
            expect(report["at_once"], "one after the other, though both fit")
            expect_equal([report[side]["path"] for side in ("suspended", "resumed")], ["direct"] * 2, "paths")
            phases.append({side: {p["name"]: p["seconds"] for p in report[side]["phases"]}
                           for side in ("suspended", "resumed")})
            back.wait_rounds(1)
            held = out.rounds()
            time.sleep(0.3)
            expect_equal(out.rounds(), held, "rounds while suspended")
    machine.stasis("resume", second.pid).must_succeed()
    rounds = first.finish() + second.finish()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["swap"] / (medians["suspend"] + medians["resume"])
    figures = {"size": size, "seconds": seconds, "medians": medians, "ratio": round(ratio, 3), "phases": phases}
    figures["note"] = (f"{size}: suspend {medians['suspend']:.2f} s, resume {medians['resume']:.2f} s, swap "
                       f"{medians['swap']:.2f} s ({ratio:.2f} of both in turn); {rounds} rounds verified")
    if ratio > TARGET_RATIO and not machine.simulated:
        raise Failure(figures.pop("note"), figures)
    return figures


case("direct.swap.16", needs=NEEDS)(lambda machine: swap(machine, 16))
case("direct.swap.32", simulated=False, needs=NEEDS)(lambda machine: swap(machine, 32))


def run_as_job(machine, name, size):
    return Target(machine, [machine.program("stasis"), "run", "--name", name, "--images-dir",
                            os.path.join(machine.work, "images-" + name), "--", machine.program("stasis-workload"),
                            "memory", "--status", "{status}", "--size", size, "--pause-ms", "100"], name)


@case("direct.swap.jobs", needs=NEEDS + ("criu", "root"))
def jobs(machine):
    """Two jobs in namespaces of their own, by their names; one is preempted while it is suspended."""
    size = "64M" if machine.simulated else "2G"
    first, second = (run_as_job(machine, name, size) for name in ("first", "second"))
    for target in (first, second):
        target.wait_rounds(2)
    machine.stasis("suspend", "second").must_succeed()
    at_once = []
    for out, back in (("first", "second"), ("second", "first")):
        at_once.append(machine.stasis("swap", out, back, "--json").must_succeed().json()["at_once"])
        (first if back == "first" else second).wait_rounds(2)
    machine.run("kill", "-TERM", str(second.pid))
    second.wait_ended(60)
    expect_equal(second.exit_status, 75, f"status of the preempted one ({second.output()[-500:]})")
    before = second.rounds()
    second = run_as_job(machine, "second", size)
    second.wait_for(lambda: second.rounds() > before + 2, "round after the restore")
    rounds = [first.rounds(), second.rounds()]
    for target in (first, second):
        machine.run("kill", "-INT", str(target.pid))
        target.wait_ended(30)
    return {"at_once": at_once, "note": f"swapped there and back ({'at once' if all(at_once) else 'in order'}), "
                                        f"one restored after it was saved while suspended; rounds {rounds}"}
