"""What needs the program `stasis`: ps(), doctor(), verify(), run(), jobs by name; remedies; the bar; the example."""

import inspect
import io
import os
import re
import signal
import subprocess
import sys
import time
import types
import unittest.mock

import harness
import stasis
from stasis import _errors


class Program(harness.Case):
    def setUp(self):
        os.environ["STASIS_BIN"] = os.path.join(harness.BIN, "stasis")

    def job(self, name, *, before=(), size="4M", **more):
        folder = self.folder()
        status = os.path.join(folder, "status")
        with open(os.path.join(folder, "log"), "wb") as log:
            job = stasis.run(
                [*before, os.path.join(harness.BIN, "stasis-workload"), "memory", "--size", size, "--status", status],
                name=name, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "LD_LIBRARY_PATH": harness.SIM}, **more)
        self.addCleanup(job.wait, 60)
        self.addCleanup(job.process.kill)
        harness.wait_until(lambda: self.rounds(status) > 0)  # it uses CUDA by then
        return job

    @staticmethod
    def rounds(status):
        try:
            with open(status, encoding="ascii") as file:
                return int((re.match(r"round (\d+)", file.read()) or [0, 0])[1])
        except OSError:
            return 0

    def test_a_job_is_found_by_its_name(self):
        job = self.job("trainer")
        self.assertEqual(repr(job), "stasis.Job('trainer')")
        (one,) = job.processes
        self.assertEqual((one.pid, one.name, one.state), (job.process.pid, "trainer", "running"))
        self.assertRegex(one.since, r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        report = stasis.Job("trainer").suspend(timeout_ms=5000)
        self.assertEqual([process.state for process in report.processes], ["checkpointed"])
        self.assertEqual(job.processes[0].state, "checkpointed")
        self.assertEqual(job.resume().processes[0].state, "running")
        # By the name alone, as from a command line.
        self.assertEqual(stasis.suspend("trainer").processes[0].state, "checkpointed")
        self.assertEqual(stasis.resume("trainer").processes[0].state, "running")
        with self.assertRaises(stasis.NoSuchProcess) as caught:
            stasis.Job("other").suspend()
        self.assertIn("`stasis.ps()`", caught.exception.remedy)

    def test_a_job_in_namespaces_of_its_own_is_reached_by_its_name(self):
        if os.geteuid() != 0:
            self.skipTest("needs root: namespaces, CRIU")
        images = os.path.join(self.folder(), "images")
        job = self.job("saved", images_dir=images)
        other = self.job("other")
        notes = []
        report = stasis.suspend(job, note=notes.append)
        self.assertEqual([one.state for one in report.processes], ["checkpointed"])
        self.assertTrue(any("inside of job saved" in note for note in notes), notes)
        done = stasis.swap(other, job)
        self.assertEqual(done.resumed.processes[0].state, "running")
        (one,) = stasis.recover(other)
        self.assertEqual(one.processes[0].state, "running")
        seen = []
        with job.suspended(progress=lambda *told: seen.append(told)) as same:
            self.assertIs(same, job)
            self.assertEqual(job.processes[0].state, "checkpointed")
        self.assertEqual(job.processes[0].state, "running")
        image = images + "-besides"
        notes.clear()
        report = job.dump(image, after="running", sync=False, ghost_limit=1 << 20)
        self.assertEqual(report.images_dir, image)
        self.assertEqual(stasis.inspect(image)["name"], "saved")
        with self.assertRaises(stasis.ImageExists) as caught:
            stasis.dump(job, image)
        self.assertIn("overwrite=True", caught.exception.remedy)
        with self.assertRaises(stasis.DeviceMapInvalid):
            stasis.suspend(job)
            job.resume({"GPU-01020304-0506-0708-090a-0b0c0d0e0f10": "GPU-01020304-0506-0708-090a-0b0c0d0e0f11"})
        self.assertEqual(job.recover()[0].processes[0].state, "running")

    def test_a_folder_of_images_stands_for_the_newest(self):
        if os.geteuid() != 0:
            self.skipTest("needs root: namespaces, CRIU")
        images = os.path.join(self.folder(), "images")
        job = self.job("saved", images_dir=images)
        image = os.path.join(images, "000001")
        job.process.send_signal(signal.SIGUSR1)
        harness.wait_until(lambda: os.path.exists(os.path.join(image, "manifest.json")))
        os.mkdir(os.path.join(images, "000009"))  # is none
        self.assertEqual(stasis.inspect(images)["images_dir"], image)
        self.assertEqual(stasis.verify(images)["images_dir"], image)
        with self.assertRaises(stasis.Usage) as caught:  # `stasis run` alone goes on with it
            stasis.restore(images)
        self.assertIn("000001 is of a job of `stasis run --images-dir`", str(caught.exception))
        self.assertRegex(caught.exception.remedy, r'start `stasis\.run\(\["[^`]*"\], images_dir="' + re.escape(images))
        self.assertNotIn("--", re.sub("`[^`]*`", "", caught.exception.remedy))
        # One of images that are no job's is restored.
        target = self.target()
        images = self.folder()
        stasis.dump(target.pid, os.path.join(images, "000007"), sync=False)
        os.waitpid(target.pid, 0)
        report = stasis.restore(images)
        self.assertEqual((report.pid, report.images_dir), (target.pid, os.path.join(images, "000007")))
        target.finish()

    def test_the_agent_comes_to_a_job_whose_program_has_dropped_it(self):
        if os.geteuid() != 0:
            self.skipTest("needs root: namespaces")
        # The agent's file is this side's, and the work is done in the job's namespaces.
        images = os.path.join(self.folder(), "images")
        job = self.job("bare", before=("/usr/bin/env", "-u", "LD_PRELOAD"), size="64M", images_dir=images)
        notes = []
        self.assertEqual(job.suspend().json["path"], "driver")
        job.resume()
        report = job.suspend(attach=True, graphs_are_safe=True, note=notes.append)
        self.assertEqual(report.json["path"], "direct")
        self.assertTrue(any("has an agent now" in note for note in notes), notes)
        self.assertEqual(job.resume().processes[0].state, "running")

    def test_ps_doctor_and_verify(self):
        target = self.target()
        (one,) = [one for one in stasis.ps() if one.pid == target.pid]
        self.assertEqual((one.state, one.name, one.operation), ("running", None, None))
        found = stasis.doctor(target.pid, trial=False)
        self.assertTrue(found.suspend)
        self.assertTrue(any(check.id == "cuda-state" and check.light == "green" for check in found.processes))
        no_rights = [] if os.geteuid() == 0 else ["permissions", "criu-check"]
        self.assertEqual([check.id for check in found.reasons], no_rights)
        found = stasis.doctor(trial=False, criu="/nonexistent")
        self.assertEqual((found.suspend, found.dump, found.restore), (True, False, False))
        self.assertEqual([check.id for check in found.reasons], no_rights[:1] + ["criu"])
        with self.assertRaises(stasis.NoSuchProcess):
            stasis.doctor(2147483647, trial=False)
        with self.assertRaises(stasis.ImageIncomplete):
            stasis.verify("/nonexistent")
        if os.geteuid() != 0:
            return
        images = os.path.join(self.folder(), "images")
        notes = []
        stasis.dump(target.pid, images, after="running")
        self.assertEqual(stasis.verify(images)["images_dir"], images)
        job = self.job("saved")
        report = job.dump(images + "-2", after="running", note=notes.append)
        self.assertEqual(report.images_dir, images + "-2")
        with self.assertRaises(stasis.ImageExists) as caught:
            job.dump(images + "-2", after="running")
        self.assertIn("overwrite=True", caught.exception.remedy)

    def test_what_stasis_run_refuses_is_raised(self):
        folder = self.folder()
        begun = os.path.join(folder, "begun")
        images = os.path.join(folder, "images")
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        without = {**os.environ, "STASIS_CRIU": "/nonexistent"}
        for more in ({}, {"close_fds": False}):
            with self.assertRaises(stasis.CriuMissing) as caught:
                stasis.run(["touch", begun], images_dir=images, env=without, **quiet, **more)
            self.assertIn("the job could not be saved here", caught.exception.message)
            self.assertIn("best_effort=True", caught.exception.remedy)
            self.assertFalse(os.path.exists(begun))
        job = stasis.run(["touch", begun], images_dir=images, env=without, best_effort=True, **quiet)
        self.assertEqual((job.wait(60), os.path.exists(begun)), (0, True))
        job.process.stderr.close()
        with self.assertRaises(stasis.Usage) as caught:
            stasis.run(["true"], images_dir=images, on_signal=["NONE"], **quiet)
        self.assertIn("'NONE' is no signal", caught.exception.message)
        # What its command line refuses, and a file of configuration.
        with self.assertRaises(stasis.Usage) as caught:
            stasis.run(["touch", begun + "-2"], images_dir=images, keep=0, **quiet)
        self.assertIn("keep", caught.exception.message)
        configuration = os.path.join(folder, "config")
        with open(configuration, "w", encoding="ascii") as file:
            file.write("[run]\nkeep = nonsense\n")
        with self.assertRaises(stasis.Usage) as caught:
            wrong = {**os.environ, "STASIS_CONFIG": configuration}
            stasis.run(["touch", begun + "-2"], images_dir=images, env=wrong, **quiet)
        self.assertIn(configuration, caught.exception.message)
        self.assertFalse(os.path.exists(begun + "-2"))
        # The command, which begins, has nothing of that.
        with subprocess.Popen(["sleep", "60"]) as plain:
            job = stasis.run(["sleep", "60"], name="taken", **quiet)
            # While a program is loaded, the loader has a file open.
            harness.wait_until(lambda: len({len(os.listdir(f"/proc/{pid}/fd")) for pid in (job.process.pid, plain.pid)}) == 1)
            plain.kill()
        with self.assertRaises(stasis.Error) as caught:
            stasis.run(["true"], name="taken", **quiet)
        self.assertIn("taken", caught.exception.message)
        job.process.kill()
        job.wait(60)
        job.process.stderr.close()

    def test_a_program_that_cannot_be_started_is_raised(self):
        folder = self.folder()
        no_program = os.path.join(folder, "text")
        with open(no_program, "w", encoding="ascii") as file:
            file.write("#!/nonexistent/interpreter\n")
        os.chmod(no_program, 0o755)
        images = os.path.join(folder, "images")
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        for more in ({}, {"images_dir": images}) if os.geteuid() == 0 else ({},):
            for command, kind in ((["nosuch"], stasis.Io), ([folder], stasis.NotPermitted), ([no_program], stasis.Io)):
                with self.subTest(command=command, more=more), self.assertRaises(kind) as caught:
                    stasis.run(command, name="unstarted", **quiet, **more)
                self.assertIn(f"cannot start {command[0]}", caught.exception.message)
                self.assertTrue(caught.exception.remedy)
            with self.assertRaisesRegex(ValueError, "command has no words"):
                stasis.run([], **more)

    def test_wrong_arguments(self):
        with self.assertRaises(TypeError):
            stasis.run("python3 train.py")
        with self.assertRaises(ValueError):
            stasis.run(["true"], every=10)
        for name in ("two words", "1", "", "x" * 65, 7):
            with self.assertRaisesRegex(ValueError, "is no name for a job"):
                stasis.run(["true"], name=name)
        with self.assertRaisesRegex(TypeError, "every must be a number of seconds"):
            stasis.run(["true"], images_dir="images", every="30m")
        with self.assertRaises(TypeError):
            stasis.Job(17)
        with self.assertRaises(ValueError):
            stasis.Job("x").dump("/nonexistent", after="gone")
        with self.assertRaises(ValueError):
            stasis.Job("x").wait()
        with unittest.mock.patch.dict(os.environ, STASIS_BIN="/nonexistent/stasis"):
            with self.assertRaisesRegex(FileNotFoundError, "STASIS_BIN") as caught:
                stasis.ps()
            self.assertIsInstance(caught.exception, stasis.Error)

    def test_the_example_saves_itself(self):
        if os.geteuid() != 0:
            self.skipTest("needs root: CRIU")
        folder = self.folder()
        example = os.path.join(harness.SOURCE, "examples", "save-from-inside", "train.py")
        with open(os.path.join(folder, "log"), "wb") as log:
            done = subprocess.run(
                [os.path.join(harness.BIN, "stasis"), "run", "--", sys.executable, example,
                 "--steps", "5", "--every", "3"],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, timeout=120, check=False,
                env={**os.environ, "LD_LIBRARY_PATH": harness.SIM})
        with open(os.path.join(folder, "log"), encoding="utf-8") as log:
            said = log.read()
        self.assertEqual((done.returncode, said.splitlines()[-5:]), (0, [f"step {n}" for n in range(1, 6)]), said)
        back = stasis.restore(os.path.join(folder, "images", "step-3"))
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(back.pid, 0)[1]), 0)
        with open(os.path.join(folder, "log"), encoding="utf-8") as log:
            self.assertEqual(log.read().splitlines()[-2:], ["step 4", "step 5"])


class Words(harness.Case):
    def test_remedies_are_in_terms_of_python(self):
        for remedy, expected in {
            "if you know better: --ignore-obstacles": "if you know better: ignore_obstacles=True",
            "another directory, or `--force`": "another directory, or `overwrite=True`",
            "`stasis ps` shows the names": "`stasis.ps()` shows the names",
            "`stasis recover 12` mends it": "`stasis.recover(12)` mends it",
            "run `stasis recover --all`": "run `stasis.recover()`",
            "`stasis doctor PID` tells": "`stasis.doctor(pid)` tells",
            "start it under `stasis run --images-dir`": "start it under `stasis.run(..., images_dir=...)`",
            "unshare --pid --fork stasis restore ...": "unshare --pid --fork stasis restore ...",
        }.items():
            self.assertEqual(_errors.in_python(remedy), expected)

    def test_no_error_of_the_library_names_an_option_that_this_package_has(self):
        target = self.target("managed")
        with self.assertRaises(stasis.NotSupported) as caught:
            stasis.suspend(target.pid)
        self.assertIn("ignore_obstacles=True", caught.exception.remedy)
        self.assertNotIn("--ignore-obstacles", str(caught.exception))

    def test_process_dump_has_named_options(self):
        options = inspect.signature(stasis.Process.dump).parameters
        self.assertEqual(list(options)[:2], ["self", "images_dir"])
        self.assertEqual(list(options)[2:], list(inspect.signature(stasis.dump).parameters)[2:])
        with self.assertRaises(TypeError):
            stasis.Process(self.target().pid).dump("/nonexistent", no_such_option=True)

    def test_the_types_of_dump_are_the_same_in_both_places(self):
        # stubtest holds the names and defaults to the sources, and not the types.
        with open(os.path.join(harness.SOURCE, "python", "stasis", "__init__.pyi"), encoding="utf-8") as file:
            found = re.findall(r"def dump\(.*?\*,(.*?)\) -> Report", file.read(), re.S)
        function, method = (re.sub(r"\s+", " ", one) for one in found)
        self.assertEqual(function, method)


class Bar(harness.Case):
    def test_without_tqdm_a_line_on_a_terminal_and_nothing_elsewhere(self):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        with unittest.mock.patch.dict(sys.modules, {"tqdm": None, "tqdm.auto": None}), \
                unittest.mock.patch("stasis._progress._FIRST", 0):
            with stasis.ProgressBar(Terminal()) as show:
                show("checksums", 1 << 20, 2 << 20)
                said = show._file.getvalue()
                self.assertIn("checksums     50%  1 MiB", said)
            with stasis.ProgressBar(io.StringIO()) as show:
                show("checksums", 1, 2)
                self.assertEqual(show._file.getvalue(), "")

    def test_by_tqdm_where_it_is(self):
        made = []

        class Tqdm:
            def __init__(self, **given):
                self.n, self.total, self.given, self.closed = 0, given["total"], given, False
                made.append(self)

            def update(self, more):
                self.n += more

            def close(self):
                self.closed = True

        auto = types.SimpleNamespace(tqdm=Tqdm)
        with unittest.mock.patch.dict(sys.modules, {"tqdm": types.SimpleNamespace(auto=auto), "tqdm.auto": auto}), \
                unittest.mock.patch("stasis._progress._FIRST", 0):
            with stasis.ProgressBar() as show:
                show("write", 1, 4)
                show("write", 3, 4)
                show("checksums", 2, 0)
        self.assertEqual([(one.n, one.given["desc"], one.closed) for one in made], [(3, "write", True), (2, "checksums", True)])

    def test_a_quick_phase_shows_nothing(self):
        with stasis.ProgressBar(io.StringIO()) as show:
            show("write", 1, 2)
            self.assertIsNone(show._bar)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    harness.main()
