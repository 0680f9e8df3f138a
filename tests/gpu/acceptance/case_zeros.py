"""GPU memory that is zeros: neither the bus nor host memory has to do with it."""

import statistics

from .case_direct import NEEDS, resume, start, suspend
from .case_direct_programs import dump_and_restore
from .core import case, expect

ROUNDS = 4
# Of a program without zeros, with the look at them to without.
MOST_SLOWER = 1.03
OFF = {"STASIS_ZEROS_FROM": str(1 << 50)}


def own_memory(target):
    """Bytes of the process's own."""
    with open(f"/proc/{target.pid}/status", encoding="ascii", errors="replace") as file:
        line = next(one for one in file if one.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def medians(values):
    return {name: round(statistics.median(found), 3) for name, found in values.items() if name.endswith("_seconds")}


@case("zeros.mostly", needs=NEEDS)
def mostly(machine):
    """A little of much memory is not zeros."""
    size, zeros = ("4M", "192M") if machine.simulated else ("2G", "56G")
    target = start(machine, "memory", ["--size", size, "--zeros", zeros, "--pause-ms", "50"])
    figures = {"own_bytes": []}
    before = own_memory(target)
    for _ in range(ROUNDS):
        suspend(machine, target, figures, "direct")
        figures["own_bytes"].append(own_memory(target) - before)
        resume(machine, target, figures, "direct")
        target.wait_rounds(2)
    rounds = target.finish()
    kept = max(figures["own_bytes"]) / 2**30
    figures["note"] = f"{size} beside {zeros} of zeros: {medians(figures)}; at most {kept:.2f} GiB of host memory; {rounds} rounds"
    return figures


@case("zeros.none", simulated=False, needs=NEEDS)
def none(machine):
    """A program without zeros, with the look at them and without, in turn."""
    target = start(machine, "memory", ["--size", "40G", "--pause-ms", "50"])
    machine.want_host_memory(44 << 30)
    found = {"with": {}, "without": {}}
    suspend(machine, target, {}, "direct")  # the first touches host memory for the first time
    resume(machine, target, {}, "direct")
    for _ in range(ROUNDS):
        for name, more in (("with", {}), ("without", OFF)):
            usual, machine.env = machine.env, {**machine.env, **more}
            suspend(machine, target, found[name], "direct")
            resume(machine, target, found[name], "direct")
            machine.env = usual
            target.wait_rounds(1)
    rounds = target.finish()
    middle = {name: medians(values) for name, values in found.items()}
    ratios = {name: round(middle["with"][name] / middle["without"][name], 3) for name in middle["with"]}
    note = f"40 GiB: {middle}; with to without {ratios}; {rounds} rounds"
    expect(ratios["suspend_seconds"] <= MOST_SLOWER, "over the target: " + note)
    return {"found": found, "ratios": ratios, "note": note}


@case("zeros.dump", needs=NEEDS + ("criu", "root"))
def dump(machine):
    size, zeros = ("4M", "192M") if machine.simulated else ("2G", "40G")
    target = start(machine, "memory", ["--size", size, "--zeros", zeros, "--pause-ms", "50"])
    figures = {}
    for _ in range(2):
        dump_and_restore(machine, target, figures)
        target.wait_rounds(2)
    figures["note"] = f"{size} beside {zeros} of zeros: {medians(figures)}; {target.finish()} rounds"
    return figures
