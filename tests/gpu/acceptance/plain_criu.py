"""criu as its users call it, with our plugin or with none."""

import os

from .core import Failure, Skip


def plugin_folder(machine):
    folder = os.path.join(machine.build, "lib", "stasis", "criu")
    if not os.path.exists(os.path.join(folder, "cuda_plugin.so")):
        raise Skip(f"{folder}/cuda_plugin.so is not built (tools/get-criu --headers)")
    return folder


def no_plugins(machine):
    folder = os.path.join(machine.work, "no-plugins")
    os.makedirs(folder, exist_ok=True)
    return folder


def dump(machine, pid, images, plugins, *options, env=None):
    os.makedirs(images, exist_ok=True)
    finished = machine.criu("dump", "--tree", pid, "--images-dir", images, "--libdir", plugins,
                            "--log-file", "dump.log", "-v2", *options, env=env)
    return explain(finished, os.path.join(images, "dump.log"))


def restore(machine, images, plugins, *options):
    finished = machine.criu("restore", "--restore-detached", "--images-dir", images, "--libdir", plugins,
                            "--log-file", "restore.log", "-v2", *options)
    return explain(finished, os.path.join(images, "restore.log"))


def explain(finished, log):
    """criu says little on its standard error; the reason stands in its log."""
    if finished.status == 0:
        return finished
    errors = []
    if os.path.exists(log):
        with open(log, encoding="utf-8", errors="replace") as file:
            errors = [line.strip() for line in file if "Error" in line and "rlimit" not in line]
    raise Failure(f"{finished.brief()}: {' / '.join(errors[:3])}")
