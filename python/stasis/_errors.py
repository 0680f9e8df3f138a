"""One exception for each code of docs/errors.md."""

from __future__ import annotations

import json

from ._remedies import in_python, of_object

class Error(RuntimeError):
    """Something could not be done. What it was done to is as it was before, unless it says otherwise.

    `str()` of it has the message and, on a line of its own, the remedy. Each code has a class of its
    own; those that Python has an exception for are that too, so `except PermissionError` and
    `except TimeoutError` work.
    """

    #: Its name, as `stasis --json` gives it: "wrong-state".
    code = "internal"

    def __init__(self, message="", remedy="", driver_number=0, driver_name="", driver_text="", obstacles=()):
        super().__init__(message)
        #: What happened, with the value seen.
        self.message = message
        #: What to do about it; "" if there is nothing to say.
        self.remedy = remedy
        #: What the driver itself answered: the number of its CUresult, that one's name and text. 0 and
        #: "" if it was not the driver.
        self.driver_number = driver_number
        self.driver_name = driver_name
        self.driver_text = driver_text
        #: What the driver, an agent or CRIU would refuse or lose: objects with "id", "pid", "what",
        #: "remedy", and "override", the argument that goes on in spite of it ("ignore_obstacles=True"), or None.
        self.obstacles = tuple(obstacles)

    def __str__(self):
        said = self.message
        if self.driver_name and self.driver_name not in said:
            said += f" (driver: {self.driver_name} {self.driver_number})"
        return f"{said}\nwhat to do: {self.remedy}" if self.remedy else said

    def __reduce__(self):
        given = (self.message, self.remedy, self.driver_number, self.driver_name, self.driver_text, self.obstacles)
        return type(self), given


class Usage(Error, ValueError):
    """The arguments are malformed."""

    code = "usage"


class Interrupted(Error):
    """The user asked to stop; everything was rolled back. Ctrl-C gives a KeyboardInterrupt instead."""

    code = "interrupted"


class Internal(Error):
    """A bug in Stasis, or an impossible answer."""

    code = "internal"


class Io(Error, OSError):
    """A system call on a file failed."""

    code = "io"


class NoSpace(Error, OSError):
    """The disk is full, or would be."""

    code = "no-space"


class NoSuchProcess(Error, ProcessLookupError):
    """There is no process with this number."""

    code = "no-such-process"


class ProcessGone(Error, ProcessLookupError):
    """It ended while it was worked on, or its number means another process now."""

    code = "process-gone"


class Zombie(Error, ProcessLookupError):
    """It has exited and waits for its parent."""

    code = "zombie"


class ThreadId(Error, ValueError):
    """The number is a thread's."""

    code = "thread-id"


class NotCuda(Error):
    """A living process that does not use CUDA."""

    code = "not-cuda"


class NotPermitted(Error, PermissionError):
    """The kernel or the driver refuses this user."""

    code = "not-permitted"


class WrongState(Error):
    """The CUDA state of the process does not allow it."""

    code = "wrong-state"


class FailedState(Error):
    """The driver has given the CUDA state of the process up."""

    code = "failed-state"


class Timeout(Error, TimeoutError):
    """GPU work did not end in time; nothing has changed."""

    code = "timeout"


class NoAnswer(Error, TimeoutError):
    """The driver did not answer about a process in time."""

    code = "no-answer"


class Busy(Error):
    """Another operation works on the process, or it is stopped or traced."""

    code = "busy"


class DriverMissing(Error):
    """libcuda.so.1 cannot be loaded."""

    code = "driver-missing"


class DriverTooOld(Error):
    """The driver is older than 570."""

    code = "driver-too-old"


class DriverUnsupported(Error):
    """The driver lacks what is needed."""

    code = "driver-unsupported"


class DriverError(Error):
    """The driver refused for a reason it does not give."""

    code = "driver-error"


class NotSupported(Error):
    """The driver cannot do this with this process."""

    code = "not-supported"


class DeviceMapUnsupported(Error):
    """The driver cannot move a process to other GPUs."""

    code = "device-map-unsupported"


class DeviceMapInvalid(Error, ValueError):
    """The GPU mapping names an unknown GPU, or one twice."""

    code = "device-map-invalid"


class GpuMismatch(Error):
    """The GPUs here cannot hold the memory of the image."""

    code = "gpu-mismatch"


class OutOfGpuMemory(Error):
    """The GPU has not enough free memory."""

    code = "out-of-gpu-memory"


class OutOfHostMemory(Error):
    """The host, or a memory cgroup, has not enough free memory for the GPU's content."""

    code = "out-of-host-memory"


class CriuMissing(Error):
    """No usable criu was found."""

    code = "criu-missing"


class CriuTooOld(Error):
    """criu is older than 4.0."""

    code = "criu-too-old"


class CriuFailed(Error):
    """CRIU refused or failed; its own lines are in the message."""

    code = "criu-failed"


class Undumpable(Error):
    """A process has something that CRIU cannot dump, or that a restore would take from it."""

    code = "undumpable"


class ImageExists(Error, FileExistsError):
    """The image directory exists."""

    code = "image-exists"


class ImageIncomplete(Error):
    """There is no complete image there."""

    code = "image-incomplete"


class ImageCorrupt(Error):
    """The image is damaged."""

    code = "image-corrupt"


class ImageVersion(Error):
    """The image was written by a newer Stasis."""

    code = "image-version"


class PidInUse(Error):
    """A process number that the image needs is taken."""

    code = "pid-in-use"


class NotRolledBack(Error):
    """Something failed and a process is not back in its state: `remedy` has the command that mends it."""

    code = "not-rolled-back"


BY_CODE = {cls.code: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, Error)}
BY_CODE["internal"] = Internal


class ProgramMissing(Io, FileNotFoundError):
    """The program `stasis` is not there."""


def make(code, message, remedy, driver_number, driver_name, driver_text, as_json):
    """For the extension module. A code that a newer library has is an Error with that code."""
    cls = BY_CODE.get(code, Error)
    obstacles = of_object(list(json.loads(as_json).get("error", {}).get("obstacles", ())))
    error = cls(message, in_python(remedy), driver_number, driver_name, driver_text, obstacles)
    if cls is Error:
        error.code = code
    return error


def from_json(error):
    """Of the error that `stasis --json` prints."""
    driver = error.get("driver") or {}
    return make(
        error["code"],
        error["message"],
        error["remedy"],
        driver.get("number", 0),
        driver.get("name", ""),
        driver.get("text", ""),
        json.dumps({"error": error}),
    )
