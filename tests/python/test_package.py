"""`pip install .`, from nothing but this machine; and what is in the documents."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading

import harness
import stasis


def run(*argv, **more):
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          check=False, **more)
    return done.returncode, done.stdout.decode()


def blocks(document, language):
    with open(os.path.join(harness.SOURCE, "docs", document), encoding="utf-8") as file:
        return re.findall(rf"^```{language}\n(.*?)^```$", file.read(), re.M | re.S)


class Install(harness.Case):
    def test_by_pip_without_an_index(self):
        work = self.folder()
        # Most of the time of a venv is that of its own pip.
        own_pip = importlib.util.find_spec("pip") is None
        status, said = run(sys.executable, "-m", "venv", work, *([] if own_pip else ["--without-pip"]))
        if status != 0 and "ensurepip" in said:
            self.skipTest("there is no ensurepip (python3-venv)")
        self.assertEqual(status, 0, said)
        python = os.path.join(work, "bin", "python3")
        pip = [python, "-m", "pip"] if own_pip else [sys.executable, "-m", "pip", "--python", python]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env["STASIS_LIBRARY_DIR"] = os.path.join(harness.BUILD, "lib")
        env["CXXFLAGS"] = "-O0 -g0"
        status, said = run(*pip, "install", "--no-index", "--no-build-isolation", "--disable-pip-version-check",
                           harness.SOURCE, env=env)
        self.assertEqual(status, 0, said)
        self.assertIn(f"Successfully installed stasis-{stasis.__version__}", said)
        target = self.target()
        status, said = run(python, "-c", textwrap.dedent("""
            import importlib.metadata, os, stasis, sys
            folder = os.path.dirname(stasis.__file__)
            assert folder.startswith(sys.prefix), folder
            with open("/proc/self/maps") as file:
                loaded = {line.split()[-1] for line in file if "libstasis" in line}
            assert loaded == {os.path.join(folder, "_lib", "libstasis.so.0")}, loaded
            assert importlib.metadata.version("stasis") == stasis.__version__
            # Licences of what is compiled in: the module itself, and the library.
            told = {path.name: path.read_text() for path in importlib.metadata.files("stasis") if "licenses" in path.parts}
            assert "Wenzel Jakob" in "".join(told.values()) and "libfmt-dev" in told, list(told)
            process = stasis.Process(int(sys.argv[1]))
            with process.suspended():
                print(process.state)
            print(process.state)
            assert os.path.exists(os.path.join(folder, "py.typed"))
            """), str(target.pid), env=env, cwd="/")
        self.assertEqual((status, said), (0, "checkpointed\nrunning\n"))
        status, said = run(*pip, "uninstall", "-y", "stasis", env=env)
        self.assertEqual(status, 0, said)
        self.assertFalse([name for _, _, names in os.walk(os.path.join(work, "lib")) for name in names
                          if "libstasis" in name])

    def test_the_extension_knows_the_c_interface_only(self):
        with open(os.path.join(harness.SOURCE, "python", "_stasis.cc"), encoding="utf-8") as file:
            ours = re.findall(r'^#include "(.*)"', file.read(), re.M)
        self.assertEqual(ours, ["stasis/stasis.h"])


class Documents(harness.Case):
    """Each example is run as it stands, with the names that the text gives."""

    @harness.needs_criu
    def test_python(self):
        examples = blocks("python.md", "python")
        self.assertGreaterEqual(len(examples), 6)
        for number, example in enumerate(examples):
            target = self.target("tree", "--children", 2, "--size", "4M") if "Group" in example else self.target()
            another = self.target() if "another" in example else target
            images = os.path.join(self.folder(), "images")
            first, second = harness.gpu_uuids()
            script = os.path.join(self.folder(), "example.py")
            with open(script, "w", encoding="utf-8") as file:
                file.write(example)
            # What is dumped leaves its number to the restore only when its parent has asked for its end.
            threading.Thread(target=os.waitpid, args=(target.pid, 0), daemon=True).start()
            with self.subTest(example=number):
                start = (f"import sys; pid, another, images = {target.pid}, {another.pid}, {images!r}; "
                         f"first, second = {first!r}, {second!r}; "
                         f"exec(compile(open({script!r}).read(), {script!r}, 'exec'))")
                status, said = run(sys.executable, "-c", start, cwd=os.path.dirname(script), timeout=60)
                self.assertEqual(status, 0, f"{example}\n{said}")
                expected = re.findall(r"#> (.*)", example)
                self.assertEqual(said.splitlines(), expected, example)
            if os.path.exists(f"/proc/{target.pid}"):
                os.killpg(target.pid, signal.SIGKILL)
            target.pid = None

    def test_c(self):
        """One program, and the line that compiles it."""
        (program,) = blocks("c-api.md", "c")
        work = self.folder()
        with open(os.path.join(work, "free-the-gpu.c"), "w", encoding="utf-8") as file:
            file.write(program)
        (command,) = blocks("c-api.md", "sh")
        command = command.replace("build/release", harness.BUILD).replace("-Iinclude", f"-I{harness.SOURCE}/include")
        status, said = run("bash", "-ec", command, cwd=work)
        self.assertEqual((status, said), (0, ""), command)
        target = self.target()
        status, said = run(os.path.join(work, "free-the-gpu"), str(target.pid), env={**os.environ,
                           "LD_LIBRARY_PATH": os.path.join(harness.BUILD, "lib")})
        self.assertEqual(status, 0, said)
        self.assertIn("its GPU memory is free", said)
        target.goes_on()
        target.finish()
        status, said = run(os.path.join(work, "free-the-gpu"), str(os.getpid()), env={**os.environ,
                           "LD_LIBRARY_PATH": os.path.join(harness.BUILD, "lib")})
        self.assertEqual(status, 4, said)
        self.assertIn("not-cuda", said)


if __name__ == "__main__":
    harness.main()
