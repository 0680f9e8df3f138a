#!/usr/bin/env python3
"""A PyTorch training loop whose losses can be compared: one line "step loss" per step, appended.

Seeds are fixed, algorithms deterministic, data drawn from the GPU's and the CPU's random generators,
so that a lost generator state shows in the loss as well as a lost weight. Losses are written exactly
(hexadecimal). Holds about --gib of GPU memory in weights, gradients and Adam's state. With --workers
the inputs come from a data loader's processes, as most training programs have them; with --graphs a
step is a CUDA graph, captured anew every now and then; with --compile PyTorch makes graphs by itself.
With --ddp it is one rank of those that torchrun starts, each with a GPU and with data of its own; the
first one's losses are written. Ends after --steps, or after the step under way at SIGTERM.
"""

import argparse
import os
import signal
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402

WIDTH = 4096
BATCH = 256
BYTES_PER_WEIGHT = 16  # weight, gradient, two moments, 4 bytes each
CAPTURE_EVERY = 40  # steps


class Inputs(torch.utils.data.Dataset):
    """Batch number N is the same whichever process makes it, and whenever."""

    def __init__(self, steps):
        self.steps = steps

    def __len__(self):
        return self.steps

    def __getitem__(self, number):
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))


def batches(options, device):
    if not options.workers:
        for _ in range(options.steps):
            yield torch.randn(BATCH, WIDTH, device=device)
        return
    loader = torch.utils.data.DataLoader(
        Inputs(options.steps), batch_size=None, num_workers=options.workers, pin_memory=True,
        multiprocessing_context=options.start_method)
    for batch in loader:
        yield batch.to(device, non_blocking=True)


class Step:
    """One step of training: gives the loss."""

    def __init__(self, model, optimizer, keeps_gradients=True):
        self.model = model
        self.optimizer = optimizer
        self.keeps_gradients = keeps_gradients

    def __call__(self, inputs, wanted):
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        return self.forward_and_back(inputs, wanted)

    def forward_and_back(self, inputs, wanted):
        loss = torch.nn.functional.mse_loss(self.model(inputs), wanted)
        loss.backward()
        self.optimizer.step()
        return loss


class GraphStep(Step):
    """The same as one CUDA graph, which works on memory of its own."""

    def __init__(self, model, optimizer, outputs, device):
        super().__init__(model, optimizer)
        self.inputs = torch.zeros(BATCH, WIDTH, device=device)
        self.wanted = torch.zeros(BATCH, outputs, device=device)
        self.steps = 0
        self.graph = self.loss = None
        # Libraries make what they need at their first call, which must not be in a graph.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.optimizer.zero_grad(set_to_none=True)
                self.forward_and_back(self.inputs, self.wanted)
        torch.cuda.current_stream().wait_stream(side)

    def capture(self):
        self.graph = self.loss = None  # its memory goes back first
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.forward_and_back(self.inputs, self.wanted)

    def __call__(self, inputs, wanted):
        if self.steps % CAPTURE_EVERY == 0:
            self.capture()
        self.steps += 1
        self.inputs.copy_(inputs)
        self.wanted.copy_(wanted)
        self.graph.replay()
        return self.loss


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", required=True, help="file to append to")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--pause-ms", type=float, default=0, help="after each step")
    parser.add_argument("--workers", type=int, default=0, help="processes of a data loader")
    parser.add_argument("--start-method", default="fork", help="how they start: fork, spawn, forkserver")
    parser.add_argument("--graphs", action="store_true", help="with torch.cuda.graph")
    parser.add_argument("--compile", action="store_true", help='with torch.compile(mode="reduce-overhead")')
    parser.add_argument("--ddp", action="store_true", help="with DistributedDataParallel, under torchrun")
    return parser.parse_args()


def one_of_many(options):
    """The device of this rank, and whether it is the first."""
    if not options.ddp:
        return torch.device("cuda"), True
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    return torch.device("cuda", rank), rank == 0


def main():
    options = parse()
    ending = []
    if not options.workers and not options.ddp:  # which would inherit it, or end each at another step
        signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    torch.manual_seed(20261121)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    device, first = one_of_many(options)
    layers = max(1, round(options.gib * 2**30 / BYTES_PER_WEIGHT / WIDTH**2))
    with torch.device(device):
        blocks = []
        for _ in range(layers):
            blocks += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.GELU()]
        model = torch.nn.Sequential(*blocks, torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, capturable=options.graphs or options.compile)
    teacher = torch.randn(WIDTH, 16, device=device)
    if options.ddp:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
        torch.manual_seed(20261121 + device.index)
    if options.graphs:
        train = GraphStep(model, optimizer, 16, device)
    else:
        compiled = torch.compile(model, mode="reduce-overhead") if options.compile else model
        # The graphs that PyTorch makes own the gradients, and replace them at each step.
        train = Step(compiled, optimizer, keeps_gradients=not options.compile)

    done = 0
    for step, inputs in enumerate(batches(options, device), start=1):
        noise = torch.randn(16) * 0.1  # the CPU's generator
        wanted = (inputs @ teacher / WIDTH**0.5) + noise.to(device)
        loss = train(inputs, wanted)
        if first:
            with open(options.losses, "a", encoding="ascii") as file:
                file.write(f"{step} {loss.item().hex()}\n")
        done = step
        if step == 1 and options.workers:  # they have begun, and do not inherit it
            signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
        if ending:
            break
        if options.pause_ms:
            time.sleep(options.pause_ms / 1000)
    if first:
        print(f"trained {done} steps, {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at most", flush=True)
    if options.ddp:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
