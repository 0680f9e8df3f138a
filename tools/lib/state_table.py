"""The table of docs/what-survives.md, from what `stasis-workload state` says of itself.

Reads reports of lines "kept|lost|not settable here<TAB>subject<TAB>name[<TAB>why]": those over a
suspend and a resume, and those over a dump and a restore. What one process has lost is lost.
"""

import argparse
import sys

BEGIN = "<!-- made by tools/state-table -->\n"
END = "<!-- end of what tools/state-table makes -->\n"
UNSET = "not settable here"
WORSE = {UNSET: 0, "kept": 1, "lost": 2}


def read(paths):
    """Of each (subject, name), in order: the worst that a report says."""
    result = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for line in file:
                state, subject, name = line.rstrip("\n").split("\t")[:3]
                key = subject, name
                if WORSE[state] >= WORSE[result.get(key, UNSET)]:
                    result[key] = state
    return result


def names(result, subject, state):
    return [name for (of, name), now in result.items() if of == subject and now == state]


def make(suspend, dump):
    rows = ["| | kept, over a dump as over a suspend | lost by a dump |", "|---|---|---|"]
    lost = [f"{of}: {name}" for (of, name), now in suspend.items() if now == "lost"]
    if lost:
        sys.exit("lost over a suspend and a resume: " + "; ".join(lost))
    for subject in dict.fromkeys(of for of, _ in dump):
        kept = "; ".join(names(dump, subject, "kept"))
        gone = "; ".join(f"**{name}**" for name in names(dump, subject, "lost"))
        rows.append(f"| {subject} | {kept} | {gone} |")
    return rows


def told(text):
    """What the page says: of each (subject, name), kept or lost."""
    result = {}
    for row in text.splitlines()[2:]:
        subject, kept, gone = (cell.strip() for cell in row.strip("|").split("|"))
        for cell, state in ((kept, "kept"), (gone, "lost")):
            for name in filter(None, cell.split("; ")):
                result[subject, name.strip("*")] = state
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", required=True)
    parser.add_argument("--suspend", nargs="+", required=True)
    parser.add_argument("--dump", nargs="+", required=True)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    with open(options.page, encoding="utf-8") as file:
        page = file.read()
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    dump = read(options.dump)
    rows = make(read(options.suspend), dump)
    if not options.check:
        with open(options.page, "w", encoding="utf-8") as file:
            file.write(before + BEGIN + "\n".join(rows) + "\n" + END + after)
        return
    said = told(table)
    # What cannot be set here says nothing: another machine has made the page.
    wrong = [
        f"{subject}: {name} is {state}, and the page says {said.get((subject, name), 'nothing')}"
        for (subject, name), state in dump.items()
        if state != UNSET and said.get((subject, name)) != state
    ]
    wrong += [f"{of}: {name} is on the page only" for of, name in said if (of, name) not in dump]
    if wrong:
        sys.exit("\n".join(wrong) + "\nmake the page anew with tools/state-table")


main()
