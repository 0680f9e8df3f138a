#!/usr/bin/env python3
"""What the agent adds to a call of the driver, in nanoseconds.

Two processes at a time, one under `stasis run` and one not, are asked in turn for the time of each call;
several such pairs, because where the loader puts things shifts all figures of a process. Prints a table
on standard error and one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

CALLS = [("cuEventQuery", 1), ("cuEventQuery", 8), ("cuStreamQuery", 1), ("cuLaunchKernel:refused", 1),
         ("cuLaunchKernel", 1), ("cuMemcpyHtoDAsync", 1)]
NO_GPU = 77


class Asked:
    """A stasis-agent-bench that waits for questions."""

    def __init__(self, *argv):
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, call, threads):
        self.process.stdin.write(f"{call} {threads}\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline()
        if not said:
            sys.exit(NO_GPU if self.process.wait() == NO_GPU else 1)
        return float(said)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def interval(values):
    """The mean, and how far from it the true one may lie (95 %, Student's t for few values)."""
    student = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, None
    return mean, student.get(len(values), 2.1) * statistics.stdev(values) / len(values) ** 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", required=True, help="folder with bin/stasis and bin/stasis-agent-bench")
    parser.add_argument("--pairs", type=int, default=6, help="of processes")
    parser.add_argument("--turns", type=int, default=9, help="of each pair, for each call")
    options = parser.parse_args()
    bench, stasis = (os.path.join(options.build, "bin", name) for name in ("stasis-agent-bench", "stasis"))
    found = {call: {"without": [], "with": [], "added": []} for call in CALLS}
    for pair in range(options.pairs):
        words = {"without": [bench], "with": [stasis, "run", "--", bench]}
        order = list(words) if pair % 2 == 0 else list(reversed(words))
        asked = {name: Asked(*words[name]) for name in order}
        for call, record in found.items():
            times = {name: [] for name in order}
            added = []
            for turn in range(options.turns):
                for name in order if turn % 2 == 0 else reversed(order):
                    times[name].append(asked[name].ask(*call))
                added.append(times["with"][-1] - times["without"][-1])
            for name, values in (*times.items(), ("added", added)):
                record[name].append(statistics.median(values))
        for one in asked.values():
            one.end()
    rows = []
    print(f"{'ns per call':24} {'without':>10} {'with':>10} {'added, 95 %':>18}", file=sys.stderr)
    for (call, threads), record in found.items():
        mean, error = interval(record["added"])
        rows.append({"call": call, "threads": threads, "without": statistics.median(record["without"]),
                     "with": statistics.median(record["with"]), "added": mean, "error_95": error,
                     "added_of_each_pair": record["added"]})
        name = call if threads == 1 else f"{call}, {threads} threads"
        print(f"{name:24} {rows[-1]['without']:10.1f} {rows[-1]['with']:10.1f} "
              f"{mean:9.2f} ± {error or 0:.2f}", file=sys.stderr)
    print(json.dumps({"pairs": options.pairs, "turns": options.turns, "calls": rows}, indent=1))


if __name__ == "__main__":
    main()
