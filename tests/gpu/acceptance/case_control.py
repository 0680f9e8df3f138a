"""Do the tests see damage? A suspended target's saved GPU memory is spoiled: the target must notice."""

import os
import re

from .case_workloads import start
from .core import Failure, Skip, case, expect

NEEDS = ("program stasis-raw-driver", "program stasis-workload", "root")
PAGE = 4096


def anonymous_mappings(pid):
    """[(start, end)] of private writable memory without a file, the largest first."""
    found = []
    with open(f"/proc/{pid}/maps", encoding="ascii", errors="replace") as file:
        for line in file:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *$", line)
            if match:
                found.append(tuple(int(part, 16) for part in match.groups()))
    return sorted(found, key=lambda pair: pair[0] - pair[1])


def bring_back(machine, target):
    """Restores and unlocks. A driver that refuses what was spoiled says nothing about our tests."""
    done = machine.driver(target.pid, "init", "restore", "unlock")
    if done[-1]["result"] != 0:
        raise Skip(f"the driver itself refuses the spoiled memory: {done[-1]['name']}")


def spoil_page(pid, address):
    """Flips one bit, in the middle of a page."""
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as file:
        file.seek(address + PAGE // 2)
        byte = file.read(1)
        file.seek(address + PAGE // 2)
        file.write(bytes([byte[0] ^ 0x10]))


@case("control.a_lost_bit_is_seen", needs=NEEDS)
def lost_bit(machine):
    """A bit flipped in each of 16 pages of the largest mapping, where the memory is kept."""
    target = start(machine, "memory")
    machine.driver(target.pid, "lock", "checkpoint")
    machine.expect_state(target.pid, "checkpointed")
    first, last = anonymous_mappings(target.pid)[0]
    pages = (last - first) // PAGE
    for number in range(16):
        spoil_page(target.pid, first + pages * (2 * number + 1) // 32 * PAGE)
    bring_back(machine, target)
    try:
        target.wait_ended(30)
    except Failure:
        raise Failure("the damage was not noticed: the verification is worth nothing") from None
    said = target.output()
    expect(target.exit_status == 1 and "MISMATCH" in said,
           f"status {target.exit_status}; it said: {said[-200:]}")
    return {"note": said.strip().splitlines()[-1][-90:]}


@case("control.a_repeated_round_is_seen", needs=NEEDS)
def repeated_round(machine):
    """The content of one round is put back a round later: old, but in itself whole."""
    if not machine.simulated:
        raise Skip("the real driver keeps the state of its own queues in the same memory")
    target = start(machine, "memory")

    def saved():
        machine.driver(target.pid, "lock", "checkpoint")
        machine.expect_state(target.pid, "checkpointed")
        return anonymous_mappings(target.pid)[0]

    first, last = saved()
    copy = os.path.join(machine.work, "old-memory")
    with open(f"/proc/{target.pid}/mem", "rb", buffering=0) as memory, open(copy, "wb") as file:
        memory.seek(first)
        for _ in range(first, last, 1 << 20):
            file.write(memory.read(min(1 << 20, last - memory.tell())))
    bring_back(machine, target)
    target.wait_rounds(2)
    first, again = saved()
    with open(f"/proc/{target.pid}/mem", "r+b", buffering=0) as memory, open(copy, "rb") as file:
        memory.seek(first)
        for piece in iter(lambda: file.read(1 << 20), b""):
            memory.write(piece[:max(0, again - memory.tell())])
    bring_back(machine, target)
    target.wait_ended(30)
    expect(target.exit_status == 1 and "MISMATCH" in target.output(),
           f"status {target.exit_status}; it said: {target.output()[-200:]}")
    return {"note": target.output().strip().splitlines()[-1][-90:]}
