"""`jengine serve demo`, as in the README: a process, a model, real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import grpc
import pytest

from jengine import LLM, SamplingParams
from jengine.serving.client import Client, Retries, ServerError
from tests.serving.leaks import wait_until
from tests.serving.processes import HealthWatch, ServerProcess, process

PROMPTS = ["def fibonacci(n):", "import re\n", "class Stack:\n    def push(self, x):", "été = "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The library's answers, one after the other, as below: in bfloat16 a neighbour may turn a near tie. It also compiles what the
    server will load."""
    llm = LLM("demo", progress=False)
    return [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text for prompt in PROMPTS]


@pytest.fixture(scope="module")
def server(expected: list[str]) -> Iterator[ServerProcess]:
    with process([sys.executable, "-m", "jengine.cli", "serve", "demo", "--port=0", "--metrics-port=0", "--lame-duck-seconds=0"]) as server:
        assert server.wait_until_ready().group(1, 3) == ("demo", "0")
        assert "it/s" not in server.log and "%|" not in server.log, "progress bars are for terminals"
        yield server


def test_greedy_text_is_the_librarys(server: ServerProcess, expected: list[str]) -> None:
    with Client(server.address) as client:
        assert [client.generate(prompt, GREEDY).outputs[0].text for prompt in PROMPTS] == expected
        assert ["".join(output.outputs[0].text for output in client.stream(prompt, GREEDY)) for prompt in PROMPTS] == expected
        model = client.model()
        assert (model.name, model.max_model_len, model.has_chat_template) == ("demo", 1024, False)


def test_chat_is_that_without_a_server(server: ServerProcess, expected: list[str]) -> None:
    """A model without a chat template goes on with the text."""
    flags = ["--temperature=0", "--max-tokens=48"]
    lines = "def fibonacci(n):\n/reset\nclass Stack:\n"
    done = [
        subprocess.run(
            [sys.executable, "-m", "jengine.cli", "chat", *where, *flags], input=lines, capture_output=True, text=True, check=True
        )
        for where in ([f"--server={server.address}"], ["demo", "--quiet"])
    ]
    assert done[0].stdout == done[1].stdout and done[0].stdout.startswith(expected[0])
    assert done[0].stderr.startswith("The model has no chat template: it continues the text that you begin.\n")


def test_killed_and_drained(server: ServerProcess, expected: list[str]) -> None:
    patient = Retries(attempts=100, seconds=100.0)  # a start takes seconds, or more on a busy machine
    with Client(server.address, retries=patient) as client, grpc.insecure_channel(server.address) as channel:
        watch = HealthWatch(channel)
        watch.wait_for("SERVING")
        [engine] = server.children()
        stream = client.stream(PROMPTS[0], n=30, ignore_eos=True, max_tokens=900)  # seconds of work
        next(stream)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(ServerError) as lost:
            list(stream)
        assert lost.value.code is grpc.StatusCode.UNAVAILABLE and lost.value.retry_seconds
        assert client.generate(PROMPTS[0], GREEDY).outputs[0].text == expected[0], "by the engine that took its place"
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
