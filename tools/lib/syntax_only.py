"""Lets the compiler of a build folder look at every source that a target does not need.

    syntax_only.py BUILD TARGET

With the flags of the build, warnings that are errors among them, but without sanitizers and without
making anything: that takes a fraction of the time. Prints what is wrong; status 1 if anything is.
"""

import concurrent.futures
import json
import os
import shlex
import subprocess
import sys


def objects_of(build, target):
    commands = subprocess.run(["ninja", "-C", build, "-t", "commands", target], check=True,
                              capture_output=True, text=True).stdout
    return {word for line in commands.splitlines() if " -c " in line
            for before, word in zip(line.split(), line.split()[1:]) if before == "-o"}


def look(entry):
    words = shlex.split(entry["command"])
    at = words.index("-o")
    del words[at:at + 2]
    words = ["-fsyntax-only" if word == "-c" else word for word in words
             if not word.startswith(("-fsanitize", "-fno-sanitize"))]
    done = subprocess.run(words, cwd=entry["directory"], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def main():
    build, target = sys.argv[1:]
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
        entries = json.load(file)
    known = objects_of(build, target)
    others = [entry for entry in entries
              if shlex.split(entry["command"])[shlex.split(entry["command"]).index("-o") + 1] not in known]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for status, said in pool.map(look, others):
            sys.stdout.write(said)
            failed += status != 0
    print(f"{len(others)} sources looked at, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
