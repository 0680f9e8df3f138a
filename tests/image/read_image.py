#!/usr/bin/env python3
"""Verifies an image, written from docs/image-format.md alone: a second opinion on what our programs say.

    read_image.py DIR

Prints what it has seen as JSON, or "corrupt: ..." or "newer: ..." with status 1. Nothing but Python and the
shared libraries of xxHash, zstd and LZ4.
"""
import ctypes
import json
import os
import re
import stat
import struct
import sys


def library(name, soname):
    try:
        return ctypes.CDLL(soname)
    except OSError:
        from ctypes import util  # pylint: disable=import-outside-toplevel  # as long to load as all the others
        return ctypes.CDLL(util.find_library(name))  # starts other programs


class Hash(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


XXH = library("xxhash", "libxxhash.so.0")
XXH.XXH3_128bits.restype = Hash
XXH.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
ZSTD = library("zstd", "libzstd.so.1")
ZSTD.ZSTD_decompress.restype = ctypes.c_size_t
ZSTD.ZSTD_decompress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
LZ4 = library("lz4", "liblz4.so.1")
LZ4.LZ4_decompress_safe.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]


def xxh3(data):
    made = XXH.XXH3_128bits(data, len(data))
    return struct.pack(">QQ", made.high, made.low)


def need(condition, what, kind="corrupt"):
    if not condition:
        raise ValueError(f"{kind}: {what}")


def read(folder, path):
    file = os.open(os.path.join(folder, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(file, "rb") as opened:
        need(stat.S_ISREG(os.fstat(file).st_mode), f"{path} is no file")
        return opened.read()


def depth(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def once(pairs):
    need(len(dict(pairs)) == len(pairs), "a key stands twice")
    return dict(pairs)


# Folder, field of the manifest, and feature.
CONTENTS = [("gpu", "gpu_content", "gpu-content"), ("host", "host_content", "host-memory")]


# Not the type and the range of every field: those that something depends on here.
def check_relations(manifest):
    paths = [file["path"].encode() for file in manifest["files"]]
    need(paths == sorted(set(paths)), "the order of the files")
    need(manifest["sync"] in ("disk", "none") and isinstance(manifest["phases"], list), "sync or phases")
    parents = {process["pid"]: process["parent_pid"] for process in manifest["processes"]}
    need(len(parents) == len(manifest["processes"]), "a process stands twice")
    need(parents.get(manifest["root_pid"]) == 0, "root_pid")
    above = set(parents) | {0}
    for _ in parents:
        above = {parents.get(pid, 0) for pid in above}
    need(set(parents.values()) <= set(parents) | {0} and above == {0}, "the parents")


def read_manifest(folder):
    text = read(folder, "manifest.json")
    trailer = re.fullmatch(rb'(?s)(.*)  "manifest_xxh3": "([0-9a-f]{32})"\n}\n', text)
    need(trailer and xxh3(trailer[1]).hex().encode() == trailer[2], "manifest.json")
    manifest = json.loads(text, object_pairs_hook=once)
    need(depth(manifest) <= 8, "manifest.json is nested too deeply")
    json.dumps(manifest, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    for part in ["criu"] + [part for part, field, _ in CONTENTS if field in manifest]:
        need(stat.S_ISDIR(os.lstat(os.path.join(folder, part)).st_mode), f"{part} is no directory")
    features = {feature for _, _, feature in CONTENTS}
    need(manifest["format"] == 1 and set(manifest["requires"]) <= features, "manifest.json", "newer")
    for _, field, feature in CONTENTS:
        need((feature in manifest["requires"]) == (field in manifest), "requires")
    check_relations(manifest)
    return manifest


def check_files(folder, manifest):
    for file in manifest["files"]:
        data, block = read(folder, file["path"]), manifest["checksum"]["block_size"]
        digests = b"".join(xxh3(data[at:at + block]) for at in range(0, len(data), block))
        need(len(data) == file["size"] and xxh3(digests).hex() == file["checksum"], file["path"])
    need({f["path"] for f in manifest["files"]} == {f"criu/{n}" for n in os.listdir(f"{folder}/criu")}, "criu/")


def unpack(encoding, stored, length):
    out = ctypes.create_string_buffer(length)
    if encoding == 1:
        return stored
    if encoding == 2:
        made = LZ4.LZ4_decompress_safe(stored, out, len(stored), length)
    else:
        need(encoding == 3, f"encoding {encoding}")
        made = ZSTD.ZSTD_decompress(out, length, stored, len(stored))
    need(made == length, "a chunk that cannot be decompressed")
    return out.raw


def check_host_ranges(ranges, size):
    end, places = 0, sorted((address, address + length) for _, length, address, _ in ranges)
    for offset, length, address, gpu in ranges:
        need(offset == end and not length % 262144 and not address % 262144 and gpu == bytes(16), "a range of host memory")
        end += length
    need(end == size, "host memory without a place")
    need(all(one[1] <= 1 << 64 for one in places), "a range beyond all addresses")
    need(all(one[1] <= other[0] for one, other in zip(places, places[1:])), "two ranges in one place")


def check_content(folder, part, record, pids):
    index = read(folder, f"{part}/index")
    need(len(index) == record["index_size"], f"size of {part}/index")
    need(xxh3(index[:-16]) == index[-16:] == bytes.fromhex(record["index_xxh3"]), f"{part}/index")
    magic, version, features, chunk_size, files, streams, _, ranges, chunks = struct.unpack_from("<8s6I2Q", index)
    need(magic == b"STASISGC" and version > 0, f"header of {part}/index")
    need(version == 1 and features == 0, f"{part}/index", "newer")
    need(chunk_size & (chunk_size - 1) == 0 and 65536 <= chunk_size <= 1 << 24, "size of a chunk")
    at = 64
    sizes = list(struct.unpack_from(f"<{files}Q", index, at))
    need(sizes == record["data_sizes"] and not any(size % 4096 for size in sizes), "sizes of the data files")
    names = [f"data-{number:02}" for number in range(files)]
    need(sorted(os.listdir(f"{folder}/{part}")) == names + ["index"], f"{part}/")
    data = [read(folder, f"{part}/{name}") for name in names]
    need([len(one) for one in data] == sizes, "a data file's size")
    table = list(struct.iter_unpack("<IIQ", index[at + 8 * files:at + 8 * files + 16 * streams]))
    need(len({pid for pid, _, _ in table}) == streams, "a process stands twice")
    at += 8 * files + 16 * streams
    spans = struct.iter_unpack("<QQQ16s", index[at:at + 40 * ranges])
    at += 40 * ranges
    need(sum(r for _, r, _ in table) == ranges and at + 32 * chunks <= len(index) - 16, f"tables of {part}/index")
    rows = struct.iter_unpack("<16sQIBBH", index[at:at + 32 * chunks])
    seen = {"bytes": 0, "zero_bytes": 0, "duplicate_bytes": 0, "stored_bytes": 0, "taken_bytes": 0, "encodings": set()}
    own = files - record.get("taken_files", 0)
    need(0 <= own, "taken_files")
    places = set()
    for pid, count, size in table:
        need(pid in pids, f"process {pid}")
        end, own_spans = 0, [next(spans) for _ in range(count)]
        if part == "host":
            need(262144 % chunk_size == 0, "size of a chunk of host memory")
            check_host_ranges(own_spans, size)
        for offset, length, _, _ in own_spans:
            need(end <= offset and 0 < length <= size - offset, "a range")
            end = offset + length
        for start in range(0, size, chunk_size):
            digest, position, stored, encoding, file, nothing = next(rows)
            length = min(chunk_size, size - start)
            seen["bytes"] += length
            seen["encodings"].add(encoding)
            if encoding == 0:
                need((digest, position, stored, file, nothing) == (bytes(16), 0, 0, 0, 0), "a chunk of zeros")
                seen["zero_bytes"] += length
                continue
            need(nothing == 0 and file < files and position % 4096 == 0 and position + stored <= sizes[file], "a place")
            need(stored == length if encoding == 1 else 0 < stored < length, "stored bytes")
            content = unpack(encoding, data[file][position:position + stored], length)
            need(len(content) == length and xxh3(content) == digest, f"process {pid}, chunk {start // chunk_size}")
            seen["duplicate_bytes" if (file, position) in places else "stored_bytes"] += \
                length if (file, position) in places else stored
            seen["taken_bytes"] += stored if file >= own and (file, position) not in places else 0
            places.add((file, position))
    need(next(rows, None) is None, "chunks of no stream")
    return seen | {"encodings": sorted(seen["encodings"])}


def main():
    folder = sys.argv[1]
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        seen, total = {}, sum(file["size"] for file in manifest["files"])
        with_cuda = {process["pid"] for process in manifest["processes"] if process["cuda"]}
        for part, field, _ in CONTENTS:
            record = manifest.get(field)
            seen[field] = record and check_content(folder, part, record, with_cuda)
            total += record["index_size"] + sum(record["data_sizes"]) if record else 0
        need(total == manifest["total_bytes"], "total_bytes")
    except (ValueError, OSError, KeyError, struct.error, StopIteration) as problem:
        print(problem if str(problem).startswith("newer") else f"corrupt: {problem}")
        return 1
    print(json.dumps({"image_bytes": total} | seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
