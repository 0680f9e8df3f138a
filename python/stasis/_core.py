"""The package's work, on top of the extension module.

Long because the public classes and functions, whose docstrings are most of it, refer to each other.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Literal

from . import _checks, _errors, _remedies, _stasis

_stasis.set_error_factory(_errors.make)

#: What Process.state can be.
ProcessState = Literal["running", "locked", "checkpointed", "failed"]

_AFTER = {"end": 0, "running": 1, "suspended": 2}
_GONE = (_errors.ProcessGone, _errors.NoSuchProcess, _errors.Zombie)


# --- The driver: loaded once, when it is first needed.

_lock = threading.RLock()
_settings = {"library": None, "answer_timeout_ms": 10_000, "work_timeout_ms": 60_000}
_session = None
_sessions_of_parents = []


def _open_session():
    global _session
    with _lock:
        if _session is None:
            _session = _stasis.Session(
                _settings["library"], _settings["answer_timeout_ms"], _settings["work_timeout_ms"]
            )
        return _session


def _after_fork():
    """The child has to open its own: the parent's calls go through one socket, which only one may use."""
    global _session, _lock
    _lock = threading.RLock()
    if _session is not None:
        _sessions_of_parents.append(_session)
    _session = None


os.register_at_fork(after_in_child=_after_fork)


def configure(*, library=None, answer_timeout_ms=10_000, work_timeout_ms=60_000):
    """Choose the driver's library, and how long it may be silent, for all calls from now on.

    `library`: a file; None: the environment's STASIS_LIBCUDA, else libcuda.so.1. `answer_timeout_ms`
    (milliseconds): for what the driver answers at once. `work_timeout_ms` (milliseconds): for a
    checkpoint or a restore without a sign of work. Both 0: no limit, and calls are made in this process.
    Nothing is loaded before the first call that needs it.
    """
    global _session
    settings = {
        "library": None if library is None else _checks.path(library, "library"),
        "answer_timeout_ms": _checks.milliseconds(answer_timeout_ms, "answer_timeout_ms"),
        "work_timeout_ms": _checks.milliseconds(work_timeout_ms, "work_timeout_ms"),
    }
    with _lock:
        _settings.update(settings)
        _session = None


@dataclass(frozen=True)
class DriverInfo:
    """The driver that is in use."""

    version: str
    cuda_version: int
    simulated: bool


def driver():
    """The driver: its version ("580.159.04"), its CUDA version (13000), and whether it is the simulated one.

    Raises DriverMissing, DriverTooOld or DriverUnsupported.
    """
    session = _open_session()
    return DriverInfo(session.driver_version(), session.cuda_version(), session.simulated())


# --- What comes back.


@dataclass(frozen=True)
class ProcessReport:
    """One process of a tree. `state` is None without CUDA, `gpu_bytes` what it had on GPUs (None: unknown)."""

    pid: int
    command: str
    cuda: bool
    state: str | None = None
    gpu_bytes: int | None = None


@dataclass(frozen=True)
class Report:
    """What an operation has done. Times in seconds, sizes in bytes.

    `phases` has the seconds of each phase by its name, `json` all that `stasis --json` says.
    """

    pid: int
    processes: tuple
    seconds: float
    phases: dict
    images_dir: str | None = None
    image_bytes: int = 0
    json: dict = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Swapped:
    """What swap() has done. `at_once`: both directions of the bus were used at the same time."""

    suspended: Report
    resumed: Report
    seconds: float
    at_once: bool
    json: dict = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Recovered:
    """What recover() has found and done about one process tree. `outcome`: how the two programs of a swap are now."""

    pid: int
    operation: str
    images_dir: str
    processes: tuple
    finished: bool
    image_kept: bool
    outcome: str = ""


def _process_report(given):
    state = given.get("state")
    unknown = None if given["cuda"] else 0
    size = given.get("gpu_bytes")
    return ProcessReport(given["pid"], given["command"], given["cuda"], state, unknown if size is None else size)


def _cuda_pids(members):
    return [one["pid"] for one in json.loads(members) if one["cuda"]]


def _report(text, images_dir=b""):
    return _report_of(json.loads(text), images_dir)


def _report_of(given, images_dir=b""):
    directory = given.get("images_dir")
    phases = {}
    for phase in given["phases"]:  # a second try has some of them once more
        phases[phase["name"]] = phases.get(phase["name"], 0) + phase["seconds"]
    # JSON cannot hold what is no UTF-8; it has a mark in its place.
    if directory and "\ufffd" in directory:
        directory = os.fsdecode(images_dir)
    return Report(
        given["pid"],
        tuple(map(_process_report, given["processes"])),
        given["seconds"],
        phases,
        directory,
        given.get("image_bytes", 0),
        given,
    )


# --- Whole procedures.


def _target(given):
    """The number of a process, or the name of a job, also by a Job: what the extension module takes."""
    name = getattr(given, "_job_name", None)
    return name if isinstance(name, str) else _checks.target(given)


def suspend(
    pid,
    timeout_ms=10_000,
    *,
    ignore_obstacles=False,
    attach=False,
    graphs_are_safe=False,
    watch_ms=None,
    progress=None,
    note=None,
):
    """Lock and checkpoint every CUDA process of the tree below `pid`: their GPU memory is free.

    `pid`: the number of a process, the name of a job (`stasis run --name`), or a Job, as with the other procedures.
    `timeout_ms` (milliseconds) is for GPU work in flight; 0 waits for ever. `attach`: bring the agent first to
    what was not started by `stasis run`; if that is refused, this is. It needs one of two words: `graphs_are_safe`, the
    programs use no CUDA graphs, or none with a copy from or to the host in it; or `watch_ms` (milliseconds), for which
    they are watched, a time in which they would launch each of their graphs. Returns a Report. Raises Timeout, NotCuda, NotSupported, NotPermitted, Busy, OutOfHostMemory and others; then all run on.
    """
    target = _target(pid)
    timeout = _checks.milliseconds(timeout_ms, "timeout_ms")
    ignore = _checks.flag(ignore_obstacles, "ignore_obstacles")
    _checks.callback(progress, "progress")
    note = _remedies.notes(_checks.callback(note, "note"))
    way = _checks.attach(attach, graphs_are_safe, watch_ms)
    return _report(_open_session().suspend(target, timeout, ignore, way, progress, note))


def resume(pid, gpu_mapping=None, *, images_dir=None, time_limit_ms=0, progress=None, note=None):
    """Restore and unlock every CUDA process of the tree below `pid`: it runs again.

    `gpu_mapping` as with Process.restore(). `images_dir`: the image that holds the content of its GPU
    memory, if that was moved or the state directory was lost. After `time_limit_ms` (milliseconds; 0: no limit) it is left
    suspended, unless its memory is on the way back. Returns a Report. Raises OutOfGpuMemory,
    DeviceMapInvalid, Timeout and others; then it is suspended as before.
    """
    target = _target(pid)
    pairs = _checks.gpu_mapping(gpu_mapping)
    directory = None if images_dir is None else _checks.path(images_dir, "images_dir")
    limit = _checks.milliseconds(time_limit_ms, "time_limit_ms")
    _checks.callback(progress, "progress")
    note = _remedies.notes(_checks.callback(note, "note"))
    return _report(_open_session().resume(target, pairs, directory, limit, progress, note))


def swap(
    out,
    into,
    gpu_mapping=None,
    *,
    timeout_ms=10_000,
    ignore_obstacles=False,
    attach=False,
    graphs_are_safe=False,
    watch_ms=None,
    note=None,
):
    """Suspend the tree below `out` and resume the one below `into` in its place, at once where both fit.

    Each is the number of a process, the name of a job, or a Job; a process of a job of `stasis run` is meant by its number
    outside of the job. `gpu_mapping` is for the second, as with resume(); `timeout_ms` (milliseconds) for GPU work of
    the first; 0 waits for ever. `attach`, `graphs_are_safe` and `watch_ms` are for the first, as with
    suspend(). Returns a Swapped. Raises WrongState unless the first runs and the second is
    suspended, OutOfGpuMemory, Timeout and others; then both are as they were. This starts processes: no
    other thread should fork meanwhile.
    """
    first = _target(out)
    second = _target(into)
    pairs = _checks.gpu_mapping(gpu_mapping)
    timeout = _checks.milliseconds(timeout_ms, "timeout_ms")
    ignore = _checks.flag(ignore_obstacles, "ignore_obstacles")
    note = _remedies.notes(_checks.callback(note, "note"))
    way = _checks.attach(attach, graphs_are_safe, watch_ms)
    given = json.loads(_open_session().swap(first, second, pairs, timeout, ignore, way, note))
    return Swapped(
        _report_of(given["suspended"]),
        _report_of(given["resumed"]),
        given["seconds"],
        given["at_once"],
        given,
    )


def dump(
    pid,
    images_dir,
    *,
    after="end",
    timeout_ms=10_000,
    overwrite=False,
    sync=True,
    ignore_obstacles=False,
    ignore_undumpable=False,
    criu=None,
    shell_job=False,
    tcp_established=False,
    tcp_close=False,
    file_locks=False,
    link_remap=True,
    ext_unix_sk=False,
    ghost_limit=256 << 20,
    manage_cgroups="ignore",
    network_lock="nftables",
    external=(),
    compress="none",
    base=None,
    attach=False,
    graphs_are_safe=False,
    watch_ms=None,
    progress=None,
    note=None,
):
    """Save the tree below `pid` to the directory `images_dir`, and end it.

    `after`: "end", "running" or "suspended": what becomes of it. `timeout_ms` (milliseconds) is for GPU
    work in flight. `sync`: nothing is ended before the image would survive a loss of power. `overwrite`
    replaces an image that is there. `compress`: "none", "lz4" or "zstd", for the GPU memory of programs
    that run under the agent (`stasis run`). `base`: an earlier image of the same job, on the same file
    system, whose GPU memory of such programs is not written again where it is the same; what stands in
    the way is told by `note`, and all is written. `ignore_obstacles` goes on although the driver may
    refuse or lose the memory, and CRIU what it is known not to dump; `ignore_undumpable` is the half of it
    that is about CRIU, as older versions called it. `attach`, `graphs_are_safe` and `watch_ms` as with
    suspend(). `criu` is the program to use. The others are CRIU's own options, by
    CRIU's names; `ghost_limit` in bytes. Returns a Report. Raises ImageExists, Undumpable, CriuFailed,
    NoSpace and all that suspend() raises; then it runs on, and there is no image.
    """
    target = _target(pid)
    if after not in _AFTER:
        raise ValueError(f"after must be one of {', '.join(map(repr, _AFTER))}, not {after!r}")
    options = {
        "images_dir": _checks.path(images_dir, "images_dir"),
        "after": _AFTER[after],
        "timeout_ms": _checks.milliseconds(timeout_ms, "timeout_ms"),
        "criu": None if criu is None else _checks.path(criu, "criu"),
        "ghost_limit": _checks.milliseconds(ghost_limit, "ghost_limit"),
        "manage_cgroups": manage_cgroups,
        "network_lock": network_lock,
        "external": _checks.texts(external, "external"),
        "compress": compress,
        "base": None if base is None else _checks.path(base, "base"),
    }
    flags = {
        "overwrite": overwrite,
        "sync": sync,
        "ignore_obstacles": ignore_obstacles,
        "ignore_undumpable": ignore_undumpable,
        "shell_job": shell_job,
        "tcp_established": tcp_established,
        "tcp_close": tcp_close,
        "file_locks": file_locks,
        "link_remap": link_remap,
        "ext_unix_sk": ext_unix_sk,
    }
    options.update((name, _checks.flag(value, name)) for name, value in flags.items())
    _checks.callback(progress, "progress")
    note = _remedies.notes(_checks.callback(note, "note"))
    way = _checks.attach(attach, graphs_are_safe, watch_ms)
    return _report(_open_session().dump(target, options, way, progress, note), options["images_dir"])


def restore(
    images_dir,
    gpu_mapping=None,
    *,
    leave_suspended=False,
    time_limit_ms=0,
    criu=None,
    external=(),
    inherit=None,
    tcp_close=False,
    ext_unix_sk=False,
    manage_cgroups=None,
    map_addresses=None,
    progress=None,
    note=None,
):
    """Bring back what was saved to `images_dir`. Returns a Report, whose `pid` is that of its root.

    It becomes a child of this process: os.waitpid(report.pid, 0) collects it. `gpu_mapping` as with
    Process.restore(), from the GPUs it was on. `leave_suspended`: resume() brings its GPU state back.
    `time_limit_ms` (milliseconds; 0: no limit): after that it is given up. `inherit`: a mapping from
    CRIU's key ("pipe:[1234]") to a descriptor (or a file) of this process that takes its place.
    `map_addresses`: a mapping from the addresses that its sockets had to those that they get. Raises
    ImageCorrupt, ImageIncomplete, PidInUse, GpuMismatch, OutOfGpuMemory, CriuFailed and others; then
    nothing of it is left, and the image is as it was. Of a directory with numbered images (000001,
    000002) it takes the newest. It refuses the image of a job of `stasis run --images-dir` (Usage): run()
    with the same command and `images_dir` goes on with such a job.
    """
    pairs = _checks.gpu_mapping(gpu_mapping)
    options = {
        "images_dir": _checks.path(images_dir, "images_dir"),
        "leave_suspended": _checks.flag(leave_suspended, "leave_suspended"),
        "time_limit_ms": _checks.milliseconds(time_limit_ms, "time_limit_ms"),
        "criu": None if criu is None else _checks.path(criu, "criu"),
        "external": _checks.texts(external, "external"),
        "tcp_close": _checks.flag(tcp_close, "tcp_close"),
        "ext_unix_sk": _checks.flag(ext_unix_sk, "ext_unix_sk"),
        "manage_cgroups": manage_cgroups,
        "map_addresses": [f"{old}={new}" for old, new in (map_addresses or {}).items()],
    }
    inherited = [
        (one.fileno() if hasattr(one, "fileno") else _checks.integer(one, "inherit"), key)
        for key, one in (inherit or {}).items()
    ]
    _checks.callback(progress, "progress")
    note = _remedies.notes(_checks.callback(note, "note"))
    return _report(_open_session().restore(pairs, inherited, options, progress, note), options["images_dir"])


def inspect(images_dir, *, verify=False, gpu_mapping=None, criu=None, progress=None):
    """What is in an image, and whether it can be restored here: the object of `stasis inspect --json`.

    Of a job's directory it takes the newest image. `verify` reads every byte. An image that cannot be
    restored is no error: see "restorable" and "checks", whose remedies are in terms of this package.
    Without a driver, "checks" says so. Raises ImageIncomplete, ImageCorrupt, ImageVersion, Io.
    """
    directory = _checks.path(images_dir, "images_dir")
    whole = _checks.flag(verify, "verify")
    pairs = _checks.gpu_mapping(gpu_mapping)
    program = None if criu is None else _checks.path(criu, "criu")
    _checks.callback(progress, "progress")
    try:
        session = _open_session()
    except (_errors.DriverMissing, _errors.DriverTooOld, _errors.DriverUnsupported):
        session = None
    return _remedies.of_object(json.loads(_stasis.inspect(session, directory, whole, pairs, program, progress)))


def recover(pid=None, *, note=None):
    """Make every CUDA process below `pid` run again, whatever has left it in which state.

    Without a `pid`: the targets of every operation that was killed. Returns a list of Recovered. Raises
    NotRolledBack if one of them could not be brought back.
    """
    target = 0 if pid is None else _target(pid)
    note = _remedies.notes(_checks.callback(note, "note"))
    return [
        Recovered(
            one["pid"],
            one["operation"] or "",
            one["images_dir"] or "",
            tuple(map(_process_report, one["processes"])),
            one["finished"],
            one["image_kept"],
            one.get("outcome") or "",
        )
        for one in json.loads(_open_session().recover(target, note))["recovered"]
    ]


_dump = dump  # a method has its name


def _start_ticks(pid):
    """When the process started: what tells it from a later one with its number. None: there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


class _Operations:
    """The whole procedures as methods, of what _whom() gives: a number, or a Job."""

    __slots__ = ()

    def _whom(self):
        raise NotImplementedError

    def suspend(
        self,
        timeout_ms=10_000,
        *,
        ignore_obstacles=False,
        attach=False,
        graphs_are_safe=False,
        watch_ms=None,
        progress=None,
        note=None,
    ):
        """stasis.suspend() of it and all below it."""
        return suspend(
            self._whom(),
            timeout_ms,
            ignore_obstacles=ignore_obstacles,
            attach=attach,
            graphs_are_safe=graphs_are_safe,
            watch_ms=watch_ms,
            progress=progress,
            note=note,
        )

    def resume(self, gpu_mapping=None, *, images_dir=None, time_limit_ms=0, progress=None, note=None):
        """stasis.resume() of it and all below it."""
        return resume(
            self._whom(),
            gpu_mapping,
            images_dir=images_dir,
            time_limit_ms=time_limit_ms,
            progress=progress,
            note=note,
        )

    def dump(self, images_dir, **options):
        """stasis.dump() of it and all below it, with the same options."""
        return dump(self._whom(), images_dir, **options)

    # With the names of all options, for help() and editors.
    _options = [*signature(_dump).parameters.values()][1:]
    _all = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *_options]
    setattr(dump, "__signature__", signature(_dump).replace(parameters=_all))
    del _options, _all

    def suspended(
        self,
        timeout_ms=10_000,
        *,
        gpu_mapping=None,
        ignore_obstacles=False,
        attach=False,
        graphs_are_safe=False,
        watch_ms=None,
        progress=None,
        note=None,
    ):
        """For a `with` statement: suspended inside of it, and resumed on every way out.

        `gpu_mapping` is for the way back, the other options are those of stasis.suspend(). A process that has ended meanwhile is no error. Ctrl-C during the
        way back comes when it is done.
        """
        timeout = _checks.milliseconds(timeout_ms, "timeout_ms")
        pairs = _checks.gpu_mapping(gpu_mapping)
        ignore = _checks.flag(ignore_obstacles, "ignore_obstacles")
        _checks.callback(progress, "progress")
        note = _remedies.notes(_checks.callback(note, "note"))
        whom = _target(self._whom())
        way = _checks.attach(attach, graphs_are_safe, watch_ms)
        return _stasis.suspended(self, _GONE, _open_session(), whom, timeout, ignore, way, pairs, progress, note)


class _Handle(_Operations):
    """What Process and Group share: a number, and a handle that is opened when it is first needed."""

    __slots__ = ("_pid", "_start", "_handle", "_owner")

    def __init__(self, pid):
        self._pid = _checks.pid(pid)
        self._start = _start_ticks(self._pid)
        self._handle = None
        self._owner = None

    def __repr__(self):
        return f"stasis.{type(self).__name__}({self._pid})"

    @property
    def pid(self):
        """The process number."""
        return self._pid

    def _open(self, make):
        # After a fork, or another configure(), it belongs to a session that is not ours.
        session = _open_session()
        if self._handle is None or self._owner is not session:
            handle = make(session)(self._pid)
            if self._start is not None and _start_ticks(self._pid) not in (None, self._start):
                raise _errors.ProcessGone(
                    f"process {self._pid} has ended, and its number means another one now",
                    "start the program again, or restore it from an image",
                )
            self._handle, self._owner = handle, session
        return self._handle

    def _whom(self):
        self._check_identity()
        return self._pid

    def _check_identity(self):
        raise NotImplementedError


class Process(_Handle):
    """A CUDA process that can be locked, checkpointed, restored and unlocked.

    Names and meaning are those of `cuda.core.checkpoint.Process`. Making one does nothing but note the
    number, and which process it means now: that one has to be there when it is first used. What it was
    brought to stays when the object is gone. May be used by several threads.

    `pid`: an int (numpy's too; no bool). Raises TypeError, ValueError.
    """

    __slots__ = ()

    def _use(self):
        return self._open(lambda session: session.process)

    def _check_identity(self):
        self._use()

    @property
    def state(self):
        """"running", "locked", "checkpointed" or "failed".

        Raises NotCuda, NoSuchProcess, ProcessGone, NotPermitted, Busy (stopped or traced), NoAnswer.
        """
        return self._use().state()

    @property
    def restore_thread_id(self):
        """The number of the thread that restores it, which a tool like CRIU has to let run."""
        return self._use().restore_thread_id()

    def lock(self, timeout_ms=0):
        """running -> locked: wait for submitted GPU work, and hold back further calls of CUDA.

        `timeout_ms`: milliseconds; 0 waits for ever. Raises Timeout (it runs on), WrongState, and all that
        `state` raises. Ctrl-C ends the wait; it runs on then.
        """
        self._use().lock(_checks.milliseconds(timeout_ms, "timeout_ms"))

    def checkpoint(self):
        """locked -> checkpointed: the content of its GPU memory is in its own host memory.

        Raises WrongState, NotSupported (managed or shared memory; it stays locked). Not cut short by Ctrl-C:
        KeyboardInterrupt comes when it is done, as with restore() and unlock().
        """
        self._use().checkpoint()

    def restore(self, gpu_mapping=None):
        """checkpointed -> locked: its GPU memory is back.

        `gpu_mapping`: from the UUID of a GPU it was on to that of the one to use instead, each a string
        with or without "GPU-", a uuid.UUID, a CUuuid, or an object with a `uuid`. GPUs that are not named
        stay where they are if they can. Raises WrongState, DeviceMapInvalid, DeviceMapUnsupported (driver
        older than 580), GpuMismatch, OutOfGpuMemory; TypeError, ValueError.
        """
        pairs = _checks.gpu_mapping(gpu_mapping)
        self._use().restore(pairs)

    def unlock(self):
        """locked -> running. Raises WrongState."""
        self._use().unlock()

    def locked(self, timeout_ms=0):
        """For a `with` statement: locked inside of it, and running again on every way out.

        Also where it was checkpointed inside, and not restored. A process that has ended meanwhile is no
        error. `timeout_ms` as with lock(). Ctrl-C during the way back comes when it is done.
        """
        return _stasis.locked(self, _GONE, self._use(), _checks.milliseconds(timeout_ms, "timeout_ms"))


class Group(_Handle):
    """A process and all below it, locked and checkpointed as one.

    Its CUDA processes may wait for each other on the GPU, as the ranks of a collective do: they are locked
    at the same time, all or none. Processes without CUDA are left alone.

    `pid`: the root. Raises TypeError, ValueError.
    """

    __slots__ = ()

    def _use(self):
        return self._open(lambda session: session.group)

    def _check_identity(self):
        self._use()

    @property
    def members(self):
        """All processes of the tree, the root first, with their states now: a list of ProcessReport."""
        return [_process_report(one) for one in json.loads(self._use().members())]

    def lock(self, timeout_ms=0):
        """running -> locked, all or none. `timeout_ms`: milliseconds; 0 waits for ever.

        Raises Timeout, NotCuda (none of them uses CUDA), WrongState (one is in another state).
        """
        self._use().lock(_checks.milliseconds(timeout_ms, "timeout_ms"))

    def checkpoint(self, *, progress=None):
        """locked -> checkpointed, at the same time; their threads are kept still until the unlock.

        `progress(phase, done, total)` is told bytes. Raises as Process.checkpoint(), and OutOfHostMemory; all
        are locked then.
        """
        self._use().checkpoint(_checks.callback(progress, "progress"))

    def restore(self, gpu_mapping=None, *, progress=None):
        """checkpointed -> locked, at the same time. Arguments and errors as with Process.restore()."""
        pairs = _checks.gpu_mapping(gpu_mapping)
        self._use().restore(pairs, _checks.callback(progress, "progress"))

    def unlock(self):
        """locked -> running."""
        self._use().unlock()

    def locked(self, timeout_ms=0):
        """For a `with` statement: locked inside of it, and running again on every way out."""
        timeout = _checks.milliseconds(timeout_ms, "timeout_ms")
        gone = (*_GONE, _errors.NotCuda)
        return _stasis.locked_group(self, gone, _open_session(), self._use(), self._pid, timeout, _cuda_pids)
