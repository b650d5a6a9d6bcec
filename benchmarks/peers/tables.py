"""Summarizes the processes' measurements: medians with their spread, agreement of tokens, the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

NEAR_TIE = 1e-3  # maximum difference in log probability of the best two tokens at which rounding may decide
COLUMNS = {
    "stream": ("one stream", "tokens/s", 0),
    "batch": ("32 at once", "tokens/s", 0),
    "prefill": ("prompt of 1024", "tokens/s", 0),
    "later start": ("start", "s", 1),
    "first start": ("first start", "s", 1),
}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
        "runs": len(values),
    }


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The index of the first token that differs; None if there is none."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)


def agreement(ours: list[list[int]], gaps: list[list[float]], theirs: list[list[int]]) -> dict[str, int]:
    """Number of equal sequences, and of those that first differ where the best two tokens are near-ties.

    Args:
        ours: the reference's tokens of each sequence.
        gaps: for each of these tokens, its log probability minus the next best one's.
        theirs: a peer's tokens.
    """
    places = [first_difference(a, b) for a, b in zip(ours, theirs, strict=True)]
    ties = sum(gaps[i][place] < NEAR_TIE for i, place in enumerate(places) if place is not None)
    same = places.count(None)
    tokens = sum(len(a) if place is None else place for a, place in zip(ours, places, strict=True))
    return {
        "sequences": len(ours),
        "same": same,
        "differ_at_near_ties": ties,
        "differ": len(ours) - same - ties,
        "tokens_before": tokens,
        "tokens": sum(map(len, ours)),
    }


def cell(values: dict[str, Any] | None, digits: int) -> str:
    """`median (min..max)`; a dash if nothing was measured."""
    if values is None:
        return "-"
    median, least, most = (f"{values[name]:.{digits}f}" for name in ("median", "min", "max"))
    return median if values["runs"] == 1 else f"{median} ({least}..{most})"


def table(arms: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for each arm, named `peer precision`, with its measurements; the best of each column in
    bold.
    """
    best = {}
    for name, (_, unit, _) in COLUMNS.items():
        medians = [arm["measured"][name]["median"] for arm in arms.values() if name in arm["measured"]]
        best[name] = (min if unit == "s" else max)(medians, default=None)
    lines = [
        "| engine | precision | "
        + " | ".join(f"{title}, {unit}" for title, unit, _ in COLUMNS.values())
        + " | same tokens |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for arm, facts in arms.items():
        peer, precision = arm.split(" ", 1)
        cells = []
        for name, (_, _, digits) in COLUMNS.items():
            values = facts["measured"].get(name)
            text = cell(values, digits)
            cells.append(f"**{text}**" if values is not None and values["median"] == best[name] else text)
        same = facts.get("agreement")
        cells.append(f"{same['tokens_before']} of {same['tokens']}" if same else "-")
        lines.append(f"| {peer} | {precision} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def goals(arms: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """jengine's goals that were measured, as ratios of at least `wanted`; larger is better for jengine.

    Each precision is compared with the peers' same precision; of the peers' eight-bit formats, the better one
    counts.
    """

    def best(measure: str, among: tuple[str, ...]) -> tuple[float, str] | None:
        of_time = COLUMNS[measure][1] == "s"
        found = [
            (arms[name]["measured"][measure]["median"], name)
            for name in among
            if measure in arms.get(name, {}).get("measured", {})
        ]
        return (min if of_time else max)(found, default=None)

    ours_all, theirs_all = (
        tuple(name for name in arms if name.startswith("jengine ") == ours) for ours in (True, False)
    )
    names = {"stream": "one stream", "batch": "32 at once", "prefill": "prompt of 1024"}
    int8 = "openvino int8", "openvino int8+bfloat16"
    wanted: list[tuple[str, str, tuple[str, ...], tuple[str, ...], float]] = []
    for precision in ("bfloat16", "float32"):
        for peer in ("vLLM", "OpenVINO"):
            us, them = (f"jengine {precision}",), (f"{peer.lower()} {precision}",)
            wanted += [
                (f"ahead of {peer} at {precision}: {title}", measure, us, them, 1.0)
                for measure, title in names.items()
            ]
    for measure, title in names.items():
        wanted.append(
            (
                f"w8a8 against OpenVINO's int8: {title}",
                measure,
                ("jengine w8a8",),
                int8,
                0.9 if measure == "stream" else 1.0,
            )
        )
    wanted.append(
        ("ahead of vLLM at bfloat16: start", "later start", ("jengine bfloat16",), ("vllm bfloat16",), 1.0)
    )
    wanted += [
        (f"each at its best: {title}", measure, ours_all, theirs_all, 1.0) for measure, title in names.items()
    ]
    reached = []
    for goal, measure, our_arms, their_arms, ratio in wanted:
        ours, theirs = best(measure, our_arms), best(measure, their_arms)
        if ours and theirs:
            value = theirs[0] / ours[0] if COLUMNS[measure][1] == "s" else ours[0] / theirs[0]
            reached.append(
                {
                    "goal": goal,
                    "ratio": round(value, 2),
                    "wanted": ratio,
                    "ours": ours[1],
                    "against": theirs[1],
                }
            )
    return reached
