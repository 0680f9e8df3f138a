"""Cases, their results, and the ways in which one ends.

A case is a function of a Machine. It returns a dict of figures (or None), raises Skip with a reason
when this machine can say nothing, and Failure (or anything else) when the subject is at fault. What
it starts is ended by the runner, whatever happens.
"""

import fnmatch
import time
import traceback


class Skip(Exception):
    """This machine or build cannot run the case. Never a pass."""


class Failure(Exception):
    """What was tested did not do what it has to. A missed target has figures all the same."""

    def __init__(self, message, figures=None):
        super().__init__(message)
        self.figures = figures or {}


class Case:
    def __init__(self, name, function, simulated, needs):
        self.name = name
        self.function = function
        self.simulated = simulated  # can be run on the simulated driver too
        self.needs = needs


CASES = []


def case(name, simulated=True, needs=()):
    """Registers a case. `needs` names what Machine.require() checks first."""

    def register(function):
        CASES.append(Case(name, function, simulated, needs))
        return function

    return register


def expect(condition, message, figures=None):
    if not condition:
        raise Failure(message, figures)


def expect_equal(found, wanted, what):
    if found != wanted:
        raise Failure(f"{what}: {found!r} instead of {wanted!r}")


def selected(patterns, excluded):
    def matches(name, pattern):
        return fnmatch.fnmatch(name, pattern) or name.startswith(pattern + ".")

    for one in CASES:
        if patterns and not any(matches(one.name, pattern) for pattern in patterns):
            continue
        if any(matches(one.name, pattern) for pattern in excluded):
            continue
        yield one


def run_case(one, machine):
    """Runs one case and returns its record for the JSON."""
    start = time.monotonic()
    record = {"case": one.name, "result": "passed", "note": "", "figures": {}}
    try:
        if machine.simulated and not one.simulated:
            raise Skip("needs a real GPU")
        machine.require(one.needs)
        machine.begin(one.name)
        figures = one.function(machine)
        if figures:
            record["note"] = str(figures.pop("note", ""))
            record["figures"] = figures
    except Skip as reason:
        record["result"] = "skipped"
        record["note"] = str(reason)
    except Failure as reason:
        record["result"] = "failed"
        record["note"] = str(reason)
        record["figures"] = reason.figures
    except Exception as reason:  # a fault of the test itself is a failure too
        record["result"] = "failed"
        record["note"] = f"{type(reason).__name__}: {reason}"
        record["traceback"] = traceback.format_exc()
    finally:
        failed = record["result"] == "failed"
        commands = machine.end(keep=failed)
        if failed:  # of a success they would only make the file large
            record["commands"] = commands
    record["seconds"] = round(time.monotonic() - start, 3)
    return record
