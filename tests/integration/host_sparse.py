"""A CUDA program with much host memory, of which it has written three pages in four, and never reads the others.

    host_sparse.py STATUS MIB

Writes "round N" to STATUS. Ends with 1, and says what is wrong, if a page is not as it was left.
"""

import sys
import time

from host_memory import PAGE, region
from host_writer import open_gpu


def main():
    size = int(sys.argv[2]) << 20
    memory = region(size)
    written = [at for at in range(0, size, PAGE) if at // PAGE % 4]
    for at in written:
        memory[at:at + 8] = at.to_bytes(8, "little")
    driver, number = open_gpu(), 0
    while driver:
        number += 1
        for at in written:
            if memory[at:at + 8] != at.to_bytes(8, "little"):
                sys.exit(f"round {number}: the page at {at} is not as it was left")
        with open(sys.argv[1], "w", encoding="ascii") as status:
            status.write(f"round {number}\n")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
