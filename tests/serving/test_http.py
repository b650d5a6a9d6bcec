"""OpenAI's API with OpenAI's client: every endpoint, streamed and not, and rejected requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from jengine import InvalidArgument, SamplingParams
from jengine.client import Client
from tests.serving.conftest import MakeServer, MockServer, serve_mock

TEXT = "The quick brown fox"
HELLO: list[Any] = [{"role": "user", "content": TEXT}]
HTTP = {"port": 0}
JSON = {"content-type": "application/json; charset=utf-8"}


@pytest.fixture(scope="module")
def server(tokenizer_folder: Any) -> Iterator[MockServer]:
    with serve_mock(tokenizer_folder, server=HTTP) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: MockServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.http, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def plain(server: MockServer) -> Iterator[httpx.Client]:
    """For requests that OpenAI's client has no method for."""
    with httpx.Client(base_url=server.http.removesuffix("/v1"), timeout=60) as client:
        yield client


def prompt_ids(server: MockServer, text: str = TEXT) -> list[int]:
    return server.llm.tokenizer.encode(text)


# --- completions ----------------------------------------------------------------------------------


def test_a_completion(server: MockServer, client: OpenAI) -> None:
    answer = client.completions.create(
        model="mock", prompt=TEXT, max_tokens=7, extra_body={"request_id": "mine", "return_token_ids": True}
    )
    ids = prompt_ids(server)
    [choice] = answer.choices
    expected = (ids * 3)[:7]
    assert (
        choice.text == server.llm.tokenizer.decode(expected)
        and choice.finish_reason == "length"
        and choice.index == 0
    )
    assert (choice.token_ids, choice.prompt_token_ids) == (expected, ids)  # type: ignore[attr-defined]
    assert (answer.id, answer.model, answer.object, answer._request_id) == (
        "cmpl-mine",
        "mock",
        "text_completion",
        "mine",
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        len(ids),
        7,
        len(ids) + 7,
    )
    assert client.completions.create(model="mock", prompt=TEXT).usage.completion_tokens == 16  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt, texts", [([70, 71, 72], 1), ([[70, 71], [72]], 2), (["fox", TEXT], 2)])
def test_prompts_of_every_form(
    server: MockServer, client: OpenAI, stream: bool, prompt: Any, texts: int
) -> None:
    options: Any = {
        "model": "mock",
        "prompt": prompt,
        "max_tokens": 5,
        "n": 2,
        "extra_body": {"return_token_ids": True},
    }
    found: dict[int, list[int]] = {}
    if stream:
        for event in client.completions.create(**options, stream=True):
            for choice in event.choices:
                found.setdefault(choice.index, []).extend(choice.token_ids)
    else:
        found = {choice.index: choice.token_ids for choice in client.completions.create(**options).choices}
    prompts = (
        [prompt]
        if texts == 1
        else [prompt_ids(server, one) if isinstance(one, str) else one for one in prompt]
    )
    expected = {
        2 * i + k: [ids[(k + j) % len(ids)] for j in range(5)]
        for i, ids in enumerate(prompts)
        for k in range(2)
    }
    assert found == expected


def test_echo_with_log_probabilities(server: MockServer, client: OpenAI) -> None:
    """Evaluation harnesses request the probabilities of a text this way."""
    tokens = prompt_ids(server)
    shown = [server.llm.tokenizer.token_text(token) for token in tokens]
    for most in (0, 2):
        answer = client.completions.create(
            model="mock", prompt=tokens, max_tokens=most, echo=True, logprobs=1, temperature=0
        )
        [choice] = answer.choices
        assert choice.logprobs is not None and answer.usage is not None
        assert choice.logprobs.tokens is not None and choice.logprobs.tokens[: len(tokens)] == shown
        assert len(choice.logprobs.tokens) == len(tokens) + most and answer.usage.completion_tokens == most
        assert choice.logprobs.token_logprobs == [None] + [-0.5] * (len(tokens) - 1 + most)
        assert choice.logprobs.top_logprobs is not None and choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.top_logprobs[1] == {shown[1]: -0.5}
        assert choice.logprobs.text_offset is not None and "<s>" not in choice.text
        for token, at in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            assert token == "<s>" or choice.text[at : at + len(token)] == token
        assert choice.text.startswith(TEXT) and (choice.text == TEXT) == (most == 0)


def test_streams_add_up(client: OpenAI) -> None:
    options: Any = {"model": "mock", "prompt": TEXT, "max_tokens": 40, "logprobs": 2, "echo": True}
    whole = client.completions.create(**options)
    events = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert (
        events[-1].usage == whole.usage
        and not events[-1].choices
        and all(event.usage is None for event in events[:-1])
    )
    pieces = [event.choices[0] for event in events[:-1]]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    expected = whole.choices[0].logprobs
    assert expected is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for piece in pieces for value in getattr(piece.logprobs, name)] == getattr(
            expected, name
        )


def test_usage_in_every_event(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    events = list(
        client.completions.create(
            model="mock", prompt=TEXT, max_tokens=9, stream=True, stream_options=options
        )
    )
    used = [event.usage.completion_tokens for event in events if event.usage]
    assert len(used) == len(events) and used == sorted(used) and used[-1] == 9


def test_cached_tokens(client: OpenAI) -> None:
    tokens = list(range(200, 264))
    first, second = (
        client.completions.create(model="mock", prompt=tokens, max_tokens=1).usage for _ in range(2)
    )
    assert first and first.prompt_tokens_details and first.prompt_tokens_details.cached_tokens == 0
    assert second and second.prompt_tokens_details and second.prompt_tokens_details.cached_tokens == 48
    salted = client.completions.create(
        model="mock", prompt=tokens, max_tokens=1, extra_body={"cache_salt": "other"}
    ).usage
    assert salted and salted.prompt_tokens_details and salted.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    "options, reason, why",
    [
        ({"stop": ["brown"]}, "stop", "brown"),
        ({"extra_body": {"stop_token_ids": [71]}}, "stop", 71),
        ({"max_tokens": 3}, "length", None),
    ],
)
def test_endings(client: OpenAI, options: dict[str, Any], reason: str, why: object) -> None:
    prompt: Any = TEXT if "stop" in options else [70, 71, 72]
    [choice] = client.completions.create(
        **{"model": "mock", "prompt": prompt, "max_tokens": 30, **options}
    ).choices
    assert (choice.finish_reason, getattr(choice, "stop_reason", None)) == (reason, why)


@pytest.mark.parametrize("stream", [False, True])
def test_beams(client: OpenAI, stream: bool) -> None:
    more = {"use_beam_search": True, "length_penalty": 0.5, "return_token_ids": True}
    found: dict[int, list[int]] = {}
    options: Any = {
        "model": "mock",
        "prompt": [70, 71, 72],
        "n": 2,
        "max_tokens": 4,
        "temperature": 0,
        "extra_body": more,
    }
    for event in (
        client.completions.create(**options, stream=True)
        if stream
        else [client.completions.create(**options)]
    ):
        found |= {choice.index: choice.token_ids for choice in event.choices}  # type: ignore[attr-defined]
        assert all(choice.finish_reason == "length" for choice in event.choices)
    assert found == {0: [70, 71, 72, 70], 1: [71, 72, 70, 71]}


# --- chat -----------------------------------------------------------------------------------------


def test_a_conversation(server: MockServer, client: OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    answer = client.chat.completions.create(model="mock", messages=messages, max_tokens=40)  # type: ignore[arg-type]
    prompt = server.llm.tokenizer.encode(
        "<s>system: Be brief.\n<s>user: The quick brown fox\n<s>assistant:", add_special_tokens=False
    )
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == server.llm.tokenizer.decode(
        (prompt * 3)[:40]
    )
    assert (
        choice.message.tool_calls is None
        and choice.finish_reason == "length"
        and answer.object == "chat.completion"
    )
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    events = list(client.chat.completions.create(model="mock", messages=messages, max_tokens=40, stream=True))  # type: ignore[arg-type]
    deltas = [event.choices[0].delta for event in events]
    assert (
        deltas[0].role == "assistant"
        and "".join(delta.content or "" for delta in deltas) == choice.message.content
    )
    assert len({event.id for event in events}) == 1 and events[-1].choices[0].finish_reason == "length"


def test_log_probabilities_of_a_conversation(client: OpenAI) -> None:
    options: Any = {
        "model": "mock",
        "messages": HELLO,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    answer = client.chat.completions.create(**options)
    for choice in answer.choices:
        assert (
            choice.logprobs is not None
            and choice.logprobs.content is not None
            and len(choice.logprobs.content) == 6
        )
        for token in choice.logprobs.content:
            assert [token.logprob, *(top.logprob for top in token.top_logprobs)] == [-0.5, -0.5, -1.5]
            assert (
                token.top_logprobs[0].token == token.token
                and bytes(token.bytes or []).decode() == token.token
            )
    found: dict[int, list[Any]] = {0: [], 1: []}
    for event in client.chat.completions.create(**options, stream=True):
        for piece in event.choices:
            found[piece.index] += (piece.logprobs and piece.logprobs.content) or []
    assert found == {choice.index: choice.logprobs.content for choice in answer.choices}  # type: ignore[union-attr]


def test_a_conversation_is_as_long_as_the_model_allows(make_server: MakeServer) -> None:
    with (
        make_server(server=HTTP, max_model_len=100) as server,
        OpenAI(base_url=server.http, api_key="none", max_retries=0) as client,
    ):
        usage = client.chat.completions.create(model="mock", messages=HELLO).usage
        assert usage is not None and usage.total_tokens == 100
        short = client.chat.completions.create(model="mock", messages=HELLO, max_completion_tokens=5).usage
        assert short is not None and short.completion_tokens == 5
    with (
        make_server(server=HTTP, defaults=SamplingParams(max_tokens=9)) as server,
        OpenAI(base_url=server.http, api_key="-") as client,
    ):
        usage = client.chat.completions.create(model="mock", messages=HELLO).usage
        assert usage is not None and usage.completion_tokens == 9, "what the model's folder recommends"


def test_a_conversation_goes_on(server: MockServer, client: OpenAI) -> None:
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "The fox"}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    answer = client.chat.completions.create(model="mock", messages=messages, max_tokens=1, extra_body=more)
    expected = server.llm.tokenizer.encode(
        f"<s>user: {TEXT}\n<s>assistant: The fox", add_special_tokens=False
    )
    assert answer.prompt_token_ids == expected  # type: ignore[attr-defined]


# --- the others -----------------------------------------------------------------------------------


def test_models(server: MockServer, client: OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == ("mock", "jengine", 1024)  # type: ignore[attr-defined]
    assert client.models.retrieve("mock") == model
    with pytest.raises(openai.NotFoundError) as wrong:
        client.models.retrieve("a/b")
    assert wrong.value.code == "model_not_found"


def test_tokenize_and_detokenize(server: MockServer, plain: httpx.Client) -> None:
    text = "naïve 世界"
    ids = prompt_ids(server, text)
    told = plain.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert told == {
        "count": len(ids),
        "max_model_len": 1024,
        "tokens": ids,
        "token_strs": [server.llm.tokenizer.token_text(i) for i in ids],
    }
    assert (
        plain.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        == ids[1:]
    )
    rendered = server.llm.tokenizer.encode(f"<s>user: {TEXT}\n<s>assistant:", add_special_tokens=False)
    for more in ({}, {"add_special_tokens": False}):
        assert plain.post("/tokenize", json={"messages": HELLO, **more}).json()["tokens"] == rendered
    assert plain.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "<s>" + text}
    for path, body, field in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools"),
        ("/tokenize", {"messages": HELLO * 5000}, "messages"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [5, 501]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 2000}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
    ):
        answer = plain.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_health(plain: httpx.Client) -> None:
    assert plain.get("/health").status_code == 200


def test_metrics_and_log_tell_of_http(make_server: MakeServer, tmp_path: Any) -> None:
    log = tmp_path / "log"
    with (
        make_server(server={**HTTP, "request_log": log}) as server,
        OpenAI(base_url=server.http, api_key="none", max_retries=0) as client,
    ):
        client.completions.create(
            model="mock", prompt=["a", "b"], max_tokens=3, extra_body={"request_id": "r"}
        )
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="mock", prompt="a", temperature=-1)
        server.wait_until_idle()
        assert dict(server.metrics.http) == {
            ("POST", "/v1/completions", 200): 1,
            ("POST", "/v1/completions", 400): 1,
        }
        assert server.metrics.models["mock"].generation_tokens == 6
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(
        (line["id"], line["status"], line["output_tokens"]) for line in lines if len(line["id"]) < 32
    ) == [
        ("r", "OK", 3),
        ("r-1", "OK", 3),
    ]
    assert [line["status"] for line in lines].count("INVALID_ARGUMENT") == 1
    assert {line["method"] for line in lines} == {"POST /v1/completions"}


def test_default_variables_of_the_chat_template(tokenizer_folder: Any) -> None:
    """Over HTTP and gRPC; a request's own replace them. The mock repeats the prompt."""
    template = "{{ style }}, {{ language }}:{% for m in messages %}{{ m.content }}{% endfor %}"
    options = {
        "default_chat_template_kwargs": {"style": "brief", "language": "en"},
        "client_chat_templates": True,
    }
    with serve_mock(tokenizer_folder, server={**HTTP, **options}) as server:
        for variables, prompt in ((None, "brief, en:fox"), ({"style": "long"}, "long, en:fox")):
            more: Any = {} if variables is None else {"chat_template_kwargs": variables}
            body = {"model": "mock", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 40}
            url = f"{server.http}/chat/completions"
            answer = httpx.post(url, json={**body, **more, "chat_template": template}, timeout=60).json()
            assert answer["choices"][0]["message"]["content"].startswith(prompt), answer
            with Client(server.address) as client:
                output = client.chat(body["messages"], max_tokens=40, chat_template=template, **more)
                assert output.outputs[0].text.startswith(prompt)


@pytest.mark.parametrize("grammar", ['start: "fox"', 'root ::= "fox" | word\nword ::= [a-z]{1,9}'])
def test_grammars_in_both_notations(server: MockServer, client: OpenAI, grammar: str) -> None:
    """Over HTTP and gRPC."""
    fields = {"structured_outputs": {"grammar": grammar}}
    assert client.completions.create(model="mock", prompt=TEXT, extra_body=fields).choices
    with Client(server.address) as over_grpc:
        assert over_grpc.generate(TEXT, SamplingParams(**fields)).outputs  # type: ignore[arg-type]
        wrong = SamplingParams(structured_outputs={"grammar": "root ::= word"})
        with pytest.raises(InvalidArgument, match="cannot be read as GBNF: Rule 'word' not found"):
            over_grpc.generate(TEXT, wrong)
