"""Jobs whose processes share GPU memory: NCCL with its defaults, torchrun, tensors between processes."""

import os
import statistics
import sys

from .case_devices import swap
from .case_groups import ALLREDUCE, NEEDS, cycle, new_figures, summary
from .case_jobs import preempted, told
from .case_torch import losses, require_torch
from .core import Failure, case, expect
from .targets import Target

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CYCLES = 50
DUMPS = 10
FEWER = 5
# Of two ranks to one's.
MOST_DOWNTIME = 1.3
# By the settings that select the transport.
TRANSPORTS = {
    "defaults": {},
    "host_memory": {"NCCL_P2P_DISABLE": "1"},
}


def there_and_back(machine, target, cycles, dumps, progress):
    figures = new_figures()
    for _ in range(cycles):
        cycle(machine, target, figures, progress)
    figures.update({"dump_seconds": [], "restore_seconds": []})
    for number in range(dumps):
        images = os.path.join(machine.work, f"image{number}")
        dump = machine.stasis("dump", target.pid, "--images-dir", images, "--sync", "none",
                              timeout=300).must_succeed()
        target.forget_exit()
        restore = machine.stasis("restore", "--images-dir", images, "--detach",
                                 timeout=300).must_succeed()
        figures["dump_seconds"].append(dump.seconds)
        figures["restore_seconds"].append(restore.seconds)
        progress()
        machine.run("rm", "-rf", images)
    return figures


def under_agent(machine, name, command, settings=None):
    return Target(machine, [machine.program("stasis"), "run", "--no-io-uring", "--", *command], name,
                  {**machine.target_env(), **(settings or {})})


def ranks_of(machine, name, *more, ranks=2, settings=None):
    require_torch(machine)
    target = under_agent(machine, name, [sys.executable, ALLREDUCE, "--status", "{status}", "--ranks", str(ranks),
                                         "--mib", "16", "--pause-ms", "2", *more], settings)
    target.wait_rounds(3, timeout=180)
    return target


def nccl(machine, name, settings):
    """Every sum right through suspends and dumps."""
    version = require_torch(machine)
    target = under_agent(machine, name, [sys.executable, ALLREDUCE, "--status", "{status}", "--ranks", "2",
                                         "--mib", "16", "--pause-ms", "2"], settings)
    target.wait_rounds(3, timeout=180)
    figures = there_and_back(machine, target, CYCLES, DUMPS, lambda: target.wait_rounds(2))
    rounds = target.finish()
    figures.update({"torch": version, "note": f"{CYCLES} cycles, {DUMPS} dumps, {rounds} rounds of sums; "
                                              f"{summary(figures)}"})
    return figures


for transport, wanted in TRANSPORTS.items():
    case(f"sharing.nccl.{transport}", simulated=False, needs=NEEDS + ("two gpus", "criu", "root"))(
        lambda machine, name=transport, settings=wanted: nccl(machine, name, settings))


def every_call(machine, name, settings, *more):
    """Every collective, and communicators that come and go, fewer times."""
    target = ranks_of(machine, name, "--all-calls", *more, settings=settings)
    figures = there_and_back(machine, target, 10, 3, lambda: target.wait_rounds(2))
    rounds = target.finish()
    figures["note"] = f"10 cycles, 3 dumps, {rounds} rounds of every collective; {summary(figures)}"
    return figures


# As older programs and images set it, as Slurm starts ranks, and as PyTorch's manual advises.
WAYS = {
    "by_ipc": ({"NCCL_CUMEM_ENABLE": "0"},),
    "one_gpu_each": (None, "--one-gpu-each"),
    "one_gpu_each_by_ipc": ({"NCCL_CUMEM_ENABLE": "0"}, "--one-gpu-each"),
    "expandable": ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},),
}
for one, way in WAYS.items():
    case(f"sharing.nccl.{one}", simulated=False, needs=NEEDS + ("two gpus", "criu", "root"))(
        lambda machine, name=one, words=way: every_call(machine, name, *words))


@case("sharing.nccl.all_calls", simulated=False, needs=NEEDS + ("two gpus", "criu", "root"))
def all_calls(machine):
    """All-gather, send and receive, and communicators that come and go between the suspends."""
    target = ranks_of(machine, "all_calls", "--all-calls")
    figures = there_and_back(machine, target, CYCLES, DUMPS, lambda: target.wait_rounds(7))
    figures["note"] = f"{CYCLES} cycles, {DUMPS} dumps, {target.finish()} rounds; {summary(figures)}"
    return figures


@case("sharing.nccl.goes_on", simulated=False, needs=NEEDS + ("two gpus", "criu", "root"))
def goes_on(machine):
    """Saved while it goes on, the first time with a pre-copy; the last of these images then holds what the job had."""
    target = ranks_of(machine, "goes_on", "--gib", "2")
    still, precopied = [], []
    for number in range(3):
        words = ["--images-dir", os.path.join(machine.work, f"image{number}"), "--sync", "none", "--leave-running"]
        words += ["--base", os.path.join(machine.work, f"image{number - 1}")] if number else []
        report = machine.stasis("dump", target.pid, *words, "--json", timeout=180).must_succeed().json()
        still.append(report["standstill_seconds"])
        precopied.append(any(phase["name"] == "GPU pre-copy" for phase in report["phases"]))
        target.wait_rounds(3)
    expect(precopied[0], "nothing was pre-copied of the first save")
    target.kill()
    target.forget_exit()
    machine.stasis("restore", "--images-dir", os.path.join(machine.work, "image2"), "--detach").must_succeed()
    target.wait_rounds(3)
    return {"standstill_seconds": still,
            "note": f"stands still for {still[0]:.2f} s, later {statistics.median(still[1:]):.2f} s; "
                    f"{target.finish()} rounds"}


@case("sharing.device_map", simulated=False, needs=NEEDS + ("two gpus", "criu", "root"))
def device_map(machine):
    """The two ranks change places, at a resume and at a restore."""
    _, _, pairs = swap(machine)
    target = ranks_of(machine, "device_map")
    machine.stasis("suspend", target.pid).must_succeed()
    machine.stasis("resume", target.pid, "--device-map", pairs).must_succeed()
    target.wait_rounds(2)
    images = os.path.join(machine.work, "image")
    machine.stasis("dump", target.pid, "--images-dir", images).must_succeed()
    target.forget_exit()
    machine.stasis("restore", "--images-dir", images, "--detach", "--device-map", pairs).must_succeed()
    target.wait_rounds(2)
    return {"note": f"there and back, {target.finish()} rounds of sums"}


@case("sharing.killed", simulated=False, needs=NEEDS + ("two gpus", "root"))
def killed(machine):
    """The tool is killed at ten moments of a suspend and of a resume; `recover` makes the job run."""
    target = ranks_of(machine, "killed")
    moments = [0.05 * number for number in range(1, 11)]
    states = []
    for verb in ("suspend", "resume"):
        for moment in moments:
            if verb == "resume":
                machine.stasis("suspend", target.pid).must_succeed()
            machine.run("timeout", "-s", "KILL", str(moment), machine.program("stasis"), verb, target.pid)
            recovered = machine.stasis("recover", "--all", timeout=120).must_succeed()
            states.append("nothing to recover" in recovered.out + recovered.err)
            machine.stasis("resume", target.pid, timeout=120)
            target.wait_rounds(2)
    return {"note": f"{len(states)} kills, {len(states) - sum(states)} of them with something to recover; "
                    f"{target.finish()} rounds of sums"}


@case("sharing.downtime", simulated=False, needs=NEEDS + ("two gpus",))
def downtime(machine):
    """Two ranks of 8 GiB each against one of them."""
    figures, medians = {}, {}
    for ranks in (1, 2):
        target = ranks_of(machine, f"ranks{ranks}", "--gib", "8", ranks=ranks)
        cycle(machine, target, new_figures())
        stood, phases = [], {"suspend": {}, "resume": {}}

        def traced(verb, times):
            trace = os.path.join(machine.out, f"{verb}.{ranks}.trace.json")
            report = machine.stasis(verb, target.pid, "--json", "--trace", trace, timeout=120).must_succeed().json()
            for phase in report["phases"]:
                times.setdefault(phase["name"], []).append(phase["seconds"])
            return report
        for _ in range(FEWER):
            stood.append(traced("suspend", phases["suspend"])["standstill_seconds"])
            stood[-1] += traced("resume", phases["resume"])["seconds"]
            target.wait_rounds(2)
        target.finish()
        figures[f"ranks{ranks}_seconds"] = stood
        figures[f"ranks{ranks}_phases"] = {verb: {name: statistics.median(seconds) for name, seconds in times.items()}
                                           for verb, times in phases.items()}
        medians[ranks] = statistics.median(stood)
    ratio = medians[2] / medians[1]
    figures.update({"ratio": ratio, "note": f"away for {medians[1]:.2f} s with one, {medians[2]:.2f} s with two: "
                                            f"{ratio:.2f}"})
    expect(ratio <= MOST_DOWNTIME, "over the target: " + figures["note"], figures)
    return figures


def ended(target):
    target.wait_ended(300)
    if target.exit_status != 0 or "trained" not in target.output():
        raise Failure(f"{target.name} ended with status {target.exit_status}: {target.output()[-200:]}")


def torchrun_of(kind, path, ranks, steps):
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", "29577",
            os.path.join(HERE, "train_ranks.py"), kind, path, str(steps)]


def trained(machine, kind, disturb, ranks=2, steps=400):
    name = f"{kind}.{'disturbed' if disturb else 'undisturbed'}"
    path = os.path.join(machine.work, name + ".losses")
    target = under_agent(machine, name, torchrun_of(kind, path, ranks, steps))
    target.losses = path + ".0"

    def further():
        have = len(losses(target))
        target.wait_for(lambda: len(losses(target)) >= have + 3, f"step {have + 3}", timeout=180)
    further()
    figures = there_and_back(machine, target, FEWER, 1, further) if disturb else {}
    ended(target)
    found = losses(target)
    expect(list(found) == list(range(1, steps + 1)), f"{name}: steps are missing or repeated")
    return found, figures


@case("sharing.torchrun", simulated=False, needs=NEEDS + ("two gpus", "criu", "root"))
def torchrun(machine):
    """Losses equal in every bit to those of an undisturbed run."""
    figures = {"torch": require_torch(machine)}
    for kind in ("ddp", "fsdp"):
        wanted, _ = trained(machine, kind, False)
        found, figures[kind] = trained(machine, kind, True)
        expect(found == wanted, f"{kind}: the losses differ")
    figures["note"] = f"DDP and FSDP, {FEWER} cycles and a dump each: 400 losses equal in every bit"
    return figures


@case("sharing.events", simulated=False, needs=NEEDS + ("criu", "root"))
def events(machine):
    """Two processes wait for each other's work by events of CUDA IPC."""
    require_torch(machine)
    target = under_agent(machine, "events", [sys.executable, os.path.join(HERE, "events.py"), "{status}"])
    target.wait_rounds(3, timeout=180)
    figures = there_and_back(machine, target, FEWER, 3, lambda: target.wait_rounds(3))
    figures["note"] = f"{FEWER} cycles, 3 dumps, {target.finish()} rounds; {summary(figures)}"
    return figures


@case("sharing.orphans", needs=NEEDS + ("criu", "root"))
def orphans(machine, **settings):
    """Processes go on with memory whose owner has ended, or has freed it: each round wants every other's words."""
    figures = {}
    for way in ("ends", "frees"):
        target = under_agent(machine, f"orphans.{way}",
                             [sys.executable, os.path.join(HERE, "orphans.py"), "{status}", way, "3"], settings)
        target.wait_rounds(3, timeout=120)
        figures[way] = there_and_back(machine, target, FEWER, 2, lambda of=target: of.wait_rounds(3))
        figures[way]["rounds"] = target.finish()
    figures["note"] = f"{FEWER} cycles and 2 dumps each, by descriptors (device and host) and by CUDA IPC"
    return figures


# Each process sees one of the GPUs alone.
case("sharing.orphans.one_gpu_each", needs=NEEDS + ("two gpus", "criu", "root"))(
    lambda machine: orphans(machine, ONE_OF_SO_MANY_GPUS="2"))


def tensors(machine, gpu, mib=32):
    """Two processes hand each other tensors of PyTorch, in both directions; the second makes its own on `gpu`."""
    require_torch(machine)
    target = under_agent(machine, "tensors", [sys.executable, os.path.join(HERE, "tensors.py"), "{status}", str(gpu),
                                              str(mib)])
    target.wait_rounds(3, timeout=180)
    figures = there_and_back(machine, target, 20, 3, lambda: target.wait_rounds(2))
    rounds = target.finish()
    figures["note"] = f"20 cycles, 3 dumps, {rounds} rounds"
    return figures


case("sharing.tensors", simulated=False, needs=NEEDS + ("criu", "root"))(lambda machine: tensors(machine, 0))
# What the driver's restore makes it may not give out again from 512 MiB on.
case("sharing.tensors.large", simulated=False, needs=NEEDS + ("criu", "root"))(lambda machine: tensors(machine, 0, 768))
case("sharing.tensors.two_gpus", simulated=False, needs=NEEDS + ("two gpus", "criu", "root"))(
    lambda machine: tensors(machine, 1))


@case("sharing.torchrun.job", simulated=False, needs=NEEDS + ("two gpus", "criu", "root"))
def torchrun_job(machine):
    """torchrun under `stasis run --images-dir`, preempted three times; no option for its io_uring or its connections."""
    version, steps = require_torch(machine), 1000
    path = os.path.join(machine.work, "job.losses")

    def progress(target):
        target.losses = path + ".0"
        return len(losses(target))
    wanted, _ = trained(machine, "ddp", False, steps=steps)
    target, figures = preempted(machine, "torchrun", torchrun_of("ddp", path, 2, steps), progress, "3s", 10, 10)
    ended(target)
    expect(losses(target) == wanted, "the losses differ")
    figures.update({"torch": version, "note": f"{told(figures)}; {len(wanted)} losses equal in every bit"})
    return figures
