"""The layers of the code: which packages import which, drawn for ARCHITECTURE.md.

python tools/layers.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACES = {
    "jengine": "jengine",
    "jengine.integrations": "jengine/integrations",
    "jengine.serving": "jengine/serving",
    "pallas_kernels": "pallas_kernels",
}
KERNELS = "pallas_kernels"
FRONT = "[public names]"  # what jengine and jengine.spi give


def packages() -> dict[str, set[str]]:
    """The packages that each package imports, also inside functions. A package is a folder of jengine or of
    its integrations, all of the kernels, or FRONT. Other modules beside the folders only name things, and
    are left out.
    """
    front = [(ROOT / "jengine" / stub).read_text() for stub in ("__init__.pyi", "spi.pyi")]
    found = {FRONT: {package_of(name) for stub in front for name in _imports(stub)}}
    for place, folder in PLACES.items():
        for file in (ROOT / folder).rglob("*.py"):
            inside = file.relative_to(ROOT / folder).parts
            if place != "jengine.serving" and place != KERNELS and len(inside) == 1:
                continue
            if place == "jengine" and inside[0] in ("integrations", "serving"):
                continue
            name = package_of(f"{place}.{inside[0]}")
            targets = set(map(package_of, _imports(file.read_text())))
            found.setdefault(name, set()).update(targets - {name, ""})
    return {name: targets & found.keys() for name, targets in found.items()}


def package_of(module: str) -> str:
    """The package of a module; empty: none of ours."""
    if module in ("jengine", "jengine.spi"):
        return FRONT
    first, _, rest = module.removeprefix("jengine.integrations.").partition(".")
    if module.startswith("jengine.integrations."):
        return first
    return KERNELS if first == KERNELS else rest.partition(".")[0] if first == "jengine" else ""


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def layers(imports: dict[str, set[str]]) -> list[list[str]]:
    """The packages, from those that import no other upwards. Each imports only packages of lower layers."""
    left, found = dict(imports), list[list[str]]()
    while left:
        ready = sorted(name for name, targets in left.items() if not targets & left.keys())
        assert ready, f"a circle: {left}"
        found.append(ready)
        left = {name: targets for name, targets in left.items() if name not in ready}
    return found


def picture() -> str:
    """A line for each layer, the highest first."""
    return "\n".join("  ".join(names) for names in reversed(layers(packages())))


if __name__ == "__main__":
    print(picture())
