"""Process: the six calls, on real processes on the simulated driver."""

import os
import signal
import subprocess
import sys
import threading
import time

import harness
import stasis


class Calls(harness.Case):
    def test_the_states_after_each_call(self):
        target = self.target()
        process = stasis.Process(target.pid)
        self.assertEqual(process.state, "running")
        self.assertIsNone(process.lock(timeout_ms=5000))
        self.assertEqual(process.state, "locked")
        self.assertEqual(harness.state_of(target.pid), "locked")
        self.assertIsNone(process.checkpoint())
        self.assertEqual(process.state, "checkpointed")
        self.assertEqual(harness.gpus_used(), [0, 0])
        self.assertIsNone(process.restore())
        self.assertEqual(process.state, "locked")
        self.assertIsNone(process.unlock())
        self.assertEqual(process.state, "running")
        target.goes_on()
        target.finish()

    def test_the_restore_thread_is_one_of_its_threads(self):
        target = self.target()
        thread = stasis.Process(target.pid).restore_thread_id
        self.assertIs(type(thread), int)
        self.assertTrue(os.path.exists(f"/proc/{target.pid}/task/{thread}"))
        self.assertNotEqual(thread, target.pid)

    def test_a_locked_process_stays_locked_when_the_object_is_gone(self):
        target = self.target()
        process = stasis.Process(target.pid)
        process.lock()
        del process
        self.assertEqual(harness.state_of(target.pid), "locked")
        # Also when the program is gone that did it.
        stasis.Process(target.pid).unlock()
        subprocess.run([sys.executable, "-c", "import stasis, sys; stasis.Process(int(sys.argv[1])).lock()",
                        str(target.pid)], check=True, timeout=30)
        self.assertEqual(harness.state_of(target.pid), "locked")
        stasis.Process(target.pid).unlock()
        target.goes_on()

    def test_a_call_in_the_wrong_state_says_so_and_changes_nothing(self):
        target = self.target()
        process = stasis.Process(target.pid)
        for call in (process.checkpoint, process.restore, process.unlock):
            with self.assertRaises(stasis.WrongState) as caught:
                call()
            self.assertEqual(caught.exception.code, "wrong-state")
            self.assertEqual(caught.exception.driver_name, "CUDA_ERROR_ILLEGAL_STATE")
            self.assertIn("CUDA_ERROR_ILLEGAL_STATE", str(caught.exception))
            self.assertIn(f"`stasis.recover({target.pid})`", caught.exception.remedy)
        self.assertEqual(process.state, "running")
        process.lock()
        with self.assertRaises(stasis.WrongState):
            process.lock()
        self.assertEqual(process.state, "locked")
        process.unlock()

    def test_a_lock_that_is_late(self):
        target = self.target("spin", "--busy-ms", 60000, "--pause-ms", 0)
        process = stasis.Process(target.pid)
        start = time.monotonic()
        with self.assertRaises(TimeoutError) as caught:
            process.lock(timeout_ms=300)
        self.assertIs(type(caught.exception), stasis.Timeout)
        self.assertTrue(0.25 < time.monotonic() - start < 30)
        self.assertEqual(process.state, "running")

    def test_managed_memory_is_refused_and_it_stays_locked(self):
        target = self.target("managed")
        process = stasis.Process(target.pid)
        with self.assertRaises(stasis.NotSupported):
            with process.locked():
                try:
                    process.checkpoint()
                finally:
                    self.assertEqual(process.state, "locked")
        self.assertEqual(process.state, "running")

    def test_who_is_no_cuda_process(self):
        with self.assertRaises(stasis.NotCuda):
            stasis.Process(os.getpid()).state
        with self.assertRaises(ProcessLookupError):
            stasis.Process(4194303).lock()
        over = threading.Event()
        thread = threading.Thread(target=over.wait)
        thread.start()
        self.addCleanup(over.set)
        with self.assertRaises(stasis.ThreadId) as caught:
            stasis.Process(thread.native_id).state
        self.assertIn(str(os.getpid()), str(caught.exception))
        over.set()
        thread.join()

    def test_one_that_has_ended(self):
        target = self.target()
        process = stasis.Process(target.pid)
        untouched = stasis.Process(target.pid)
        self.assertEqual(process.state, "running")
        pid = target.pid
        target.finish()
        for one in (process, untouched):
            with self.assertRaises(ProcessLookupError):
                one.state
        self.assertEqual(process.pid, pid)

    def test_the_number_of_one_that_has_ended_is_not_taken_for_another(self):
        first = self.target()
        process = stasis.Process(first.pid)
        number = first.pid
        first.finish()
        # The kernel is told which number comes next; in a namespace of its own no other process takes it.
        try:
            with open("/proc/sys/kernel/ns_last_pid", "w", encoding="ascii") as file:
                file.write(str(number - 1))
        except OSError as reason:
            self.skipTest(f"the next process number cannot be chosen: {reason}")
        second = self.target()
        if second.pid != number:
            self.skipTest("another process took the number")
        with self.assertRaises(stasis.ProcessGone):
            process.lock()
        self.assertEqual(harness.state_of(number), "running")

    def test_a_mapping_in_part_is_completed(self):
        first, second = harness.gpu_uuids()
        target = self.target("memory", "--size", "16M")
        process = stasis.Process(target.pid)
        for mapping in ({first: second}, {second[4:]: first}, {first: first}):
            process.lock()
            process.checkpoint()
            process.restore(gpu_mapping=mapping)
            process.unlock()
            target.goes_on()
            used = harness.gpus_used()
            if mapping == {first: second}:
                self.assertEqual(used[0], 0)
                self.assertGreater(used[1], 16 << 20)
        self.assertEqual(used[1], 0)
        target.finish()

    def test_a_mapping_that_names_no_gpu_of_this_machine(self):
        target = self.target()
        process = stasis.Process(target.pid)
        with process.locked():
            process.checkpoint()
            with self.assertRaises(stasis.DeviceMapInvalid):
                process.restore({"GPU-" + "0" * 32: "GPU-" + "1" * 32})
            self.assertEqual(process.state, "checkpointed")
        target.goes_on()

    def test_every_gpu_to_the_next_several_times_round(self):
        uuids = harness.gpu_uuids()
        shuffle = dict(zip(uuids, uuids[1:] + uuids[:1]))
        targets = [self.target("memory", "--size", "16M", env={"CUDA_VISIBLE_DEVICES": str(number)})
                   for number in range(len(uuids))]
        both = self.target("contexts")
        for _ in range(3):
            for target in (*targets, both):
                process = stasis.Process(target.pid)
                with process.locked(timeout_ms=5000):
                    process.checkpoint()
                    process.restore(shuffle)
            for target in (*targets, both):
                target.goes_on()
        for target in (*targets, both):
            target.finish()


# Of cuda.core.checkpoint, by its source (1.2.0) and the driver's documentation; python.same_program of
# tests/gpu compares with the package itself.
SAID = """\
Process('12') -> TypeError
Process(True) -> TypeError
Process(0) -> ValueError
Process(-1) -> ValueError
Process(1.5) -> TypeError
Process(None) -> TypeError
pid is True
pid = 5 -> AttributeError
a new attribute -> AttributeError
state: running
restore thread: int True
lock(-1) -> ValueError
lock(1.5) -> TypeError
lock(True) -> TypeError
lock('5') -> TypeError
restore('x') -> TypeError
restore([('a', 'b')]) -> TypeError
restore(of no UUID) -> ValueError
restore(of no UUID) -> TypeError
unlock() while it runs -> an error with ILLEGAL_STATE
checkpoint() while it runs -> an error with ILLEGAL_STATE
state of no CUDA process -> an error 
""" + """\
lock: locked
lock() again -> an error with ILLEGAL_STATE
checkpoint: checkpointed
checkpoint() again -> an error with ILLEGAL_STATE
restore: locked
unlock: running
""" * 4 + """\
lock without a limit: locked
and back: running
"""


class SameProgram(harness.Case):
    def test_a_program_for_the_other_package(self):
        target = self.target()
        with open(os.path.join(harness.SOURCE, "tests/gpu/acceptance/checkpoint_program.py"), encoding="utf-8") as file:
            program = "import stasis as checkpoint\n" + file.read()
        uuids = [uuid[4:] for uuid in harness.gpu_uuids()]
        done = subprocess.run([sys.executable, "-c", program, str(target.pid), *uuids], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, check=False)
        self.assertEqual(done.stderr.decode(), "")
        self.assertEqual(done.stdout.decode(), SAID)
        target.goes_on()
        target.finish()


class Locked(harness.Case):
    def test_inside_it_is_locked_and_afterwards_it_runs(self):
        target = self.target()
        process = stasis.Process(target.pid)
        with process.locked(timeout_ms=5000) as same:
            self.assertIs(same, process)
            self.assertEqual(process.state, "locked")
        self.assertEqual(process.state, "running")
        target.goes_on()

    def test_every_way_out(self):
        target = self.target()
        process = stasis.Process(target.pid)

        def by_return():
            with process.locked():
                return process.state

        self.assertEqual(by_return(), "locked")
        self.assertEqual(process.state, "running")
        for exception in (ValueError, KeyboardInterrupt, SystemExit):
            with self.assertRaises(exception):
                with process.locked():
                    raise exception
            self.assertEqual(process.state, "running")
        for _ in range(2):
            with process.locked():
                break
        self.assertEqual(process.state, "running")

    def test_what_was_checkpointed_inside_is_brought_back(self):
        target = self.target()
        process = stasis.Process(target.pid)
        with self.assertRaises(ZeroDivisionError):
            with process.locked():
                process.checkpoint()
                raise ZeroDivisionError
        self.assertEqual(process.state, "running")
        with process.locked():
            process.unlock()
        self.assertEqual(process.state, "running")
        target.goes_on()
        target.finish()

    def test_what_another_program_has_locked_stays_locked(self):
        target = self.target()
        process = stasis.Process(target.pid)
        process.lock()
        with self.assertRaises(stasis.WrongState):
            with process.locked():
                self.fail("it was entered")
        self.assertEqual(process.state, "locked")
        process.unlock()

    def test_one_that_ends_inside_is_no_error(self):
        target = self.target()
        process = stasis.Process(target.pid)
        with process.locked():
            os.kill(target.pid, signal.SIGKILL)
            os.waitpid(target.pid, 0)
            target.pid = None

    def test_a_time_out_does_not_enter(self):
        target = self.target()
        self.faults("lock:timeout")
        process = stasis.Process(target.pid)
        with self.assertRaises(stasis.Timeout):
            with process.locked(timeout_ms=50):
                self.fail("it was entered")
        self.no_faults()
        self.assertEqual(process.state, "running")


class Threads(harness.Case):
    def test_other_threads_run_while_a_lock_waits(self):
        target = self.target("spin", "--busy-ms", 60000, "--pause-ms", 0)
        counted = [0]
        over = threading.Event()

        def count():
            while not over.is_set():
                counted[0] += 1

        thread = threading.Thread(target=count)
        thread.start()
        before = counted[0]
        with self.assertRaises(stasis.Timeout):
            stasis.Process(target.pid).lock(timeout_ms=1000)
        during = counted[0] - before
        over.set()
        thread.join()
        # A thread that was kept waiting counts nothing; one that runs, millions in a second.
        self.assertGreater(during, 20_000)

    def test_other_threads_run_during_every_call(self):
        target = self.target()
        process = stasis.Process(target.pid)
        self.faults("lock:delay=3s;checkpoint:delay=3s;restore:delay=3s;unlock:delay=3s")
        for call in (process.lock, process.checkpoint, process.restore, process.unlock):
            ticks = []
            over = threading.Event()
            thread = threading.Thread(target=lambda: [ticks.append(1) for _ in iter(lambda: over.wait(0.01), True)])
            thread.start()
            call()
            over.set()
            thread.join()
            # One that was kept waiting ticks once at most, when it is over.
            self.assertGreater(len(ticks), 3, call.__name__)

    def test_calls_from_several_threads_at_once(self):
        targets = [self.target() for _ in range(3)]
        self.faults("checkpoint:delay=6s")
        errors = []

        def round_trip(pid):
            try:
                process = stasis.Process(pid)
                with process.locked(timeout_ms=10000):
                    process.checkpoint()
            except stasis.Error as error:
                errors.append(error)

        threads = [threading.Thread(target=round_trip, args=(target.pid,)) for target in targets]
        for thread in threads:
            thread.start()
        # None waits for the other: all three are in the driver.
        harness.wait_until(lambda: harness.held_up_count() == 3)
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])
        for target in targets:
            target.goes_on()

    def test_a_forked_child_has_calls_of_its_own(self):
        target = self.target()
        process = stasis.Process(target.pid)
        self.assertEqual(process.state, "running")
        child = os.fork()
        if child == 0:
            ended = 1
            try:
                process.lock()
                with open("/proc/thread-self/children", encoding="ascii") as file:
                    made = len(file.read().split())
                ended = 0 if process.state == "locked" and stasis.driver().simulated else 2
                ended = ended if made == 1 else 3  # a process for its calls, and not the parent's
            finally:
                os._exit(ended)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        # What the child's end took along was its own.
        self.assertEqual(process.state, "locked")
        process.unlock()
        self.assertEqual(process.state, "running")

    def test_no_descriptor_is_left_to_a_program_that_is_started(self):
        stasis.driver()
        found = subprocess.run([sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd'), key=int))"],
                               close_fds=False, stdout=subprocess.PIPE, check=True).stdout.decode()
        ours = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
                and os.get_inheritable(int(name))]
        self.assertLessEqual(len(eval(found)), len(ours) + 2, found)  # its own standard output and the folder


class Configure(harness.Case):
    def test_calls_in_this_process(self):
        self.addCleanup(stasis.configure)
        stasis.configure(answer_timeout_ms=0, work_timeout_ms=0)
        target = self.target()
        process = stasis.Process(target.pid)
        with process.locked(timeout_ms=5000):
            process.checkpoint()
        target.goes_on()

    def test_a_driver_that_does_not_answer_is_given_up(self):
        self.addCleanup(stasis.configure)
        target = self.target()
        process = stasis.Process(target.pid)
        process.lock()
        stasis.configure(answer_timeout_ms=1000, work_timeout_ms=1000)
        self.faults("unlock:hang")
        start = time.monotonic()
        with self.assertRaises(stasis.NoAnswer):
            process.unlock()
        self.assertLess(time.monotonic() - start, 40)
        self.no_faults()
        stasis.configure()
        process.unlock()
        target.goes_on()

    def test_an_old_handle_goes_on_working(self):
        self.addCleanup(stasis.configure)
        target = self.target()
        process = stasis.Process(target.pid)
        self.assertEqual(process.state, "running")
        stasis.configure(library=os.environ["STASIS_LIBCUDA"])
        self.assertEqual(process.state, "running")
        self.assertTrue(stasis.driver().simulated)


if __name__ == "__main__":
    harness.main()
