"""Processes that are suspended, dumped and restored: started, watched and ended.

The runner is a child subreaper, so that a process restored by CRIU, and what is left of a killed
tree, becomes its child: exit statuses can be had, and no zombie keeps a number that a restore needs.
"""

import ctypes
import os
import re
import signal
import time

from .core import Failure, Skip

PR_SET_CHILD_SUBREAPER = 36
EXIT_SKIPPED = 77


def become_subreaper():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def keep_descriptors_private():
    """What this process inherited (a test driver's growing log, say) must not get into a target:
    CRIU restores a process only if its open files are as they were."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                pass  # the one that listed the folder


def start_ticks(pid):
    """When the process started: what tells it from a later one with the same number. None if gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def parent_of(pid):
    """0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def session_of(pid):
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def rounds_in(path):
    """How many rounds a workload's heartbeat tells of."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            match = re.match(r"round (\d+) ok", file.read())
    except OSError:
        return 0
    return int(match.group(1)) if match else 0


def reap_strays(known):
    """Reaps adopted children that no Target will ask for."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid in known:
            return
        os.waitpid(info.si_pid, 0)


class Target:
    """One program under test. Its number stays the same across dump and restore."""

    def __init__(self, machine, argv, name, env=None):
        self.machine = machine
        self.name = name
        self.log = os.path.join(machine.work, name + ".log")
        self.status_file = os.path.join(machine.work, name + ".status")
        self.argv = [argument.replace("{status}", self.status_file) for argument in argv]
        self.exit_status = None
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        self.pid = os.posix_spawn(
            self.argv[0], self.argv, env or machine.target_env(), file_actions=actions, setsid=True
        )
        machine.register(self)

    # --- What it says

    def output(self):
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def rounds(self, suffix=""):
        """How many rounds it has verified, by its heartbeat; of a child of a tree: suffix '.1'."""
        return rounds_in(self.status_file + suffix)

    def wait_for(self, condition, what, timeout=60):
        deadline = time.monotonic() + timeout
        while not condition():
            self.fail_if_ended()
            if time.monotonic() > deadline:
                raise Failure(f"{self.name}: no {what} within {timeout} s")
            time.sleep(0.01)

    def wait_rounds(self, more=2, timeout=120):
        """Waits for some rounds more than now."""
        wanted = self.rounds() + more
        self.wait_for(lambda: self.rounds() >= wanted, f"round {wanted}", timeout)
        return self.rounds()

    def fail_if_ended(self):
        if self.ended():
            said = self.output().strip().splitlines()
            last = said[-1] if said else "nothing"
            if self.exit_status == EXIT_SKIPPED:
                raise Skip(last.rpartition("skipped: ")[2])
            raise Failure(f"{self.name} ended with status {self.exit_status}; it said: {last}")

    # --- Whether it lives

    def ended(self):
        """True once it has exited; its status is then in exit_status (None if the kernel does not tell it)."""
        if self.exit_status is not None:
            return True
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return start_ticks(self.pid) is None
        if pid == 0:
            return False
        self.exit_status = os.waitstatus_to_exitcode(status)
        return True

    def wait_ended(self, timeout=30):
        deadline = time.monotonic() + timeout
        while not self.ended():
            if time.monotonic() > deadline:
                raise Failure(f"{self.name} (process {self.pid}) did not end within {timeout} s")
            time.sleep(0.01)

    def forget_exit(self):
        """It is about to be restored: the end that was seen was not the last."""
        self.wait_ended()
        reap_strays(self.machine.known_pids() - {self.pid})
        self.exit_status = None

    def kill(self):
        tree = self.tree()
        for pid in tree:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + 20
        # What it left is the runner's own then.
        while not self.ended() or any(os.path.exists(f"/proc/{pid}") for pid in tree if pid != self.pid):
            if time.monotonic() > deadline:
                return
            reap_strays(self.machine.known_pids())
            time.sleep(0.01)

    def tree(self):
        """The process, everything below it, and everything in the session that it leads."""
        parents = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                parents[int(entry)] = parent_of(int(entry))
        found = [self.pid] if start_ticks(self.pid) else []
        for pid in parents:
            above = pid
            while above in parents and above != self.pid:  # torchrun's ranks have sessions of their own
                above = parents[above]
            if pid != self.pid and (above == self.pid or session_of(pid) == self.pid):
                found.append(pid)
        return found

    def finish(self, timeout=120):
        """SIGTERM; it has to end well and say how many rounds it verified. Returns that number."""
        self.fail_if_ended()
        os.kill(self.pid, signal.SIGTERM)
        self.wait_ended(timeout)
        said = self.output()
        match = re.findall(r"^verified (\d+) rounds$", said, re.M)
        if self.exit_status != 0 or not match:
            last = said.strip().splitlines()[-1:] or ["nothing"]
            raise Failure(
                f"{self.name} ended with status {self.exit_status} and not with verified rounds; "
                f"it said: {last[0]}"
            )
        return int(match[-1])
