"""stasis run --images-dir: jobs that are preempted, saved by the clock, moved to another GPU, on a terminal."""

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import statistics
import struct
import sys
import tempfile
import termios
import time

from . import case_torch
from .case_devices import holders, mebibytes
from .core import Failure, Skip, case, expect, expect_equal
from .targets import Target

NEEDS = ("program stasis", "program stasis-workload", "criu", "root")
SAVED = 75
SAVE = re.compile(r"saved to (\S+) \(([0-9.]+ \w+)(?:, ([0-9.]+ \w+) of it written)?"
                  r"(?:, [0-9.]+ \w+ while it ran)?\) in ([0-9.]+ \w+)(?:, standing still for ([0-9.]+ \w+))?")


def start(machine, name, command, *options, env=None):
    """stasis run of a command, with the images of that name; told again, it goes on from them."""
    images = os.path.join(machine.work, "images-" + name)
    target = Target(machine, [machine.program("stasis"), "run", "--images-dir", images, *map(str, options), "--",
                              *map(str, command)], name, {**machine.target_env(), **(env or {})})
    target.images = images
    return target


def workload(machine, *options):
    return [machine.program("stasis-workload"), "memory", "--status", "{status}", *map(str, options)]


def preempt(machine, target, timeout=180):
    """TERM, as a scheduler gives notice; how long it took until it had ended, saved."""
    begin = time.monotonic()
    os.kill(target.pid, signal.SIGTERM)
    target.wait_ended(timeout)
    expect_equal(target.exit_status, SAVED, f"status after the notice ({target.output()[-800:]})")
    return round(time.monotonic() - begin, 3)


def went_on(target, timeout=120):
    target.wait_for(lambda: "goes on from" in target.output(), "word that it goes on", timeout)


def saves(target):
    """What stasis run has told of each save: GiB in all, GiB written, seconds, and seconds of standing still."""
    return [{"gib": gib(size), "written_gib": gib(written or size), "seconds": seconds(took),
             "standstill_seconds": seconds(still) if still else None}
            for _, size, written, took, still in SAVE.findall(target.output())]


def gib(text):
    number, unit = text.split()
    return float(number) * 1024.0 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit) / 1024.0 ** 3


def seconds(text):
    number, unit = text.split()
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60}[unit]


# --- Preempted, and started again by the same command line

def preempted(machine, name, command, progress, every, first, more, env=None):
    """Three times: TERM in the middle, and the same command line again. Gives the last `stasis run`, which saves no
    more, so that the job can end at any time."""
    figures = {"saved_seconds": [], "back_seconds": [], "saves": []}
    target = start(machine, name, command, "--every", every, "--keep", "1", env=env)
    target.wait_for(lambda: progress(target) >= first, f"step {first}", 300)
    for options in (("--every", every, "--keep", "1"), ("--every", every, "--keep", "1"), ()):
        target.wait_for(lambda: saves(target), "save by the clock", 180)
        figures["saved_seconds"].append(preempt(machine, target))
        figures["saves"].append(saves(target))
        before, begin = progress(target), time.monotonic()
        target = start(machine, name, command, *options, env=env)
        target.wait_for(lambda: progress(target) > before, f"step after {before}", 180)
        went_on(target)
        figures["back_seconds"].append(round(time.monotonic() - begin, 3))
        target.wait_for(lambda: progress(target) > before + more, f"step {before + more}", 180)
    return target, figures


def told(figures):
    return (f"preempted three times: gone in {statistics.median(figures['saved_seconds']):.2f} s, back in "
            f"{statistics.median(figures['back_seconds']):.2f} s (medians), "
            f"{sum(map(len, figures['saves']))} saves")


@case("job.preempted", needs=NEEDS)
def memory_preempted(machine):
    size = "16M" if machine.simulated else "4G"
    every = "500ms" if machine.simulated else "10s"
    target, figures = preempted(machine, "preempted", workload(machine, "--size", size, "--pause-ms", "50"),
                                Target.rounds, every, 2, 2)
    os.kill(target.pid, signal.SIGTERM)
    target.wait_ended(180)
    last = target.rounds()
    target = start(machine, "preempted", workload(machine, "--size", size, "--pause-ms", "50"), "--on-signal", "USR1")
    target.wait_for(lambda: target.rounds() > last, "round after the last restore", 180)
    return {**figures, "size": size, "note": f"{size}: {told(figures)}; {target.finish()} rounds verified"}


@case("job.without_root", needs=NEEDS)
def without_root(machine):
    """A job in a user namespace, of another user than root, is preempted and goes on; then root restores its image."""
    unshare = shutil.which("unshare")
    setpriv = shutil.which("setpriv")
    if not unshare or not setpriv:
        raise Skip("no unshare(1) or no setpriv(1)")
    user = [setpriv, "--reuid", "65533", "--regid", "65533", "--clear-groups", unshare, "--user", "--map-root-user"]
    if machine.run(*user, "true").status != 0:
        raise Skip("no user namespaces for other users")
    # Root can give back no capability that it lacks itself, as this one in many containers.
    with open("/proc/self/status", encoding="ascii") as file:
        effective = int(next(line for line in file if line.startswith("CapEff:")).split()[1], 16)
    lacks = not effective >> 24 & 1
    if lacks:
        user += [setpriv, "--bounding-set=-sys_resource", "--inh-caps=-sys_resource"]
    ways = (user, [])
    figures = {}
    for size in ("1M", "64M") if machine.simulated else ("1M", "64M", "1G"):
        own = tempfile.mkdtemp(prefix="stasis-user-")  # our work folder is root's alone
        os.chown(own, 65533, 65533)
        command = [machine.program("stasis-workload"), "memory", "--status", os.path.join(own, "status"), "--size", size,
                   "--pause-ms", "50"]
        env = {"STASIS_STATE_DIR": os.path.join(own, "state"), "HOME": own, "XDG_RUNTIME_DIR": "",
               "STASIS_SIM_DIR": os.path.join(own, "gpus")}
        for name in ("state", "gpus"):
            os.mkdir(os.path.join(own, name), 0o700)
            os.chown(os.path.join(own, name), 65533, 65533)

        def begin(words, by, own=own, command=command, env=env):
            target = Target(machine, [*by, machine.program("stasis"), "run", "--images-dir", os.path.join(own, "images"),
                                      *words, "--", *command], f"user-{os.path.basename(own)}",
                            {**machine.target_env(), **(env if by else {"STASIS_SIM_DIR": env["STASIS_SIM_DIR"]})})
            target.status_file = os.path.join(own, "status")
            return target
        target = begin([], user)
        target.wait_rounds(2, timeout=120)
        saved, back = [], []
        for by in ways:
            saved.append(preempt(machine, target))
            before, since = target.rounds(), time.monotonic()
            if not by:  # as root is told to, who would run what another user has written
                machine.run("chown", "-R", "0:0", os.path.join(own, "images"))
            target = begin([], by)
            target.wait_for(lambda of=target, least=before: of.rounds() > least, "round after the restore", 180)
            back.append(round(time.monotonic() - since, 3))
        os.kill(target.pid, signal.SIGINT)
        target.wait_ended(120)
        shutil.rmtree(own)
        figures[size] = {"saved_seconds": saved, "back_seconds": back}
    figures["note"] = "; ".join(f"{size}: gone in {one['saved_seconds']} s, back in {one['back_seconds']} s"
                                for size, one in figures.items())
    figures["note"] += ", by the user and by root" + (" (both without CAP_SYS_RESOURCE)" if lacks else "")
    return figures


def training_preempted(machine, *arguments):
    version = case_torch.require_torch(machine)
    losses = os.path.join(machine.work, "preempted.losses")
    command = [sys.executable, case_torch.TRAIN, "--losses", losses, "--steps", case_torch.STEPS, "--gib",
               case_torch.GIB, "--pause-ms", "700", *arguments]

    def steps(target):
        target.losses = losses
        return len(case_torch.losses(target))

    # A directory that is part of the job, for the sockets of a data loader.
    target, figures = preempted(machine, "preempted", command, steps, "8s", 10, 5, {"TMPDIR": "/dev/shm"})
    found = case_torch.finish(target)
    return version, figures, found


@case("job.torch", simulated=False, needs=NEEDS)
def torch_preempted(machine):
    """Training under stasis run --every: the losses are those of one that nothing interrupts, to the bit."""
    version, figures, found = training_preempted(machine)
    figures = case_torch.compare(machine, version, found, figures)
    expect_equal(figures["difference"], 0, "difference of a loss")
    figures["note"] = f"{told(figures)}; {figures['note']}"
    return figures


@case("job.torch.loader", simulated=False, needs=NEEDS)
def torch_with_workers_preempted(machine):
    """The same with four processes of a data loader, forked when CUDA is in use."""
    arguments = ("--workers", "4", "--start-method", "fork")
    wanted = case_torch.finish(case_torch.start(machine, "undisturbed", *arguments))
    version, figures, found = training_preempted(machine, *arguments)
    worst = max(found, key=lambda step: abs(wanted[step] - found[step]))
    expect(found == wanted, f"step {worst}: the loss is {found[worst]} instead of {wanted[worst]}")
    return {**figures, "torch": version, "note": f"{told(figures)}; {len(found)} losses as undisturbed"}


# --- Saved by the clock

def seconds_a_round(target, rounds):
    first = target.wait_rounds(1)
    begin = time.monotonic()
    target.wait_for(lambda: target.rounds() >= first + rounds, f"round {first + rounds}", 300)
    return (time.monotonic() - begin) / (target.rounds() - first)


def periodic(machine, size, changing, count):
    """A job that is saved by the clock `count` times: what each save writes, how long the job stands still for it, and
    how much later it is for it in all. Beside it, how long a round takes without stasis and between saves."""
    still, moving = (f"{size - changing}G", f"{changing}G") if not machine.simulated else ("24M", "4M")
    options = ("--size", moving, "--still", still, "--pause-ms", "100")
    every = 15 if not machine.simulated else 1
    rounds = 20 if not machine.simulated else 5
    alone = machine.workload("memory", *options, name="alone")
    alone.wait_rounds(2)
    figures = {"never_changes": still, "changes": moving, "every_seconds": every,
               "round_seconds_alone": seconds_a_round(alone, rounds)}
    alone.finish()
    target = start(machine, "periodic", workload(machine, *options))
    target.wait_for(lambda: target.rounds() >= 2, "round 2", 180)
    figures["round_seconds"] = seconds_a_round(target, rounds)
    figures["preempted_seconds"] = preempt(machine, target)
    figures["saves"] = saves(target)  # the first one, which is whole
    target = start(machine, "periodic", workload(machine, *options), "--every", f"{every}s")
    went_on(target)
    target.wait_rounds(1)
    begin, first = time.monotonic(), target.rounds()
    target.wait_for(lambda: len(saves(target)) >= count, f"save {count}", (every + 30) * count + 60)
    target.wait_rounds(1)
    lost = time.monotonic() - begin - (target.rounds() - first) * figures["round_seconds"]
    figures["saves"] += saves(target)
    figures["overhead_seconds_a_save"] = round(lost / count, 3)
    # What is lost with its machine goes on from the last image.
    os.kill(target.pid, signal.SIGKILL)
    target.wait_ended()
    # It ends with all it has, and its memory is another's.
    target = start(machine, "periodic", workload(machine, *options), "--on-signal", "USR1")
    went_on(target)
    target.wait_rounds(2)
    verified = target.finish()
    whole, later = figures["saves"][0], figures["saves"][1:]

    def middle(key):
        return statistics.median(one[key] for one in later)
    figures["note"] = (f"{still} and {moving} that change: first save {whole['written_gib']:.2f} GiB in "
                       f"{whole['seconds']:.2f} s; {len(later)} by the clock, medians: {middle('written_gib'):.2f} GiB "
                       f"in {middle('seconds'):.2f} s, still {middle('standstill_seconds'):.2f} s, the job later by "
                       f"{figures['overhead_seconds_a_save']:.2f} s each; a round {figures['round_seconds']:.3f} s, "
                       f"alone {figures['round_seconds_alone']:.3f} s; killed, restored, {verified} rounds verified")
    most = changing * 1.05 + 1.0 if not machine.simulated else 1  # with CRIU's files, which are written whole
    if middle("written_gib") > most:
        raise Failure(f"{middle('written_gib'):.2f} GiB written, {moving} had changed", figures)
    return figures


case("job.periodic.16", needs=NEEDS)(
    lambda machine: periodic(machine, 16, 1, 3 if machine.simulated else 10))


# --- Another GPU

@case("job.other_gpu", needs=NEEDS + ("two gpus",))
def other_gpu(machine):
    """What the scheduler gives it is another GPU of the same kind; and back, by name."""
    first, second = (gpu["uuid"] for gpu in machine.gpus()[:2])
    size = f"{mebibytes(machine) if machine.simulated else 16 << 10}M"
    before = machine.gpu_memory()
    figures = {"size": size, "saved_seconds": [], "back_seconds": []}
    target, rounds = None, 0
    for wanted, options, visible in ((first, (), "0"), (second, (), "1"), (first, ("--map", "1=0"), None)):
        env = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
        if target is not None:
            figures["saved_seconds"].append(preempt(machine, target))
            rounds = target.rounds()
            machine.expect_gpu_free(before)
        begin = time.monotonic()
        target = start(machine, "moved", workload(machine, "--size", size, "--pause-ms", "50"), *options, env=env)
        target.wait_for(lambda least=rounds: target.rounds() > least + 2, "round", 180)
        figures["back_seconds"].append(round(time.monotonic() - begin, 3))
        found = holders(machine, before)
        expect(found == {wanted}, f"the memory lies on {found or 'no GPU'} instead of {wanted}")
    preempt(machine, target)
    rounds = target.rounds()
    figures["back_seconds"].pop(0)  # which was its start
    figures["note"] = (f"{size} to the other GPU and back: gone in {max(figures['saved_seconds']):.2f} s, there in "
                       f"{max(figures['back_seconds']):.2f} s; {rounds} rounds verified")
    return figures


# --- A terminal, and what a scheduler tells

SCRIPT = """
stasis-workload memory --size SIZE --pause-ms 50 --status STATUS </dev/null &
while read -r word; do
  case $word in
    size) echo "size $(stty size)" ;;
    job) sh -c 'echo "job $SLURM_JOB_ID"' ;;
    quit) kill $!; wait; exit 3 ;;
  esac
done
"""


class OnTerminal(Target):
    """stasis run on a terminal of ours."""

    def __init__(self, machine, argv, name, rows, columns, env):
        self.machine, self.name, self.argv = machine, name, argv
        self.log = os.path.join(machine.work, name + ".log")
        self.status_file = os.path.join(machine.work, name + ".status")
        self.exit_status, self.said = None, b""
        self.master, slave = pty.openpty()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for fd in range(3):
                os.dup2(slave, fd)
            os.closerange(3, 256)
            os.execve(argv[0], argv, env)
        os.close(slave)
        machine.register(self)

    def output(self):
        while select.select([self.master], [], [], 0)[0]:
            try:
                self.said += os.read(self.master, 4096)
            except OSError:  # no process has it open any more
                break
        return self.said.decode("utf-8", "replace")

    def ask(self, word, answer, timeout=60):
        """Again and again: a restored job runs a moment before its terminal has got the new size."""
        self.output()
        self.said = b""
        deadline = time.monotonic() + timeout
        while True:
            os.write(self.master, word.encode() + b"\r")
            asked = time.monotonic()
            while time.monotonic() < asked + 2:
                self.fail_if_ended()
                if answer in self.output():
                    return
                time.sleep(0.02)
            expect(time.monotonic() < deadline, f"no answer {answer!r} to {word!r}; it said {self.said!r}")


@case("job.terminal", needs=NEEDS)
def terminal(machine):
    """On a terminal, preempted, and on another one of another size as another job of the scheduler's."""
    script, status = os.path.join(machine.work, "script"), os.path.join(machine.work, "terminal.status")
    with open(script, "w", encoding="ascii") as file:
        file.write(SCRIPT.replace("stasis-workload", machine.program("stasis-workload")).replace("STATUS", status)
                   .replace("SIZE", "8M" if machine.simulated else "2G"))
    argv = [machine.program("stasis"), "run", "--images-dir", os.path.join(machine.work, "images"), "--refresh-env",
            "SLURM_*", "--", "/bin/sh", script]
    rounds = 0
    for number, (rows, columns) in ((1, (30, 90)), (2, (50, 132))):
        target = OnTerminal(machine, argv, "terminal", rows, columns,
                            {**machine.target_env(), "SLURM_JOB_ID": str(number)})
        target.wait_for(lambda least=rounds: target.rounds() > least + 1, "round", 120)
        target.ask("size", f"size {rows} {columns}")
        target.ask("job", f"job {number}")
        if number == 1:
            preempt(machine, target)
        rounds = target.rounds()
    os.write(target.master, b"quit\r")
    target.wait_ended(60)
    expect_equal(target.exit_status, 3, "its own status")
    expect("verified" in target.output(), f"no verdict of the workload in {target.output()!r}")
    return {"note": f"two terminals, two jobs of the scheduler; {rounds} rounds verified"}
