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
    """To the disk and from it, past the page cache as is usual and through it, with dd in the same run."""
    mib = 64 if machine.simulated else gib << 10
    target = start(machine, "memory", ["--size", f"{mib}M", "--pause-ms", "200"])
    figures = {"mib": mib, "dd_write": [], "dd_read": [], "past_cache": {}, "through_cache": {}}
    beside = os.path.join(machine.work, "dd")
    for _ in range(RUNS):
        figures["dd_write"].append(dd(machine, beside, mib, "if=/dev/zero", f"of={beside}", "oflag=direct"))
        figures["dd_read"].append(dd(machine, beside, mib, f"if={beside}", "of=/dev/null", "iflag=direct"))
        os.unlink(beside)
        there_and_back(machine, target, [], True, figures["past_cache"])
        there_and_back(machine, target, ["--no-direct-io"], False, figures["through_cache"])
    target.finish()
    usual, other = figures["past_cache"], figures["through_cache"]
    if max(usual["dump_host_bytes"] + usual["restore_host_bytes"]) == 0:
        raise Failure("no memory was seen in use: the samples mean nothing")
    write, read = (statistics.median(figures[name]) / 1e9 for name in ("dd_write", "dd_read"))
    out, back, cached, warm = (statistics.median(rates) / 1e9
                               for rates in (usual["dump_copy_rate"], usual["restore_copy_rate"],
                                             other["dump_copy_rate"], other["restore_copy_rate"]))
    figures["note"] = (
        f"{mib >> 10} GiB: out {out:.2f} GB/s, dd {write:.2f} ({out / write:.0%}), through the cache {cached:.2f}; "
        f"in {back:.2f} GB/s, dd {read:.2f}, from the cache {warm:.2f}; "
        f"verbs {statistics.median(usual['dump_seconds']):.2f} s and {statistics.median(usual['restore_seconds']):.2f} s; "
        f"host memory {max(usual['dump_host_bytes']) >> 20} and {max(usual['restore_host_bytes']) >> 20} MiB, "
        f"the program's grew by {max(usual['dump_target_grew']) >> 20} MiB")
    return figures


def there_and_back(machine, target, options, past_cache, figures):
    """One dump and one restore."""
    images = os.path.join(machine.work, "image")
    for verb, words in (("dump", ["dump", target.pid, "--images-dir", images, "--path", "direct", "--json", *options]),
                        ("restore", ["restore", "--images-dir", images, "--detach", "--json"])):
        watched = Watched(machine, *words)
        report = watched.run(target.pid, verb == "dump").must_succeed().json()
        expect_equal(report["path"], "direct", f"path ({report.get('notes')})")
        if verb == "dump":
            target.forget_exit()
            expect_equal(report["direct_io"], past_cache, "past the page cache")
        phases = {phase["name"]: phase["seconds"] for phase in report["phases"]}
        copying = phases["copy out"] + phases["content"] if verb == "dump" else phases["copy in"]
        for name, value in (("seconds", report["seconds"]), ("phases", phases), ("host_bytes", watched.peak),
                            ("target_grew", watched.growth),
                            ("copy_rate", report["direct_bytes"] / copying)):
            figures.setdefault(f"{verb}_{name}", []).append(value)
    target.wait_rounds(1)
    shutil.rmtree(images)


case("direct.dump_disk.8", needs=NEEDS)(lambda machine: disk(machine, 8))
