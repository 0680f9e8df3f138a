"""What `stasis doctor` says of this machine and of programs that are known to be fit for a dump."""

from . import case_torch
from .case_workloads import start
from .core import case, expect, expect_equal

NEEDS = ("program stasis", "program stasis-workload", "criu", "root")


def reds(findings):
    return [f"{found['id']}: {found['what']}" for found in findings if found["light"] == "red"]


@case("doctor.machine", needs=NEEDS)
def this_machine(machine):
    """Each GPU is tried; nothing of the trial is left."""
    before = machine.gpu_memory()
    done = machine.stasis("doctor", "--json", "--criu", machine.criu_path, timeout=120)
    found = done.json()["machine"]
    expect_equal(reds(found), [], "red")
    trials = [one["what"] for one in found if one["id"].startswith("trial")]
    expect_equal(len(trials), len(machine.gpus()), "GPUs tried")
    machine.expect_gpu_free(before)
    yellow = [one["id"] for one in found if one["light"] == "yellow"]
    return {"trials": trials, "yellow": yellow, "seconds": done.seconds, "note": trials[0][-110:]}


@case("doctor.processes", needs=NEEDS)
def processes(machine):
    """Nothing red about what can be dumped: a red makes a dump refuse it."""
    for kind in ("memory", "pinned", "threads", "contexts", "tree", "loader"):
        target = start(machine, kind)
        found = machine.stasis("doctor", target.pid, "--no-trial", "--json").json()["processes"]
        expect_equal(reds(found), [], kind)
        expect(any(one["id"] == "cuda-state" for one in found), f"{kind}: no word of CUDA")
        target.finish()
    return {"note": "six workloads, nothing red"}


@case("doctor.torch", simulated=False, needs=NEEDS)
def torch(machine):
    """PyTorch training with a data loader's workers."""
    case_torch.require_torch(machine)
    target = case_torch.start(machine, "doctor", "--workers", "4")
    case_torch.wait_step(target, 5)
    found = machine.stasis("doctor", target.pid, "--no-trial", "--json").json()["processes"]
    expect_equal(reds(found), [], "red")
    target.kill()
    return {"findings": found, "note": f"{len(found)} findings, nothing red"}
