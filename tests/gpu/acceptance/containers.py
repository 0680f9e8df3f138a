"""Containers that see this machine's own files, read-only, and its GPUs: started, saved and brought back
by runc and crun. engines.py has those of podman and containerd.

The engine is taken from $STASIS_RUNC or $STASIS_CRUN, or from PATH. CRIU and its plugin are named to it as
its users do it: the first by PATH, the other by a file of CRIU's options.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import time

from . import plain_criu
from .core import Failure, Skip
from .targets import start_ticks

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What a container has of its own.
OWN = {"proc", "sys", "dev", "run", "tmp"}
# The network's is the machine's own: what runc makes comes back without its addresses.
NAMESPACES = ("pid", "mount", "ipc", "uts")
CGROUPS = "/sys/fs/cgroup"


def find_engine(program):
    """The path of runc, crun, podman or ctr."""
    path = os.environ.get("STASIS_" + program.upper()) or shutil.which(program)
    if not path or not os.access(path, os.X_OK):
        raise Skip(f"no {program} ({path or 'not on PATH'}): tests/gpu/get-engine makes a folder with one")
    return path


def mount_points():
    """Of this machine, in the order in which they were mounted."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        return [line.split()[4].replace("\\040", " ") for line in file]


def own_files():
    """Bind mounts of this machine's folders, each with what is mounted below it: CRIU has to be told of
    every single mount, so none comes along unnamed."""
    top = [entry for entry in sorted(os.listdir("/")) if entry not in OWN]
    folders = ["/" + entry for entry in top if os.path.isdir("/" + entry) and not os.path.islink("/" + entry)]
    links = {entry: os.readlink("/" + entry) for entry in top if os.path.islink("/" + entry)}
    below = [point for point in mount_points()
             if any(point.startswith(folder + "/") for folder in folders) and os.path.lexists(point)]
    return folders + list(dict.fromkeys(below)), links


def device_nodes():
    nodes = []
    for entry in sorted(os.listdir("/dev")):
        if not entry.startswith("nvidia"):
            continue
        about = os.stat("/dev/" + entry)
        if stat.S_ISCHR(about.st_mode):
            nodes.append({"path": "/dev/" + entry, "type": "c", "major": os.major(about.st_rdev),
                          "minor": os.minor(about.st_rdev), "fileMode": 0o666, "uid": 0, "gid": 0})
    return nodes


class PrivateMounts:
    """A mount namespace in which the engine works: what it mounts there, and what it leaves, is gone with
    it, and out of reach of what removes our work folder."""

    def __init__(self):
        self.made = []
        self.old_cgroups = []
        self.holder = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sleep", "infinity"],
                                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not self._is_separate():
            if self.holder.poll() is not None or time.monotonic() > deadline:
                raise Skip("no mount namespace can be made here")
            time.sleep(0.01)

    def _is_separate(self):
        try:
            with open(f"/proc/{self.holder.pid}/comm", encoding="ascii") as file:
                return file.read().strip() == "sleep"
        except OSError:
            return False

    def inside(self, *argv):
        return ["/bin/sh", "-c", 'mounts=$1 cgroups=$2; shift 2; for one in $cgroups; do echo $$ >"$one/cgroup.procs"; '
                'done; exec nsenter --mount="$mounts" "$@"', "sh", f"/proc/{self.holder.pid}/ns/mnt",
                " ".join(self.old_cgroups), *argv]

    def do(self, *argv):
        done = subprocess.run(self.inside(*argv), stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode != 0:
            raise Skip(f"{' '.join(argv)}: {done.stderr.decode(errors='replace').strip()}")

    def mount_over(self, folder, *options):
        """At a folder that is made, if need be, and then removed at the end."""
        if not os.path.isdir(folder):
            os.makedirs(folder)
            self.made.append(folder)
        self.do("mount", *options, folder)

    def one_cgroup_version(self, name):
        """crun does not work where cgroups of both versions are mounted: there it sees those of version 2. Of
        version 1 it and its containers have some of this name, which are empty: CRIU copies what is below,
        and a cgroup at the top has its CPUs for itself."""
        if not os.path.isdir(f"{CGROUPS}/unified"):
            return
        for kind in os.listdir(CGROUPS):
            if kind != "unified" and not os.path.islink(f"{CGROUPS}/{kind}"):
                self.old_cgroups.append(make_cgroup(f"{CGROUPS}/{kind}", name))
        self.do("umount", "--recursive", CGROUPS)
        self.do("mount", "-t", "cgroup2", "none", CGROUPS)

    def end(self):
        self.holder.kill()
        self.holder.wait()
        for folder in self.made:
            try:
                os.rmdir(folder)
            except OSError:
                pass


def make_cgroup(top, name):
    path = os.path.join(top, name)
    os.makedirs(path, exist_ok=True)
    for needed in ("cpuset.cpus", "cpuset.mems"):
        if os.path.exists(f"{top}/{needed}"):
            shutil.copyfile(f"{top}/{needed}", f"{path}/{needed}")
    return path


def remove_cgroups(name):
    """What is left of a container: CRIU makes its cgroups again in the version that crun does not see, with
    a copy of all others below."""
    for top, _, _ in os.walk(CGROUPS, topdown=False):
        if name in top.split("/"):
            try:
                os.rmdir(top)
            except OSError:
                pass


class Container:
    """One container, which is started, saved and brought back, under one name. What is said here is the
    same for all engines."""

    program = ""
    goes_on = False  # after a checkpoint, for a moment

    def __init__(self, machine, argv, env=None, name="stasis", options=()):
        """With `options` of CRIU's besides, a line each."""
        self.machine = machine
        self.options = options
        self.name = f"{name}-{os.getpid()}"
        self.cgroup = self.name
        self.path = find_engine(self.program)
        self.log = os.path.join(machine.work, name + ".log")
        self.said = os.path.join(machine.work, self.program + ".log")
        self.pid = 0
        self.plugins = plain_criu.plugin_folder(machine)
        self.env = {**machine.env, "PATH": ":".join((os.path.dirname(machine.criu_path), os.path.dirname(self.path),
                                                     machine.env["PATH"]))}
        self.mounts = PrivateMounts()
        machine.register(self)
        self.prepare()
        if self.run_once("/bin/true").status != 0:
            raise Skip(f"{self.program} cannot run a container here: {self.last_words()}")
        # The log is a file that exists in the container: CRIU saves no others as standard streams.
        self.start(["/bin/sh", "-c", f'exec "$@" </dev/null >>{self.log} 2>&1', "sh", *map(str, argv)], env or {})

    # --- What an engine does its own way

    def prepare(self):
        """Makes what all containers of the engine need."""

    def run_once(self, *argv):
        """A container that ends by itself: whether the engine works here at all."""
        raise NotImplementedError

    def start(self, argv, env):
        raise NotImplementedError

    def checkpoint(self, images):
        """Returns the seconds. The container is gone then."""
        raise NotImplementedError

    def restore(self, images):
        raise NotImplementedError

    def names_plugin(self, images):
        """Whether what was saved says that it needs the plugin."""
        with open(os.path.join(images, "inventory.img"), "rb") as file:
            return b"cuda_plugin" in file.read()

    def remove(self):
        raise NotImplementedError

    # --- What it is given

    def criu_options(self, folder):
        """The path of a file of CRIU's options in it."""
        path = os.path.join(folder, "default.conf")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(("network-lock skip", "timeout 60", f"libdir {self.plugins}", *self.options, "")))
        return path

    def criu_options_for_all(self):
        """Our options are those of every caller of CRIU, in our mount namespace."""
        folder = os.path.join(self.machine.work, "criu")
        os.makedirs(folder)
        self.criu_options(folder)
        self.mounts.mount_over("/etc/criu", "--bind", folder)

    def variables(self, env):
        return {**self.machine.target_env(), "HOME": self.machine.work, "TMPDIR": self.machine.work, **env}

    def bind_mounts(self):
        """Pairs of a path, which is the same inside, and "ro" or "rw"."""
        files, _ = own_files()
        needed = [self.machine.build, TESTS, *self.env.get("PYTHONPATH", "").split(":")]
        # Folders before what is in them: runc takes its mounts away in this order.
        hidden = sorted(path for path in map(os.path.normpath, needed)
                        if os.path.isdir(path) and path.startswith(tuple(f"/{name}/" for name in OWN)))
        return [(path, "ro") for path in dict.fromkeys(files + hidden)] + [(self.machine.root, "rw")]

    # --- The engine called

    def call(self, *argv, seconds=150):
        # What the engine starts keeps its standard streams, so they are no pipes of ours.
        return self.machine.run(
            *self.mounts.inside("timeout", "-k", "5", str(seconds), "/bin/sh", "-c",
                                'log=$1; shift; exec "$@" >"$log" 2>&1', "sh", self.said, *argv),
            timeout=seconds + 30, env=self.env)

    def output_of(self, *argv):
        """Of a call that must succeed: what it said."""
        self.must(self.call(*argv), argv[0])
        with open(self.said, encoding="utf-8", errors="replace") as file:
            return file.read().strip()

    def last_words(self):
        with open(self.said, encoding="utf-8", errors="replace") as file:
            return (file.read().strip().splitlines() or ["nothing"])[-1]

    def must(self, done, what, log=None):
        if done.status == 0:
            return done
        errors = []
        if log and os.path.exists(log):
            with open(log, encoding="utf-8", errors="replace") as file:
                errors = [line.strip() for line in file if "Error" in line and "rlimit" not in line]
        raise Failure(f"{self.program} {what}: status {done.status}: {self.last_words()}: {' / '.join(errors[:4])}")

    # --- Watched and ended

    def output(self):
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def wait_gone(self, timeout=20):
        deadline = time.monotonic() + timeout
        while start_ticks(self.pid) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            os.waitpid(self.pid, os.WNOHANG)  # of runc and crun the runner is what it was left to
        except ChildProcessError:
            pass
        self.pid = 0

    def ended(self):
        return not self.pid or start_ticks(self.pid) is None

    def wait_for(self, condition, what, timeout=120):
        deadline = time.monotonic() + timeout
        while not condition():
            said = self.output().strip().splitlines()[-1:] or ["nothing"]
            if self.ended() and not condition():
                raise Failure(f"the container has ended and there is no {what}; it said: {said[0]}")
            if time.monotonic() > deadline:
                raise Failure(f"no {what} within {timeout} s; the container said: {said[0]}")
            time.sleep(0.02)

    def kill(self):
        self.remove()
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.wait_gone()
        self.mounts.end()
        for name in (self.cgroup, self.name + ".old"):
            remove_cgroups(name)


class Runc(Container):
    program = "runc"

    def prepare(self):
        self.bundle = os.path.join(self.machine.work, "bundle")
        self.pid_file = os.path.join(self.machine.work, "pid")
        os.makedirs(os.path.join(self.bundle, "rootfs"))
        for link, target in own_files()[1].items():
            os.symlink(target, os.path.join(self.bundle, "rootfs", link))

    def options_of_engine(self):
        return ["--root", os.path.join(self.machine.work, self.program)]

    def _call(self, *words):
        return self.call(self.path, *self.options_of_engine(), *words)

    def run_once(self, *argv):
        self._configure(argv, {})
        return self._call("run", "--bundle", self.bundle, self.name)

    def start(self, argv, env):
        self._configure(argv, env)
        self.must(self._call("run", "--detach", "--bundle", self.bundle, "--pid-file", self.pid_file, self.name), "run")
        self._note_pid()

    def annotations(self):
        return {"org.criu.config": self.criu_options(self.bundle)}

    def _configure(self, argv, env):
        config = os.path.join(self.bundle, "config.json")
        if os.path.exists(config):
            os.unlink(config)
        self.machine.run("timeout", "30", self.path, "spec", "--bundle", self.bundle).must_succeed()
        with open(config, encoding="utf-8") as file:
            spec = json.load(file)
        spec["process"].update(terminal=False, cwd="/", args=list(argv),
                               env=[f"{key}={value}" for key, value in self.variables(env).items()])
        spec["root"]["readonly"] = False
        spec["linux"]["namespaces"] = [{"type": kind} for kind in NAMESPACES]
        spec["linux"]["devices"] = device_nodes()
        spec["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
        spec["annotations"] = self.annotations()
        spec["mounts"] = [mount for mount in spec["mounts"] if mount["type"] != "cgroup"]
        for path, how in self.bind_mounts():
            spec["mounts"].append({"destination": path, "type": "bind", "source": path, "options": ["bind", how]})
        with open(config, "w", encoding="utf-8") as file:
            json.dump(spec, file, indent=1)

    def _note_pid(self):
        with open(self.pid_file, encoding="ascii") as file:
            self.pid = int(file.read())

    def checkpoint(self, images):
        os.makedirs(images)
        done = self.must(self._call("checkpoint", "--image-path", images, "--work-path", images, self.name),
                         "checkpoint", os.path.join(images, "dump.log"))
        self.wait_gone()
        return done.seconds

    def restore(self, images):
        done = self.must(self._call("restore", "--detach", "--image-path", images, "--work-path", images, "--bundle",
                                    self.bundle, "--pid-file", self.pid_file, self.name),
                         "restore", os.path.join(images, "restore.log"))
        self._note_pid()
        return done.seconds

    def exec(self, *argv):
        """A program of its own in the container, which must succeed."""
        return self.must(self._call("exec", self.name, *argv), f"exec {' '.join(argv)}")

    def remove(self):
        self._call("delete", "--force", self.name)


class Crun(Runc):
    program = "crun"

    def prepare(self):
        super().prepare()
        version = self.machine.run(self.path, "--version").must_succeed().out
        if "+CRIU" not in version:
            raise Skip(f"{version.splitlines()[0]} was built without CRIU")
        self.mounts.one_cgroup_version(self.name + ".old")
        self.criu_options_for_all()

    def options_of_engine(self):
        return []  # crun 1.24 to 1.28 restores no container of another --root (containers/crun#2239)

    def annotations(self):
        return {}  # crun looks for them since 1.26
