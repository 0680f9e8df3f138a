#!/usr/bin/env python3
"""For the test of what unix sockets say of who is at their other end (SO_PEERCRED).

    peer_credentials.py namespace COMMAND...   runs it as root of a user namespace with 20000 users, where root
                                               without CAP_SYS_RESOURCE may dump those of another user
    peer_credentials.py meet FILE              a parent and its child have connected sockets
    peer_credentials.py serve FILE             listens as user 12345; in FILE is what one who connects sees
"""
import ctypes
import os
import socket
import struct
import sys
import time

CLONE_NEWUSER = 0x10000000
PR_SET_DUMPABLE = 4
SO_PEERCRED = 17
USER = 12345

kernel = ctypes.CDLL(None, use_errno=True)


def namespace(command):
    ready, told = os.pipe()
    mapped, done = os.pipe()
    root = os.getpid()
    if os.fork() == 0:
        os.read(ready, 1)
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{root}/{name}", "w", encoding="ascii") as file:
                file.write("0 0 20000")
        os.write(done, b"x")
        os._exit(0)
    if kernel.unshare(CLONE_NEWUSER) != 0:
        sys.exit("no user namespace")
    os.write(told, b"x")
    os.read(mapped, 1)
    os.wait()
    for fd in (ready, told, mapped, done):
        os.close(fd)
    os.execvp(command[0], command)


def serve(path):
    status = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    name = "\0" + path
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    kernel.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(7)
    pair = socket.socketpair()
    number = 0
    while pair:
        client = socket.socket(socket.AF_UNIX)
        client.connect(name)
        accepted, _ = listener.accept()
        pid, user, group = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, SO_PEERCRED, 12))
        number += 1
        os.pwrite(status, f"round {number:6} ok {pid == os.getpid()} {user:5} {group:5}\n".encode(), 0)
        client.close()
        accepted.close()
        time.sleep(0.02)


def meet(status):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + status)
    listener.listen(1)
    ends = [socket.socket(socket.AF_UNIX)]
    if os.fork() == 0:
        ends[0].connect("\0" + status)
    else:
        ends.append(listener.accept()[0])
        with open(status, "w", encoding="ascii") as file:
            file.write("round 1 ok\n")
    while ends:
        time.sleep(1)


{"meet": lambda: meet(sys.argv[2]), "namespace": lambda: namespace(sys.argv[2:]), "serve": lambda: serve(sys.argv[2])}[sys.argv[1]]()
