"""Long kernels of programs that the driver has restored, from which a GPU cannot switch away.

What becomes of such a program if another one takes or leaves the same GPU meanwhile; and that our own
mover, which has a context there, does it no harm.
"""

import os
import subprocess
import sys
import time

from .case_counter import Counter
from .case_direct import resume, run_under_agent, suspend
from .core import case, expect, expect_equal

NEEDS = ("program stasis", "program stasis-workload")
OTHER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "other_context.py")
# Longer than the GPU waits for a kernel to be switched away from, which is some 4.4 s.
KERNEL_MS = 9000
WATCH_SECONDS = 6.5
# What the other program does before the first one is resumed, and while its kernel runs; whether the
# first one lives on with driver 580.159.04. Where a newer driver does better, much can be simpler
# (src/direct/mover_server.h).
STEPS = {
    "idle": (["init", "context", "copy"], [], True),
    "copies": (["init", "context"], ["copy"], True),
    "closes_and_exits": (["init", "context", "copy"], ["destroy", "exit"], True),
    "only_initialises": (["init"], ["exit"], True),
    "initialises_meanwhile": ([], ["init", "exit"], True),
    "makes_a_context": (["init"], ["context"], False),
    "exits_with_a_context": (["init", "context"], ["exit"], False),
}


class Other:
    def __init__(self):
        self.process = subprocess.Popen([sys.executable, OTHER], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def do(self, steps):
        for step in steps:
            self.process.stdin.write(step + "\n")
            self.process.stdin.flush()
            if step == "exit":
                self.process.wait()
            else:
                expect_equal(self.process.stdout.readline().strip(), step + " 0", "answer of the driver")

    def end(self):
        self.process.kill()
        self.process.wait()


def watch(machine, before, meanwhile, kind="spin", until_launched=0.3):
    """Whether the program lives on, and what it said otherwise."""
    target = machine.workload(kind, "--busy-ms", KERNEL_MS)
    target.wait_rounds(1)
    other = Other()
    try:
        machine.stasis("suspend", target.pid, "--timeout", "30000").must_succeed()
        other.do(before)
        machine.stasis("resume", target.pid).must_succeed()
        resumed = time.monotonic()
        time.sleep(until_launched)
        other.do(meanwhile)
        while time.monotonic() < resumed + WATCH_SECONDS and not target.ended():
            time.sleep(0.1)
        found = not target.ended()
    finally:
        other.end()
    return found, "" if found else target.output().strip().splitlines()[-1]


def beside(machine, before, meanwhile, lives):
    found, last = watch(machine, before, meanwhile)
    expect_equal(found, lives, f"the program lives on ({last})")
    return {"lives": found, "note": "the program lives on" if found else f"the program is lost: {last}"}


for name, steps in STEPS.items():
    case(f"driver.long_kernel.other_{name}", simulated=False, needs=NEEDS)(
        lambda machine, steps=steps: beside(machine, *steps))


# Whether what the program makes anew after its restore cures it: the kernel runs in that (seen: a context does).
ANEW = ("stream", "context")


def anew(machine, what):
    """Tells what became of it: a question to the driver, with no answer that is wrong."""
    found, last = watch(machine, *STEPS["makes_a_context"][:2], "spin-" + what, 1.5)
    return {"lives": found, "note": f"in a {what} made after the restore it " + ("lives on" if found else f"is lost: {last}")}


for what in ANEW:
    case(f"driver.long_kernel.anew_{what}", simulated=False, needs=NEEDS)(
        lambda machine, what=what: anew(machine, what))


@case("direct.long_kernels", needs=NEEDS)
def long_kernels(machine):
    """Kernels of six seconds, one after the other: suspended and resumed again and again, with the mover's context."""
    target = run_under_agent(machine, [machine.program("stasis-workload"), "spin", "--busy-ms", 6000, "--size", "512M",
                                       "--status", "{status}"], "spin")
    target.wait_rounds(2)
    figures = {}
    for _ in range(3):
        report = suspend(machine, target, figures, "direct", options=("--timeout", "30000"))
        expect(report["direct_bytes"] >= 512 << 20, f"bytes past the driver: {report['direct_bytes']}")
        resume(machine, target, figures, "direct")
        time.sleep(0.5)
    # The tool is killed while it waits for the gate, with its mover.
    tool = subprocess.Popen([machine.program("stasis"), "suspend", str(target.pid), "--timeout", "30000"],
                            env=machine.target_env())
    time.sleep(0.6)
    expect(tool.poll() is None, "the suspend has not waited for the kernel")
    tool.kill()
    tool.wait()
    target.wait_rounds(2, timeout=60)
    machine.stasis("recover", target.pid).must_succeed()
    rounds = target.finish()
    figures["note"] = (f"3 suspends, a tool killed, {rounds} rounds verified; "
                       f"resume {max(figures['resume_seconds']):.2f} s at most")
    return figures


@case("direct.long_kernels.beside", needs=NEEDS + ("root", "criu"))
def held_meanwhile(machine):
    """One with kernels of five seconds, restored before, lives through all that is done to another on its GPU.

    The other one launches nothing by itself: kernels of two programs at once are what the GPU switches for.
    """
    other = Counter(machine, (machine.program("stasis"), "run", "--"))
    held = run_under_agent(machine, [machine.program("stasis-workload"), "spin", "--busy-ms", 5000, "--size", "64M",
                                     "--status", "{status}"], "held")
    held.wait_rounds(1)
    figures = {}
    for path in ("direct", "driver"):
        suspend(machine, held, figures, path, options=("--path", path, "--timeout", "30000"))
        resume(machine, held, figures)
        held.wait_rounds(1, timeout=60)
    images = os.path.join(machine.work, "image")
    pid = other.target.pid
    verbs = {"suspend by the driver": ("suspend", pid, "--path", "driver"), "resume by it": ("resume", pid),
             "suspend": ("suspend", pid, "--timeout", "30000"), "resume": ("resume", pid),
             "dump": ("dump", pid, "--images-dir", images, "--timeout", "30000"),
             "restore": ("restore", "--images-dir", images, "--detach")}
    seconds = {}
    for verb, words in verbs.items():
        done = machine.stasis(*words).must_succeed()
        expect("cannot hold" not in done.err, done.err)
        seconds[verb] = round(done.seconds, 2)
        if verb == "dump":
            other.target.wait_ended()
            other.target.forget_exit()
        held.wait_rounds(2, timeout=60)
        expect(not held.ended(), f"it is lost after {verb}: {held.output()[-500:]}")
    rounds = held.finish()
    expect_equal(other.ask(), "101", "the other's first answer")
    return {"seconds": seconds, "note": f"{rounds} kernels; the other's verbs, which wait for one: {seconds}"}
