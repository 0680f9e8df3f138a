"""The benchmarks, and whether they reach their targets. On the simulated driver they only run."""

import os
import sys

from .core import Failure, Skip, case
from .targets import EXIT_SKIPPED

RUN_BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "bench", "run_bench")
NEEDS = ("program stasis-raw-driver", "program stasis-workload")


def bench(machine, name, *options):
    argv = [sys.executable, os.path.normpath(RUN_BENCH), name, "--build", machine.build, "--work",
            machine.work, *options]
    if machine.criu_path:
        argv += ["--criu", machine.criu_path]
    if machine.simulated:
        argv.append("--simulated")
    done = machine.run(*argv, timeout=900)
    if done.status == EXIT_SKIPPED:
        raise Skip(done.json()["skipped"])
    if done.status != 0:
        found = done.json() if done.out.strip() else {}
        raise Failure(found.get("failed") or done.brief())
    return done.json()


def verdict(machine, figures, missed, note):
    figures["note"] = note
    if missed and not machine.simulated:
        raise Failure("over the target: " + ", ".join(missed) + " (" + note + ")", figures)
    return figures


def percent(part):
    return f"{(part['ratio'] - 1) * 100:+.1f} %"


@case("speed.state", needs=NEEDS + ("program cuda-checkpoint",))
def state(machine):
    figures = bench(machine, "state")
    medians = figures["medians"]
    note = ", ".join(f"{name} {seconds * 1000:.2f} ms" for name, seconds in medians.items())
    return verdict(machine, figures, [] if figures["reached"] else ["--get-state"], note)


@case("speed.suspend", needs=NEEDS + ("program stasis",))
def suspend(machine):
    figures = bench(machine, "suspend")
    note = (f"{figures['size']}: out {figures['suspend']['ours_median']:.2f} s "
            f"({percent(figures['suspend'])}), back {figures['resume']['ours_median']:.2f} s "
            f"({percent(figures['resume'])})")
    return verdict(machine, figures, [] if figures["both"]["reached"] else ["suspend + resume"], note)


@case("speed.dump", needs=NEEDS + ("program stasis", "criu", "root"))
def dump(machine):
    figures = bench(machine, "dump", "--runs", "5")
    parts = {f"{step} --sync {sync}": figures[f"sync_{sync}"][step]
             for sync in ("none", "disk") for step in ("dump", "restore")}
    missed = [name for name, part in parts.items() if not part["reached"]]
    note = figures["size"] + ": " + ", ".join(
        f"{name} {part['ours_median']:.2f} s ({percent(part)})" for name, part in parts.items())
    return verdict(machine, figures, missed, note)
