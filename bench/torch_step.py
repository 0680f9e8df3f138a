#!/usr/bin/env python3
"""What a PyTorch training step costs under the agent, against the same without: pairs of processes that
train in turn, a few steps each, and of each the median of its steps. Prints one JSON object. Needs PyTorch
and a GPU. On an H100 or H200 a step takes 20 to 40 ms, and five pairs some two minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

WARM_UP = 20
IN_A_ROW = 20  # steps of one before the other's turn
FIRST_OF_ROW = 2  # not counted: the GPU has just worked for the other


def train(options):
    """Transformer blocks in bfloat16, AdamW. Makes as many steps as it is asked for, and tells their times."""
    import torch  # pylint: disable=import-outside-toplevel

    torch.manual_seed(1)
    block = torch.nn.TransformerEncoderLayer(
        options.width, options.width // 128, 4 * options.width, dropout=0.0, activation="gelu", batch_first=True,
        norm_first=True)
    model = torch.nn.TransformerEncoder(block, options.layers, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(options.batch, options.sequence, options.width, device="cuda")

    def step():
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        step()
    print(json.dumps({"torch": torch.__version__, "gpu": torch.cuda.get_device_name(),
                      "mib": torch.cuda.max_memory_allocated() >> 20}), flush=True)
    for line in sys.stdin:
        print(json.dumps([step() for _ in range(int(line))]), flush=True)


class Training:
    def __init__(self, options, *before):
        words = [*before, sys.executable, os.path.abspath(__file__), "--train"]
        for name in ("layers", "width", "batch", "sequence"):
            words += [f"--{name}", str(getattr(options, name))]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self):
        said = self.process.stdout.readline()
        if not said:
            sys.exit(f"the training has ended with status {self.process.wait()}")
        return json.loads(said)

    def steps(self, count):
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def pairs_at_once(options, numbers):
    """What the program says of itself, and of each pair the medians of its steps. All are there from the beginning and
    take turns, so that what changes slowly meets all of them."""
    both = {"without": [], "with": [options.stasis, "run", "--"]}
    order = [(number, name) for number in numbers for name in both]
    trainings = {who: Training(options, *both[who[1]]) for who in order}
    about = {who: training.hear() for who, training in trainings.items()}
    seconds = {who: [] for who in order}
    while len(seconds[order[0]]) < options.steps:
        for who in order:
            seconds[who] += trainings[who].steps(FIRST_OF_ROW + IN_A_ROW)[FIRST_OF_ROW:]
        order.reverse()
    for training in trainings.values():
        training.end()
    medians = {who: statistics.median(values) for who, values in seconds.items()}
    return about[numbers[0], "with"], [{name: medians[number, name] for name in both} for number in numbers]


def differences(pairs):
    """How much longer a step takes under the agent, of the mean of all, and what chance alone does to that figure: the
    standard error, from how much processes of a kind differ among themselves."""
    kinds = {name: [medians[name] for medians in pairs] for name in ("without", "with")}
    without = statistics.mean(kinds["without"])
    found = {"difference": statistics.mean(kinds["with"]) / without - 1}
    if len(pairs) > 1:
        variance = sum(statistics.variance(values) for values in kinds.values()) / len(pairs)
        found["standard_error"] = variance ** 0.5 / without
        found["spread_without"] = (max(kinds["without"]) - min(kinds["without"])) / without
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":", maxsplit=1)[0])
    parser.add_argument("--stasis", help="the program, for `stasis run`")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=5, metavar="PAIRS",
                        help="so many of them side by side, each training with 6 GiB (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--train", action="store_true", help="one of the two, here")
    options = parser.parse_args()
    if options.train:
        train(options)
        return
    if not options.stasis:
        parser.error("--stasis is needed")
    start = time.monotonic()
    pairs = []
    for first in range(0, options.pairs, options.at_once):
        about, found = pairs_at_once(options, range(first, min(first + options.at_once, options.pairs)))
        for medians in found:
            pairs.append(medians)
            print(f"pair {len(pairs)}: {medians['without'] * 1e3:.2f} ms without, {medians['with'] * 1e3:.2f} ms with, "
                  f"{(medians['with'] / medians['without'] - 1) * 100:+.2f} %", file=sys.stderr, flush=True)
    ratios = [medians["with"] / medians["without"] for medians in pairs]
    shape = {name: getattr(options, name) for name in ("layers", "width", "batch", "sequence", "steps", "at_once")}
    print(json.dumps({**about, **shape, "pairs": pairs, "ratios": ratios, "ratio": statistics.median(ratios),
                      "lowest": min(ratios), "highest": max(ratios), **differences(pairs),
                      "seconds": time.monotonic() - start}, indent=1))


if __name__ == "__main__":
    main()
