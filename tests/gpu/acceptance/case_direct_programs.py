"""The direct path under programs that are hard on it: frameworks, many threads, much memory, two GPUs."""

import json
import os
import shutil
import statistics
import sys
import time

from . import case_torch
from .case_direct import resume, run_under_agent, start, suspend
from .case_groups import ALLREDUCE, TRANSPORTS
from .core import Failure, Skip, case, expect, expect_equal
from .machine import Machine
from .targets import Target

GPU_TESTS = os.path.dirname(case_torch.TRAIN)
LOOPS = os.path.join(GPU_TESTS, "loops.py")
NEEDS = ("program stasis", "program stasis-workload")
DUMPS = ("criu", "root")
CYCLES, DUMP_CYCLES = 20, 5


def dump_and_restore(machine, target, figures, *options):
    """By the direct path, and back; the image is removed."""
    images = os.path.join(machine.work, "image")
    dump = machine.stasis("dump", target.pid, "--images-dir", images, "--sync", "none", "--json", *options)
    if dump.status != 0:
        raise Failure(f"{dump.brief()}; the target's last words: {target.output()[-1500:]}")
    report = dump.json()
    target.forget_exit()
    size = sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(images) for name in names)
    restore = machine.stasis("restore", "--images-dir", images, "--detach", "--json").must_succeed().json()
    shutil.rmtree(images)
    for verb, said in (("dump", report), ("restore", restore)):
        figures.setdefault(f"{verb}_seconds", []).append(said["seconds"])
        figures.setdefault(f"{verb}_phases", []).append({p["name"]: p["seconds"] for p in said["phases"]})
    figures.setdefault("dump_paths", []).append(report["path"])
    figures.setdefault("image_bytes", []).append(size)


def medians(figures):
    names = ("suspend", "standstill", "resume", "dump", "restore")
    found = [f"{name} {statistics.median(figures[f'{name}_seconds']):.2f} s"
             for name in names if figures.get(f"{name}_seconds")]
    return ", ".join(found)


def through_everything(machine, target, progress, more=5, cycles=CYCLES, dumps=DUMP_CYCLES, dump_options=()):
    """Suspends and dumps, all by the direct path. progress() counts what the program has done: nothing while it is
    suspended, and `more` after each."""
    figures = {"paths": []}

    def go_on():
        wanted = progress() + more
        target.wait_for(lambda: progress() >= wanted, f"step {wanted}", timeout=120)

    for _ in range(cycles):
        figures["paths"].append(suspend(machine, target, figures)["path"])
        held = progress()
        time.sleep(0.1)
        expect_equal(progress(), held, "what it has done, while suspended")
        resume(machine, target, figures)
        go_on()
    for _ in range(dumps):
        dump_and_restore(machine, target, figures, *dump_options)
        go_on()
    taken = set(figures["paths"] + figures.get("dump_paths", []))
    if taken - {"direct"}:
        raise Failure(f"paths taken: {', '.join(sorted(taken))}", figures)
    return figures


# --- PyTorch: as a run that nothing disturbs, bit by bit

def torch_steps(target):
    return len(case_torch.losses(target))


def finish_training(target):
    target.wait_ended(120)
    said = target.output().strip().splitlines() or ["nothing"]
    if target.exit_status != 0 or not any(line.startswith("trained") for line in said):
        raise Failure(f"{target.name} ended with status {target.exit_status}; it said: {said[-1]}")
    return case_torch.losses(target)


def train(machine, how, gib, env=None, attach=None):
    """With `attach`, the program begins without the agent, and that gives it one."""
    version = case_torch.require_torch(machine)
    env = {**machine.target_env(), "TORCHINDUCTOR_COMPILE_THREADS": "1",
           "TORCHINDUCTOR_CACHE_DIR": os.path.join(machine.work, "compiled"), **(env or {})}

    def argv(name, *options):
        return [sys.executable, case_torch.TRAIN, "--losses", os.path.join(machine.work, name + ".losses"), "--gib", gib,
                *how, *options]

    begin = Target if attach else run_under_agent
    target = begin(machine, list(map(str, argv("disturbed", "--steps", 1000000, "--pause-ms", 20))), "disturbed", env)
    target.losses = os.path.join(machine.work, "disturbed.losses")
    case_torch.wait_step(target, 20)
    attached = {"attach": attach(machine, target.pid)} if attach else {}
    figures = {**attached, **through_everything(machine, target, lambda: torch_steps(target))}
    os.kill(target.pid, 15)
    found = finish_training(target)
    # Without the agent too: what it serves must not change a bit.
    alone = Target(machine, list(map(str, argv("alone", "--steps", len(found)))), "alone", env)
    alone.losses = os.path.join(machine.work, "alone.losses")
    wanted = finish_training(alone)
    expect_equal(list(found), list(wanted), "steps")
    different = [step for step in wanted if found[step] != wanted[step]]
    expect(not different, f"{len(different)} of {len(wanted)} losses differ from those of a run that nothing disturbs, "
                          f"the first at step {different[:1]}")
    expect(len(set(wanted.values())) > len(wanted) // 2, "the losses hardly change")
    figures.update({"torch": version, "steps": len(wanted), "first_loss": found[1], "last_loss": found[len(found)]})
    figures["note"] = (f"{len(wanted)} losses, all bits equal; {figures['direct_bytes'] / 2**30:.1f} GiB; "
                       f"{medians(figures)}")
    return figures


case("direct.torch.native", simulated=False, needs=NEEDS + DUMPS)(lambda machine: train(machine, [], 8))
case("direct.torch.expandable", simulated=False, needs=NEEDS + DUMPS)(
    lambda machine: train(machine, [], 8, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}))
case("direct.torch.graphs", simulated=False, needs=NEEDS + DUMPS)(lambda machine: train(machine, ["--graphs"], 2))
case("direct.torch.compile", simulated=False, needs=NEEDS + DUMPS)(lambda machine: train(machine, ["--compile"], 1))


# --- Jobs of two ranks, each with a GPU, by NCCL

@case("direct.torch.ddp", simulated=False, needs=NEEDS + DUMPS + ("two gpus",))
def ddp(machine):
    """Started by torchrun, with DistributedDataParallel: the losses of a run that nothing disturbs."""
    version = case_torch.require_torch(machine)
    env = {**machine.target_env(), **TRANSPORTS["shared_memory"]}
    steps = 300

    def argv(name, *options):
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", case_torch.TRAIN,
                "--losses", os.path.join(machine.work, name + ".losses"), "--gib", "4", "--steps", str(steps), "--ddp",
                *options]

    # torchrun's store uses libuv, which would have an io_uring.
    target = run_under_agent(machine, argv("disturbed", "--pause-ms", "100"), "disturbed", env, ["--no-io-uring"])
    target.losses = os.path.join(machine.work, "disturbed.losses")
    case_torch.wait_step(target, 10)

    figures = through_everything(machine, target, lambda: torch_steps(target), dump_options=["--tcp-established"])
    found = finish_training(target)
    alone = Target(machine, argv("alone"), "alone", env)
    alone.losses = os.path.join(machine.work, "alone.losses")
    wanted = finish_training(alone)
    different = [step for step in range(1, steps + 1) if found.get(step) != wanted.get(step)]
    expect(not different, f"{len(different)} of {steps} losses differ from those of a run that nothing disturbs, "
                          f"the first at step {different[:1]}")
    figures.update({"torch": version, "steps": steps, "first_loss": found[1], "last_loss": found[steps]})
    figures["note"] = (f"{steps} losses, all bits equal; {figures['direct_bytes'] / 2**30:.1f} GiB; {medians(figures)}")
    return figures


def nccl(machine, transport):
    """Sums of 512 MiB over both ranks, all of them verified."""
    version = case_torch.require_torch(machine)
    target = run_under_agent(machine, [sys.executable, ALLREDUCE, "--status", "{status}", "--ranks", 2, "--mib", 256,
                                       "--pause-ms", 2], transport, {**machine.target_env(), **TRANSPORTS[transport]})
    target.wait_rounds(3, timeout=180)
    figures = through_everything(machine, target, target.rounds, 2, dump_options=["--tcp-established"])
    rounds = target.finish()
    figures["torch"] = version
    figures["note"] = f"{rounds} rounds of sums; {figures['direct_bytes'] / 2**30:.1f} GiB; {medians(figures)}"
    return figures


for one in TRANSPORTS:
    case(f"direct.nccl.{one}", simulated=False, needs=NEEDS + DUMPS + ("two gpus",))(
        lambda machine, transport=one: nccl(machine, transport))


# --- JAX, CuPy, Numba and Transformers: loops that verify themselves

def framework(machine, kind, gib, rounds_before=5, env=None, options=(), attach=None, more=5):
    words = [sys.executable, LOOPS, kind, "--status", "{status}", "--gib", str(gib), *options]
    begin = Target if attach else run_under_agent
    target = begin(machine, words, kind, {**machine.target_env(), **(env or {})})
    try:
        target.wait_rounds(rounds_before)
    except Failure as reason:
        raise Failure(f"before the first suspend: {reason}") from reason
    attached = {"attach": attach(machine, target.pid)} if attach else {}
    figures = {**attached, **through_everything(machine, target, target.rounds, more)}
    rounds = target.finish()
    figures["note"] = (f"{target.output().splitlines()[0]}: {rounds} rounds verified, "
                       f"{figures['direct_bytes'] / 2**30:.1f} GiB; {medians(figures)}")
    return figures


# Two laps first: whether it gives the same losses again is JAX's own affair until then.
case("direct.jax.on_demand", simulated=False, needs=NEEDS + DUMPS)(
    lambda machine: framework(machine, "jax", 2, 55, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}))
case("direct.jax.preallocated", simulated=False, needs=NEEDS + DUMPS)(
    lambda machine: framework(machine, "jax", 2, 55, {"XLA_CLIENT_MEM_FRACTION": "0.05"}))
# From the driver's own pool, stream by stream.
case("direct.jax.cuda_async", simulated=False, needs=NEEDS + DUMPS)(
    lambda machine: framework(machine, "jax", 2, 55, {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}))
# Three quarters of the GPU, as JAX takes them by itself.
case("direct.jax.default", simulated=False, needs=NEEDS + DUMPS)(lambda machine: framework(machine, "jax", 2, 55))
for one in ("cupy", "numba", "transformers", "server"):
    case(f"direct.{one}", simulated=False, needs=NEEDS + DUMPS)(
        lambda machine, kind=one: framework(machine, kind, 2))


# --- Programs of driver calls

@case("direct.alloc_cycles", needs=NEEDS)
def alloc_cycles(machine):
    """Threads that allocate and free all the time, suspended and resumed again and again."""
    count = 8 if machine.simulated else 50
    options = ["--threads", "3" if machine.simulated else "8", "--pause-ms", "5",
               "--size", "96M" if machine.simulated else "2G"]
    target = start(machine, "churn", options)
    figures = {}
    for _ in range(count):
        suspend(machine, target, figures, "direct")
        resume(machine, target, figures, "direct")
        target.wait_rounds(1)
    rounds = target.finish()
    figures["note"] = f"{count} cycles, {rounds} rounds verified; {medians(figures)}"
    return figures


@case("direct.torture.60", needs=NEEDS + DUMPS)
def torture(machine):
    """60 GiB in hundreds of allocations, every word of it checked on the GPU after each step."""
    size = "256M" if machine.simulated else "60G"
    figures = {"size": size, "host_memory_seconds": machine.want_host_memory(64 << 30)}
    target = start(machine, "torture", ["--size", size], name="unique")
    for _ in range(2):
        suspend(machine, target, figures, "direct")
        resume(machine, target, figures, "direct")
        target.wait_rounds(2)
    allocations = target.output().splitlines()[0]
    rounds = target.finish()
    # In the dump every content is there four times, and in the image once: that fits a common disk.
    target = start(machine, "torture", ["--size", size, "--copies", "4"], name="copies")
    need = (15 << 30) * 5 // 4
    if not machine.simulated and shutil.disk_usage(machine.work).free < need:
        figures["dump"] = f"left out: less than {need >> 30} GiB free in {machine.work}"
    else:
        dump_and_restore(machine, target, figures, "--path", "direct")
        target.wait_rounds(2)
    rounds += target.finish()
    figures["note"] = f"{size}, {allocations}, {rounds} rounds verified; {medians(figures)}; {figures.get('dump', '')}"
    return figures


@case("direct.peer", needs=NEEDS + DUMPS + ("two gpus",))
def peer(machine):
    """Two GPUs that work on each other's memory."""
    target = start(machine, "peer", ["--size", "96M" if machine.simulated else "2G"])
    figures = through_everything(machine, target, target.rounds, 5, 2 if machine.simulated else 5, 2)
    figures["note"] = f"{target.finish()} rounds verified; {medians(figures)}"
    return figures


# --- PyTorch's own tests, the same with the agent and without

SELECTION = ("(memory or alloc or pool or segment or snapshot or out_of_memory or graph_capture or graph_memory or "
             "BlockState or caching) and not (optim or autocast or slow or multi_gpu)")


def own_tests(machine: Machine, path, name, prefix, seconds):
    """{test: outcome} of those that ended in time, and how often one of them ended pytest itself."""
    report = os.path.join(machine.work, name + ".jsonl")
    folder = os.path.dirname(os.path.abspath(path))
    env = {**machine.env, "STASIS_TEST_REPORT": report, "PYTHONDONTWRITEBYTECODE": "1",
           "PYTHONPATH": os.pathsep.join(filter(None, [GPU_TESTS, folder, machine.env.get("PYTHONPATH")]))}
    selection = os.environ.get("STASIS_PYTORCH_SELECTION", SELECTION)
    begun = time.monotonic()
    crashes = 0
    while True:
        done = machine.run(*prefix, sys.executable, "-m", "pytest", path, "-q", "-p", "report_each",
                           "-p", "no:cacheprovider", "--rootdir", folder, "-k", selection,
                           timeout=max(1.0, begun + seconds - time.monotonic()), env=env)
        if not os.path.exists(report):
            raise Skip(f"{path}: pytest ran no test: {' / '.join((done.out + done.err).strip().splitlines()[-4:])}")
        if done.status is None or done.status >= 0:
            break
        crashes += 1  # and on, without that one
    with open(report, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    outcomes = {line["test"]: line["outcome"] for line in lines}
    if done.status is None and lines[-1]["outcome"] == "begun":
        outcomes.pop(lines[-1]["test"])
    return {test: "ended pytest" if outcome == "begun" else outcome for test, outcome in outcomes.items()}, crashes, done


@case("direct.torch.own_tests", simulated=False, needs=("program stasis",))
def torch_own_tests(machine):
    """PyTorch's tests of its allocator ($STASIS_PYTORCH_TESTS, its test_cuda.py) have the same results under the agent."""
    path = os.environ.get("STASIS_PYTORCH_TESTS")
    if not path:
        raise Skip("STASIS_PYTORCH_TESTS does not name PyTorch's test_cuda.py")
    version = case_torch.require_torch(machine)
    seconds = float(os.environ.get("STASIS_PYTORCH_SECONDS", "60"))
    without, crashes, first = own_tests(machine, path, "without", [], seconds)
    with_agent, crashes_with, second = own_tests(machine, path, "with", [machine.program("stasis"), "run", "--"], seconds)
    both = without.keys() & with_agent.keys()
    different = {test: [without[test], with_agent[test]] for test in sorted(both) if without[test] != with_agent[test]}
    passed = sum(without[test] == with_agent[test] == "passed" for test in both)
    figures = {"torch": version, "compared": len(both), "passed_in_both": passed, "different": different,
               **{f"{outcome.replace(' ', '_')}_in_both": sorted(
                   t for t in both if without[t] == with_agent[t] == outcome) for outcome in ("failed", "ended pytest")},
               "skipped_in_both": sum(without[t] == with_agent[t] == "skipped" for t in both),
               "only_without": sorted(without.keys() - both), "only_with": sorted(with_agent.keys() - both),
               "crashes": [crashes, crashes_with], "status": [first.status, second.status]}
    ended = "" if None not in figures["status"] else f" (not all ended within {seconds:.0f} s)"
    note = f"{len(both)} tests compared{ended}: {passed} pass in both"
    if different or passed == 0:
        raise Failure(f"{note}; {len(different)} differ: {list(different.items())[:3]}", figures)
    figures["note"] = note
    return figures
