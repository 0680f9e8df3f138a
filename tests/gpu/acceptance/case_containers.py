"""What container engines save and bring back by CRIU with plugins/criu: with the agent in the container, and
without."""

import json
import os
import re
import statistics
import sys

from .case_groups import ALLREDUCE
from .case_torch import TRAIN, losses, require_torch
from .containers import Crun, Runc
from .core import Failure, Skip, case, expect, expect_equal
from .engines import Containerd, Podman, PodmanCdi, PodmanExport

NEEDS = ("criu", "root", "program stasis")
THREADS = os.path.join(os.path.dirname(TRAIN), "driver_threads.py")
STEPS = 300


@case("container.driver_threads", needs=("root", "program stasis-workload"))
def driver_threads(machine):
    """Which calls leave threads in the caller: what plugins/criu and the simulated driver rest on."""
    target = machine.workload("memory")
    target.wait_rounds(2)
    done = machine.run("timeout", "60", sys.executable, THREADS, "--pid", target.pid).must_succeed()
    steps = json.loads(done.out)
    expect(all(step["result"] in (None, 0) for step in steps), f"a call failed: {steps}")
    expect_equal(steps[0]["threads"], 1, "threads at the beginning")
    expect_equal(steps[-1]["setns"], "entered", "setns after unshare(CLONE_FS)")
    target.wait_rounds(2)
    target.finish()
    more = [f"{step['step']} ({step['threads']}, {step['setns']})"
            for before, step in zip(steps, steps[1:]) if step["threads"] > before["threads"]]
    return {"steps": steps, "note": "threads are started by: " + (", ".join(more) or "no call")}


def variables(machine, agent):
    if not agent:
        return {}
    path = os.path.join(machine.build, "lib", "stasis", "libstasis-preload.so")
    if not os.path.exists(path):
        raise Skip(f"{path} is not built")
    return {"LD_PRELOAD": path}


def there_and_back(machine, container, before):
    """The seconds of both."""
    images = os.path.join(machine.work, "image")
    dump = container.checkpoint(images)
    machine.expect_gpu_free(before)
    expect(container.names_plugin(images), "the image does not name the plugin")
    restore = container.restore(images)
    return {"checkpoint_seconds": round(dump, 3), "restore_seconds": round(restore, 3)}


def from_the_host(machine, container, agent):
    """What was restored in the container can be suspended and resumed from out here."""
    said = machine.stasis("suspend", container.pid, "--json").must_succeed().json()
    expect(not said["was_so"], "it was not running")
    expect_equal(said["path"], "direct" if agent else "driver", "the path of a suspend after the restore")
    machine.stasis("resume", container.pid).must_succeed()


def counter(machine, engine, agent):
    program = machine.program("stasis-counter")
    before = machine.gpu_memory()
    container = engine(machine, [program, "--port", "0", "--gpu-memory", "32M" if machine.simulated else "1G"],
                          variables(machine, agent))
    container.wait_for(lambda: "listening on" in container.output(), "port")
    port = re.search(r"listening on 127\.0\.0\.1:(\d+)", container.output()).group(1)

    def ask():
        return machine.run(program, "--ask", port).must_succeed().out.strip()

    expect_equal(ask(), "101", "the first answer")
    figures = there_and_back(machine, container, before)
    expect_equal(ask(), "102", "the answer after the restore")
    from_the_host(machine, container, agent)
    expect_equal(ask(), "103", "the answer after that")
    return {**figures, "note": "101, checkpoint, GPU free, restore, 102; "
                               f"{figures['checkpoint_seconds']:.1f} s, {figures['restore_seconds']:.1f} s"}


def rounds_of(container, status, more=2):
    """How many rounds the file says, and what waits for some more."""
    def rounds():
        try:
            with open(status, encoding="ascii", errors="replace") as file:
                return int(re.match(r"round (\d+) ok", file.read()).group(1))
        except (OSError, AttributeError):
            return 0

    def go_on():
        wanted = rounds() + more
        container.wait_for(lambda: rounds() >= wanted, f"round {wanted}", timeout=180)

    return rounds, go_on


def workload(machine, engine, agent):
    """stasis-workload, which looks at each byte of its memory in each round."""
    status = os.path.join(machine.work, "workload.status")
    before = machine.gpu_memory()
    container = engine(machine, [machine.program("stasis-workload"), "memory", "--size", "32M", "--status", status],
                          variables(machine, agent))

    rounds, go_on = rounds_of(container, status)
    go_on()
    figures = there_and_back(machine, container, before)
    go_on()
    from_the_host(machine, container, agent)
    go_on()
    return {**figures, "note": f"{rounds()} rounds"}


def torch(machine, engine, agent):
    version = require_torch(machine)
    path = os.path.join(machine.work, "losses")
    before = machine.gpu_memory()
    container = engine(machine, [sys.executable, TRAIN, "--losses", path, "--steps", STEPS, "--gib", "2",
                                 "--pause-ms", "20"], variables(machine, agent))
    container.losses = path
    container.wait_for(lambda: len(losses(container)) >= 20, "step 20", timeout=180)
    figures = there_and_back(machine, container, before)
    restored_at = len(losses(container))
    container.wait_for(lambda: len(losses(container)) >= restored_at + 10, "ten more steps")
    from_the_host(machine, container, agent)
    container.wait_for(lambda: "trained" in container.output(), "end of the training")
    with open(path, encoding="ascii") as file:
        steps = [int(line.split()[0]) for line in file]
    # An engine that lets it go on after the checkpoint, and ends it then, has it do a few steps twice.
    again = next((i for i in range(1, len(steps)) if steps[i] != steps[i - 1] + 1), len(steps))
    if not container.goes_on and again < len(steps):
        raise Failure(f"step {steps[again]} after step {steps[again - 1]}")
    expect_equal(steps[:again], list(range(1, again + 1)), "the steps until then")
    if again < len(steps):
        expect_equal(steps[again:], list(range(steps[again], STEPS + 1)), "the steps after the restore")
        expect(steps[again] <= steps[again - 1], f"step {steps[again]} after step {steps[again - 1]}")
    expect_equal(steps[-1], STEPS, "the last step")
    return {**figures, "torch": version, "restored_at_step": restored_at,
            "note": f"{STEPS} steps in order, restored at {restored_at}; checkpoint "
                    f"{figures['checkpoint_seconds']:.1f} s, restore {figures['restore_seconds']:.1f} s"}


def shared_there_and_back(machine, argv, status):
    """Processes that share GPU memory, in one container; `status` the file that says how far they are."""
    before = machine.gpu_memory()
    container = Runc(machine, argv, variables(machine, True), options=("tcp-established", "ghost-limit 128M"))

    rounds, go_on = rounds_of(container, status, 5)
    go_on()
    figures = there_and_back(machine, container, before)
    go_on()
    from_the_host(machine, container, True)
    go_on()
    figures["note"] = (f"{rounds()} rounds; checkpoint {figures['checkpoint_seconds']:.1f} s, "
                       f"restore {figures['restore_seconds']:.1f} s")
    return figures


def verifying(machine, size, *before):
    """A container in which stasis-workload runs, its rounds, and what waits for two more."""
    status = os.path.join(machine.work, "workload.status")
    container = Runc(machine, [*before, machine.program("stasis-workload"), "memory", "--size",
                               "32M" if machine.simulated else size, "--status", status, "--pause-ms", "5"],
                     {"STASIS_STATE_DIR": os.path.join(machine.work, "state-inside")})

    rounds, go_on = rounds_of(container, status)
    go_on()
    return container, rounds, go_on


def suspends(machine, container, path, go_on, count=3):
    """From out here; the medians of what the tool said."""
    seconds = {"suspend": [], "resume": []}
    for _ in range(count):
        said = machine.stasis("suspend", container.pid, "--json").must_succeed().json()
        expect_equal(said["path"], path, "path")
        seconds["suspend"].append(said["seconds"])
        seconds["resume"].append(machine.stasis("resume", container.pid, "--json").must_succeed().json()["seconds"])
        go_on()
    return {f"{verb}_seconds": round(statistics.median(taken), 3) for verb, taken in seconds.items()}


@case("container.runc.from_host", needs=NEEDS)
def from_outside(machine):
    """A container that knows nothing of Stasis: its program is suspended from the host, gets the agent from there, and
    is suspended by it. A dump from there is refused with the way that works, and harms nothing."""
    container, rounds, go_on = verifying(machine, "4G")
    figures = {"driver": suspends(machine, container, "driver", go_on)}
    attached = machine.stasis("attach", container.pid, "--json", "--graphs-are-safe").must_succeed()
    figures["attach_seconds"] = attached.json()["seconds"]
    go_on()
    figures["direct"] = suspends(machine, container, "direct", go_on)
    done = machine.stasis("dump", container.pid, "--images-dir", os.path.join(machine.work, "image"), "--leave-running")
    expect_equal(done.status, 9, f"status of a dump from the host ({done.brief()})")
    expect("the container engine's checkpoint" in done.err, f"not said: {done.err}")
    go_on()
    return {**figures, "note": f"{rounds()} rounds; {figures}"}


@case("container.runc.run_inside", needs=NEEDS)
def run_inside(machine):
    """`stasis run` in a container, suspended from inside and from the host."""
    stasis = machine.program("stasis")
    container, rounds, go_on = verifying(machine, "4G", stasis, "run", "--")
    figures = suspends(machine, container, "direct", go_on)
    for _ in range(3):
        for verb in ("suspend", "resume"):
            container.exec(stasis, verb, "1")
        go_on()
    return {**figures, "note": f"{rounds()} rounds; {figures}"}


@case("container.runc.ranks.agent", needs=NEEDS)
def ranks(machine):
    """Two processes that write into each other's GPU memory."""
    status = os.path.join(machine.work, "ranks.status")
    return shared_there_and_back(machine, [machine.program("stasis-workload"), "collective", "--children", "2", "--size",
                                             "4M", "--pause-ms", "2", "--sharing", "--status", status], status)


@case("container.runc.nccl.agent", simulated=False, needs=NEEDS + ("two gpus",))
def nccl(machine):
    """Two ranks of NCCL with its defaults, a GPU each."""
    require_torch(machine)
    status = os.path.join(machine.work, "nccl.status")
    return shared_there_and_back(machine, [sys.executable, ALLREDUCE, "--status", status, "--ranks", "2", "--mib", "16",
                                             "--pause-ms", "2", "--all-calls"], status + ".0")


def register(name, engine, kind, agent):
    case(f"container.{name}." + kind.__name__ + (".agent" if agent else ""), simulated=kind is not torch, needs=NEEDS)(
        lambda machine: kind(machine, engine, agent))


for called, engine_type, kinds in (("runc", Runc, (counter, workload, torch)), ("crun", Crun, (counter, torch)),
                                   ("podman", Podman, (counter, torch)), ("podman.export", PodmanExport, (counter,)),
                                   ("podman.cdi", PodmanCdi, (counter, torch)),
                                   ("ctr", Containerd, (counter, torch))):
    for one in kinds:
        for inside in (False, True):
            register(called, engine_type, one, inside)
