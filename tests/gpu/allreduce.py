#!/usr/bin/env python3
"""A job of several ranks that sum over NCCL, round after round, and check every sum.

The parent starts the ranks, one on each GPU, and ends when they end. Each rank writes "round N ok" to
STATUS.RANK, the parent the least of them to STATUS. Runs until SIGTERM or --rounds. A sum that is
wrong ends the job with status 1. With --all-calls there are other collectives and communicators besides.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

STOP = []
PART = 1 << 27  # 64-bit words, one GiB


class Others:
    """All-gather, reduce-scatter, send and receive in each round, and a communicator for ten rounds each."""

    def __init__(self, torch, dist, rank, ranks):
        self.torch, self.dist, self.rank, self.ranks = torch, dist, rank, ranks
        self.group = None

    def right(self, number):
        torch, dist = self.torch, self.dist
        mine = torch.full((1 << 16,), self.rank * 1000003 + number, device="cuda", dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(gathered, mine)
        came = torch.empty_like(mine)
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, came, before)]):
            work.wait()
        part = torch.empty_like(mine)
        dist.reduce_scatter_tensor(part, torch.cat([mine + place for place in range(self.ranks)]))
        if number % 10 == 1:
            if self.group:
                dist.destroy_process_group(self.group)
            self.group = dist.new_group(list(range(self.ranks)))
        total = mine.clone()
        dist.all_reduce(total, group=self.group)
        wanted = [rank * 1000003 + number for rank in range(self.ranks)]
        return (all(bool((one == want).all()) for one, want in zip(gathered, wanted))
                and bool((came == wanted[before]).all())
                and bool((part == sum(wanted) + self.ranks * self.rank).all()) and bool((total == sum(wanted)).all()))


def rank_main(options, rank):
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank if options.device is None else options.device)
    dist.init_process_group("nccl", init_method=options.init or "file://" + options.status + ".store",
                            rank=rank, world_size=options.ranks)
    count = options.mib << 18
    others = Others(torch, dist, rank, options.ranks) if options.all_calls else None
    # In parts: PyTorch counts wrong in one with more than 2^32 words.
    kept = [torch.arange(at, at + PART, device="cuda") for at in range(0, options.gib << 27, PART)]
    base = torch.arange(count, device="cuda", dtype=torch.int64) % 1009
    stop = torch.zeros(1, device="cuda", dtype=torch.int64)
    record = os.open(f"{options.status}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    number = 0
    while True:
        number += 1
        value = base * (rank + 1) + number
        dist.all_reduce(value)
        wanted = base * (options.ranks * (options.ranks + 1) // 2) + number * options.ranks
        wrong = int((value != wanted).sum())
        if wrong:
            print(f"rank {rank}, round {number}: {wrong} of {count} sums are wrong", flush=True)
            return 1
        if others and not others.right(number):
            print(f"rank {rank}, round {number}: another collective is wrong", flush=True)
            return 1
        os.pwrite(record, b"round %010d ok\n" % number, 0)
        # All ranks stop after the same round.
        stop.fill_(1 if STOP or number == options.rounds else 0)
        dist.all_reduce(stop)
        if int(stop):
            break
        if options.pause_ms:
            time.sleep(options.pause_ms / 1000)
    for at, part in enumerate(kept):
        wrong = int((part != torch.arange(at * PART, (at + 1) * PART, device="cuda")).sum())
        if wrong:
            print(f"rank {rank}: {wrong} words of part {at} of what it kept are wrong", flush=True)
            return 1
    print(f"rank {rank} verified {number} rounds", flush=True)
    dist.destroy_process_group()
    return 0


def least_round(options):
    rounds = []
    for rank in range(options.ranks):
        try:
            with open(f"{options.status}.{rank}", encoding="ascii") as file:
                rounds.append(int((file.read().split() or ["", "0"])[1]))
        except OSError:
            rounds.append(0)
    return min(rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--status", required=True, help="prefix of the files that are written")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64, help="of 32-bit words, twice that in memory")
    parser.add_argument("--gib", type=int, default=0, help="of memory besides, looked at in the end")
    parser.add_argument("--all-calls", action="store_true", help="other collectives and communicators besides")
    parser.add_argument("--rounds", type=int, default=0, help="0: until SIGTERM")
    parser.add_argument("--pause-ms", type=float, default=0, help="after each round")
    parser.add_argument("--rank", type=int, help="be this rank (the parent sets it, or who starts ranks on nodes)")
    parser.add_argument("--init", help="where the ranks meet, as PyTorch says it (default: a file)")
    parser.add_argument("--one-gpu-each", action="store_true", help="a rank sees no GPU but its own, as under Slurm")
    parser.add_argument("--device", type=int, help="this rank's GPU (default: its number)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: STOP.append(1))
    if options.rank is not None:
        return rank_main(options, options.rank)
    def start(rank):
        own, env = [], None
        if options.one_gpu_each:
            own, env = ["--device", "0"], {**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)}
        return subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank), *own], env=env)

    ranks = [start(rank) for rank in range(options.ranks)]
    told = False
    record = os.open(options.status, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    while any(rank.poll() is None for rank in ranks):
        if STOP and not told:
            told = True
            for rank in ranks:
                rank.terminate()
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.kill()
        os.pwrite(record, b"round %010d ok\n" % least_round(options), 0)
        time.sleep(0.02)
    status = max(abs(rank.wait()) for rank in ranks)
    if status == 0:
        print(f"verified {least_round(options)} rounds", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
