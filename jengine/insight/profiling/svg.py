"""Self-contained SVG drawings for a report: flame graphs, and lanes on a time axis."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 1160
ROW, LETTER = 17, 6.3  # pixels: height of a frame, width of a letter
LEAST = 0.005  # minimum share of samples for which a frame is drawn
LABEL = 170  # pixels for the names of lanes
LANE = 20


@dataclass
class _Frame:
    count: int = 0
    children: dict[str, _Frame] = field(default_factory=dict)


def flame(stacks: dict[str, int]) -> str:
    """A flame graph with the root on top. The width of a frame is its share of the samples."""
    root = _Frame()
    for stack, count in stacks.items():
        node = root
        node.count += count
        for frame in stack.split(";"):
            node = node.children.setdefault(frame, _Frame())
            node.count += count
    shapes: list[str] = []
    depth = _draw(root, 0.0, 0, WIDTH / max(root.count, 1), root.count, shapes)
    return f'<svg class="flame" viewBox="0 0 {WIDTH} {depth * ROW}" width="100%">{"".join(shapes)}</svg>'


def _draw(node: _Frame, left: float, depth: int, scale: float, whole: int, shapes: list[str]) -> int:
    """Draws a node's children. Returns the depth."""
    deepest = depth
    for frame, child in sorted(node.children.items()):
        width = child.count * scale
        if child.count >= LEAST * whole:
            share = f"{100 * child.count / whole:.1f} %, {child.count} samples"
            shapes.append(
                f"<g><title>{escape(frame)}: {share}</title>"
                + _box(left, depth * ROW, width, ROW - 1, f"f{_shade(frame)}")
            )
            if (letters := int((width - 4) / LETTER)) >= 3:
                text = frame if len(frame) <= letters else frame[: letters - 1] + "…"
                shapes.append(f'<text x="{left + 3:.1f}" y="{depth * ROW + 12}">{escape(text)}</text>')
            shapes.append("</g>")
            deepest = max(deepest, _draw(child, left, depth + 1, scale, whole, shapes), depth + 1)
        left += width
    return deepest


def _shade(frame: str) -> int:
    """One of eight shades, by file."""
    return zlib.crc32(frame.partition("(")[2].rpartition(":")[0].encode()) % 8


@dataclass(frozen=True, slots=True)
class Bar:
    """An event of a lane, starting at `at`. An empty title is not shown."""

    at: float
    seconds: float
    kind: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    bars: Sequence[Bar]


def lanes(begin: float, end: float, every: Iterable[Lane], tall: Lane | None = None) -> str:
    """Lanes on a common time axis. Bars narrower than a pixel are merged; the shade shows how much of the
    pixel they cover.

    Args:
        tall: a lane drawn first, with bars as high as they are long.
    """
    scale = (WIDTH - LABEL) / max(end - begin, 1e-9)
    shapes, y = [], 0
    if tall is not None:
        shapes.append(_columns(tall, begin, scale, y))
        y += 4 * LANE
    for lane in every:
        shapes.append(f'<text class="name" x="0" y="{y + 14}">{escape(lane.name)}</text>')
        shapes.append(_box(LABEL, y + 2, WIDTH - LABEL, LANE - 4, "ground"))
        shapes += _wide(lane, begin, end, scale, y)
        shapes.append(_narrow(lane, begin, end, scale, y))
        y += LANE
    for tick in range(11):
        x = LABEL + tick * (WIDTH - LABEL) / 10
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{y}"/>')
        anchor = "end" if tick == 10 else "middle"
        shapes.append(
            f'<text class="tick" text-anchor="{anchor}" x="{x:.1f}"'
            f' y="{y + 13}">{_moment(tick * (end - begin) / 10, end - begin)}</text>'
        )
    return f'<svg class="lanes" viewBox="0 0 {WIDTH} {y + 16}" width="100%">{"".join(shapes)}</svg>'


def _moment(seconds: float, whole: float) -> str:
    return f"{seconds:.1f} s" if whole > 2 else f"{1e3 * seconds:.0f} ms"


def _wide(lane: Lane, begin: float, end: float, scale: float, y: int) -> Iterable[str]:
    for bar in lane.bars:
        first, last = max(bar.at, begin), min(bar.at + bar.seconds, end)
        if (last - first) * scale >= 1.0:
            title = f"<title>{escape(bar.title)}</title>" if bar.title else ""
            x, width = LABEL + (first - begin) * scale, (last - first) * scale
            text = ""
            if (letters := int((width - 4) / LETTER)) >= 4:
                word = bar.title.partition(":")[0]
                text = f'<text x="{x + 3:.1f}" y="{y + 14}">{escape(word[:letters])}</text>'
            yield f"<g>{title}{_box(x, y + 2, width, LANE - 4, bar.kind)}{text}</g>"


def _narrow(lane: Lane, begin: float, end: float, scale: float, y: int) -> str:
    columns: dict[int, tuple[float, str]] = {}
    for bar in lane.bars:
        if bar.seconds * scale < 1.0 and begin <= bar.at < end:
            column = int((bar.at - begin) * scale)
            columns[column] = columns.get(column, (0.0, ""))[0] + bar.seconds * scale, bar.kind
    return "".join(
        _box(LABEL + column, y + 2, 1, LANE - 4, kind, f' opacity="{min(0.15 + filled, 1.0):.2f}"')
        for column, (filled, kind) in columns.items()
    )


def _columns(lane: Lane, begin: float, scale: float, y: int) -> str:
    """The longest bar of each pixel, as high as it is long."""
    high: dict[int, Bar] = {}
    for bar in lane.bars:
        column = int((bar.at - begin) * scale)
        if 0 <= column < WIDTH - LABEL and (column not in high or bar.seconds > high[column].seconds):
            high[column] = bar
    longest = max([bar.seconds for bar in high.values()], default=0.0)
    height = 4 * LANE - 8
    shapes = [
        f'<text class="name" x="0" y="{y + 14}">{escape(lane.name)}</text>',
        f'<text class="tick" x="0" y="{y + 30}">up to {1e3 * longest:.3g} ms</text>',
    ]
    for column, bar in high.items():
        tall = max(height * bar.seconds / longest, 0.5) if longest else 0.5
        shapes.append(
            f"<g><title>{escape(bar.title)}</title>"
            + _box(LABEL + column, y + height - tall, 1.4, tall, bar.kind)
            + "</g>"
        )
    return "".join(shapes)


def _box(x: float, y: float, width: float, height: float, kind: str, more: str = "") -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}"'
        f' height="{height:.1f}"{more}/>'
    )
