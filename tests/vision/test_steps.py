"""Positions of three numbers, and tokens that see later ones, through batches and pages."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.checkpoints import load, read_config
from jengine.core.config import EngineConfig
from jengine.engine.setup.shapes import describe
from jengine.execution.batch import BatchLayout
from jengine.execution.trunk import make_trunk
from jengine.models.cache import paged
from jengine.models.whole_sequences import WholeSequences
from jengine.parallel.mesh import make_mesh
from jengine.scheduling.requests.images import mrope
from jengine.scheduling.step_plan import Sample, Span, StepPlan
from jengine.table.program_table import TrunkKey
from jengine.vision.family import VISUAL
from tests.golden.images import last_seen
from tests.golden.weights import write_model

PAGE, LENGTH, GRID = 16, 44, (4, 5)
IMAGE = slice(6, 26)


@pytest.mark.parametrize(("variant", "cuts"), [("qwen3_vl", (0, 20, 44)), ("gemma3_images", (0, 26, 44))])
def test_steps_give_what_whole_sequences_do(variant: str, cuts: tuple[int, ...], tmp_path: Path) -> None:
    """With mrope, steps cut an image; where its tokens see each other, a step has all of them, in two tiles.
    A row follows the prompt.
    """
    write_model(tmp_path, variant)
    options = {"max_model_len": 96, "page_size": PAGE, "tile_size": PAGE, "max_num_seqs": 8}
    mesh, config = make_mesh(1), EngineConfig.of("MODEL", {**options, "dtype": "float32"})
    spec = dataclasses.replace(describe(config, read_config(tmp_path), mesh, tmp_path), num_pages=16)
    params, groups = load(tmp_path, spec.model, mesh, progress=False), len(paged(spec.groups))
    tokens = np.random.default_rng(0).integers(0, 60, LENGTH + 1).astype(np.int32)
    visual = tokens.tolist()
    visual[IMAGE] = [VISUAL] * 20
    at = np.arange(LENGTH + 1)
    places, after = mrope(visual[:LENGTH], [GRID])
    turns, ahead = (places - at[:-1]).T, last_seen(visual, [20]) - at
    turned, until = at[None] + np.concatenate([turns.T, np.full((3, 1), after)], axis=1), None
    if variant == "gemma3_images":
        turned, until = at, jnp.asarray(at + ahead)

    @cache
    def compiled(key: TrunkKey) -> tuple[BatchLayout, Any]:
        kinds = {"turns": until is None, "ahead": until is not None}
        layout = BatchLayout.of(key, spec.table, page_size=PAGE, groups=groups, **kinds)
        return layout, jax.jit(make_trunk(spec, layout))

    state: Any = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), (spec.cache, spec.slots))
    found = []
    for start, end in zip(cuts, (*cuts[1:], LENGTH + 1), strict=True):
        own: dict[str, Any] = {}
        if start == LENGTH:
            span = Span(1, 1, start, known=int(tokens[start]), after=after)
        else:
            own = {"turns": turns[start:end]} if until is None else {"ahead": ahead[start:end]}
            span = Span(1, 1, start, end - start, tokens[start:end].tolist(), **own)
        tiles = 0 if start == LENGTH else -(-(end - start) // PAGE)
        key = spec.table.trunk(1 - min(tiles, 1), tiles, samples=1)
        pages = range(start // PAGE, -(-end // PAGE))
        entries = [(group, 1, index, 1 + 3 * group + index) for group in range(groups) for index in pages]
        plan = StepPlan(key, spec.table.sampler(key, "greedy"), [span], [Sample(0, 0, 1, 1)], table=entries)
        layout, run = compiled(key)
        *state, sampled, hidden = run(params, (), *state, jnp.asarray(layout.pack(plan)))
        found.append(np.asarray(hidden[: end - start] if tiles else sampled.hidden[:1]))
    module: Any = spec.model.bind(params)
    whole = jax.jit(module.hidden, static_argnums=2)
    want = whole(jnp.asarray(tokens), jnp.asarray(turned), WholeSequences(1, until))
    np.testing.assert_allclose(np.concatenate(found), want, atol=2e-5)
    plain = whole(jnp.asarray(tokens), jnp.asarray(at), WholeSequences(1))
    assert np.abs(plain - want)[IMAGE.start + 1 :].max() > 1e-2
