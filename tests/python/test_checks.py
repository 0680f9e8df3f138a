"""What the package makes of its arguments, its exceptions, and its types. No target is needed."""

import enum
import inspect as reflection
import os
import pickle
import shutil
import subprocess
import sys
import threading
import types
import uuid

import harness
import stasis
from stasis import _checks, _errors, _stasis

ONE = "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"


class Index:
    """As numpy's integers are: no int, but one by __index__."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class Number(enum.IntEnum):
    FOUR = 4


class Pid(harness.Case):
    def test_an_int_and_what_counts_as_one(self):
        for given in (4, Index(4), Number.FOUR):
            process = stasis.Process(given)
            self.assertEqual(process.pid, 4)
            self.assertIs(type(process.pid) is bool, False)

    def test_a_bool_a_string_and_a_float_are_type_errors(self):
        for given in (True, False, "4", b"4", 4.0, None, [4], object()):
            for function in (stasis.Process, stasis.Group, stasis.suspend, stasis.resume, stasis.recover):
                if given is None and function is stasis.recover:
                    continue
                with self.assertRaisesRegex(TypeError, "pid must be an int"):
                    function(given)
            with self.assertRaisesRegex(TypeError, "pid must be an int"):
                stasis.dump(given, "image")

    def test_a_name_is_a_jobs_where_a_job_may_be_meant(self):
        for function in (stasis.suspend, stasis.resume, stasis.recover, lambda name: stasis.dump(name, "image"),
                         lambda name: stasis.swap(name, name)):
            with self.assertRaisesRegex(stasis.NoSuchProcess, "no job has the name no-such-job"):
                function("no-such-job")
        with self.assertRaisesRegex(TypeError, "the name of a job, not 'two words'"):
            stasis.suspend("two words")
        for kind in (stasis.Process, stasis.Group):
            with self.assertRaisesRegex(TypeError, "stasis.Job\\('trainer'\\) is a job by its name"):
                kind("trainer")

    def test_zero_and_less_are_value_errors(self):
        for given in (0, -1, -(2**40), Index(-3)):
            with self.assertRaisesRegex(ValueError, "pid must be a positive int"):
                stasis.Process(given)

    def test_more_than_a_process_number_can_be_is_a_value_error(self):
        for given in (2**31, 2**32 + 1, 2**64):
            with self.assertRaisesRegex(ValueError, "at most 2147483647"):
                stasis.Process(given)

    def test_numpy(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("numpy is not installed")
        self.assertEqual(stasis.Process(numpy.int32(7)).pid, 7)
        self.assertEqual(stasis.Process(numpy.uint64(7)).pid, 7)
        with self.assertRaises(TypeError):
            stasis.Process(numpy.bool_(True))
        with self.assertRaises(TypeError):
            stasis.Process(numpy.float64(7))
        with self.assertRaises(ValueError):
            stasis.Process(numpy.int64(-7))

    def test_it_cannot_be_changed(self):
        process = stasis.Process(1)
        with self.assertRaises(AttributeError):
            process.pid = 2
        with self.assertRaises(AttributeError):
            process.something = 2


class Timeout(harness.Case):
    def test_what_is_no_number_of_milliseconds(self):
        process = stasis.Process(1)
        for given in (1.5, "1", None, True):
            with self.assertRaisesRegex(TypeError, "timeout_ms must be an int"):
                process.lock(given)
            with self.assertRaisesRegex(TypeError, "timeout_ms must be an int"):
                with process.locked(given):
                    self.fail("it was entered")
        for given in (-1, 2**32):
            with self.assertRaisesRegex(ValueError, "timeout_ms must be"):
                process.lock(timeout_ms=given)
            with self.assertRaisesRegex(ValueError, "timeout_ms must be"):
                stasis.suspend(1, given)


class Mapping(harness.Case):
    def test_every_form_of_a_uuid(self):
        raw = bytes(range(1, 17))
        forms = (
            ONE, ONE.upper(), ONE[4:], ONE[4:].replace("-", ""), uuid.UUID(ONE[4:]),
            types.SimpleNamespace(uuid=ONE), types.SimpleNamespace(uuid=uuid.UUID(ONE[4:])),
            types.SimpleNamespace(bytes=raw), types.SimpleNamespace(bytes=list(raw)),
            types.SimpleNamespace(uuid=types.SimpleNamespace(bytes=raw)),
        )
        for form in forms:
            self.assertEqual(_checks.gpu_uuid(form), ONE, form)
        negative = types.SimpleNamespace(bytes=[-1] * 16)
        self.assertEqual(_checks.gpu_uuid(negative), "GPU-" + str(uuid.UUID(int=2**128 - 1)))

    def test_no_mapping_and_an_empty_one(self):
        self.assertEqual(_checks.gpu_mapping(None), [])
        self.assertEqual(_checks.gpu_mapping({}), [])
        self.assertEqual(_checks.gpu_mapping(types.MappingProxyType({ONE: ONE[4:]})), [(ONE, ONE)])

    def test_what_is_no_mapping(self):
        process = stasis.Process(1)
        for given in ([(ONE, ONE)], ONE, 5, True):
            with self.assertRaisesRegex(TypeError, "gpu_mapping must be a mapping"):
                process.restore(given)
            with self.assertRaisesRegex(TypeError, "gpu_mapping must be a mapping"):
                stasis.restore("image", given)

    def test_what_is_no_uuid(self):
        process = stasis.Process(1)
        for given in (0, b"x", None, 1.5):
            with self.assertRaises(TypeError):
                process.restore({ONE: given})
            with self.assertRaises(TypeError):
                process.restore({given: ONE})
        for given in ("", "GPU-", "0", ONE + "0", ONE[:-1], ONE.replace("1", "g"), ONE[:-2] + " 10",
                      types.SimpleNamespace(bytes=b"short")):
            with self.assertRaisesRegex(ValueError, "GPU UUID"):
                process.restore({ONE: given})


class Arguments(harness.Case):
    def test_of_the_other_functions(self):
        with self.assertRaises(TypeError):
            stasis.dump(1, 5)
        with self.assertRaises(ValueError):
            stasis.dump(1, "")
        with self.assertRaisesRegex(ValueError, "after must be one of"):
            stasis.dump(1, "image", after="kill")
        with self.assertRaisesRegex(TypeError, "sync must be a bool"):
            stasis.dump(1, "image", sync="none")
        with self.assertRaisesRegex(TypeError, "external must be a sequence"):
            stasis.dump(1, "image", external="mnt[a]:b")
        with self.assertRaisesRegex(TypeError, "progress must be callable"):
            stasis.suspend(1, progress=5)
        with self.assertRaises(TypeError):
            stasis.configure(library=5)
        with self.assertRaisesRegex(stasis.Usage, "no network lock"):
            stasis.dump(1, "image", network_lock="ipchains")

    def test_every_option_of_the_c_interface_can_be_given_to_dump(self):
        with open(os.path.join(harness.SOURCE, "capi", "abi.txt"), encoding="utf-8") as file:
            members = file.read().split("struct stasis_dump_options ")[1].split("\nstruct ")[0].splitlines()[1:]
        members = {line.split()[0] for line in members} - {"size", "external_count"}
        self.assertIn("tcp_established", members)
        self.assertEqual(members - set(reflection.signature(stasis.dump).parameters), set())


class Errors(harness.Case):
    def test_each_code_of_the_library_has_its_exception(self):
        codes = {name for _, name, _, _ in _stasis.codes()}
        self.assertEqual(len(codes), 36)
        self.assertEqual(codes, set(_errors.BY_CODE))
        for cls in _errors.BY_CODE.values():
            self.assertIs(getattr(stasis, cls.__name__), cls)

    def test_they_are_what_python_has_for_it(self):
        for cls, builtin in (
            (stasis.NoSuchProcess, ProcessLookupError), (stasis.NotPermitted, PermissionError),
            (stasis.Timeout, TimeoutError), (stasis.Usage, ValueError), (stasis.Io, OSError),
            (stasis.ImageExists, FileExistsError), (stasis.DeviceMapInvalid, ValueError),
        ):
            self.assertTrue(issubclass(cls, builtin) and issubclass(cls, stasis.Error), cls)
            self.assertTrue(issubclass(cls, RuntimeError))
            self.assertIn("what is wrong", str(cls("what is wrong", "do this")))
            self.assertIn("what to do: do this", str(cls("what is wrong", "do this")))

    def test_they_can_be_sent_between_processes(self):
        error = stasis.WrongState("a", "b", 401, "CUDA_ERROR_ILLEGAL_STATE", "c")
        copy = pickle.loads(pickle.dumps(error))
        self.assertIs(type(copy), stasis.WrongState)
        for name in ("message", "remedy", "driver_number", "driver_name", "driver_text", "obstacles", "code"):
            self.assertEqual(getattr(copy, name), getattr(error, name))

    def test_a_code_of_a_newer_library(self):
        error = _errors.make("something-new", "m", "r", 0, "", "", "{}")
        self.assertIs(type(error), stasis.Error)
        self.assertEqual(error.code, "something-new")
        self.assertEqual(stasis.Error("m").code, "internal")

    def test_without_a_driver(self):
        said = subprocess.run(
            [sys.executable, "-c", "import stasis\np = stasis.Process(1)\ntry: p.state\n"
             "except stasis.DriverMissing as e: print(e.code, '|', e.message, '|', e.remedy)"],
            env={**os.environ, "STASIS_LIBCUDA": "/nowhere/libcuda.so.1"}, stdout=subprocess.PIPE, check=True,
        ).stdout.decode()
        self.assertTrue(said.startswith("driver-missing | "), said)
        self.assertIn("/nowhere/libcuda.so.1", said)
        self.assertTrue(said.split("|")[2].strip(), "no remedy")


class Description(harness.Case):
    def test_everything_public_says_what_it_is(self):
        for name in stasis.__all__:
            thing = getattr(stasis, name)
            if name == "ProcessState":
                continue
            self.assertTrue(thing.__doc__, name)
            if not isinstance(thing, type) or issubclass(thing, BaseException):
                continue
            for member, value in reflection.getmembers(thing):
                if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                    self.assertTrue(value.__doc__, f"{name}.{member}")

    def test_milliseconds_and_errors_are_told_where_they_are_taken(self):
        for thing in (stasis.suspend, stasis.resume, stasis.dump, stasis.restore, stasis.Process.lock,
                      stasis.configure):
            self.assertIn("millisecond", thing.__doc__)
        for thing in (stasis.suspend, stasis.resume, stasis.dump, stasis.restore, stasis.inspect, stasis.recover,
                      stasis.Process, stasis.Group, stasis.Process.lock, stasis.Process.restore):
            self.assertIn("Raises", thing.__doc__)

    def test_types(self):
        for name in ("mypy", "stubtest"):
            if not shutil.which(name):
                self.skipTest(f"{name} is not installed")
        version = subprocess.run(["mypy", "--version"], stdout=subprocess.PIPE, check=True).stdout.decode().split()[1]
        if version.startswith("0."):
            self.skipTest(f"mypy is {version}, older than 1.0")
        package = os.path.dirname(os.path.dirname(os.path.abspath(stasis.__file__)))
        work = self.folder()
        allowed = os.path.join(work, "allowed")
        with open(allowed, "w", encoding="ascii") as file:
            # What people use is stasis itself; and mypy takes one Literal of several words for a Union.
            file.write("stasis\\._.*\nstasis\\.ProcessState\n")
        users = os.path.join(work, "user.py")
        with open(users, "w", encoding="ascii") as file:
            file.write(USER)
        env = {**os.environ, "MYPYPATH": package, "PYTHONPATH": package}

        def check(argv, results):
            done = subprocess.run(argv, env=env, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            results[argv[0]] = (done.returncode, done.stdout.decode())

        results = {}
        commands = (["stubtest", "stasis", "--allowlist", allowed, "--ignore-unused-allowlist"],
                    ["mypy", "--strict", "--no-incremental", users])
        threads = [threading.Thread(target=check, args=(argv, results)) for argv in commands]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        status, said = results["stubtest"]
        if "failed to import" in said:
            self.skipTest("stubtest is for another Python than this one")
        self.assertEqual(status, 0, said)
        status, said = results["mypy"]
        self.assertEqual([line.split(":")[1] for line in said.splitlines() if ": error:" in line], ["9", "10"], said)


# Lines 9 and 10 are wrong on purpose: types that let everything pass prove nothing.
USER = '''import stasis
process = stasis.Process(12)
state: stasis.ProcessState = process.state
with process.locked(timeout_ms=5) as locked:
    locked.checkpoint()
    locked.restore({"a": "b"})
report: stasis.Report = stasis.suspend(12, progress=lambda phase, done, total: print(phase, done / total))
seconds: float = report.phases["lock"] + report.seconds
stasis.Process("12")
process.lock(timeout="5")
'''

if __name__ == "__main__":
    harness.main()
