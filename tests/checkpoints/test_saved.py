"""Folders that save_pretrained of the current transformers writes, for every tiny model: readers take the
recorded names and shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jengine.checkpoints import read_config
from jengine.checkpoints.encoder import encoder_makers
from jengine.checkpoints.in_memory import in_memory
from jengine.checkpoints.weights import read
from jengine.models import build
from jengine.vision.declared import Encoder
from jengine.vision.folder import vision_of
from tests.golden.weights import VARIANTS

SAVED = Path(__file__).parent.parent / "golden" / "saved.npz"


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    with np.load(SAVED) as file:
        return {name: json.loads(str(file[name])) for name in file.files if name != "transformers"}


def test_every_variant_is_recorded(saved: dict[str, Any]) -> None:
    assert saved.keys() == {f"{how}_{variant}" for how in ("loaded", "made") for variant in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_saves_is_read(variant: str, saved: dict[str, Any], tmp_path: Path) -> None:
    for how in ("loaded", "made"):
        one = saved[f"{how}_{variant}"]
        (tmp_path / "config.json").write_text(json.dumps(one["config"]))
        zero = np.zeros((), np.float32)
        tensors = in_memory({name: np.broadcast_to(zero, shape) for name, shape in one["tensors"].items()})
        config = read_config(tmp_path)
        read(tmp_path, build(config, "float32", 64), tensors)
        if (vision := vision_of(tmp_path, lambda text: [0])) is not None:
            encoder = Encoder.of(vision, "float32")
            assert encoder_makers(encoder.params, encoder.sources, tensors)
