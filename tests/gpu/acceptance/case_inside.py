"""Calls inside programs that run (docs/adr/0052-calls-inside.md): made, harmless, and what the driver says there."""

import os
import re

from . import case_torch
from .core import case, expect, expect_equal

NEEDS = ("program stasis", "program stasis-workload", "program stasis-inside", "root")
TIMES = 50  # a dozen on the simulated driver
# Of which some processes have imported memory.
NOT_CLEAN = ("ipc",)
KINDS = ("memory", "pinned", "threads", "contexts", "pool", "poll", "vmm", "ipc")


def start(machine, kind):
    target = machine.workload(kind)
    target.wait_rounds(2)
    return target


def look_into(machine, pid, *words):
    words = (["--simulated"] if machine.simulated else []) + list(words)
    return machine.run(machine.program("stasis-inside"), *words, str(pid), timeout=300)


def figures(pid):
    """What a call may not change, once a first one has been made."""
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        mappings = sum("r-xp 00000000 00:00 0" in line for line in maps)
    return {"descriptors": len(os.listdir(f"/proc/{pid}/fd")), "code": mappings}


def times(machine):
    return 12 if machine.simulated else TIMES


def survey(machine, pid):
    """Returns what one call found, and how long one of many takes."""
    first = look_into(machine, pid, "--memory").must_succeed()
    before = figures(pid)
    many = look_into(machine, pid, "--times", str(times(machine))).must_succeed()
    after = figures(pid)
    expect(after["descriptors"] <= before["descriptors"] + 2, f"descriptors: {before}, {after}")
    expect(after["code"] <= 2, f"mappings of code: {before}, {after}")
    return {
        "said": first.out.splitlines(),
        "clean": ", clean;" in first.out,
        "ms": float(re.search(r"([0-9.]+) ms each", many.out).group(1)),
        "questions": int(re.search(r"(\d+) questions", first.out).group(1)),
    }


@case("inside.workloads", needs=NEEDS)
def workloads(machine):
    """Every kind of workload is asked again and again while it verifies its memory."""
    found = {}
    for kind in KINDS:
        target = start(machine, kind)
        for number, pid in enumerate(target.tree()):
            if machine.state(pid) != "running":
                continue
            found[f"{kind}.{number}"] = survey(machine, pid)
        target.wait_rounds(2)
        target.finish()
        if kind in NOT_CLEAN:
            expect(not all(one["clean"] for name, one in found.items() if name.startswith(kind)),
                   f"{kind}: called clean: {found}")
    unclean = [name for name, one in found.items() if not one["clean"]]
    slowest = max(one["ms"] for one in found.values())
    return {"found": found, "note": f"{times(machine)} calls each, {slowest} ms at most; not known to be clean: {unclean}"}


@case("inside.managed", needs=NEEDS)
def managed(machine):
    """Managed memory says that it is."""
    target = start(machine, "managed")
    said = look_into(machine, target.pid, "--memory").must_succeed().out
    target.wait_rounds(2)
    target.finish()
    managed_ones = len(re.findall(r" managed 1 ", said))
    if not machine.simulated:
        expect(managed_ones > 0, f"none is managed: {said}")
    return {"said": said.splitlines(), "note": f"{managed_ones} pieces"}


@case("inside.torch", simulated=False, needs=NEEDS)
def torch(machine):
    """PyTorch training, asked two hundred times while it trains."""
    case_torch.require_torch(machine)
    target = case_torch.start(machine, "inside")
    case_torch.wait_step(target, 5)
    found = survey(machine, target.pid)
    look_into(machine, target.pid, "--times", "150").must_succeed()
    case_torch.wait_step(target, 20)
    target.kill()
    return {"found": found, "note": f"{found['ms']} ms each, {found['questions']} questions, "
                                    f"{'clean' if found['clean'] else 'not known to be clean'}"}


@case("inside.consent", needs=NEEDS)
def consent(machine):
    """Two processes that share none are suspended without consent, if the driver can tell."""
    target = start(machine, "tree")
    attempt = machine.stasis("suspend", target.pid)
    if attempt.status == 0:
        machine.stasis("resume", target.pid).must_succeed()
    else:
        expect_equal(attempt.status, 8, "status")
        expect("may be another process's" in attempt.err, attempt.err)
    target.wait_rounds(2)
    target.finish()
    return {"note": "no consent needed" if attempt.status == 0 else attempt.first_error()[:110]}
