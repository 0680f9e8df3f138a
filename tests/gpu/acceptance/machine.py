"""The machine and the build under test: where programs are, what GPUs there are, how to run things."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

from .core import Failure, Skip
from .targets import Target, reap_strays


# 1 GiB at a time, each with MADV_HUGEPAGE and MADV_POPULATE_WRITE (Linux 5.14).
USE_MEMORY = """
import mmap, sys
kept = []
for _ in range(int(sys.argv[1])):
    kept.append(mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    kept[-1].madvise(14)
    kept[-1].madvise(23)
"""


def mounted_below(folder):
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        return any(line.split()[4].startswith(folder + "/") for line in file)


def gpus_wanted(need):
    """Of "two gpus" or "8 gpus"."""
    count = need.split()[0]
    return 2 if count == "two" else int(count)


class Finished:
    """A command that has ended."""

    def __init__(self, argv, status, out, err, seconds):
        self.argv = argv
        self.status = status  # negative: killed by that signal; None: timed out
        self.out = out
        self.err = err
        self.seconds = seconds

    def error_lines(self):
        """Standard error without what our tools say on the simulated driver."""
        return [line for line in self.err.splitlines() if "simulated GPU" not in line]

    def first_error(self):
        return (self.error_lines() or [""])[0]

    def brief(self):
        said = self.error_lines() or self.out.strip().splitlines()
        name = os.path.basename(self.argv[0])
        return f"{name} {' '.join(self.argv[1:])}: status {self.status}: {' / '.join(said[:4])}"

    def must_succeed(self):
        if self.status != 0:
            raise Failure(self.brief())
        return self

    def json(self):
        try:
            return json.loads(self.out)
        except ValueError as reason:
            raise Failure(f"{self.brief()}: not JSON: {reason}") from reason


class Machine:
    def __init__(self, build, criu, simulated, work, keep, out=None):
        self.build = os.path.abspath(build)
        self.bin = os.path.join(self.build, "bin")
        self.simulated = simulated
        self.keep = keep
        self.out = os.path.abspath(out) if out else None
        self.root = os.path.abspath(work or tempfile.mkdtemp(prefix="stasis-gpu-tests-"))
        os.makedirs(self.root, exist_ok=True)
        self.work = self.root
        self.criu_path = criu or os.environ.get("STASIS_CRIU") or self._find_criu()
        self.targets = []  # of the case under way
        self.shared = {}  # by name: of several cases, each of which leaves it running
        self.commands = []
        self.sim_library = os.path.join(self.build, "lib", "stasis", "sim", "libcuda.so.1")
        self.env = dict(os.environ)
        if self.criu_path:
            self.env["STASIS_CRIU"] = self.criu_path
        if simulated:
            self.env["STASIS_LIBCUDA"] = self.sim_library
            self.env["STASIS_SIM_DIR"] = os.path.join(self.root, "gpus")
            self.env.setdefault("STASIS_SIM_GPUS", "2x8G")
            self.env["LD_LIBRARY_PATH"] = os.path.dirname(self.sim_library)
        self._gpus = None

    @staticmethod
    def _find_criu():
        """As the project's own script says, which knows what is new enough."""
        script = os.path.join(os.path.dirname(__file__), "..", "..", "..", "tools", "get-criu")
        if not os.access(script, os.X_OK):
            return shutil.which("criu")
        said = subprocess.run([script, "--check"], stdin=subprocess.DEVNULL, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return said.stdout.decode().strip() or None if said.returncode == 0 else None

    # --- One case after the other

    def begin(self, name):
        self.work = os.path.join(self.root, name.replace("/", "_"))
        shutil.rmtree(self.work, ignore_errors=True)
        os.makedirs(self.work)

    def end(self, keep):
        """Ends what the case started; removes its files unless it failed. Returns its commands."""
        for target in self.targets:
            target.kill()
        self.targets = []
        if keep:  # after a failure nothing is trusted
            self.end_shared()
        reap_strays({target.pid for target in self.shared.values()})
        # What is mounted below, of a container that was ended half-way, is this machine's own.
        if self.work != self.root and not mounted_below(self.work):
            images = [e for e in os.listdir(self.work) if os.path.isdir(os.path.join(self.work, e))]
            for entry in images if keep and not self.keep else []:
                self._prune(os.path.join(self.work, entry))
            if not keep and not self.keep:
                shutil.rmtree(self.work, ignore_errors=True)
        self.work = self.root
        commands, self.commands = self.commands, []
        return commands

    @staticmethod
    def _prune(folder):
        """Of a failed case's images only what can be read is kept, not gigabytes of pages."""
        for path, _, files in os.walk(folder):
            for file in files:
                full = os.path.join(path, file)
                if not file.endswith((".log", ".json")) and os.lstat(full).st_size > 1 << 20:
                    os.unlink(full)

    def end_shared(self):
        for target in self.shared.values():
            target.kill()
        self.shared = {}

    def share(self, name, make):
        """A target for several cases: starting one for each would take most of the time."""
        if name not in self.shared or self.shared[name].ended():
            work, self.work = self.work, self.root
            self.shared[name] = make()
            self.targets.remove(self.shared[name])
            self.work = work
        return self.shared[name]

    def known_pids(self):
        return {target.pid for target in [*self.targets, *self.shared.values()]}

    def register(self, target):
        self.targets.append(target)

    def require(self, needs):
        for need in needs:
            if need == "criu" and not self.criu_path:
                raise Skip("no criu: give --criu PATH")
            elif need == "root" and os.geteuid() != 0:
                raise Skip("needs root")
            elif need.endswith(" gpus") and len(self.gpus()) < gpus_wanted(need):
                raise Skip(f"needs {gpus_wanted(need)} GPUs, this machine has {len(self.gpus())}")
            elif need.startswith("program "):
                self.program(need.split(" ", 1)[1])
        self.gpus()

    def want_host_memory(self, size):
        """Some virtual machines get their memory only as it is used, and until then the kernel counts
        too little of it to give any program so much at once. So others use it before. Returns the
        seconds that this took."""
        with open("/proc/meminfo", encoding="ascii") as file:
            known = int(file.readline().split()[1]) << 10
        if self.simulated or known > size + (8 << 30):
            return 0
        users = 4
        start = time.monotonic()
        children = [subprocess.Popen([sys.executable, "-c", USE_MEMORY, str(size // users >> 30)]) for _ in range(users)]
        try:
            for child in children:
                child.wait(120)
        finally:
            for child in children:
                child.kill()
        return time.monotonic() - start

    # --- Programs

    def program(self, name):
        path = os.path.join(self.bin, name)
        if not os.access(path, os.X_OK):
            raise Skip(f"{path} is not built" + (
                " (configure with -DSTASIS_TESTS=ON)" if name.startswith("stasis-work") else ""))
        return path

    def run(self, *argv, timeout=300, env=None):
        argv = [str(word) for word in argv]
        start = time.monotonic()
        # As cheap a start as possible (no preexec_fn): some of these are timed.
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, timeout=timeout, env=env or self.env,
                                  check=False)
            status, out, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            status, out, err = None, late.stdout or b"", (late.stderr or b"") + b"\n(timed out)"
        finished = Finished(argv, status, out.decode("utf-8", "replace"),
                            err.decode("utf-8", "replace"), time.monotonic() - start)
        self.commands.append({
            "argv": argv, "status": status, "seconds": round(finished.seconds, 4),
            "stdout": finished.out[-2000:], "stderr": finished.err[-2000:]})
        return finished

    def stasis(self, *argv, **options):
        return self.run(self.program("stasis"), *argv, **options)

    def cuda_checkpoint(self, *argv, **options):
        return self.run(self.program("cuda-checkpoint"), *argv, **options)

    def criu(self, *argv, **options):
        return self.run(self.criu_path, *argv, **options)

    def driver(self, pid, *steps, device_map=None, timeout_ms=10000):
        """The driver's own calls. Returns the list of steps with their results and seconds."""
        argv = ["--pid", pid, "--timeout", timeout_ms]
        if device_map:
            argv += ["--device-map", device_map]
        return self.run(self.program("stasis-raw-driver"), *argv, *steps).json()["steps"]

    def state(self, pid):
        """'running' and so on; 'not CUDA' or the error's name if the driver has no state to tell."""
        step = self.driver(pid, "state")[0]
        return step["value"] if step["result"] == 0 else step["name"]

    def expect_state(self, pid, wanted):
        found = self.state(pid)
        if found != wanted:
            raise Failure(f"process {pid} is {found} instead of {wanted}")

    # --- Targets

    def target_env(self):
        return dict(self.env)

    def workload(self, kind, *options, name=None, env=None):
        argv = [self.program("stasis-workload"), kind, "--status", "{status}", *map(str, options)]
        return Target(self, argv, name or kind, env)

    # --- GPUs

    def gpus(self):
        """[{name, uuid}] as the driver tells; Skip if there is none."""
        if self._gpus is None:
            step = self.run(self.program("stasis-raw-driver"), "gpus")
            if step.status == 2:
                raise Skip("no GPU here: " + step.first_error())
            record = step.json()["steps"][0]
            if record["result"] != 0 or not record["value"]:
                raise Skip(f"no GPU here: the driver answers {record['name']}")
            if step.json()["simulated"] and not self.simulated:
                raise Skip("no GPU here, only the simulated driver; --simulated tests that one")
            self._gpus = record["value"]
        return self._gpus

    def gpu_memory(self):
        """Bytes in use on each GPU, by UUID."""
        if not self.simulated and shutil.which("nvidia-smi"):
            found = self.run("nvidia-smi", "--query-gpu=uuid,memory.used",
                             "--format=csv,noheader,nounits").must_succeed()
            rows = [line.split(",") for line in found.out.strip().splitlines()]
            return {uuid.strip(): int(mib) << 20 for uuid, mib in rows}
        step = self.run(self.program("stasis-raw-driver"), "memory").must_succeed().json()["steps"][0]
        return {gpu["uuid"]: gpu["used"] for gpu in step["value"]}

    def expect_gpu_free(self, before, tolerance=64 << 20, timeout=15):
        """The GPUs are as empty as before. The driver gives memory back a little later."""
        deadline = time.monotonic() + timeout
        while True:
            now = self.gpu_memory()
            over = {uuid: used - before.get(uuid, 0) for uuid, used in now.items()}
            if all(extra <= tolerance for extra in over.values()):
                return
            if time.monotonic() > deadline:
                raise Failure(f"GPU memory was not given back: {over} bytes more than before")
            time.sleep(0.1)
