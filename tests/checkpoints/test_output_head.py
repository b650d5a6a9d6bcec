"""Output heads beside a configuration that ties them to the embeddings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jengine.base.errors import ModelError
from jengine.checkpoints import load, read_config
from jengine.checkpoints.folder import with_stored_head
from jengine.checkpoints.in_memory import in_memory
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from tests.golden.weights import VARIANTS, weights

VARIANT, HEAD, TABLE = "llama_tied", "lm_head.weight", "model.embed_tokens.weight"


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_head_that_differs_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers 5: the saved head counts, and a warning says so."""
    tensors = weights(VARIANT)
    head = tensors[TABLE][::-1].copy()
    with caplog.at_level(logging.WARNING, "jengine"):
        config = read_config(write(tmp_path, VARIANTS[VARIANT], {**tensors, HEAD: head}))
    assert not config.tie_embeddings
    assert "lm_head.weight differs from the embeddings; it is used as it is" in caplog.text
    params = load(tmp_path, build(config, "float32", 64), make_mesh(1), progress=False)
    np.testing.assert_array_equal(params["lm_head"], head)


def test_a_head_that_is_equal_is_the_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = weights(VARIANT)
    config = read_config(write(tmp_path, VARIANTS[VARIANT], {**tensors, HEAD: tensors[TABLE].copy()}))
    assert config.tie_embeddings and not caplog.records
    params = load(tmp_path, build(config, "float32", 64), make_mesh(1), progress=False)
    assert "lm_head" not in params


def test_a_head_of_another_dtype_or_format_differs(tmp_path: Path) -> None:
    config, tensors = read_config(write(tmp_path, VARIANTS[VARIANT], weights(VARIANT))), weights(VARIANT)
    different: list[dict[str, np.ndarray]] = [
        {HEAD: tensors[TABLE].astype(np.float16)},
        {"lm_head.qweight": np.zeros((4, 4), np.int32)},
        {"language_model.lm_head.weight": tensors[TABLE] + 1},
    ]
    for heads in different:
        assert not with_stored_head(config, in_memory({**tensors, **heads})).tie_embeddings
    biased = {**tensors, "lm_head.bias": np.zeros(4, np.float32)}
    assert with_stored_head(config, in_memory(tensors)).tie_embeddings
    assert with_stored_head(config, in_memory(biased)).tie_embeddings


def test_new_weights_of_a_tied_model_have_no_other_head(tmp_path: Path) -> None:
    tensors = weights(VARIANT)
    model = build(read_config(write(tmp_path, VARIANTS[VARIANT], tensors)), "float32", 64)
    load(tmp_path, model, make_mesh(1), False, in_memory({**tensors, HEAD: tensors[TABLE]}))
    with pytest.raises(ModelError, match=r"lm_head.weight: differs from the embeddings, which the model"):
        load(tmp_path, model, make_mesh(1), False, in_memory({**tensors, HEAD: tensors[TABLE] + 1}))


def test_a_folder_without_all_of_its_weights_has_a_configuration(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, VARIANTS[VARIANT], weights(VARIANT)))
    index = {"weight_map": {TABLE: "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    assert read_config(tmp_path) == config
