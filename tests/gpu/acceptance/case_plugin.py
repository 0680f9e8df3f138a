"""plugins/criu in plain criu: what it does for those who call CRIU themselves."""

import json
import os
import statistics
import sys

from . import plain_criu
from .case_counter import Counter
from .case_direct import start, suspend
from .case_groups import TRANSPORTS, start_job
from .case_sharing import ranks_of
from .case_torch import require_torch
from .core import case, expect, expect_equal

FAMILY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "family.py")
NEEDS = ("criu", "root")
NCCL_DUMPS = 5


@case("plugin.counter", needs=NEEDS + ("program stasis-counter",))
def counter_plugin(machine):
    plugins = plain_criu.plugin_folder(machine)
    counter = Counter(machine)
    expect_equal(counter.ask(), "101", "the first answer")
    images = os.path.join(machine.work, "image")
    dump = plain_criu.dump(machine, counter.target.pid, images, plugins)
    counter.expect_gone()
    with open(os.path.join(images, "inventory.img"), "rb") as file:
        expect(b"cuda_plugin" in file.read(), "the image does not name the plugin")
    restore = plain_criu.restore(machine, images, plugins)
    expect_equal(counter.ask(), "102", "the answer after the restore")
    machine.expect_state(counter.target.pid, "running")
    return {"dump_seconds": dump.seconds, "restore_seconds": restore.seconds,
            "note": "101, criu dump, GPU free, criu restore, 102"}


@case("plugin.leave_running", needs=NEEDS + ("program stasis-workload",))
def leave_running(machine):
    plugins = plain_criu.plugin_folder(machine)
    target = machine.workload("memory")
    target.wait_rounds(2)
    plain_criu.dump(machine, target.pid, os.path.join(machine.work, "image"), plugins, "--leave-running")
    machine.expect_state(target.pid, "running")
    target.wait_rounds(2)
    return {"note": f"{target.finish()} rounds"}


@case("plugin.workloads", needs=NEEDS + ("program stasis-workload",))
def workloads(machine):
    """There and back, each twice."""
    plugins = plain_criu.plugin_folder(machine)
    notes = []
    for kind in ("memory", "poll", "threads", "vmm", "tree", "loader"):
        target = machine.workload(kind)
        target.wait_rounds(2)
        for number in range(2):
            images = os.path.join(machine.work, f"image-{kind}-{number}")
            plain_criu.dump(machine, target.pid, images, plugins)
            target.forget_exit()
            plain_criu.restore(machine, images, plugins)
            target.wait_rounds(2)
        notes.append(f"{kind} {target.finish()}")
    return {"note": "rounds: " + ", ".join(notes)}


@case("plugin.attach", needs=NEEDS + ("program stasis", "program stasis-workload"))
def attach(machine):
    """A program that runs without the agent gets it in its dump, and goes by the direct path where it is restored."""
    plugins = plain_criu.plugin_folder(machine)
    before = machine.gpu_memory()
    target = machine.workload("memory", "--size", "64M" if machine.simulated else "2G")
    target.before = before
    target.wait_rounds(2)
    images = os.path.join(machine.work, "image")
    dump = plain_criu.dump(machine, target.pid, images, plugins, "-v3",
                           env={**machine.env, "STASIS_ATTACH": "watch-graphs=1s"})
    with open(os.path.join(images, "dump.log"), encoding="utf-8", errors="replace") as file:
        expect("stasis attach: process" in file.read(), "the log does not say that the agent was brought")
    target.forget_exit()
    restore = plain_criu.restore(machine, images, plugins)
    target.wait_rounds(2)
    figures = {}
    suspend(machine, target, figures, "direct")
    machine.stasis("resume", target.pid).must_succeed()
    target.wait_rounds(2)
    return {**figures, "dump_seconds": dump.seconds, "restore_seconds": restore.seconds,
            "note": f"attached, dumped in {dump.seconds:.1f} s with 1 s of watching, restored, suspended by the direct "
                    f"path; {target.finish()} rounds"}


@case("plugin.family", needs=NEEDS)
def family(machine):
    """A child with GPU memory and NVML, saved and brought back by its parent over their socket pair."""
    images = os.path.join(machine.work, "images")
    done = machine.run(sys.executable, FAMILY, "--criu", machine.criu_path, "--libdir",
                       plain_criu.plugin_folder(machine), "--images", images, timeout=180).must_succeed()
    found = json.loads(done.out)
    expect("nvml" in found["answer"], "the child found no NVML")
    return {**found, "note": "the same memory and NVML answers over the same socket; "
                             + ("NVML asked" if "nvml" in found["answer"] else "no NVML here")}


def nccl(machine, start):
    version = require_torch(machine)
    plugins = plain_criu.plugin_folder(machine)
    target = start(machine)
    # NCCL's segments of shared memory have no name any more, and CRIU saves up to 1 MiB of such files.
    # Its connections are among the ranks alone, so CRIU need not keep others from them meanwhile.
    options = ("--tcp-established", "--ghost-limit", "128M", "--network-lock", "skip")
    dumps, restores = [], []
    images = os.path.join(machine.work, "image")
    staying = plain_criu.dump(machine, target.pid, images, plugins, "--leave-running", *options).seconds
    target.wait_rounds(2)
    machine.run("rm", "-rf", images)
    for number in range(NCCL_DUMPS):
        images = os.path.join(machine.work, f"image{number}")
        dumps.append(plain_criu.dump(machine, target.pid, images, plugins, *options).seconds)
        target.forget_exit()
        restores.append(plain_criu.restore(machine, images, plugins, *options).seconds)
        target.wait_rounds(2)
        machine.run("rm", "-rf", images)
    return {"torch": version, "dump_seconds": dumps, "restore_seconds": restores, "leave_running_seconds": staying,
            "note": f"{NCCL_DUMPS} dump(s), {target.finish()} rounds of sums; dump {statistics.median(dumps):.1f} s, "
                    f"restore {statistics.median(restores):.1f} s"}


for transport, wanted in TRANSPORTS.items():
    case(f"plugin.nccl.{transport}", simulated=False, needs=NEEDS + ("two gpus",))(
        lambda machine, settings=wanted: nccl(machine, lambda one: start_job(one, "ranks", settings)))


@case("plugin.nccl.defaults", simulated=False, needs=NEEDS + ("two gpus",))
def defaults(machine):
    """Under the agent, which gives up what the ranks share and takes it again."""
    return nccl(machine, lambda one: ranks_of(one, "ranks", "--all-calls"))


@case("plugin.managed", needs=NEEDS + ("program stasis-workload",))
def managed(machine):
    """Managed memory under the agent, there and back five times, and once with a job that goes on."""
    plugins = plain_criu.plugin_folder(machine)
    target = start(machine, "managed", ["--size", "8M" if machine.simulated else "256M", "--pause-ms", "10"])
    target.wait_rounds(2)
    images = os.path.join(machine.work, "staying")
    staying = plain_criu.dump(machine, target.pid, images, plugins, "--leave-running").seconds
    target.wait_rounds(2)
    dumps, restores = [], []
    for number in range(5):
        images = os.path.join(machine.work, f"image{number}")
        dumps.append(plain_criu.dump(machine, target.pid, images, plugins).seconds)
        target.forget_exit()
        restores.append(plain_criu.restore(machine, images, plugins).seconds)
        target.wait_rounds(2)
    return {"dump_seconds": dumps, "restore_seconds": restores, "leave_running_seconds": staying,
            "note": f"{len(dumps)} dumps, {target.finish()} rounds; dump {statistics.median(dumps):.1f} s, "
                    f"restore {statistics.median(restores):.1f} s"}
