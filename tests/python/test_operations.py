"""Suspend, resume, dump, restore, recover, inspect and Group, with real processes and the real CRIU.

Long because each class of tests acts on the same kinds of real processes.
"""

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import unittest.mock

import harness
import stasis


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


class Suspend(harness.Case):
    def test_a_tree(self):
        target = self.target("tree", "--children", 2, "--size", "4M")
        harness.wait_until(lambda: sum(harness.gpus_used()) > 8 << 20)
        report = stasis.suspend(target.pid)
        self.assertEqual(report.pid, target.pid)
        self.assertEqual(len(report.processes), 3)
        self.assertEqual([one.state for one in report.processes if one.cuda], ["checkpointed"] * 2)
        self.assertEqual([one.state for one in report.processes if not one.cuda], [None])
        self.assertGreater(sum(one.gpu_bytes for one in report.processes), 8 << 20)
        self.assertEqual(set(report.phases), {"lock", "checkpoint"})
        self.assertGreaterEqual(report.seconds, sum(report.phases.values()) * 0.99)
        self.assertEqual(report.json["path"], "driver")
        self.assertEqual(sum(harness.gpus_used()), 0)
        again = stasis.resume(target.pid)
        self.assertEqual([one.state for one in again.processes if one.cuda], ["running"] * 2)
        target.goes_on()
        target.finish()

    def test_to_another_gpu(self):
        first, second = harness.gpu_uuids()
        target = self.target("memory", "--size", "16M")
        process = stasis.Process(target.pid)
        with process.suspended(gpu_mapping={first: second}):
            self.assertEqual(harness.gpus_used(), [0, 0])
        target.goes_on()
        self.assertEqual(harness.gpus_used()[0], 0)
        self.assertGreater(harness.gpus_used()[1], 16 << 20)

    def test_suspended_on_every_way_out(self):
        target = self.target()
        process = stasis.Process(target.pid)
        with process.suspended(timeout_ms=5000) as same:
            self.assertIs(same, process)
            self.assertEqual(process.state, "checkpointed")
            self.assertTrue(target.stands_still())
        self.assertEqual(process.state, "running")
        with self.assertRaises(ZeroDivisionError):
            with process.suspended():
                raise ZeroDivisionError
        self.assertEqual(process.state, "running")
        with process.suspended():
            process.resume()
        self.assertEqual(process.state, "running")
        with process.suspended():
            os.kill(target.pid, signal.SIGKILL)
            os.waitpid(target.pid, 0)
            target.pid = None

    def test_what_cannot_be_suspended_is_not_entered(self):
        target = self.target("managed")
        process = stasis.Process(target.pid)
        with self.assertRaises(stasis.NotSupported) as caught:
            with process.suspended():
                self.fail("it was entered")
        self.assertTrue(caught.exception.remedy)
        self.assertEqual(process.state, "running")

    def test_what_is_in_the_way_is_told(self):
        target = self.target("managed")
        with self.assertRaises(stasis.NotSupported) as raised:
            stasis.suspend(target.pid)
        (obstacle,) = raised.exception.obstacles
        self.assertEqual((obstacle["id"], obstacle["pid"]), ("managed-memory", target.pid))
        self.assertIn("managed memory", obstacle["what"])

    def test_no_room_to_come_back_to(self):
        target = self.target("memory", "--size", "600M")
        stasis.suspend(target.pid)
        hog = self.target("memory", "--size", "600M")
        with self.assertRaises(stasis.OutOfGpuMemory):
            stasis.resume(target.pid)
        self.assertEqual(stasis.Process(target.pid).state, "checkpointed")
        hog.finish()
        stasis.resume(target.pid)
        target.goes_on()

    def test_what_others_have_suspended_is_one_state_for_all(self):
        target = self.target()
        self.assertEqual(harness.tool("stasis", "suspend", target.pid)[0], 0)
        self.assertEqual(stasis.Process(target.pid).state, "checkpointed")
        stasis.resume(target.pid)
        stasis.suspend(target.pid)
        self.assertEqual(harness.tool("stasis", "resume", target.pid)[0], 0)
        target.goes_on()


class PastTheDriver(harness.Case):
    """GPU memory of a program that was started under the agent."""

    def agent(self):
        return {"LD_PRELOAD": os.path.join(harness.BUILD, "lib", "stasis", "libstasis-preload.so")}

    def test_the_single_calls_refuse_what_the_driver_would_lose(self):
        target = self.target("collective", "--children", 2, "--size", "4M", "--sharing", env=self.agent())
        group = stasis.Group(target.pid)
        with group.locked():
            with self.assertRaises(stasis.NotSupported) as caught:
                group.checkpoint()
        self.assertIn("shared with other processes", caught.exception.message)
        process = stasis.Process(children_of(target.pid)[0])
        with process.locked():
            with self.assertRaises(stasis.NotSupported):
                process.checkpoint()
        target.goes_on()
        target.finish()

    def test_suspend_and_resume(self):
        target = self.target("memory", "--size", "24M", env=self.agent())
        report = stasis.suspend(target.pid)
        self.assertEqual(report.json["path"], "direct")
        self.assertIn("copy out", report.phases)
        self.assertEqual(sum(harness.gpus_used()), 0)
        self.assertIn("copy in", stasis.resume(target.pid).phases)
        process = stasis.Process(target.pid)
        with process.suspended():
            self.assertEqual(process.state, "checkpointed")
        target.goes_on()
        target.finish()

    def test_waiting_for_another_tool_is_no_progress(self):
        target = self.target("memory", "--size", "8M", env=self.agent())
        folder = f"/proc/{target.pid}/fd"
        name = next(fd for fd in os.listdir(folder) if "memfd:stasis-agent" in os.readlink(f"{folder}/{fd}"))
        with open(f"{folder}/{name}", "r+b", buffering=0) as page:
            fcntl.flock(page, fcntl.LOCK_EX)
            timer = threading.Timer(1, fcntl.flock, (page, fcntl.LOCK_UN))
            timer.start()
            # One that raises ends the operation.
            stasis.suspend(target.pid, progress=lambda phase, done, total: done / total)
            timer.join()
        stasis.resume(target.pid)
        target.goes_on()
        target.finish()

    def test_a_second_try_counts_in_the_phases(self):
        target = self.target("memory", "--size", "24M", env=self.agent())
        self.faults("checkpoint:error=999@1")
        report = stasis.suspend(target.pid)
        self.no_faults()
        twice = [phase["seconds"] for phase in report.json["phases"] if phase["name"] == "checkpoint"]
        self.assertEqual(len(twice), 2)
        self.assertAlmostEqual(report.phases["checkpoint"], sum(twice))
        stasis.resume(target.pid)
        target.goes_on()
        target.finish()

    def test_the_second_time_no_context_is_made_while_the_program_runs(self):
        target = self.target("memory", "--size", "24M", env=self.agent())
        with unittest.mock.patch.dict(os.environ, {"STASIS_SIM_FAULTS": "context:delay=5s"}):
            for times, waits_while_it_runs in enumerate((True, False)):
                report = stasis.suspend(target.pid)
                self.assertEqual(report.phases["prepare"] >= 5, waits_while_it_runs, times)
                self.assertEqual(report.json["standstill_seconds"] >= 5, not waits_while_it_runs, times)
                stasis.resume(target.pid)
        target.goes_on()
        target.finish()

    @harness.needs_criu
    def test_dump_and_restore(self):
        target = self.target("memory", "--size", "24M", env=self.agent())
        images = os.path.join(self.folder(), "images")
        report = stasis.dump(target.pid, images, compress="lz4", sync=False)
        os.waitpid(target.pid, 0)
        self.assertEqual(report.json["path"], "direct")
        self.assertTrue(os.path.isdir(os.path.join(images, "gpu")))
        self.assertIn("copy in", stasis.restore(images).phases)
        target.goes_on()
        target.finish()

    @harness.needs_criu
    def test_a_program_does_not_dump_itself(self):
        with self.assertRaisesRegex(stasis.Usage, "from within: it is this one(?s:.*)outside of its tree"):
            stasis.dump(os.getpid(), os.path.join(self.folder(), "images"))

    @harness.needs_criu
    def test_dump_beside_an_earlier_image(self):
        target = self.target("memory", "--still", "32M", env=self.agent())
        first, second = (os.path.join(self.folder(), name) for name in ("first", "second"))
        notes = []
        stasis.dump(target.pid, first, after="running", base=self.folder(), sync=False, note=notes.append)
        self.assertTrue(any("none of it deduplicated" in note for note in notes), notes)
        target.goes_on()
        report = stasis.Process(target.pid).dump(second, base=first, sync=False)
        os.waitpid(target.pid, 0)
        self.assertGreaterEqual(report.json["taken_bytes"], 32 << 20)
        self.assertLess(report.json["written_bytes"], report.image_bytes - (31 << 20))
        shutil.rmtree(first)
        stasis.restore(second)
        target.goes_on()
        target.finish()

    @harness.needs_criu
    def test_resume_from_an_image_that_was_moved(self):
        target = self.target("memory", "--size", "24M", env=self.agent())
        images, moved = (os.path.join(self.folder(), name) for name in ("images", "moved"))
        stasis.dump(target.pid, images, sync=False)
        os.waitpid(target.pid, 0)
        stasis.restore(images, leave_suspended=True)
        os.rename(images, moved)
        with self.assertRaises(stasis.WrongState):
            stasis.resume(target.pid)
        with self.assertRaises((stasis.ImageIncomplete, stasis.ImageCorrupt)):
            stasis.resume(target.pid, images_dir=self.folder())
        self.assertEqual(stasis.Process(target.pid).resume(images_dir=moved).json["path"], "direct")
        target.goes_on()
        target.finish()

    def test_from_a_thread_that_ends(self):
        # What copies must not end with the thread that has started it, nor stay behind.
        target = self.target("memory", "--size", "24M", env=self.agent())
        for _ in range(2):
            for step in (stasis.suspend, stasis.resume):
                thread = threading.Thread(target=step, args=(target.pid,))
                thread.start()
                thread.join()
            target.goes_on()
        self.assertEqual([pid for pid in children_of(os.getpid()) if harness.name_of(pid) == "stasis-mover"], [])
        target.finish()


class Group(harness.Case):
    def test_the_calls_on_a_tree(self):
        target = self.target("tree", "--children", 2, "--size", "4M")
        harness.wait_until(lambda: sum(harness.gpus_used()) > 8 << 20)
        group = stasis.Group(target.pid)
        self.assertEqual(group.pid, target.pid)

        def states():
            return [one.state for one in group.members if one.cuda]

        self.assertEqual(group.members[0].pid, target.pid)
        self.assertEqual(states(), ["running"] * 2)
        group.lock(timeout_ms=5000)
        self.assertEqual(states(), ["locked"] * 2)
        with self.assertRaises(stasis.WrongState):
            group.lock()
        group.checkpoint()
        self.assertEqual(states(), ["checkpointed"] * 2)
        self.assertEqual(sum(harness.gpus_used()), 0)
        with self.assertRaises(stasis.WrongState):
            group.unlock()
        group.restore()
        self.assertEqual(states(), ["locked"] * 2)
        group.unlock()
        self.assertEqual(states(), ["running"] * 2)
        target.goes_on()
        with self.assertRaises(ValueError):
            with group.locked():
                group.checkpoint()
                raise ValueError
        self.assertEqual(states(), ["running"] * 2)
        with group.suspended():
            self.assertEqual(states(), ["checkpointed"] * 2)
        target.goes_on()
        target.finish()

    def test_a_root_that_ends_inside_leaves_no_process_locked(self):
        target = self.target("tree", "--children", 2, "--size", "4M")
        harness.wait_until(lambda: sum(harness.gpus_used()) > 8 << 20)
        children = children_of(target.pid)
        self.addCleanup(lambda: [os.kill(pid, signal.SIGKILL) for pid in children if os.path.exists(f"/proc/{pid}")])
        with stasis.Group(target.pid).locked():
            self.assertEqual([harness.state_of(pid) for pid in children], ["locked"] * 2)
            os.kill(target.pid, signal.SIGKILL)
            os.waitpid(target.pid, 0)
            target.pid = None
        self.assertEqual([harness.state_of(pid) for pid in children], ["running"] * 2)

    def test_processes_that_wait_for_each_other(self):
        target = self.target("collective", "--children", 3)
        group = stasis.Group(target.pid)
        for _ in range(5):
            with group.locked(timeout_ms=20000):
                group.checkpoint()
        target.goes_on()
        target.finish()

    def test_a_checkpoint_that_fails_leaves_all_locked(self):
        target = self.target("tree", "--children", 2, "--size", "4M")
        harness.wait_until(lambda: sum(harness.gpus_used()) > 8 << 20)
        group = stasis.Group(target.pid)
        group.lock()
        self.faults(f"checkpoint:error=999 pid={children_of(target.pid)[1]}")
        with self.assertRaises(stasis.Error):
            group.checkpoint()
        self.no_faults()
        self.assertEqual([one.state for one in group.members if one.cuda], ["locked"] * 2)
        group.unlock()
        target.goes_on()
        target.finish()

    def test_a_tree_without_cuda_to_which_our_own_helpers_do_not_count(self):
        target = self.target()
        stasis.suspend(target.pid)
        stasis.resume(target.pid)
        target.kill()
        group = stasis.Group(os.getpid())
        with self.assertRaises(stasis.NotCuda):
            group.lock()


@harness.needs_criu
class Dump(harness.Case):
    def test_names_that_are_no_utf_8(self):
        target = self.target()
        folder = os.fsencode(self.folder())
        for image in (os.path.join(folder, b"one\xff"), os.fsdecode(os.path.join(folder, b"two\xfe"))):
            report = stasis.dump(target.pid, image, after="running")
            self.assertEqual(os.fsencode(report.images_dir), os.fsencode(image))
            self.assertTrue(stasis.inspect(image, verify=True)["gpus"])
        target.goes_on()
        other = os.path.join(folder, b"three\xff")
        with self.assertRaises(stasis.Error) as caught:
            stasis.inspect(other)
        self.assertIn("three\\xff", str(caught.exception))
        with self.assertRaises(stasis.Error) as caught:
            stasis.dump(target.pid, other, criu=b"/no-criu\xff")
        self.assertIn("no-criu\\xff", str(caught.exception))
        with self.assertRaises(ValueError):
            stasis.inspect(b"with\0null")
        target.goes_on()
        target.kill()
        for addresses in ({"10.0.0.1": "::1"}, {"10.9.9.9": "10.0.0.1"}):
            with self.assertRaises(stasis.Error) as caught:
                stasis.restore(os.path.join(folder, b"one\xff"), map_addresses=addresses)
            self.assertEqual(caught.exception.code, "usage")
        back = stasis.restore(os.path.join(folder, b"one\xff"), external=["mnt[\udcff]:/nowhere"])
        self.assertEqual(back.pid, target.pid)
        target.goes_on()
        target.finish()

    def test_attach(self):
        target = self.target("memory", "--size", "64M")
        notes = []
        with self.assertRaises(ValueError):
            stasis.suspend(target.pid, graphs_are_safe=True)
        with self.assertRaises(ValueError):
            stasis.suspend(target.pid, attach=True, watch_ms=0)
        # Without a word on its graphs.
        with self.assertRaises(stasis.NotSupported) as caught:
            stasis.suspend(target.pid, attach=True)
        self.assertEqual([one["id"] for one in caught.exception.obstacles], ["attach-graphs-unknown"])
        self.assertIn("graphs_are_safe=True if the program uses no CUDA graphs", caught.exception.remedy)
        self.assertIn("watch_ms=30000", caught.exception.remedy)
        target.goes_on()
        report = stasis.suspend(target.pid, attach=True, graphs_are_safe=True, note=notes.append)
        self.assertEqual(report.json["path"], "direct")
        self.assertIn("has an agent now", " ".join(notes))
        stasis.resume(target.pid)
        target.goes_on()
        with stasis.Process(target.pid).suspended(attach=True, watch_ms=1):
            self.assertTrue(target.stands_still())
        target.goes_on()
        target.finish()

    def test_an_attach_that_is_refused(self):
        target = self.target("graph", "--size", "96M")
        second = self.target("memory", "--size", "8M")
        stasis.suspend(second.pid)
        image = os.path.join(self.folder(), "image")
        for call in (
            lambda: stasis.suspend(target.pid, attach=True, watch_ms=4000),
            lambda: stasis.swap(target.pid, second.pid, attach=True, watch_ms=4000),
            lambda: stasis.dump(target.pid, image, attach=True, watch_ms=4000),
        ):
            with self.assertRaises(stasis.NotSupported) as caught:
                call()
            self.assertIn("without attach=True the driver moves", caught.exception.remedy)
            target.goes_on()
        self.assertFalse(os.path.exists(image))
        stasis.resume(second.pid)
        second.finish()
        target.finish()

    def test_obstacles_of_criu_are_ignored_by_the_name_that_all_have_and_by_the_older_one(self):
        folder = self.folder()
        script = os.path.join(folder, "program")
        with open(script, "w", encoding="ascii") as file:
            file.write(f"#!/bin/bash\nexec 9<>{folder}/ghost\nrm {folder}/ghost\nhead -c 4M /dev/zero >&9\n"
                       f'exec {os.path.join(harness.BIN, "stasis-workload")} "$@"\n')
        os.chmod(script, 0o755)
        target = self.target("memory", "--size", "1M", program=script)
        images = os.path.join(folder, "images")
        with self.assertRaises(stasis.Undumpable) as caught:
            stasis.dump(target.pid, images, ghost_limit=1 << 20)
        self.assertEqual([(one["id"], one["override"]) for one in caught.exception.obstacles],
                         [("deleted-file", "ignore_obstacles=True")])
        for name in ("ignore_obstacles", "ignore_undumpable"):
            with self.assertRaises(stasis.CriuFailed):
                stasis.dump(target.pid, images, ghost_limit=1 << 20, **{name: True})
        self.assertEqual(stasis.Process(target.pid).state, "running")

    def test_a_program_whose_name_is_no_utf_8(self):
        program = os.path.join(os.fsencode(self.folder()), b"na\xffme")
        os.symlink(os.path.join(harness.BIN, "stasis-workload"), program)
        target = self.target("managed", program=program)
        notes = []
        with self.assertRaises(stasis.NotSupported):
            stasis.suspend(target.pid, ignore_obstacles=True, note=notes.append)
        self.assertIn("na\\xffme", " ".join(notes))
        target.goes_on()

    def test_there_and_back(self):
        target = self.target("memory", "--size", "8M")
        rounds = target.rounds()
        image = os.path.join(self.folder(), "image")
        told = []
        report = stasis.dump(target.pid, image, progress=lambda *given: told.append(given))
        self.assertEqual(report.images_dir, image)
        self.assertGreater(report.image_bytes, 8 << 20)
        self.assertIn("criu", report.phases)
        self.assertTrue(told)
        self.assertEqual(stat.S_IMODE(os.stat(image).st_mode), 0o700)
        os.waitpid(target.pid, 0)
        self.assertEqual(harness.gpus_used(), [0, 0])
        back = stasis.restore(image)
        self.assertEqual(back.pid, target.pid)
        self.assertEqual(stasis.Process(back.pid).state, "running")
        target.goes_on()
        self.assertGreater(target.rounds(), rounds)
        target.finish()  # as a child of ours, which finish() waits for

    def test_the_target_may_live_on(self):
        target = self.target()
        image = os.path.join(self.folder(), "image")
        stasis.dump(target.pid, image, after="running")
        target.goes_on()
        with self.assertRaises(FileExistsError):
            stasis.dump(target.pid, image, after="running")
        process = stasis.Process(target.pid)
        process.dump(image, after="suspended", overwrite=True, sync=False)
        self.assertEqual(process.state, "checkpointed")
        self.assertFalse(stasis.inspect(image)["restorable"])  # its number is taken
        with self.assertRaises(stasis.PidInUse):
            stasis.restore(image)
        process.resume()
        target.goes_on()

    def test_restored_suspended_and_on_another_gpu(self):
        first, second = harness.gpu_uuids()
        target = self.target("memory", "--size", "16M")
        image = os.path.join(self.folder(), "image")
        stasis.dump(target.pid, image)
        os.waitpid(target.pid, 0)
        stasis.restore(image, leave_suspended=True)
        process = stasis.Process(target.pid)
        self.assertEqual(process.state, "checkpointed")
        process.resume({first: second})
        target.goes_on()
        self.assertEqual(harness.gpus_used()[0], 0)
        target.finish()

    def test_inspect_is_what_the_program_prints(self):
        target = self.target("memory", "--size", "8M")
        image = os.path.join(self.folder(), "image")
        stasis.dump(target.pid, image)
        os.waitpid(target.pid, 0)
        ours = stasis.inspect(image)
        status, printed = harness.tool("stasis", "inspect", image, "--json")
        self.assertEqual(status, 0)
        self.assertEqual({**ours, "notes": [], "schema_version": 1}, json.loads(printed))
        self.assertTrue(ours["restorable"])
        self.assertTrue(stasis.inspect(image, verify=True)["restorable"])
        name = max((os.path.join(image, "criu", one) for one in os.listdir(os.path.join(image, "criu"))),
                   key=os.path.getsize)
        with open(name, "r+b") as file:
            file.seek(os.path.getsize(name) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        self.assertFalse(stasis.inspect(image, verify=True)["restorable"])
        with self.assertRaises(stasis.ImageCorrupt):
            stasis.restore(image)
        with self.assertRaises(stasis.ImageIncomplete):
            stasis.inspect(self.folder())

    def test_inspect_without_a_driver(self):
        target = self.target()
        image = os.path.join(self.folder(), "image")
        stasis.dump(target.pid, image, after="running")
        self.addCleanup(stasis.configure)
        stasis.configure(library="/nowhere/libcuda.so.1")
        found = {one["id"]: one["ok"] for one in stasis.inspect(image)["checks"]}
        self.assertFalse(found["driver"])
        with self.assertRaises(stasis.DriverMissing):
            stasis.suspend(target.pid)


class Swap(harness.Case):
    def test_there_and_back(self):
        first, second = (self.target("memory", "--size", "16M") for _ in range(2))
        stasis.suspend(second.pid)
        notes = []
        for out, into in ((first, second), (second, first)):
            done = stasis.swap(out.pid, into.pid, note=notes.append)
            self.assertEqual([one.state for one in done.suspended.processes], ["checkpointed"])
            self.assertEqual([one.state for one in done.resumed.processes], ["running"])
            self.assertEqual((done.suspended.pid, done.resumed.pid), (out.pid, into.pid))
            self.assertEqual(done.at_once, done.json["at_once"])
            self.assertGreaterEqual(done.seconds, done.resumed.seconds)
            into.goes_on()
        self.assertEqual(stasis.Process(second.pid).state, "checkpointed")

    def test_to_another_gpu(self):
        here, there = harness.gpu_uuids()
        first, second = (self.target("memory", "--size", "16M") for _ in range(2))
        stasis.suspend(second.pid)
        stasis.swap(first.pid, second.pid, {here: there})
        second.goes_on()
        self.assertEqual(harness.gpus_used()[0], 0)
        self.assertGreater(harness.gpus_used()[1], 16 << 20)

    def test_what_fails_leaves_both_as_they_were(self):
        first, second = (self.target("memory", "--size", "16M") for _ in range(2))
        with self.assertRaises(stasis.WrongState):  # both run
            stasis.swap(first.pid, second.pid)
        stasis.suspend(second.pid)
        with self.assertRaises(stasis.WrongState):
            stasis.swap(second.pid, first.pid)
        with self.assertRaises(stasis.Usage):
            stasis.swap(first.pid, first.pid)
        with self.assertRaisesRegex(stasis.Usage, "from within"):
            stasis.swap(os.getpid(), second.pid)
        with self.assertRaises(stasis.DeviceMapInvalid):
            stasis.swap(first.pid, second.pid, {"GPU-00000000-0000-0000-0000-000000000000": harness.gpu_uuids()[0]})
        self.assertEqual([stasis.Process(one.pid).state for one in (first, second)], ["running", "checkpointed"])
        self.assertEqual(stasis.recover(), [])
        first.goes_on()

    def test_recover_brings_a_killed_one_to_its_end(self):
        first, second = (self.target("memory", "--size", "32M") for _ in range(2))
        stasis.suspend(second.pid)
        self.faults("checkpoint:delay=60s")
        program = subprocess.Popen([sys.executable, "-c", "import stasis, sys; stasis.swap(*map(int, sys.argv[1:]))",
                                    str(first.pid), str(second.pid)])
        harness.wait_until(harness.held_up)
        program.kill()
        program.wait()
        self.no_faults()
        (decided,) = [one for one in stasis.recover() if one.operation == "swap"]
        self.assertEqual(decided.outcome, f"{first.pid} runs and {second.pid} is suspended, as before")
        self.assertEqual([stasis.Process(one.pid).state for one in (first, second)], ["running", "checkpointed"])
        self.assertEqual(stasis.recover(), [])
        first.goes_on()


class Recover(harness.Case):
    def test_what_is_locked_or_checkpointed(self):
        target = self.target()
        process = stasis.Process(target.pid)
        for calls in ((process.lock,), (process.lock, process.checkpoint)):
            for call in calls:
                call()
            (found,) = stasis.recover(target.pid)
            self.assertEqual(found.pid, target.pid)
            self.assertEqual([one.state for one in found.processes], ["running"])
            self.assertEqual(process.state, "running")
        target.goes_on()

    def test_after_a_kill_in_the_middle(self):
        target = self.target("memory", "--size", "32M")
        self.faults("checkpoint:delay=60s")
        program = subprocess.Popen([sys.executable, "-c", "import stasis, sys; stasis.suspend(int(sys.argv[1]))",
                                    str(target.pid)])
        harness.wait_until(harness.held_up)
        program.kill()
        program.wait()
        self.no_faults()
        (found,) = stasis.recover()
        self.assertEqual((found.pid, found.operation), (target.pid, "suspend"))
        self.assertEqual(stasis.Process(target.pid).state, "running")
        self.assertEqual(stasis.recover(), [])
        target.goes_on()
        target.finish()

    def test_two_at_once_on_one_process(self):
        target = self.target("memory", "--size", "32M")
        self.faults("checkpoint:rate=8M")
        program = subprocess.Popen([sys.executable, "-c", "import stasis, sys; stasis.suspend(int(sys.argv[1]))",
                                    str(target.pid)])
        harness.wait_until(harness.held_up)
        program.send_signal(signal.SIGSTOP)  # and stays there
        with self.assertRaises(stasis.Busy):
            stasis.suspend(target.pid)
        program.send_signal(signal.SIGCONT)
        self.assertEqual(program.wait(), 0)
        self.no_faults()
        stasis.resume(target.pid)


if __name__ == "__main__":
    harness.main()
