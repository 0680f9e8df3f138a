"""Jobs of a real Slurm, with GPUs as its GRES, that are saved and go on: deploy/slurm."""

import os
import sys
import time

from . import case_torch
from .case_groups import ALLREDUCE
from .case_jobs import saves
from .case_sharing import torchrun_of, trained
from .core import Failure, Skip, case, expect, expect_equal
from .slurm import Slurm

NEEDS = ("program stasis", "program stasis-workload", "criu", "root")
# A signal by Slurm would be a notice to make room, so a file tells the script to end.
SCRIPT = """#!/bin/bash
while [ -e NAME.wait ]; do sleep 0.1; done
"$@" &
until [ -e NAME.stop ]; do sleep 0.1; done
kill $!
wait $!
"""


def until_told(machine, name, *command):
    """A command line that runs the command until finish(), and not before the file NAME.wait is gone."""
    path = os.path.join(machine.work, name)
    with open(path + ".sh", "w", encoding="utf-8") as file:
        file.write(SCRIPT.replace("NAME", path))
    return ["/bin/bash", path + ".sh", *map(str, command)]


def memory(machine, name, gibibytes=4):
    size = "16M" if machine.simulated else f"{gibibytes}G"
    return until_told(machine, name, machine.program("stasis-workload"), "memory", "--size", size, "--pause-ms", "50",
                      "--status", "{status}")


def finish(job):
    return job.finish(os.path.join(job.slurm.machine.work, job.name + ".stop"))


def listed(values):
    return ", ".join(f"{value:.2f}" for value in values)


class Interrupted:
    """Interruptions of a job, and how long each takes: until the job has left the node, and from its new start until
    it goes on."""

    def __init__(self, job, progress=None):
        self.job, self.progress = job, progress or job.rounds
        self.count = 0
        self.figures = {"gone_seconds": [], "back_seconds": []}

    def gone(self, begin):
        """It is saved, and waits; its GPUs are free."""
        self.count += 1
        self.job.wait_for(lambda: len(saves(self.job)) >= self.count, f"save {self.count}")
        self.job.wait_state("PENDING")
        self.figures["gone_seconds"].append(round(time.monotonic() - begin, 3))
        self.figures["saves"] = saves(self.job)
        self.job.slurm.expect_gpus_free()

    def back(self):
        had = self.progress()
        self.job.wait_for(lambda: self.job.restarts() >= self.count and self.job.state() == "RUNNING", "new start", 180)
        begin = time.monotonic()
        self.job.wait_for(lambda: self.progress() > had, f"progress after {had}", 180)
        self.figures["back_seconds"].append(round(time.monotonic() - begin, 3))
        self.job.wait_for(lambda: self.job.output().count("goes on from ") == self.count, "word that it goes on", 30)

    def by_requeue(self):
        begin = time.monotonic()
        self.job.slurm.do("scontrol", "requeue", self.job.number)
        self.gone(begin)
        self.back()

    def by_another(self):
        """A job of a higher partition takes all GPUs, and uses them. Returns the rounds that it verified."""
        slurm, name = self.job.slurm, f"high{self.count}"
        wait = os.path.join(slurm.machine.work, name + ".wait")
        with open(wait, "w", encoding="ascii"):
            pass
        begin = time.monotonic()
        high = slurm.submit_plain(name, memory(slurm.machine, name, 8), "--partition=high", gpus=len(slurm.nodes))
        self.gone(begin)
        high.wait_state("RUNNING")
        os.unlink(wait)
        high.wait_rounds(3)
        expect_equal(self.job.state(), "PENDING", "state of the job that made room")
        rounds = finish(high)
        self.back()
        return rounds

    def told(self):
        return (f"saved in {listed(one['seconds'] for one in self.figures['saves'])} s, its node left in "
                f"{listed(self.figures['gone_seconds'])} s, went on in {listed(self.figures['back_seconds'])} s")


@case("slurm.preempted", needs=NEEDS)
def preempted(machine):
    """Twice by a job of a higher partition that uses the same GPU."""
    job = Slurm(machine).submit("low", memory(machine, "low"))
    job.wait_rounds(3)
    interrupted = Interrupted(job)
    others = []
    for _ in range(2):
        others.append(interrupted.by_another())
        job.wait_rounds(3)
    rounds = finish(job)
    return {**interrupted.figures, "note": f"{interrupted.told()}; {rounds} rounds verified, the others' {others}"}


@case("slurm.torch", simulated=False, needs=NEEDS)
def torch(machine):
    """Training that is preempted: the losses are those of one that nothing interrupts, to the bit."""
    version = case_torch.require_torch(machine)
    wanted, _ = case_torch.undisturbed(machine)
    losses = os.path.join(machine.work, "losses")
    job = Slurm(machine).submit("training", [sys.executable, case_torch.TRAIN, "--losses", losses, "--steps",
                                             case_torch.STEPS, "--gib", case_torch.GIB, "--pause-ms", "100"])
    job.losses = losses
    job.wait_for(lambda: len(case_torch.losses(job)) >= 30, "step 30", 300)
    interrupted = Interrupted(job, lambda: len(case_torch.losses(job)))
    others = interrupted.by_another()
    job.wait_state("COMPLETED", 300)
    expect("trained" in job.output(), f"it said: {job.output()[-800:]}")
    found = case_torch.losses(job)
    expect_equal(list(found), list(wanted), "steps")
    figures = case_torch.compare(machine, version, found, interrupted.figures)
    expect_equal(figures["difference"], 0, "difference of a loss")
    figures["note"] = f"{interrupted.told()}; {figures['note']}; {others} rounds of the other"
    return figures


@case("slurm.time_limit", needs=NEEDS)
def time_limit(machine):
    """One minute, the shortest that there is. It runs for longer in all."""
    job = Slurm(machine).submit("limited", memory(machine, "limited"), "--time=1", "--signal=TERM@20",
                                "--stasis-grace=15s")
    job.wait_rounds(2)
    begin = time.monotonic()
    interrupted = Interrupted(job)
    interrupted.gone(begin)
    interrupted.back()
    job.wait_for(lambda: time.monotonic() - begin > 75, "end of the time")
    expect(" TimeLimit=00:01:00" in job.slurm.ask("scontrol", "show", "job", job.number), "it has another time limit")
    rounds = finish(job)  # the next limit may come before
    return {**interrupted.figures, "restarts": job.restarts(),
            "note": f"{interrupted.told()} (the first time, from its start); started again {job.restarts()} times; "
                    f"{rounds} rounds verified in {time.monotonic() - begin:.0f} s"}


def ranks_command(machine):
    """One task that starts two ranks: they are one tree, and are saved together."""
    if machine.simulated:
        return until_told(machine, "ranks", machine.program("stasis-workload"), "collective", "--children", "2",
                          "--sharing", "--like-nccl", "--size", "16M", "--pause-ms", "2", "--status", "{status}")
    case_torch.require_torch(machine)
    return until_told(machine, "ranks", sys.executable, ALLREDUCE, "--status", "{status}", "--ranks", "2", "--mib", "16",
                      "--gib", "2", "--pause-ms", "2")


@case("slurm.ranks", needs=NEEDS + ("two gpus",))
def ranks(machine):
    """Two ranks that talk to each other, in one job: NCCL with its defaults."""
    job = Slurm(machine, gpus=2).submit("ranks", ranks_command(machine), "--ntasks=1", gpus=2)
    job.wait_rounds(3, 300)
    expect_equal(job.slurm.gpus_in_use(), 2, "GPUs of the job")
    interrupted = Interrupted(job)
    for _ in range(2):
        interrupted.by_requeue()
        job.wait_rounds(3)
    expect_equal(job.slurm.gpus_in_use(), 2, "GPUs of the job")
    others = interrupted.by_another()
    job.wait_rounds(3)
    rounds = finish(job)
    return {**interrupted.figures, "note": f"{interrupted.told()}; {rounds} rounds of sums, {others} of the other"}


@case("slurm.torchrun", simulated=False, needs=NEEDS + ("two gpus",))
def torchrun(machine):
    """DistributedDataParallel as deploy/slurm's page says it: losses equal in every bit."""
    version, steps = case_torch.require_torch(machine), 1000
    wanted, _ = trained(machine, "ddp", False, steps=steps)
    path = os.path.join(machine.work, "torchrun.losses")
    job = Slurm(machine, gpus=2).submit("torchrun", torchrun_of("ddp", path, 2, steps), "--ntasks=1", gpus=2)
    job.losses = path + ".0"
    job.wait_for(lambda: len(case_torch.losses(job)) >= 50, "step 50", 300)
    interrupted = Interrupted(job, lambda: len(case_torch.losses(job)))
    interrupted.by_requeue()
    job.wait_state("COMPLETED", 300)
    expect_equal(case_torch.losses(job), wanted, "losses")
    return {**interrupted.figures, "torch": version,
            "note": f"{interrupted.told()}; {len(wanted)} losses equal in every bit"}


# --- Cgroups

LOOK = """#!/bin/sh
for node; do
  if (: <"$node") 2>/dev/null; then echo "open $node"; fi
done
echo looked
"""


def open_to(slurm, name, gpus):
    """The nodes of GPUs that a job can open."""
    path = os.path.join(slurm.machine.work, name + ".sh")
    with open(path, "w", encoding="ascii") as file:
        file.write(LOOK)
    job = slurm.submit_plain(name, ["sh", path, *slurm.nodes], "--partition=high", gpus=gpus)
    try:
        job.wait_state("COMPLETED", 60)
    except Failure as reason:
        raise Skip(f"no job runs with cgroups here: {reason}") from reason
    expect("looked" in job.output(), f"it said: {job.output()!r}")
    return [line.split()[1] for line in job.output().splitlines() if line.startswith("open ")]


def in_its_cgroup(job):
    """The cgroups of the job in which its workloads are, as /proc tells."""
    found = job.slurm.processes("stasis-workload")
    expect(found, "no process of the job")
    for pid in found:
        with open(f"/proc/{pid}/cgroup", encoding="ascii", errors="replace") as file:
            lines = [line for line in file if f"/job_{job.number}/" in line]
        expect(lines, f"process {pid} is in no cgroup of the job")
    return lines


@case("slurm.cgroups", needs=NEEDS)
def cgroups(machine):
    """proctrack/cgroup and task/cgroup with ConstrainDevices: a job opens its own GPUs only, also after it went on."""
    count = min(2, len(machine.gpus()))
    slurm = Slurm(machine, gpus=count, cgroups=True)
    expect_equal(open_to(slurm, "none", 0), [], "GPUs open to a job without any")
    job = slurm.submit("low", memory(machine, "low"))
    job.wait_rounds(3)
    before = in_its_cgroup(job)
    if count > 1:
        expect_equal(open_to(slurm, "second", 1), slurm.nodes[1:], "GPUs open to the job with the second")
    interrupted = Interrupted(job)
    interrupted.by_requeue()
    job.wait_rounds(3)
    interrupted.by_another()
    job.wait_rounds(3)
    after = in_its_cgroup(job)
    rounds = finish(job)
    return {**interrupted.figures, "cgroups": {"before": before, "after": after},
            "note": f"{interrupted.told()}; {len(after)} cgroups of the job; {rounds} rounds verified"}
