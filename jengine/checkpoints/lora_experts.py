"""Adapters of parameters that hold all experts of a layer, as PEFT writes them for `target_parameters`.

PEFT puts both factors of every expert into one pair of matrices: lora_A [experts * rank, in], expert by
expert, and lora_B [out, rank * experts], in which the number of the expert changes fastest. Its modules wrap
each other, so one of a layer's two parameters is named `experts` and the other `experts.base_layer`: their
shapes tell which is which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from jengine.models.adapters import Factors, Site

BASE = re.compile(r"(\.base_layer)+$")
MOVED = (".mlp.", ".block_sparse_moe.")  # transformers' name, and that of Mixtral's checkpoints


def fused_site(name: str, a: np.ndarray, b: np.ndarray, fused: Mapping[str, Site]) -> Site | None:
    """The parameter that the factors of a module change; None: there is none with these shapes."""
    layer = BASE.sub("", name)
    for one in (layer, layer.replace(*MOVED)):
        for parameter in ("gate_up_proj", "down_proj"):
            site = fused.get(f"{one}.{parameter}")
            if site is not None and (len(b), a.shape[1]) == _shape(site) and fits(site, a, b):
                return site
    return None


def fits(site: Site, a: np.ndarray, b: np.ndarray) -> bool:
    """Whether both factors have the same rank for each expert."""
    return len(a) == b.shape[1] and site.experts is not None and len(a) % site.experts == 0


def of_experts(site: Site, a: np.ndarray, b: np.ndarray) -> dict[str, Factors]:
    """The factors of each expert's modules, by their names."""
    assert site.experts is not None
    downs = a.reshape(site.experts, -1, a.shape[1])
    ups = b.reshape(site.parts, -1, downs.shape[1], site.experts)
    found = {}
    for number, module in enumerate(site.modules):
        expert, part = divmod(number, site.parts)
        found[module.name] = downs[expert], ups[part, :, :, expert]
    return found


def _shape(site: Site) -> tuple[int, int]:
    """Outputs and inputs of an expert's matrix in transformers, which has all parts, one after the other."""
    outs, inputs = site.modules[0].shape
    return site.parts * outs, inputs
