"""Reading sentence-transformers' files, and rejected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, PoolingType

from jengine.base.errors import ModelError
from jengine.checkpoints.sentence_transformers import choose_embedder, read_embedder, read_reranker
from jengine.core.pooling import Embedder, PoolingParams, Reranker
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


FULL = {  # as version 6 writes them
    "config_sentence_transformers.json": {
        "__version__": {"sentence_transformers": "6.2.0"},
        "model_type": "SentenceTransformer",
        "prompts": {"query": "Query: ", "document": ""},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
        "truncate_dim": 16,
    },
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    },
    "tokenizer_config.json": {"model_max_length": 20},
    "1_Pooling/config.json": {"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": True},
    "2_Normalize/config.json": {"module_input_name": "sentence_embedding"},
}


def write_full(folder: Path, file: str = "", **changes: Any) -> Path:
    write_modules(folder, "Transformer", "Pooling", "Normalize")
    for name, content in FULL.items():
        changed = {**content, **changes} if name == file else content
        (folder / name).write_text(json.dumps(changed))
    return folder


def test_all_settings_of_a_folder(tmp_path: Path) -> None:
    found = read_embedder(write_full(tmp_path), 64)
    assert found == Embedder(
        size=64,
        pooling="mean",
        max_tokens=20,
        prompt="Query: ",
        truncate_dim=16,
        similarity="dot",
    )
    assert found.params(None, None, None) == PoolingParams(pooling="mean", truncate_dim=16, prompt="Query: ")
    assert found.params(None, None, 8).truncate_dim is None, "the request's dimensions replace the folder's"


@pytest.mark.parametrize(
    "file, changes, most",
    [
        ("sentence_bert_config.json", {"max_seq_length": 30}, 30),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 9}}}, 9),
        ("sentence_bert_config.json", {"tokenizer_args": {"model_max_length": 40}}, 40),
        ("tokenizer_config.json", {"model_max_length": int(1e30)}, None),
        ("tokenizer_config.json", {"model_max_length": 1e30}, None),
        ("tokenizer_config.json", {"model_max_length": None}, None),
    ],
)
def test_wherever_the_limit_is(file: str, changes: Any, most: int | None, tmp_path: Path) -> None:
    found = read_embedder(write_full(tmp_path, file, **changes), 64)
    assert found is not None and found.max_tokens == most


def test_older_names_of_the_first_modules_settings(tmp_path: Path) -> None:
    write(tmp_path, "Transformer", "Pooling")
    (tmp_path / "sentence_roberta_config.json").write_text('{"max_seq_length": 33}')
    found = read_embedder(tmp_path, 64)
    assert found is not None and found.max_tokens == 33


@pytest.mark.parametrize(
    "file, changes, message",
    [
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name='x'"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "x"}, "similarity_fn_name='x' is not"),
        (
            "config_sentence_transformers.json",
            {"truncate_dim": "x"},
            "truncate_dim='x' is not a whole",
        ),
        ("config_sentence_transformers.json", {"novel": 1}, "novel=1 is not supported"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "modality_config: embedding thr"),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"length": 3}},
            "query_expansion=.*not supported",
        ),
        ("sentence_bert_config.json", {"model_args": {"lora": 1}}, "model_args.lora=1 is not supported"),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"a": 1}}},
            "processing_kwargs.text.a=1",
        ),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt=false with a default prompt"),
        ("1_Pooling/config.json", {"novel": 1}, "novel=1 is not supported"),
        ("2_Normalize/config.json", {"module_input_name": "x"}, "module_input_name='x' is not supported"),
    ],
)
def test_settings_that_are_not_applied(file: str, changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_embedder(write_full(tmp_path, file, **changes), 64)


@pytest.mark.parametrize("kinds", [("Pooling", "Pooling"), ("Pooling", "Normalize", "Normalize")])
def test_modules_that_occur_twice(kinds: tuple[str, ...], tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", *kinds)
    with pytest.raises(ModelError, match="are not Transformer, Pooling and perhaps Normalize"):
        read_embedder(tmp_path, 64)


def test_activations_of_rerankers(tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", "LogitScore")
    (tmp_path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 5, "false_token_id": 7}')
    for name, probability in (("activation.Sigmoid", True), ("linear.Identity", False), (None, True)):
        named = None if name is None else f"torch.nn.modules.{name}"
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": named}))
        found = read_reranker(tmp_path)
        assert found is not None and found.probability == probability
    (tmp_path / "config_sentence_transformers.json").write_text('{"activation_fn": "torch.nn.Tanh"}')
    with pytest.raises(ModelError, match=r"activation_fn='torch\.nn\.Tanh' is not supported"):
        read_reranker(tmp_path)


@pytest.mark.parametrize("kind, pooling", [(0, None), (1, "mean"), (3, "last"), (2, "x"), (4, "x")])
def test_gguf(kind: int, pooling: Any, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "qwen3")
    writer.add_pooling_type(PoolingType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    if pooling == "x":
        with pytest.raises(ModelError, match=f"pooling_type={kind} is not supported"):
            choose_embedder(None, tmp_path / "a.gguf", 64)
        return
    expected = None if pooling is None else Embedder(size=64, pooling=pooling)
    assert choose_embedder(None, tmp_path / "a.gguf", 64) == expected


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
        (("Transformer", "Pooling"), FLAGS, {"do_lower_case": True}, "do_lower_case=True is not supported"),
        (
            ("Transformer", "Pooling"),
            FLAGS,
            {"max_seq_length": "x"},
            "max_seq_length='x' is not a whole number",
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
