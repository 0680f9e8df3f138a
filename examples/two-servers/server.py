#!/usr/bin/env python3
"""An inference server as small as can be: a PyTorch model on a GPU, asked by UDP.

Prints `listening on 127.0.0.1:PORT`. Each packet is one request; the answer is its number, and what the
model says to it: the same for the same request, as long as no weight is lost.
"""

import argparse
import socket

import torch


def load(gib, width=4096):
    """A model that fills so many GiB with its weights."""
    torch.manual_seed(7)
    layers = max(1, int(gib * 2**30 / (4 * width * width)))
    with torch.device("cuda"):
        return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--gib", type=float, default=8)
    arguments = parser.parse_args()
    model = load(arguments.gib)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", arguments.port))
    print(f"listening on 127.0.0.1:{server.getsockname()[1]}", flush=True)
    count = 0
    while True:
        packet, peer = server.recvfrom(2048)
        count += 1
        with torch.inference_mode():
            request = torch.full((1, 4096), float(len(packet)), device="cuda")
            said = model(request).abs().mean().item()
        server.sendto(f"{count} {said:.6e}\n".encode(), peer)


if __name__ == "__main__":
    main()
