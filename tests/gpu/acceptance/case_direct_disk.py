"""Dumps past the program to a real disk: as fast as dd, and in little memory of the host's."""

import os
import shutil
import statistics
import subprocess
import threading
import time

from .case_direct import start
from .core import Failure, case, expect_equal
from .machine import Finished

NEEDS = ("program stasis", "program stasis-workload", "criu", "root")
SAMPLE_SECONDS = 0.02
RUNS = 2


def resident(pid):
    """Bytes that count for this process alone; memory that several have is divided among them."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def children(pid):
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


class Watched:
    """A command, and the most memory that it, its children (the mover, criu), and what it lets the target take had."""

    def __init__(self, machine, *words):
        self.argv = [machine.program("stasis"), *map(str, words)]
        self.env = machine.env
        self.peak = 0
        self.growth = 0

    def sample(self, process, target, before):
        while process.poll() is None:
            ours = [process.pid, *(pid for pid in children(process.pid) if pid != target)]
            self.peak = max(self.peak, sum(map(resident, ours)))
            if before is not None:
                self.growth = max(self.growth, resident(target) - before)
            time.sleep(SAMPLE_SECONDS)

    def run(self, target, watch_target):
        before = resident(target) if watch_target else None
        begun = time.monotonic()
        with subprocess.Popen(self.argv, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:
            watcher = threading.Thread(target=self.sample, args=(process, target, before))
            watcher.start()
            out, err = process.communicate(timeout=300)
            watcher.join()
        return Finished(self.argv, process.returncode, out.decode(), err.decode(), time.monotonic() - begun)


def dd(machine, path, mib, *words):
    """Bytes per second of one dd past the page cache."""
    begun = time.monotonic()
    machine.run("dd", "bs=16M", f"count={mib // 16}", *words).must_succeed()
    return (mib << 20) / (time.monotonic() - begun)


def disk(machine, gib):
    """To the disk and from it, with dd in the same run."""
    mib = 64 if machine.simulated else gib << 10
    target = start(machine, "memory", ["--size", f"{mib}M", "--pause-ms", "200"])
    figures = {"mib": mib, "dd_write": [], "dd_read": []}
    beside = os.path.join(machine.work, "dd")
    for number in range(RUNS):
        figures["dd_write"].append(dd(machine, beside, mib, "if=/dev/zero", f"of={beside}", "oflag=direct"))
        figures["dd_read"].append(dd(machine, beside, mib, f"if={beside}", "of=/dev/null", "iflag=direct"))
        os.unlink(beside)
        images = os.path.join(machine.work, f"image-{number}")
        for verb, words in (("dump", ["dump", target.pid, "--images-dir", images, "--path", "direct", "--json"]),
                            ("restore", ["restore", "--images-dir", images, "--detach", "--json"])):
            watched = Watched(machine, *words)
            report = watched.run(target.pid, verb == "dump").must_succeed().json()
            expect_equal(report["path"], "direct", f"path ({report.get('notes')})")
            if verb == "dump":
                target.forget_exit()
            phases = {phase["name"]: phase["seconds"] for phase in report["phases"]}
            copying = phases["copy out"] + phases["content"] if verb == "dump" else phases["copy in"]
            for name, value in (("seconds", report["seconds"]), ("phases", phases), ("host_bytes", watched.peak),
                                ("target_grew", watched.growth),
                                ("copy_rate", report["direct_bytes"] / copying)):
                figures.setdefault(f"{verb}_{name}", []).append(value)
        target.wait_rounds(1)
        shutil.rmtree(images)
    target.finish()
    if max(figures["dump_host_bytes"] + figures["restore_host_bytes"]) == 0:
        raise Failure("no memory was seen in use: the samples mean nothing")
    write, read, out, back = (statistics.median(figures[name]) / 1e9
                              for name in ("dd_write", "dd_read", "dump_copy_rate", "restore_copy_rate"))
    figures["note"] = (
        f"{mib >> 10} GiB: out {out:.2f} GB/s, dd {write:.2f} ({out / write:.0%}); in {back:.2f} GB/s, dd {read:.2f}; "
        f"verbs {statistics.median(figures['dump_seconds']):.2f} s and {statistics.median(figures['restore_seconds']):.2f} s; "
        f"host memory {max(figures['dump_host_bytes']) >> 20} and {max(figures['restore_host_bytes']) >> 20} MiB, "
        f"the program's grew by {max(figures['dump_target_grew']) >> 20} MiB")
    return figures


case("direct.dump_disk.8", needs=NEEDS)(lambda machine: disk(machine, 8))
