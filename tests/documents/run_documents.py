"""Runs the commands that stand in README.md and docs/*.md, on the simulated driver.

    run_documents.py --build BUILD [--only PAGE]

Each fenced block of `sh` has a comment in front of it, which no reader sees:

    <!-- test: NAME -->             run; blocks of one name on one page are one script, in their order
    <!-- run by FILE -->            another test runs it: FILE, from the top of the source
    <!-- not run: REASON -->        for what changes the machine, or needs what no test can have

and besides, anywhere, for what a reader is expected to have, and for what must be so afterwards:

    <!-- setup: NAME                <!-- then: NAME
    SHELL                           SHELL
    -->                             -->

They come into the script where they stand; of a page that is read as it is, README.md, all comments are in a
file of that name in hidden/: one with the marks of its blocks, in their order, and the others with the number of the
block of the script before or behind which they come, or of the line in it:

    <!-- blocks:                    <!-- setup: NAME 1              <!-- then: NAME 2:1
    test: NAME                      SHELL                           SHELL
    not run: REASON                 -->                             -->
    -->

It is a bash script with -e, in an empty folder. A few run side by
side, because they wait most of the time. Prints TAP.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
COMMENT = re.compile(r"<!--\s*(.*?)-->", re.S)
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)
TIMEOUT = 180

# What scripts may use in their hidden parts.
PRELUDE = r"""
set -euo pipefail
# The command COMMAND, on the simulated driver, is the program behind it from now on.
stand_in() {
  local name=$1
  shift
  { printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec ' "$SIMULATED"; printf '%q ' "$@"; echo; } >"$WORK/bin/$name"
  chmod 755 "$WORK/bin/$name"
}
# wait_until COMMAND...
wait_until() {
  local i
  for ((i = 0; i < 1200; i++)); do
    if "$@"; then return; fi
    sleep 0.05
  done
  echo "never so: $*" >&2
  return 1
}
# A workload that writes its rounds to FILE verifies on.
round() { sed -n 's/^round 0*\([0-9][0-9]*\).*/\1/p' "$1" 2>/dev/null; }
past() { [ "$(round "$1" || true)" ] && [ "$(round "$1")" -gt "$2" ]; }
goes_on() { wait_until past "$1" 0 && wait_until past "$1" "$(($(round "$1") + 1))"; }
is_up() { wait_until past "$1" 0; }
gone() { [ ! -e "/proc/$1" ]; }
state() { cuda-checkpoint --get-state --pid "$1"; }
gpu_is_free() { [ "$(stasis-sim-smi --json | python3 -c 'import json, sys; print(sum(g["used_bytes"] for g in json.load(sys.stdin)["gpus"]))')" = 0 ]; }
"""


class Page:
    def __init__(self, path):
        self.path = path
        with open(os.path.join(SOURCE, path), encoding="utf-8") as file:
            self.text = file.read()
        self.scripts = {}
        self.problems = []
        hidden = os.path.join(SOURCE, "tests", "documents", "hidden", path)
        self.hidden = ""
        if os.path.exists(hidden):
            with open(hidden, encoding="utf-8") as file:
                self.hidden = file.read()
        self.read()

    def hidden_marks(self):
        """Of all blocks; None for a page that has them itself."""
        match = re.search(r"<!-- blocks:\n(.*?)-->", self.hidden, re.S)
        return match[1].splitlines() if match else None

    def read_hidden(self):
        blocks = {name: [at for at, _ in parts] for name, parts in self.scripts.items()}
        for comment in COMMENT.finditer(self.hidden):
            match = re.fullmatch(r"(setup|then): (\S+) (\d+)(?::(\d+))?\s*\n(.*)", comment[1], re.S)
            if match and 1 <= int(match[3]) <= len(blocks.get(match[2], [])):
                at = blocks[match[2]][int(match[3]) - 1]
                if match[4]:
                    self.split(match[2], at, int(match[4]))
                self.add(match[2], at - 0.5 if match[1] == "setup" else at + 0.2 if match[4] else at + 0.5, match[5])
            elif match:
                self.problems.append(f"hidden/ names a block that is not there: {comment[1].splitlines()[0]}")

    def split(self, name, at, lines):
        """A block of a script, so that something can come after so many lines of it."""
        parts = self.scripts[name]
        text = parts.pop(next(i for i, part in enumerate(parts) if part[0] == at))[1].splitlines(keepends=True)
        parts += [(at, "".join(text[:lines])), (at + 0.3, "".join(text[lines:]))]

    def line(self, at):
        return self.text.count("\n", 0, int(at)) + 1

    def read(self):
        fences = list(FENCE.finditer(self.text))
        inside = [(f.start(), f.end()) for f in fences]
        comments = [c for c in COMMENT.finditer(self.text) if not any(a <= c.start() < b for a, b in inside)]
        for comment in comments:
            match = re.match(r"(setup|then): (\S+)\s*\n(.*)", comment[1], re.S)
            if match:
                self.add(match[2], comment.start(), match[3])
        marks = self.hidden_marks()
        for fence in fences:
            if fence[1] not in ("sh", "bash", "shell", "console"):
                continue
            if marks is not None:
                self.judge(fence, marks.pop(0) if marks else "")
                continue
            before = [c for c in comments if c.end() <= fence.start() and not self.text[c.end():fence.start()].strip()]
            self.judge(fence, before[-1][1].strip() if before else "")
        for left in marks or ():
            self.problems.append(f"a mark in hidden/ for no block: {left}")
        self.read_hidden()

    def judge(self, fence, mark):
        if match := re.fullmatch(r"test: (\S+)", mark):
            self.add(match[1], fence.start(), fence[2])
        elif match := re.fullmatch(r"run by (\S+)", mark):
            if not os.path.exists(os.path.join(SOURCE, match[1])):
                self.problems.append(f"line {self.line(fence.start())}: there is no {match[1]}")
        elif not re.fullmatch(r"not run: .{10,}", mark, re.S):
            self.problems.append(f"line {self.line(fence.start())}: a block of commands that nothing runs, and no reason")

    def add(self, name, at, text):
        self.scripts.setdefault(name, []).append((at, text))

    def script(self, name):
        return "\n".join(f"# {self.path}:{self.line(at)}\n{text}" for at, text in sorted(self.scripts[name]))


def end_all(mark):
    """Kills what the script has started, and what was restored of it; they all have its folder in their environment."""
    for _ in range(20):
        found = False
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    ours = f"WORK={mark}".encode() in file.read().split(b"\0")
                if ours:
                    os.kill(int(pid), signal.SIGKILL)
                    found = True
            except OSError:
                continue
        if not found:
            return
        time.sleep(0.05)


def run(page, name, build):
    """None if it went well, a reason to skip beginning with "skip ", or what was said."""
    work = tempfile.mkdtemp(prefix="stasis-documents-")
    os.chmod(work, 0o755)
    places = {key: os.path.join(work, key) for key in ("bin", "sim", "state", "here")}
    for path in places.values():
        os.mkdir(path)
    prefix = []
    if name.endswith("-as-user") and os.geteuid() == 0:
        prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        for path in places.values():
            os.chown(path, 65534, 65534)
        if subprocess.run([*prefix, os.path.join(build, "bin", "stasis"), "--version"], check=False,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0:
            return "skip another user cannot be had here, or the build folder is not open to others"
    elif not name.endswith("-as-user") and os.geteuid() != 0:
        return "skip needs root, for CRIU"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("STASIS_", "LD_"))}
    for key in ("STASIS_CRIU",):
        if key in os.environ:
            environment[key] = os.environ[key]
    environment.update({
        "WORK": work, "SIMULATED": os.path.join(build, "lib/stasis/sim"), "STASIS_BUILD": build, "SOURCE": SOURCE,
        "PATH": f"{work}/bin:{build}/bin:{os.environ['PATH']}", "HOME": places["here"], "NO_COLOR": "1",
        "STASIS_LIBCUDA": os.path.join(build, "lib/stasis/sim/libcuda.so.1"), "STASIS_SIM_GPUS": "2x1G",
        "STASIS_SIM_DIR": places["sim"], "STASIS_STATE_DIR": places["state"],
        "PYTHONPATH": os.path.join(build, "python"), "PYTHONDONTWRITEBYTECODE": "1"})
    log = os.path.join(work, "log")
    script = os.path.join(work, "script")
    with open(script, "w", encoding="utf-8") as file:
        file.write(PRELUDE + "set -x\n" + page.script(name))
    try:
        with open(log, "wb") as out:
            status = subprocess.run([*prefix, "bash", script], cwd=places["here"], env=environment, timeout=TIMEOUT,
                                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False).returncode
    except subprocess.TimeoutExpired:
        status = "none within a minute"
    end_all(work)
    with open(log, encoding="utf-8", errors="replace") as file:
        said = file.read()
    shutil.rmtree(work, ignore_errors=True)
    return None if status == 0 else f"status {status}\n{said}"


def broken_links(page):
    """Links to files that are not there, and to headings that are not."""
    wrong = []
    for match in re.finditer(r"\]\(([^)\s]+)\)", page.text):
        target, _, heading = match[1].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = os.path.normpath(os.path.join(os.path.dirname(page.path), target)) if target else page.path
        if not os.path.exists(os.path.join(SOURCE, path)):
            wrong.append(f"line {page.line(match.start())}: there is no {path}")
        elif heading and path.endswith(".md"):
            with open(os.path.join(SOURCE, path), encoding="utf-8") as file:
                known = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-")
                         for h in re.findall(r"^#+ (.*)$", file.read(), re.M)]
            if heading not in known:
                wrong.append(f"line {page.line(match.start())}: {path} has no heading #{heading}")
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    build = os.path.abspath(given.build)
    docs = sorted(os.path.join("docs", name) for name in os.listdir(os.path.join(SOURCE, "docs")) if name.endswith(".md"))
    pages = [Page(path) for path in ["README.md", "SECURITY.md", "CONTRIBUTING.md", *docs] if given.only in path]
    failed = count = 0
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = [[(f"{page.path}: every command is run, and every link leads somewhere",
                     pool.submit(lambda page=page: "\n".join(page.problems + broken_links(page)) or None))]
                   + [(f"{page.path}: {name}", pool.submit(run, page, name, build)) for name in page.scripts]
                   for page in pages]
        for what, result in sum(results, []):
            said = result.result()
            count += 1
            if said and said.startswith("skip "):
                print(f"ok {count} {what} # skip {said[5:]}")
            elif said:
                failed += 1
                print(f"not ok {count} {what}\n" + re.sub("^", "# ", said.rstrip(), flags=re.M))
            else:
                print(f"ok {count} {what}")
            sys.stdout.flush()
    print(f"1..{count}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
