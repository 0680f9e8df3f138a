# What people use. Docstrings stand in the sources.
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from subprocess import Popen
from typing import Any, Callable, Dict, List, Literal, Mapping, Optional, Protocol, Sequence, SupportsIndex, TextIO, Tuple, TypeVar, Union

__version__: str

ProcessState = Literal["running", "locked", "checkpointed", "failed"]
_Progress = Callable[[str, int, int], object]
_Note = Callable[[str], object]
_Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
_GpuMapping = Mapping[Any, Any]
_Target = Union[SupportsIndex, str, "Job"]
_Cgroups = Literal["ignore", "none", "props", "soft", "full", "strict"]

class _HasFileno(Protocol):
    def fileno(self) -> int: ...

@dataclass(frozen=True)
class DriverInfo:
    version: str
    cuda_version: int
    simulated: bool

@dataclass(frozen=True)
class ProcessReport:
    pid: int
    command: str
    cuda: bool
    state: Optional[str] = ...
    gpu_bytes: int | None = ...

@dataclass(frozen=True)
class Report:
    pid: int
    processes: Tuple[ProcessReport, ...]
    seconds: float
    phases: Dict[str, float]
    images_dir: Optional[str] = ...
    image_bytes: int = ...
    json: Dict[str, Any] = ...

@dataclass(frozen=True)
class Swapped:
    suspended: Report
    resumed: Report
    seconds: float
    at_once: bool
    json: Dict[str, Any] = ...

@dataclass(frozen=True)
class Recovered:
    pid: int
    operation: str
    images_dir: str
    processes: Tuple[ProcessReport, ...]
    finished: bool
    image_kept: bool
    outcome: str = ...

def configure(
    *, library: Optional[_Path] = ..., answer_timeout_ms: SupportsIndex = ..., work_timeout_ms: SupportsIndex = ...
) -> None: ...
def driver() -> DriverInfo: ...
def suspend(
    pid: _Target,
    timeout_ms: SupportsIndex = ...,
    *,
    ignore_obstacles: bool = ...,
    attach: bool = ...,
    graphs_are_safe: bool = ...,
    watch_ms: Optional[SupportsIndex] = ...,
    progress: Optional[_Progress] = ...,
    note: Optional[_Note] = ...,
) -> Report: ...
def resume(
    pid: _Target,
    gpu_mapping: Optional[_GpuMapping] = ...,
    *,
    images_dir: Optional[_Path] = ...,
    time_limit_ms: SupportsIndex = ...,
    progress: Optional[_Progress] = ...,
    note: Optional[_Note] = ...,
) -> Report: ...
def swap(
    out: _Target,
    into: _Target,
    gpu_mapping: Optional[_GpuMapping] = ...,
    *,
    timeout_ms: SupportsIndex = ...,
    ignore_obstacles: bool = ...,
    attach: bool = ...,
    graphs_are_safe: bool = ...,
    watch_ms: Optional[SupportsIndex] = ...,
    note: Optional[_Note] = ...,
) -> Swapped: ...
def dump(
    pid: _Target,
    images_dir: _Path,
    *,
    after: Literal["end", "running", "suspended"] = ...,
    timeout_ms: SupportsIndex = ...,
    overwrite: bool = ...,
    sync: bool = ...,
    ignore_obstacles: bool = ...,
    ignore_undumpable: bool = ...,
    criu: Optional[_Path] = ...,
    shell_job: bool = ...,
    tcp_established: bool = ...,
    tcp_close: bool = ...,
    file_locks: bool = ...,
    link_remap: bool = ...,
    ext_unix_sk: bool = ...,
    ghost_limit: SupportsIndex = ...,
    manage_cgroups: _Cgroups = ...,
    network_lock: Literal["iptables", "nftables", "skip"] = ...,
    external: Sequence[str] = ...,
    compress: Literal["none", "lz4", "zstd"] = ...,
    base: Optional[_Path] = ...,
    attach: bool = ...,
    graphs_are_safe: bool = ...,
    watch_ms: Optional[SupportsIndex] = ...,
    progress: Optional[_Progress] = ...,
    note: Optional[_Note] = ...,
) -> Report: ...
def restore(
    images_dir: _Path,
    gpu_mapping: Optional[_GpuMapping] = ...,
    *,
    leave_suspended: bool = ...,
    time_limit_ms: SupportsIndex = ...,
    criu: Optional[_Path] = ...,
    external: Sequence[str] = ...,
    inherit: Optional[Mapping[str, Union[int, _HasFileno]]] = ...,
    tcp_close: bool = ...,
    ext_unix_sk: bool = ...,
    manage_cgroups: Optional[_Cgroups] = ...,
    map_addresses: Optional[Mapping[str, str]] = ...,
    progress: Optional[_Progress] = ...,
    note: Optional[_Note] = ...,
) -> Report: ...
def inspect(
    images_dir: _Path,
    *,
    verify: bool = ...,
    gpu_mapping: Optional[_GpuMapping] = ...,
    criu: Optional[_Path] = ...,
    progress: Optional[_Progress] = ...,
) -> Dict[str, Any]: ...
def recover(pid: Optional[_Target] = ..., *, note: Optional[_Note] = ...) -> List[Recovered]: ...

_Self = TypeVar("_Self", bound=_Operations)

# What Process, Group and Job share.
class _Operations:
    def suspend(
        self,
        timeout_ms: SupportsIndex = ...,
        *,
        ignore_obstacles: bool = ...,
        attach: bool = ...,
        graphs_are_safe: bool = ...,
        watch_ms: Optional[SupportsIndex] = ...,
        progress: Optional[_Progress] = ...,
        note: Optional[_Note] = ...,
    ) -> Report: ...
    def resume(
        self,
        gpu_mapping: Optional[_GpuMapping] = ...,
        *,
        images_dir: Optional[_Path] = ...,
        time_limit_ms: SupportsIndex = ...,
        progress: Optional[_Progress] = ...,
        note: Optional[_Note] = ...,
    ) -> Report: ...
    def dump(
        self,
        images_dir: _Path,
        *,
        after: Literal["end", "running", "suspended"] = ...,
        timeout_ms: SupportsIndex = ...,
        overwrite: bool = ...,
        sync: bool = ...,
        ignore_obstacles: bool = ...,
        ignore_undumpable: bool = ...,
        criu: Optional[_Path] = ...,
        shell_job: bool = ...,
        tcp_established: bool = ...,
        tcp_close: bool = ...,
        file_locks: bool = ...,
        link_remap: bool = ...,
        ext_unix_sk: bool = ...,
        ghost_limit: SupportsIndex = ...,
        manage_cgroups: _Cgroups = ...,
        network_lock: Literal["iptables", "nftables", "skip"] = ...,
        external: Sequence[str] = ...,
        compress: Literal["none", "lz4", "zstd"] = ...,
        base: Optional[_Path] = ...,
        attach: bool = ...,
        graphs_are_safe: bool = ...,
        watch_ms: Optional[SupportsIndex] = ...,
        progress: Optional[_Progress] = ...,
        note: Optional[_Note] = ...,
    ) -> Report: ...
    def suspended(
        self: _Self,
        timeout_ms: SupportsIndex = ...,
        *,
        gpu_mapping: Optional[_GpuMapping] = ...,
        ignore_obstacles: bool = ...,
        attach: bool = ...,
        graphs_are_safe: bool = ...,
        watch_ms: Optional[SupportsIndex] = ...,
        progress: Optional[_Progress] = ...,
        note: Optional[_Note] = ...,
    ) -> AbstractContextManager[_Self]: ...

class _Handle(_Operations):
    def __init__(self, pid: SupportsIndex) -> None: ...
    @property
    def pid(self) -> int: ...

class Process(_Handle):
    @property
    def state(self) -> ProcessState: ...
    @property
    def restore_thread_id(self) -> int: ...
    def lock(self, timeout_ms: SupportsIndex = ...) -> None: ...
    def checkpoint(self) -> None: ...
    def restore(self, gpu_mapping: Optional[_GpuMapping] = ...) -> None: ...
    def unlock(self) -> None: ...
    def locked(self, timeout_ms: SupportsIndex = ...) -> AbstractContextManager[Process]: ...

class Group(_Handle):
    @property
    def members(self) -> List[ProcessReport]: ...
    def lock(self, timeout_ms: SupportsIndex = ...) -> None: ...
    def checkpoint(self, *, progress: Optional[_Progress] = ...) -> None: ...
    def restore(
        self, gpu_mapping: Optional[_GpuMapping] = ..., *, progress: Optional[_Progress] = ...
    ) -> None: ...
    def unlock(self) -> None: ...
    def locked(self, timeout_ms: SupportsIndex = ...) -> AbstractContextManager[Group]: ...

@dataclass(frozen=True)
class CudaProcess:
    pid: int
    user: Optional[str]
    state: Optional[str]
    path: Optional[str]
    gpu_bytes: int
    since: Optional[str]
    operation: Optional[str]
    name: Optional[str]
    command: str
    json: Dict[str, Any] = ...

@dataclass(frozen=True)
class Check:
    id: str
    light: str
    what: str
    remedy: Optional[str]

@dataclass(frozen=True)
class Diagnosis:
    suspend: bool
    dump: bool
    restore: bool
    machine: Tuple[Check, ...]
    processes: Tuple[Check, ...]
    json: Dict[str, Any] = ...
    @property
    def reasons(self) -> Tuple[Check, ...]: ...

class Job(_Operations):
    name: str
    process: Optional[Popen[Any]]
    def __init__(self, name: str, process: Optional[Popen[Any]] = ...) -> None: ...
    @property
    def processes(self) -> List[CudaProcess]: ...
    def recover(self, *, note: Optional[_Note] = ...) -> List[Recovered]: ...
    def wait(self, timeout: Optional[float] = ...) -> int: ...

def ps() -> List[CudaProcess]: ...
def doctor(
    target: Union[None, SupportsIndex, str, Job] = ...,
    *,
    images_dir: Optional[_Path] = ...,
    trial: bool = ...,
    criu: Optional[_Path] = ...,
) -> Diagnosis: ...
def verify(images_dir: _Path) -> Dict[str, Any]: ...
def run(
    command: Sequence[_Path],
    *,
    name: Optional[str] = ...,
    images_dir: Optional[_Path] = ...,
    every: Optional[float] = ...,
    grace: Optional[float] = ...,
    keep: Optional[SupportsIndex] = ...,
    on_signal: Optional[Sequence[str]] = ...,
    best_effort: bool = ...,
    **popen: Any,
) -> Job: ...

class ProgressBar:
    def __init__(self, file: Optional[TextIO] = ...) -> None: ...
    def __enter__(self) -> ProgressBar: ...
    def __exit__(self, *_: object) -> None: ...
    def __call__(self, phase: str, done: int, total: int) -> None: ...
    def close(self) -> None: ...

class Error(RuntimeError):
    code: str
    message: str
    remedy: str
    driver_number: int
    driver_name: str
    driver_text: str
    obstacles: Tuple[Dict[str, Any], ...]
    def __init__(
        self,
        message: str = ...,
        remedy: str = ...,
        driver_number: int = ...,
        driver_name: str = ...,
        driver_text: str = ...,
        obstacles: Sequence[Dict[str, Any]] = ...,
    ) -> None: ...

class Usage(Error, ValueError): ...
class Interrupted(Error): ...
class Internal(Error): ...
class Io(Error, OSError): ...
class NoSpace(Error, OSError): ...
class NoSuchProcess(Error, ProcessLookupError): ...
class ProcessGone(Error, ProcessLookupError): ...
class Zombie(Error, ProcessLookupError): ...
class ThreadId(Error, ValueError): ...
class NotCuda(Error): ...
class NotPermitted(Error, PermissionError): ...
class WrongState(Error): ...
class FailedState(Error): ...
class Timeout(Error, TimeoutError): ...
class NoAnswer(Error, TimeoutError): ...
class Busy(Error): ...
class DriverMissing(Error): ...
class DriverTooOld(Error): ...
class DriverUnsupported(Error): ...
class DriverError(Error): ...
class NotSupported(Error): ...
class DeviceMapUnsupported(Error): ...
class DeviceMapInvalid(Error, ValueError): ...
class GpuMismatch(Error): ...
class OutOfGpuMemory(Error): ...
class OutOfHostMemory(Error): ...
class CriuMissing(Error): ...
class CriuTooOld(Error): ...
class CriuFailed(Error): ...
class Undumpable(Error): ...
class ImageExists(Error, FileExistsError): ...
class ImageIncomplete(Error): ...
class ImageCorrupt(Error): ...
class ImageVersion(Error): ...
class PidInUse(Error): ...
class NotRolledBack(Error): ...
