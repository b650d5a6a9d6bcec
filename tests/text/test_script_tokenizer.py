"""The tokenizer that scripts get, compared with transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from jengine.api.script_tokenizer import ScriptTokenizer
from jengine.base.errors import InvalidArgument, ModelError
from jengine.checkpoints.folder import DEMO
from jengine.text.tokenizer import Tokenizer

TEXTS = ["def main():\n    return 1", "x", "", "été 🎉 </s> ok"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if enable_thinking %}<think>{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture(scope="module")
def theirs() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def ours() -> ScriptTokenizer:
    return ScriptTokenizer(Tokenizer.load(DEMO, TEMPLATE), "demo", 64)


def test_text_to_tokens(ours: ScriptTokenizer, theirs: Any) -> None:
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.tokenize(text) == theirs.tokenize(text)
        for special in (True, False):
            assert dict(ours(text, add_special_tokens=special)) == dict(
                theirs(text, add_special_tokens=special)
            )
            for side in ("right", "left"):
                ours.truncation_side = theirs.truncation_side = side
                for most in (1, 3, 6):
                    how: dict[str, Any] = {
                        "truncation": True,
                        "max_length": most,
                        "add_special_tokens": special,
                    }
                    assert ours(text, **how).input_ids == theirs(text, **how).input_ids
    theirs.truncation_side = "right"
    assert dict(ours(TEXTS)) == dict(theirs(TEXTS))


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(side: str, ours: ScriptTokenizer, theirs: Any) -> None:
    ours.padding_side = theirs.padding_side = side
    for how in ({"padding": True}, {"padding": "longest"}, {"padding": "max_length", "max_length": 30}):
        assert dict(ours(TEXTS, **how)) == dict(theirs(TEXTS, **how))  # type: ignore[arg-type]
    arrays, wanted = (
        ours(TEXTS, padding=True, return_tensors="np"),
        theirs(TEXTS, padding=True, return_tensors="np"),
    )
    for name in ("input_ids", "attention_mask"):
        np.testing.assert_array_equal(arrays[name], wanted[name])
    assert dict(ours.pad(ours(TEXTS))) == dict(ours(TEXTS, padding=True))


def test_tokens_to_text(ours: ScriptTokenizer, theirs: Any) -> None:
    rows = [theirs.encode(text) for text in TEXTS]
    for skip in (False, True):
        assert ours.batch_decode(rows, skip_special_tokens=skip) == theirs.batch_decode(
            rows, skip_special_tokens=skip
        )
        assert ours.decode(np.array(rows[0]), skip_special_tokens=skip) == theirs.decode(
            rows[0], skip_special_tokens=skip
        )
        both = [
            tokenizer.convert_ids_to_tokens(rows[3], skip_special_tokens=skip) for tokenizer in (ours, theirs)
        ]
        assert both[0] == both[1]
    assert ours.decode(rows[0][1]) == theirs.decode(rows[0][1])
    assert ours.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)
    tokens = theirs.convert_ids_to_tokens(rows[0])
    assert (
        ours.convert_tokens_to_ids(tokens) == rows[0] and ours.convert_tokens_to_ids(tokens[0]) == rows[0][0]
    )
    assert ours.convert_tokens_to_string(tokens) == theirs.convert_tokens_to_string(tokens)


def test_vocabulary(ours: ScriptTokenizer, theirs: Any) -> None:
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    roles = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token")
    names = ("vocab_size", "is_fast", "all_special_ids", "special_tokens_map", "chat_template")
    for name in (*names, *roles, *(f"{role}_id" for role in roles)):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert sorted(ours.all_special_tokens) == sorted(theirs.all_special_tokens)
    ours.pad_token = ours.eos_token
    assert (ours.pad_token, ours.pad_token_id) == (ours.eos_token, ours.eos_token_id) == ("</s>", 1)
    with pytest.raises(InvalidArgument, match="only the pad token can be set"):
        ours.eos_token = "x"
    with pytest.raises(AttributeError, match="ScriptTokenizer has no 'train_new_from_iterator'"):
        _ = ours.train_new_from_iterator


def test_chat_template(ours: ScriptTokenizer, theirs: Any) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"add_generation_prompt": True},
        {"enable_thinking": True},
        {"continue_final_message": True},
    ]
    cases += [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template": "{{ messages[0].content }}"},
    ]
    for options in cases:
        for conversation in (
            MESSAGES,
            [MESSAGES, MESSAGES[:1]] if "continue_final_message" not in options else MESSAGES,
        ):
            text = theirs.apply_chat_template(conversation, tokenize=False, **options)
            assert ours.apply_chat_template(conversation, tokenize=False, **options) == text
            wanted = theirs.apply_chat_template(conversation, tokenize=True, return_dict=True, **options)
            assert ours.apply_chat_template(conversation, **options) == wanted["input_ids"]
            assert dict(ours.apply_chat_template(conversation, return_dict=True, **options)) == dict(wanted)
    padded = ours.apply_chat_template([MESSAGES, MESSAGES[:1]], padding=True, return_tensors="np")
    assert padded.shape[0] == 2


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda t: t("a", "b"), "takes 2 positional"),
        (lambda t: t("a", text_pair="b"), "text_pair='b': must be None"),
        (lambda t: t(["a", 5]), "text=5: must be text"),
        (lambda t: t("a", return_tensors="pt"), "return_tensors='pt': must be None or np"),
        (lambda t: t("a", padding="widest"), "padding='widest': must be True"),
        (
            lambda t: t(["a", "a b c"], return_tensors="np"),
            "must be True for an array of texts of different lengths",
        ),
        (lambda t: t("a", nonsense=1), "nonsense=1: there is no such argument"),
        (
            lambda t: t.decode([1], clean_up_tokenization_spaces=True),
            "clean_up_tokenization_spaces=True: must be None or False",
        ),
        (lambda t: t.apply_chat_template(MESSAGES, tools=[print]), "tools="),
        (
            lambda t: t.apply_chat_template(
                MESSAGES, add_generation_prompt=True, continue_final_message=True
            ),
            "excludes",
        ),
    ],
)
def test_what_is_refused(call: Any, says: str, ours: ScriptTokenizer) -> None:
    with pytest.raises((InvalidArgument, TypeError)) as refused:
        call(ours)
    assert says in str(refused.value)


def test_templates_given_as_files_or_text(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    for given in (file, str(file), TEMPLATE):
        assert ScriptTokenizer(Tokenizer.load(DEMO, given)).chat_template == TEMPLATE
    with pytest.raises(InvalidArgument, match="there is no such file, and it is no Jinja template either"):
        Tokenizer.load(DEMO, "nowhere.jinja")
    with pytest.raises(ModelError, match="is not a valid Jinja template"):
        Tokenizer.load(DEMO, "{% if %}")
    with pytest.raises(ModelError, match="no chat template"):
        ScriptTokenizer(Tokenizer.load(DEMO)).apply_chat_template(MESSAGES)
