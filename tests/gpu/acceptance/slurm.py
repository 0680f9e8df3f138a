"""A private Slurm: its controller and the daemon of one node, this machine, with some of its GPUs.

Its programs are taken from the folder $STASIS_SLURM (tests/gpu/get-engine slurm), or from PATH. It knows of
no other Slurm, and all that it starts is in a PID namespace that ends with it.
"""

import os
import random
import re
import shutil
import socket
import stat
import subprocess
import time

from .containers import CGROUPS, remove_cgroups
from .core import Failure, Skip, expect
from .targets import Target, rounds_in, start_ticks

DEPLOY = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..", "deploy", "slurm"))
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
NODE = "stasis-tests"
# A Slurm that allows several daemons on one machine, as Debian's does, names its cgroups so: version 1, version 2.
OWN_CGROUPS = (f"slurm_{NODE}", f"{NODE}_slurmstepd.scope")
STARTS_WITHIN = 30
# Seconds that a job waits at least when it was put back; the node finishes with it meanwhile.
PAUSE = 3
# The first process of the namespace collects the dead.
DAEMONS = """
exec 2>&1
munged --foreground --force --socket="$1/munge.sock" --key-file="$1/munge.key" --log-file="$1/munged.log" \
  --pid-file="$1/munged.pid" --seed-file="$1/munge.seed" &
until [ -S "$1/munge.sock" ]; do kill -0 $! || exit 1; sleep 0.05; done
slurmctld -D &
slurmd -D -N "$2" -d "$3" &
wait -n
exit $?
"""
CONFIGURATION = """ClusterName=stasis
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/{task}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MessageTimeout=60
ReturnToService=2
KillWait=60
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:{gpus}
PartitionName=low Nodes={node} Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes={node} PriorityTier=10 PreemptMode=OFF
"""


def find_programs():
    """The folder of the programs, and that of Slurm's plugins if it is not the one that Slurm was built for."""
    tree = os.environ.get("STASIS_SLURM")
    folder = os.path.join(tree, "bin") if tree else None
    for program in PROGRAMS:
        if not shutil.which(program, path=folder):
            raise Skip(f"no {program} ({folder or 'not on PATH'}): tests/gpu/get-engine slurm makes a folder with Slurm")
    return folder, os.path.join(tree, "plugins") if tree else None


def free_ports(count):
    """Below those that the kernel gives out."""
    found = []
    while len(found) < count:
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", random.randrange(10000, 30000)))
                found.append(one.getsockname()[1])
            except OSError:
                pass
    return found


class Slurm:
    def __init__(self, machine, gpus=1, cgroups=False):
        self.machine = machine
        self.cgroups = cgroups
        self.folder = os.path.join(machine.work, "slurm")
        for name in ("state", "spool"):
            os.makedirs(self._path(name))
        programs, plugins = find_programs()
        self.env = {**machine.env, "SLURM_CONF": self._path("slurm.conf"),
                    "PATH": ":".join(filter(None, (programs, DEPLOY, machine.bin, machine.env["PATH"])))}
        self.empty = machine.gpu_memory()
        self.put_back = {}  # when a job was first seen waiting
        self.nodes = self._nodes(gpus)
        self._configure(gpus, plugins)
        self._start()

    def _path(self, name):
        return os.path.join(self.folder, name)

    def _write(self, name, text, mode="w"):
        with open(self._path(name), mode) as file:
            file.write(text)

    def _nodes(self, gpus):
        """Slurm tells tasks the numbers of their GPUs only if those are devices."""
        if self.machine.simulated:
            paths = [self._path(f"nvidia{number}") for number in range(gpus)]
            for path, minor in zip(paths, (5, 7)):  # as /dev/zero and /dev/full
                try:
                    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, minor))
                except OSError as reason:
                    raise Skip(f"no devices can be made here: {reason}") from reason
            return paths
        numbers = sorted(int(name[6:]) for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))
        if len(numbers) < gpus:
            raise Skip(f"{len(numbers)} of /dev/nvidia0 and so on are here, {gpus} are needed")
        return [f"/dev/nvidia{number}" for number in numbers[:gpus]]

    def _configure(self, gpus, plugins):
        plugin = os.path.join(self.machine.build, "lib", "stasis", "slurm", "stasis.so")
        if not os.path.exists(plugin):
            raise Skip(f"{plugin} is not built (libslurm-dev)")
        self._write("munge.key", os.urandom(128), "wb")
        os.chmod(self._path("munge.key"), 0o600)
        self._write("plugstack.conf", f"required {plugin} task={DEPLOY}/stasis-task\n")
        self._write("gres.conf", "".join(f"Name=gpu File={node}\n" for node in self.nodes))
        self._write("cgroup.conf", f"CgroupPlugin=cgroup/{self._cgroup_version()}\nConstrainDevices=yes\n"
                                   "IgnoreSystemd=yes\n")
        text = CONFIGURATION.format(host=socket.gethostname().split(".")[0], ports=free_ports(2), folder=self.folder,
                                    node=NODE, gpus=gpus, proctrack="cgroup" if self.cgroups else "pgid",
                                    task="cgroup" if self.cgroups else "none")
        self._write("slurm.conf", text + (f"PluginDir={plugins}\n" if plugins else ""))

    def _cgroup_version(self):
        """Slurm would look for systemd's folder, which need not be there. By version 1 it touches no cgroup unless
        its other settings say so."""
        if not self.cgroups or all(os.path.isdir(f"{CGROUPS}/{kind}") for kind in ("devices", "freezer")):
            return "v1"
        if os.path.exists(f"{CGROUPS}/cgroup.controllers"):
            return "v2"
        raise Skip(f"no cgroups of devices in {CGROUPS}")

    def _start(self):
        slurmstepd = shutil.which("slurmstepd", path=self.env["PATH"])
        self.daemons = Target(self.machine, [shutil.which("unshare"), "--pid", "--fork", "--mount-proc", "--kill-child",
                                             "/bin/bash", "-c", DAEMONS, "bash", self.folder, NODE, slurmstepd],
                              "slurm", self.env)
        self.pid = self.daemons.pid
        self.machine.register(self)
        deadline = time.monotonic() + STARTS_WITHIN
        while "idle" not in self.ask("timeout", "2", "sinfo", "-h", "-o", "%T"):
            if self.daemons.ended() or time.monotonic() > deadline:
                raise Skip("Slurm does not start here: " + " / ".join(self.complaints()[-5:]))
            time.sleep(0.2)

    def complaints(self):
        """What the daemons have said of errors, the controller's first."""
        said = self.daemons.output().splitlines()
        for name in ("slurmctld.log", "slurmd.log"):
            if os.path.exists(self._path(name)):
                with open(self._path(name), encoding="utf-8", errors="replace") as file:
                    said += file.read().splitlines()
        said = [re.sub(r"^\[[^]]*\] ", "", line) for line in said]
        return [line for line in said if re.search("error|fatal", line)] or said or ["nothing"]

    def kill(self):
        """Ends Slurm with its jobs, and removes their cgroups."""
        self.daemons.kill()
        for name in OWN_CGROUPS if self.cgroups else ():
            remove_cgroups(name)

    # --- As its users and its administrator

    def ask(self, *argv):
        """What a command says, or nothing if it fails. It is not noted with the case's commands."""
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              env=self.env, timeout=60, check=False)
        return done.stdout.decode().strip()

    def do(self, *argv):
        return self.machine.run(*argv, env=self.env).must_succeed()

    def submit(self, name, command, *options, gpus=1):
        """A job by deploy/slurm/job.sbatch."""
        return Job(self, name, [f"--gres=gpu:{gpus}", f"--stasis-images={self.machine.work}/images-{name}/%j",
                                "--stasis-grace=50s", *options, os.path.join(DEPLOY, "job.sbatch"), *command])

    def submit_plain(self, name, command, *options, gpus=1):
        """A job without stasis. The command's second word is a script."""
        return Job(self, name, [f"--gres=gpu:{gpus}", *options, *command[1:]])

    def expect_gpus_free(self):
        self.machine.expect_gpu_free(self.empty)

    def gpus_in_use(self):
        """On how many GPUs there is clearly more than when Slurm was started."""
        least = (8 if self.machine.simulated else 1024) << 20
        return sum(used - self.empty[uuid] > least for uuid, used in self.machine.gpu_memory().items())

    def hurry(self):
        """Slurm lets a job that was put back wait for two minutes. An administrator can say otherwise."""
        for line in self.ask("squeue", "-h", "-t", "PENDING", "-o", "%A %r").splitlines():
            job, reason = line.split(None, 1)
            if reason != "BeginTime":
                continue
            if time.monotonic() - self.put_back.setdefault(job, time.monotonic()) > PAUSE:
                self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
                del self.put_back[job]

    def wait_for(self, condition, what, timeout=120):
        deadline = time.monotonic() + timeout
        while not condition():
            self.daemons.fail_if_ended()
            if time.monotonic() > deadline:
                raise Failure(f"no {what} within {timeout} s; Slurm says: {self.complaints()[-1]}")
            self.hurry()
            time.sleep(0.1)

    def processes(self, name):
        """The numbers of the processes of that name."""
        found = []
        for pid in self.daemons.tree():
            try:
                with open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as file:
                    if file.read().strip() == name[:15] and start_ticks(pid):
                        found.append(pid)
            except OSError:
                pass
        return found


class Job:
    """A job that sbatch has accepted."""

    def __init__(self, slurm, name, argv):
        self.slurm, self.name = slurm, name
        work = slurm.machine.work
        self.log = os.path.join(work, name + ".log")
        self.status_file = os.path.join(work, name + ".status")
        self.number = slurm.do("sbatch", "--parsable", f"--job-name={name}", f"--chdir={work}", f"--output={self.log}",
                               *(str(word).replace("{status}", self.status_file) for word in argv)).out.strip()

    def output(self):
        if not os.path.exists(self.log):
            return ""
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def rounds(self):
        return rounds_in(self.status_file)

    def state(self):
        return self.slurm.ask("squeue", "-h", "-t", "all", "-j", self.number, "-o", "%T")

    def restarts(self):
        said = re.search(r" Restarts=(\d+)", self.slurm.ask("scontrol", "show", "job", self.number))
        return int(said.group(1)) if said else 0

    def wait_for(self, condition, what, timeout=120):
        def met():
            if condition():
                return True
            state = self.state()
            expect(state not in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), f"the job {self.name} is {state}")
            return False
        try:
            self.slurm.wait_for(met, f"{what} of the job {self.name}", timeout)
        except Failure as reason:
            raise Failure(f"{reason}; it said: {self.output()[-800:]}") from reason

    def wait_state(self, wanted, timeout=120):
        self.wait_for(lambda: self.state() == wanted, f"state {wanted}", timeout)

    def wait_rounds(self, more=2, timeout=120):
        wanted = self.rounds() + more
        self.wait_for(lambda: self.rounds() >= wanted, f"round {wanted}", timeout)

    def finish(self, stop):
        """Makes the file at which its script ends. Returns the number of rounds that it verified."""
        with open(stop, "w", encoding="ascii"):
            pass
        self.wait_state("COMPLETED")
        verified = re.findall(r"^verified (\d+) rounds$", self.output(), re.M)
        expect(verified, f"{self.name}: no verified rounds; it said: {self.output()[-800:]}")
        return int(verified[-1])
