"""Compiles the kernels of Ampere and Blackwell for the cards that they serve, none of which need be here.

    python -m benchmarks.compiled_kernels [TARGET ...]

Needs the extra `aot`. A row has what the compiler says of a kernel, and the instructions of a warp, counted
in the machine code: of a product for a tile of 64 outputs and 128 inputs, and of attention for a tile of
tokens, with the tile's bytes; of cache writes and page copies, which have no loop, all of the kernel's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.machine import RESULTS, ROOT, save

sys.path.append(str(ROOT / "tools"))

from kernel_counts import INSTRUCTION, cases_for, count, tiles
from kernel_facts import AMPERE, facts_elsewhere

TILES = tiles()


def row(name: str, facts: Any) -> dict[str, Any]:
    found = {
        "case": name,
        "registers": facts.registers,
        "spilled": facts.spilled,
        "shared": facts.shared,
        "blocks": facts.blocks(facts.threads),
    }
    if name.startswith(("write", "copy")):
        return found | {"instructions": len(INSTRUCTION.findall(facts.code))}
    if (tile := TILES.get(name)) is None:
        return found
    shape = {} if name.endswith(" rows") else {"tile": tile.name}
    return found | shape | {"instructions": round(count(facts, tile).products), "bytes": tile.bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("targets", nargs="*", help="these only; others keep their rows")
    targets, file = parser.parse_args().targets or AMPERE, RESULTS / "compiled_kernels.json"
    found = json.loads(file.read_text())["targets"] if file.exists() else {}
    for target in targets:
        cases = cases_for(target)
        every = facts_elsewhere(target, [*cases.values()])
        found[target] = [row(name, facts) for name, facts in zip(cases, every, strict=True)]
        print(target, len(every), flush=True)
        save("compiled_kernels", {"targets": found})


if __name__ == "__main__":
    main()
