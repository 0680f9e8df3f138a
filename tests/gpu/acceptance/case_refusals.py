"""What has to be refused, with the target unharmed."""

import os
import re

from . import plain_criu
from .core import Failure, Skip, case, expect, expect_equal

NEEDS = ("program stasis", "program stasis-workload")


def refused(finished, status, words):
    expect(finished.status == status, f"exit status {status} was due: {finished.brief()}")
    expect(re.search(words, finished.err, re.I), f"no word of /{words}/: {finished.brief()}")


def dumpable(machine, target):
    """The dump too, where it can be tried."""
    if not machine.criu_path or os.geteuid() != 0:
        return None
    return machine.stasis("dump", target.pid, "--images-dir", os.path.join(machine.work, "image"))


@case("refusal.managed_memory", needs=NEEDS)
def managed(machine):
    target = machine.workload("managed")
    target.wait_rounds(2)
    for attempt in (machine.stasis("suspend", target.pid), dumpable(machine, target)):
        if attempt is None:
            continue
        expect(attempt.status not in (0, None), f"not refused: {attempt.brief()}")
        refused(attempt, 8, "managed")
        machine.expect_state(target.pid, "running")
        target.wait_rounds(2)
    expect(not os.path.exists(os.path.join(machine.work, "image", "manifest.json")), "an image is there")
    return {"note": f"refused; runs on, {target.finish()} rounds verified"}


@case("refusal.shared_memory", needs=NEEDS)
def ipc(machine):
    """Memory opened from another process: driver 580 checkpoints it and cannot bring it back.

    Nothing shows it from outside; the driver inside the processes is asked, while they run.
    """
    target = machine.workload("ipc")
    target.wait_rounds(2)
    for attempt in (machine.stasis("suspend", target.pid), dumpable(machine, target)):
        if attempt is None:
            continue
        refused(attempt, 8, "may be another process's")
        states = [machine.state(pid) for pid in target.tree()]
        expect(all(state == "running" for state in states), f"after the refusal: {states}")
        target.wait_rounds(2)
    return {"note": f"refused; runs on, {target.finish()} rounds verified"}


@case("refusal.shared_memory.elsewhere", needs=NEEDS + ("root", "criu", "program cuda-checkpoint"))
def ipc_elsewhere(machine):
    """The same by the doctor, CRIU's plugin, and the drop-in, which warns of one that is named by itself."""
    plugins = plain_criu.plugin_folder(machine)
    target = machine.workload("ipc")
    target.wait_rounds(2)
    report = machine.stasis("doctor", target.pid, "--json").json()
    lights = {finding["light"] for finding in report["processes"] if finding["id"] == "sharing-unknown"}
    expect("red" in lights, f"the doctor says {lights}")
    target.wait_rounds(2)
    images = os.path.join(machine.work, "by-criu")
    try:
        plain_criu.dump(machine, target.pid, images, plugins)
        said = "nothing"
    except Failure as failure:
        said = str(failure)
    expect("may be another process's" in said, f"criu's log says {said}")
    target.wait_rounds(2)
    importer = next(pid for pid in target.tree() if pid != target.pid)
    locked = machine.cuda_checkpoint("--action", "lock", "--pid", importer)
    expect("may be another process's" in locked.err, f"the drop-in says {locked.brief()}")
    machine.cuda_checkpoint("--action", "unlock", "--pid", importer).must_succeed()
    target.wait_rounds(2)
    return {"note": f"red, refused, warned of; runs on, {target.finish()} rounds verified"}


@case("refusal.wrong_state", needs=NEEDS)
def wrong_state(machine):
    target = machine.workload("idle")
    target.wait_rounds(2)
    # Asked for the state it is in, a tool may say so and succeed, or refuse; it may not change it.
    statuses = []
    for verb, state in (("resume", "running"), ("suspend", "checkpointed")):
        if state == "checkpointed":
            machine.stasis("suspend", target.pid).must_succeed()
        again = machine.stasis(verb, target.pid)
        if again.status != 0:
            refused(again, 6, "running|checkpointed|suspended|state")
        machine.expect_state(target.pid, state)
        statuses.append(again.status)
    machine.stasis("resume", target.pid).must_succeed()
    # Another program has locked it: nothing to dump or suspend before that one has finished.
    machine.driver(target.pid, "lock")
    attempt = machine.stasis("suspend", target.pid)
    state = machine.state(target.pid)
    expect((attempt.status != 0 and state == "locked") or (attempt.status == 0 and
                                                           state == "checkpointed"),
           f"of a locked process: {attempt.brief()}; it is {state}")
    # What stasis has suspended is its to resume: it keeps the threads still.
    if state == "locked":
        machine.driver(target.pid, "unlock")
    else:
        machine.stasis("resume", target.pid).must_succeed()
    target.wait_rounds(2)
    return {"exit_statuses": statuses, "suspend_of_locked": attempt.status,
            "note": f"again: {statuses}, locked: {attempt.status}; {target.finish()} rounds verified"}


@case("refusal.thread_id", needs=NEEDS)
def thread_id(machine):
    target = machine.workload("threads")
    target.wait_rounds(2)
    others = [int(tid) for tid in os.listdir(f"/proc/{target.pid}/task") if int(tid) != target.pid]
    expect(others, "no other thread")
    refused(machine.stasis("suspend", others[0]), 2, f"thread.*{target.pid}")
    machine.expect_state(target.pid, "running")
    return {"note": f"{target.finish()} rounds verified"}


@case("refusal.not_cuda", needs=NEEDS)
def not_cuda(machine):
    target = machine.workload("none")
    target.wait_rounds(2)
    refused(machine.stasis("suspend", target.pid), 4, "cuda")
    return {"note": f"{target.finish()} rounds verified"}


@case("refusal.dead_process", needs=NEEDS)
def dead(machine):
    target = machine.workload("none", "--rounds", "1")
    target.wait_ended()
    refused(machine.stasis("suspend", target.pid), 3, "no.*process|gone|not there")


@case("refusal.zombie", needs=NEEDS)
def zombie(machine):
    target = machine.workload("none", "--rounds", "1")
    # It ends and is not waited for.
    os.waitid(os.P_PID, target.pid, os.WEXITED | os.WNOWAIT)
    refused(machine.stasis("suspend", target.pid), 3, "exited|zombie")


@case("refusal.bad_numbers", needs=("program stasis",))
def bad_numbers(machine):
    for text in ("99999999999", "4294967297", "-5", "0", "x", "", "12x"):
        finished = machine.stasis("suspend", "--", text)
        if finished.status == 0 or finished.status is None:
            expect(False, f"accepted: {finished.brief()}")
        expect_equal(finished.status in (2, 3), True, f"exit status of {text!r} ({finished.status})")


@case("refusal.not_permitted", needs=NEEDS + ("root",))
def not_permitted(machine):
    """Another user's process: said so, in words that name the way out."""
    setpriv = "/usr/bin/setpriv"
    if not os.access(setpriv, os.X_OK):
        raise Skip("no setpriv")
    target = machine.workload("idle")
    target.wait_rounds(2)
    finished = machine.run(setpriv, "--reuid=65534", "--regid=65534", "--clear-groups",
                           machine.program("stasis"), "suspend", target.pid)
    if "ermission denied" in finished.err and finished.status in (126, 127):
        raise Skip("the other user cannot even start the program: the build is in a private folder")
    refused(finished, 5, "permi|root|CAP_")
    machine.expect_state(target.pid, "running")
    return {"note": finished.first_error()[:90]}


@case("refusal.existing_image", needs=NEEDS + ("criu", "root"))
def existing_image(machine):
    target = machine.workload("idle")
    target.wait_rounds(2)
    images = os.path.join(machine.work, "image")
    machine.stasis("dump", target.pid, "--images-dir", images, "--leave-running").must_succeed()
    refused(machine.stasis("dump", target.pid, "--images-dir", images), 10, "exist|already")
    machine.expect_state(target.pid, "running")
    return {"note": f"{target.finish()} rounds verified"}


@case("refusal.number_in_use", needs=NEEDS + ("criu", "root"))
def number_in_use(machine):
    """A restore while the original lives is refused before anything is created."""
    target = machine.workload("idle")
    target.wait_rounds(2)
    images = os.path.join(machine.work, "image")
    machine.stasis("dump", target.pid, "--images-dir", images, "--leave-running").must_succeed()
    refused(machine.stasis("restore", "--images-dir", images, "--detach"), 11, str(target.pid))
    target.wait_rounds(2)
    return {"note": f"{target.finish()} rounds verified"}


@case("refusal.incomplete_image", needs=("program stasis", "criu"))
def incomplete_image(machine):
    images = os.path.join(machine.work, "image")
    os.mkdir(images)
    refused(machine.stasis("restore", "--images-dir", images, "--detach"), 10, "manifest|incomplete|image")
