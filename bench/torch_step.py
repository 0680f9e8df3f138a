#!/usr/bin/env python3
"""What a PyTorch training step costs under the agent, against the same without: pairs of runs, one after the
other, of which each gives the median of its steps. Prints one JSON object. Needs PyTorch and a GPU."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

WARM_UP = 20


def measure(steps, width, batch):
    """Adam, one parameter after the other: some 1500 launches a step."""
    import torch  # pylint: disable=import-outside-toplevel

    torch.manual_seed(1)
    blocks = [layer for _ in range(24) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*blocks).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    inputs = torch.randn(batch, width, device="cuda")
    seconds = []
    for step in range(WARM_UP + steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    print(json.dumps({"median": statistics.median(seconds), "mib": torch.cuda.max_memory_allocated() >> 20}))


def run(options, *before):
    words = [*before, sys.executable, os.path.abspath(__file__), "--measure", "--steps", str(options.steps),
             "--width", str(options.width), "--batch", str(options.batch)]
    said = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    return json.loads(said.stdout)["median"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":", maxsplit=1)[0])
    parser.add_argument("--stasis", help="the program, for `stasis run`")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=4096,
                        help="of the layers: with 1024 the calls count more than what the GPU computes")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--measure", action="store_true", help="one run, here")
    options = parser.parse_args()
    if options.measure:
        measure(options.steps, options.width, options.batch)
        return
    if not options.stasis:
        parser.error("--stasis is needed")
    pairs = []
    for number in range(options.pairs):
        # In turn, so that what changes slowly meets both.
        both = {}
        for name in ("without", "with") if number % 2 == 0 else ("with", "without"):
            both[name] = run(options, *([options.stasis, "run", "--"] if name == "with" else []))
        pairs.append(both)
    ratios = [pair["with"] / pair["without"] for pair in pairs]
    print(json.dumps({"steps": options.steps, "width": options.width, "batch": options.batch, "pairs": pairs, "ratios": ratios, "ratio": statistics.median(ratios)},
                     indent=1))


if __name__ == "__main__":
    main()
