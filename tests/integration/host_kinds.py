"""A CUDA program with a mapping of each kind of host memory, which verifies all of them in every round.

    host_kinds.py STATUS KINDS            writes "NAME START END" of each to KINDS, and "round N" to STATUS
    host_kinds.py --past IMAGE KINDS      says which of them went past CRIU into the image, wholly or in part

Ends with 1, and says what is wrong, if memory is not as it was left or the kernel no longer treats it so.
"""

import ctypes
import mmap
import os
import struct
import sys
import time

from host_memory import PAGE, PRIVATE, SHARED, Sums, region
from host_writer import address_of, open_gpu

SIZE = 18 << 20  # more than the least that the tool looks at
LIBC = ctypes.CDLL(None, use_errno=True)
GROWSDOWN, NORESERVE, HUGETLB = 0x100, 0x4000, 0x40000
READ, WRITE = mmap.PROT_READ, mmap.PROT_WRITE
# Advice for madvise(2), and the kernel's word for it in /proc/PID/smaps.
ADVICE = {"dontdump": (16, "dd"), "wipeonfork": (18, "wf"), "dontfork": (10, "dc"), "mergeable": (12, "mg"),
          "hugepage": (14, "hg"), "nohugepage": (15, "nh"), "random": (1, "rr"), "sequential": (2, "sr")}
GUARD_INSTALL = 102  # Linux 6.13: touching the pages ends the program
MOVE_THERE = 3  # MREMAP_MAYMOVE | MREMAP_FIXED
MIB = 1 << 20
RANDOM = os.urandom(MIB)


def kernel_does(name, address, *words):
    return getattr(LIBC, name)(ctypes.c_void_p(address), *(ctypes.c_size_t(word) for word in words)) == 0


class Kinds:
    def __init__(self, scratch):
        self.memory, self.starts, self.words = {}, {}, {}
        self.add("plain", region(SIZE, PRIVATE))
        for name, (advice, word) in ADVICE.items():
            memory = region(SIZE, PRIVATE)
            if kernel_does("madvise", address_of(memory), SIZE, advice):
                self.add(name, memory, word)
        memory = region(SIZE, PRIVATE)
        if kernel_does("mlock", address_of(memory), SIZE):
            self.add("locked", memory, "lo")
        self.add_moved()
        self.add("noreserve", region(SIZE, PRIVATE | NORESERVE), "nr")
        self.add("growsdown", region(SIZE, PRIVATE | GROWSDOWN), "gd")
        self.add("shared", region(SIZE, SHARED))
        self.add_memory_file("memfd", "mine")
        self.add_memory_file("nameless", "")
        try:
            self.add("hugetlb", region(SIZE, PRIVATE | HUGETLB), "ht")
        except OSError:
            pass  # no huge pages are set aside here
        with open(scratch, "wb+") as file:
            file.truncate(SIZE)
            self.add("file", mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE, prot=READ | WRITE))
        for name in ("readable", "unreadable", "guarded"):
            self.add(name, region(SIZE, PRIVATE))
        self.sums = {name: Sums(memory) for name, memory in self.memory.items()}
        self.protect("readable", READ)
        self.protect("unreadable", 0)
        self.guard = self.starts["guarded"] + SIZE - 4 * PAGE
        self.is_guarded = kernel_does("madvise", self.guard, 4 * PAGE, GUARD_INSTALL)

    def add(self, name, memory, word=""):
        for at in range(0, SIZE, MIB):
            # No block equals another one, and making all anew takes longer.
            turn = (len(self.memory) * SIZE + at) // MIB * 997
            memory[at:at + MIB] = RANDOM[turn:] + RANDOM[:turn]
        self.memory[name], self.starts[name], self.words[name] = memory, address_of(memory), word

    # Of this process alone, with its descriptor open.
    def add_memory_file(self, name, called):
        file = os.memfd_create(called)
        os.ftruncate(file, SIZE)
        self.add(name, mmap.mmap(file, SIZE, flags=mmap.MAP_SHARED, prot=READ | WRITE))

    # To addresses where other memory was.
    def add_moved(self):
        self.before, place = region(SIZE, PRIVATE), region(SIZE, PRIVATE)  # it would unmap what is there at its end
        self.add("moved", self.before)
        LIBC.mremap.restype = ctypes.c_void_p
        words = ctypes.c_size_t(SIZE), ctypes.c_size_t(SIZE), MOVE_THERE, ctypes.c_void_p(address_of(place))
        if LIBC.mremap(ctypes.c_void_p(self.starts["moved"]), *words) != address_of(place):
            sys.exit("the kernel moves no memory")
        self.memory["moved"], self.starts["moved"] = place, address_of(place)

    def protect(self, name, rights):
        kernel_does("mprotect", self.starts[name], SIZE, rights)

    def check(self):
        self.protect("unreadable", READ)
        for name, sums in self.sums.items():
            if name == "guarded" and self.is_guarded:
                last = SIZE - sums.BLOCK
                if any(sums.sum(at) != sums.sums[at // sums.BLOCK] for at in range(0, last, sums.BLOCK)):
                    sys.exit("guarded is not as it was left")
            else:
                sums.check(name)
        self.protect("unreadable", 0)
        self.check_words()
        for name, place in (("unreadable", self.starts["unreadable"]), ("guarded", self.guard)):
            if self.is_there(place) and (name != "guarded" or self.is_guarded):
                sys.exit(f"{name} can be read")

    # Whether the kernel would let the program read it: it is asked for a copy into a pipe.
    def is_there(self, place):
        read, write = os.pipe()
        done = LIBC.write(write, ctypes.c_void_p(place), 1) == 1
        os.close(read)
        os.close(write)
        return done

    # Does the kernel treat them as before?
    def check_words(self):
        names, seen, name = {start: name for name, start in self.starts.items()}, {}, None
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as smaps:
            for line in smaps:
                words = line.split()
                if not words[0].endswith(":"):
                    name = names.get(int(words[0].split("-")[0], 16))
                elif words[0] == "VmFlags:" and name:
                    seen[name] = words[1:]
        for name, word in self.words.items():
            if word and word not in seen.get(name, ()):
                sys.exit(f"{name}: the kernel says {seen.get(name)}")


def past(image, kinds):
    with open(os.path.join(image, "host", "index"), "rb") as file:
        index = file.read()
    _, _, _, _, files, streams, _, ranges, _ = struct.unpack_from("<8s6I2Q", index)
    at = 64 + 8 * files + 16 * streams
    saved = [(address, address + length)
             for _, length, address, _ in struct.iter_unpack("<QQQ16s", index[at:at + 40 * ranges])]
    with open(kinds, encoding="ascii") as file:
        for line in file:
            name, start, end = line.split()
            if any(one < int(end) and other > int(start) for one, other in saved):
                print(name)


def main():
    if sys.argv[1] == "--past":
        past(*sys.argv[2:])
        return
    kinds = Kinds(sys.argv[2] + ".file")
    with open(sys.argv[2], "w", encoding="ascii") as file:
        for name, start in kinds.starts.items():
            file.write(f"{name} {start} {start + SIZE}\n")
    driver = open_gpu()
    number = 0
    while driver:
        kinds.check()
        number += 1
        with open(sys.argv[1], "w", encoding="ascii") as status:
            status.write(f"round {number}\n")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
