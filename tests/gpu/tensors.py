#!/usr/bin/env python3
"""tensors.py STATUS [GPU [MIB]]: two processes hand each other tensors, in both directions.

The first sends a tensor on GPU 0, the second sends back one that is greater by one, on GPU (0 by default), of MIB
(32 by default); each has the other's open for a round, and reads it from a GPU of its own. Writes "round N ok" to STATUS, runs until SIGTERM, and ends with 3 if a tensor is wrong.
"""

import os
import signal
import sys
import time

import torch
import torch.multiprocessing as mp

COUNT = (int(sys.argv[3]) if len(sys.argv) > 3 else 32) << 17  # of 8 bytes each
STOP = []


def answer(questions, answers, gpu):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.cuda.set_device(gpu)
    while True:
        question = questions.get()
        if question is None:
            return
        number, tensor = question
        greater = tensor.to(f"cuda:{gpu}") + 1
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(gpu)
        answers.put((number, greater))
        del question, tensor


def main():
    signal.signal(signal.SIGTERM, lambda *_: STOP.append(1))
    gpu = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    mp.set_start_method("spawn")
    questions, answers = mp.Queue(), mp.Queue()
    other = mp.Process(target=answer, args=(questions, answers, gpu))
    other.start()
    torch.cuda.set_device(0)
    base = torch.arange(COUNT, device="cuda", dtype=torch.int64)
    record = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    number = 0
    kept = None
    while not STOP:
        number += 1
        sent = base + number
        questions.put((number, sent))
        got, greater = answers.get(timeout=300)
        wrong = int((greater.to("cuda:0") != base + number + 1).sum())
        if wrong or got != number:
            print(f"round {number}: {wrong} of {COUNT} numbers are wrong", flush=True)
            return 3
        kept = (sent, greater)
        os.pwrite(record, b"round %010d ok\n" % number, 0)
        time.sleep(0.05)
    del kept
    questions.put(None)
    other.join()
    print(f"verified {number} rounds", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
