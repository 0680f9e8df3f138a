#!/usr/bin/env python3
"""Loops of JAX, CuPy, Numba and Transformers (also as a server) that verify themselves, round after round, until SIGTERM.

They behave as stasis-workload does (tests/workloads/README.md): a status file of one record, `verified N
rounds` at the end, status 1 at the first mismatch, and 77 with a reason where the package is missing.
"""

import argparse
import http.client
import http.server
import json
import os
import signal
import sys
import threading
import time

MASK = 2**64 - 1
RECORD = 64


class Mismatch(Exception):
    pass


def skip(reason):
    print(f"skipped: {reason}", flush=True)
    sys.exit(77)


class Status:
    """One record of fixed size, as CRIU wants it of an open file."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.write(0)

    def write(self, rounds):
        os.pwrite(self.fd, f"round {rounds} ok".ljust(RECORD - 1).encode() + b"\n", 0)


# --- JAX: the same training over and over, by the same program on the GPU, so every loss is known.

LAP = 25  # steps
WIDTH = 4096
BATCH = 256
BYTES_PER_WEIGHT = 12  # weight, two moments


def jax_training(layers):
    """Two compiled functions: the state at the start, and one step of Adam."""
    import jax  # pylint: disable=import-outside-toplevel,import-error
    from jax import numpy as jnp  # pylint: disable=import-outside-toplevel,import-error

    if jax.default_backend() != "gpu":
        skip(f"JAX {jax.__version__} sees no GPU")
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)

    @jax.jit
    def begin():
        keys = jax.random.split(jax.random.key(20261122), layers)
        weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
        return weights, [jnp.zeros_like(one) for one in weights], [jnp.zeros_like(one) for one in weights]

    def loss_of(weights, inputs, wanted):
        for one in weights:
            inputs = jnp.tanh(inputs @ one)
        return jnp.mean((inputs - wanted) ** 2)

    def step(state, number):
        weights, first, second = state
        key_inputs, key_noise = jax.random.split(jax.random.fold_in(jax.random.key(7), number))
        inputs = jax.random.normal(key_inputs, (BATCH, WIDTH))
        wanted = jnp.sin(inputs) + 0.1 * jax.random.normal(key_noise, (BATCH, WIDTH))
        loss, slopes = jax.value_and_grad(loss_of)(weights, inputs, wanted)
        first = [0.9 * old + 0.1 * slope for old, slope in zip(first, slopes)]
        second = [0.999 * old + 0.001 * slope**2 for old, slope in zip(second, slopes)]
        weights = [one - 1e-4 * mean / (jnp.sqrt(square) + 1e-8)
                   for one, mean, square in zip(weights, first, second)]
        return (weights, first, second), loss

    return begin, jax.jit(step, donate_argnums=0)


def jax_rounds(options):
    try:
        begin, step = jax_training(max(1, round(options.gib * 2**30 / BYTES_PER_WEIGHT / WIDTH**2)))
    except ImportError as reason:
        skip(f"no JAX: {reason}")
    known = []
    lap = 0
    while True:
        state = begin()
        for number in range(LAP):
            state, loss = step(state, number)
            found = float(loss).hex()
            if lap == 0:
                known.append(found)
            elif found != known[number]:
                raise Mismatch(f"lap {lap}, step {number}: the loss is {found} instead of {known[number]}")
            yield
        del state
        lap += 1
        if lap == 1 and len(set(known)) < LAP // 2:
            raise Mismatch(f"the losses do not change: {known}")


# --- CuPy: words that are changed by x * a + b; what their sums must be, the CPU knows.

class Words:
    def __init__(self, cupy, count, seed):
        self.cupy = cupy
        self.count = count
        self.index = cupy.arange(count, dtype=cupy.uint64)
        self.words = self.index * cupy.uint64(seed | 1)
        self.indices = count * (count - 1) // 2
        squares = (count - 1) * count * (2 * count - 1) // 6
        self.sum = self.indices * (seed | 1) & MASK
        self.weighted = squares * (seed | 1) & MASK  # each word times its index

    def change(self, a, b):
        self.words *= self.cupy.uint64(a)
        self.words += self.cupy.uint64(b)
        self.sum = (self.sum * a + self.count * b) & MASK
        self.weighted = (self.weighted * a + self.indices * b) & MASK

    def verify(self, name):
        found = int(self.words.sum()), int((self.words * self.index).sum())
        if found != (self.sum, self.weighted):
            raise Mismatch(f"{name} of {self.count} words: sums {found} instead of {(self.sum, self.weighted)}")


def cupy_rounds(options):
    try:
        import cupy  # pylint: disable=import-outside-toplevel,import-error
    except ImportError as reason:
        skip(f"no CuPy: {reason}")
    kind, give_back = "", lambda: cupy.cuda.get_allocator().__self__.free_all_blocks()
    if options.managed:
        cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)
        kind = ", managed memory"
    if options.stream_ordered:
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
        kind = ", stream-ordered memory"
        give_back = cupy.cuda.get_current_stream().synchronize
    print(f"CuPy {cupy.__version__}{kind}", flush=True)
    largest = int(options.gib * 2**30 / 16 / 6)  # words and indices, in eight pieces up to so many
    random = 1

    def next_random():
        nonlocal random
        random = (random * 6364136223846793005 + 1442695040888963407) & MASK
        return random >> 16

    def piece():
        return Words(cupy, largest // 8 + next_random() % largest, next_random())

    pieces = [piece() for _ in range(8)]
    side = 512 if options.gib < 0.5 else 4096
    matrix = cupy.sin(cupy.arange(side * side, dtype=cupy.float32)).reshape(side, side)
    product = None
    number = 0
    while True:
        number += 1
        a, b = next_random() | 1, next_random()
        for at, one in enumerate(pieces):
            one.change(a, b)
            one.verify(f"piece {at}")
        found = float((matrix @ matrix).sum()).hex()
        product = product or found
        if found != product:
            raise Mismatch(f"the sum of the product is {found} instead of {product}")
        pieces[number % 8] = None  # its memory first goes back to the pool
        if number % 5 == 0:
            give_back()
        pieces[number % 8] = piece()
        yield


# --- Numba: the same words, changed and summed by kernels that it compiles as the program starts.

def numba_kernels(cuda, uint64):
    """Compiled when first called: uint64 with a signed number would become a floating point number."""
    @cuda.jit
    def change(words, a, b):
        at = cuda.grid(1)
        if at < words.size:
            words[at] = words[at] * a + b

    @cuda.jit
    def sums(words, out):
        plain = uint64(0)
        weighted = uint64(0)
        for at in range(cuda.grid(1), words.size, cuda.gridsize(1)):
            plain += words[at]
            weighted += words[at] * uint64(at)
        cuda.atomic.add(out, 0, plain)
        cuda.atomic.add(out, 1, weighted)

    return change, sums


# What Numba looks for in NumPy when it first compiles, and NumPy 2 has given up.
GONE_FROM_NUMPY = {"row_stack": "vstack", "in1d": "isin", "trapz": "trapezoid"}


def numba_rounds(options):
    try:
        import numpy  # pylint: disable=import-outside-toplevel,import-error
        for old, new in GONE_FROM_NUMPY.items():
            if not hasattr(numpy, old):
                setattr(numpy, old, getattr(numpy, new))
        import numba  # pylint: disable=import-outside-toplevel,import-error
        from numba import cuda  # pylint: disable=import-outside-toplevel,import-error
        change, sums = numba_kernels(cuda, numba.uint64)
        change[1, 1](cuda.to_device(numpy.zeros(1, numpy.uint64)), numpy.uint64(1), numpy.uint64(0))
    except (ImportError, AttributeError) as reason:  # of another NumPy than it knows
        skip(f"no Numba: {reason}")
    print(f"Numba {numba.__version__}", flush=True)
    count = int(options.gib * 2**30 / 8 / 4)
    indices = count * (count - 1) // 2
    squares = (count - 1) * count * (2 * count - 1) // 6
    pieces = []
    random = 1
    number = 0
    while True:
        number += 1
        random = (random * 6364136223846793005 + 1442695040888963407) & MASK
        a, b = random | 1, random >> 7
        if len(pieces) == 4:
            pieces.pop(number % 4)  # its memory goes back to the driver
        while len(pieces) < 4:
            if options.managed:
                words = cuda.managed_array(count, dtype=numpy.uint64)
                words[:] = numpy.arange(count, dtype=numpy.uint64)
            else:
                words = cuda.to_device(numpy.arange(count, dtype=numpy.uint64))
            pieces.append([words, indices, squares])
        for at, piece in enumerate(pieces):
            words = piece[0]
            change[(count + 255) // 256, 256](words, numpy.uint64(a), numpy.uint64(b))
            piece[1] = (piece[1] * a + count * b) & MASK
            piece[2] = (piece[2] * a + indices * b) & MASK
            out = cuda.to_device(numpy.zeros(2, numpy.uint64))
            sums[264, 256](words, out)
            found = tuple(int(one) for one in out.copy_to_host())
            if found != (piece[1], piece[2]):
                raise Mismatch(f"piece {at} of {count} words: sums {found} instead of {(piece[1], piece[2])}")
            if options.managed and number % 4 == at:  # on the CPU
                plain = int(numpy.asarray(words).sum(dtype=numpy.uint64))
                if plain != piece[1]:
                    raise Mismatch(f"piece {at} of {count} words: the CPU's sum is {plain} instead of {piece[1]}")
        yield


# --- Transformers: a language model that answers the same prompts again and again, as a server would.

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 64, 48


def language_model(options):
    """The model, on the GPU, and its prompts."""
    try:
        import torch  # pylint: disable=import-outside-toplevel,import-error
        import transformers  # pylint: disable=import-outside-toplevel,import-error
    except ImportError as reason:
        skip(f"no Transformers: {reason}")
    if not torch.cuda.is_available():
        skip(f"PyTorch {torch.__version__} sees no GPU")
    print(f"Transformers {transformers.__version__}, PyTorch {torch.__version__}", flush=True)
    layer = 2048 * (2048 * 2 + 512 * 2) + 3 * 2048 * 8192  # weights of one
    layers = max(1, round(options.gib * 2**30 / 2 / layer))
    torch.manual_seed(20261123)
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    prompts = [torch.randint(3, 32000, (1 + number, PROMPT_TOKENS), device="cuda") for number in range(PROMPTS)]
    return model, prompts


def generate(model, prompt):
    """The answer's tokens, and the sum of the bits of all logits."""
    import torch  # pylint: disable=import-outside-toplevel,import-error
    with torch.inference_mode():
        answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0)
        bits = model(answer).logits.view(torch.int16).long().sum().item()
    return answer.cpu().tolist(), bits


def transformers_rounds(options):
    model, prompts = language_model(options)
    return same_answers(lambda at: generate(model, prompts[at]))


def same_answers(ask):
    """Asks the prompts in turn, for ever: each must have the answer that it had at first."""
    known = {}
    number = 0
    while True:
        at = number % PROMPTS
        number += 1
        found = ask(at)
        if known.setdefault(at, found) != found:
            raise Mismatch(f"prompt {at}: another answer than at first ({bits} instead of {known[at][1]})")
        if len(known) == PROMPTS and len({one[1] for one in known.values()}) < PROMPTS:
            raise Mismatch("different prompts have the same answer")
        yield


def server_rounds(options):
    """The model behind an HTTP server, a thread for each connection. A client of the same program keeps one open."""
    model, prompts = language_model(options)
    turn = threading.Lock()

    class Answer(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):  # pylint: disable=invalid-name
            with turn:
                body = json.dumps(generate(model, prompts[int(self.path.strip("/"))])).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):  # pylint: disable=arguments-differ
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)

    def ask(at):
        connection.request("GET", f"/{at}")
        answer, bits = json.loads(connection.getresponse().read())
        return answer, bits

    return same_answers(ask)


ROUNDS = {"jax": jax_rounds, "cupy": cupy_rounds, "numba": numba_rounds, "transformers": transformers_rounds,
          "server": server_rounds}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=ROUNDS)
    parser.add_argument("--status", required=True)
    parser.add_argument("--gib", type=float, default=2, help="of GPU memory, about")
    parser.add_argument("--managed", action="store_true", help="managed memory (kinds cupy and numba)")
    parser.add_argument("--stream-ordered", action="store_true", help="of the device's pool (kind cupy)")
    parser.add_argument("--pause-ms", type=float, default=20, help="after each round")
    options = parser.parse_args()
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    status = Status(options.status)
    rounds = 0
    try:
        for _ in ROUNDS[options.kind](options):
            rounds += 1
            status.write(rounds)
            if ending:
                break
            time.sleep(options.pause_ms / 1000)
    except Mismatch as reason:
        print(f"MISMATCH in round {rounds + 1} of {options.kind}: {reason}", flush=True)
        sys.exit(1)
    print(f"verified {rounds} rounds", flush=True)


if __name__ == "__main__":
    main()
