"""Chat templates compared with transformers; errors in templates and messages; and operations that templates
may not use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jengine import InvalidArgument, ModelError
from jengine.api.chat import chat_prompt, conversations
from jengine.text.chat_template import ChatTemplate, load_chat_templates
from jengine.text.tokenizer import Tokenizer
from tests.text.chat_templates import ALL, CHATML, INSTRUCT, LLAMA_3, THINKING
from tests.text.conftest import byte_level, write

USER = {"role": "user", "content": '  Wie heißt <du> & "warum"? 🙂\n'}
ANSWER = {"role": "assistant", "content": "<think>hm\n</think>\n\nIch heiße {{ 7 * 7 }} {% if %}.  "}
SYSTEM = {"role": "system", "content": "Be brief.\nBe kind. "}
TOOLS = [
    {"type": "function", "function": {"name": "größe", "parameters": {"b": ["<x>", 1.5, None], "a": {}}}}
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "größe", "arguments": {"q": [1]}}}],
}
CONVERSATIONS = {
    "question": [USER],
    "system": [SYSTEM, USER],
    "history": [USER, ANSWER, USER],
    "system and history": [SYSTEM, USER, ANSWER, USER, ANSWER],
    "developer": [{"role": "developer", "content": "Speak Latin."}, USER],
    "tool call": [USER, CALL, {"role": "tool", "content": "<tool_response>3"}],
    "two systems": [SYSTEM, {"role": "system", "content": "Be quick."}, USER],
    "nothing asked": [SYSTEM],
}

# what a template loses, or rejects, unless the conversation is adapted to it
MARKS = {
    "developer": ["Speak Latin."],
    "tool call": ['{"q": [1]}', "<tool_response>3"],
    "two systems": ["Be brief.", "Be quick."],
}


def folder_with(folder: Path, template: Any, **more: str) -> Path:
    write(byte_level(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template, **more}))
    return folder


@pytest.fixture(params=ALL)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return folder_with(tmp_path, ALL[request.param])


def test_equals_transformers(folder: Path) -> None:
    """Text and tokens, with every conversation and option that the template shows."""
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    shown = refused = adapted = 0
    for name, messages in CONVERSATIONS.items():
        for options in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True},
            {"add_generation_prompt": True, "tools": TOOLS},
            {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 Jan 2000"},
        ):
            known = ours.chat_templates["default"].names
            if "tools" in options and "tools" not in known:
                continue
            variables = {
                key: value
                for key, value in options.items()
                if key in ("enable_thinking", "date_string") and key in known
            }
            plain = {
                key: value for key, value in options.items() if key not in ("enable_thinking", "date_string")
            }
            try:
                expected = theirs.apply_chat_template(messages, tokenize=False, **plain, **variables)
            except Exception:
                expected = None
            try:
                prompt = chat_prompt(ours, messages, **plain, chat_template_kwargs=variables)
            except InvalidArgument:
                assert expected is None, (name, options)
                refused += 1
                continue
            if expected is None or any(mark not in expected for mark in MARKS.get(name, [])):
                assert all(mark in prompt["prompt"] for mark in MARKS[name]), (name, options)
                adapted += 1
                continue
            assert prompt["prompt"] == expected, (name, options)
            ids = theirs.apply_chat_template(messages, **plain, **variables)["input_ids"]
            assert prompt["prompt_token_ids"] == ids and ids.count(0) == expected.count("<s>")
            shown += 1
    assert shown >= 15 and adapted and refused <= 5


def test_continues_inside_the_last_message(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_with(tmp_path, CHATML))
    half = {"role": "assistant", "content": "I am"}
    text = chat_prompt(tokenizer, [USER, half], continue_final_message=True)["prompt"]
    assert text.endswith("<|im_start|>assistant\nI am")
    with pytest.raises(InvalidArgument, match="excludes continue_final_message"):
        chat_prompt(tokenizer, [USER, half], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(InvalidArgument, match="hides the last message"):
        chat_prompt(
            tokenizer,
            [USER, half],
            continue_final_message=True,
            chat_template="{% set messages = 0 %}{{ bos_token }}",
        )


def test_where_templates_are_found(tmp_path: Path) -> None:
    def names(**shown: str) -> dict[str, str]:
        return {name: template.source for name, template in load_chat_templates(tmp_path, {}).items()} | shown

    assert names() == {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": None}))
    assert names() == {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert names() == {"default": "one"}
    several = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert names() == {"default": "two", "tool_use": "three"}
    (tmp_path / "chat_template.jinja").write_text("four")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("five")
    assert names() == {"default": "four", "tool_use": "three", "rag": "five"}


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    """As processors of older versions of transformers saved it."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "one"}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_chat_templates(tmp_path, {})["default"].source == "one"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "two"}))
    assert load_chat_templates(tmp_path, {})["default"].source == "two"


def test_tools_take_the_template_made_for_them(tmp_path: Path) -> None:
    several = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    tokenizer = Tokenizer.load(folder_with(tmp_path, several))
    assert chat_prompt(tokenizer, [USER])["prompt"] == "plain"
    assert chat_prompt(tokenizer, [USER], tools=TOOLS)["prompt"] == "1 tools"
    assert chat_prompt(tokenizer, [USER], chat_template="{{ messages[0].role }}")["prompt"] == "user"


def test_plain_texts_are_parts(byte_level_folder: Path) -> None:
    messages = [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]
    prompt = chat_prompt(
        Tokenizer.load(byte_level_folder), messages, chat_template="{{ messages[0].content }}"
    )
    assert prompt["prompt"] == "a\nb"


@pytest.mark.parametrize(
    "template", ["{% for %}", 7, [{"name": "default"}], ["default"], [{"name": "default", "template": 5}]]
)
def test_a_template_that_cannot_be_read(template: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_with(tmp_path, template))
    with pytest.raises(ModelError, match=r"tokenizer_config.json"):
        chat_prompt(tokenizer, [USER])


def test_without_a_template(byte_level_folder: Path) -> None:
    with pytest.raises(
        ModelError,
        match="the model has no chat template; generate continues plain text, or pass chat_template",
    ):
        chat_prompt(Tokenizer.load(byte_level_folder), [USER])


@pytest.mark.parametrize(
    "messages, field, limit",
    [
        ([], "messages", "at least one message"),
        ("hello", "messages", "must be a list"),
        (["hello"], "messages[0]", 'must be a dict such as {"role"'),
        ([{3: "x"}], "messages[0]", "must be a dict"),
        (
            [USER, {"role": "usr", "content": "x"}],
            "messages[1].role",
            "must be one of system, developer, user, assistant, tool",
        ),
        ([{"content": "x"}], "messages[0].role", "must be one of"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "must be one of"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        (
            [{"role": "tool", "content": None}],
            "messages[0].content",
            "only an assistant's message may omit it",
        ),
        ([{"role": "user", "content": 5}], "messages[0].content", "must be text, or a list"),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            "messages[0].content[0]",
            "only text and images are supported",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
                }
            ],
            "messages[0].content[0].image_url",
            "reads no images",
        ),
        ([{"role": "user", "content": "x", "extra": object()}], "messages[0]", "must be plain JSON"),
        ([{"role": "assistant", "content": "x"}], "messages[0]", "roles must alternate"),
        ([{"role": "assistant", "content": None}], "messages[0]", "roles must alternate"),
    ],
)
def test_wrong_messages_are_refused(messages: Any, field: str, limit: str, byte_level_folder: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        chat_prompt(Tokenizer.load(byte_level_folder), messages, chat_template=INSTRUCT)
    assert refused.value.field == field and limit in str(refused.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tools": [{"name": "f"}]}, r"tools\[0\]=.*must be an object such as"),
        ({"tools": [len]}, "must be plain JSON"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str, byte_level_folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        chat_prompt(Tokenizer.load(byte_level_folder), [USER], chat_template=CHATML, **options)


def test_variables_that_a_template_lacks_are_ignored(byte_level_folder: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder)
    plain = chat_prompt(tokenizer, [USER], chat_template=CHATML)
    assert (
        chat_prompt(tokenizer, [USER], chat_template=CHATML, chat_template_kwargs={"enable_thinking": False})
        == plain
    )


def test_arguments_of_tool_calls_are_parsed(byte_level_folder: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }};{% endfor %}{%"
        " endfor %}"
    )

    def shown(arguments: object) -> str:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "tool_calls": [call]}]
        return chat_prompt(Tokenizer.load(byte_level_folder), messages, chat_template=template)["prompt"]

    assert shown('{"a": 1}') == shown({"a": 1}) == '{"a": 1};'
    assert shown("") == shown(None) == "{};"
    assert shown("{a") == '"{a";', "a call that was cut off ends no conversation"


def test_parts_of_a_text_are_joined(byte_level_folder: Path) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    prompt = chat_prompt(Tokenizer.load(byte_level_folder), [message], chat_template=THINKING)
    assert prompt["prompt"] == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert isinstance(message["content"], list), "the caller's message was changed"


def test_one_conversation_or_many() -> None:
    assert conversations([USER]) == [[USER]] and conversations([[USER], [SYSTEM, USER]]) == [
        [USER],
        [SYSTEM, USER],
    ]
    assert conversations([]) == [[]]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_the_sandbox(template: str) -> None:
    with pytest.raises(InvalidArgument, match="chat template"):
        ChatTemplate(template, {}).render([{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_only_those_who_chat_import_jinja(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, LLAMA_3)
    code = (
        "import sys; from pathlib import Path; import jengine.api.llm; from jengine.api.chat import"
        " chat_prompt\nfrom jengine.text.tokenizer import Tokenizer; tokenizer ="
        " Tokenizer.load(Path(sys.argv[1]))\nassert 'jinja2' not in sys.modules\nchat_prompt(tokenizer,"
        " [{'role': 'user', 'content': 'x'}])\nassert 'jinja2' in sys.modules and 'transformers' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{" + "(" * 9999 + "x" + ")" * 9999 + "}}", "nested too deeply"),
        ("{{ x" + ".y" * 9999 + " }}", "nested too deeply"),
        ("x" * (2**20 + 1), "has 1048577 characters; at most 1048576"),
    ],
)
def test_templates_have_limits(source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ChatTemplate(source, {}, "file")
