"""Changes the manifest of an image and closes it with the right checksum, as any program could.

    edit_manifest.py DIR STATEMENTS

The statements are Python and change `m`, the object; `process` makes a process record.
"""

import ctypes
import json
import os
import sys


class Hash(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def xxh3_128(data):
    library = ctypes.CDLL("libxxhash.so.0")
    library.XXH3_128bits.restype = Hash
    library.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    made = library.XXH3_128bits(data, len(data))
    return f"{made.high:016x}{made.low:016x}"


def process(pid, parent):
    return {"pid": pid, "parent_pid": parent, "command": ["made"], "cuda": False, "gpu_memory": []}


def edit(folder, statements):
    path = os.path.join(folder, "manifest.json")
    with open(path, encoding="utf-8") as file:
        m = json.load(file)
    del m["manifest_xxh3"]
    exec(statements, {"m": m, "process": process})  # a test's own words
    body = json.dumps(m, indent=2).encode()
    assert body.endswith(b"\n}")
    body = body[:-2] + b",\n"
    with open(path, "wb") as file:
        file.write(body + b'  "manifest_xxh3": "' + xxh3_128(body).encode() + b'"\n}\n')


if __name__ == "__main__":
    edit(*sys.argv[1:])
