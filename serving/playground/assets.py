"""The page's files, and headers that restrict what it may do."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

# Everything comes from this server; inline code is not executed, and text never becomes HTML.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@cache
def assets() -> dict[str, tuple[bytes, str]]:
    """(content, type) by path. The page itself is at /, its other files are under /page/."""
    found = {}
    for file in files("jengine.serving.playground").joinpath("static").iterdir():
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        found[path] = file.read_bytes(), TYPES[file.name.rpartition(".")[2]]
    return found
