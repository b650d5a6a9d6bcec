"""`jengine serve demo`, as in the README: a process, a model, real sockets."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import grpc
import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel

from jengine import LLM, SamplingParams
from jengine.serving.grpc.client import Client, Retries, ServerError
from tests.extras import of_extra
from tests.serving.leaks import wait_until
from tests.serving.processes import HealthWatch, ServerProcess, process

PROMPTS = ["def fibonacci(n):", "import re\n", "class Stack:\n    def push(self, x):", "été = "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
# smaller than the default: its programs are compiled here
TABLE = {"max_num_seqs": 8, "max_num_batched_tokens": 72}
# whether a prompt lies on rows or in a tile depends on measured costs, and in bfloat16 decides near-ties
OPTIONS = {**TABLE, "batch_invariant": True}
FLAGS = ["--batch-invariant", *(f"--{name.replace('_', '-')}={value}" for name, value in TABLE.items())]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """This engine also compiles the programs that the server will load."""
    llm = LLM("demo", progress=False, **OPTIONS)
    assert llm.wait_until_compiled()
    return llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[str]:
    """The library's answers."""
    return [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text for prompt in PROMPTS]


@pytest.fixture(scope="module")
def server(expected: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("events")
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
    }
    flags = [
        "--smg-api",
        f"--kv-events-config={json.dumps(events)}",
        "--grpc-port=0",
        "--port=0",
        "--metrics-port=0",
        "--lame-duck-seconds=0",
        "--client-chat-templates",
        *FLAGS,
    ]
    with process([sys.executable, "-m", "jengine.cli", "serve", "demo", *flags]) as server:
        assert server.wait_until_ready().group("name", "compiled") == ("demo", "0")
        assert "it/s" not in server.log and "%|" not in server.log, "progress bars are for terminals"
        yield server


def test_greedy_text_is_the_librarys(server: ServerProcess, expected: list[str]) -> None:
    with Client(server.address) as client:
        assert [client.generate(prompt, GREEDY).outputs[0].text for prompt in PROMPTS] == expected
        assert [
            "".join(output.outputs[0].text for output in client.stream(prompt, GREEDY)) for prompt in PROMPTS
        ] == expected
        model = client.model()
        assert (model.name, model.max_model_len, model.has_chat_template) == ("demo", 1024, False)


def test_chat_is_that_without_a_server(server: ServerProcess, expected: list[str]) -> None:
    """A model without a chat template continues the text."""
    flags = ["--temperature=0", "--max-tokens=48"]
    lines = "def fibonacci(n):\n/reset\nclass Stack:\n"
    done = [
        subprocess.run(
            [sys.executable, "-m", "jengine.cli", "chat", *where, *flags],
            input=lines,
            capture_output=True,
            text=True,
            check=True,
        )
        for where in ([f"--server={server.address}"], ["demo", "--quiet", *FLAGS])
    ]
    assert done[0].stdout == done[1].stdout and done[0].stdout.startswith(expected[0])
    assert done[0].stderr.startswith(
        "The model has no chat template: it continues the text that you begin.\n"
    )


def test_a_worker_of_smg(server: ServerProcess) -> None:
    """With the stub of smg's package: the gateway learns which pages its requests have left behind."""
    pb = of_extra("dev", "smg_grpc_proto.generated.vllm_engine_pb2")
    common = of_extra("dev", "smg_grpc_proto.generated.common_pb2")
    stubs = of_extra("dev", "smg_grpc_proto.generated.vllm_engine_pb2_grpc")
    ids = [*range(100, 240)]
    params = pb.SamplingParams(temperature=0.0, max_tokens=9)
    asked = {"tokenized": pb.TokenizedInput(input_ids=ids), "sampling_params": params}
    with grpc.insecure_channel(server.address) as channel:
        smg = stubs.VllmEngineStub(channel)
        assert smg.HealthCheck(pb.HealthCheckRequest()).healthy
        *chunks, last = smg.Generate(pb.GenerateRequest(request_id="a", stream=True, **asked))
        tokens = [token for chunk in chunks for token in chunk.chunk.token_ids]
        [whole] = smg.Generate(pb.GenerateRequest(request_id="b", **asked))
        assert tokens == [*last.complete.output_ids] == [*whole.complete.output_ids] and len(tokens) == 9
        assert whole.complete.cached_tokens == 128  # whole tiles, being batch-invariant
        events = smg.SubscribeKvEvents(common.SubscribeKvEventsRequest())
        blocks: dict[int, list[int]] = {}
        batches = 0
        while ids[:128] not in blocks.values():
            batch = next(events)
            assert batch.load.load_only or batch.sequence_number == batches
            batches += not batch.load.load_only
            assert batch.load.max_running_requests == TABLE["max_num_seqs"]
            for event in batch.events:
                found = blocks.get(event.stored.parent_block_hash, [])
                for block in event.stored.blocks:
                    assert block.block_size == 16 == len(block.token_ids)
                    found = blocks[block.block_hash] = [*found, *block.token_ids]
        events.cancel()


@pytest.fixture(scope="module")
def openai(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.http, api_key="none", timeout=100) as client:
        yield client


def test_openais_client(openai: OpenAI, expected: list[str]) -> None:
    greedy: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 48}
    assert [
        choice.text for choice in openai.completions.create(prompt=PROMPTS[:1], **greedy).choices
    ] == expected[:1]
    for prompt, text in zip(PROMPTS, expected, strict=True):
        events = openai.completions.create(prompt=prompt, stream=True, **greedy)
        assert "".join(event.choices[0].text for event in events) == text


# The model was trained on code alone: what it answers is its grammar's.
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "def weather(city):"}],
    "max_tokens": 400,
    "seed": 0,
    "extra_body": {"chat_template": "{% if tools %}{% endif %}{{ messages[0].content }}"},
}


class Weather(BaseModel):
    """Few texts match, so that any model finishes."""

    city: Literal["Köln", "Bonn"]
    degrees: Literal[10, 20]
    rain: bool


def test_a_pydantic_class_over_http(openai: OpenAI) -> None:
    answer = openai.chat.completions.parse(**CHAT, response_format=Weather).choices[0]
    assert isinstance(answer.message.parsed, Weather) and answer.finish_reason == "stop"
    text = openai.chat.completions.create(**CHAT, response_format={"type": "json_object"}).choices[0]
    assert text.message.content is not None
    assert text.finish_reason == "length" or isinstance(json.loads(text.message.content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tool_calls_by_grammar(openai: OpenAI, choice: Any) -> None:
    tools: list[Any] = [pydantic_function_tool(Weather, name=name) for name in ("weather", "news")]
    whole = openai.chat.completions.create(
        **CHAT, tools=tools, tool_choice=choice, parallel_tool_calls=False
    ).choices[0]
    assert whole.finish_reason == "tool_calls" and not whole.message.content
    [call] = whole.message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert Weather.model_validate_json(call.function.arguments) and call.function.name in ("weather", "news")
    arguments = ""
    for event in openai.chat.completions.create(
        **CHAT, tools=tools, tool_choice=choice, parallel_tool_calls=False, stream=True
    ):
        for delta in event.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            arguments += delta.function.arguments or ""
    assert arguments == call.function.arguments


def random_requests(count: int) -> list[tuple[list[int], int]]:
    rng = random.Random(0)
    return [
        ([rng.randrange(3, 3000) for _ in range(rng.randint(1, 80))], rng.randint(1, 12))
        for _ in range(count)
    ]


def over_http(openai: OpenAI, prompt: list[int], most: int) -> list[int]:
    more = {"return_token_ids": True, "ignore_eos": True}
    answer = openai.completions.create(
        model="demo", prompt=prompt, max_tokens=most, temperature=0, extra_body=more
    )
    ids: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return ids


def greedy(most: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)


def test_http_grpc_and_the_library_give_the_same_tokens(
    server: ServerProcess, openai: OpenAI, llm: LLM
) -> None:
    """One request after the other, as for `expected`."""
    with Client(server.address) as client:
        for prompt, most in random_requests(20):
            tokens = llm.generate([prompt], greedy(most), use_tqdm=False)[0].outputs[0].token_ids
            assert (
                over_http(openai, prompt, most)
                == client.generate(prompt, greedy(most)).outputs[0].token_ids
                == tokens
            )


@pytest.mark.full
def test_1000_requests_at_once_give_the_same_tokens() -> None:
    """In float32, other requests in the batch do not change tokens."""
    requests = random_requests(1000)
    with LLM("demo", dtype="float32", progress=False) as llm:
        outputs = llm.generate(
            [prompt for prompt, _ in requests], [greedy(most) for _, most in requests], use_tqdm=False
        )
    expected = [output.outputs[0].token_ids for output in outputs]
    flags = ["--grpc-port=0", "--port=0", "--dtype=float32", "--max-waiting=2000"]
    with (
        process([sys.executable, "-m", "jengine.cli", "serve", "demo", *flags]) as server,
        ThreadPoolExecutor(64) as threads,
    ):
        server.wait_until_ready()
        with (
            Client(server.address) as client,
            OpenAI(base_url=server.http, api_key="none", timeout=300) as openai,
        ):
            http = threads.map(lambda request: over_http(openai, *request), requests)
            assert list(http) == expected
            grpc = threads.map(
                lambda request: client.generate(request[0], greedy(request[1])).outputs[0].token_ids, requests
            )
            assert list(grpc) == expected


@pytest.mark.full
def test_killed_and_drained(server: ServerProcess, expected: list[str]) -> None:
    patient = Retries(attempts=100, seconds=100.0)  # a start takes seconds, or more on a busy machine
    with Client(server.address, retries=patient) as client, grpc.insecure_channel(server.address) as channel:
        watch = HealthWatch(channel)
        watch.wait_for("SERVING")
        engine = min(server.children())  # the sandbox's processes came later
        stream = client.stream(PROMPTS[0], n=30, ignore_eos=True, max_tokens=900)  # seconds of work
        next(stream)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(ServerError) as lost:
            list(stream)
        assert lost.value.code is grpc.StatusCode.UNAVAILABLE and lost.value.retry_seconds
        assert client.generate(PROMPTS[0], GREEDY).outputs[0].text == expected[0], (
            "by the engine that took its place"
        )
        watch.wait_for("SERVING", "NOT_SERVING", "SERVING")
        metrics = urllib.request.urlopen(server.metrics, timeout=20).read().decode()
        assert 'jengine:compiles_since_start_total{model_name="demo"} 0.0' in metrics
        assert 'jengine:engine_restarts_total{model_name="demo"} 1.0' in metrics

        stream = client.stream(PROMPTS[0], GREEDY)
        first = next(stream)
        server.send(signal.SIGTERM)
        wait_until(lambda: "stopping" in server.log)
        assert first.outputs[0].text + "".join(output.outputs[0].text for output in stream) == expected[0]
        assert server.wait() == (0, "")
        watch.close()
