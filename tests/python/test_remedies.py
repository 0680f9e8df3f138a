"""What the library says of the command line reads in terms of the package: every remedy that the sources have."""

import ast
import glob
import inspect
import json
import os
import re
import unittest.mock

import harness
import stasis
from stasis import _errors

# What an option of `stasis` is called here, where it is not its own name.
_ALIASES = {
    "--force": "overwrite",
    "--timeout": "timeout_ms",
    "--driver-timeout": "answer_timeout_ms",
    "--device-map": "gpu_mapping",
    "--leave-running": "after",
    "--watch-graphs": "watch_ms",
    "--inherit-fd": "inherit",
    "--map-address": "map_addresses",
}


def functions():
    """All that a user of the package may call, methods included."""
    for name in stasis.__all__:
        one = getattr(stasis, name)
        if inspect.isfunction(one):
            yield one
        elif inspect.isclass(one):
            yield from (method for word, method in inspect.getmembers(one, inspect.isfunction) if not word.startswith("_"))


PARAMETERS = {name for one in functions() for name in inspect.signature(one).parameters}


def options_of_the_program():
    out = set()
    for page in glob.glob(os.path.join(harness.SOURCE, "docs", "man", "stasis*.1")):
        with open(page, encoding="utf-8") as file:
            out.update(re.findall(r"^(?:\\fB-\w\\fR, )?\\fB(--[a-z-]+)\\fR", file.read().replace("\\-", "-"), re.M))
    return out


def name_here(option):
    name = _ALIASES.get(option, option[2:].replace("-", "_"))
    name = name if name in PARAMETERS else name.removeprefix("no_")
    return name if name in PARAMETERS else None


def remedies():
    """Of docs/errors.md each cell, and each text of the library's sources that names an option or a verb."""
    out = set()
    with open(os.path.join(harness.SOURCE, "docs", "errors.md"), encoding="utf-8") as page:
        for line in page:
            out.update(cell.strip() for cell in re.split(r"(?<!\\)\|", line) if line.startswith("|"))
    sources = glob.glob(os.path.join(harness.SOURCE, "src", "**", "*.*"), recursive=True)
    for path in sources:
        # What src/cli and the pages of reports print is not the library's.
        if re.search(r"/src/(cli|report)/|test", path) or not path.endswith((".cc", ".h", ".inc")):
            continue
        with open(path, encoding="utf-8") as file:
            text = re.sub(r"^\s*//.*$", "", file.read(), flags=re.M)
        for found in re.finditer(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', text):
            words = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', found[0]))
            out.add(re.sub(r"\{\w*\}", "12", words))
    # A sentence, and not a bare word that a table has.
    return sorted(one for one in out if re.search(r"--[a-z]|`stasis ", one) and " " in one and one.count("`") % 2 == 0)


class Remedies(harness.Case):
    def test_there_are_some(self):
        self.assertGreater(len(remedies()), 100)
        self.assertLessEqual(set(_ALIASES), options_of_the_program())
        self.assertIn("--external", options_of_the_program())

    def test_each_argument_is_one_that_a_function_has(self):
        for remedy in remedies():
            said = _errors.in_python(remedy)
            with self.subTest(remedy):
                # What stands in backticks and is no Python is a line for a shell.
                prose = "".join(
                    part if number % 2 == 0 or re.match(r"stasis\.|[a-z_]+=", part) else "-"
                    for number, part in enumerate(said.split("`")))
                prose = re.sub(r"--security-opt \S+", "", prose)
                named = set(re.findall(r"(?<![-\w.])([a-z][a-z_]+)=(?=[\w\"\[{.])", prose))
                self.assertLessEqual(named, PARAMETERS, said)

    def test_each_call_can_be_made(self):
        calls = 0
        for remedy in remedies():
            said = _errors.in_python(remedy)
            for line in re.findall(r"`(stasis\.[^`]*)`", said):
                with self.subTest(remedy):
                    call = ast.parse(line, mode="eval").body
                    function = getattr(stasis, call.func.attr)
                    self.assertIn(function, functions())
                    if call.args or call.keywords:  # else it is a function's name
                        inspect.signature(function).bind(*call.args, **{one.arg: one.value for one in call.keywords})
                    calls += 1
        self.assertGreater(calls, 20)

    def test_no_option_is_left_that_the_package_has(self):
        ours = {option for option in options_of_the_program() if name_here(option)}
        self.assertGreater(len(ours), 25)
        for remedy in remedies():
            said = _errors.in_python(remedy)
            with self.subTest(remedy):
                outside = "".join(said.split("`")[::2])
                self.assertEqual(ours & set(re.findall(r"(?<![-\w])--[a-z][-a-z]*", outside)), set(), said)

    def test_what_is_in_backticks_is_not_damaged(self):
        for remedy in remedies():
            before, after = (text.split("`")[1::2] for text in (remedy, _errors.in_python(remedy)))
            foreign = [part for part in before if not re.match(r"stasis |--", part)]
            with self.subTest(remedy):
                self.assertEqual([part for part in foreign if part not in after], [])

    def test_values_and_lines(self):
        for remedy, expected in {
            "`umount --force`, or the service": "`umount --force`, or the service",
            "use --device-map OLD=NEW": "use gpu_mapping={OLD: NEW}",
            "watch it longer (--watch-graphs 60s) while it works": "watch it longer (watch_ms=60000) while it works",
            "dump it with --external 'mnt[PATH]:NAME', PATH": 'dump it with external=["mnt[PATH]:NAME"], PATH',
            "with --manage-cgroups soft, if": 'with manage_cgroups="soft", if',
            "with --network-lock skip if no": 'with network_lock="skip" if no',
            "dump without --no-link-remap": "dump without link_remap=False",
            "--map-address 10.0.0.5=10.0.0.9": 'map_addresses={"10.0.0.5": "10.0.0.9"}',
            "give its directory, from whose newest image the job goes on: `stasis restore /x`; or start `stasis run -D /x -- a`":
                "start `stasis run -D /x -- a`",
            "give --images-dir DIR": "give images_dir=...",
            "--images-dir is for jobs": "images_dir=... is for jobs",
            "longer than --every (10s)": "longer than every=... (10s)",
            "take less of it (--ring 8M); --path driver does": (
                "take less of it (`--ring 8M` of the program `stasis`); `--path driver` of the program `stasis` does"),
            "all parts (--group DIR --parts 12)": "all parts (`--group DIR --parts 12` of the program `stasis`)",
            "a longer `--driver-timeout`": (
                "a longer `stasis.configure(answer_timeout_ms=..., work_timeout_ms=...)`"),
            "`stasis run --name`": "`stasis.run(..., name=...)`",
            "`stasis run --images-dir /a --name b -- c 'd e'`": '`stasis.run(["c", "d e"], images_dir="/a", name="b")`',
            "`stasis run --no-io-uring -- c`": "`stasis run --no-io-uring -- c`",
            "`stasis resume 12 --images-dir DIR`": "`stasis.resume(12, images_dir=...)`",
            "`stasis resume trainer`": '`stasis.resume(stasis.Job("trainer"))`',
            "`stasis doctor trainer`": '`stasis.doctor("trainer")`',
            "`stasis swap 12 NAME --attach`": "`stasis.swap(12, stasis.Job(name), attach=True)`",
            "`stasis restore DIR --leave-suspended`": "`stasis.restore(images_dir, leave_suspended=True)`",
            "`stasis restore /a/b`": '`stasis.restore("/a/b")`',
            "`stasis verify --images-dir /a`": '`stasis.verify(images_dir="/a")`',
            # Not all of these has a counterpart.
            "`stasis suspend 12 --path driver`": "`stasis suspend 12 --path driver`",
            "`stasis resume` instead": "`stasis.resume()` instead",
            "`stasis dump 12`": "`stasis dump 12`",
            "`stasis restore ...`": "`stasis restore ...`",
            "`stasis suspend 12 --timeout 60s`": "`stasis suspend 12 --timeout 60s`",
        }.items():
            self.assertEqual(_errors.in_python(remedy), expected)

    def test_obstacles_notes_and_checks_too(self):
        error = _errors.from_json({
            "code": "undumpable", "message": "", "remedy": "",
            "obstacles": [{"id": "file-lock", "remedy": "dump with --file-locks", "override": "--ignore-obstacles"},
                          {"id": "x", "remedy": "", "override": None}]})
        self.assertEqual([(one["remedy"], one["override"]) for one in error.obstacles],
                         [("dump with file_locks=True", "ignore_obstacles=True"), ("", None)])
        target = self.target("managed")
        with self.assertRaises(stasis.NotSupported) as caught:
            stasis.suspend(target.pid)
        self.assertEqual({one["override"] for one in caught.exception.obstacles}, {"ignore_obstacles=True"})

    def test_notes_and_checks_of_an_image(self):
        report = json.dumps({"pid": 12, "processes": [], "seconds": 0, "phases": []})
        session = unittest.mock.Mock()

        def told(*given):
            given[-1]("the dump allows for that: --shell-job is set")
            return report

        session.suspend = session.resume = session.dump = session.restore = told
        checks = {"checks": [{"id": "gpu", "light": "red", "remedy": "name it with --device-map OLD=NEW"}]}
        notes = []
        with unittest.mock.patch("stasis._core._open_session", lambda: session), \
                unittest.mock.patch("stasis._stasis.inspect", lambda *_: json.dumps(checks)):
            stasis.suspend(12, note=notes.append)
            stasis.resume(12, note=notes.append)
            stasis.dump(12, "/nonexistent", note=notes.append)
            stasis.restore("/nonexistent", note=notes.append)
            found = stasis.inspect("/nonexistent")["checks"]
        self.assertEqual(notes, ["the dump allows for that: shell_job=True is set"] * 4)
        self.assertEqual(found[0]["remedy"], "name it with gpu_mapping={OLD: NEW}")


if __name__ == "__main__":
    harness.main()
