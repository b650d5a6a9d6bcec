"""Engines over tiny random models, with tables small enough to compile in seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jengine.config import EngineConfig
from jengine.engine import Engine
from jengine.start import start
from tests.engine.running import SMALL
from tests.golden.weights import VARIANTS, max_model_len, tensor_shapes, uniform, write_model
from tests.text.conftest import byte_level, write


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """make_engine(variant, **options) -> Engine; options are EngineConfig's, over SMALL."""
    root: Path = tmp_path_factory.mktemp("models")

    def make(variant: str = "llama_gqa", **options: object) -> Engine:
        folder = root / variant
        if not folder.exists():
            write_model(folder, variant)
        config = EngineConfig.of(str(folder), {"max_model_len": max_model_len(variant), **SMALL, **options})
        return start(config, progress=False)[0]

    return make


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with a byte-level tokenizer, and as many tokens as that has. No end-of-sequence token."""
    folder: Path = tmp_path_factory.mktemp("text_model")
    tokenizer = byte_level()
    config = {**VARIANTS["llama_tied"], "vocab_size": tokenizer.get_vocab_size()}
    tensors = {name: 0.3 * uniform(name, math.prod(shape)).reshape(shape) for name, shape in tensor_shapes(config).items()}
    save_file(
        {name: tensor.astype(np.float32) for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    return write(tokenizer, folder)
