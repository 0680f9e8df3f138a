"""The direct path: the ways in which programs come by the driver, and by the agent."""

import os

from .case_direct import run_under_agent, suspended_again_and_again
from .core import case, expect, expect_equal
from .targets import Target

NEEDS = ("program stasis", "program stasis-agent-target")


def cycles(machine, target):
    target.before = machine.gpu_memory()
    target.wait_rounds(2)
    return suspended_again_and_again(machine, target, "direct")


def agent(machine):
    return os.path.join(machine.build, "lib", "stasis", "libstasis-preload.so")


@case("direct.way.linked", needs=("program stasis", "program stasis-agent-linked"))
def linked(machine):
    """The loader has bound the driver's functions, and the program does not look them up."""
    return cycles(machine, run_under_agent(machine, [machine.program("stasis-agent-linked"), "{status}"], "linked"))


@case("direct.way.reopened", needs=NEEDS)
def reopened(machine):
    """A thread opens the driver's library and closes it, all the time."""
    argv = [machine.program("stasis-agent-target"), "reopen", "{status}"]
    return cycles(machine, run_under_agent(machine, argv, "reopened"))


@case("direct.way.forks", needs=NEEDS)
def forks(machine):
    """A thread forks all the time."""
    argv = [machine.program("stasis-agent-target"), "fork", "{status}"]
    return cycles(machine, run_under_agent(machine, argv, "forks"))


@case("direct.way.captures", simulated=False, needs=NEEDS)
def captures(machine):
    """A thread captures graphs all the time, and another allocates and frees."""
    argv = [machine.program("stasis-agent-target"), "capture", "{status}"]
    return cycles(machine, run_under_agent(machine, argv, "captures"))


@case("direct.way.exec", needs=NEEDS)
def becomes_another(machine):
    """Suspended, it becomes another program by exec, and is suspended again and again."""
    go = os.path.join(machine.work, "go")
    argv = [machine.program("stasis-agent-target"), "exec", "{status}", go]
    target = run_under_agent(machine, argv, "exec")
    target.wait_rounds(2)
    machine.stasis("suspend", target.pid).must_succeed()
    machine.stasis("resume", target.pid).must_succeed()
    with open(go, "w", encoding="ascii"):
        pass
    target.wait_for(lambda: not os.path.exists(go), "exec")
    target.wait_for(lambda: target.rounds() > 2, "round of the new program")
    return cycles(machine, target)


@case("direct.way.after_driver", needs=("program stasis", "program stasis-workload"))
def after_driver(machine):
    """Memory that the driver's own restore has made: each later suspend takes the direct path, and a dump after it."""
    sizes = ("128M",) if machine.simulated else ("64M", "512M", "2G", "16G")
    seconds = {}
    for size in sizes:
        argv = [machine.program("stasis-workload"), "memory", "--size", size, "--status", "{status}"]
        target = run_under_agent(machine, argv, "after-" + size)
        target.wait_rounds(2)
        machine.stasis("suspend", target.pid, "--path", "driver").must_succeed()
        machine.stasis("resume", target.pid).must_succeed()
        target.wait_rounds(2)
        said = machine.stasis("suspend", target.pid, "--json").must_succeed().json()
        expect_equal(said["path"], "direct", f"the path of {size} ({said['notes']})")
        seconds[size] = said["standstill_seconds"]
        machine.stasis("resume", target.pid).must_succeed()
        images = os.path.join(machine.work, "images-" + size)
        said = machine.stasis("dump", target.pid, "--images-dir", images, "--leave-running", "--json").must_succeed().json()
        expect_equal(said["path"], "direct", f"the path of a dump of {size} ({said['notes']})")
        target.wait_rounds(2)
        expect(target.finish() > 0, "no round was verified")
    return {"standstill_seconds": seconds, "note": ", ".join(f"{size}: {took:.2f} s" for size, took in seconds.items())}


@case("direct.way.by_hand", needs=NEEDS)
def by_hand(machine):
    """LD_PRELOAD set by hand."""
    env = {**machine.target_env(), "LD_PRELOAD": agent(machine)}
    return cycles(machine, Target(machine, [machine.program("stasis-agent-target"), "plain", "{status}"], "by-hand", env))


@case("direct.way.container", needs=NEEDS + ("root",))
def container(machine):
    """LD_PRELOAD set by hand in a container: PID, mount, IPC, UTS and network namespaces of its own, and the agent's
    library where the host has none."""
    place = os.path.join(machine.work, "inside")
    os.makedirs(place, exist_ok=True)
    script = (f"mount -t tmpfs inside {place} && cp {agent(machine)} {place}/agent.so && "
              f"LD_PRELOAD={place}/agent.so exec {machine.program('stasis-agent-target')} plain {{status}}")
    # unshare(1) hands no signal on.
    outside = (f"unshare --fork --pid --mount-proc --ipc --uts --net /bin/sh -c '{script}' & "
               "trap 'pkill -TERM -P $!' TERM; wait; wait")
    return cycles(machine, Target(machine, ["/bin/sh", "-c", outside], "container"))
