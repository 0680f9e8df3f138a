"""Ctrl-C, other signals, and callbacks that raise: a call ends in order, and what it did is undone."""

import os
import signal
import sys
import threading
import time

import harness
import stasis


class Raised(Exception):
    pass


class Interrupted(harness.Case):
    def busy_target(self):
        return self.target("spin", "--busy-ms", 120_000, "--pause-ms", 0)

    def interrupted(self, call, *arguments, when=None, **more):
        start = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            if when:
                harness.interrupt_when(when)
            else:
                harness.interrupt_in(0.4)
            call(*arguments, **more)
            time.sleep(60)  # it comes too late: the state says so
        # The kernel of a busy target takes much longer.
        self.assertLess(time.monotonic() - start, 40)

    def test_a_lock_that_waits_for_ever(self):
        target = self.busy_target()
        process = stasis.Process(target.pid)
        self.interrupted(process.lock)
        self.assertEqual(process.state, "running")

    def test_a_lock_with_a_time_out(self):
        target = self.busy_target()
        process = stasis.Process(target.pid)
        self.interrupted(process.lock, 50_000)
        self.assertEqual(process.state, "running")

    def test_a_lock_that_won_against_it_is_undone(self):
        target = self.target()
        process = stasis.Process(target.pid)
        self.faults("lock:delay=335ms")
        # Signals are looked at every 50 ms, so one that comes between 300 and 335 is seen when it is over.
        for moment in (0.306, 0.312, 0.318, 0.324, 0.36):
            returned = False
            with self.assertRaises(KeyboardInterrupt):
                harness.interrupt_in(moment)
                process.lock()
                returned = True
                time.sleep(60)
            # Late, on a machine that has much to do, it comes when lock() has returned.
            self.assertEqual(process.state, "locked" if returned else "running", moment)
            if returned:
                process.unlock()
        self.no_faults()
        target.goes_on()

    def test_the_enter_of_locked(self):
        target = self.busy_target()
        process = stasis.Process(target.pid)

        def enter():
            with process.locked():
                self.fail("it was entered")

        self.interrupted(enter)
        self.assertEqual(process.state, "running")

    def test_a_lock_of_a_group(self):
        target = self.busy_target()
        group = stasis.Group(target.pid)
        # It asks in slices, of which the first takes 0.5 s and the second 1 s.
        self.interrupted(group.lock)
        self.assertEqual(group.members[0].state, "running")

    def test_a_suspend_that_waits(self):
        target = self.busy_target()
        self.interrupted(stasis.suspend, target.pid, 0)
        self.assertEqual(stasis.Process(target.pid).state, "running")

    def test_a_suspend_while_memory_is_copied(self):
        target = self.target("memory", "--size", "32M")
        self.faults("checkpoint:rate=8M")
        self.interrupted(stasis.suspend, target.pid, when=harness.held_up)
        self.no_faults()
        self.assertEqual(stasis.Process(target.pid).state, "running")
        target.goes_on()
        target.finish()

    @harness.needs_criu
    def test_a_dump(self):
        target = self.target("memory", "--size", "32M")
        self.faults("checkpoint:rate=8M")
        image = os.path.join(self.folder(), "image")
        self.interrupted(stasis.dump, target.pid, image, when=harness.held_up)
        self.no_faults()
        self.assertFalse(os.path.exists(image))
        self.assertEqual(os.listdir(os.path.dirname(image)), [])
        self.assertEqual(stasis.Process(target.pid).state, "running")
        target.goes_on()
        target.finish()

    @harness.needs_criu
    def test_a_restore_is_undone_or_finished(self):
        image = os.path.join(self.folder(), "image")
        ended = set()
        for moment in (0.01, 0.03, 0.06, 0.15, 0.3, 0.6, 2, 5, 15):
            if moment > 1 and ended == {True, False}:
                break  # those are for machines that have much to do
            target = self.target("memory", "--size", "32M")
            stasis.dump(target.pid, image, overwrite=True)
            os.waitpid(target.pid, 0)
            self.faults("restore:rate=64M")
            with self.assertRaises(KeyboardInterrupt):
                harness.interrupt_in(moment)
                stasis.restore(image)
                time.sleep(60)
            self.no_faults()
            finished = os.path.exists(f"/proc/{target.pid}")
            ended.add(finished)
            if finished:
                self.assertEqual(stasis.Process(target.pid).state, "running")
                target.goes_on()
                target.finish()
            else:
                target.pid = None
                self.assertTrue(stasis.inspect(image)["restorable"])
            self.assertEqual(stasis.recover(), [])
        self.assertEqual(ended, {True, False})

    def test_a_checkpoint_is_finished_first(self):
        target = self.target("memory", "--size", "32M")
        process = stasis.Process(target.pid)
        with process.locked():
            self.faults("checkpoint:rate=32M")
            self.interrupted(process.checkpoint, when=harness.held_up)
            self.assertEqual(process.state, "checkpointed")
            self.no_faults()
        self.assertEqual(process.state, "running")
        target.goes_on()

    def test_suspended_is_undone_wherever_it_comes(self):
        target = self.target()
        process = stasis.Process(target.pid)
        self.faults("checkpoint:delay=20ms;restore:delay=20ms")
        entered = 0
        for step in (*range(16), 30, 60, 120, 600):
            if step > 15 and entered:
                break
            with self.assertRaises(KeyboardInterrupt):
                harness.interrupt_in(0.017 * step)
                while True:
                    with process.suspended():
                        entered += 1
            self.assertEqual(process.state, "running", f"interrupted after {0.017 * step} s")
        self.assertGreater(entered, 0)
        self.no_faults()
        target.goes_on()
        target.finish()

    def test_no_step_of_the_interpreter_lies_on_the_way_out(self):
        # Where there is one, a handler that raises can come before the resume.
        target = self.target()
        process, group = stasis.Process(target.pid), stasis.Group(target.pid)
        for scope in (process.suspended, process.locked, group.suspended, group.locked):
            with self.subTest(scope=scope):
                steps = []
                self.addCleanup(sys.settrace, None)
                with scope():
                    sys.settrace(lambda frame, event, argument: steps.append((frame.f_code.co_name, event)))
                sys.settrace(None)
                self.assertEqual(steps, [])
                self.assertEqual(process.state, "running")

    def test_what_was_entered_and_never_left_is_left_with_its_object(self):
        target = self.target()
        process = stasis.Process(target.pid)
        for make in (process.suspended, process.locked, stasis.Group(target.pid).locked):
            scope = make()
            scope.__enter__()
            self.assertNotEqual(process.state, "running")
            with self.assertRaises(RuntimeError):
                scope.__enter__()
            del scope
            self.assertEqual(process.state, "running")
        target.goes_on()
        target.finish()

    def test_suspended_is_left_to_the_end(self):
        target = self.target("memory", "--size", "32M")
        process = stasis.Process(target.pid)
        self.faults("restore:delay=300ms")
        inside = []
        with self.assertRaises(KeyboardInterrupt):
            with process.suspended():
                inside.append(process.state)
                # Seen at the first look, when the restore has not begun to copy.
                harness.interrupt_in(0.03)
                time.sleep(0.02)
            time.sleep(60)  # it comes too late, on a machine that has much to do
        self.assertEqual(inside, ["checkpointed"])
        self.assertEqual(process.state, "running")
        self.no_faults()
        target.goes_on()
        target.finish()

    def test_locked_of_a_group_is_undone_wherever_it_comes(self):
        target = self.target()
        group = stasis.Group(target.pid)
        self.faults("lock:delay=20ms;unlock:delay=20ms")
        for step in range(8):
            with self.assertRaises(KeyboardInterrupt):
                harness.interrupt_in(0.02 * step)
                while True:
                    with group.locked():
                        pass
            self.assertEqual(stasis.Process(target.pid).state, "running", f"interrupted after {0.02 * step} s")
        self.no_faults()
        target.goes_on()
        target.finish()

    def test_a_handler_that_does_not_raise_disturbs_nothing(self):
        seen = []
        before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
        self.addCleanup(signal.signal, signal.SIGUSR1, before)
        target = self.target("memory", "--size", "32M")
        self.faults("checkpoint:rate=8M")

        def signals():
            harness.wait_until(harness.held_up)
            for number in (1, 2, 3):  # two that are pending are one
                os.kill(os.getpid(), signal.SIGUSR1)
                harness.wait_until(lambda: len(seen) == number)

        thread = threading.Thread(target=signals)
        thread.start()
        stasis.suspend(target.pid)
        self.assertGreater(len(seen), 0)
        thread.join()
        self.assertEqual(stasis.Process(target.pid).state, "checkpointed")
        self.assertEqual(len(seen), 3)
        stasis.resume(target.pid)

    def test_a_handler_that_raises_something_else(self):
        def handler(number, frame):
            raise Raised

        before = signal.signal(signal.SIGTERM, handler)
        self.addCleanup(signal.signal, signal.SIGTERM, before)
        target = self.busy_target()
        with self.assertRaises(Raised):
            harness.interrupt_in(0.3, signal.SIGTERM)
            stasis.suspend(target.pid, 0)
        self.assertEqual(stasis.Process(target.pid).state, "running")


class Callbacks(harness.Case):
    def test_progress_is_told_in_bytes_and_in_the_calling_thread(self):
        target = self.target("memory", "--size", "32M")
        told = []
        self.faults("checkpoint:rate=16M")
        target_of = threading.current_thread()
        stasis.suspend(target.pid, progress=lambda *given: told.append((*given, threading.current_thread())))
        self.assertTrue(told)
        for phase, done, total, thread in told:
            self.assertEqual(phase, "checkpoint")
            self.assertTrue(0 <= done <= 64 << 20 and total >= 32 << 20, (done, total))
            self.assertIs(thread, target_of)
        stasis.resume(target.pid)

    def test_one_that_raises_stops_the_operation(self):
        target = self.target("memory", "--size", "32M")
        self.faults("checkpoint:rate=16M")

        def progress(*given):
            raise Raised("enough")

        with self.assertRaisesRegex(Raised, "enough"):
            stasis.suspend(target.pid, progress=progress)
        self.assertEqual(stasis.Process(target.pid).state, "running")
        target.goes_on()

    def test_notes(self):
        target = self.target("managed")
        notes = []
        with self.assertRaises(stasis.NotSupported):
            stasis.suspend(target.pid, ignore_obstacles=True, note=notes.append)
        self.assertTrue(notes and all(isinstance(note, str) for note in notes))
        self.assertEqual(stasis.Process(target.pid).state, "running")


if __name__ == "__main__":
    harness.main()
