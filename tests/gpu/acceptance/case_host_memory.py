"""Large host memory, past CRIU and through it: right, and how long each takes."""

import glob
import os
import re
import shutil
import statistics
import sys
import threading

from . import plain_criu
from .core import case, expect, expect_equal
from .targets import Target

NEEDS = ("program stasis", "program stasis-workload", "criu", "root")
WAYS = ("criu", "parallel")


def start(machine, name, size, agent, kind):
    own = ["memory"] if kind == "memory" else ["host", "--threads", str(os.cpu_count())]
    words = [machine.program("stasis-workload"), *own, "--status", "{status}", "--size", size, "--pause-ms", "200"]
    return Target(machine, [machine.program("stasis"), "run", "--", *words] if agent else words, name)


def phase(report, name):
    return sum(p["seconds"] for p in report["phases"] if p["name"] == name)


class Peak:
    """The most memory, in bytes, that our tools and criu have at a time while this is entered; shared memory counts once."""

    PROGRAMS = ("stasis", "criu")

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
    return {"standstill_seconds": still, "phases": phases,
            "note": f"{size} of {rest} more: stands still for {still[0]:.2f} s, later {statistics.median(still[1:]):.2f} s; "
                    f"{target.finish()} rounds"}


PLAIN = 200
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
    """A tree of 200 processes of which one has CUDA: what each adds to a suspend, and a dump beside CRIU's own."""
    workload = [machine.program("stasis-workload"), "memory", "--status", "{status}", "--size", "64M", "--pause-ms", "20"]
    suspends, ratios, dumps, alone = {}, [], [], []
    for count in (0, PLAIN):
        target = Target(machine, [machine.program("stasis"), "run", "--", sys.executable, "-c", TREE, str(count), *workload],
                        f"tree{count}")
        target.wait_rounds(2)
        for number in range(5):
            suspends.setdefault(count, []).append(machine.stasis("suspend", target.pid).must_succeed().seconds)
            if count:
                images = os.path.join(machine.work, f"plain{number}")
                alone.append(plain_criu.dump(machine, target.pid, images, plain_criu.no_plugins(machine),
                                             "--leave-running").seconds)
                shutil.rmtree(images)
            machine.stasis("resume", target.pid).must_succeed()
            target.wait_rounds(1)
            if count:
                images = os.path.join(machine.work, f"image{number}")
                dumps.append(machine.stasis("dump", target.pid, "--images-dir", images, "--sync", "none",
                                            "--leave-running").must_succeed().seconds)
                ratios.append(dumps[-1] / alone[-1])
                shutil.rmtree(images)
        target.finish()
    each = (statistics.median(suspends[PLAIN]) - statistics.median(suspends[0])) / PLAIN
    return {"suspend_seconds": suspends, "dump_seconds": dumps, "criu_seconds": alone, "ratios": ratios,
            "note": f"each process adds {each * 1000:.2f} ms to a suspend; dump of {PLAIN} {statistics.median(dumps):.2f} s, "
                    f"CRIU alone {statistics.median(alone):.2f} s: {statistics.median(ratios):.2f} times"}
