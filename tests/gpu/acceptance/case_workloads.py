"""Each kind of workload through suspend and resume, and through dump and restore."""

import json
import os
import shutil
import signal

from .core import Skip, case, expect, expect_equal
from .targets import Target

CYCLES = 5
SIMULATED_CYCLES = 3
KINDS = {
    # kind: options on a real GPU, options on the simulated one
    "memory": (["--size", "2G"], ["--size", "64M"]),
    "pinned": (["--size", "96M"], ["--size", "6M"]),
    "streams": ([], []),
    "pool": (["--size", "256M"], ["--size", "16M"]),
    "vmm": (["--size", "256M"], ["--size", "16M"]),
    "graph": ([], []),
    "contexts": ([], []),
    "threads": ([], ["--size", "2M"]),
    "idle": ([], []),
    "poll": (["--size", "512M"], ["--size", "8M", "--own-us", "20"]),
    "spin": (["--busy-ms", "300"], ["--busy-ms", "300"]),
    "tree": (["--size", "512M"], ["--size", "16M"]),
    "loader": (["--size", "512M"], ["--size", "16M"]),
}
NEEDS = ("program stasis", "program stasis-workload")


def start(machine, kind, name=None):
    """The workload, running. Memory in use on the GPUs before is in `before`."""
    before = machine.gpu_memory()
    target = machine.workload(kind, *KINDS[kind][1 if machine.simulated else 0], name=name)
    target.before = before
    target.wait_rounds(2)
    return target


def cuda_pids(machine, target):
    return [pid for pid in target.tree() if machine.state(pid) in ("running", "checkpointed")]


def cycles(machine, kind):
    target = start(machine, kind)
    pids = cuda_pids(machine, target)
    expect_equal(len(pids), 2 if kind == "tree" else 1, "CUDA processes")
    suspend, resume = [], []
    count = SIMULATED_CYCLES if machine.simulated else CYCLES
    for _ in range(count):
        suspend.append(machine.stasis("suspend", target.pid).must_succeed().seconds)
        for pid in pids:
            machine.expect_state(pid, "checkpointed")
        machine.expect_gpu_free(target.before)
        resume.append(machine.stasis("resume", target.pid).must_succeed().seconds)
        for pid in pids:
            machine.expect_state(pid, "running")
        target.wait_rounds(2)
    rounds = target.finish()
    return {"suspend_seconds": suspend, "resume_seconds": resume, "rounds": rounds,
            "note": f"{count} cycles, {rounds} rounds verified"}


def dump_restore(machine, kind):
    target = start(machine, kind)
    images = os.path.join(machine.work, "image")
    dump = machine.stasis("dump", target.pid, "--images-dir", images).must_succeed()
    target.wait_ended()
    machine.expect_gpu_free(target.before)
    at_dump = target.rounds()
    target.forget_exit()
    restore = machine.stasis("restore", "--images-dir", images, "--detach").must_succeed()
    target.wait_rounds(3)
    expect(target.rounds() > at_dump, f"no round after {at_dump}")
    rounds = target.finish()
    return {"dump_seconds": dump.seconds, "restore_seconds": restore.seconds, "rounds": rounds,
            "note": f"dumped at round {at_dump}, {rounds} verified"}


def register_kinds():
    for kind in KINDS:
        case(f"workload.{kind}.cycles", needs=NEEDS)(lambda machine, kind=kind: cycles(machine, kind))
        case(f"workload.{kind}.dump", needs=NEEDS + ("criu", "root"))(
            lambda machine, kind=kind: dump_restore(machine, kind))


register_kinds()


@case("dump.leave_running", needs=NEEDS + ("criu", "root"))
def leave_running(machine):
    """The target runs on after the dump, and the image brings back the moment of the dump."""
    target = start(machine, "memory")
    images = os.path.join(machine.work, "image")
    machine.stasis("dump", target.pid, "--images-dir", images, "--leave-running").must_succeed()
    expect(not target.ended(), "the target ended")
    machine.expect_state(target.pid, "running")
    before = target.rounds()
    target.wait_rounds(5)
    ran_on = target.rounds()
    target.kill()
    target.forget_exit()
    machine.stasis("restore", "--images-dir", images, "--detach").must_succeed()
    target.wait_for(lambda: target.rounds() < ran_on, f"round before {ran_on}")
    target.wait_rounds(3)
    rounds = target.finish()
    return {"note": f"dumped about round {before}, ran on to {ran_on}, restored and verified {rounds}"}


@case("dump.leave_suspended", needs=NEEDS + ("criu", "root"))
def leave_suspended(machine):
    """The target stays suspended after the dump; it can be resumed, and the image be restored."""
    target = start(machine, "memory")
    images = os.path.join(machine.work, "image")
    machine.stasis("dump", target.pid, "--images-dir", images, "--leave-suspended").must_succeed()
    expect(not target.ended(), "the target ended")
    machine.expect_state(target.pid, "checkpointed")
    machine.expect_gpu_free(target.before)
    machine.stasis("resume", target.pid).must_succeed()
    target.wait_rounds(3)
    target.kill()
    target.forget_exit()
    machine.stasis("restore", "--images-dir", images, "--detach").must_succeed()
    target.wait_rounds(3)
    return {"note": f"{target.finish()} rounds verified"}


@case("dump.twice", needs=NEEDS + ("criu", "root"))
def dump_twice(machine):
    """A restored process can be dumped and restored again."""
    target = start(machine, "memory")
    for number in (1, 2):
        images = os.path.join(machine.work, f"image{number}")
        machine.stasis("dump", target.pid, "--images-dir", images, "--sync", "none").must_succeed()
        target.forget_exit()
        machine.stasis("restore", "--images-dir", images, "--detach").must_succeed()
        target.wait_rounds(2)
    return {"note": f"{target.finish()} rounds verified"}


@case("dump.of_a_suspended_process", needs=NEEDS + ("criu", "root"))
def dump_suspended(machine):
    """A process that is suspended already can be dumped."""
    target = start(machine, "memory")
    machine.stasis("suspend", target.pid).must_succeed()
    images = os.path.join(machine.work, "image")
    dump = machine.stasis("dump", target.pid, "--images-dir", images)
    if dump.status == 6:
        machine.expect_state(target.pid, "checkpointed")
        raise Skip("refused as a wrong state, and the target is as it was: " + dump.first_error())
    dump.must_succeed()
    target.forget_exit()
    machine.stasis("restore", "--images-dir", images, "--detach").must_succeed()
    state = machine.state(target.pid)
    if state == "checkpointed":
        machine.stasis("resume", target.pid).must_succeed()
    target.wait_rounds(2)
    return {"note": f"{state} after the restore; {target.finish()} rounds verified"}


@case("suspend.starved", needs=NEEDS)
def starved(machine):
    """Three threads launch without pause: suspend gets there or leaves the target running."""
    before = machine.gpu_memory()
    target = machine.workload("starve")
    target.before = before
    target.wait_rounds(3)
    done = machine.stasis("suspend", target.pid)
    state = machine.state(target.pid)
    if done.status == 0:
        expect_equal(state, "checkpointed", "the state after a suspend that succeeded")
        machine.stasis("resume", target.pid).must_succeed()
    else:
        expect_equal(done.status, 7, "the exit status of a time-out")
        expect_equal(state, "running", "the state after a time-out")
    target.wait_rounds(3)
    return {"seconds": done.seconds, "rounds": target.finish(),
            "note": "suspended" if done.status == 0 else "timed out, and runs on"}


@case("suspend.other_pid_namespace", needs=NEEDS + ("root",))
def other_pid_namespace(machine):
    """A program in a PID namespace of its own, as in a container, acted on from outside.

    With a /proc of its own too: cuInit is 304 without (580.159.04)."""
    unshare = shutil.which("unshare")
    if unshare is None:
        raise Skip("there is no unshare here")
    target = Target(machine, [unshare, "--pid", "--fork", "--kill-child", "--mount-proc", machine.program("stasis-workload"),
                              "threads", "--status", "{status}"], "inside")
    target.wait_rounds(2)
    with open(f"/proc/{target.pid}/task/{target.pid}/children", encoding="ascii") as file:
        inside = int(file.read())
    # By its own number here, and as a part of the tree of one outside.
    for root in (inside, target.pid):
        machine.stasis("suspend", root).must_succeed()
        machine.expect_state(inside, "checkpointed")
        machine.stasis("resume", root).must_succeed()
        target.wait_rounds(2)
    os.kill(inside, signal.SIGTERM)
    target.wait_ended(60)
    expect_equal(target.exit_status, 0, "the exit status")
    return {"note": target.output().strip().splitlines()[-1]}


UNPRIVILEGED = """
cd "$1" || exit 2
export STASIS_STATE_DIR=$1/state STASIS_SIM_DIR=$1/gpus
setsid "$2/stasis-workload" memory --size 64M --status status </dev/null >log 2>&1 &
target=$!
for _ in {1..600}; do grep -qs '^round 0*[2-9]' status && break; sleep 0.1; done
"$2/stasis-raw-driver" --pid $target lock checkpoint init restore unlock >driver.json
"$2/stasis" suspend $target >suspend.log 2>&1
echo "suspend=$?"
"$2/stasis" resume $target >resume.log 2>&1
echo "resume=$?"
kill -TERM $target
wait $target
echo "target=$?"
"""


@case("suspend.unprivileged", needs=NEEDS + ("root", "program stasis-raw-driver"))
def unprivileged(machine):
    """A user without privileges suspends a process of his own, if the driver lets him do it."""
    os.chmod(machine.work, 0o777)
    folder = os.path.join(machine.work, "unprivileged")
    done = machine.run("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "mkdir", folder)
    if done.status != 0:
        raise Skip(f"the work folder is out of reach for other users: {done.first_error()}")
    done = machine.run("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
                       "bash", "-c", UNPRIVILEGED, "bash", folder, machine.bin)
    results = dict(line.split("=") for line in done.out.split())
    expect_equal(results.get("target"), "0", "the target's exit status")
    with open(os.path.join(folder, "driver.json"), encoding="utf-8") as file:
        steps = json.load(file)["steps"]
    able = all(step["result"] == 0 for step in steps)
    with open(os.path.join(folder, "suspend.log"), encoding="utf-8") as file:
        said = file.read().strip().splitlines()
    yama = "none"
    if os.path.exists("/proc/sys/kernel/yama/ptrace_scope"):
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            yama = file.read().strip()
    note = f"yama {yama}; the driver {'lets' if able else 'does not let'} him; {said[-1] if said else ''}"
    if able:
        expect_equal(results["suspend"], "0", f"the exit status of suspend ({note})")
        expect_equal(results["resume"], "0", f"the exit status of resume ({note})")
    return {"note": note[:150]}
