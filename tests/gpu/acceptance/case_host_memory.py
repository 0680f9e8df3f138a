"""Large host memory, past CRIU and through it: right, and how long each takes."""

import glob
import os
import re
import shutil
import statistics
import sys
import threading

from . import plain_criu
from .case_torch import require_torch
from .core import case, expect, expect_equal
from .targets import Target

NEEDS = ("program stasis", "program stasis-workload", "criu", "root")
WAYS = ("criu", "parallel")
PINNED = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "pinned.py")


def start(machine, name, size, agent, kind):
    own = ["memory"] if kind == "memory" else ["host", "--threads", str(os.cpu_count())]
    words = [machine.program("stasis-workload"), *own, "--status", "{status}", "--size", size, "--pause-ms", "200"]
    return Target(machine, [machine.program("stasis"), "run", "--", *words] if agent else words, name)


def by_name(figures):
    """JSON has no other keys."""
    return {str(key): value for key, value in figures.items()}


def phase(report, name):
    return sum(p["seconds"] for p in report["phases"] if p["name"] == name)


class Peak:
    """The most memory, in bytes, that our tools and criu have at a time while this is entered; shared memory counts once."""

    PROGRAMS = ("stasis", "stasis-mover", "criu")

    def __enter__(self):
        self.bytes, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def look(self):
        while not self.ended.wait(0.02):
            now = 0
            for path in glob.glob("/proc/[0-9]*/comm"):
                try:
                    with open(path, encoding="ascii", errors="replace") as comm:
                        if comm.read().strip() not in self.PROGRAMS:
                            continue
                    with open(os.path.dirname(path) + "/smaps_rollup", encoding="ascii") as rollup:
                        now += sum(int(kib) << 10 for kib in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", rollup.read(), re.M))
                except OSError:
                    continue
            self.bytes = max(self.bytes, now)


def compare(machine, kind, gib, agent, rounds):
    """Both ways in turn on one program, which verifies all of its memory after each restore."""
    size = "128M" if machine.simulated else f"{gib}G"
    target = start(machine, kind, size, agent, kind)
    target.wait_rounds(1)
    seconds = {}
    phases = []
    for _ in range(rounds):
        for way in WAYS:
            image = os.path.join(machine.work, "image")
            shutil.rmtree(image, ignore_errors=True)
            dumped = machine.stasis("dump", target.pid, "--images-dir", image, "--sync", "none", "--host-memory", way,
                                    "--json").must_succeed().json()
            target.forget_exit()
            looked = machine.stasis("verify", "--images-dir", image, "--json").must_succeed().json()
            expect_equal(looked["host_content"] is not None, way == "parallel", "host content in the image")
            restored = machine.stasis("restore", "--images-dir", image, "--detach", "--json").must_succeed().json()
            target.wait_rounds(1)
            for verb, report in (("dump", dumped), ("restore", restored)):
                seconds.setdefault(f"{verb} {way}", []).append(report["seconds"])
            moved = phase(dumped, "criu") + phase(dumped, "host memory")
            phases.append({"way": way, "dump": dumped["phases"], "restore": restored["phases"], "moved_s": moved})
    verified = target.finish()
    expect(verified > 0, "no round was verified")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"size": size, "agent": agent, "seconds": seconds, "medians": medians, "phases": phases,
            "note": (f"{size}: dump {medians['dump criu']:.2f} s by CRIU, {medians['dump parallel']:.2f} s past it; "
                     f"restore {medians['restore criu']:.2f} s, {medians['restore parallel']:.2f} s")}


@case("host_memory.suspended", needs=NEEDS)
def suspended(machine):
    """A suspended program: dump and restore beside criu's own of the same program, in turn."""
    size = os.environ.get("STASIS_TEST_HOST_MEMORY") or ("128M" if machine.simulated else "4G")
    target = start(machine, "suspended", size, False, "host")
    target.wait_rounds(1)
    machine.stasis("suspend", target.pid).must_succeed()
    none, images = plain_criu.no_plugins(machine), os.path.join(machine.work, "images")
    seconds = {"criu dump": [], "dump": [], "criu restore": [], "restore": []}
    most = 0
    for _ in range(3):
        # The first asks for what the driver has in the program as the other does: neither has it in a cache before.
        seconds["criu dump"].append(plain_criu.dump(machine, target.pid, images, none).seconds)
        target.forget_exit()
        seconds["criu restore"].append(plain_criu.restore(machine, images, none).seconds)
        shutil.rmtree(images)
        with Peak() as peak:
            dumped = machine.stasis("dump", target.pid, "--images-dir", images, "--sync", "none").must_succeed()
        target.forget_exit()
        seconds["dump"].append(dumped.seconds)
        seconds["restore"].append(machine.stasis("restore", "--images-dir", images, "--detach", "--leave-suspended")
                                  .must_succeed().seconds)
        shutil.rmtree(images)
        most = max(most, peak.bytes)
    machine.stasis("resume", target.pid).must_succeed()
    target.wait_rounds(1)
    expect(target.finish() > 0, "no round was verified")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {verb: middle["criu " + verb] / middle[verb] for verb in ("dump", "restore")}
    return {"size": size, "seconds": seconds, "ratios": ratios, "peak_bytes": most,
            "note": (f"{size}: dump {middle['dump']:.2f} s, {ratios['dump']:.1f} times as fast as criu's; restore "
                     f"{middle['restore']:.2f} s, {ratios['restore']:.1f} times; {most >> 20} MiB besides")}


case("host_memory.agent", needs=NEEDS)(lambda machine: compare(machine, "host", 12, True, 2))
case("host_memory.driver", needs=NEEDS)(lambda machine: compare(machine, "memory", 8, False, 2))


LATER = 3


def comes_back(machine, target, image):
    """The job is killed and restored from what was saved of it while it ran, and verifies what it has then."""
    target.kill()
    target.forget_exit()
    report = machine.stasis("restore", "--images-dir", image, "--detach", "--json").must_succeed().json()
    target.wait_rounds(1)
    return report["seconds"]


@case("host_memory.large", needs=NEEDS)
def large(machine):
    """12 GiB of the host and 2 GiB on the GPU: dumped and restored, then saved while it goes on; before each save but the
    first it has written three 64ths of its host memory. What our programs take besides."""
    size, on_gpu = ("128M", "16M") if machine.simulated else ("12G", "2G")
    anew, pause = 3, 500 if machine.simulated else 6000
    own = ["host", "--threads", str(os.cpu_count()), "--size", size, "--still", on_gpu, "--anew", str(anew)]
    target = Target(machine, [machine.program("stasis"), "run", "--", machine.program("stasis-workload"), *own,
                              "--status", "{status}", "--pause-ms", str(pause)], "large")
    target.wait_rounds(1)
    seconds, most, phases = {"dump": [], "restore": []}, {}, {}

    def measured(name, *words):
        with Peak() as peak:
            report = machine.stasis(*words, "--json", timeout=180).must_succeed().json()
        most[name] = max(most.get(name, 0), peak.bytes)
        phases.setdefault(name, []).append({p["name"]: p["seconds"] for p in report["phases"]})
        return report

    for _ in range(2):
        image = os.path.join(machine.work, "image")
        shutil.rmtree(image, ignore_errors=True)
        seconds["dump"].append(measured("dump", "dump", target.pid, "--images-dir", image, "--sync", "none")["seconds"])
        target.forget_exit()
        seconds["restore"].append(measured("restore", "restore", "--images-dir", image, "--detach")["seconds"])
        target.wait_rounds(1)
    shutil.rmtree(image)
    still, written, changed = [], [], []
    before = target.rounds()
    for number in range(1 + LATER):
        image = os.path.join(machine.work, f"image{number}")
        base = ["--base", os.path.join(machine.work, f"image{number - 1}")] if number else []
        report = measured("dump --leave-running", "dump", target.pid, "--images-dir", image, "--sync", "none",
                          "--leave-running", *base)
        still.append(report["standstill_seconds"])
        written.append(bytes_of_its_own(image))
        changed.append(target.rounds() - before)
        before = target.rounds()
        target.wait_rounds(1)
    total = int(size[:-1]) << (30 if size[-1] == "G" else 20)
    expect(all(changed[1:]), f"rounds between the saves: {changed[1:]}")
    ratios = [wrote / (rounds * anew * total / 64) for wrote, rounds in zip(written[1:], changed[1:])]
    expect(machine.simulated or max(ratios) < 2, f"written in times of what changed: {ratios}")
    back = comes_back(machine, target, image)
    verified = target.finish()
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {"size": size, "on_gpu": on_gpu, "seconds": seconds, "standstill_seconds": still, "written_bytes": written,
            "rounds_between": changed, "written_by_changed": ratios, "peak_bytes": most, "phases": phases,
            "restore_of_precopied_seconds": back,
            "note": f"{size} and {on_gpu} on the GPU: dump {middle['dump']:.2f} s, restore {middle['restore']:.2f} s; saved and "
                    f"goes on: stands still {still[0]:.2f} s, later {statistics.median(still[1:]):.2f} s, written "
                    f"{statistics.median(ratios):.2f} times what changed; {max(most.values()) >> 20} MiB besides; "
                    f"{verified} rounds"}


@case("host_memory.pinned", needs=NEEDS)
def pinned(machine):
    """Memory of cuMemAllocHost, cuMemHostAlloc and cuMemHostRegister: how much of it goes past CRIU."""
    size = "96M" if machine.simulated else "4G"
    target = Target(machine, [machine.program("stasis"), "run", "--", machine.program("stasis-workload"), "pinned", "--status",
                              "{status}", "--size", size, "--pause-ms", "200"], "pinned")
    target.wait_rounds(1)
    seconds, past, rest = {"dump": [], "restore": []}, 0, 0
    for _ in range(2):
        image = os.path.join(machine.work, "image")
        shutil.rmtree(image, ignore_errors=True)
        words = ("dump", target.pid, "--images-dir", image, "--sync", "none", "--json")
        seconds["dump"].append(machine.stasis(*words, timeout=180).must_succeed().json()["seconds"])
        target.forget_exit()
        past = sum(os.path.getsize(os.path.join(folder, name))
                   for folder, _, names in os.walk(os.path.join(image, "host")) for name in names)
        rest = sum(os.path.getsize(path) for path in glob.glob(os.path.join(image, "**", "pages-*.img"), recursive=True))
        expect(past > 0.9 * (past + rest), f"{past} bytes went past CRIU, {rest} by it")
        seconds["restore"].append(machine.stasis("restore", "--images-dir", image, "--detach", "--json").must_succeed()
                                  .json()["seconds"])
        target.wait_rounds(1)
    verified = target.finish()
    expect(verified > 0, "no round was verified")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {"size": size, "seconds": seconds, "past_criu_bytes": past, "by_criu_bytes": rest,
            "note": f"{size}: {past / (past + rest):.1%} past CRIU, {rest >> 20} MiB by it; dump {middle['dump']:.2f} s, "
                    f"restore {middle['restore']:.2f} s; {verified} rounds"}


@case("host_memory.torch", simulated=False, needs=NEEDS)
def torch(machine):
    """PyTorch with pinned memory, which the workers of a loader inherit: past CRIU and by it, in turn."""
    version = require_torch(machine)
    gib = 3
    target = Target(machine, [machine.program("stasis"), "run", "--", sys.executable, PINNED, "{status}", str(gib)], "torch")
    target.wait_rounds(5)
    seconds, past = {}, {}
    for _ in range(2):
        for way in WAYS:
            image = os.path.join(machine.work, "image")
            shutil.rmtree(image, ignore_errors=True)
            words = ("dump", target.pid, "--images-dir", image, "--sync", "none", "--host-memory", way, "--json")
            seconds.setdefault(f"dump {way}", []).append(machine.stasis(*words, timeout=180).must_succeed().json()["seconds"])
            target.forget_exit()
            past[way] = sum(os.path.getsize(os.path.join(folder, name))
                            for folder, _, names in os.walk(os.path.join(image, "host")) for name in names)
            seconds.setdefault(f"restore {way}", []).append(machine.stasis("restore", "--images-dir", image, "--detach", "--json")
                                                            .must_succeed().json()["seconds"])
            target.wait_rounds(3)
    expect(past["parallel"] > (gib << 30) * 0.9 and past["criu"] == 0, f"past CRIU went {past}")
    verified = target.finish()
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {"seconds": seconds, "medians": middle, "past_criu_bytes": past, "torch": version,
            "note": f"{gib} GiB pinned, two workers: dump {middle['dump criu']:.2f} s by CRIU, {middle['dump parallel']:.2f} s past "
                    f"it; restore {middle['restore criu']:.2f} s, {middle['restore parallel']:.2f} s; {verified} rounds"}


@case("threads.many", needs=NEEDS)
def many_threads(machine):
    """How long a program of 3,000 threads stands still, beside one of few."""
    still, whole = {}, {}
    for count in (0, 3000):
        target = Target(machine, [machine.program("stasis"), "run", "--", machine.program("stasis-workload"), "memory",
                                  "--status", "{status}", "--size", "64M", "--pause-ms", "20", "--idle-threads", str(count)],
                        f"threads{count}")
        target.wait_rounds(2)
        for _ in range(5):
            report = machine.stasis("suspend", target.pid, "--json").must_succeed().json()
            still.setdefault(count, []).append(report["standstill_seconds"])
            whole.setdefault(count, []).append(report["seconds"])
            machine.stasis("resume", target.pid).must_succeed()
            target.wait_rounds(1)
        target.finish()
    middle = {count: statistics.median(values) for count, values in still.items()}
    expect(machine.simulated or middle[3000] < 3, f"it stands still for {middle[3000]} s")
    return {"standstill_seconds": by_name(still), "suspend_seconds": by_name(whole),
            "note": f"3,000 threads: stands still {middle[3000]:.2f} s, the first time {still[3000][0]:.2f}; few: {middle[0]:.2f}"}


def bytes_of_its_own(image):
    """What this dump has written: what it has from another image has that one's name, too."""
    infos = [os.stat(os.path.join(folder, name)) for folder, _, names in os.walk(image) for name in names]
    return sum(info.st_size for info in infos if info.st_nlink == 1)


@case("host_memory.goes_on", needs=NEEDS)
def goes_on(machine):
    """How long a job stands still that is saved and goes on, which writes a 64th of its memory in each round."""
    size = "128M" if machine.simulated else "12G"
    target = start(machine, "goes_on", size, True, "host")
    target.wait_rounds(1)
    still, took, written, phases, notes = {}, {}, {}, {}, []
    for way, precopy in (("criu", "off"), ("parallel", "off"), ("parallel", "on")):
        name = f"{way}, pre-copy {precopy}"
        earlier = None
        for number in range(1 + (LATER if way == "parallel" else 0)):
            image = os.path.join(machine.work, f"image{number}")
            words = ["--images-dir", image, "--sync", "none", "--leave-running", "--host-memory", way, "--pre-copy", precopy]
            report = machine.stasis("dump", target.pid, *words, *(("--base", earlier) if earlier else ()), "--json",
                                    timeout=180).must_succeed().json()
            still.setdefault(name, []).append(report["standstill_seconds"])
            phases.setdefault(name, []).append({p["name"]: p["seconds"] for p in report["phases"]})
            took.setdefault(name, []).append(report["seconds"])
            written.setdefault(name, []).append(bytes_of_its_own(image))
            target.wait_rounds(2)
            earlier = image
        looked = machine.stasis("verify", "--images-dir", earlier, "--json").must_succeed().json()
        expect_equal(looked["host_content"] is not None, way == "parallel", "host content in the image")
        if precopy == "on":
            comes_back(machine, target, earlier)
        for number in range(1 + LATER):
            shutil.rmtree(os.path.join(machine.work, f"image{number}"), ignore_errors=True)
        later = statistics.median(still[name][1:]) if still[name][1:] else None
        wrote = statistics.median(written[name][1:]) / 2**20 if later else None
        notes.append(f"{name}: {still[name][0]:.2f} s" + (f", later {later:.2f} and {wrote:.0f} MiB" if later else ""))
    target.finish()
    return {"size": size, "standstill_seconds": still, "seconds": took, "written_bytes": written, "phases": phases,
            "note": f"{size}, stands still for, " + "; ".join(notes)}


@case("host_memory.gpu_goes_on", needs=NEEDS)
def gpu_goes_on(machine):
    """The same of a job with 16 GiB on the GPU, of which 1 GiB changes all the time."""
    size, rest = ("8M", "56M") if machine.simulated else ("1G", "15G")
    target = Target(machine, [machine.program("stasis"), "run", "--", machine.program("stasis-workload"), "memory", "--status",
                              "{status}", "--size", size, "--still", rest, "--pause-ms", "20"], "gpu")
    target.wait_rounds(2)
    still, phases = [], []
    for number in range(1 + LATER):
        words = ["--images-dir", os.path.join(machine.work, f"image{number}"), "--sync", "none", "--leave-running"]
        words += ["--base", os.path.join(machine.work, f"image{number - 1}")] if number else []
        report = machine.stasis("dump", target.pid, *words, "--json", timeout=180).must_succeed().json()
        still.append(report["standstill_seconds"])
        phases.append({p["name"]: p["seconds"] for p in report["phases"]})
        target.wait_rounds(2)
    comes_back(machine, target, os.path.join(machine.work, f"image{LATER}"))
    return {"standstill_seconds": still, "phases": phases,
            "note": f"{size} of {rest} more: stands still for {still[0]:.2f} s, later {statistics.median(still[1:]):.2f} s; "
                    f"{target.finish()} rounds"}


PLAIN = (0, 50, 100, 200)
TREE = """
import signal, subprocess, sys
plain = [subprocess.Popen(["sleep", "100000"], stdout=subprocess.DEVNULL) for _ in range(int(sys.argv[1]))]
workload = subprocess.Popen(sys.argv[2:])
signal.signal(signal.SIGTERM, lambda *_: workload.terminate())
status = workload.wait()
for one in plain:
    one.kill()
sys.exit(status)
"""


@case("tree.many", needs=NEEDS)
def many(machine):
    """Trees of up to 200 processes of which one has CUDA: what each adds to a suspend, and a dump beside CRIU's own."""
    workload = [machine.program("stasis-workload"), "memory", "--status", "{status}", "--size", "64M", "--pause-ms", "20"]
    suspends, ratios, dumps, alone, phases = {}, {}, {}, {}, {}
    for count in PLAIN:
        target = Target(machine, [machine.program("stasis"), "run", "--", sys.executable, "-c", TREE, str(count), *workload],
                        f"tree{count}")
        target.wait_rounds(2)
        for number in range(5):
            suspends.setdefault(count, []).append(machine.stasis("suspend", target.pid).must_succeed().seconds)
            if count:
                images = os.path.join(machine.work, f"plain{count}.{number}")
                # None is removed before the end: for seconds after it makes new files slow to make, on ext4.
                alone.setdefault(count, []).append(plain_criu.dump(machine, target.pid, images, plain_criu.no_plugins(machine),
                                                                   "--leave-running").seconds)
            machine.stasis("resume", target.pid).must_succeed()
            target.wait_rounds(1)
            if count:
                images = os.path.join(machine.work, f"image{count}.{number}")
                done = machine.stasis("dump", target.pid, "--images-dir", images, "--sync", "none", "--leave-running",
                                      "--json").must_succeed()
                dumps.setdefault(count, []).append(done.seconds)
                phases[str(count)] = {p["name"]: p["seconds"] for p in done.json()["phases"]}
                ratios.setdefault(count, []).append(dumps[count][-1] / alone[count][-1])
        target.finish()
    middle = {count: statistics.median(values) for count, values in suspends.items()}
    each = {count: (middle[count] - middle[0]) / count for count in PLAIN if count}
    by_size = "; ".join(f"{count}: {each[count] * 1000:.2f} ms each, dump {statistics.median(dumps[count]):.2f} s, CRIU alone "
                        f"{statistics.median(alone[count]):.2f} s: {statistics.median(ratios[count]):.2f} times" for count in each)
    return {"suspend_seconds": by_name(suspends), "dump_seconds": by_name(dumps), "criu_seconds": by_name(alone),
            "ratios": by_name(ratios), "phases": phases,
            "note": f"what processes add to a suspend, and a dump of them, {by_size}"}
