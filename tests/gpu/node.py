#!/usr/bin/env python3
"""The first process of a "node": in namespaces of its own, with a host name and an address.

Starts the program in a session of its own once the interface is there, writes its number to a file,
passes SIGTERM on, and ends as it ends. What has its number when it was killed, as by a dump, is it too.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from acceptance import netlink  # noqa: E402

LIMIT = 30  # seconds for the interface to come


def reopen_streams():
    """They were opened in the mount namespace of before, in which CRIU would look for them in vain."""
    for stream, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_APPEND), (2, os.O_WRONLY | os.O_APPEND)):
        opened = os.open(os.readlink(f"/proc/self/fd/{stream}"), flags)
        os.dup2(opened, stream)
        os.close(opened)


def has(interface):
    return os.path.exists(f"/proc/sys/net/ipv4/conf/{interface}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--name", "--interface", "--address", "--pid-file"):
        parser.add_argument(name, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    reopen_streams()
    with open("/proc/sys/kernel/hostname", "w", encoding="ascii") as file:
        file.write(options.name)
    if options.interface != "lo":
        netlink.bring_up("lo")
    deadline = time.monotonic() + LIMIT
    while not has(options.interface):
        if time.monotonic() > deadline:
            sys.exit(f"no interface {options.interface} has come")
        time.sleep(0.02)
    netlink.add_address(options.interface, options.address)
    netlink.bring_up(options.interface)
    child = subprocess.Popen(options.command, start_new_session=True)

    def pass_on(*_):
        # The program ends by itself where a rank of the other node has told it to.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
    signal.signal(signal.SIGTERM, pass_on)
    with open(options.pid_file + ".new", "w", encoding="ascii") as file:
        file.write(str(child.pid))
    os.replace(options.pid_file + ".new", options.pid_file)
    # What is left of it is this process's own.
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            time.sleep(0.05)
            continue
        code = os.waitstatus_to_exitcode(status)
        if ended == child.pid and code != -signal.SIGKILL:
            return abs(code)


if __name__ == "__main__":
    sys.exit(main())
