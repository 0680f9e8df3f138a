"""What the library says of the command line, in terms of this package."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys

_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_TIME = r"[0-9]+(?:ms|s|m|h)\b"


def _milliseconds(text):
    number, unit = re.fullmatch(r"([0-9]+)([a-z]+)", text).groups()
    return int(number) * _MILLISECONDS[unit]


def _quoted(text):
    return json.dumps(text.strip("'"), ensure_ascii=False)


def _named(name, pattern=None, value=None):
    """The argument `name`. What fits `pattern` behind the option is its value, which `value` writes in Python."""
    return pattern, lambda given: f"{name}={value(given) if given else '...'}"


def _literally(text):
    return None, lambda _: text


def _path(name):
    return _named(name, r"[A-Z]+\b|/[^\s,;)]+", lambda given: "..." if given.isupper() else _quoted(given))


def _milliseconds_of(name):
    return _named(name, _TIME, lambda given: str(_milliseconds(given)))


def _seconds_of(name):
    return _named(name, _TIME, lambda given: f"{_milliseconds(given) / 1000:g}")


def _one_of(name, *words):
    return _named(name, rf"(?:{'|'.join(words)})\b", _quoted)


_PAIR = r"[^\s,;)=]+=[^\s,;)]+"


def _pairs(name, quote):
    def value(given):
        old, _, new = given.partition("=")
        return f"{{{quote(old)}: {quote(new)}}}"

    return _named(name, _PAIR, value)


# Of each option its argument here: the form of a value, and a function that writes it. What has no row has
# no argument: `--path`, `--ring` and their like, `stasis run` apart, are the program's alone.
_OPTIONS = {
    "--ignore-obstacles": _literally("ignore_obstacles=True"),
    "--ignore-undumpable": _literally("ignore_undumpable=True"),
    "--force": _literally("overwrite=True"),
    # suspend(), swap() and dump() call it otherwise than resume() and restore().
    "--timeout": _literally("timeout_ms=... or time_limit_ms=..."),
    "--driver-timeout": _literally("stasis.configure(answer_timeout_ms=..., work_timeout_ms=...)"),
    "--device-map": _pairs("gpu_mapping", lambda gpu: gpu if gpu.isupper() else _quoted(gpu)),
    "--images-dir": _path("images_dir"),
    "--leave-running": _literally('after="running"'),
    "--leave-suspended": _literally('after="suspended"'),
    "--tcp-established": _literally("tcp_established=True"),
    "--tcp-close": _literally("tcp_close=True"),
    "--file-locks": _literally("file_locks=True"),
    "--link-remap": _literally("link_remap=True"),
    "--no-link-remap": _literally("link_remap=False"),
    "--ext-unix-sk": _literally("ext_unix_sk=True"),
    "--shell-job": _literally("shell_job=True"),
    "--ghost-limit": _literally("ghost_limit=..."),
    "--manage-cgroups": _one_of("manage_cgroups", "ignore", "soft", "full", "strict", "none", "props"),
    "--network-lock": _one_of("network_lock", "iptables", "nftables", "skip"),
    "--external": _named("external", r"'[^']*'|[a-z]+\[[^\s,;)]+", lambda given: f"[{_quoted(given)}]"),
    "--map-address": _pairs("map_addresses", _quoted),
    "--inherit-fd": _literally("inherit={...}"),
    "--sync": _named("sync", r"(?:none|disk)\b", lambda given: str(given != "none")),
    "--compress": _one_of("compress", "none", "lz4", "zstd"),
    "--base": _path("base"),
    "--criu": _path("criu"),
    "--attach": _literally("attach=True"),
    "--graphs-are-safe": _literally("graphs_are_safe=True"),
    "--watch-graphs": _milliseconds_of("watch_ms"),
    "--verify": _literally("verify=True"),
    "--no-trial": _literally("trial=False"),
    "--name": _named("name", r"[A-Z]+\b", lambda _: "..."),
    "--every": _seconds_of("every"),
    "--grace": _seconds_of("grace"),
    "--keep": _named("keep", r"[0-9]+\b", str),
    "--on-signal": _named("on_signal", r"[A-Z][A-Z0-9,]*\b", lambda given: json.dumps(given.split(","))),
    "--best-effort": _literally("best_effort=True"),
}

# Those of the program that this package lacks, with the values that remedies give them.
_OF_THE_PROGRAM = {
    "--path": r"(?:driver|direct)\b",
    "--ring": r"[0-9]+[KMG]\b",
    "--group": r"DIR\b|tcp://[^\s,;)]+",
    "--group-secret": r"[A-Z]+\b|/[^\s,;:)]+",
    "--part": r"[A-Z]+\b",
    "--parts": r"[0-9]+\b",
    "--host-memory": r"[a-z]+\b",
    "--pre-copy": None,
    "--detach": None,
    "--no-io-uring": None,
}


def _with_value(option, pattern):
    return rf"{option}(?![-a-z])" + (rf"(?:[ =](?:{pattern}))?" if pattern else "")


_ARGUMENT = re.compile("(?<![-\\w])(?:" + "|".join(_with_value(one, row[0]) for one, row in _OPTIONS.items()) + ")")
_SHELL = "(?:" + "|".join(_with_value(one, pattern) for one, pattern in _OF_THE_PROGRAM.items()) + ")"
_WORDS = re.compile(rf"(?<![-\w]){_SHELL}(?: {_SHELL})*")


def _argument(found):
    option, value = re.fullmatch(r"(--[-a-z]+)(?:[ =](.*))?", found[0]).groups()
    return _OPTIONS[option][1](value)


def _outside_of_backticks(text):
    return _ARGUMENT.sub(_argument, _WORDS.sub(lambda found: f"`{found[0]}` of the program `stasis`", text))


def _target(word, function):
    """A process number, or a job by its name. None: neither."""
    if re.fullmatch(r"[0-9]+", word):
        return word
    if word == "PID":
        return "pid"
    if word == "NAME":
        return "name" if function == "doctor" else "stasis.Job(name)"
    if re.fullmatch(r"[\w.][\w.-]*", word) and not re.fullmatch(r"\.+|[A-Z]+", word):
        return _quoted(word) if function == "doctor" else f"stasis.Job({_quoted(word)})"
    return None


def _directory(word, _function):
    if re.fullmatch(r"[A-Z]+", word):
        return "images_dir"
    return None if re.fullmatch(r"\.+", word) else _quoted(word)


# The functions that are verbs, and what reads the words behind them that are no options.
_VERBS = {
    "doctor": (_target,),
    "ps": (),
    "suspend": (_target,),
    "resume": (_target,),
    "swap": (_target, _target),
    "dump": (_target, _directory),
    "restore": (_directory,),
    "recover": (_target,),
    "inspect": (_directory,),
    "verify": (_directory,),
}


def _call_of_run(words):
    """`stasis run --images-dir DIR --name NAME -- COMMAND...`, of which each may be missing."""
    words, named, command = list(words), [], "..."
    while words:
        word = words.pop(0)
        if word == "--":
            command = f"[{', '.join(map(_quoted, words))}]"
            break
        if word not in ("--images-dir", "--name"):
            return None
        value = _quoted(words.pop(0)) if words and words[0] != "--" else "..."
        named.append(f"{word[2:].replace('-', '_')}={value}")
    return f"stasis.run({', '.join([command, *named])})"


def _call(line):
    """`stasis resume 12 --images-dir DIR` as a call of this package. None: it has none, or not all of it."""
    try:
        program, verb, *words = shlex.split(line)
    except ValueError:
        return None
    if [program, verb] == ["stasis", "run"]:
        return _call_of_run(words)
    if program != "stasis" or verb not in _VERBS:
        return None
    if not words:
        return f"stasis.{verb}()"  # its name
    parameters = inspect.signature(getattr(sys.modules[__package__], verb)).parameters
    read = list(_VERBS[verb])
    arguments, named = [], []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            text = read.pop(0)(word, verb) if read else None
            if text is None:
                return None
            arguments.append(text)
            continue
        if word == "--all" and verb == "recover":
            continue
        option, has_value, value = word.partition("=")
        if option not in _OPTIONS:
            return None
        pattern, write = _OPTIONS[option]
        if pattern and not has_value and words and not words[0].startswith("-"):
            value = words.pop(0)
        elif has_value and not pattern:
            return None
        if value and not re.fullmatch(pattern, value):
            return None
        text = write(value)
        if option == "--timeout":
            return None  # a shell line says how long
        if option == "--leave-suspended" and verb == "restore":
            text = "leave_suspended=True"
        if text.partition("=")[0] not in parameters:
            return None
        named.append(text)
    given = {text.partition("=")[0] for text in named}
    needed = [name for name, one in parameters.items() if one.default is one.empty and name not in given]
    if len(arguments) < len(needed):
        return None
    return f"stasis.{verb}({', '.join(arguments + named)})"


# Of a job's image: `restore()` refuses that of its directory, too.
_DIRECTORY_OF_JOB = re.compile(r"give its directory, from whose newest image the job goes on: `stasis restore [^`]*`; or ")


def in_python(remedy):
    """A remedy of the command line in words of this package: options as arguments, verbs as functions.

    A command for a shell stands in backticks. It stays as it is if this package has nothing in its place: it is
    another program's, or a line of `stasis` that has a word without a counterpart here.
    """
    out = []
    # Every second part stands in backticks.
    for number, part in enumerate(_DIRECTORY_OF_JOB.sub("", remedy).split("`")):
        if number % 2 == 0:
            out.append(_outside_of_backticks(part))
        elif part.startswith("stasis "):
            out.append(f"`{_call(part) or part}`")
        elif _ARGUMENT.fullmatch(part):
            out.append(f"`{_ARGUMENT.sub(_argument, part)}`")
        elif _WORDS.fullmatch(part):
            out.append(_outside_of_backticks(part))
        else:
            out.append(f"`{part}`")
    return "".join(out)


def of_object(given):
    """The same object with the remedies and overrides in it, wherever they stand, in words of this package."""
    if isinstance(given, list):
        return [of_object(one) for one in given]
    if not isinstance(given, dict):
        return given
    return {
        key: in_python(value) if key in ("remedy", "override") and isinstance(value, str) else of_object(value)
        for key, value in given.items()
    }


def notes(note):
    """The callback with what it is told in words of this package. None stays None."""
    return note and (lambda text: note(in_python(text)))
