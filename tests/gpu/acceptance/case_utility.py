"""cuda-checkpoint, our drop-in: each observed behaviour of NVIDIA's utility, and the same command
given to NVIDIA's own where it is installed."""

import os
import re
import shutil

from .core import Failure, Skip, case, expect

OS_CALL = '"OS call failed or operation not supported on this OS"'
INIT = '"initialization error"'
STATE = '"the operation cannot be performed in the present state"'
ASKING = "Error getting process state for process ID {}: "


class Row:
    """One command. In `args`, `err` and `out`: {P} a CUDA process, {S} one without CUDA, {Z} a zombie,
    {D} a number that no process has, {T} a thread of P, {L} P's number plus 2^32."""

    def __init__(self, name, args, out="", err="", status=1, state="running", line=0, after=None,
                 same=True, subject="idle", help_follows=False):
        self.name = name
        self.args = args
        self.out = out  # a regular expression for all of standard output
        self.err = err  # the exact line number `line` of standard error; None: any, but some
        self.status = status
        self.state = state  # P's, before
        self.line = line
        self.after = after or state  # P's, afterwards
        self.same = same  # NVIDIA's utility has to say the same
        self.subject = subject  # the kind of workload that P is
        self.help_follows = help_follows


def usage(name, args, err, **more):
    return Row(name, args, err=err, help_follows=True, **more)


ROWS = [
    usage("nothing", [], "No operation selected"),
    usage("pid_alone", ["--pid", "{P}"], "No operation selected"),
    Row("help", ["--help"], out=r"CUDA checkpoint and restore utility\.\nVersion .*", status=0),
    Row("help_short", ["-h"], out=r"CUDA checkpoint and restore utility\.\nVersion .*", status=0),
    usage("get_state_without_pid", ["--get-state"], "Missing pid to perform operation on"),
    usage("toggle_without_pid", ["--toggle"], "Missing pid to perform operation on"),
    usage("action_swallows_pid", ["--action", "--pid", "{P}"], "Missing pid to perform operation on"),
    usage("pid_not_a_number", ["--get-state", "--pid", "x"], "pid must be a non-negative integer"),
    usage("pid_negative", ["--get-state", "--pid", "-5"], "pid must be a non-negative integer"),
    Row("pid_too_large", ["--get-state", "--pid", "{L}"], err=None, same=False),
    Row("pid_zero", ["--get-state", "--pid", "0"], err=ASKING.format(0) + OS_CALL),
    Row("state_of_no_process", ["--get-state", "--pid", "{D}"], err=ASKING.format("{D}") + OS_CALL),
    Row("state_without_cuda", ["--get-state", "--pid", "{S}"], err=ASKING.format("{S}") + INIT),
    Row("state_of_zombie", ["--get-state", "--pid", "{Z}"], err=ASKING.format("{Z}") + INIT),
    Row("state_running", ["--get-state", "--pid", "{P}"], out="running\n", status=0),
    Row("state_locked", ["--get-state", "--pid", "{P}"], out="locked\n", status=0, state="locked"),
    Row("state_checkpointed", ["--get-state", "--pid", "{P}"], out="checkpointed\n", status=0,
        state="checkpointed"),
    Row("pid_with_equals", ["--get-state", "--pid={P}"], out="running\n", status=0),
    Row("pid_short", ["--get-state", "-p", "{P}"], out="running\n", status=0),
    Row("pid_short_joined", ["--get-state", "-p{P}"], out="running\n", status=0),
    Row("abbreviated", ["--get-s", "--pi", "{P}"], out="running\n", status=0),
    Row("extra_words", ["--get-state", "--pid", "{P}", "extra", "words"], out="running\n", status=0),
    Row("last_pid_counts", ["--get-state", "--pid", "{D}", "--pid", "{P}"], out="running\n", status=0),
    Row("thread_id", ["--get-state", "--pid", "{T}"], err=None, same=False),
    Row("restore_tid", ["--get-restore-tid", "--pid", "{P}"], out=r"\d+\n", status=0),
    Row("restore_tid_without_cuda", ["--get-restore-tid", "--pid", "{S}"],
        err="Could not find restore thread for process ID {S}"),
    Row("restore_tid_of_no_process", ["--get-restore-tid", "--pid", "{D}"],
        err="Could not find restore thread for process ID {D}"),
    usage("two_operations", ["--toggle", "--get-state", "--pid", "{P}"],
          "Too many operations selected"),
    usage("action_unknown", ["--action", "fly", "--pid", "{P}"], "Invalid process state"),
    Row("lock", ["--action", "lock", "--pid", "{P}"], status=0, after="locked"),
    Row("lock_timeout_given", ["--action", "lock", "--pid", "{P}", "--timeout", "5000"], status=0,
        after="locked"),
    Row("checkpoint", ["--action", "checkpoint", "--pid", "{P}"], status=0, state="locked",
        after="checkpointed"),
    Row("restore", ["--action", "restore", "--pid", "{P}"], status=0, state="checkpointed",
        after="locked"),
    Row("unlock", ["--action", "unlock", "--pid", "{P}"], status=0, state="locked", after="running"),
    Row("toggle_running", ["--toggle", "--pid", "{P}"], status=0, after="checkpointed"),
    Row("toggle_checkpointed", ["--toggle", "--pid", "{P}"], status=0, state="checkpointed",
        after="running"),
    Row("lock_locked", ["--action", "lock", "--pid", "{P}"], state="locked",
        err="Could not lock on process ID {P}: " + STATE),
    Row("lock_checkpointed", ["--action", "lock", "--pid", "{P}"], state="checkpointed",
        err="Could not lock on process ID {P}: " + STATE),
    Row("checkpoint_running", ["--action", "checkpoint", "--pid", "{P}"],
        err="Could not checkpoint on process ID {P}: " + STATE),
    Row("restore_running", ["--action", "restore", "--pid", "{P}"],
        err="Could not restore on process ID {P}: " + STATE),
    Row("unlock_running", ["--action", "unlock", "--pid", "{P}"],
        err="Could not unlock on process ID {P}: " + STATE),
    Row("unlock_checkpointed", ["--action", "unlock", "--pid", "{P}"], state="checkpointed",
        err="Could not unlock on process ID {P}: " + STATE),
    Row("lock_without_cuda", ["--action", "lock", "--pid", "{S}"],
        err="Could not lock on process ID {S}: " + INIT),
    Row("lock_times_out", ["--action", "lock", "--pid", "{P}", "--timeout", "200"], subject="spin",
        err='Could not lock on process ID {P}: "device not ready"'),
    Row("checkpoint_managed", ["--action", "checkpoint", "--pid", "{P}"], subject="managed",
        state="locked", err='Could not checkpoint on process ID {P}: "operation not supported"'),
    Row("toggle_locked", ["--toggle", "--pid", "{P}"], state="locked",
        err="Error toggling CUDA in process ID {P}: " + STATE),
    Row("toggle_without_cuda", ["--toggle", "--pid", "{S}"],
        err="Error toggling CUDA in process ID {S}: " + INIT),
    usage("map_not_uuids", ["--action", "restore", "--pid", "{P}", "-d", "x=y"],
          "Invalid device remap", state="checkpointed"),
    usage("map_empty", ["--action", "restore", "--pid", "{P}", "-d", ""], "Invalid device remap",
          state="checkpointed"),
    Row("map_unknown_gpu",
        ["--action", "restore", "--pid", "{P}", "-d",
         "GPU-00000000-0000-0000-0000-000000000001=GPU-00000000-0000-0000-0000-000000000002"],
        err='Could not restore on process ID {P}: "invalid argument"', state="checkpointed"),
    Row("map_identity", ["--action", "restore", "--pid", "{P}", "-d", "{MAP}"], status=0,
        state="checkpointed", after="locked"),
    usage("map_without_restore", ["--action", "lock", "--pid", "{P}", "--device-map", "{MAP}"],
          "Device remap only allowed for restore action"),
    usage("timeout_without_lock", ["--action", "checkpoint", "--pid", "{P}", "--timeout", "5"],
          "Timeout is only valid for --action lock operation"),
    Row("timeout_not_a_number", ["--action", "lock", "--pid", "{P}", "-t", "x"], err=None, same=False),
    usage("unknown_option", ["--fly"],
          "Invalid option(s) or option(s) not supported by this CUDA Driver", line=1),
]


class Subjects:
    """The processes that a row is about."""

    def __init__(self, machine, row):
        self.machine = machine
        uses = " ".join(row.args)
        self.words = {"D": self._dead()}
        self.cuda = None
        if "{P}" in uses or "{T}" in uses or "{L}" in uses:
            self.cuda = self._cuda(row.subject)
            pid = self.cuda.pid
            self.words["P"] = pid
            self.words["L"] = pid + 2**32
            self.words["T"] = max(int(t) for t in os.listdir(f"/proc/{pid}/task"))
        if "{S}" in uses:
            plain = machine.share("plain", lambda: machine.workload("none", name="plain"))
            plain.wait_rounds(1)
            self.words["S"] = plain.pid
        if "{Z}" in uses:
            zombie = machine.workload("none", "--rounds", "1", name="zombie")
            os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
            self.words["Z"] = zombie.pid
        uuids = [gpu["uuid"] for gpu in machine.gpus()]
        self.words["MAP"] = ",".join(f"{uuid}={uuid}" for uuid in uuids)

    def _cuda(self, kind):
        machine = self.machine
        if kind == "idle":
            target = machine.share("cuda", lambda: machine.workload("idle", name="cuda"))
        else:
            options = ["--busy-ms", "10000", "--pause-ms", "0"] if kind == "spin" else []
            target = machine.workload(kind, *options, name=kind)
        target.wait_rounds(1)
        return target

    @staticmethod
    def _dead():
        with open("/proc/sys/kernel/pid_max", encoding="ascii") as file:
            number = int(file.read()) - 1
        while os.path.exists(f"/proc/{number}"):
            number -= 1
        return number

    def bring(self, state):
        """P into that state, by the driver's own calls."""
        steps = {
            ("running", "locked"): ["lock"],
            ("running", "checkpointed"): ["lock", "checkpoint"],
            ("locked", "running"): ["unlock"],
            ("locked", "checkpointed"): ["checkpoint"],
            ("checkpointed", "locked"): ["init", "restore"],
            ("checkpointed", "running"): ["init", "restore", "unlock"],
        }
        if self.cuda is None:
            return
        now = self.machine.state(self.cuda.pid)
        if now != state:
            done = self.machine.driver(self.cuda.pid, *steps[(now, state)], timeout_ms=20000)
            if done[-1]["result"] != 0:
                raise Failure(f"the driver refused to bring the process to {state}: {done[-1]}")


def run_row(machine, row, program):
    """Runs one row. Returns the command, the state it left, and what the words stood for."""
    subjects = Subjects(machine, row)
    subjects.bring(row.state)
    args = [substitute(word, subjects.words) for word in row.args]
    finished = machine.run(program, *args, timeout=60)
    after = machine.state(subjects.cuda.pid) if subjects.cuda else None
    rounds_go_on(machine, subjects)
    return finished, after, subjects.words


def substitute(text, words):
    for name, value in words.items():
        text = text.replace("{" + name + "}", str(value))
    return text


def rounds_go_on(machine, subjects):
    """Whatever the command did, the target must be able to go on and be right."""
    if subjects.cuda is None:
        return
    subjects.bring("running")
    subjects.cuda.wait_rounds(1)


def judge(row, finished, after, words):
    """What is wrong with ours, as a list of sentences."""
    faults = []
    if finished.status != row.status:
        faults.append(f"exit status {finished.status} instead of {row.status}")
    if not re.fullmatch(substitute(row.out, words), finished.out, re.S):
        faults.append(f"standard output {finished.out[:80]!r}")
    lines = finished.error_lines()
    if row.status == 0 and not row.err:
        pass  # a success may warn (simulated GPU)
    elif row.err is None:
        if not lines:
            faults.append("no word on standard error")
    else:
        wanted = substitute(row.err, words)
        found = lines[row.line] if len(lines) > row.line else ""
        if found != wanted:
            faults.append(f"{found!r} instead of {wanted!r}")
    if row.help_follows and (len(lines) < row.line + 4 or lines[row.line + 1] != ""):
        faults.append("no help after an empty line")
    if after is not None and after != row.after:
        faults.append(f"left the process {after} instead of {row.after}")
    return faults


def nvidias(machine):
    """NVIDIA's own utility, None if it is not installed."""
    if machine.simulated:
        return None
    ours = os.path.realpath(machine.program("cuda-checkpoint"))
    places = [os.path.join(folder, "cuda-checkpoint")
              for folder in os.environ.get("PATH", "").split(":") + ["/usr/bin", "/usr/local/nvidia/bin"]]
    for place in places:
        if os.access(place, os.X_OK) and os.path.realpath(place) != ours:
            return place
    return None


def check_row(machine, row):
    if row.subject == "managed" and machine.simulated:
        probe = machine.run(machine.program("stasis-workload"), "managed", "--rounds", "1")
        if probe.status != 0:
            raise Skip(probe.first_error())
    finished, after, words = run_row(machine, row, machine.program("cuda-checkpoint"))
    faults = judge(row, finished, after, words)
    expect(not faults, f"{'; '.join(faults)}: {' '.join(row.args)}")
    theirs = nvidias(machine)
    if theirs is None:
        return {"note": "as recorded; NVIDIA's utility is not here to compare"}
    if not row.same:
        return {"note": "refused; NVIDIA's accepts it, on purpose not compared"}
    for target in machine.targets:
        target.kill()
    machine.targets = []
    other, other_after, other_words = run_row(machine, row, theirs)
    compare(row, finished, words, after, other, other_words, other_after)
    return {"note": "as recorded, and as NVIDIA's"}


def compare(row, ours, our_words, our_after, theirs, their_words, their_after):
    def plain(finished, words):
        """Without what may differ: numbers of processes, the program's path."""
        lines = finished.error_lines()
        line = lines[row.line] if len(lines) > row.line else ""
        out = finished.out if "help" not in row.name else "\n".join(finished.out.splitlines()[:1])
        for name in ("P", "S", "Z", "D"):
            if name in words:
                line = re.sub(rf"\b{words[name]}\b", "N", line)
        if row.name == "restore_tid":
            out = re.sub(r"\d+", "N", out)
        return finished.status, out, line if finished.status else ""

    mine, other = plain(ours, our_words), plain(theirs, their_words)
    if mine != other or our_after != their_after:
        raise Failure(f"ours {mine}, {our_after}; NVIDIA's {other}, {their_after}")


def register_rows():
    for row in ROWS:
        case(f"utility.{row.name}", needs=("program cuda-checkpoint", "program stasis-workload"))(
            lambda machine, row=row: check_row(machine, row))


register_rows()


@case("utility.not_permitted", needs=("root", "program cuda-checkpoint", "program stasis-workload"))
def not_permitted(machine):
    setpriv = shutil.which("setpriv")
    if not setpriv:
        raise Skip("no setpriv")
    target = machine.workload("idle")
    target.wait_rounds(2)
    finished = machine.run(setpriv, "--reuid=65534", "--regid=65534", "--clear-groups",
                           machine.program("cuda-checkpoint"), "--get-state", "--pid", target.pid)
    if finished.status in (126, 127):
        raise Skip("the other user cannot even start the program: the build is in a private folder")
    wanted = ASKING.format(target.pid) + OS_CALL
    expect(finished.status == 1 and finished.first_error() == wanted, finished.brief())
    return {"note": "as recorded"}
