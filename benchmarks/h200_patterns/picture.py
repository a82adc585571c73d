"""Draw timeline.svg: what one of two GPUs does in a stretch of a step, computing above and communicating below.

python benchmarks/h200_patterns/picture.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
STRETCHES = (
    (
        "0.6b-x2-tp",
        "0.6B, tensor parallel, one row a micro-batch: behind blocks that were queued the GPU waits for its host",
        40.0,
    ),
    (
        "0.6b-x4-tp",
        "0.6B, two shards x tensor parallel: in the last backward pass ranks wait for each other's process",
        40.0,
    ),
    ("0.6b-x2-cp-2-rows", "0.6B, context parallel, two rows a micro-batch: one exchange in a layer", 40.0),
    ("8b-x2-tp", "16 blocks of 8B, tensor parallel: the GPU computes, but for its exchanges", 40.0),
    ("1.7b-x2-1f1b", "1.7B, 1f1b: what is sent has arrived when it is needed, or nothing can run", 100.0),
    ("1.7b-x2-interleaved", "1.7B, interleaved: a receive waits beside what is computed", 100.0),
)
"Run, title, and milliseconds from the beginning of its excerpt."
WIDTH, LEFT, LANE, GAP = 960.0, 110.0, 22.0, 6.0
COLOURS = {"computing": "#4477aa", "communicating": "#ee6677"}


def spans(kernels: list[list], milliseconds: float) -> Iterator[tuple[str, float, float]]:
    """Yield (lane, start, end) in milliseconds, kernels of a lane that touch joined."""
    open_spans: dict[str, list[float]] = {}
    for start, length, _, name in kernels:
        lane = "communicating" if name.startswith("nccl") else "computing"
        begin, end = start / 1e3, min((start + length) / 1e3, milliseconds)
        if begin >= milliseconds:
            break
        before = open_spans.get(lane)
        if before is not None and begin - before[1] < milliseconds / WIDTH:  # less than a pixel
            before[1] = max(before[1], end)
            continue
        if before is not None:
            yield lane, before[0], before[1]
        open_spans[lane] = [begin, end]
    yield from ((lane, begin, end) for lane, (begin, end) in open_spans.items())


def recorded() -> dict[str, list[dict]]:
    """Return what benchmarks/traces.py kept of each run."""
    files = (HERE / "results" / f"{card}_traces.json" for card in ("h100", "h200"))
    return {name: ranks for file in files for name, ranks in json.loads(file.read_text())["runs"].items()}


def drawing(runs: dict[str, list[dict]]) -> str:
    """Return the picture."""
    parts, top = [], 26.0
    for run, title, milliseconds in STRETCHES:
        scale = (WIDTH - LEFT) / milliseconds
        parts.append(f'<text x="0" y="{top:g}" font-weight="bold">{title}, {milliseconds:g} ms</text>')
        lanes = {lane: top + 10 + number * (LANE + GAP) for number, lane in enumerate(COLOURS)}
        for lane, y in lanes.items():
            parts.append(f'<text x="0" y="{y + 15:g}">{lane}</text>')
            parts.append(f'<rect x="{LEFT:g}" y="{y:g}" width="{WIDTH - LEFT:g}" height="{LANE:g}" fill="#eeeeee"/>')
        for lane, begin, end in spans(runs[run][0]["excerpt"], milliseconds):
            x, width = LEFT + begin * scale, max((end - begin) * scale, 0.3)
            box = f'x="{x:.1f}" y="{lanes[lane]:g}" width="{width:.1f}" height="{LANE:g}"'
            parts.append(f'<rect {box} fill="{COLOURS[lane]}"/>')
        top += 10 + 2 * (LANE + GAP) + 34
    style = 'font-family="sans-serif" font-size="13"'
    size = f'viewBox="0 0 {WIDTH:g} {top - 20:g}" width="{WIDTH:g}" height="{top - 20:g}"'
    label = "timelines of one GPU: computing and communicating"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style} role="img" aria-label="{label}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "timeline.svg").write_text(drawing(recorded()))
