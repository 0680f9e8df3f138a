#!/usr/bin/env python3
"""PyTorch with much pinned memory, and a loader whose workers inherit it: verifies all of it in each round.

    pinned.py STATUS GIB

Writes "round N ok" to STATUS. Ends with 1, and says what is wrong, if anything is not as it was left; SIGTERM ends it.
"""

import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

ROWS = 1 << 27  # of 8 bytes: a GiB
WIDTH = 1 << 16
BATCH = 16


class Numbers(Dataset):
    """Of item i all values are i % 1000."""

    def __len__(self):
        return 1 << 30

    def __getitem__(self, item):
        return torch.full((WIDTH,), float(item % 1000))


class Pinned:
    """A GiB of numbers that follow each other, some of them one more since: which is known of each word."""

    def __init__(self, first):
        self.first = first
        self.more = {}
        self.memory = torch.arange(first, first + ROWS, dtype=torch.int64).pin_memory()

    def check(self):
        wanted = torch.arange(self.first, self.first + ROWS, dtype=torch.int64, device="cuda")
        for row, more in self.more.items():
            wanted[row] += more
        if not torch.equal(self.memory.cuda(), wanted):
            sys.exit(f"pinned memory of {self.first} is not as it was left")

    def write(self, row):
        self.memory[row] += 1
        self.more[row] = self.more.get(row, 0) + 1


def main():
    status, gib = sys.argv[1], int(sys.argv[2])
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    pinned = [Pinned(number * ROWS) for number in range(gib)]
    torch.cuda.init()
    # The workers are forked now, with all that is pinned.
    loader = iter(DataLoader(Numbers(), batch_size=BATCH, num_workers=2, pin_memory=True, persistent_workers=True))
    number = 0
    while not ended:
        number += 1
        for one in pinned:
            one.check()
        wanted = torch.tensor([float(item % 1000) for item in range((number - 1) * BATCH, number * BATCH)])
        if not bool((next(loader).cuda() == wanted.cuda()[:, None]).all()):
            sys.exit(f"batch {number} is wrong")
        pinned[number % gib].write(number * 7919 % ROWS)
        with open(status, "r+" if number > 1 else "w", encoding="ascii") as file:
            file.write(f"round {number:08d} ok\n")
        time.sleep(0.05)
    print(f"verified {number} rounds", flush=True)


if __name__ == "__main__":
    main()
