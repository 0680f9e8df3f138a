#!/usr/bin/env python3
"""events.py STATUS: two processes on a GPU wait for each other's work by events of CUDA IPC, in both directions.

In each round a process has the GPU wait, writes a number into memory that the other has open, and records its event; the
other has its stream wait for that event, and reads. Before the first round they read without waiting, which has to give
old numbers: otherwise nothing would show that the events work. Writes "round N ok" to STATUS, runs until SIGTERM, and ends
with 3 if a number is wrong.
"""

import os
import signal
import sys

import torch
import torch.multiprocessing as mp

COUNT = 1 << 20
CYCLES = 20_000_000  # some 10 ms
UNORDERED = 5
STOP = []


class Side:
    """A process's own memory and event, and the other's."""

    def __init__(self, there, back):
        self.there, self.back = there, back
        torch.cuda.set_device(0)
        self.own = torch.zeros(COUNT, device="cuda", dtype=torch.int64)
        self.event = torch.cuda.Event(interprocess=True)
        self.event.record()
        torch.cuda.synchronize()
        there.put((self.own, self.event.ipc_handle()))
        self.others, handle = back.get(timeout=120)
        self.others_event = torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), handle)

    def write(self, number):
        torch.cuda._sleep(CYCLES)
        self.own.fill_(number)
        self.event.record()
        self.there.put(number)

    def read(self, waits):
        """The number that was to be there, and whether all words are that."""
        number = self.back.get(timeout=300)
        if number is not None and waits:
            self.others_event.wait()
        return number, number is not None and bool((self.others == number).all())


def answer(there, back):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    side = Side(there, back)
    while True:
        number, right = side.read(waits=True)
        if number is None:
            return
        if not right:
            there.put(-number)
            return
        side.write(number)


def old_numbers(side):
    old = 0
    for number in range(1, UNORDERED + 1):
        side.write(number)
        old += not side.read(waits=False)[1]
        torch.cuda.synchronize()
        side.others_event.synchronize()
    return old


def main():
    signal.signal(signal.SIGTERM, lambda *_: STOP.append(1))
    mp.set_start_method("spawn")
    there, back = mp.Queue(), mp.Queue()
    other = mp.Process(target=answer, args=(back, there))
    other.start()
    side = Side(there, back)
    old = old_numbers(side)
    if not old:
        print("without waiting every number was there: this shows nothing", flush=True)
        return 4
    record = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    number = UNORDERED
    while not STOP:
        number += 1
        side.write(number)
        got, right = side.read(waits=True)
        if got != number or not right:
            print(f"round {number}: answered {got}, {'right' if right else 'wrong'}", flush=True)
            return 3
        os.pwrite(record, b"round %010d ok\n" % number, 0)
    there.put(None)
    other.join()
    print(f"without waiting {old} of {UNORDERED} numbers were old", flush=True)
    print(f"verified {number} rounds", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
