"""A tiny embedding model and a tiny reranker, in the layouts of Qwen3-Embedding and Qwen3-Reranker, and what
transformers computes.

Folders hold no tokenizer. Needs numpy only, and safetensors to write a folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.golden.variants import VARIANTS
from tests.golden.weights import weights

VARIANT = "qwen3_embedding"
CONFIG: dict[str, Any] = {
    **VARIANTS["qwen3_untied"],
    "tie_word_embeddings": True,
    "vocab_size": 512,
}  # as many as the tests' tokenizers have
SIZE: int = CONFIG["hidden_size"]
TRUE, FALSE = 300, 400  # the reranker's tokens
FILE = Path(__file__).parent / f"{VARIANT}.npz"
TEMPLATE = (
    "{%- set told = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first |"
    " default('Judge.') -%}<Instruct>: {{ told }}\n<Query>: {{ messages | selectattr('role', 'eq', 'query') |"
    " map(attribute='content') | first }}\n<Document>: {{ messages | selectattr('role', 'eq', 'document') |"
    " map(attribute='content') | first }}{{ '\\n<Answer>: ' if add_generation_prompt else '' }}"
)


def write_model(folder: Path, **changes: Any) -> Path:
    """The bare decoder: tensors' names lack the prefix, and there is no output head. changes: to
    config.json.
    """
    from safetensors.numpy import save_file

    tensors = weights(VARIANT, CONFIG)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def write_embedder(folder: Path, pooling: str = "lasttoken", normalize: bool = True, **changes: Any) -> Path:
    """Writes an embedding model with sentence-transformers' files."""
    write_modules(folder, "Transformer", "Pooling", *(["Normalize"] if normalize else []))
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": SIZE, f"pooling_mode_{pooling}": True})
    )
    return write_model(folder, **changes)


def write_reranker(folder: Path, **fields: Any) -> Path:
    """Writes a reranker with sentence-transformers' files and a chat template. `fields` are those of
    LogitScore's configuration.
    """
    write_modules(folder, "Transformer", "LogitScore")
    (folder / "1_LogitScore" / "config.json").write_text(
        json.dumps({"true_token_id": TRUE, "false_token_id": FALSE, **fields})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}})
    )
    return write_model(folder)


def write_modules(folder: Path, *kinds: str) -> None:
    """modules.json, and a folder for each module but the first."""
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    for module in modules:
        (folder / str(module["path"])).mkdir(parents=True, exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))


class Case(NamedTuple):
    """A prompt, and what transformers makes of it."""

    prompt: list[int]
    last: np.ndarray  # float32[hidden_size], the final hidden state of its last token
    mean: np.ndarray  # float32[hidden_size], over all of its tokens
    probability: float  # of TRUE against FALSE, as the next token

    def vector(self, pooling: str, normalize: bool, dimensions: int | None) -> np.ndarray:
        vector = (self.last if pooling == "last" else self.mean)[:dimensions]
        return vector / np.linalg.norm(vector) if normalize else vector


def read() -> list[Case]:
    with np.load(FILE) as file:
        arrays = dict(file)
    count = len(arrays["probability"])
    return [
        Case(
            arrays[f"prompt_{i}"].tolist(),
            arrays[f"last_{i}"],
            arrays[f"mean_{i}"],
            float(arrays["probability"][i]),
        )
        for i in range(count)
    ]
