"""Draws the pictures of README.md and docs/results from what was measured and recorded; prints one.

    pictures.py speed    bars: the driver and CRIU beside Stasis, from docs/results/*.json
    pictures.py growth   bars: how long jobs of 1 to 8 ranks are away, from docs/results/*.json
    pictures.py demo     a terminal: docs/pictures/demo.txt, what tools/demo has printed in its steps 4 to 6, shortened

Plain SVG, in light and in dark. tools/check.d/pictures compares them with docs/pictures/*.svg.
"""

import html
import json
import os
import re
import sys

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TABLE = "docs/results/2026-11-24-h100-table.json"
HOST = "docs/results/2026-11-26-host-memory.json"
GROWTH = "docs/results/2026-11-27-8xh200-growth.json"
STYLE = """<style>
text { font-family: ui-sans-serif, system-ui, sans-serif; font-size: 13px; fill: #24292f; }
.small { font-size: 12px; fill: #57606a; }
.mono { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; white-space: pre; }
.before { fill: #b1bac4; } .after { fill: #2da44e; } .screen { fill: #f6f8fa; stroke: #d0d7de; }
.good { fill: #1a7f37; } .typed { fill: #0550ae; font-weight: 600; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .small { fill: #8d96a0; } .before { fill: #484f58; } .after { fill: #3fb950; }
.screen { fill: #161b22; stroke: #30363d; } .good { fill: #3fb950; } .typed { fill: #79c0ff; } }
</style>"""


def load(name):
    with open(os.path.join(SOURCE, name), encoding="utf-8") as file:
        return json.load(file)


def speeds():
    """(what, seconds of the driver and CRIU, seconds of Stasis), medians of one run each."""
    rows = {row["what"]: row["seen"] for row in load(TABLE)["table"]}
    for label, what in (("suspend 16 GiB of GPU memory: downtime", "suspend 16 GiB, stands still"),
                        ("resume it", "resume 16 GiB"), ("dump it to an image", "dump 16 GiB, whole verb"),
                        ("restore it", "restore 16 GiB, whole verb")):
        before, after = re.match(r"([\d.]+) s and ([\d.]+) s", rows[what]).groups()
        yield label, float(before), float(after)
    medians = next(one for one in load(HOST)["cases"] if one["case"] == "host_memory.agent")["figures"]["medians"]
    for verb in ("dump", "restore"):
        yield f"{verb} 12 GiB of host memory", medians[verb + " criu"], medians[verb + " parallel"]


def speed():
    rows = list(speeds())
    left, width, step = 310, 310, 40
    scale = width / max(before for _, before, _ in rows)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {len(rows) * step + 34}" role="img" '
           'aria-label="Seconds by the driver and CRIU, and by Stasis">', STYLE]
    for number, (label, before, after) in enumerate(rows):
        y = number * step + 8
        out.append(f'<text x="{left - 12}" y="{y + 20}" text-anchor="end">{html.escape(label)}</text>')
        for dy, kind, seconds in ((0, "before", before), (15, "after", after)):
            out.append(f'<rect class="{kind}" x="{left}" y="{y + dy}" width="{max(seconds * scale, 2):.1f}" height="12" '
                       f'rx="2"/><text class="small" x="{left + max(seconds * scale, 2) + 6:.1f}" y="{y + dy + 10}">'
                       f"{seconds:.1f} s" + (f", {before / after:.0f} times as fast" if kind == "after" else "") + "</text>")
    y = len(rows) * step + 22
    out.append(f'<text class="small" x="20" y="{y}">grey: the driver and CRIU; green: Stasis. H100, and H200 for host '
               "memory</text>")
    return "\n".join([*out, "</svg>\n"])


def growth():
    note = next(one for one in load(GROWTH)["cases"] if one["case"] == "many.growth")["note"]
    rows = [(int(ranks), float(seconds)) for seconds, ranks in re.findall(r"([\d.]+) s with (\d+)", note)]
    left, width, step = 90, 480, 24
    scale = width / max(seconds for _, seconds in rows)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {len(rows) * step + 34}" role="img" '
           'aria-label="Seconds away, by ranks">', STYLE]
    for number, (ranks, seconds) in enumerate(rows):
        y = number * step + 8
        out.append(f'<text x="{left - 12}" y="{y + 11}" text-anchor="end">{ranks} rank{"s" if ranks > 1 else ""}</text>'
                   f'<rect class="after" x="{left}" y="{y}" width="{seconds * scale:.1f}" height="14" rx="2"/>'
                   f'<text class="small" x="{left + seconds * scale + 6:.1f}" y="{y + 11}">{seconds:.1f} s, '
                   f"{seconds / rows[0][1]:.1f} times one rank's</text>")
    out.append(f'<text class="small" x="20" y="{len(rows) * step + 22}">downtime of a suspend and the whole resume; ranks '
               "of NCCL with 4 GiB each, a GPU each; 8 H200s</text>")
    return "\n".join([*out, "</svg>\n"])


def demo():
    with open(os.path.join(SOURCE, "docs/pictures/demo.txt"), encoding="utf-8") as file:
        lines = file.read().rstrip("\n").split("\n")
    height = len(lines) * 17 + 24
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" aria-label="A terminal">', STYLE,
           f'<rect class="screen" x="1" y="1" width="758" height="{height - 2}" rx="6"/>']
    for number, line in enumerate(lines):
        text = line.strip()
        kind = " typed" if text.startswith("$") else " good" if text.startswith("✓") else ""
        out.append(f'<text class="mono{kind}" x="14" y="{number * 17 + 25}" xml:space="preserve">{html.escape(text)}</text>')
    return "\n".join([*out, "</svg>\n"])


if __name__ == "__main__":
    sys.stdout.write({"speed": speed, "growth": growth, "demo": demo}[sys.argv[1]]())
