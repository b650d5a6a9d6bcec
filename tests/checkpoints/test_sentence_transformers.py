"""Reading sentence-transformers' files, and rejected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jengine.base.errors import ModelError
from jengine.checkpoints.sentence_transformers import choose_embedder, read_embedder, read_reranker
from jengine.core.pooling import Embedder, Reranker
from tests.golden.embedding_models import write_modules

FLAGS = {
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}


def write(folder: Path, *kinds: str, pooling: Any = FLAGS, options: Any = None) -> Path:
    write_modules(folder, *kinds)
    if "Pooling" in kinds:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if options is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps(options))
    return folder


@pytest.mark.parametrize(
    "pooling, expected",
    [
        (FLAGS, "last"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 64}, "mean"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({}, "mean"),  # sentence-transformers' own default
    ],
)
def test_poolings(pooling: dict[str, Any], expected: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "Transformer", "Pooling", pooling=pooling)
    assert read_embedder(folder, 64) == Embedder(size=64, pooling=expected, normalize=False)  # type: ignore[arg-type]


def test_normalize_and_the_longest_prompt(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        "Transformer",
        "Pooling",
        "Normalize",
        options={"max_seq_length": 100, "do_lower_case": False},
    )
    assert read_embedder(folder, 64) == Embedder(size=64, pooling="last", normalize=True, max_tokens=100)


def test_who_chooses(tmp_path: Path) -> None:
    assert choose_embedder(None, tmp_path, 64) is None
    assert choose_embedder(True, tmp_path, 64) == Embedder(size=64, pooling="last", normalize=True)
    folder = write(tmp_path, "Transformer", "Pooling", pooling={"pooling_mode": "mean"})
    assert (
        choose_embedder(None, folder, 64)
        == choose_embedder(True, folder, 64)
        == Embedder(size=64, pooling="mean", normalize=False)
    )
    assert choose_embedder(False, folder, 64) is None


@pytest.mark.parametrize(
    "kinds, pooling, options, message",
    [
        (
            ("Transformer", "Pooling", "Dense", "Normalize"),
            FLAGS,
            None,
            "Transformer, Pooling, Dense, Normalize are not .*embeddings=False",
        ),
        (("Transformer", "Pooling"), {"pooling_mode": "cls"}, None, "pooling_mode='cls' is not supported"),
        (
            ("Transformer", "Pooling"),
            {**FLAGS, "pooling_mode_cls_token": True},
            None,
            r"pooling_mode=\['cls', 'lasttoken'\] is not",
        ),
        (
            ("Transformer", "Pooling"),
            {**FLAGS, "word_embedding_dimension": 32},
            None,
            "embedding_dimension=32 is not the model's hidden",
        ),
        (("Transformer", "Pooling"), FLAGS, {"do_lower_case": True}, "do_lower_case=true is not supported"),
        (
            ("Transformer", "Pooling"),
            FLAGS,
            {"max_seq_length": "x"},
            "max_seq_length='x' is not a number of tokens",
        ),
    ],
)
def test_what_is_refused(
    kinds: tuple[str, ...], pooling: Any, options: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_embedder(write(tmp_path, *kinds, pooling=pooling, options=options), 64)


def test_modules_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(ModelError, match=r"modules\.json: is not a list of modules"):
        read_embedder(tmp_path, 64)


def test_rerankers(tmp_path: Path) -> None:
    assert read_reranker(tmp_path) is None
    write(
        tmp_path,
        "Transformer",
        "LogitScore",
        options={"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}},
    )
    file = tmp_path / "1_LogitScore" / "config.json"
    file.write_text(json.dumps({"true_token_id": 5, "false_token_id": 7}))
    assert read_reranker(tmp_path) == Reranker(true_token_id=5, false_token_id=7, add_generation_prompt=True)
    prompts = {"prompts": {"web": "Find it."}, "default_prompt_name": "web"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "sentence_bert_config.json").unlink()
    assert read_reranker(tmp_path) == Reranker(true_token_id=5, false_token_id=7, instruction="Find it.")
    assert read_embedder(tmp_path, 64) is None
    file.write_text(json.dumps({"true_token_id": 5, "false_token_id": None}))
    with pytest.raises(ModelError, match="false_token_id=None is not a token id"):
        read_reranker(tmp_path)
