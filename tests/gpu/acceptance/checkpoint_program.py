# Not a program by itself: what is run after one of these lines, with the same output,
#   import stasis as checkpoint
#   from cuda.core import checkpoint
# as a program that was written for the one and runs on the other. Arguments: the number of a CUDA process,
# and the UUIDs of all GPUs in order.
import contextlib
import os
import sys

pid = int(sys.argv[1])
uuids = sys.argv[2:]
rotation = {uuids[i]: uuids[(i + 1) % len(uuids)] for i in range(len(uuids))}


def attempt(what, function, *arguments, **named):
    """Says how it ended: with what, or with which of Python's own exceptions."""
    try:
        print(what, "->", function(*arguments, **named))
    except (TypeError, ValueError, AttributeError) as error:
        kind = next(one for one in (TypeError, ValueError, AttributeError) if isinstance(error, one))
        print(what, "->", kind.__name__)
    except Exception as error:
        print(what, "-> an error", "with ILLEGAL_STATE" if "ILLEGAL_STATE" in str(error) else "")


for wrong in ("12", True, 0, -1, 1.5, None):
    attempt(f"Process({wrong!r})", checkpoint.Process, wrong)
process = checkpoint.Process(pid)
print("pid is", process.pid == pid)
attempt("pid = 5", setattr, process, "pid", 5)
attempt("a new attribute", setattr, process, "name", 5)
print("state:", process.state)
tid = process.restore_thread_id
print("restore thread:", type(tid).__name__, os.path.exists(f"/proc/{pid}/task/{tid}"))
for wrong in (-1, 1.5, True, "5"):
    attempt(f"lock({wrong!r})", process.lock, wrong)
for wrong in ("x", [("a", "b")], {uuids[0]: "not a uuid"}, {uuids[0]: 5}):
    attempt(f"restore({wrong!r})" if not isinstance(wrong, dict) else "restore(of no UUID)", process.restore, wrong)
attempt("unlock() while it runs", process.unlock)
attempt("checkpoint() while it runs", process.checkpoint)
attempt("state of no CUDA process", lambda: checkpoint.Process(os.getppid()).state)
for mapping in (None, {}, rotation, rotation):
    process.lock(timeout_ms=10000)
    print("lock:", process.state)
    attempt("lock() again", process.lock)
    process.checkpoint()
    print("checkpoint:", process.state)
    attempt("checkpoint() again", process.checkpoint)
    try:
        process.restore(gpu_mapping=mapping)
    except Exception:
        with contextlib.suppress(Exception):
            process.restore()
            process.unlock()
        raise
    print("restore:", process.state)
    process.unlock()
    print("unlock:", process.state)
process.lock()
print("lock without a limit:", process.state)
process.unlock()
print("and back:", process.state)
