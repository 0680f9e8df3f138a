"""What people give, checked before anything is done."""

from __future__ import annotations

import operator
import os
import re
import uuid
from collections.abc import Mapping

MOST_PID = 2**31 - 1
MOST_MS = 2**32 - 1
# As the program takes it (check_job_name() in src/job/registry.cc).
JOB_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


def integer(value, name):
    """An int, or what counts as one (numpy's integers); a bool does not."""
    # numpy's bool_ is no bool, and older versions give it an __index__ all the same.
    if isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b":
        raise TypeError(f"{name} must be an int, not a bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None


def target(value):
    """A process number; or, as the command line takes it, the name of a job, which stays a str."""
    if not isinstance(value, str):
        return pid(value)
    if JOB_NAME.fullmatch(value):
        return value
    raise TypeError(f"pid must be an int, or a str that is the name of a job, not {value!r}")


def pid(value):
    if isinstance(value, str) and JOB_NAME.fullmatch(value):
        raise TypeError(f"pid must be an int, not str; stasis.Job({value!r}) is a job by its name")
    number = integer(value, "pid")
    if number <= 0:
        raise ValueError(f"pid must be a positive int, not {number}")
    if number > MOST_PID:
        raise ValueError(f"pid must be at most {MOST_PID}, not {number}")
    return number


def milliseconds(value, name):
    number = integer(value, name)
    if number < 0:
        raise ValueError(f"{name} must be >= 0, not {number}")
    if number > MOST_MS:
        raise ValueError(f"{name} must be at most {MOST_MS} (49 days), not {number}")
    return number


def flag(value, name):
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    return value


def attach(wanted, graphs_are_safe, watch_ms):
    """What the extension module takes: None, or the two; a watch of 0 is one that is not given."""
    watch = 0 if watch_ms is None else milliseconds(watch_ms, "watch_ms")
    if watch_ms is not None and watch == 0:
        raise ValueError("watch_ms must be > 0, not 0")
    given = flag(graphs_are_safe, "graphs_are_safe"), watch
    if flag(wanted, "attach"):
        return given
    if graphs_are_safe:
        raise ValueError("graphs_are_safe goes with attach=True")
    return None


def path(value, name):
    """The bytes of its name, which need not be UTF-8."""
    raw = os.fsencode(value)
    if not raw:
        raise ValueError(f"{name} must not be empty")
    if b"\0" in raw:
        raise ValueError(f"{name} must not hold a null byte")
    return raw


def texts(values, name):
    if isinstance(values, (str, bytes)):
        raise TypeError(f"{name} must be a sequence of strings, not one string")
    out = list(values)
    for one in out:
        if not isinstance(one, str):
            raise TypeError(f"{name} must hold strings, not {type(one).__name__}")
    # Paths are in them.
    return [os.fsencode(one) for one in out]


def callback(value, name):
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, not {type(value).__name__}")
    return value


def _from_text(value):
    bare = value[4:] if value[:4].upper() == "GPU-" else value
    digits = bare.replace("-", "")
    try:
        raw = bytes.fromhex(digits)
    except ValueError:
        raw = b""
    # bytes.fromhex() passes over spaces.
    if len(raw) != 16 or len(digits) != 32:
        raise ValueError(f"a GPU UUID has 32 hexadecimal digits, with or without hyphens: {value!r} has not")
    return raw


def gpu_uuid(value):
    """"GPU-…" of a string, a uuid.UUID, a CUuuid (whatever has 16 `bytes`), or an object with a `uuid`."""
    if isinstance(value, str):
        raw = _from_text(value)
    elif isinstance(value, uuid.UUID):
        raw = value.bytes
    elif hasattr(value, "uuid"):
        return gpu_uuid(value.uuid)
    elif hasattr(value, "bytes") and not isinstance(value, type):
        try:
            # Numbers from -128 where they are C's characters.
            raw = bytes(one & 0xFF for one in value.bytes)
        except TypeError:
            raw = b""
        if len(raw) != 16:
            raise ValueError(f"the bytes of {value!r} are no GPU UUID: it has 16")
    else:
        raise TypeError(f"a GPU is given by its UUID (a string, or an object with a uuid), not by {value!r}")
    return f"GPU-{uuid.UUID(bytes=raw)}"


def gpu_mapping(value):
    """Pairs of "GPU-…" from a mapping; none where there is nothing to move."""
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise TypeError(f"gpu_mapping must be a mapping from GPU UUID to GPU UUID, not {type(value).__name__}")
    return [(gpu_uuid(old), gpu_uuid(new)) for old, new in value.items()]
