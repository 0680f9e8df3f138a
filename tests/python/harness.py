"""For the tests of the Python package: targets on the simulated driver, and results in TAP.

A file of tests ends with `harness.main()`. It is run by ctest with STASIS_BUILD, the build folder, and
the package on PYTHONPATH.
"""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

BUILD = os.environ["STASIS_BUILD"]
BIN = os.path.join(BUILD, "bin")
SIM = os.path.join(BUILD, "lib", "stasis", "sim")
SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Before the package loads the driver. Of all the cases of a file together: a driver is loaded once.
WORK = tempfile.mkdtemp(prefix="stasis-python-")
os.environ["STASIS_SIM_DIR"] = os.path.join(WORK, "gpus")
os.environ["STASIS_SIM_GPUS"] = "2x1G"
os.environ["STASIS_STATE_DIR"] = os.path.join(WORK, "state")
os.environ["STASIS_LIBCUDA"] = os.path.join(SIM, "libcuda.so.1")
os.makedirs(os.environ["STASIS_SIM_DIR"])
FAULTS = os.path.join(os.environ["STASIS_SIM_DIR"], "faults")


needs_criu = unittest.skipUnless(os.geteuid() == 0, "needs root: CRIU")


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it did not come to be in time")
        time.sleep(0.005)


class Target:
    """A workload that verifies its own memory in rounds."""

    def __init__(self, kind, *options, first_round=True, env=None, program=None):
        self.folder = tempfile.mkdtemp(dir=WORK)
        self.status = os.path.join(self.folder, "status")
        with open(os.path.join(self.folder, "log"), "wb") as log:
            # Not by Popen: after a dump and a restore it is a child that Popen does not know.
            self.pid = os.posix_spawn(
                program or os.path.join(BIN, "stasis-workload"),
                ["stasis-workload", kind, "--status", self.status, *map(str, options)],
                {**os.environ, "LD_LIBRARY_PATH": SIM, **(env or {})},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                ],
                setsid=True,
            )
        if first_round:
            wait_until(lambda: self.rounds() > 0)

    def rounds(self):
        try:
            with open(self.status, encoding="ascii") as file:
                return int((re.match(r"round (\d+)", file.read()) or [0, 0])[1])
        except OSError:
            return 0

    def goes_on(self):
        before = self.rounds()
        wait_until(lambda: self.rounds() > before + 1)

    def stands_still(self, seconds=0.3):
        before = self.rounds()
        time.sleep(seconds)
        return self.rounds() == before

    def log(self):
        with open(os.path.join(self.folder, "log"), encoding="utf-8") as file:
            return file.read()

    def finish(self):
        """Ends it as its user would; every round has to have been right."""
        os.kill(self.pid, signal.SIGTERM)
        _, status = os.waitpid(self.pid, 0)
        pid, self.pid = self.pid, None
        assert status == 0 and "verified" in self.log(), f"target {pid}: status {status}: {self.log()}"

    def kill(self):
        if self.pid is None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass


class Case(unittest.TestCase):
    maxDiff = None

    def target(self, kind="memory", *options, **more):
        options = options or (("--size", "4M") if kind == "memory" else ())
        target = Target(kind, *options, **more)
        self.addCleanup(target.kill)
        return target

    def faults(self, text):
        with open(FAULTS, "w", encoding="ascii") as file:
            file.write(text)
        self.addCleanup(self.no_faults)

    @staticmethod
    def no_faults():
        if os.path.exists(FAULTS):
            os.unlink(FAULTS)

    def folder(self):
        return tempfile.mkdtemp(dir=WORK)


def tool(name, *argv):
    """One of our programs, which know nothing of this package: (status, standard output)."""
    done = subprocess.run([os.path.join(BIN, name), *map(str, argv)], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, check=False)
    return done.returncode, done.stdout.decode()


def state_of(pid):
    return tool("cuda-checkpoint", "--get-state", "--pid", pid)[1].strip()


def name_of(pid):
    with open(f"/proc/{pid}/comm", encoding="ascii") as file:
        return file.read().strip()


def gpus_used():
    """Bytes in use on each simulated GPU."""
    return [gpu["used_bytes"] for gpu in json.loads(tool("stasis-sim-smi", "--json")[1])["gpus"]]


def gpu_uuids():
    return [gpu["uuid"] for gpu in json.loads(tool("stasis-sim-smi", "--json")[1])["gpus"]]


def held_up_count():
    """How many targets are in a call of the driver that a fault draws out (docs/simulated-driver.md)."""
    ours = f"STASIS_SIM_DIR={os.environ['STASIS_SIM_DIR']}".encode()
    count = 0
    for path in glob.glob("/proc/[0-9]*/task/*/comm"):
        try:
            with open(path, "rb") as file, open(f"/proc/{path.split('/')[2]}/environ", "rb") as environment:
                count += file.read() == b"sim-held-up\n" and ours in environment.read().split(b"\0")
        except OSError:
            pass
    return count


def held_up():
    return held_up_count() > 0


def interrupt_when(condition, signal_number=signal.SIGINT):
    """As Ctrl-C does it, as soon as it is so."""

    def act():
        wait_until(condition)
        os.kill(os.getpid(), signal_number)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def interrupt_in(seconds, signal_number=signal.SIGINT):
    """As Ctrl-C does it, a little later."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal_number))
    timer.daemon = True
    timer.start()
    return timer


class _Tap(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.count = 0

    def _say(self, word, test, more=""):
        self.count += 1
        print(f"{word} {self.count} {test.id().partition('.')[2]}{more}", flush=True)

    def addSuccess(self, test):
        super().addSuccess(test)
        self._say("ok", test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._say("ok", test, f" # skip {reason}")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._say("not ok", test)
        print(self.failures[-1][1], flush=True)

    def addError(self, test, err):
        super().addError(test, err)
        self._say("not ok", test)
        print(self.errors[-1][1], flush=True)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            print(f"in {subtest.id()}:\n{self._exc_info_to_string(err, test)}", flush=True)
            self.failed_subtests = getattr(self, "failed_subtests", 0) + 1


def main():
    module = sys.modules["__main__"]
    suite = unittest.TestSuite()
    loader = unittest.TestLoader()
    chosen = sys.argv[1:]
    for name, cls in vars(module).items():
        if isinstance(cls, type) and issubclass(cls, unittest.TestCase) and cls is not Case:
            for test in loader.loadTestsFromTestCase(cls):
                if not chosen or any(word in test.id() for word in chosen):
                    suite.addTest(test)
    result = _Tap()
    suite.run(result)
    print(f"1..{result.count}")
    shutil.rmtree(WORK, ignore_errors=True)
    failed = not result.wasSuccessful() or getattr(result, "failed_subtests", 0)
    sys.exit(1 if failed or result.count == 0 else 0)
