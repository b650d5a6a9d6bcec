"""Chat templates and tokens of adapters' folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jengine import ModelError, Tokenizer, chat_prompt
from jengine.spi import find_lora, lora_tokenizer

OWN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
MODELS = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
HELLO = [{"role": "user", "content": "fox"}]


@pytest.fixture
def model(byte_level_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(byte_level_folder, folder)
    (folder / "chat_template.jinja").write_text(MODELS)
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    return folder


def rendered(tokenizer: Tokenizer) -> str:
    return chat_prompt(tokenizer, HELLO)["prompt"]


@pytest.mark.parametrize("given", [None, "given {{ messages[0].content }}"])
def test_an_own_template_replaces_the_models(model: Path, adapter: Path, given: str | None) -> None:
    tokenizer = Tokenizer.load(model, given)
    assert lora_tokenizer(tokenizer, adapter) is tokenizer
    (adapter / "tokenizer_config.json").write_text(json.dumps({"chat_template": OWN}))
    found = lora_tokenizer(tokenizer, adapter)
    assert rendered(found) == "[fox]" != rendered(tokenizer)
    assert found.encode("fox") == tokenizer.encode("fox") and found.folder == tokenizer.folder


@pytest.mark.parametrize("given", [None, "given {{ messages[0].content }}"])
def test_a_copy_of_the_models_template_is_no_own_one(model: Path, adapter: Path, given: str | None) -> None:
    """Trainers save it with every adapter; --chat-template then still replaces it."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, adapter)
    tokenizer = Tokenizer.load(model, given)
    assert lora_tokenizer(tokenizer, adapter) is tokenizer
    config = json.loads((adapter / "tokenizer_config.json").read_text())
    (adapter / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<tool>"}))
    assert rendered(lora_tokenizer(tokenizer, adapter)) == "fox<tool>"


@pytest.mark.parametrize(
    "name, content, says",
    [
        (
            "added_tokens.json",
            {"<a>": 400},
            "token '<a>' with id 400, but the model's tokenizer lacks it",
        ),
        ("added_tokens.json", {"<tool>": 400}, "added token '<tool>' with id 400, but it is 399"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"400": {"content": "<a>"}}}, "lacks it"),
        ("tokenizer.json", {"added_tokens": [{"id": 400, "content": "<a>"}]}, "lacks it"),
        ("tokenizer.json", {"added_tokens": [{"id": 400}]}, "its added tokens cannot be read"),
        ("tokenizer.json", [], "its added tokens cannot be read"),
        ("added_tokens.json", {"<a>": None}, "its added tokens cannot be read"),
        ("tokenizer_config.json", {"added_tokens_decoder": 5}, "its added tokens cannot be read"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template cannot be read"),
        ("tokenizer_config.json", {"chat_template": "{% for"}, "is not a valid Jinja template"),
    ],
)
def test_what_does_not_fit_the_model(model: Path, adapter: Path, name: str, content: Any, says: str) -> None:
    (adapter / name).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=says) as wrong:
        lora_tokenizer(Tokenizer.load(model), adapter)
    assert name in str(wrong.value)


def test_tokens_that_the_model_has(model: Path, adapter: Path) -> None:
    shutil.copy(model / "tokenizer.json", adapter)
    (adapter / "added_tokens.json").write_text(json.dumps({"<tool>": 399}))
    tokenizer = Tokenizer.load(model)
    assert lora_tokenizer(tokenizer, adapter) is tokenizer


def test_folders_and_hub_ids(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def download(model: str, **options: Any) -> str:
        asked.append((model, options["allow_patterns"]))
        return str(adapter)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(adapter.parent)
    assert find_lora("adapter") == find_lora(str(adapter)) == adapter.resolve() and not asked
    assert find_lora("owner/name") == adapter.resolve()
    assert asked == [("owner/name", ["adapter_model.safetensors", "*.json", "*.jinja"])]
    for path in ("nothing", "./a/b", "../adapter2", "a/b/c", "a\0/b", "", "~/none/x", "~no-such-user/x"):
        with pytest.raises(ModelError):
            find_lora(path)
    assert len(asked) == 1
