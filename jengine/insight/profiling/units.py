"""Formats numbers with units."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Formats seconds, such as 1.53 s, 20.4 ms or 7 us."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 or not seconds else f"{1e6 * seconds:.3g} us"
