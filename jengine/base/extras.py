"""Packages of jengine's extras, for messages: no package index has jengine itself, so `pip install
'jengine[http]'` cannot work.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires


def install_line(extra: str) -> str:
    """The command that installs what an extra of the installed jengine needs."""
    try:
        packages = _packages(extra, requires("jengine") or [])
    except PackageNotFoundError:
        packages = []
    if not packages:
        return f"pip install '.[{extra}]' in jengine's checkout"
    return "pip install " + " ".join(
        f"'{package}'" if re.search(r"[<>\[;]", package) else package for package in packages
    )


def _packages(extra: str, lines: list[str]) -> list[str]:
    """The requirements of an extra, and of the extras that it names."""
    packages: list[str] = []
    for line in lines:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if not re.search(rf"""extra == ["']{extra}["']""", marker):
            continue
        extras = re.match(r"jengine\[([\w,-]+)\]", requirement)
        packages += (
            [requirement]
            if extras is None
            else [package for name in extras[1].split(",") for package in _packages(name, lines)]
        )
    return packages
