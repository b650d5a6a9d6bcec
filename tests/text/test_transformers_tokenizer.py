"""The tokenizer of transformers that scripts get, and chat templates that users pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from jengine.base.errors import InvalidArgument, ModelError
from jengine.checkpoints.folder import DEMO
from jengine.text.tokenizer import SPECIAL_TOKENS, Tokenizer

TEXTS = ["def main():\n    return 1", "x", "", "été 🎉 </s> ok"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if enable_thinking %}<think>{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture
def engines() -> Tokenizer:
    return Tokenizer.load(DEMO, TEMPLATE)


def test_it_equals_the_one_that_transformers_reads(engines: Tokenizer) -> None:
    ours: Any = engines.for_transformers("demo", 64)
    theirs = AutoTokenizer.from_pretrained(DEMO)
    theirs.chat_template = TEMPLATE
    assert dict(ours(TEXTS)) == dict(theirs(TEXTS))
    assert ours.get_vocab() == theirs.get_vocab() and ours.model_max_length == 64
    rows = theirs(TEXTS).input_ids
    for skip in (False, True):
        assert ours.batch_decode(rows, skip_special_tokens=skip) == theirs.batch_decode(
            rows, skip_special_tokens=skip
        )
    for name in (*SPECIAL_TOKENS, "all_special_ids", "special_tokens_map"):
        assert getattr(ours, name) == getattr(theirs, name), name
    options: dict[str, Any]
    for options in (
        {},
        {"add_generation_prompt": True},
        {"enable_thinking": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ):
        mine, wanted = (one.apply_chat_template(MESSAGES, **options) for one in (ours, theirs))
        assert dict(mine) == dict(wanted)


def test_it_encodes_as_the_engine_does(engines: Tokenizer) -> None:
    ours: Any = engines.for_transformers("demo", 64)
    for text in TEXTS:
        assert ours.encode(text) == engines.encode(text)
        assert ours.decode(engines.encode(text)) == engines.decode(
            engines.encode(text), skip_special_tokens=False
        )


def test_changes_do_not_reach_the_engine(engines: Tokenizer) -> None:
    ours: Any = engines.for_transformers("demo", 64)
    ours.pad_token = ours.eos_token
    ours.add_tokens(["<new>"])
    ours(TEXTS, padding=True, truncation=True, max_length=3)
    assert engines.backend.token_to_id("<new>") is None and len(engines.encode(TEXTS[0])) > 3


def test_several_templates_without_a_folder() -> None:
    from jengine.text.chat_template import ChatTemplate

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    bare = Tokenizer(backend)
    assert bare.for_transformers("", 8).chat_template is None
    bare.chat_templates = {name: ChatTemplate(name, {}) for name in ("default", "tool_use")}
    tokenizer: Any = bare.for_transformers("", 8)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "default"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}], tokenize=False) == "tool_use"


def test_templates_given_as_files_or_text(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    for given in (file, str(file), TEMPLATE):
        assert Tokenizer.load(DEMO, given).chat_templates["default"].source == TEMPLATE
    with pytest.raises(InvalidArgument, match="there is no such file, and it is no Jinja template either"):
        Tokenizer.load(DEMO, "nowhere.jinja")
    with pytest.raises(ModelError, match="is not a valid Jinja template"):
        Tokenizer.load(DEMO, "{% if %}")
