"""An adapter's name as the model, in every request of every protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client import Client
from tests.mocks.mock_engine import shift_of
from tests.serving.adapters import change, expected, load, options, unload, write_adapter
from tests.serving.conftest import MakeServer, MockServer, serve_mock
from tests.serving.test_refusals import refused

TEXT = "The quick brown fox"
HELLO: list[Any] = [{"role": "user", "content": TEXT}]
OWN = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}"
IDS = [70, 71, 72]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters: sql, and haiku with a chat template and an end-of-sequence token of its own."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "sql")
    write_adapter(folder / "haiku", chat_template=OWN, tokenizer_config={"eos_token": "<tool>"})
    return folder


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path, folder: Path) -> Iterator[MockServer]:
    log = folder / "log"
    with serve_mock(
        tokenizer_folder,
        server=options(folder, request_log=log),
        max_loras=2,
        embedding_size=8,
    ) as server:
        load(server, "sql")
        load(server, "haiku")
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: MockServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.http, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("name", ["mock", "sql", "haiku"])
def test_completions(server: MockServer, client: OpenAI, name: str) -> None:
    own = None if name == "mock" else name
    more: Any = {"max_tokens": 7, "extra_body": {"return_token_ids": True}}
    answer: Any = client.completions.create(model=name, prompt=[IDS, [80]], **more)
    assert answer.model == name
    assert [choice.token_ids for choice in answer.choices] == [expected(ids, own, 7) for ids in (IDS, [80])]
    events: list[Any] = list(client.completions.create(model=name, prompt=IDS, stream=True, **more))
    assert {event.model for event in events} == {name}
    found = [token for event in events for choice in event.choices for token in choice.token_ids]
    assert found == expected(IDS, own, 7)


@pytest.mark.parametrize(
    "name, prompt",
    [
        ("mock", f"<s>user: {TEXT}\n<s>assistant:"),
        ("sql", f"<s>user: {TEXT}\n<s>assistant:"),
        ("haiku", f"[{TEXT}]<tool>"),
    ],
)
def test_chats_use_the_adapters_template(server: MockServer, client: OpenAI, name: str, prompt: str) -> None:
    """Also over gRPC and in /tokenize. The client's own template comes first, where it is allowed."""
    ids = server.llm.tokenizer.encode(prompt, add_special_tokens=False)
    more: Any = {"max_tokens": 9, "extra_body": {"return_token_ids": True}}
    answer: Any = client.chat.completions.create(model=name, messages=HELLO, **more)
    assert (answer.model, answer.prompt_token_ids) == (name, ids)
    assert answer.choices[0].token_ids == expected(ids, None if name == "mock" else name, 9)
    events: list[Any] = list(client.chat.completions.create(model=name, messages=HELLO, stream=True, **more))
    assert {event.model for event in events} == {name}
    told = httpx.post(
        server.http.removesuffix("/v1") + "/tokenize", json={"model": name, "messages": HELLO}
    ).json()
    assert told["tokens"] == ids
    with server.stub() as stub:
        request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content=TEXT)], model=name)
        request.sampling_params.max_tokens = 9
        reply = stub.Chat(request)
        assert reply.model == name
        assert list(reply.completions[0].token_ids) == answer.choices[0].token_ids


def test_embeddings_and_scores(server: MockServer, client: OpenAI) -> None:
    def counts(name: str) -> np.ndarray:
        vector = np.bincount((np.array(IDS) + shift_of(None if name == "mock" else name)) % 8, minlength=8)
        return vector / np.linalg.norm(vector)

    for name in ("mock", "sql", "haiku"):
        answer = client.embeddings.create(model=name, input=IDS)  # type: ignore[arg-type]
        assert answer.model == name and np.allclose(answer.data[0].embedding, counts(name), atol=1e-6)
        told = httpx.post(f"{server.http}/score", json={"model": name, "text_1": "a", "text_2": "a"}).json()
        assert told["model"] == name and told["data"][0]["score"] == pytest.approx(1.0)


def test_grpc(server: MockServer) -> None:
    with server.stub() as stub:
        adapters = stub.GetModel(pb.GetModelRequest()).adapters
        assert [(one.name, one.has_chat_template) for one in adapters] == [("sql", True), ("haiku", True)]
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS), model="sql")
        request.sampling_params.max_tokens = 7
        assert list(stub.Generate(request).completions[0].token_ids) == expected(IDS, "sql", 7)
        events = list(stub.GenerateStream(request))
        assert events[0].started.model == "sql"
        assert [token for event in events for token in event.delta.token_ids] == expected(IDS, "sql", 7)
        request.model = "other"
        code, message, [details] = refused(lambda: stub.Generate(request))
        assert (code, details.resource_name) == (grpc.StatusCode.NOT_FOUND, "other")
        assert message == "this server has one model: mock and 2 adapters; /v1/models lists them"
    with Client(server.address) as client:
        output = client.generate(IDS, max_tokens=7, model="sql")
        assert output.outputs[0].token_ids == expected(IDS, "sql", 7)


def test_unknown_names(server: MockServer, client: OpenAI) -> None:
    for ask in (
        lambda: client.completions.create(model="other", prompt="a"),
        lambda: client.chat.completions.create(model="other", messages=HELLO),
        lambda: client.embeddings.create(model="other", input="a"),
        lambda: client.models.retrieve("other"),
    ):
        with pytest.raises(openai.NotFoundError) as wrong:
            ask()
        assert wrong.value.code == "model_not_found"


def test_models(server: MockServer, client: OpenAI) -> None:
    models: list[Any] = client.models.list().data
    assert [(model.id, model.root, model.parent) for model in models] == [
        ("mock", "mock", None),
        ("sql", "sql", "mock"),
        ("haiku", "haiku", "mock"),
    ]
    assert client.models.retrieve("haiku") == models[2] and models[2].created > 1.7e9


def test_pages_of_adapters_are_apart(client: OpenAI) -> None:
    """The engine's part of this is tested with the engine; here: the adapter reaches it with the salt."""

    def cached(name: str, salt: str = "") -> int | None:
        more = {"cache_salt": salt} if salt else {}
        usage = client.completions.create(
            model=name, prompt=list(range(300, 364)), max_tokens=1, extra_body=more
        ).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens

    assert [cached("mock"), cached("sql"), cached("sql", "s"), cached("sql"), cached("haiku")] == [
        0, 0, 0, 48, 0,
    ]  # fmt: skip


def test_the_request_log(server: MockServer, client: OpenAI, folder: Path) -> None:
    for name in ("mock", "sql"):
        client.completions.create(
            model=name, prompt=["a", "b"], max_tokens=2, extra_body={"request_id": f"log-{name}"}
        )
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a", extra_body={"request_id": "log-other"})
    server.wait_until_idle()
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    assert {line["id"]: line["adapter"] for line in lines if line["id"].startswith("log-")} == {
        "log-mock": None,
        "log-mock-1": None,
        "log-sql": "sql",
        "log-sql-1": "sql",
        "log-other": None,
    }


def test_metrics(make_server: MakeServer, folder: Path) -> None:
    """As in vLLM: the names of those that run and of those that wait, and the time as the value."""

    def info(server: MockServer) -> tuple[dict[str, str], float]:
        [sample] = [
            sample
            for family in server.metrics.collect()
            for sample in family.samples
            if sample.name == "jengine:lora_requests_info"
        ]
        return sample.labels, sample.value

    with make_server(server=options(folder), max_loras=3, max_num_seqs=1, seconds=0.01) as server:
        load(server, "sql")
        load(server, "haiku")
        labels, now = info(server)
        assert labels == {
            "model_name": "mock",
            "max_lora": "3",
            "running_lora_adapters": "",
            "waiting_lora_adapters": "",
        }
        assert now > 1.7e9
        with server.stub() as stub:
            streams = []
            for name in ("sql", "haiku", "sql", ""):
                request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS), model=name)
                request.sampling_params.max_tokens = 900
                streams.append(stub.GenerateStream(request))
                assert next(streams[-1]).started.model == name or "mock"
            while not server.engine.load.running or server.engine.load.waiting < 3:
                pass
            labels, _ = info(server)
            assert labels["running_lora_adapters"] == "sql"
            assert labels["waiting_lora_adapters"] == "haiku,sql"
            loaded = {
                sample.name: sample.value for family in server.metrics.collect() for sample in family.samples
            }
            assert loaded["jengine:lora_adapters"] == 2
            for stream in streams:
                stream.cancel()
        server.wait_until_idle()
    with make_server() as server:
        assert not [family for family in server.metrics.collect() if "lora" in family.name]


def test_one_is_unloaded_while_requests_run(make_server: MakeServer, folder: Path) -> None:
    """They finish with it; new ones do not find it, nor does a request that was being prepared."""
    with make_server(server=options(folder), max_loras=1, seconds=0.002) as server:
        load(server, "sql")
        with OpenAI(base_url=server.http, api_key="none", max_retries=0, timeout=60) as client:
            more: Any = {"prompt": IDS, "max_tokens": 200, "extra_body": {"return_token_ids": True}}
            stream = client.completions.create(model="sql", stream=True, **more)
            found = list(next(iter(stream)).choices[0].token_ids)  # type: ignore[attr-defined]
            unload(server, "sql")
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="sql", **more)
            assert [model.id for model in client.models.list().data] == ["mock"]
            for event in stream:
                found += event.choices[0].token_ids  # type: ignore[attr-defined]
            assert found == expected(IDS, "sql", 200)
            load(server, "sql", "haiku")  # the name may be used again
            assert client.models.retrieve("sql").root == "haiku"  # type: ignore[attr-defined]
        answer = change(server, "unload", lora_name="haiku")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
        server.wait_until_idle()


def test_a_request_whose_adapter_goes_while_it_is_prepared(
    make_server: MakeServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_server(server=options(folder), max_loras=1) as server:
        load(server, "sql")
        prepare = server.llm.prepare

        def unloading(*arguments: Any) -> Any:
            server.llm.loras.by_name.clear()  # as an operation that arrives now
            return prepare(*arguments)

        monkeypatch.setattr(server.llm, "prepare", unloading)
        answer = httpx.post(f"{server.http}/completions", json={"model": "sql", "prompt": "a"})
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
        server.wait_until_idle()
