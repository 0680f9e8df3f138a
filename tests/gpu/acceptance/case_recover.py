"""Our tools are interrupted or killed at many instants; the target must be there afterwards."""

import os
import signal
import subprocess
import time

from .case_workloads import start
from .core import case, expect, expect_equal
from .targets import Target

NEEDS = ("program stasis", "program stasis-workload")
INSTANTS = 6


def begin(machine, *argv):
    """One of our commands in the background."""
    return subprocess.Popen([machine.program("stasis"), *map(str, argv)], env=machine.env,
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE)


def recover(machine, target, timeout=60):
    """`stasis recover`, again for as long as it says that a program is still at work on the target
    (exit status 7, "try again"): criu, whose master was killed, runs on for a while."""
    deadline = time.monotonic() + timeout
    while True:
        done = machine.stasis("recover", target.pid, timeout=120)
        if done.status != 7 or time.monotonic() > deadline:
            return done.must_succeed()
        time.sleep(0.1)


def duration(machine, target):
    """How long a suspend takes here."""
    seconds = machine.stasis("suspend", target.pid).must_succeed().seconds
    machine.stasis("resume", target.pid).must_succeed()
    return seconds


@case("recover.after_sigkill_in_suspend", needs=NEEDS)
def sigkill_in_suspend(machine):
    """`kill -9` of `stasis suspend` at instants spread over its work; `stasis recover` mends it."""
    target = start(machine, "memory")
    whole = duration(machine, target)
    left = []
    for number in range(INSTANTS):
        tool = begin(machine, "suspend", target.pid)
        time.sleep(whole * (number + 0.5) / INSTANTS)
        tool.kill()
        tool.communicate()
        # The driver may still be at work on what it was told; recover has to wait for it.
        recover(machine, target)
        left.append(machine.state(target.pid))
        if left[-1] == "checkpointed":  # it had finished: that is what was asked for
            machine.stasis("resume", target.pid).must_succeed()
        machine.expect_state(target.pid, "running")
        target.wait_rounds(2)
    return {"after_recover": left, "note": f"{INSTANTS} kills, {target.finish()} rounds verified"}


@case("recover.after_sigkill_in_dump", needs=NEEDS + ("criu", "root"))
def sigkill_in_dump(machine):
    target = start(machine, "memory")
    images = os.path.join(machine.work, "image0")
    began = time.monotonic()
    machine.stasis("dump", target.pid, "--images-dir", images, "--leave-running").must_succeed()
    whole = time.monotonic() - began
    for number in range(INSTANTS):
        images = os.path.join(machine.work, f"image{number + 1}")
        tool = begin(machine, "dump", target.pid, "--images-dir", images, "--leave-running")
        time.sleep(whole * (number + 0.5) / INSTANTS)
        tool.kill()
        tool.communicate()
        recover(machine, target)
        machine.expect_state(target.pid, "running")
        target.wait_rounds(2)
    return {"dump_seconds": whole, "note": f"{INSTANTS} kills, {target.finish()} rounds verified"}


@case("recover.after_interrupt", needs=NEEDS)
def interrupt(machine):
    """Ctrl-C: the command ends with 130 and the target runs, or it had finished."""
    target = start(machine, "memory")
    whole = duration(machine, target)
    found = []
    for number in range(INSTANTS):
        tool = begin(machine, "suspend", target.pid)
        time.sleep(whole * (number + 0.5) / INSTANTS)
        tool.send_signal(signal.SIGINT)
        _, said = tool.communicate(timeout=120)
        state = machine.state(target.pid)
        # -2: it had not yet installed its handler, and had not begun.
        expect((tool.returncode, state) in ((130, "running"), (0, "checkpointed"), (-2, "running")),
               f"status {tool.returncode}, {state}; it said: {said.decode(errors='replace')[:200]}")
        found.append(tool.returncode)
        if state == "checkpointed":
            machine.stasis("resume", target.pid).must_succeed()
        target.wait_rounds(2)
    return {"exit_statuses": found, "note": f"exit statuses {found}, {target.finish()} rounds verified"}


@case("restore.attended", needs=NEEDS + ("criu", "root"))
def attended(machine):
    """`stasis restore` without --detach stays with the target, passes signals on and ends as it does."""
    target = start(machine, "memory")
    images = os.path.join(machine.work, "image")
    machine.stasis("dump", target.pid, "--images-dir", images).must_succeed()
    target.wait_ended()
    before = target.rounds()
    tool = Target(machine, [machine.program("stasis"), "restore", "--images-dir", images], "restore")
    target.exit_status = None
    deadline = time.monotonic() + 60
    while target.rounds() < before + 3 and time.monotonic() < deadline:
        tool.fail_if_ended()
        time.sleep(0.02)
    expect(target.rounds() >= before + 3, "no round after the restore")
    os.kill(tool.pid, signal.SIGTERM)
    tool.wait_ended(60)
    expect_equal(tool.exit_status, 0, "the exit status of `stasis restore`")
    expect("verified" in target.output(), "the target did not end by itself")
    return {"note": target.output().strip().splitlines()[-1]}
