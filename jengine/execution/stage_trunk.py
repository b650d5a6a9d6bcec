"""The trunk of one stage of a pipeline: its layers, with the embedding in the first stage and the final norm
in the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jengine.execution.kv_cache import Cache
from jengine.execution.slots import SlotState, updated
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import make_pass, of_tiles, to_sample
from jengine.models import Params
from jengine.table.program_table import MOST_STATES, TrunkKey


def make_stage_trunk(spec: ExecutionSpec, key: TrunkKey) -> Callable[..., Any]:
    """The function to compile: (params, cache, slots, packed batch, hidden states from the stage before, if
    there is one) -> (cache, slots, hidden states); of the last stage: (cache, slots, ToSample, hidden states
    of tiles).
    """
    stage, layout = spec.stage, spec.layout(key)
    passed = spec.table.passed_tiles(key.tiles) * spec.table.tile_size

    def compute(module: Any, tokens: jax.Array, positions: jax.Array, attend: Any, *entering: Any) -> Any:
        x = module.enter(tokens, positions, attend) if stage.first else entering[0]
        x = module.through(x, positions, attend, stage.layers)
        return module.leave(x) if stage.last else x

    run = make_pass(
        spec.model,
        key,
        spec.page_size,
        spec.mesh.devices.flat[0],
        batch_invariant=spec.table.batch_invariant,
        following=MOST_STATES if spec.draft_states else 0,
        compute=compute,
    )

    def trunk(params: Params, cache: Cache, slots: SlotState, packed: jax.Array, *entering: Any) -> Any:
        batch = layout.unpack(packed)
        slots = updated(slots, batch.table, batch.resets)
        cache, axis, hidden = run(params, cache, slots, batch, *entering)
        if not stage.last:
            return cache, slots, hidden
        return cache, slots, to_sample(batch, axis, hidden), of_tiles(hidden, key, passed)

    return trunk
