"""Generate jengine/serving/generated from serving/protos: `make protos`."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
PROTOS = ROOT / "serving" / "protos"
# the generated modules import each other from this package, so protoc must see the protos there
PACKAGE = "jengine/serving/generated"


def make(out: Path) -> None:
    """Write the package under `out`.

    Raises:
        SystemExit: protoc rejected a file; it printed the reason to stderr.
    """
    files = sorted(f"{PACKAGE}/{file.relative_to(PROTOS)}" for file in PROTOS.rglob("*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi")]
    if status := protoc.main(["protoc", f"-I{PACKAGE}={PROTOS}", *outputs, *files]):
        sys.exit(status)
    package = out / PACKAGE
    for folder in (
        package,
        *(path for path in package.rglob("*") if path.is_dir() and path.name != "__pycache__"),
    ):
        (folder / "__init__.py").touch()


if __name__ == "__main__":
    make(ROOT)
