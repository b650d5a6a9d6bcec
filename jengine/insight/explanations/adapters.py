"""A rule about LoRA adapters."""

from __future__ import annotations

from dataclasses import replace

from jengine.insight.explanations.finding import Finding, ms, percent
from jengine.insight.explanations.window import Window

COSTLY = 0.15  # share of the device's time


def places_of_adapters(window: Window) -> Finding | None:
    """Steps compute more places of adapters than requests use."""
    table = window.costs.table
    steps = [step for step in window.steps if step.trunk.adapted]
    used = {request.lora for request in window.trace.requests if request.lora}
    if not window.enough or table.batch_invariant or not steps or not 0 < len(used) < table.adapters:
        return None
    costs = window.costs
    extra = sum([(costs.base(s.trunk) - costs.base(replace(s.trunk, adapted=0))) * s.steps for s in steps])
    if extra < COSTLY * window.device:
        return None
    longest = max(steps, key=lambda step: costs.base(step.trunk)).trunk
    return Finding(
        "places_of_adapters",
        extra / window.device,
        f"LoRA adapters take {percent(extra / window.device)} of the device's time, and there are places for"
        f" more of them than are used",
        {
            "steps with adapters": percent(window.share(steps)),
            "adapters in use, and places": f"{len(used)} and {table.adapters}",
            f"the longest, {longest}": ms(costs.base(longest)),
            "the same without adapters": ms(costs.base(replace(longest, adapted=0))),
        },
        "max_loras",
        f"{len(used)}: steps compute all places, whichever are in use; a smaller max_lora_rank helps as well",
        f"up to {percent(extra / window.device)} less time",
    )
