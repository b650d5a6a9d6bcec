"""Tunix's GRPO with jengine as its rollout engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.engine.on_demand import on_demand
from tests.extras import of_extra

of_extra("tunix", "tunix")

from benchmarks.tunix_grpo import train  # noqa: E402
from jengine.integrations.tunix.rollout import JengineRollout  # noqa: E402
from tests.integrations.tunix.models import actor_of, mesh, tokenizer_of, write_folder  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Tunix's
    pytest.mark.full,
]


def test_rewards_rise(tmp_path: Path) -> None:
    """In 20 steps, a random model learns to write more vowels."""
    folder = write_folder(tmp_path)
    options = {"dtype": "float32", "max_num_seqs": 32, "page_size": 16, "tile_size": 64}
    with on_demand():
        rewards = train(
            partial(JengineRollout, model=folder, **options),
            actor_of(folder),
            tokenizer_of(folder),
            mesh(),
            steps=20,
        )
    assert len(rewards) == 20
    assert np.mean(rewards[-5:]) > 2 * rewards[0]
