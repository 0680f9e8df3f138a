"""Jobs of several nodes: two "nodes" of this machine, each with namespaces, a host name, an address and a GPU of its own.

They are joined by a veth pair; where the kernel has none, by one loopback interface for both.
"""

import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import statistics
import sys
import time

from . import netlink
from .case_groups import ALLREDUCE, NEEDS
from .case_jobs import SAVED, saves, went_on
from .case_torch import require_torch
from .core import Failure, Skip, case, expect, expect_equal
from .targets import Target

NODE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "node.py")
CYCLES = 10
STARTS = 3
DUMPS = 3
NAMESPACES = ("--pid", "--mount", "--uts", "--ipc", "--net")
PORT = 29531
# How long both have to stand still.
LOOK_SECONDS = 0.3
ENGINE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO",
          "NCCL_DEBUG_SUBSYS": "INIT,NET"}


def address_of(number):
    return f"10.77.0.{number + 1}"


def outer_child(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


class Node:
    """`first` is its first process as this machine sees it, `inside` the program as the node sees it."""

    def __init__(self, machine, number, interface, command, env, share_with=None):
        self.machine, self.number, self.name = machine, number, f"node{number}"
        self.env = {**machine.env, "STASIS_STATE_DIR": os.path.join(machine.work, f"state{number}")}
        if machine.simulated:
            self.env.update({"STASIS_SIM_DIR": os.path.join(machine.work, f"gpus{number}"), "STASIS_SIM_GPUS": "1x8G"})
        os.makedirs(self.env["STASIS_STATE_DIR"], mode=0o700, exist_ok=True)
        self.pid_file = os.path.join(machine.work, self.name + ".pid")
        if os.path.exists(self.pid_file):  # of the start before
            os.remove(self.pid_file)
        enter = ["nsenter", f"--net=/proc/{share_with.first}/ns/net"] if share_with else []
        kinds = [kind for kind in NAMESPACES if not (share_with and kind == "--net")]
        argv = [*enter, "unshare", *kinds, "--fork", "--kill-child", "--mount-proc", sys.executable, NODE, "--name",
                self.name, "--interface", interface, "--address", address_of(number), "--pid-file", self.pid_file, "--",
                *command]
        argv[0] = shutil.which(argv[0])
        self.target = Target(machine, argv, self.name, {**self.env, **env})
        self.target.wait_for(lambda: outer_child(self.target.pid), "first process")
        self.first = outer_child(self.target.pid)[0]
        self.inside = None

    def wait_started(self):
        self.target.wait_for(lambda: os.path.exists(self.pid_file), "program")
        with open(self.pid_file, encoding="ascii") as file:
            self.inside = int(file.read())

    def processes(self):
        return [int(name) for name in os.listdir(f"/proc/{self.first}/root/proc") if name.isdigit()]

    def stasis(self, *words):
        """That node's tool: it sees what the node sees."""
        argv = [f"--target={self.first}", *NAMESPACES, self.machine.program("stasis"), *words]
        return self.machine.run(shutil.which("nsenter"), *argv, env=self.env, timeout=180)


class Job:
    """`command` gives a node's program by its number; `suffix` that of its file of rounds."""

    def __init__(self, machine, command, env, suffix):
        for program in ("unshare", "nsenter"):
            if not shutil.which(program):
                raise Skip(f"there is no {program} here")
        made = machine.run("unshare", *NAMESPACES, "--fork", "--mount-proc", "true")
        if made.status != 0:
            raise Skip("no namespaces can be made here: " + made.first_error())
        self.machine, self.suffix = machine, suffix
        self.network = "veth"
        interface = self.join_network()
        first = Node(machine, 0, interface, command(0, interface), env(0, interface))
        share = None if self.network == "veth" else first
        second = Node(machine, 1, interface, command(1, interface), env(1, interface), share)
        self.nodes = (first, second)
        if self.network == "veth":
            netlink.join_by_veth((first.first, interface), (second.first, interface))
        for node in self.nodes:
            node.wait_started()
        self.wait_rounds(3, 240)

    def join_network(self):
        """Tries the kernel out, in a namespace that goes away."""
        tried = self.machine.run(
            "unshare", "--net", sys.executable, "-c",
            f"import os, sys; sys.path.insert(0, {os.path.dirname(NODE)!r}); from acceptance import netlink; "
            "netlink.join_by_veth((os.getpid(), 'tried0'), (os.getpid(), 'tried1'))")
        if tried.status == 0:
            return "node"
        said = tried.err.strip().splitlines()[-1:] or ["?"]
        self.network = f"one loopback interface, for there is no veth here: {said[0]}"
        return "lo"

    def rounds(self):
        return [node.target.rounds(self.suffix(node.number)) for node in self.nodes]

    def wait_rounds(self, more, timeout=120):
        for node, before in zip(self.nodes, self.rounds()):
            node.target.wait_for(lambda of=node, least=before + more: of.target.rounds(self.suffix(of.number)) >= least,
                                 f"round {before + more}", timeout)

    def together(self, verb, *words, of=lambda node: (node.inside,)):
        """By the tools of both nodes at once, each with the words `of` it. Their reports."""
        group = os.path.join(self.machine.work, "group")

        def one(node):
            return node.stasis(verb, *of(node), "--group", group, "--parts", len(self.nodes), "--part", node.name,
                               *words, "--json")
        with concurrent.futures.ThreadPoolExecutor(len(self.nodes)) as pool:
            done = list(pool.map(one, self.nodes))
        failed = [f"{node.name}: {one.brief()}" for node, one in zip(self.nodes, done) if one.status != 0]
        if failed:
            raise Failure("; ".join(failed))
        expect(not os.path.exists(group), "the group's directory is still there")
        return [one.json() for one in done]

    def finish(self):
        """SIGTERM to both; each has to say that it verified its rounds."""
        for node in self.nodes:
            # A rank that ends tells the other's, which may be gone by then.
            with contextlib.suppress(ProcessLookupError):
                os.kill(node.first, signal.SIGTERM)
        found = []
        for node in self.nodes:
            node.target.wait_ended(120)
            said = node.target.output()
            match = re.findall(r"^(?:rank \d+ )?verified (\d+) rounds$", said, re.M)
            expect(node.target.exit_status == 0 and match,
                   f"{node.name} ended with status {node.target.exit_status}; it said: {said.strip()[-200:]}")
            found.append(int(match[-1]))
        expect_equal(found[0], found[1], "rounds of sums of the second node and of the first")
        return found[0]


def phase(report, name):
    return next((one["seconds"] for one in report["phases"] if one["name"] == name), None)


def there_and_back(machine, job, cycles):
    """Both suspended and resumed again and again."""
    figures = {"network": job.network, "downtime_seconds": [], "meet_seconds": [], "suspend_seconds": [],
               "resume_seconds": [], "lock_tries": [], "direct_bytes": [], "phases": []}
    for _ in range(cycles):
        out = job.together("suspend", "--timeout", "30s")
        held = job.rounds()
        time.sleep(LOOK_SECONDS)
        expect_equal(job.rounds(), held, "rounds while both are suspended")
        back = job.together("resume")
        figures["downtime_seconds"].append([one["standstill_seconds"] + two["seconds"] for one, two in zip(out, back)])
        figures["meet_seconds"].append([phase(one, "meet") for one in out])
        figures["suspend_seconds"].append([one["seconds"] for one in out])
        figures["resume_seconds"].append([one["seconds"] for one in back])
        figures["lock_tries"].append([one["lock_tries"] for one in out])
        figures["direct_bytes"].append([one["direct_bytes"] for one in out])
        figures["phases"].append([{one["name"]: one["seconds"] for one in part["phases"]} for part in out])
        job.wait_rounds(2)
    for node in job.nodes:
        left = [name for name in os.listdir(node.env["STASIS_STATE_DIR"]) if name.endswith(".json")]
        expect(not left, f"{node.name} has records left: {left}")
    return figures


def dumped_and_restored(job, cycles):
    """Both on disk and ended, and back."""
    def image_of(node):
        return os.path.join(node.machine.work, f"image{node.number}")
    seconds = {"dump": [], "restore": []}
    for _ in range(cycles):
        out = job.together("dump", "--timeout", "30s", "--sync", "none", of=lambda node: (node.inside, image_of(node)))
        for node in job.nodes:
            expect(node.inside not in node.processes(), f"{node.name}: the program is still there after its dump")
        back = job.together("restore", "--detach", of=lambda node: (image_of(node),))
        seconds["dump"].append([one["seconds"] for one in out])
        seconds["restore"].append([one["seconds"] for one in back])
        job.wait_rounds(2)
        for node in job.nodes:
            shutil.rmtree(image_of(node))
    return {"cycles": cycles, **seconds}


def summary(figures):
    def median(name):
        return statistics.median(max(pair) for pair in figures[name])
    return (f"downtime {median('downtime_seconds'):.2f} s, met in {median('meet_seconds'):.2f} s (medians); "
            f"network: {figures['network']}")


def under_agent(machine, agent, command):
    return [machine.program("stasis"), "run", "--no-io-uring", "--", *command] if agent else command


def told(figures, job, cycles, dumps):
    """Without `stasis run`, whose option keeps PyTorch's store from an io_uring, there is nothing to dump."""
    figures["dumps"] = dumped_and_restored(job, dumps) if dumps else None
    figures["rounds"] = job.finish()
    figures["note"] = f"{cycles} suspends of both, {figures['rounds']} rounds of right sums; {summary(figures)}"
    if dumps:
        times = {verb: statistics.median(max(pair) for pair in figures["dumps"][verb]) for verb in ("dump", "restore")}
        figures["note"] += f"; {dumps} dumps, {times['dump']:.2f} s, restore {times['restore']:.2f} s"
    return figures


def of_ours(machine):
    """Ranks of ours that meet by TCP in host functions of their streams."""
    def command(number, _):
        return [machine.program("stasis-workload"), "rank", "--meeting", f"tcp:{address_of(0)}:{PORT}", "--rank",
                str(number), "--ranks", "2", "--seed", "7", "--size", "8M", "--pause-ms", "2", "--status", "{status}"]

    def env(number, _):
        return {} if machine.simulated else {"CUDA_VISIBLE_DEVICES": str(number)}
    return command, env


def of_nccl(mib):
    """PyTorch, with NCCL over sockets."""
    def command(number, _):
        return [sys.executable, ALLREDUCE, "--rank", str(number), "--ranks", "2", "--device", "0", "--init",
                f"tcp://{address_of(0)}:{PORT}", "--status", "{status}", "--mib", str(mib), "--pause-ms", "2"]

    def env(number, interface):
        return {**ENGINE, "CUDA_VISIBLE_DEVICES": str(number), "NCCL_HOSTID": f"node{number}",
                "NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    return command, env


def saved_together(machine, command, env, suffix):
    """`stasis run` on each node; one of them is told to make room, in turn, and both are started again."""
    figures = {"saved_seconds": [], "back_seconds": [], "saves": []}
    for start in range(STARTS + 1):
        def under_run(number, interface, group=os.path.join(machine.work, f"group.{start}")):
            return [machine.program("stasis"), "run", "--images-dir", os.path.join(machine.work, f"images{number}"),
                    "--group", group, "--parts", "2", "--part", f"node{number}", "--on-signal", "HUP", "--no-io-uring",
                    "--", *command(number, interface)]
        begin = time.monotonic()
        job = Job(machine, under_run, env, suffix)
        if start:
            figures["back_seconds"].append(round(time.monotonic() - begin, 3))
        for node in job.nodes:
            if start:  # the program runs before that is told
                went_on(node.target)
            expect_equal("goes on from" in node.target.output(), start > 0, f"{node.name} goes on, at start {start}")
        if start == STARTS:
            break
        begin = time.monotonic()
        os.kill(outer_child(job.nodes[start % 2].first)[0], signal.SIGHUP)
        for node in job.nodes:
            node.target.wait_ended(180)
            expect_equal(node.target.exit_status, SAVED, f"status of {node.name} ({node.target.output()[-800:]})")
        figures["saved_seconds"].append(round(time.monotonic() - begin, 3))
        figures["saves"].append([saves(node.target) for node in job.nodes])
    figures["network"] = job.network
    figures["rounds"] = job.finish()
    figures["note"] = (f"{STARTS} times saved and ended in {max(figures['saved_seconds']):.1f} s, back in "
                       f"{max(figures['back_seconds']):.1f} s at most; {figures['rounds']} rounds of right sums; "
                       f"network: {job.network}")
    return figures


@case("nodes.job", needs=NEEDS + ("program stasis-workload", "two gpus", "root", "criu"))
def job_of_ours(machine):
    """A job of two nodes that is preempted and goes on as a whole."""
    return saved_together(machine, *of_ours(machine), lambda _: "")


@case("nodes.job.nccl", simulated=False, needs=NEEDS + ("two gpus", "root", "criu"))
def job_of_nccl(machine):
    """The same with PyTorch and NCCL."""
    version = require_torch(machine)
    return {**saved_together(machine, *of_nccl(256), lambda number: f".{number}"), "torch": version}


@case("nodes.collective", needs=NEEDS + ("program stasis-workload", "two gpus", "root", "criu"))
def collective(machine):
    """Ranks of ours, by the tools of both nodes."""
    command, env = of_ours(machine)
    job = Job(machine, lambda number, name: under_agent(machine, True, command(number, name)), env, lambda _: "")
    cycles = 3 if machine.simulated else CYCLES
    figures = there_and_back(machine, job, cycles)
    expect(all(all(pair) for pair in figures["direct_bytes"]), "the direct path was not taken")
    return told(figures, job, cycles, 1 if machine.simulated else DUMPS)


def nccl(machine, agent):
    version = require_torch(machine)
    command, env = of_nccl(16)
    job = Job(machine, lambda number, name: under_agent(machine, agent, command(number, name)), env,
              lambda number: f".{number}")
    for node in job.nodes:
        expect("via NET/Socket" in node.target.output(), f"{node.name}: NCCL does not say that it uses sockets")
    figures = there_and_back(machine, job, CYCLES)
    figures["torch"] = version
    if agent:
        expect(all(all(pair) for pair in figures["direct_bytes"]), "the direct path was not taken")
    return told(figures, job, CYCLES, DUMPS if agent else 0)


@case("nodes.nccl", simulated=False, needs=NEEDS + ("two gpus", "root", "criu"))
def by_agent(machine):
    """PyTorch on each node under `stasis run`, NCCL over sockets between them: every sum right."""
    return nccl(machine, True)


@case("nodes.nccl.driver", simulated=False, needs=NEEDS + ("two gpus", "root", "criu"))
def by_driver(machine):
    """The same without the agent."""
    return nccl(machine, False)
