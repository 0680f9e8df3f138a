"""The page that the agent in a process keeps, from outside (include/abi/agent_protocol.h).

  agent_page.py PID state            prints it: 0 running, 1 closed, 2 evicted, 3 held, 4 filling
  agent_page.py PID precopied        fails unless a tool has the program's memory mapped while it runs
  agent_page.py PID idle             fails while it is at work for a tool
  agent_page.py PID closing MS       waits until it is closing its gate, and was given more than MS for that; fails after
                                     a minute
  agent_page.py PID stop-filling     stops the process (SIGSTOP) when it has taken its GPU memory again, without content
  agent_page.py PID kill-away TOOL.. runs TOOL and kills it when the program is held back for it; fails
                                     if it has come further by then
  agent_page.py PID prepare          asks for a buffer as a tool does, gets it, and dies
  agent_page.py PID forge            the same, and writes into the page that the buffer is the program's heap
  agent_page.py PID export FILE      has it hold the program back and export its memory, makes FILE, and
                                     dies when that is gone again
  agent_page.py PID keep FILE        the same, and it has given the memory up and keeps it alive
  agent_page.py PID go-on            has it hold the program back and let it go on, with its buffer and then without
  agent_page.py PID seals            prints the seals of the file
  agent_page.py PID version NUMBER   makes it say that it is of that version
  agent_page.py PID unheard FILE     makes it say that its thread has not run yet, makes FILE, and takes that back
                                     when that is gone again
  agent_page.py PID heard            fails while it says that
"""

import ctypes
import fcntl
import mmap
import os
import signal
import struct
import subprocess
import sys
import time

MAGIC, VERSION, REQUEST, REPLY, COMMAND, ARGUMENTS, RESULT = 0, 8, 24, 28, 32, 40, 72
COPIED_AHEAD = 56
STATE, BUFFER_ADDRESS, BUFFER_BYTES, EXPORTED_COUNT = 240, 256, 264, 276
RUNNING, CLOSED, EMPTIED, HELD, FILLING = range(5)
PREPARE, CLOSE, EXPORT, EMPTY, OPEN, KEEP = 1, 2, 3, 4, 9, 11
KEEP_BUFFER = 1
SYS_FUTEX, FUTEX_WAKE = 202, 1


def open_page(pid):
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        if "memfd:stasis-agent" in os.readlink(path):
            return os.open(path, os.O_RDWR)
    sys.exit(f"no agent in {pid}")


def number(page, offset, form="<I"):
    return struct.unpack_from(form, page, offset)[0]


def kill_away(page, tool):
    run = subprocess.Popen(tool, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while run.poll() is None:
        state = number(page, STATE)
        if state == HELD:
            run.wait()
        elif state in (CLOSED, EMPTIED):
            run.kill()
            run.wait()
            # Held in the meantime: then it is for `stasis recover`.
            return number(page, STATE) != HELD
    return False


def ask(page, command, argument=0):
    struct.pack_into("<I", page, COMMAND, command)
    struct.pack_into("<Q", page, ARGUMENTS, argument)
    mine = number(page, REQUEST) + 1
    struct.pack_into("<I", page, REQUEST, mine)
    word = ctypes.c_uint32.from_buffer(page, REQUEST)
    ctypes.CDLL(None).syscall(SYS_FUTEX, ctypes.byref(word), FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)
    while number(page, REPLY) != mine:
        time.sleep(0.01)
    return number(page, RESULT) == 0


def prepare(page):
    return ask(page, PREPARE) and number(page, BUFFER_BYTES, "<Q") > 0


def export(page, path, keeps):
    done = prepare(page) and ask(page, CLOSE, 10000) and (not keeps or ask(page, KEEP)) and ask(page, EXPORT)
    if not done or number(page, EXPORTED_COUNT) == 0:
        return False
    if keeps and (not ask(page, EMPTY) or number(page, STATE) != EMPTIED):
        return False
    with open(path, "x", encoding="ascii"):
        pass
    while os.path.exists(path):
        time.sleep(0.01)
    return True


def unheard(page, path):
    magic = number(page, MAGIC, "<Q")
    struct.pack_into("<Q", page, MAGIC, 0)
    with open(path, "x", encoding="ascii"):
        pass
    while os.path.exists(path):
        time.sleep(0.01)
    struct.pack_into("<Q", page, MAGIC, magic)


def go_on(page):
    if not prepare(page):
        return False
    buffer = page[BUFFER_ADDRESS:BUFFER_ADDRESS + 16]
    for argument, wanted in ((KEEP_BUFFER, buffer), (KEEP_BUFFER, buffer), (0, bytes(16))):
        if not ask(page, CLOSE, 10000) or number(page, STATE) != CLOSED or not ask(page, OPEN, argument):
            return False
        if number(page, STATE) != RUNNING or page[BUFFER_ADDRESS:BUFFER_ADDRESS + 16] != wanted:
            return False
    return True


def closing(page, more_than_ms):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        at_work = number(page, REQUEST) != number(page, REPLY)
        if at_work and number(page, COMMAND) == CLOSE and number(page, ARGUMENTS, "<Q") > more_than_ms:
            return True
        time.sleep(0.01)
    return False


def forge(page, pid):
    with open(f"/proc/{pid}/maps", encoding="ascii") as maps:
        begin, end = next(line for line in maps if "[heap]" in line).split()[0].split("-")
    struct.pack_into("<QQ", page, BUFFER_ADDRESS, int(begin, 16), int(end, 16) - int(begin, 16))


def main():
    file = open_page(int(sys.argv[1]))
    page = mmap.mmap(file, 0)
    what = sys.argv[2]
    if what == "idle":
        sys.exit(number(page, REQUEST) != number(page, REPLY))
    if what == "heard":
        sys.exit(number(page, MAGIC, "<Q") == 0)
    if what == "closing":
        sys.exit(0 if closing(page, int(sys.argv[3])) else 1)
    if what == "stop-filling":
        while number(page, STATE) != FILLING:
            pass
        os.kill(int(sys.argv[1]), signal.SIGSTOP)
    elif what == "state":
        print(number(page, STATE))
    elif what == "precopied":
        sys.exit(number(page, COPIED_AHEAD) not in (2, 3))
    elif what == "seals":
        print(fcntl.fcntl(file, fcntl.F_GET_SEALS))
    elif what == "unheard":
        unheard(page, sys.argv[3])
    elif what == "version":
        struct.pack_into("<I", page, VERSION, int(sys.argv[3]))
    elif what == "kill-away":
        sys.exit(0 if kill_away(page, sys.argv[3:]) else 1)
    elif what in ("prepare", "forge"):
        fcntl.flock(file, fcntl.LOCK_EX)
        if not prepare(page):
            sys.exit(1)
        if what == "forge":
            forge(page, sys.argv[1])
    elif what in ("export", "keep"):
        fcntl.flock(file, fcntl.LOCK_EX)
        sys.exit(0 if export(page, sys.argv[3], what == "keep") else 1)
    elif what == "go-on":
        fcntl.flock(file, fcntl.LOCK_EX)
        sys.exit(0 if go_on(page) else 1)


main()
