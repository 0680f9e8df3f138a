"""The counter, both ways: with stasis, and with cuda-checkpoint and criu by hand."""

import os
import re

from .core import Failure, case, expect, expect_equal
from .targets import Target

GPU_MEMORY = "1G"


class Counter:
    def __init__(self, machine):
        self.machine = machine
        self.before = machine.gpu_memory()
        self.program = machine.program("stasis-counter")
        argv = [self.program, "--port", "0", "--gpu-memory",
                "256M" if machine.simulated else GPU_MEMORY]
        self.target = Target(machine, argv, "counter")
        self.target.wait_for(lambda: "listening on" in self.target.output(), "port")
        self.port = re.search(r"listening on 127\.0\.0\.1:(\d+)", self.target.output()).group(1)

    def ask(self):
        return self.machine.run(self.program, "--ask", self.port).must_succeed().out.strip()

    def expect_gone(self):
        self.target.wait_ended()
        self.machine.expect_gpu_free(self.before)
        self.target.forget_exit()


@case("counter.stasis", needs=("criu", "root", "program stasis", "program stasis-counter"))
def counter_stasis(machine):
    counter = Counter(machine)
    expect_equal(counter.ask(), "101", "the first answer")
    images = os.path.join(machine.work, "image")
    dump = machine.stasis("dump", counter.target.pid, "--images-dir", images).must_succeed()
    counter.expect_gone()
    restore = machine.stasis("restore", "--images-dir", images, "--detach").must_succeed()
    expect_equal(counter.ask(), "102", "the answer after the restore")
    expect_equal(counter.ask(), "103", "the answer after that")
    machine.expect_state(counter.target.pid, "running")
    return {"dump_seconds": dump.seconds, "restore_seconds": restore.seconds,
            "note": "101, dump, GPU free, restore, 102"}


@case("counter.by_hand", needs=("criu", "root", "program cuda-checkpoint", "program stasis-counter"))
def counter_by_hand(machine):
    """The procedure of NVIDIA's demo, with our drop-in and an unchanged criu without a plugin."""
    counter = Counter(machine)
    expect_equal(counter.ask(), "101", "the first answer")
    images = os.path.join(machine.work, "image")
    os.mkdir(images)
    pid = counter.target.pid
    machine.cuda_checkpoint("--toggle", "--pid", pid).must_succeed()
    machine.expect_gpu_free(counter.before)
    criu_dump(machine, pid, images)
    counter.expect_gone()
    criu_restore(machine, images)
    machine.cuda_checkpoint("--toggle", "--pid", pid).must_succeed()
    expect_equal(counter.ask(), "102", "the answer after the restore")
    return {"note": "101, toggle, criu, toggle, 102"}


def criu_dump(machine, pid, images, *options):
    empty = os.path.join(machine.work, "no-plugins")
    os.makedirs(empty, exist_ok=True)
    finished = machine.criu("dump", "--tree", pid, "--images-dir", images, "--libdir", empty,
                            "--log-file", "dump.log", "-v2", *options)
    return explain(finished, os.path.join(images, "dump.log"))


def criu_restore(machine, images, *options):
    empty = os.path.join(machine.work, "no-plugins")
    os.makedirs(empty, exist_ok=True)
    finished = machine.criu("restore", "--restore-detached", "--images-dir", images, "--libdir",
                            empty, "--log-file", "restore.log", "-v2", *options)
    return explain(finished, os.path.join(images, "restore.log"))


def explain(finished, log):
    """criu says little on its standard error; the reason stands in its log."""
    if finished.status == 0:
        return finished
    errors = []
    if os.path.exists(log):
        with open(log, encoding="utf-8", errors="replace") as file:
            errors = [line.strip() for line in file if "Error" in line]
    raise Failure(f"{finished.brief()}: {' / '.join(errors[:3])}")


@case("counter.suspended_stays_silent", needs=("program stasis", "program stasis-counter"))
def counter_suspended(machine):
    """Suspended, it holds no GPU memory and answers what was asked meanwhile once it goes on."""
    counter = Counter(machine)
    expect_equal(counter.ask(), "101", "the first answer")
    machine.stasis("suspend", counter.target.pid).must_succeed()
    machine.expect_gpu_free(counter.before)
    silent = machine.run(counter.program, "--ask", counter.port)
    expect(silent.status == 1 and "no answer" in silent.err, f"while suspended: {silent.brief()}")
    machine.stasis("resume", counter.target.pid).must_succeed()
    # The packet of the unanswered question waited in the socket: it has counted.
    expect_equal(counter.ask(), "103", "the answer after the resume")
    return None
