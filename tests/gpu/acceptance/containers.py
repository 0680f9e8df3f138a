"""A container of runc that sees this machine's own files, read-only, and its GPUs.

runc is taken from $STASIS_RUNC, or from PATH. CRIU and its plugin are named to it as its users do it:
the first by PATH, the other by a file of CRIU's options that the container's annotation names.
"""

import json
import os
import shutil
import signal
import stat
import time

from . import plain_criu
from .core import Failure, Skip
from .targets import start_ticks

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What a container has of its own.
OWN = {"proc", "sys", "dev", "run", "tmp"}
# The network's is the machine's own: what runc makes comes back without its addresses.
NAMESPACES = ("pid", "mount", "ipc", "uts")


def find_runc():
    path = os.environ.get("STASIS_RUNC") or shutil.which("runc")
    if not path or not os.access(path, os.X_OK):
        raise Skip(f"no runc ({path or 'not on PATH'}): tests/gpu/get-engine makes a folder with one")
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


class Container:
    """One container, which is started, saved and brought back, under one name."""

    def __init__(self, machine, argv, env=None, name="stasis", options=()):
        """With `options` of CRIU's besides, a line each."""
        self.machine = machine
        self.options = options
        self.name = f"{name}-{os.getpid()}"
        self.runc_path = find_runc()
        self.bundle = os.path.join(machine.work, name + ".bundle")
        self.log = os.path.join(machine.work, name + ".log")
        self.pid = 0
        self.plugins = plain_criu.plugin_folder(machine)
        os.makedirs(os.path.join(self.bundle, "rootfs"))
        self.env = {**machine.env, "PATH": os.path.dirname(machine.criu_path) + ":" + machine.env["PATH"]}
        machine.register(self)
        self._configure(["/bin/true"], {})
        tried = self._runc("run", "--bundle", self.bundle, self.name)
        if tried.status != 0:
            raise Skip(f"runc cannot run a container here: {self._said()}")
        self._configure(argv, env or {})
        self._runc_must("run", "--detach", "--bundle", self.bundle, "--pid-file", self._pid_file, self.name)
        self._note_pid()

    # --- What runc is given

    @property
    def _pid_file(self):
        return os.path.join(self.machine.work, "pid")

    def _configure(self, argv, env):
        options = os.path.join(self.bundle, "criu.conf")
        with open(options, "w", encoding="utf-8") as file:
            file.write("\n".join(("network-lock skip", "timeout 60", f"libdir {self.plugins}", *self.options, "")))
        config = os.path.join(self.bundle, "config.json")
        if os.path.exists(config):
            os.unlink(config)
        self.machine.run("timeout", "30", self.runc_path, "spec", "--bundle", self.bundle).must_succeed()
        with open(config, encoding="utf-8") as file:
            spec = json.load(file)
        files, links = own_files()
        for link, target in links.items():
            path = os.path.join(self.bundle, "rootfs", link)
            if not os.path.islink(path):
                os.symlink(target, path)
        # The log is a file that exists in the container: CRIU saves no others as standard streams.
        variables = {**self.machine.target_env(), "HOME": self.machine.work, "TMPDIR": self.machine.work, **env}
        spec["process"].update(
            terminal=False, cwd="/",
            args=["/bin/sh", "-c", f'exec "$@" </dev/null >>{self.log} 2>&1', "sh", *map(str, argv)],
            env=[f"{key}={value}" for key, value in variables.items()])
        spec["root"]["readonly"] = False
        spec["linux"]["namespaces"] = [{"type": kind} for kind in NAMESPACES]
        spec["linux"]["devices"] = device_nodes()
        spec["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
        spec["annotations"] = {"org.criu.config": options}
        spec["mounts"] = [mount for mount in spec["mounts"] if mount["type"] != "cgroup"]
        needed = [self.machine.build, TESTS, *self.env.get("PYTHONPATH", "").split(":")]
        # Folders before what is in them: runc takes its mounts away in this order.
        hidden = sorted(path for path in map(os.path.normpath, needed)
                        if os.path.isdir(path) and path.startswith(tuple(f"/{name}/" for name in OWN)))
        for path in dict.fromkeys(files + hidden):
            spec["mounts"].append({"destination": path, "type": "bind", "source": path, "options": ["bind", "ro"]})
        spec["mounts"].append({"destination": self.machine.root, "type": "bind", "source": self.machine.root,
                               "options": ["bind", "rw"]})
        with open(config, "w", encoding="utf-8") as file:
            json.dump(spec, file, indent=1)

    def _runc(self, *words, seconds=150):
        # What runc starts keeps its standard streams, so they are no pipes of ours. At a restore it mounts
        # this machine's folders, writable, below the container's root, and may leave one there: in a mount
        # namespace of its own that is gone with it, and out of reach of what removes our work folder.
        self.said = os.path.join(self.machine.work, "runc.log")
        return self.machine.run(
            "timeout", "-k", "5", seconds, "unshare", "--mount", "--propagation", "private",
            "/bin/sh", "-c", 'log=$1; shift; exec "$@" >"$log" 2>&1', "sh", self.said, self.runc_path,
            "--root", os.path.join(self.machine.work, "runc"), *words,
            timeout=seconds + 30, env=self.env)

    def _said(self):
        with open(self.said, encoding="utf-8", errors="replace") as file:
            return (file.read().strip().splitlines() or ["nothing"])[-1]

    def _runc_must(self, *words, log=None):
        done = self._runc(*words)
        if done.status == 0:
            return done
        errors = []
        if log and os.path.exists(log):
            with open(log, encoding="utf-8", errors="replace") as file:
                errors = [line.strip() for line in file if "Error" in line and "rlimit" not in line]
        raise Failure(f"runc {words[0]}: status {done.status}: {self._said()}: {' / '.join(errors[:4])}")

    def _note_pid(self):
        with open(self._pid_file, encoding="ascii") as file:
            self.pid = int(file.read())

    # --- Saved and brought back

    def checkpoint(self, images):
        """The container is gone when it returns."""
        os.makedirs(images)
        done = self._runc_must("checkpoint", "--image-path", images, "--work-path", images, self.name,
                               log=os.path.join(images, "dump.log"))
        self._reap()
        self.pid = 0
        return done.seconds

    def restore(self, images):
        done = self._runc_must("restore", "--detach", "--image-path", images, "--work-path", images, "--bundle",
                               self.bundle, "--pid-file", self._pid_file, self.name,
                               log=os.path.join(images, "restore.log"))
        self._note_pid()
        return done.seconds

    # --- Watched and ended

    def output(self):
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def _reap(self, timeout=20):
        deadline = time.monotonic() + timeout
        while start_ticks(self.pid) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            os.waitpid(self.pid, os.WNOHANG)  # the runner is what it was left to
        except ChildProcessError:
            pass

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
        self._runc("delete", "--force", self.name, seconds=30)
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._reap()
