"""Print requirements with the lowest versions that pyproject.toml allows; `make test` runs some tests with
them.

Other packages have the versions of constraints.txt. Packages that those tests do not import, such as gRPC and
transformers, are left out. All packages of JAX have the same version.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
JAX = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
LOWEST = (
    "flax", "huggingface_hub", "jinja2", "llguidance", "llvmlite", "msgspec", "numpy", "orbax-checkpoint",
    "platformdirs",
    "safetensors", "tokenizers", "tqdm",
)  # fmt: skip
AS_EVER = ("nvidia-", "pytest", "hypothesis")  # as pinned in constraints.txt


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(project["dependencies"]), re.MULTILINE))
    pinned = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith(AS_EVER)
    ]
    return [
        *(f"{name}=={bounds['jax']}" for name in JAX),
        *(f"{name}=={bounds[name]}" for name in LOWEST),
        *pinned,
    ]


if __name__ == "__main__":
    print(*requirements(), sep="\n")
