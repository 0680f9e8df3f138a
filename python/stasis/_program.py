"""What the program `stasis` does, asked for by its JSON: the list of processes, the doctor, the start of jobs.

The library does the rest without it. Nothing of what the program prints for people is read.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

from . import _checks, _core, _errors, _remedies


def program():
    """The path of the program: STASIS_BIN, else beside the package as a build has it, else on PATH.

    Raises an Io that is a FileNotFoundError too, and says what to install.
    """
    named = os.environ.get("STASIS_BIN")
    built = Path(__file__).resolve().parents[2] / "bin" / "stasis"
    for candidate in (named, None if named else str(built), None if named else "stasis"):
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    raise _errors.ProgramMissing(
        f"there is no program {named or 'stasis'!r}, which ps(), doctor(), verify(), run() and Job.processes need",
        "install the package stasis, or let the environment variable STASIS_BIN name it",
    )


def _tell(given, note):
    for text in given.get("notes", ()) if note else ():
        note(_remedies.in_python(text))


def _ask(*words, note=None, any_status=False):
    """The object that `stasis WORDS --json` prints. An error of it is raised as the library's would be."""
    _checks.callback(note, "note")
    with subprocess.Popen(
        [program(), *words, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as asked:
        try:
            said, complaint = asked.communicate()
        except BaseException:
            # Ctrl-C, or a handler that raises: it rolls back, and so long this waits.
            asked.send_signal(signal.SIGINT)
            asked.wait()
            raise
    try:
        given = json.loads(said)
    except ValueError:
        text = complaint.decode(errors="replace").strip()
        raise _errors.Internal(f"{words[0]} ended with {asked.returncode} and no answer: {text}") from None
    _tell(given, note)
    if "error" in given and not given.get("ok", False):
        raise _errors.from_json(given["error"])
    if asked.returncode != 0 and not any_status:
        raise _errors.Internal(f"{words[0]} ended with {asked.returncode}")
    return given


def _target(target):
    """A name as it is, a number checked; both as a word of the command line."""
    if isinstance(target, Job):
        return target.name
    return target if isinstance(target, str) else str(_checks.pid(target))


def _seconds(value, name):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    milliseconds = _checks.milliseconds(round(value * 1000), name)
    return f"{milliseconds}ms"


@dataclass(frozen=True)
class CudaProcess:
    """A process that uses CUDA. What could not be seen, or is not there, is None.

    `state`: as Process.state has it, "waiting" for its GPU memory, or why it does not answer: "busy",
    "stopped", "frozen", "traced", None if not known. `gpu_bytes`: in use now. `since`: ISO 8601, UTC. `name`: its job's.
    """

    pid: int
    user: str | None
    state: str | None
    path: str | None
    gpu_bytes: int
    since: str | None
    operation: str | None
    name: str | None
    command: str
    json: dict = field(default_factory=dict, repr=False, compare=False)


def ps():
    """The processes that use CUDA: a list of CudaProcess. Root sees those of all users."""
    return [
        CudaProcess(
            *(one[key] for key in ("pid", "user", "state", "path", "gpu_bytes", "since", "operation", "name", "command")),
            one,
        )
        for one in _ask("ps")["processes"]
    ]


@dataclass(frozen=True)
class Check:
    """One thing that the doctor has looked at. `light`: "green", "yellow" or "red"."""

    id: str
    light: str
    what: str
    remedy: str | None


@dataclass(frozen=True)
class Diagnosis:
    """Whether the tree, or without one this machine, can be suspended, dumped, and restored here."""

    suspend: bool
    dump: bool
    restore: bool
    machine: tuple
    processes: tuple
    json: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def reasons(self):
        """The checks that are red."""
        return tuple(one for one in self.processes + self.machine if one.light == "red")


def doctor(target=None, *, images_dir=None, trial=True, criu=None):
    """What stands in the way of an operation, before it is tried: a Diagnosis.

    `target`: a process number, the name of a job, or a Job; None: this machine alone. `images_dir`: looks at
    that disk too. `trial`: suspends and resumes a process of the doctor's own on each GPU that is free.
    """
    words = ["doctor"] + ([] if target is None else [_target(target)])
    words += [] if images_dir is None else ["--images-dir", os.fsdecode(images_dir)]
    words += [] if _checks.flag(trial, "trial") else ["--no-trial"]
    words += [] if criu is None else ["--criu", os.fsdecode(criu)]
    given = _ask(*words, any_status=True)

    def checks(of):
        return tuple(
            Check(one["id"], one["light"], _remedies.in_python(one["what"]), one["remedy"] and _remedies.in_python(one["remedy"]))
            for one in given[of]
        )

    verdict = {verb: one["possible"] for verb, one in given["verdict"].items()}
    return Diagnosis(verdict["suspend"], verdict["dump"], verdict["restore"], checks("machine"), checks("processes"), given)


def verify(images_dir):
    """Reads an image to its last byte: the object of `stasis verify --json`.

    Of a job's directory the newest image is meant. Raises ImageIncomplete, ImageCorrupt, ImageVersion, Io.
    """
    return _ask("verify", "--images-dir", os.fsdecode(images_dir))


class Job(_core._Operations):
    """A program that has a name (`stasis run --name`, run()), in namespaces of its own or not.

    suspend(), resume(), dump(), suspended() and recover() are those of a Process, by the name; where a
    function of the package takes the number of a process it takes a Job or its name too. Process numbers in a report
    are those in the job's namespaces, if it has some. `process` is its subprocess.Popen where run() has
    started it, else None.
    """

    def __init__(self, name, process=None):
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {type(name).__name__}")
        self.name = name
        self.process = process

    @property
    def _job_name(self):
        return self.name

    def _whom(self):
        return self

    def __repr__(self):
        return f"stasis.Job({self.name!r})"

    @property
    def processes(self):
        """Those of its processes that use CUDA: a list of CudaProcess."""
        return [one for one in ps() if one.name == self.name]

    def recover(self, *, note=None):
        """stasis.recover() of it."""
        return _core.recover(self, note=note)

    def wait(self, timeout=None):
        """Of a job of run(): waits for its end, and returns its exit status. subprocess.TimeoutExpired."""
        if self.process is None:
            raise ValueError(f"{self!r} was not started by run() here")
        return self.process.wait(timeout)


_numbers = iter(range(1, 1 << 62))
_numbers_lock = threading.Lock()


def run(command, *, name=None, images_dir=None, every=None, grace=None, keep=None, on_signal=None, best_effort=False, **popen):
    """Starts a program so that its GPU memory can be moved at the speed of the bus: a Job.

    `command`: a sequence of words. `name`: by which it is found; one is made up without. With `images_dir` it
    is a job that is saved there `every` so many seconds and when a signal of `on_signal` (names: "TERM") comes,
    which has `grace` seconds, and that goes on from the newest image; `keep` images stay. `best_effort` runs it
    also where it cannot be saved. What is left goes to subprocess.Popen (stdout, env, cwd, ...).
    Raises what `stasis run` refuses, before the program has begun: CriuMissing, NotPermitted, Busy, Usage, ...;
    Io or NotPermitted if the program cannot be started.
    """
    if isinstance(command, (str, bytes)):
        raise TypeError("command must be a sequence of words, not a string")
    command = [*map(os.fsdecode, command)]
    if not command:
        raise ValueError("command has no words: name a program")
    if name is None:
        with _numbers_lock:
            name = f"python-{os.getpid()}-{next(_numbers)}"
    if not isinstance(name, str) or not _checks.JOB_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a job: take a letter, then letters, digits, '.', '_' and '-'")
    if images_dir is None and (every, grace, keep, on_signal, best_effort) != (None, None, None, None, False):
        raise ValueError("every, grace, keep, on_signal and best_effort are for jobs with images_dir")
    words = [program(), "run", "--name", name]
    if images_dir is not None:
        words += ["--images-dir", os.fsdecode(images_dir)]
        words += [] if every is None else ["--every", _seconds(every, "every")]
        words += [] if grace is None else ["--grace", _seconds(grace, "grace")]
        words += [] if keep is None else ["--keep", str(_checks.integer(keep, "keep"))]
        words += [] if on_signal is None else ["--on-signal", ",".join(on_signal)]
        words += ["--best-effort"] if _checks.flag(best_effort, "best_effort") else []
    return Job(name, _start(words, command, popen))


def _start(words, command, popen):
    """The subprocess.Popen of `stasis run`, which has begun the command."""
    refusals, theirs = os.pipe()
    with open(refusals, "rb") as told:
        try:
            if popen.get("close_fds", True):
                popen["pass_fds"] = (*popen.get("pass_fds", ()), theirs)
            else:
                os.set_inheritable(theirs, True)
            process = subprocess.Popen([*words, "--refusal-fd", str(theirs), "--", *command], **popen)
        finally:
            os.close(theirs)
        try:
            said = told.read()
        except BaseException:
            process.kill()
            process.wait()
            raise
    if not said:
        return process
    process.wait()
    raise _errors.from_json(json.loads(said)["error"])
