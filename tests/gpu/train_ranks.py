#!/usr/bin/env python3
"""train_ranks.py KIND LOSSES STEPS: training on several GPUs, started by torchrun.

KIND: ddp or fsdp. Each rank writes "STEP LOSS" to LOSSES.RANK, the loss of all ranks as a hexadecimal
number, so that two runs can be compared in every bit. NCCL's defaults.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 2048
LAYERS = 16


def main():
    kind, losses, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(1234)
    torch.use_deterministic_algorithms(True)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).cuda()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel
        model = FullyShardedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator(device="cuda")
    generator.manual_seed(rank)
    with open(f"{losses}.{rank}", "w", encoding="ascii") as file:
        for step in range(1, steps + 1):
            batch = torch.randn(256, WIDTH, device="cuda", generator=generator)
            loss = (model(batch) - batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            file.write(f"{step} {total.item().hex()}\n")
            file.flush()
            time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()
    print("trained", flush=True)


if __name__ == "__main__":
    main()
