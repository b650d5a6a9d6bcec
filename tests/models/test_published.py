"""Published models by their configurations: each has as many parameters as its safetensors files hold.

Of models with images those of the text model, without vision tower and projector.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest

from jengine.checkpoints.hugging_face import model_config
from jengine.models import build

MODELS: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "published_models.json").read_text()
)


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name: str) -> None:
    declared = build(model_config(MODELS[name]["config"]), "bfloat16", 2048).params
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(declared)) == MODELS[name]["parameters"]
