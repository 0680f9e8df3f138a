"""Containers of podman (with crun) and of containerd (with ctr and runc).

Both get an image that is made here, with nothing in it but links, /etc and empty folders: the rest is
this machine's own, mounted. Their folders of state are in our work folder. What is named by $STASIS_PODMAN
and $STASIS_CTR has its other programs in the same folder (tests/gpu/get-engine), or on PATH.
"""

import glob
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
import time

from .containers import Container, device_nodes, own_files, remove_cgroups
from .core import Failure, Skip

IMAGE = "localhost/machine:latest"
SAVED = "localhost/saved:latest"
# The engines put their own there.
REPLACED = {"etc/resolv.conf", "etc/hosts", "etc/hostname", "etc/mtab"}


def readable_by_others(entry):
    """Links, folders and what is no secret."""
    if entry.name in REPLACED:
        return None
    if entry.isreg() and not entry.mode & stat.S_IROTH:
        return None
    return entry if entry.isreg() or entry.isdir() or entry.issym() else None


def layer():
    """The container's root as a tar file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for link, target in own_files()[1].items():
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        tar.add("/etc", arcname="etc", filter=readable_by_others)
        for name in sorted(REPLACED - {"etc/mtab"}):
            tar.addfile(tarfile.TarInfo(name))
    return out.getvalue()


def digest(blob):
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def write_image(path):
    """An image of one layer, as OCI's specification of images has it in a tar file."""
    root = layer()
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {},
                         "rootfs": {"type": "layers", "diff_ids": [digest(root)]}}).encode()

    def described(blob, kind, **more):
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest(blob), "size": len(blob), **more}

    manifest = json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
                           "config": described(config, "config.v1+json"),
                           "layers": [described(root, "layer.v1.tar")]}).encode()
    names = {"io.containerd.image.name": IMAGE, "org.opencontainers.image.ref.name": IMAGE}
    index = json.dumps({"schemaVersion": 2,
                        "manifests": [described(manifest, "manifest.v1+json", annotations=names)]}).encode()
    with tarfile.open(path, "w") as tar:
        for name, blob in [("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'), ("index.json", index),
                           *(("blobs/" + digest(blob).replace(":", "/"), blob) for blob in (root, config, manifest))]:
            entry = tarfile.TarInfo(name)
            entry.size = len(blob)
            tar.addfile(entry, io.BytesIO(blob))


class ImageContainer(Container):
    """Of an engine that has images."""

    def beside(self, program):
        path = os.path.join(os.path.dirname(self.path), program)
        path = path if os.access(path, os.X_OK) else shutil.which(program)
        if not path:
            raise Skip(f"no {program} beside {self.path}, nor on PATH")
        return path

    def folder(self, name):
        path = os.path.join(self.machine.work, name)
        os.makedirs(path, exist_ok=True)
        return path

    def image(self):
        path = os.path.join(self.machine.work, "image.tar")
        write_image(path)
        return path

    def bind_mounts(self):
        """/etc is in the image, as the engines mount files in it."""
        return [(path, how) for path, how in super().bind_mounts() if not (path + "/").startswith("/etc/")]


class Podman(ImageContainer):
    program = "podman"

    def prepare(self):
        self.mounts.one_cgroup_version(self.name + ".old")
        self.criu_options_for_all()
        self.env["CONTAINERS_CONF"] = os.path.join(self.machine.work, "containers.conf")
        self._configure()
        self.must(self._call("load", "--input", self.image(), "--signature-policy", self._policy()), "load")

    def _policy(self):
        path = os.path.join(self.machine.work, "policy.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"default": [{"type": "insecureAcceptAnything"}]}, file)
        return path

    def _configure(self):
        helpers = self.folder("helpers")
        # podman wants one to be there, and calls none for a container in the machine's own network.
        self._script(os.path.join(helpers, "netavark"), "exit 1")
        runtime = self.beside("crun")
        if self.machine.simulated:  # podman gives the runtime few of its variables
            settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in self.env.items()
                                if key.startswith(("STASIS_", "LD_LIBRARY_PATH")))
            runtime = self._script(os.path.join(helpers, "crun"), f'exec env {settings} {runtime} "$@"')
        with open(self.env["CONTAINERS_CONF"], "w", encoding="utf-8") as file:
            file.write(f"""[containers]
log_driver = "k8s-file"
pids_limit = 0
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
conmon_path = ["{self.beside("conmon")}"]
conmon_env_vars = ["PATH={self.env["PATH"]}"]
helper_binaries_dir = ["{helpers}"]
runtime = "{runtime}"
""")

    @staticmethod
    def _script(path, line):
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\n{line}\n")
        os.chmod(path, 0o755)
        return path

    def _podman(self, *words):
        return [self.path, "--root", self.folder("storage"), "--runroot", self.folder("run"),
                "--tmpdir", self.folder("tmp"), "--storage-driver", "vfs", *words]

    def _call(self, *words, seconds=150):
        return self.call(*self._podman(*words), seconds=seconds)

    def _inspect(self, what):
        return self.output_of(*self._podman("container", "inspect", "--format", what, self.name))

    def _run(self, argv, env, *options):
        words = ["run", *options, "--name", self.name, "--network", "host", "--no-hosts", "--dns", "none",
                 "--no-hostname", "--cgroup-parent", "/", "--pull", "never"]
        for name in ("seccomp=unconfined", "apparmor=unconfined", "label=disable"):
            words += ["--security-opt", name]
        for path, how in self.bind_mounts():
            words += ["--mount", f"type=bind,src={path},dst={path},{how},bind-nonrecursive=true"]
        words += self.gpus()
        for key, value in self.variables(env).items():
            words += ["--env", f"{key}={value}"]
        return self._call(*words, IMAGE, *argv)

    def gpus(self):
        return [word for node in device_nodes() for word in ("--device", node["path"])]

    def run_once(self, *argv):
        return self._run(argv, {}, "--rm")

    def start(self, argv, env):
        self.must(self._run(argv, env, "--detach"), "run")
        self._note()

    def _note(self):
        self.pid = int(self._inspect("{{.State.Pid}}"))
        self.userdata = self._inspect("{{.StaticDir}}")
        self.cgroup = "libpod-" + self._inspect("{{.Id}}")

    def checkpoint(self, images):
        """Into the engine's own folder."""
        done = self.must(self._call("container", "checkpoint", "--keep", self.name), "checkpoint",
                         os.path.join(self.userdata, "dump.log"))
        self.wait_gone()
        return done.seconds

    def names_plugin(self, images):
        return super().names_plugin(os.path.join(self.userdata, "checkpoint"))

    def restore(self, images):
        done = self.must(self._call("container", "restore", "--keep", self.name), "restore",
                         os.path.join(self.userdata, "restore.log"))
        self._note()
        return done.seconds

    def remove(self):
        self._call("rm", "--force", "--time", "0", self.name, seconds=60)

    def kill(self):
        super().kill()
        remove_cgroups("conmon")  # podman leaves it, empty


def driver_files(machine):
    """The libraries of the driver that this machine's programs load: of libcuda's version, in its folder."""
    script = ("import ctypes; ctypes.CDLL('libcuda.so.1'); "
              "print(next(word for word in open('/proc/self/maps').read().split() if 'libcuda.so' in word))")
    library = os.path.realpath(machine.run(sys.executable, "-c", script).must_succeed().out.strip())
    version = library.rpartition(".so.")[2]
    found = glob.glob(os.path.join(os.path.dirname(library), f"lib*.so.{version}"))
    return sorted(path for path in found if os.path.realpath(path) == path and re.search(r"/lib(cuda|nvidia)", path)) or [library]


class PodmanCdi(Podman):
    """GPUs by name, as a file of the Container Device Interface describes them: nodes of devices, and each of the
    driver's libraries as a mount of its own."""

    def prepare(self):
        edits = {"deviceNodes": [{"path": node["path"]} for node in device_nodes()],
                 # Without a type, as the format allows and nvidia-ctk has it, crun 1.21 crashes at the restore.
                 "mounts": [{"hostPath": path, "containerPath": path, "type": "bind",
                             "options": ["ro", "nosuid", "nodev", "bind"]} for path in driver_files(self.machine)]}
        self.mounted = len(edits["mounts"])
        with open(os.path.join(self.folder("cdi"), "gpus.json"), "w", encoding="utf-8") as file:
            json.dump({"cdiVersion": "0.5.0", "kind": "example.com/gpu", "devices": [{"name": "all", "containerEdits": edits}]},
                      file)
        self.mounts.mount_over("/etc/cdi", "--bind", self.folder("cdi"))
        super().prepare()

    def gpus(self):
        return ["--device", "example.com/gpu=all"]

    def _note(self):
        super()._note()
        with open(f"/proc/{self.pid}/mountinfo", encoding="utf-8", errors="replace") as file:
            points = [line.split()[4] for line in file]
        found = sum(point in points for point in driver_files(self.machine))
        if found == 0:
            raise Skip("this podman does not take the file of the Container Device Interface")
        if found != self.mounted:
            raise Failure(f"{found} of the driver's {self.mounted} libraries are mounted")


class PodmanExport(Podman):
    """Saved to a file, removed, and made again from it."""

    def _file(self, images):
        return images + ".tar"

    def checkpoint(self, images):
        done = self.must(self._call("container", "checkpoint", "--export", self._file(images), "--compress", "none",
                                    self.name), "checkpoint", os.path.join(self.userdata, "dump.log"))
        self.wait_gone()
        self.must(self._call("rm", self.name), "rm")
        return done.seconds

    def names_plugin(self, images):
        with tarfile.open(self._file(images)) as tar:
            return b"cuda_plugin" in tar.extractfile("checkpoint/inventory.img").read()

    def restore(self, images):
        done = self.must(self._call("container", "restore", "--keep", "--import", self._file(images)), "restore")
        self._note()
        return done.seconds


class Containerd(ImageContainer):
    program = "ctr"

    def prepare(self):
        self.server = None
        self.state = self.folder("state")
        self.socket = os.path.join(self.state, "socket")
        self.criu_config = self.criu_options(self.machine.work)
        self.mounts.mount_over("/run/containerd", "-t", "tmpfs", "none")
        self._start_server()
        self.must(self._call("image", "import", "--snapshotter", "native", self.image()), "image import")

    def _start_server(self):
        config = os.path.join(self.machine.work, "config.toml")
        with open(config, "w", encoding="utf-8") as file:
            file.write(f"""version = 2
root = "{self.folder("storage")}"
state = "{self.state}"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{self.socket}"
""")
        log = os.path.join(self.machine.work, "containerd.log")
        with open(log, "wb") as out:
            self.server = subprocess.Popen(self.mounts.inside(self.beside("containerd"), "--config", config),
                                           stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.env)
        deadline = time.monotonic() + 30
        while not os.path.exists(self.socket):
            if self.server.poll() is not None or time.monotonic() > deadline:
                with open(log, encoding="utf-8", errors="replace") as file:
                    raise Skip("containerd does not start here: " + (file.read().splitlines() or ["nothing"])[-1])
            time.sleep(0.05)

    def _call(self, *words, seconds=150):
        return self.call(self.path, "--address", self.socket, *words, seconds=seconds)

    def _run(self, argv, env, *options):
        words = ["run", *options, "--null-io", "--net-host", "--snapshotter", "native", "--cgroup", "/" + self.name,
                 "--annotation", "org.criu.config=" + self.criu_config]
        for path, how in self.bind_mounts():
            words += ["--mount", f"type=bind,src={path},dst={path},options=bind:{how}"]
        for node in device_nodes():
            words += ["--device", node["path"]]
        for key, value in self.variables(env).items():
            words += ["--env", f"{key}={value}"]
        return self._call(*words, IMAGE, self.name, *argv)

    def run_once(self, *argv):
        return self._run(argv, {}, "--rm")

    def start(self, argv, env):
        self.must(self._run(argv, env, "--detach"), "run")
        self._note_pid()

    def _note_pid(self):
        tasks = self.output_of(self.path, "--address", self.socket, "tasks", "list")
        self.pid = next(int(line.split()[1]) for line in tasks.splitlines() if line.split()[0] == self.name)

    def _end_task(self):
        killed = self._call("tasks", "kill", "--signal", "KILL", self.name)
        self.wait_gone()
        # The first thread is gone before the others, which let go of the GPU: until then there is a task.
        deadline = time.monotonic() + 60
        while self._call("tasks", "delete", self.name).status != 0 and killed.status == 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._call("containers", "delete", self.name)

    def _log(self, name):
        found = glob.glob(os.path.join(self.state, "**", f"*{name}.log"), recursive=True)
        return found[0] if found else None

    goes_on = True

    def checkpoint(self, images):
        """containerd lets it go on after that; here it is ended."""
        done = self._call("containers", "checkpoint", "--task", self.name, SAVED)
        self.must(done, "containers checkpoint", self._log("dump"))
        self.must(self._end_task(), "containers delete")
        return done.seconds

    def names_plugin(self, images):
        blobs = os.path.join(self.machine.work, "storage", "io.containerd.content.v1.content", "blobs", "sha256")
        for name in os.listdir(blobs):
            path = os.path.join(blobs, name)
            if not tarfile.is_tarfile(path):
                continue
            with tarfile.open(path) as tar:
                if "inventory.img" in tar.getnames():
                    return b"cuda_plugin" in tar.extractfile("inventory.img").read()
        return False

    def restore(self, images):
        done = self._call("containers", "restore", "--live", self.name, SAVED)
        self.must(done, "containers restore", self._log("restore"))
        self._note_pid()
        return done.seconds

    def remove(self):
        if self.server:
            self._end_task()
            self.server.terminate()
            self.server.wait()
