#!/usr/bin/env python3
"""Every fault point times every action: afterwards the job runs on with its data right, or its image does.

Long because points, actions, and what a job and an image must be afterwards make one table.

The points are those of the program itself (`stasis list-fault-points`); where each is reached, and whether a
target, a criu and a mover are there then, is seen in a run of each verb without a fault. Each case then runs the verb
with one fault, `stasis recover --all` twice, and looks at what is left. On the simulated driver with the real
CRIU; the workload verifies its memory. See docs/adr/0010-fault-points.md.

Status 77: it cannot run here, for the reason given.
"""
import argparse
import collections
import ctypes
import glob
import json
import multiprocessing
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ACTIONS = ("kill", "error", "target-dies", "criu-dies", "mover-dies", "disk-full", "no-memory", "target-no-memory")
CASE_LIMIT_S = 180  # for one command; the slowest takes about a second
DISK = "96m"  # of state and images; disk-full fills it
MEMORY = "4M"
MEMORY_BY_AGENT = "12M"  # of which some is in pieces that it serves
# What is in a target stays there: the mapping in which its threads are parked, and what its workers have in the
# place of the files that they inherited.
ONCE_PER_TARGET = ("park.step", "park.mapped", "replace.before", "replace.step", "replace.closed", "replace.file",
                   "replace.mapped", "replace.after")

# Nothing there differs with the agent.
ELSEWHERE = ("journal.", "group.", "park.", "unpark.", "replace.", "lock.", "unlock.", "remember.", "forget", "zeros.")
# Reached many times, each like the others.
MANY_TIMES = {"content.write": (1, 10), "zeros.dropped": (1, 5)}

# What is tried: a verb in a situation. `begin`: the first point from which on it differs from another one, whose
# points before are not tried again.
# `agent`: the target was started by `stasis run`, so that its memory goes past the driver.
Scenario = collections.namedtuple("Scenario", "name verb begin end agent", defaults=[None, False])
SCENARIOS = (
    Scenario("suspend", "suspend", None),
    Scenario("suspend of a group", "suspend", "part.at-rest", "part.done"),
    Scenario("dump of a group", "dump", "part.at-rest", "dump.ending"),
    Scenario("resume", "resume", None),
    Scenario("dump", "dump", None),
    Scenario("restore", "restore", None),
    Scenario("recover a suspend", "recover", None),
    Scenario("recover a dump", "recover", None),
    Scenario("recover an ended dump", "recover", None),
    Scenario("recover a resume", "recover", None),
    Scenario("swap", "swap", "swap.recorded"),
    Scenario("recover a swap", "recover", "swap.undone"),
    Scenario("dump of a loader", "dump", "replace.before", "replace.after"),
    Scenario("suspend of a loader", "suspend", "replace.before", "replace.after"),
    Scenario("attach", "attach", "attach.loaded"),
    Scenario("suspend of a pair", "suspend", "inside.checked", "inside.after"),
    Scenario("dump --force", "dump", "image.manifest-written"),
    Scenario("dump --leave-running", "dump", "dump.ending"),
    Scenario("dump --leave-suspended", "dump", "dump.complete"),
    Scenario("dump of host memory --host-memory=parallel", "dump", "host.hidden", "dump.complete"),
    Scenario("dump of host memory --host-memory=parallel --leave-running --pre-copy=on", "dump", "host.precopied"),
    Scenario("restore of host memory", "restore", "criu.post-restore", "restore.adopted"),
    Scenario("restore --leave-suspended", "restore", "criu.post-restore"),
    Scenario("suspend by the agent", "suspend", "group.opened", "direct.dropped", True),
    Scenario("resume by the agent", "resume", "restore.after", None, True),
    Scenario("dump by the agent", "dump", "group.opened", None, True),
    Scenario("dump --base by the agent", "dump", "content.link", "content.synced", True),
    Scenario("dump --leave-running by the agent", "dump", "direct.prepared", None, True),
    Scenario("dump --leave-running --pre-copy=on by the agent", "dump", "direct.copied_ahead", "direct.closed", True),
    Scenario("restore by the agent", "restore", "restore.held", None, True),
    Scenario("restore --leave-suspended by the agent", "restore", "criu.post-restore", None, True),
    Scenario("recover a suspend by the agent", "recover", None, None, True),
    Scenario("dump --leave-suspended by the agent", "dump", "direct.prepared", None, True),
    Scenario("recover a dump by the agent", "recover", None, None, True),
    Scenario("suspend of ranks by the agent", "suspend", "direct.detached", "direct.dropped", True),
    Scenario("resume of ranks by the agent", "resume", "restore.after", None, True),
    Scenario("dump of ranks by the agent", "dump", "direct.detached", "dump.ending", True),
    Scenario("restore of ranks by the agent", "restore", "restore.held", None, True),
    Scenario("recover a suspend of ranks by the agent", "recover", "direct.refill", None, True),
    Scenario("suspend of orphans by the agent", "suspend", "direct.inherited", "direct.detached", True),
    Scenario("resume of orphans by the agent", "resume", "restore.after", None, True),
    Scenario("dump of orphans by the agent", "dump", "direct.inherited", "dump.ending", True),
    Scenario("restore of orphans by the agent", "restore", "restore.held", None, True),
)
Reached = collections.namedtuple("Reached", "point nth target criu mover")
Case = collections.namedtuple("Case", "scenario point nth action")


# What the workload does, and whether under the agent.
Kind = collections.namedtuple("Kind", "program agent")
PROGRAMS = {
    "memory": ["memory", "--size", MEMORY],
    "memory by the agent": ["memory", "--size", MEMORY_BY_AGENT],
    # Some of its blocks lie alone in an area of the driver's.
    "attach": ["memory", "--size", "64M"],
    "loader": ["loader", "--size", MEMORY],
    # Which the driver saves as memory of the process.
    "host": ["memory", "--size", "20M"],
    # Of which a tool has to ask whether they share any.
    "pair": ["collective", "--children", "2", "--size", "256K", "--pause-ms", "2"],
    # Processes that write into each other's GPU memory.
    "ranks": ["collective", "--children", "2", "--size", "256K", "--pause-ms", "2", "--sharing"],
    # Processes that share memory whose owner has ended: tests/gpu/orphans.py.
    "orphans": ["ends", "2"],
}
ORPHANS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "gpu", "orphans.py")
# Whose parent has no GPU memory.
TREES = ("pair", "ranks", "orphans")
# What happens to a target once.
FIRST_TIME = ("attach", "dump --leave-running --pre-copy=on by the agent", "suspend of orphans by the agent",
              "dump of orphans by the agent")


def kind_of(scenario):
    program = next((word for word in ("loader", "pair", "ranks", "orphans", "host") if word in scenario.name), scenario.name)
    program = program if program in PROGRAMS else "memory"
    return Kind(program + " by the agent" if scenario.agent and program == "memory" else program, scenario.agent)


def plain_name(scenario):
    return scenario.name.removesuffix(" by the agent").replace(" of ranks", "").replace(" of orphans", "")


class Failed(Exception):
    """A case did not end well."""


def check(condition, what):
    if not condition:
        raise Failed(what)


def wait_until(seconds, condition, what):
    deadline = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < deadline, what)
        time.sleep(0.005)


class Place:
    """One target, with a simulated machine, a state directory and a small disk of its own."""

    def __init__(self, build, root):
        self.build = build
        self.root = root
        self.disk = os.path.join(root, "disk")
        self.image = os.path.join(self.disk, "image")
        self.base = os.path.join(self.disk, "earlier")
        self.kept_image = ""
        self.state = os.path.join(self.disk, "state")
        self.status_file = os.path.join(root, "status")
        self.log = os.path.join(root, "target.log")
        self.pid = 0
        self.kind = Kind("memory", False)
        self.workers = []
        self.other = 0  # the second program of a swap
        self.kept_pids = {}
        self.recovered = ""
        for directory in (self.disk, os.path.join(root, "sim"), os.path.join(root, "kept")):
            os.makedirs(directory)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0700", "tmpfs", self.disk], check=True)
        os.mkdir(self.state, 0o700)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("STASIS_")}
        self.env |= {
            "STASIS_STATE_DIR": self.state,
            "STASIS_SIM_DIR": os.path.join(root, "sim"),
            "STASIS_RING": "2M",
            "STASIS_LIBCUDA": os.path.join(build, "lib/stasis/sim/libcuda.so.1"),
        }
        if "STASIS_CRIU" in os.environ:
            self.env["STASIS_CRIU"] = os.environ["STASIS_CRIU"]

    def close(self):
        # Also what a case that has failed no longer knows.
        for pid in self.mine():
            os.kill(pid, signal.SIGKILL)
        self.reap()
        subprocess.run(["umount", "-l", self.disk], check=False)

    # --- Programs

    def stasis(self, *words, fault=None, log=None):
        env = dict(self.env)
        if fault:
            env |= {"STASIS_FAULT": fault, "STASIS_FAULT_FILL": self.disk}
        if log:
            env["STASIS_FAULT_LOG"] = log
        command = [os.path.join(self.build, "bin/stasis"), *words]
        with open(os.path.join(self.root, "out"), "w+", encoding="utf-8") as out:
            # Its own session: nothing reaches it but what the case is about.
            with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                  start_new_session=True) as process:
                try:
                    status = process.wait(CASE_LIMIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    status = "no end"
            out.seek(0)
            said = out.read()
        check(status != "no end", f"stasis {' '.join(words)} does not end: {said}")
        return status, said

    def done(self, *words):
        status, said = self.stasis(*words)
        check(status == 0, f"stasis {' '.join(words)}: status {status}: {said}")
        return said

    # --- The target

    def proc(self, name):
        try:
            with open(f"/proc/{self.pid}/{name}", encoding="utf-8") as file:
                return file.read()
        except (FileNotFoundError, ProcessLookupError):
            return ""

    def lives(self):
        self.reap()
        state = [line for line in self.proc("status").splitlines() if line.startswith("State:")]
        return bool(state) and state[0].split()[1] not in "ZX"

    @staticmethod
    def reap():
        # Whatever a killed tool has left becomes a child of ours.
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            pass

    def start_target(self):
        env = dict(self.env)
        env["LD_LIBRARY_PATH"] = os.path.dirname(env["STASIS_LIBCUDA"])
        if self.kind.agent:
            env["LD_PRELOAD"] = os.path.join(self.build, "lib/stasis/libstasis-preload.so")
        command = [os.path.join(self.build, "bin/stasis-workload"), *PROGRAMS[self.kind.program],
                   "--status", self.status_file]
        if self.kind.program == "orphans":
            command = [sys.executable, ORPHANS, self.status_file, *PROGRAMS["orphans"]]
        self.forget_rounds()
        with open(self.log, "w", encoding="utf-8") as log:
            self.pid = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                        start_new_session=True).pid
        wait_until(60, lambda: self.round() > 0, "the target does not come up")
        if self.kind.program == "orphans":  # their owner is a child, too, and ends
            wait_until(60, lambda: len(self.children()) == 2, "the owner does not end")
        self.workers = self.children()

    def children(self):
        return [int(pid) for pid in self.proc(f"task/{self.pid}/children").split()]

    def start_other(self):
        """A second program, suspended; it ends with the case."""
        env = self.env | {"LD_LIBRARY_PATH": os.path.dirname(self.env["STASIS_LIBCUDA"])}
        command = [os.path.join(self.build, "bin/stasis-workload"), "memory", "--size", MEMORY]
        self.other = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                      stderr=subprocess.DEVNULL, start_new_session=True).pid
        wait_until(60, lambda: self.cuda_state(self.other) == "running", "the second program does not come up")
        self.done("suspend", str(self.other))

    def end_other(self):
        if self.other:
            os.kill(self.other, signal.SIGKILL)
            wait_until(60, lambda: self.reap() or not os.path.exists(f"/proc/{self.other}"), "the second program stays")
            self.other = 0

    def end_target(self):
        if self.pid and self.lives():
            os.kill(self.pid, signal.SIGKILL)
        wait_until(60, lambda: not self.pid or self.number_is_free(), "the target does not end")

    def number_is_free(self):
        self.reap()
        return not any(os.path.exists(f"/proc/{pid}") for pid in [self.pid, *self.workers])

    def forget_rounds(self):
        # In place, and of the same size: CRIU restores open files only as they were.
        with open(self.status_file, "r+" if os.path.exists(self.status_file) else "w", encoding="utf-8") as file:
            file.write(f"{'round 0 ok':<63}\n")

    def round(self):
        with open(self.status_file, encoding="utf-8") as file:
            words = file.read().split()
        return int(words[1]) if len(words) > 1 else 0

    def goes_on(self):
        self.forget_rounds()
        wait_until(60, lambda: self.round() > 0, "the target stands still")
        first = self.round()
        wait_until(60, lambda: self.round() >= first + 2, "the target stands still")
        check(self.lives(), "the target has ended")

    def cuda_state(self, pid=None):
        pid = pid or (self.workers[0] if self.kind.program in TREES else self.pid)
        command = [os.path.join(self.build, "bin/cuda-checkpoint"), "--get-state", "--pid", str(pid)]
        asked = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=CASE_LIMIT_S, check=False)
        return asked.stdout.strip() if asked.returncode == 0 else asked.stderr.strip()

    def traced(self):
        return "TracerPid:\t0" not in self.proc("status")

    def held_threads(self):
        """Threads that wait where `stasis` has sent them: in an anonymous mapping of code."""
        code = []
        for line in self.proc("maps").splitlines():
            words = line.split()
            if words[1] == "r-xp" and len(words) == 5:
                low, high = words[0].split("-")
                code.append((int(low, 16), int(high, 16)))
        held = 0
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            words = self.proc(f"task/{thread}/syscall").split()
            held += any(low <= int(words[-1], 16) < high for low, high in code) if len(words) > 2 else 0
        return held

    # --- What is left

    def mine(self, program=b""):
        """Processes of this place, whichever program has started them: all, or those of one program."""
        mark = f"STASIS_STATE_DIR={self.state}\0".encode()
        found = []
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                with open(path, "rb") as cmdline, open(os.path.dirname(path) + "/environ", "rb") as environ:
                    words = cmdline.read().split(b"\0")
                    if words[0].endswith(program) and mark in environ.read():
                        found.append(int(path.split("/")[2]))
            except OSError:
                continue
        return found

    def crius(self):
        return self.mine(b"/criu")

    def records(self):
        locks = ("journal.lock", "gpu-room.lock", "gpu-ahead.lock")  # files that stay, and say nothing
        return [name for name in os.listdir(self.state)
                if name not in locks and not (name.startswith("restore-") and name.endswith(".log"))
                and not (name.startswith("GPU-") and name.endswith(".lock"))  # checkpoint/gpu_room.h
                and not name.startswith("jobs")  # the folder of names of jobs (ADR 22)
                and name != "compiled"]  # that of code for the GPU (ADR 29)

    def check_clean(self):
        check(not self.crius(), f"criu runs: {self.crius()}")
        left = self.records()
        check(not left, f"in the state directory: {left}")
        left = [name for name in os.listdir(self.disk) if name.startswith("image.") and not name.endswith(".log")]
        check(not left, f"beside the image: {left}")

    def free_disk(self):
        if os.path.exists(os.path.join(self.disk, "fault-fill")):
            os.unlink(os.path.join(self.disk, "fault-fill"))

    def give_memory(self):
        for pid in (pid for pid in [self.pid, *self.workers] if pid and os.path.exists(f"/proc/{pid}")):
            for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
                resource.prlimit(pid, kind, (resource.prlimit(pid, kind)[1],) * 2)

    def has_image(self):
        return os.path.exists(self.image)

    def drop_image(self):
        for path in glob.glob(self.image + "*"):
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    # --- Situations

    def prepare(self, scenario, point=""):
        """Brings everything to where the scenario begins; returns the words of its command."""
        name = plain_name(scenario)
        self.free_disk()
        self.drop_image()
        self.end_other()
        kind = kind_of(scenario)
        if scenario.name in FIRST_TIME or point in ONCE_PER_TARGET or (kind != self.kind and scenario.verb != "restore"):
            self.end_target()
            self.pid, self.workers = 0, []
        if scenario.verb != "restore":
            self.kind = kind
        if scenario.verb == "restore":
            self.prepare_kept_image(kind)
            self.end_target()
            self.kind = kind  # what will be restored, and may live on into the next case
            self.pid, self.workers = self.kept_pids[kind]
            self.put_files_back(self.kept_image)
            wait_until(60, self.number_is_free, "the number of the target is taken")
            more = ["--leave-suspended"] if "suspended" in name else []
            return ["restore", "--images-dir", self.kept_image, "--detach", *more]
        if not self.pid or not self.lives():
            self.start_target()
        pid = str(self.pid)
        if name == "suspend of a group":
            group = os.path.join(self.root, "group")
            shutil.rmtree(group, ignore_errors=True)
            return ["suspend", pid, "--group", group, "--parts", "1"]
        if name == "dump of a group":
            group = os.path.join(self.root, "group")
            shutil.rmtree(group, ignore_errors=True)
            return ["dump", pid, "--images-dir", self.image, "--group", group, "--parts", "1"]
        if name == "resume":
            self.done("suspend", pid)
        elif name == "dump --base":
            # Without what it was killed in: the base has to be sound whatever happens.
            shutil.rmtree(self.base, ignore_errors=True)
            self.done("dump", pid, "--images-dir", self.base, "--leave-running")
            return ["dump", pid, "--images-dir", self.image, "--base", self.base]
        elif name == "dump --force":
            self.done("dump", pid, "--images-dir", self.image, "--leave-running")
        elif "swap" in name:
            self.done("resume", pid)
            self.start_other()
            words = ["swap", pid, str(self.other)]
            if name == "swap":
                return words
            self.stasis(*words, fault="swap.begun:kill")
        elif name == "recover a resume":
            self.done("suspend", pid)
            self.stasis("resume", pid, fault="restore.after:kill")
        elif name == "recover a suspend":
            self.stasis("suspend", pid, fault="checkpoint.after:kill")
        elif name == "recover a dump":
            self.stasis("dump", pid, "--images-dir", self.image, fault="image.manifest:kill")
        elif name == "recover an ended dump":
            self.stasis("dump", pid, "--images-dir", self.image, fault="dump.finish:kill")
        if scenario.verb == "dump":
            options = [word for word in name.split() if word.startswith("--")]
            return ["dump", pid, "--images-dir", self.image, *options]
        if scenario.verb == "attach":
            return ["attach", pid, "--graphs-are-safe"]
        return ["recover", "--all"] if scenario.verb == "recover" else [scenario.verb, pid]

    def prepare_kept_image(self, kind):
        self.kept_image = os.path.join(self.root, "kept", kind.program.replace(" ", "-"))
        if kind in self.kept_pids:
            return
        if kind != self.kind:
            self.end_target()
            self.kind = kind
        if not self.pid or not self.lives():
            self.start_target()
        options = ["--host-memory=parallel"] if kind.program == "host" else []
        self.done("dump", str(self.pid), "--images-dir", self.kept_image, *options)
        self.kept_pids[kind] = self.pid, self.workers
        os.mkdir(self.kept_image + ".files")
        for file in self.files_of_workers():
            shutil.copy(file, self.kept_image + ".files")

    def put_files_back(self, image):
        """The ranks count their rounds in a file, and an image has no files; in place, as CRIU wants it."""
        self.forget_rounds()  # a target that was killed may have left half a line
        # So may its workers: it is up before they are.
        for name in os.listdir(image + ".files") if os.path.exists(image + ".files") else []:
            with open(os.path.join(image + ".files", name), "rb") as kept:
                content = kept.read()
            with open(os.path.join(self.root, name), "r+b") as file:
                file.write(content)
                file.truncate()

    def files_of_workers(self):
        return [file.path for file in os.scandir(self.root) if file.name.startswith("status.")]

    def restore_and_go_on(self, image):
        self.end_target()
        self.put_files_back(image)
        self.done("restore", "--images-dir", image, "--detach")
        check(self.cuda_state() == "running", f"restored, and {self.cuda_state()}")
        self.goes_on()

    def run_case(self, case):
        """Raises Failed. Returns how it ended: a word."""
        words = self.prepare(case.scenario, case.point)
        fired = os.path.join(self.root, "fired")
        if os.path.exists(fired):
            os.unlink(fired)
        status, said = self.stasis(*words, fault=f"{case.point}:{case.action}@{case.nth}", log=fired)
        self.recovered = ""
        try:
            with open(fired, encoding="utf-8") as file:
                check(f"fault {case.point} {case.action}" in file.read(), "the fault did not come to pass")
            check((status == -signal.SIGKILL) == (case.action == "kill"), f"status {status}")
            check("[usage]" not in said, "the fault could not be")
            return self.judge(case, status, said)
        except (OSError, Failed, subprocess.TimeoutExpired) as error:
            raise Failed(f"{error}\n  status {status}, it said: {said.strip()}\n"
                         f"  recover said: {self.recovered.strip()}") from error

    def check_rule(self, case, status):
        """Each process is as it was before, or as it was asked for, when a command returns."""
        if not self.lives():
            return
        if self.other:
            return  # judge_swap()
        before = {"resume": "checkpointed", "restore": "no"}.get(case.scenario.verb, "running")
        asked = {"suspend": "checkpointed", "dump": "no"}.get(case.scenario.verb, "running")
        if "--leave-" in case.scenario.name:
            asked = "checkpointed" if "suspended" in case.scenario.name else "running"
        expected = asked if status == 0 or case.scenario.verb == "recover" else before
        state = self.cuda_state()
        if case.scenario.name == "recover a resume" and status != 0 and state == "checkpointed":
            return  # it cannot be finished: as before it
        # One that was killed may take a moment to end.
        check(state == expected or not self.lives(), f"the target is {state}, and should be {expected}")

    def judge(self, case, status, said):
        if case.action != "kill":
            check(status >= 0, "it did not end by itself")
            check(not self.crius(), "criu runs on")
            if status != 12:
                self.check_rule(case, status)
        if "memory" in case.action:
            check(status != 12, "something is left behind")
            # CRIU may not get so far as to know it.
            check(status == 0 or "memory" in said or "criu was killed" in said or self.ended_for_memory(case, said),
                  "it does not say what was short")
        # On the full disk, and with what memory the target has, as it is.
        said_first = said
        said = self.recovered = self.done("recover", "--all")
        again = self.done("recover", "--all")
        check("nothing to recover" in again, f"the second recover found something: {again}")
        check(case.action == "kill" or status == 12 or case.scenario.verb == "recover" or "nothing to recover" in said,
              f"stasis ended by itself, and left something to recover: {said}")
        self.free_disk()
        self.give_memory()
        if self.other:
            self.judge_swap()
        if "--base" in case.scenario.name:
            self.done("verify", self.base)
            shutil.rmtree(self.base)
        outcome = self.judge_living(case, status) if self.lives() else self.judge_dead(case, status, said_first)
        self.check_clean()
        return outcome

    def ended_for_memory(self, case, said):
        """While it runs, the program may ask for some itself, and get none."""
        with open(self.log, encoding="utf-8") as log:
            asked = "bad_alloc" in log.read()
        return case.action == "target-no-memory" and asked and "has ended" in said

    def judge_swap(self):
        """As before, or as asked for: one runs, and the other is suspended."""
        states = self.cuda_state(), self.cuda_state(self.other)
        check(states in (("running", "checkpointed"), ("checkpointed", "running")), f"the two are {states}")
        if states[0] == "checkpointed":
            self.done("swap", str(self.other), str(self.pid))
        self.done("resume", str(self.other))
        self.end_other()

    def judge_living(self, case, status):
        check(not self.traced(), "the target is traced")
        state = self.cuda_state()
        name = plain_name(case.scenario)
        scenario_verb = case.scenario.verb
        # One that was cut short is finished, from the moment at which it has written that it is about to.
        suspended = name == "resume" and (case.action != "kill" or "nothing to recover" in self.recovered)
        suspended = suspended or (name == "recover a resume" and case.action != "kill")
        suspended = suspended or (status == 0 and ("suspended" in name or scenario_verb == "suspend"))
        suspended = suspended or (name.endswith("--leave-suspended") and case.action == "kill")
        suspended = suspended or (scenario_verb == "suspend" and case.action == "kill")
        check(state == "running" or (state == "checkpointed" and suspended), f"the target is {state}")
        # Suspended, and not left behind: as before, or as it was asked for.
        if state == "checkpointed":
            self.done("resume", str(self.pid))
        self.goes_on()
        check(self.held_threads() == 0, f"{self.held_threads()} thread(s) are held")
        # A suspend goes on where it cannot replace their files, and says so.
        if "loader" in name and not (scenario_verb == "suspend" and case.action == "error"):
            # What was done to its workers keeps no later dump from them.
            self.done("dump", str(self.pid), "--images-dir", self.image, "--leave-running", "--force")
            self.goes_on()
        if scenario_verb == "attach":
            # What was begun is gone on with, or was done.
            self.done("attach", str(self.pid), "--graphs-are-safe")
            self.goes_on()
            self.done("suspend", str(self.pid))
            self.done("resume", str(self.pid))
            self.goes_on()
        outcome = "suspended" if state == "checkpointed" else "runs"
        if self.has_image():
            # Whatever bears the name of an image is whole. The ranks have counted on since.
            if self.kind.program == "ranks":
                self.done("verify", self.image)
            else:
                self.restore_and_go_on(self.image)
            outcome += "+image"
        return outcome

    def judge_dead(self, case, status, said):
        name = case.scenario.name
        if case.scenario.verb == "restore":
            check(status != 0 or case.action == "target-dies", "nothing is restored")
            self.restore_and_go_on(self.kept_image)
            return "image"
        if self.has_image():
            self.restore_and_go_on(self.image)
            return "image"
        # For moments CRIU's code runs in the program, which ends with it.
        with_criu = case.action == "criu-dies" and "(rolled back, but ended meanwhile: process" in said
        by_itself = self.ended_for_memory(case, said)
        check(case.action == "target-dies" or with_criu or by_itself, f"the target has ended, and there is no image ({name})")
        return "target died"


# --- The list of cases


def reached_points(place, scenario):
    words = place.prepare(scenario)
    log = os.path.join(place.root, "reached")
    if os.path.exists(log):
        os.unlink(log)
    status, said = place.stasis(*words, log=log)
    check(status == 0 and os.path.exists(log), f"{scenario.name}, without a fault: status {status}: {said}")
    counts = collections.Counter()
    reached = []
    with open(log, encoding="utf-8") as file:
        for line in file:
            point, _, *lives = line.split()
            counts[point] += 1
            reached.append(Reached(point, counts[point], "target=1" in lives, "criu=1" in lives, "mover=1" in lives))
    place.done("recover", "--all")
    if "--leave-suspended" in scenario.name:
        place.end_target()
    return reached


def skip_reason(scenario, at, action, points, everything):
    """Why a combination makes no sense, or None."""
    # What comes next takes most of the memory: a mover and its ring, and buffers.
    prepares = at.point == "group.opened" and "memory" in action
    if at.point == "swap.undone" and action == "no-memory":
        return "the driver is loaded after it, and its loader does not say that memory is short"
    if "swap" in scenario.name and not at.point.startswith("swap."):
        return "tried with the verbs that a swap consists of"
    if scenario.agent and not everything and not prepares and action not in ("kill", "mover-dies") \
            and not at.point.startswith(("direct.", "content.")):
        return "tried without the agent; with it by --all"
    if scenario.agent and not everything and not prepares and at.point.startswith(ELSEWHERE):
        return "tried without the agent; with it by --all"
    if action == "error" and not points[at.point]["can_fail"]:
        return "nothing can fail there: it has no way to return an error"
    if action.startswith("target-") and not at.target:
        return "no target lives there"
    if action == "criu-dies" and not at.criu:
        return "no criu runs there"
    if action == "mover-dies" and not (scenario.agent and at.mover):
        return "no mover has anything to do there"
    if action == "disk-full" and at.point in ("journal.removed", "journal.finished"):
        return "nothing is written after it"
    return None


def plan(reached, points, everything):
    cases = []
    skipped = collections.Counter()
    for scenario in SCENARIOS:
        begun = scenario.begin is None
        for at in reached[scenario]:
            begun = begun or at.point == scenario.begin
            if not begun or at.nth not in MANY_TIMES.get(at.point, (at.nth,)):
                continue
            for action in ACTIONS:
                reason = skip_reason(scenario, at, action, points, everything)
                if reason:
                    skipped[(action, reason)] += 1
                else:
                    cases.append(Case(scenario, at.point, at.nth, action))
            # It may come more than once.
            if at.point == scenario.end and not any(a.point == scenario.end and a.nth > at.nth for a in reached[scenario]):
                break
    return cases, skipped


def usual(cases):
    """What is tried each time: a kill at every point, and there too the mover's death while it copies beside the driver,
    and a target that gets no memory where it has to copy by itself; some of all other kills, and of all else."""
    first, more, rest = [], [], []
    seen = set()
    for case in cases:
        beside = case.scenario.name == "suspend by the agent" and case.point.startswith(("direct.", "checkpoint."))
        alone = case.scenario.name == "recover a suspend by the agent" and case.point == "direct.refill"
        if (case.action == "mover-dies" and beside) or (case.action == "target-no-memory" and alone):
            first.append(case)
        elif case.action != "kill":
            rest.append(case)
        elif case.point in seen:
            more.append(case)
        else:
            seen.add(case.point)
            first.append(case)
    return first + more[::48] + rest[::144]


# --- Running them


def work(build, root, tasks, results):
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: we reap what others leave
    place = Place(build, root)
    try:
        while (case := tasks.get()) is not None:
            start = time.monotonic()
            try:
                outcome, error = place.run_case(case), None
            except (Failed, OSError, subprocess.SubprocessError) as failure:
                outcome, error = None, f"{failure}"
                place = begin_anew(place)
            results.put((case, outcome, error, time.monotonic() - start))
    finally:
        place.close()
        results.put(None)


def begin_anew(place):
    build, root = place.build, place.root
    place.close()
    for path in glob.glob(root + "/*"):
        shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path)
    return Place(build, root)


def can_mount(scratch):
    at = os.path.join(scratch, "mount")
    os.mkdir(at)
    tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", at], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        subprocess.run(["umount", "-l", at], check=False)
    return tried.returncode == 0, tried.stderr.strip()


def run_all(cases, build, scratch, workers):
    tasks = multiprocessing.Queue()
    results = multiprocessing.Queue()
    for case in [*cases, *[None] * workers]:
        tasks.put(case)
    processes = []
    for number in range(workers):
        root = os.path.join(scratch, f"place-{number}")
        os.mkdir(root)
        processes.append(multiprocessing.Process(target=work, args=(build, root, tasks, results)))
        processes[-1].start()
    done = []
    ended = 0
    while ended < workers:
        try:
            result = results.get(timeout=2 * CASE_LIMIT_S)
        except queue.Empty:
            break
        if result is None:
            ended += 1
            continue
        done.append(result)
        case, outcome, error, seconds = result
        if error:
            print(f"FAILED {case.scenario.name}: {case.point}@{case.nth} {case.action} ({seconds:.1f} s)\n  {error}", flush=True)
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
    return done


def print_matrix(done, skipped):
    by_row = collections.defaultdict(lambda: collections.defaultdict(list))
    for case, outcome, _, _ in done:
        by_row[(case.scenario, case.point)][case.action].append(outcome)
    print(f"\n{'':28}" + "".join(f"{action:>18}" for action in ACTIONS))
    last = None
    for (scenario, point), row in sorted(by_row.items(), key=lambda item: SCENARIOS.index(item[0][0])):
        if scenario != last:
            print(f"{scenario.name}")
            last = scenario
        cells = []
        for action in ACTIONS:
            outcomes = row.get(action, [])
            text = "/".join(sorted(set(outcomes))) or "-"
            cells.append(f"{text}{f' x{len(outcomes)}' if len(outcomes) > 1 else ''}")
        print(f"  {point:26}" + "".join(f"{cell:>18}" for cell in cells))
    print("\nNot tried (-):")
    for (action, reason), count in sorted(skipped.items()):
        print(f"  {action}: {reason} ({count})")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=os.environ.get("STASIS_BUILD"), help="the build folder")
    parser.add_argument("--jobs", type=int, default=6, help="cases at the same time")
    parser.add_argument("--all", action="store_true", default=bool(os.environ.get("STASIS_ALL_TESTS")),
                        help="all of them; otherwise a kill at each point, some of all else, and less of the agent")
    parser.add_argument("--only", default="", help="scenario, point or action: only the cases that name it; with , several")
    parser.add_argument("--scratch", default=None, help="where to work")
    options = parser.parse_args()
    build = os.path.abspath(options.build or "build/dev")
    if os.geteuid() != 0:
        print("skipped: needs root, for CRIU and for a small disk")
        return 77
    listed = subprocess.run([os.path.join(build, "bin/stasis"), "list-fault-points"], capture_output=True, text=True, check=True)
    listed = json.loads(listed.stdout)
    if not listed["built_in"]:
        print("skipped: this build has no fault points (-DSTASIS_FAULT_POINTS=ON)")
        return 77
    points = {point["name"]: point for point in listed["points"]}
    start = time.monotonic()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="stasis-faults.", dir=options.scratch) as scratch:
        possible, why = can_mount(scratch)
        if not possible:
            print(f"skipped: no small disk to be filled: {why}")
            return 77
        os.mkdir(os.path.join(scratch, "dry"))
        place = Place(build, os.path.join(scratch, "dry"))
        try:
            reached = {scenario: reached_points(place, scenario) for scenario in SCENARIOS}
        finally:
            place.close()
        never = set(points) - {at.point for all_at in reached.values() for at in all_at}
        cases, skipped = plan(reached, points, options.all)
        if not options.all and not options.only:
            cases = usual(cases)
        for word in filter(None, options.only.split(",")):
            cases = [case for case in cases if word in (case.scenario.name, case.point, case.action)]
        done = run_all(cases, build, scratch, options.jobs)
    survived = sum(1 for result in done if result[1])
    # What failed stands above; nothing is to hide it.
    if survived == len(cases):
        print_matrix(done, skipped)
    for point in sorted(never):
        print(f"FAILED: no verb reaches {point}")
    if len(done) < len(cases):
        print(f"FAILED: {len(cases) - len(done)} cases have no result")
    seconds = time.monotonic() - start
    print(f"{len(points)} fault points, {len(cases)} cases, {survived} survived, in {seconds:.0f} s")
    return 0 if survived == len(cases) and not never else 1


if __name__ == "__main__":
    sys.exit(main())
