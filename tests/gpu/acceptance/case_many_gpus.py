"""Four and eight GPUs: NCCL with its defaults, torchrun, other GPUs, kills, and how the cost grows."""

import os
import signal
import statistics
import sys
import time

from .case_devices import holders
from .case_groups import ALLREDUCE, NEEDS, cycle, new_figures, summary
from .case_jobs import preempt, start
from .case_sharing import ranks_of, there_and_back, trained
from .case_torch import require_torch
from .core import Failure, case, expect, expect_equal

MANY = (4, 8)
# Suspends and dumps, by ranks: the driver takes its time for each rank after the other.
COUNTS = {4: (20, 5), 8: (8, 3)}
ROUNDS = 4
# More than pass between the starts of a suspend and the next: each of the tool takes a second or more there.
STEPS = 1500
# Of eight ranks to one's.
MOST_DOWNTIME = 1.5
SWAPS = 3
# What NCCL and the context take, and the ranks to verify.
GPU_RESERVE_GIB = 12


def needs(ranks):
    return NEEDS + (f"{ranks} gpus", "criu", "root")


def nccl(machine, ranks):
    """Every collective right through suspends and dumps."""
    target = ranks_of(machine, f"ranks{ranks}", "--all-calls", ranks=ranks)
    cycles, dumps = COUNTS[ranks]
    figures = there_and_back(machine, target, cycles, dumps, lambda: target.wait_rounds(3))
    medians = {name: statistics.median(figures[name + "_seconds"]) for name in ("suspend", "resume", "dump", "restore")}
    figures.update({"medians": medians, "note": (
        f"{cycles} cycles, {dumps} dumps, {target.finish()} rounds of sums; {summary(figures)}; "
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in medians.items()))})
    return figures


def downtime(machine, ranks, gib):
    """Where the time goes with that many ranks, of so much memory each."""
    machine.want_host_memory(ranks * gib << 30)
    target = ranks_of(machine, f"of{ranks}", "--gib", str(gib), ranks=ranks)
    cycle(machine, target, new_figures())  # the first touches host memory for the first time
    found = {"downtime_seconds": [], "suspend_seconds": [], "resume_seconds": [], "out": [], "in": []}
    for _ in range(ROUNDS):
        out = machine.stasis("suspend", target.pid, "--json", timeout=180).must_succeed().json()
        back = machine.stasis("resume", target.pid, "--json", timeout=180).must_succeed().json()
        found["downtime_seconds"].append(out["standstill_seconds"] + back["seconds"])
        found["suspend_seconds"].append(out["seconds"])
        found["resume_seconds"].append(back["seconds"])
        found["out"].append({phase["name"]: phase["seconds"] for phase in out["phases"]})
        found["in"].append({phase["name"]: phase["seconds"] for phase in back["phases"]})
        found["lock_tries"] = out["lock_tries"]
        target.wait_rounds(2)
    target.finish()
    return found


def training(machine, ranks):
    """Losses equal in every bit to those of an undisturbed run."""
    figures = {"torch": require_torch(machine)}
    for kind in ("ddp", "fsdp"):
        wanted, _ = trained(machine, kind, False, ranks, STEPS)
        found, figures[kind] = trained(machine, kind, True, ranks, STEPS)
        expect(found == wanted, f"{kind}: the losses differ")
    figures["note"] = f"DDP and FSDP, {len(wanted)} losses equal in every bit"
    return figures


for many in MANY:
    case(f"many.nccl.{many}", simulated=False, needs=needs(many))(lambda machine, ranks=many: nccl(machine, ranks))
    case(f"many.torchrun.{many}", simulated=False, needs=needs(many))(
        lambda machine, ranks=many: training(machine, ranks))


@case("many.growth", simulated=False, needs=needs(4))
def growth(machine):
    """1, 2, 4 and 8 ranks with 4 GiB each."""
    require_torch(machine)
    counts = [count for count in (1, 2, 4, 8) if count <= len(machine.gpus())]
    figures = {str(count): downtime(machine, count, 4) for count in counts}
    medians = [statistics.median(figures[str(count)]["downtime_seconds"]) for count in counts]
    ratio = medians[-1] / medians[0]
    figures.update({"ratio": ratio, "note": "away for " + ", ".join(
        f"{seconds:.2f} s with {count}" for count, seconds in zip(counts, medians)) + f": {ratio:.2f} times"})
    expect(ratio <= MOST_DOWNTIME, "over the target: " + figures["note"], figures)
    return figures


@case("many.other_half", simulated=False, needs=needs(4))
def other_half(machine):
    """A job on half of the GPUs goes on on the other half, chosen by itself, as its own are taken."""
    require_torch(machine)
    before = machine.gpu_memory()
    half = min(len(machine.gpus()), 8) // 2
    uuids = [gpu["uuid"] for gpu in machine.gpus()][:2 * half]

    def job():
        return start(machine, "half", [sys.executable, ALLREDUCE, "--status", "{status}", "--ranks", str(half),
                                       "--mib", "16", "--gib", "4", "--pause-ms", "2"], "--no-io-uring")
    target = job()
    target.wait_rounds(3, timeout=180)
    expect_equal(holders(machine, before), set(uuids[:half]), "GPUs of the job")
    preempt(machine, target)
    rounds = target.rounds()
    machine.expect_gpu_free(before)
    free = machine.run("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", "0").must_succeed()
    taken = [machine.workload("memory", "--size", f"{int(free.out) - 3072}M", "--pause-ms", "1000", name=f"taken{number}",
                              env={**machine.target_env(), "CUDA_VISIBLE_DEVICES": str(number)}) for number in range(half)]
    for one in taken:
        one.wait_rounds(1, timeout=120)
    target = job()
    target.wait_for(lambda: target.rounds() > rounds + 3, "round after the restore", 180)
    expect_equal(holders(machine, before), set(uuids), "GPUs in use")
    for one in taken:
        one.kill()
    preempt(machine, target)
    return {"note": f"went on on the other {half} of {2 * half}; {target.rounds()} rounds of sums"}


@case("many.swap", simulated=False, needs=needs(4))
def swap(machine):
    """Two jobs of four ranks take turns on the same GPUs."""
    first = ranks_of(machine, "first", "--gib", "4", ranks=4)
    machine.stasis("suspend", first.pid).must_succeed()
    second = ranks_of(machine, "second", "--gib", "4", ranks=4)
    seconds = []
    for _ in range(SWAPS):
        for out, back in ((second, first), (first, second)):
            report = machine.stasis("swap", out.pid, back.pid, "--json", timeout=180).must_succeed()
            seconds.append(report.seconds)
            back.wait_rounds(2)
    machine.stasis("suspend", second.pid).must_succeed()
    machine.stasis("resume", first.pid).must_succeed()
    rounds = [first.finish()]
    machine.stasis("resume", second.pid).must_succeed()
    rounds.append(second.finish())
    return {"seconds": seconds, "note": f"{len(seconds)} swaps of {statistics.median(seconds):.2f} s; rounds {rounds}"}


@case("many.killed", simulated=False, needs=needs(4))
def killed(machine):
    """The tool, then a mover, is killed in the middle: the job goes on, or `recover` brings it back."""
    target = ranks_of(machine, "killed", "--gib", "4", ranks=min(len(machine.gpus()), 8))
    told = []
    for victim in ("tool", "mover"):
        for verb in ("suspend", "resume"):
            for moment in (0.7, 2.5):
                if verb == "resume":
                    machine.stasis("suspend", target.pid, timeout=120).must_succeed()
                if victim == "tool":
                    machine.run("timeout", "-s", "KILL", str(moment), machine.program("stasis"), verb, target.pid)
                else:
                    machine.run("sh", "-c", f"{machine.program('stasis')} {verb} {target.pid} & tool=$!; "
                                f"sleep {moment}; pkill -9 -o -P $tool; wait $tool", timeout=180)
                recovered = machine.stasis("recover", "--all", timeout=180)
                if recovered.status != 0:
                    time.sleep(2)
                    raise Failure(f"{victim} killed {moment} s into {verb}: recover {recovered.status}: "
                                  f"{recovered.err[-300:]}; the job says: {target.output()[-1500:]}")
                told.append("nothing to recover" not in recovered.out + recovered.err)
                machine.stasis("resume", target.pid, timeout=180)
                target.wait_rounds(2)
    return {"note": f"{len(told)} kills, {sum(told)} with something to recover; {target.finish()} rounds of sums"}


@case("many.rank_killed", simulated=False, needs=needs(4))
def rank_killed(machine):
    """A rank dies while the job is suspended: the others come back, and the job ends as NCCL's jobs do."""
    ranks = min(len(machine.gpus()), 8)
    target = ranks_of(machine, "rank_killed", ranks=ranks)
    machine.stasis("suspend", target.pid, timeout=120).must_succeed()
    victim = [pid for pid in target.tree() if pid != target.pid and "--rank" in command_of(pid)][-1]
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.5)
    resumed = machine.stasis("resume", target.pid, timeout=120)
    recovered = machine.stasis("recover", "--all", timeout=120)
    # The parent ends the others as soon as it runs.
    target.wait_ended(60)
    machine.expect_gpu_free({}, tolerance=2 << 30)
    return {"note": f"resume {resumed.status}: {resumed.first_error() or 'done'}; recover {recovered.status}; "
                    f"the job ended with {target.exit_status}, the GPUs are free"}


def host_gib():
    """Of memory; what STASIS_TEST_HOST_GIB says, where a virtual machine gets more as it is used."""
    with open("/proc/meminfo", encoding="ascii") as file:
        known = int(file.readline().split()[1]) >> 20
    return int(os.environ.get("STASIS_TEST_HOST_GIB", known))


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


@case("many.large", simulated=False, needs=needs(4))
def large(machine):
    """As much as fits host memory, by all ranks and by one: what each GPU copies a second beside the others."""
    ranks = min(len(machine.gpus()), 8)
    free = machine.run("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits").must_succeed().out
    gib = min(host_gib() * 3 // 4 // ranks, (min(map(int, free.split())) >> 10) - GPU_RESERVE_GIB)
    figures = {"nodes": machine.run("nvidia-smi", "topo", "-m").out, "one": downtime(machine, 1, gib),
               "all": downtime(machine, ranks, gib)}
    rates = {}
    for name, count in (("one", 1), ("all", ranks)):
        for way in ("out", "in"):
            seconds = statistics.median(phases[f"copy {way}"] for phases in figures[name][way])
            rates[f"{name}_{way}"] = count * gib / seconds
    away = {name: statistics.median(figures[name]["downtime_seconds"]) for name in ("one", "all")}
    figures.update({"gib": gib, "gib_per_second": rates, "note": (
        f"{ranks} ranks of {gib} GiB: away for {away['all']:.2f} s, one for {away['one']:.2f} s; copied in all "
        f"{rates['all_out']:.0f} GiB/s out and {rates['all_in']:.0f} in, by one {rates['one_out']:.0f} and "
        f"{rates['one_in']:.0f}")})
    return figures
