"""Makes docs/errors.md of what `stasis explain --json` prints (standard input)."""

import json
import sys

HEAD = """# Errors and exit statuses

Made by `tools/errors-page` from the catalogue that the program itself has (`stasis explain`); a test compares the two.

Every error has a code, which `--json` gives as `error.code` and the text in brackets at the end of its first line. The exit status says what a script can do about it. `stasis explain CODE` says what stands here; it takes the id of an obstacle, the number of an answer of the driver and a line of CRIU's log too. Where the driver, an agent or CRIU would refuse or lose something of a program, `error.obstacles` lists it for programs: `id` ([all of them](#obstacles), those of `stasis doctor` included), `pid`, `what`, `remedy`, and `override`, the option that goes on in spite of it.
"""

AFTER_CODES = """
What cannot be written to standard error (notes, progress, an error itself: the terminal has hung up, the device is full) changes neither the operation nor the exit status. With `--json`, standard output gets one object in any case; if it takes none, the error goes to standard error as text.

During an operation Ctrl-Z does not stop stasis, which says so; SIGUSR1, SIGUSR2, SIGALRM and their like are ignored; and a limit on the size of files (`ulimit -f`) is an `io` error and no end by SIGXFSZ. `stasis ps`, `inspect`, `logs`, `explain` and a stasis that waits for a restored job can be stopped like any program.

## What the driver answers

About a process that is alive and may be traced; of one that has ended, is a zombie, a thread, or another user's, that is said. The first row that fits counts.
"""

CRIU = """
## What CRIU says

CRIU has no error codes: the lines of its log that are known, by what stands in them. The first that fits the first error of the log counts.
"""

OBSTACLES = """
## Obstacles

What `id` in `error.obstacles` and in `stasis doctor --json` can be. The doctor gives some of them in green too, where all is well.
"""

OURS = {-1: "none in time", -2: "none: the call was ended", 0: "any other"}


def table(titles, rows):
    def line(cells):
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
    return "\n".join([line(titles), "|" + "---|" * len(titles)] + [line(row) for row in rows]) + "\n"


def words(text):
    return text.replace("{pid}", "PID").replace("{action}", "CALL")


def main():
    known = json.load(sys.stdin)
    status = {"interrupted": "128 + signal"}
    print(HEAD)
    print(table(["code", "exit status", "meaning", "usual causes", "what to do"],
                [[f"`{e['code']}`", status.get(e["code"], e["exit_status"]), e["meaning"], e["causes"], e["remedy"]]
                 for e in known["errors"]]), end="")
    print(AFTER_CODES)
    print(table(["answer", "to", "code", "meaning", "what to do"],
                [[OURS.get(a["number"], a["number"]), a["action"] or "any call", f"`{a['code']}`", words(a["meaning"]),
                  words(a["remedy"])] for a in known["driver"]]), end="")
    print(CRIU)
    print(table(["the line has", "code", "meaning", "what to do"],
                [["`" + " … ".join(part.strip() for part in c["line"] if part) + "`", f"`{c['code']}`", c["meaning"],
                  c["remedy"]] for c in known["criu"]]), end="")
    print(OBSTACLES)
    print(table(["id", "about"], [[f"`{o['id']}`", o["meaning"]] for o in known["obstacles"]]), end="")


if __name__ == "__main__":
    main()
