"""A plugin for pytest: what becomes of each test, as lines of JSON in the file $STASIS_TEST_REPORT.

A test has a line when it begins ("begun") and one when it has ended; the last counts. Tests with a line are
left out, so that pytest can be started again after a test that has ended it.
"""

import json
import os

REPORT = os.environ["STASIS_TEST_REPORT"]
OUTCOMES = {}


def name_of(nodeid):
    return nodeid.partition("::")[2]


def note(nodeid, outcome):
    with open(REPORT, "a", encoding="utf-8") as file:
        json.dump({"test": name_of(nodeid), "outcome": outcome}, file)
        file.write("\n")


def last_outcomes():
    if not os.path.exists(REPORT):
        return {}
    with open(REPORT, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    return {line["test"]: line["outcome"] for line in lines}


def pytest_collection_modifyitems(config, items):
    seen = last_outcomes()
    left_out = [item for item in items if name_of(item.nodeid) in seen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if name_of(item.nodeid) not in seen]


def pytest_runtest_logstart(nodeid, location):  # noqa: ARG001 (pytest's names)
    note(nodeid, "begun")


def pytest_runtest_logreport(report):
    # A test has three phases; the worst is what it came to.
    before = OUTCOMES.get(report.nodeid, "passed")
    OUTCOMES[report.nodeid] = before if before != "passed" else report.outcome
    if report.when == "teardown":
        note(report.nodeid, OUTCOMES[report.nodeid])
