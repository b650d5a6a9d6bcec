"""Gives an idle engine another scheduler, so that one set of compiled programs serves several measurements or
tests.
"""

from __future__ import annotations

from typing import Any

from jengine.engine.loop.engine import Engine
from jengine.scheduling.requests.images import Images
from tests.schedulers import make_scheduler


def restart_scheduler(engine: Engine, **changes: Any) -> None:
    """Makes the engine's scheduler like a new one, with its present arguments except for `changes`. The
    prefix cache is empty.
    """
    old, blocks = engine.scheduler, engine.scheduler.blocks
    images = old.registry.images
    present = {
        "images": Images(
            images.rows,
            images.first,
            turns=images._turns is not None,
            ahead=images._ahead,
            prefix=images.prefix,
            embeddings=images.embeddings,
        ),
        "table": old.table,
        "page_size": blocks.page_size,
        "num_pages": old.limits.pages + 1,
        "max_num_seqs": old.registry.max_num_seqs,
        "max_num_batched_tokens": old.predictor.max_num_batched_tokens,
        "max_model_len": old.limits.max_model_len,
        "windows": blocks.windows,
        "num_states": 0 if blocks.states is None else blocks.states.pool.num_pages,
        "draft_states": 0 if blocks.states is None else len(blocks.states.spare),
        "prefix_caching": blocks.prefix_caching,
        "stages": old.cohorts.stages,
        "through_host": old.cohorts.through_host,
        "options": old.options,
        "costs": old.predictor.costs,
        "clock": old.clock,
    }
    if blocks.tier is not None:
        present |= {"host_pages": blocks.tier.capacity, "staged": blocks.tier.staged}
    new, ready = make_scheduler(**{**present, **changes}), old.predictor.ready
    if new.table is old.table:
        new.predictor.ready = ready
    new.registry.loras = old.registry.loras  # loaded, and on the devices
    vars(old).clear()
    vars(old).update(vars(new))
