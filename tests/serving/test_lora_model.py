"""`jengine serve` with a model and adapters in PEFT's format: a process, its engine, real sockets."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from jengine import LLM, LoRARequest, SamplingParams
from jengine.serving.grpc.client import Client
from tests.golden.loras import lora, write_lora
from tests.serving.processes import ServerProcess, process

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 66,
    "max_model_len": 4096,
    "page_size": 16,
    "num_pages": 300,
    "dtype": "float32",
    "warm_up": "all",
    "batch_invariant": True,  # fewer programs
    "max_loras": 2,
    "max_lora_rank": 8,
}
FLAGS = [
    f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in OPTIONS.items()
]
OWN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
IDS = [70, 71, 72, 73]
ATTEMPTS = 20
LONG = 4000  # tokens of a stream beside which adapters are loaded and unloaded


class Tokens(dict[str | None, list[int]]):
    """The library's answers by adapter."""


@pytest.fixture(scope="module")
def folder(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and the folder `adapters` with sql and haiku; haiku has a chat template."""
    root: Path = tmp_path_factory.mktemp("served")
    shutil.copytree(text_model, root / "model")
    config = json.loads((text_model / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (root / "model" / "config.json").write_text(json.dumps(config))
    for name in ("sql", "haiku"):
        write_lora(root / "adapters" / name, lora("llama_tied", "plain", name, config))
    (root / "adapters" / "haiku" / "chat_template.jinja").write_text(OWN)
    return root


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tokens:
    """This engine also compiles the programs that the server will load."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    llm = LLM(folder / "model", progress=False, enable_lora=True, **OPTIONS)
    assert llm.wait_until_compiled()
    found = Tokens()
    with llm:
        for name in (None, "sql", "haiku"):
            request = None if name is None else LoRARequest(name, 1, str(folder / "adapters" / name))
            [output] = llm.generate([IDS], params, use_tqdm=False, lora_request=request)
            found[name] = output.outputs[0].token_ids
        chat = llm.tokenizer.encode("[fox]", add_special_tokens=False)
        [output] = llm.generate([chat], params, use_tqdm=False, lora_request="haiku")
        found["chat"] = output.outputs[0].token_ids
    return found


@pytest.fixture(scope="module")
def server(folder: Path, expected: Tokens) -> Iterator[ServerProcess]:
    where = ["--grpc-port=0", "--port=0", "--metrics-port=0", "--lame-duck-seconds=0"]
    adapters = folder / "adapters"
    more = ["--enable-lora", f"--lora-dir={adapters}", "--lora-modules", f"sql={adapters / 'sql'}"]
    command = [sys.executable, "-m", "jengine.cli", "serve", str(folder / "model"), *where, *FLAGS, *more]
    with process([*command, "--served-model-name=tiny"]) as server:
        assert server.wait_until_ready()["compiled"] == "0", "all programs were saved"
        yield server


def ask(client: httpx.Client, name: str, most: int = 24) -> Any:
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": most}
    answer = client.post("/completions", json={"model": name, "prompt": IDS, **greedy})
    return answer.json()["choices"][0]["token_ids"] if answer.is_success else answer.status_code


def test_answers_are_the_librarys(server: ServerProcess, expected: Tokens) -> None:
    assert len({str(tokens) for tokens in expected.values()}) == 4, "adapters change the answers"
    with httpx.Client(base_url=server.http, timeout=100) as client, Client(server.address) as grpc:
        assert ask(client, "tiny") == expected[None] and ask(client, "sql") == expected["sql"]
        assert ask(client, "haiku") == 404
        how = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
        for name, own in (("", None), ("sql", "sql")):
            assert grpc.generate(IDS, model=name, **how).outputs[0].token_ids == expected[own]


def test_adapters_come_and_go_while_a_stream_runs(server: ServerProcess, expected: Tokens) -> None:
    """Nothing compiles, no answer changes, and a stream keeps its adapter."""
    texts: list[str] = []

    def stream() -> None:
        how = {"temperature": 0, "ignore_eos": True, "max_tokens": LONG, "stream": True}
        with httpx.stream(
            "POST", f"{server.http}/completions", json={"model": "sql", "prompt": IDS, **how}, timeout=100
        ) as answer:
            texts.append(answer.read().decode())

    with httpx.Client(base_url=server.http, timeout=100) as client:
        alone = ask(client, "sql", LONG)

        def change(how: str, name: str) -> None:
            path = {"lora_path": name} if how == "load" else {}
            answer = client.post(f"/{how}_lora_adapter", json={"lora_name": name, **path})
            assert answer.status_code == 200, answer.text

        for _ in range(ATTEMPTS):
            thread = Thread(target=stream)
            thread.start()
            change("load", "haiku")
            assert ask(client, "haiku") == expected["haiku"]
            chat = {"model": "haiku", "messages": [{"role": "user", "content": "fox"}]}
            greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 24}
            answer = client.post("/chat/completions", json={**chat, **greedy}).json()
            assert answer["choices"][0]["token_ids"] == expected["chat"]
            running = client.get(server.metrics).text
            change("unload", "sql")
            change("unload", "haiku")
            assert (ask(client, "sql"), ask(client, "haiku")) == (404, 404)
            overlapped = thread.is_alive()
            thread.join()
            change("load", "sql")
            if overlapped:
                break
        assert overlapped, "no stream was long enough"
        assert 'running_lora_adapters="sql"' in running and 'lora_adapters{model_name="tiny"} 2.0' in running
        for text in texts:
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert {event["model"] for event in events} == {"sql"}
            assert "".join(event["choices"][0]["text"] for event in events) == alone_text(client, alone)
        assert ask(client, "sql") == expected["sql"] and ask(client, "tiny") == expected[None]
        metrics = client.get(server.metrics).text
        assert 'jengine:compiles_since_start_total{model_name="tiny"} 0.0' in metrics
        assert 'running_lora_adapters=""' in metrics


def alone_text(client: httpx.Client, tokens: list[int]) -> str:
    """The text of generated tokens, with a prompt before them."""
    base = str(client.base_url).rstrip("/").removesuffix("/v1")
    whole, prompt = (
        client.post(f"{base}/detokenize", json={"tokens": ids}).json()["prompt"]
        for ids in ([*IDS, *tokens], IDS)
    )
    return str(whole).removeprefix(prompt)
