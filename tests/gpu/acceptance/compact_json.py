#!/usr/bin/env python3
"""JSON with a line for each thing that a reader compares, and not one for each number.

    compact_json.py FILE...           writes them so; a value stays what it was
    compact_json.py --check FILE...   status 1 if one is not written so

What fits stands on one line. Of what does not, simple values follow each other and others begin lines of their own:
the files of docs/results have 28,600 lines so, and 105,000 with a line for each number.
"""

import json
import sys

WIDTH = 120


def text_of(value):
    return "\n".join(lines_of(value)) + "\n"


def lines_of(value, lead="", before="", after=""):
    """The value's lines, indented by `lead`, with `before` in front of it and `after` behind it."""
    flat = lead + before + json.dumps(value) + after
    if len(flat) <= WIDTH or not has_parts(value):
        return [flat]
    if isinstance(value, dict):
        opened, closed = "{", "}" + after
        parts = [(json.dumps(key) + ": ", part) for key, part in value.items()]
    else:
        opened, closed = "[", "]" + after
        parts = [("", part) for part in value]
    lines = [lead + before + opened]
    may_follow = True
    for index, (name, part) in enumerate(parts):
        is_last = index == len(parts) - 1
        text = (" " if index else "") + name + json.dumps(part) + ("" if is_last else ",")
        room = WIDTH - len(lines[-1]) - (len(closed) if is_last else 0)
        if may_follow and not has_parts(part) and len(text) <= room:
            lines[-1] += text
        else:
            lines += lines_of(part, lead + " ", name, "" if is_last else ",")
        may_follow = not has_parts(part)
    if may_follow and len(lines[-1]) + len(closed) <= WIDTH:
        lines[-1] += closed
    else:
        lines.append(lead + closed)
    return lines


def has_parts(value):
    return isinstance(value, (dict, list)) and bool(value)


def main(paths):
    checks = paths[:1] == ["--check"]
    status = 0
    for path in paths[checks:]:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        compact = text_of(json.loads(text))
        if text == compact:
            continue
        if checks:
            print(f"{path}: has a line for each number (to mend: {sys.argv[0]} {path})")
            status = 1
        else:
            with open(path, "w", encoding="utf-8") as file:
                file.write(compact)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
