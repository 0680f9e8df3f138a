"""The direct path: programs started under `stasis run`, whose GPU memory is moved past the driver."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time

from . import case_torch
from .case_devices import holders, mebibytes, swap
from .core import Failure, case, expect, expect_equal
from .targets import Target

NEEDS = ("program stasis", "program stasis-workload")
CYCLES = 5
SIMULATED_CYCLES = 2  # which have their own tests (tests/integration)
KINDS = {
    # kind: options on a real GPU, options on the simulated one, whether all of its memory can leave
    "memory": (["--size", "2G"], ["--size", "64M"], True),
    "pinned": (["--size", "96M"], ["--size", "6M"], False),
    "streams": ([], [], False),
    "pool": (["--size", "256M"], ["--size", "16M"], True),
    "vmm": (["--size", "256M"], ["--size", "16M"], False),
    "sleep": (["--size", "1536M", "--pause-ms", "100"], ["--size", "12M"], False),
    "graph": ([], [], False),
    "contexts": ([], [], False),
    "threads": (["--size", "512M"], ["--size", "16M"], True),
    "poll": (["--size", "512M"], ["--size", "16M", "--own-us", "20"], True),
    "tree": (["--size", "512M"], ["--size", "16M"], True),
    "loader": (["--size", "512M"], ["--size", "16M"], True),
    "collective": (["--children", "4", "--size", "1G", "--pause-ms", "2"],
                   ["--children", "4", "--size", "8M", "--pause-ms", "2"], True),
}


def run_under_agent(machine, argv, name, env=None, options=()):
    return Target(machine, [machine.program("stasis"), "run", *options, "--", *map(str, argv)], name, env)


def start(machine, kind, options=None, name=None):
    options = KINDS[kind][1 if machine.simulated else 0] if options is None else options
    before = machine.gpu_memory()
    target = run_under_agent(machine, [machine.program("stasis-workload"), kind, "--status", "{status}", *options],
                             name or kind)
    target.before = before
    target.wait_rounds(2)
    return target


def suspend(machine, target, figures, wanted=None, options=()):
    done = machine.stasis("suspend", target.pid, "--json", *options)
    if done.status != 0:
        raise Failure(f"{done.brief()}; the target's last words: {target.output()[-1500:]}")
    report = done.json()
    if wanted:
        expect_equal(report["path"], wanted, f"path ({report.get('notes')})")
    figures.setdefault("suspend_seconds", []).append(report["seconds"])
    phases = {p["name"]: p["seconds"] for p in report["phases"]}
    figures.setdefault("suspend_phases", []).append(phases)
    figures.setdefault("standstill_seconds", []).append(report["standstill_seconds"])
    # The most: one may find memory that its program has let go for a while.
    figures["direct_bytes"] = max(figures.get("direct_bytes", 0), report.get("direct_bytes", 0))
    return report


def resume(machine, target, figures, wanted=None, options=()):
    report = machine.stasis("resume", target.pid, "--json", *options).must_succeed().json()
    if wanted:
        expect_equal(report["path"], wanted, "path")
    figures.setdefault("resume_seconds", []).append(report["seconds"])
    figures.setdefault("resume_phases", []).append({p["name"]: p["seconds"] for p in report["phases"]})
    return report


def cycles(machine, kind):
    return suspended_again_and_again(machine, start(machine, kind), "direct" if KINDS[kind][2] else None)


def suspended_again_and_again(machine, target, wanted):
    figures = {}
    count = SIMULATED_CYCLES if machine.simulated else CYCLES
    for _ in range(count):
        suspend(machine, target, figures, wanted)
        machine.expect_gpu_free(target.before)
        held = target.rounds()
        time.sleep(0.2)
        expect_equal(target.rounds(), held, "rounds while suspended")
        resume(machine, target, figures, wanted)
        target.wait_rounds(2)
    rounds = target.finish()
    moved = figures["direct_bytes"] >> 20
    closing = [phases["close"] for phases in figures["suspend_phases"] if "close" in phases]
    figures["note"] = f"{count} cycles, {moved} MiB past the driver, {rounds} rounds verified"
    if closing:
        figures["note"] += f", quiesced in {statistics.median(closing) * 1e3:.0f} ms ({max(closing) * 1e3:.0f} at most)"
    return figures


def way_in(machine, option):
    target = start(machine, "memory", [*KINDS["memory"][1 if machine.simulated else 0], option], name="way-in")
    return suspended_again_and_again(machine, target, "direct")


# The driver's functions by cuGetProcAddress; those for which the default stream is each thread's own.
for one in ("proc-address", "per-thread-stream"):
    case(f"direct.memory.{one}", needs=NEEDS)(lambda machine, option=f"--{one}": way_in(machine, option))


@case("direct.part_of_job", needs=NEEDS)
def part_of_job(machine):
    """Two ranks that wait for each other, of which one has no agent: what the other has goes past the driver."""
    meeting = os.path.join(machine.work, "meeting")
    with open(meeting, "wb") as file:
        file.truncate(64 << 10)
    job = f"stasis-workload rank --meeting {meeting} --ranks 2 --seed 5 --pause-ms 2 --size 64M --status {{status}}"
    folder = os.path.dirname(machine.program("stasis"))
    script = (f"PATH={folder}:$PATH; stasis run -- {job} --rank 0 & a=$!; {job}.1 --rank 1 & b=$!; "
              "trap 'kill $a $b' TERM; wait; wait")
    target = Target(machine, ["/bin/sh", "-c", script], "ranks")
    target.before = machine.gpu_memory()
    target.wait_rounds(2)
    return suspended_again_and_again(machine, target, "direct")


def dump_restore(machine, kind):
    target = start(machine, kind)
    wanted = "direct" if KINDS[kind][2] else None
    images = os.path.join(machine.work, "image")
    dump = machine.stasis("dump", target.pid, "--images-dir", images, "--json").must_succeed().json()
    if wanted:
        expect_equal(dump["path"], wanted, "path")
    target.forget_exit()
    machine.expect_gpu_free(target.before)
    restore = machine.stasis("restore", "--images-dir", images, "--detach", "--json").must_succeed().json()
    target.wait_rounds(3)
    figures = {}
    suspend(machine, target, figures, wanted)  # the agent answers again
    resume(machine, target, figures, wanted)
    target.wait_rounds(2)
    rounds = target.finish()
    return {"dump_seconds": dump["seconds"], "restore_seconds": restore["seconds"],
            "note": f"dumped, restored, suspended once more; {rounds} rounds verified"}


for one in KINDS:
    case(f"direct.{one}.cycles", needs=NEEDS)(lambda machine, kind=one: cycles(machine, kind))
for one in ("memory", "threads", "tree"):
    case(f"direct.{one}.dump", needs=NEEDS + ("criu", "root"))(
        lambda machine, kind=one: dump_restore(machine, kind))


@case("direct.ipc", needs=NEEDS)
def ipc(machine):
    """Memory of the agent's, opened in a child by CUDA IPC: both are suspended, and the child alone is refused."""
    target = start(machine, "ipc", [])
    child = next(pid for pid in target.tree() if pid != target.pid)
    attempt = machine.stasis("suspend", child)
    expect_equal(attempt.status, 8, f"status of the child alone ({attempt.brief()})")
    target.wait_rounds(2)
    machine.stasis("suspend", target.pid).must_succeed()
    machine.stasis("resume", target.pid).must_succeed()
    target.wait_rounds(2)
    return {"note": f"{target.finish()} rounds verified in both"}


@case("direct.ipc_calls", needs=("program stasis", "program stasis-agent-calls"))
def ipc_calls(machine):
    """A program of driver calls, IPC among them, gets the same answers with the agent and without."""
    argv = [machine.program("stasis-agent-calls")]
    said = []
    for prefix in ([], [machine.program("stasis"), "run", "--"]):
        done = machine.run(*prefix, *argv)
        expect_equal(done.status, 0, f"status ({done.brief()})")
        said.append(done.out.splitlines())
    different = [f"{a} | {b}" for a, b in zip(*said) if a != b]
    expect(len(said[0]) == len(said[1]) and not different, f"with the agent otherwise: {different[:10]}")
    return {"note": f"{len(said[0])} answers, all the same"}


@case("direct.killed", needs=NEEDS)
def killed(machine):
    """The tool is killed somewhere in the middle: the program runs on, by itself or by recover."""
    target = start(machine, "memory", ["--size", "64M" if machine.simulated else "8G"])
    kills = 0
    for delay in (0.1, 0.3) if machine.simulated else (0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8):
        machine.run("timeout", "-s", "KILL", str(delay), machine.program("stasis"), "suspend", target.pid)
        kills += 1
        # timeout(1) dies of the signal as well, maybe before the tool is gone, which may be in the driver.
        deadline = time.monotonic() + 30
        while "[busy]" in (back := machine.stasis("recover", target.pid)).err and time.monotonic() < deadline:
            time.sleep(0.05)
        back.must_succeed()
        target.wait_rounds(2)
    return {"note": f"{kills} kills, {target.finish()} rounds verified"}


@case("direct.mover_killed", needs=NEEDS)
def mover_killed(machine):
    """The process that copies is killed somewhere in the middle: the suspend ends well all the same."""
    target = start(machine, "memory", ["--size", "64M" if machine.simulated else "8G"])
    ways = []
    for delay in (0.0, 0.05) if machine.simulated else (0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6):
        with subprocess.Popen([machine.program("stasis"), "suspend", str(target.pid), "--json"], env=machine.env,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as tool:
            time.sleep(delay)
            killed = False
            while tool.poll() is None and not killed:
                killed = machine.run("pkill", "-KILL", "-n", "-P", str(tool.pid), "-x", "stasis-mover").status == 0
                time.sleep(0.01)
            out, err = tool.communicate(timeout=120)
        expect_equal(tool.returncode, 0, f"exit code, mover killed after {delay} s ({err[-500:]})")
        report = json.loads(out)
        # Once more with another one, or by the driver.
        ways.append([delay, killed, report["path"], [p["name"] for p in report["phases"]],
                     report["standstill_seconds"]])
        machine.stasis("resume", target.pid).must_succeed()
        target.wait_rounds(2)
    expect(any(killed for _, killed, *_ in ways), "no mover was killed")
    return {"ways": ways, "note": f"{sum(way[1] for way in ways)} movers killed, {target.finish()} rounds verified; then "
                                  + ", ".join(f"{way[2]} in {way[4]:.2f} s" for way in ways if way[1])}


@case("direct.device_map", needs=NEEDS + ("two gpus",))
def device_map(machine):
    """To the other GPU and back, the memory moved past the driver."""
    first, second, pairs = swap(machine)
    options = ["--size", f"{mebibytes(machine)}M"]
    target = start(machine, "memory", options)
    figures = {}
    for wanted in (second, first):
        suspend(machine, target, figures, "direct")
        report = machine.stasis("resume", target.pid, "--json", "--device-map", pairs).must_succeed().json()
        expect_equal(report["path"], "direct", f"path ({report.get('notes')})")
        target.wait_rounds(2)
        expect_equal(holders(machine, target.before), {wanted}, "GPUs with its memory")
    figures["note"] = f"there and back, {target.finish()} rounds verified"
    return figures


# --- PyTorch

@case("direct.torch.standstill", simulated=False, needs=NEEDS)
def torch_standstill(machine):
    """How long a training of some 8 GiB in all stands still, the first time and later (ADR 31)."""
    figures = {"torch": case_torch.require_torch(machine)}
    losses = os.path.join(machine.work, "losses")
    target = run_under_agent(machine, [sys.executable, case_torch.TRAIN, "--losses", losses, "--steps", 100000, "--gib", 6,
                                       "--pause-ms", 20], "training")
    target.losses = losses
    case_torch.wait_step(target, 10)
    for _ in range(12):
        before = len(case_torch.losses(target))
        suspend(machine, target, figures, "direct")
        resume(machine, target, figures, "direct")
        case_torch.wait_step(target, before + 2)
    os.kill(target.pid, signal.SIGTERM)
    target.wait_ended(60)
    expect("trained" in target.output(), target.output()[-1500:])
    first, *later = figures["standstill_seconds"]
    figures["note"] = (f"{figures['direct_bytes'] / 2**30:.2f} GiB past the driver: stands still for {first:.2f} s the "
                       f"first time, later {statistics.median(later):.2f} s ({min(later):.2f} to {max(later):.2f})")
    return figures


# --- Speed, side by side

def copy_rate(trace, name):
    """Bytes a second at which the mover copied over the bus, mapping included, of a verb's --trace."""
    with open(trace, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    copies = [one for one in events if one["name"] == name and one.get("cat") == "mover"]
    expect(copies, f"no copy in {trace}")
    return copies[-1]["args"]["bytes"] / (copies[-1]["dur"] * 1e-6)


def speed(machine, gib):
    size = f"{gib}G" if not machine.simulated else "64M"
    figures = {"size": size, "host_memory_seconds": machine.want_host_memory((gib + 4) << 30)}
    paths = {}
    for path in ("driver", "direct"):
        if path == "direct":
            target = start(machine, "memory", ["--size", size, "--pause-ms", "200"], name=path)
        else:
            target = machine.workload("memory", "--size", size, "--pause-ms", "200", name=path)
            target.wait_rounds(2)
        found = {}
        trace = os.path.join(machine.work, "trace.json")
        for _ in range(3 if path == "direct" else 1 if gib > 16 else 2):
            for verb, way in ((suspend, "out"), (resume, "in")):
                verb(machine, target, found, path, options=("--trace", trace))
                if path == "direct":
                    found.setdefault(f"copy_{way}_rate", []).append(copy_rate(trace, f"copy {way}"))
            target.wait_rounds(1)
        target.finish()
        paths[path] = found
    figures["paths"] = paths
    out, back = ([statistics.median(paths[path][step]) for path in ("driver", "direct")]
                 for step in ("standstill_seconds", "resume_seconds"))
    # From the second on the mover is made while the program stands still (ADR 31).
    first, *later = paths["direct"]["standstill_seconds"]
    out[1] = statistics.median(later)
    figures["note"] = (f"{size}: out {out[0]:.2f} s by the driver, {out[1]:.2f} s direct ({out[0] / out[1]:.1f} x), "
                       f"the first time {first:.2f} s; "
                       f"in {back[0]:.2f} s, {back[1]:.2f} s ({back[0] / back[1]:.1f} x); copied at "
                       + " and ".join(f"{statistics.median(paths['direct'][f'copy_{way}_rate']) / 1e9:.1f} GB/s {way}"
                                      for way in ("out", "in")))
    return figures


case("direct.speed.16", needs=NEEDS)(lambda machine: speed(machine, 16))
case("direct.speed.64", simulated=False, needs=NEEDS)(lambda machine: speed(machine, 64))


def dump_speed(machine, gib):
    """Dumps into the page cache and restores from it, of the same program by either path."""
    size = f"{gib}G" if not machine.simulated else "64M"
    figures = {"size": size}
    for path in ("driver", "direct"):
        options = ["--size", size, "--pause-ms", "200"]
        target = start(machine, "memory", options, name=path)
        found = figures[path] = {"dump_seconds": [], "restore_seconds": [], "dump_phases": [], "restore_phases": []}
        for number in range(3 if path == "direct" else 1):
            images = os.path.join(machine.work, f"image-{path}-{number}")
            dump = machine.stasis("dump", target.pid, "--images-dir", images, "--sync", "none", "--path", path,
                                  "--json").must_succeed().json()
            expect_equal(dump["path"], path, f"path ({dump.get('notes')})")
            target.forget_exit()
            restore = machine.stasis("restore", "--images-dir", images, "--detach", "--json").must_succeed().json()
            target.wait_rounds(1)
            for verb, report in (("dump", dump), ("restore", restore)):
                found[f"{verb}_seconds"].append(report["seconds"])
                found[f"{verb}_phases"].append({p["name"]: p["seconds"] for p in report["phases"]})
            shutil.rmtree(images)
        target.finish()
    out, back = ([statistics.median(figures[path][step]) for path in ("driver", "direct")]
                 for step in ("dump_seconds", "restore_seconds"))
    figures["note"] = (f"{size}: dump {out[0]:.2f} s by the driver, {out[1]:.2f} s direct ({out[0] / out[1]:.1f} x); "
                       f"restore {back[0]:.2f} s, {back[1]:.2f} s ({back[0] / back[1]:.1f} x)")
    return figures


case("direct.dump_speed.16", needs=NEEDS + ("criu", "root"))(lambda machine: dump_speed(machine, 16))


def incremental(machine, gib, changing, count=10):
    """Dumps one after the other of a job that runs on, each with the one before as its base: what each writes, and
    how long the job stands still. All are whole when those before them are gone."""
    still, moving = (f"{gib - changing}G", f"{changing}G") if not machine.simulated else ("32M", "4M")
    most = (changing << 30 if not machine.simulated else 4 << 20) * 1.05
    target = start(machine, "memory", ["--size", moving, "--still", still, "--pause-ms", "200"], name="incremental")
    figures = {"never_changes": still, "changes": moving, "dumps": []}
    images = []
    for number in range(count if not machine.simulated else 3):
        image = os.path.join(machine.work, f"image-{number}")
        base = ["--base", images[-1]] if images else []
        dump = machine.stasis("dump", target.pid, "--images-dir", image, "--leave-running", *base, "--json")
        report = dump.must_succeed().json()
        expect_equal(report["path"], "direct", f"path ({report.get('notes')})")
        content = machine.stasis("verify", image, "--json").must_succeed().json()["gpu_content"]
        written = content["stored_bytes"] - content["taken_bytes"]
        figures["dumps"].append({key: report[key] for key in ("image_bytes", "written_bytes", "taken_bytes", "seconds",
                                                              "standstill_seconds")}
                                | {"gpu_written_bytes": written, "gpu_unused_bytes": content["unused_bytes"],
                                   "phases": {p["name"]: p["seconds"] for p in report["phases"]}})
        expect(not base or written <= most, f"{written} bytes of GPU memory written, {moving} had changed")
        images.append(image)
        for old in images[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        target.wait_rounds(2)
    target.kill()
    target.forget_exit()
    shutil.rmtree(images[-2])
    machine.stasis("restore", "--images-dir", images[-1], "--detach").must_succeed()
    target.wait_rounds(2)
    rounds = target.finish()
    first, later = figures["dumps"][0], figures["dumps"][1:]

    def middle(key):
        return statistics.median(one[key] for one in later)
    figures["note"] = (f"{still} and {moving} that change: first {first['written_bytes'] / 2**30:.2f} GiB in "
                       f"{first['seconds']:.2f} s, still {first['standstill_seconds']:.2f} s; later "
                       f"{middle('written_bytes') / 2**30:.2f} GiB in {middle('seconds'):.2f} s, still "
                       f"{middle('standstill_seconds'):.2f} s; restored, {rounds} rounds verified")
    return figures


case("direct.incremental.16", needs=NEEDS + ("criu", "root"))(lambda machine: incremental(machine, 16, 1))
