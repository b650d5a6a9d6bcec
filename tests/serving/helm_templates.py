"""Renders Helm's chart, as far as its templates need it: values, `default`, `toJson`, `not`, `if`, `else` and
`range`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ACTION = re.compile(r"(\s*)\{\{(-?)\s*(.*?)\s*\}\}", re.S)


def with_values(defaults: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The values of a release. Names that the defaults lack are errors."""
    assert changes.keys() <= defaults.keys()
    merged = dict(defaults)
    for name, value in changes.items():
        nested = isinstance(value, dict) and defaults[name]
        merged[name] = with_values(defaults[name], value) if nested else value
    return merged


def rendered(chart: Path, release: str, **changes: Any) -> dict[str, Any]:
    """The manifests of `helm template RELEASE CHART`, by kind."""
    values = with_values(yaml.safe_load((chart / "values.yaml").read_text()), changes)
    version = yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"]
    scope = {"Values": values, "Release": {"Name": release}, "Chart": {"AppVersion": version}}
    manifests = [yaml.safe_load(render(file.read_text(), scope)) for file in chart.glob("templates/*.yaml")]
    return {manifest["kind"]: manifest for manifest in manifests if manifest is not None}


def render(template: str, scope: Any) -> str:
    parts: list[str] = []
    actions: list[str] = []
    end = 0
    for match in ACTION.finditer(template):
        blank = "" if match[2] else match[1]
        parts.append(template[end : match.start()] + blank)
        actions.append(match[3])
        end = match.end()
    parts.append(template[end:])
    text, place = _block(parts, actions, 0, scope, scope)
    assert place == len(actions)
    return text


def _block(parts: list[str], actions: list[str], place: int, root: Any, dot: Any) -> tuple[str, int]:
    """The text up to the `else` or `end` of a block, or of the whole, and that action's place."""
    text = parts[place]
    while place < len(actions) and actions[place] not in ("else", "end"):
        word, _, rest = actions[place].partition(" ")
        if word in ("if", "range"):
            value = _value(rest, root, dot)
            dots = (list(value) if word == "range" else [dot] * bool(value)) or [None]
            texts = [
                _block(parts, actions, place + 1, root, each) if each is not None else "" for each in dots
            ]
            shown = "".join(body[0] for body in texts if body)
            place = _skip(actions, place)
            if actions[place] == "else":
                other, place = _block(parts, actions, place + 1, root, dot)
                shown = shown if value else other
            text += shown
        else:
            text += str(_value(actions[place], root, dot))
        place += 1
        text += parts[place]
    return text, place


def _skip(actions: list[str], place: int) -> int:
    """The place of the `else` or `end` that belongs to the `if` or `range` here."""
    depth = 0
    while True:
        place += 1
        word = actions[place].partition(" ")[0]
        if depth == 0 and word in ("else", "end"):
            return place
        depth += (word in ("if", "range")) - (word == "end")


def _value(expression: str, root: Any, dot: Any) -> Any:
    first, _, alternative = expression.partition(" | default ")
    if alternative:
        return _value(first, root, dot) or _value(alternative, root, dot)
    word, _, rest = expression.partition(" ")
    if rest:
        value = _value(rest, root, dot)
        return {"toJson": json.dumps, "not": lambda value: not value}[word](value)
    value = dot
    if word != ".":
        value = root
        for name in word.removeprefix(".").split("."):
            value = value[name]
    return value
