"""Models divided into stages of a pipeline: layers, parameters, and the cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jengine.checkpoints.hugging_face import model_config
from jengine.execution.kv_cache import page_bytes
from jengine.models import build
from jengine.models.cache import cache_groups
from jengine.models.stages import even_stages, layer_costs, part_of, stages_of
from tests.golden.weights import VARIANTS


@pytest.mark.parametrize(
    ("layers", "end", "stages", "expected"),
    [
        (4, 0, 2, (2, 2)),
        (80, 2.5, 4, (20, 21, 21, 18)),  # the head counts as two and a half layers
        (61, 2, 8, (7, 8, 8, 8, 8, 8, 8, 6)),
        (3, 9, 3, (1, 1, 1)),
        (5, 0, 2, (2, 3)),
    ],
)
def test_stages_cost_the_same(layers: int, end: float, stages: int, expected: tuple[int, ...]) -> None:
    assert even_stages([1.0] * layers, 0.0, end, stages) == expected


def test_layers_cost_what_a_token_uses_of_them() -> None:
    """The first layer of this DeepSeek has no experts, of which a token uses a few."""
    model = build(model_config(VARIANTS["deepseek_v3"]), "float32", 64)
    layers, head = layer_costs(model)
    assert len(layers) == 3 and layers[1] == layers[2] != layers[0]
    used = model.elements.layers + model.elements.experts_per_token * model.elements.expert
    assert sum(layers) == pytest.approx(used) and head == model.elements.head


def test_stages_divide_pages_of_all_groups() -> None:
    """Five layers with a window to one without: each stage has few layers of each group, so its pages are
    smaller by as much.
    """
    config = model_config(VARIANTS["gemma3"])
    windows = tuple(None if i % 6 == 5 else 16 for i in range(24))
    model = build(dataclasses.replace(config, num_layers=24, windows=windows), "float32", 64)
    model = dataclasses.replace(model, groups=cache_groups(model.entries, spread=True))
    dtype = np.dtype("float32")
    whole = page_bytes(model.groups, 0, 16, dtype, 1)
    for stage in stages_of(model, (6, 6, 6, 6)):
        part = part_of(model, stage)
        assert [group.window for group in part.groups] == [group.window for group in model.groups]
        assert page_bytes(part.groups, 0, 16, dtype, 1) <= whole / 2
        assert sorted(layer for group in part.groups for layer in group.layers) == [*stage.layers]
