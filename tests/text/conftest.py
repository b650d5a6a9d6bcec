"""Small tokenizers of the two common kinds, trained in the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "naïve café, Grüße aus Köln; 你好，世界。 こんにちは世界 🙂🙃👩‍👩‍👧",
    "The quick brown fox jumps over the lazy dog. The end of the story is the end.",
] * 4


def byte_level() -> Tokenizer:
    """GPT-2's kind. The first 256 ids after <s> and </s> are single bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    # text that shows, unlike <s>
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's: SentencePiece's space mark, and single bytes for characters outside of the
    vocabulary.
    """
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, limit_alphabet=60, show_progress=False
    )
    trained.train_from_iterator(TEXT, trainer)
    spec = json.loads(trained.to_str())
    spec["added_tokens"] = [
        token for token in spec["added_tokens"] if token["content"] in ("<unk>", "<s>", "</s>")
    ]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(byte_level(), tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def byte_fallback_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(byte_fallback(), tmp_path_factory.mktemp("byte_fallback"))
