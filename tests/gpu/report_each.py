"""A plugin for pytest: a line of JSON per finished test, as they finish, in the file $STASIS_TEST_REPORT."""

import json
import os

OUTCOMES = {}


def pytest_runtest_logreport(report):
    # A test has three phases; the worst is what it came to.
    before = OUTCOMES.get(report.nodeid, "passed")
    OUTCOMES[report.nodeid] = before if before != "passed" else report.outcome
    if report.when == "teardown":
        with open(os.environ["STASIS_TEST_REPORT"], "a", encoding="utf-8") as file:
            json.dump({"test": report.nodeid.partition("::")[2], "outcome": OUTCOMES[report.nodeid]}, file)
            file.write("\n")
