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

WIDTH = 1 << 16
BATCH = 16


class Numbers(Dataset):
    """Of item i all values are i % 1000."""

    def __len__(self):
        return 1 << 30

    def __getitem__(self, item):
        return torch.full((WIDTH,), float(item % 1000))


def main():
    status, gib = sys.argv[1], int(sys.argv[2])
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    rows = 1 << 27
    pinned = [torch.arange(first, first + rows, dtype=torch.float64).pin_memory() for first in range(gib)]
    sums = [float(memory.sum()) for memory in pinned]
    gpu = torch.empty(rows, dtype=torch.float64, device="cuda")
    # The workers are forked now, with all that is pinned.
    loader = iter(DataLoader(Numbers(), batch_size=BATCH, num_workers=2, pin_memory=True, persistent_workers=True))
    number = 0
    while not ended:
        number += 1
        for which, memory in enumerate(pinned):
            gpu.copy_(memory, non_blocking=True)
            torch.cuda.synchronize()
            if abs(float(gpu.sum()) - sums[which]) > 1e-6 * sums[which] or not bool((gpu[-5:].cpu() == memory[-5:]).all()):
                sys.exit(f"pinned memory {which} is not as it was left")
        wanted = torch.tensor([float(item % 1000) for item in range((number - 1) * BATCH, number * BATCH)])
        if not bool((next(loader).cuda()[:, 7].cpu() == wanted).all()):
            sys.exit(f"batch {number} is wrong")
        pinned[number % gib][number % rows] += 1
        sums[number % gib] += 1
        with open(status, "r+" if number > 1 else "w", encoding="ascii") as file:
            file.write(f"round {number:08d} ok\n")
        time.sleep(0.05)
    print(f"verified {number} rounds", flush=True)


if __name__ == "__main__":
    main()
