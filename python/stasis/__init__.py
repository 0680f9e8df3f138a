"""Transparent checkpoint and restore of running CUDA programs.

    import stasis

    process = stasis.Process(pid)     # the names of NVIDIA's cuda.core.checkpoint
    with process.suspended():
        ...                           # its GPU memory is free

    stasis.dump(pid, "images")        # to disk; the process has ended
    report = stasis.restore("images")

One process acts on another; docs/python.md says how a program has a helper suspend it, and who may.
Every call lets the other threads of this program run, and ends in order on Ctrl-C.
"""

from ._core import (
    DriverInfo,
    Group,
    Process,
    ProcessReport,
    ProcessState,
    Recovered,
    Report,
    Swapped,
    configure,
    driver,
    dump,
    inspect,
    recover,
    restore,
    resume,
    suspend,
    swap,
)
from ._errors import (
    Busy,
    CriuFailed,
    CriuMissing,
    CriuTooOld,
    DeviceMapInvalid,
    DeviceMapUnsupported,
    DriverError,
    DriverMissing,
    DriverTooOld,
    DriverUnsupported,
    Error,
    FailedState,
    GpuMismatch,
    ImageCorrupt,
    ImageExists,
    ImageIncomplete,
    ImageVersion,
    Internal,
    Interrupted,
    Io,
    NoAnswer,
    NoSpace,
    NoSuchProcess,
    NotCuda,
    NotPermitted,
    NotRolledBack,
    NotSupported,
    OutOfGpuMemory,
    OutOfHostMemory,
    PidInUse,
    ProcessGone,
    ThreadId,
    Timeout,
    Undumpable,
    Usage,
    WrongState,
    Zombie,
)
from ._program import Check, CudaProcess, Diagnosis, Job, doctor, ps, run, verify
from ._progress import ProgressBar
from ._stasis import version as _version

__version__ = _version()

__all__ = [name for name in dir() if not name.startswith("_")]
