"""A Ray Serve application: OpenAI's client against it, while replicas come and go."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from jengine import AsyncLLM
from tests.integrations.ray.conftest import wait_until

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]  # ray's warnings
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def base(cluster: None) -> Iterator[str]:
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}/v1"
    serve.shutdown()


@pytest.fixture
def client(base: str) -> Iterator[OpenAI]:
    from ray import serve

    with OpenAI(base_url=base, api_key="none", max_retries=0, timeout=120) as client:
        yield client
    serve.delete("default")


def run(make_llm: Callable[..., AsyncLLM], **options: Any) -> None:
    from ray import serve

    from jengine.integrations.ray.serve import ServeConfig, build_app

    serve.run(build_app(ServeConfig(**{"model": "mock", "num_cpus": 0.1, **options}), make_llm))


def test_answers_while_a_replica_is_replaced(
    client: OpenAI, make_llm: Callable[..., AsyncLLM], pids: Path
) -> None:
    run(make_llm, min_replicas=2, max_replicas=2)
    wait_until(lambda: len([*pids.iterdir()]) == 2)
    chat = client.chat.completions.create(model="mock", messages=HELLO, max_tokens=5)
    assert (
        chat.usage is not None
        and chat.usage.completion_tokens == 5
        and chat.choices[0].finish_reason == "length"
    )
    parts = [*client.chat.completions.create(model="mock", messages=HELLO, max_tokens=5, stream=True)]
    assert (
        "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        == chat.choices[0].message.content
    )
    assert [model.id for model in client.models.list()] == ["mock"]
    with pytest.raises(BadRequestError, match="temprature"):
        client.completions.create(model="mock", prompt="x", extra_body={"temprature": 1})

    answers: list[str] = []
    wrong: list[BaseException] = []
    stop = threading.Event()

    def ask(which: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                answer = client.completions.create(
                    model="mock", prompt=f"{which} {number} question", max_tokens=20
                )
                answers.append(answer.choices[0].text)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=(which,)) for which in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answers) >= 30)
    first = {path.name for path in pids.iterdir()}
    os.kill(int(min(first)), signal.SIGKILL)
    killed_at = len(answers)
    wait_until(lambda: len([*pids.iterdir()]) == 3 and len(answers) >= killed_at + 60)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert len(answers) >= 90


def test_scaled_by_tokens(client: OpenAI, make_llm: Callable[..., AsyncLLM], pids: Path) -> None:
    run(make_llm, max_replicas=3, target_tokens=500, upscale_delay=0.5, downscale_delay=600)
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            client.completions.create(model="mock", prompt="question " * 20, max_tokens=200)

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len([*pids.iterdir()]) >= 2)
    stop.set()
    for thread in threads:
        thread.join()


def test_equal_beginnings_go_to_one_replica(
    client: OpenAI, make_llm: Callable[..., AsyncLLM], pids: Path
) -> None:
    run(make_llm, min_replicas=3, max_replicas=3)
    wait_until(lambda: len([*pids.iterdir()]) == 3)
    cached = Counter[str]()
    for turn in range(6):
        for letter in "abcdefgh":
            answer = client.completions.create(
                model="mock", prompt=letter * 600 + f" question {turn}", max_tokens=1
            )
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            cached[letter] += bool(answer.usage.prompt_tokens_details.cached_tokens)
    assert all(cached[letter] == 5 for letter in "abcdefgh"), cached
