"""The counter, both ways: with stasis, and with cuda-checkpoint and criu by hand."""

import os
import re

from . import plain_criu
from .core import case, expect, expect_equal
from .targets import Target

GPU_MEMORY = "1G"


class Counter:
    def __init__(self, machine, before=()):
        """`before`: words before the program's."""
        self.machine = machine
        self.before = machine.gpu_memory()
        self.program = machine.program("stasis-counter")
        argv = [*before, self.program, "--port", "0", "--gpu-memory",
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
    none = plain_criu.no_plugins(machine)
    pid = counter.target.pid
    machine.cuda_checkpoint("--toggle", "--pid", pid).must_succeed()
    machine.expect_gpu_free(counter.before)
    plain_criu.dump(machine, pid, images, none)
    counter.expect_gone()
    plain_criu.restore(machine, images, none)
    machine.cuda_checkpoint("--toggle", "--pid", pid).must_succeed()
    expect_equal(counter.ask(), "102", "the answer after the restore")
    return {"note": "101, toggle, criu, toggle, 102"}


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
