"""Chat templates of models and of adapters are programs of others: whatever one does, it does to its own
conversations.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from jengine import Tokenizer
from jengine.spi import unknown_patterns
from jengine.text.chat_template import ChatTemplate
from jengine.text.gguf_tokenizer import LLAMA3, QWEN2
from tests.serving.adapters import load, options, write_adapter
from tests.serving.conftest import MockServer, serve_mock
from tests.serving.leaks import wait_until
from tests.serving.processes import mock_process
from tests.serving.test_sandbox import ENDLESS, MESSAGES
from tests.text.conftest import byte_level, write

BOMB = "{{ 9 ** (9 ** 10) }}"  # a constant, which compiling computes


def chat(server: MockServer, model: str, path: str = "chat/completions") -> httpx.Response:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 2}
    return httpx.post(f"{server.http}/{path}", json=body, timeout=60)


def while_it_renders(server: MockServer, model: str, other: str) -> list[httpx.Response]:
    """Asks for two conversations with a template without end, and meanwhile for what others ask."""
    answers: list[httpx.Response] = []
    paths = ("chat/completions", "messages")
    threads = [
        threading.Thread(target=lambda path: answers.append(chat(server, model, path)), args=(path,))
        for path in paths
    ]
    for thread in threads:
        thread.start()
    base = server.http.removesuffix("/v1")
    assert httpx.get(f"{base}/health", timeout=60).status_code == 200
    body = {"model": other, "prompt": "a", "max_tokens": 2}
    assert httpx.post(f"{server.http}/completions", json=body, timeout=60).status_code == 200
    if other != model:
        assert chat(server, other).status_code == 200
    assert len(answers) < len(paths), "the others did not wait"
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("template", [ENDLESS, BOMB])
def test_an_adapters_template(template: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "evil", chat_template=template)
    with serve_mock(tokenizer_folder, server=options(tmp_path), max_loras=1) as server:
        load(server, "evil")
        assert chat(server, "mock").status_code == 200
        for answer in while_it_renders(server, "evil", "mock"):
            error: Any = answer.json()["error"]
            assert answer.status_code == 400 and "processor time" in error["message"], error
        server.wait_until_idle()


def test_a_models_template(tmp_path: Path) -> None:
    write(byte_level(), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(ENDLESS)
    with serve_mock(tmp_path, server={"port": 0}) as server:
        for answer in while_it_renders(server, "mock", "mock"):
            assert answer.status_code == 400 and "processor time" in answer.text
        server.wait_until_idle()


def test_a_server_ends_while_a_template_loops(tmp_path: Path) -> None:
    write(byte_level(), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(ENDLESS)
    with mock_process(tmp_path, server={"port": 0, "lame_duck_seconds": 0.0}) as server:
        server.wait_until_ready()

        def ask() -> None:
            body = {"messages": MESSAGES, "max_tokens": 2}
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{server.http}/chat/completions", json=body, timeout=60)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: len(server.descendants()) > len(server.children()))
        server.send(signal.SIGTERM)
        assert server.wait() == (0, "")
        thread.join()


def test_a_tokenizers_regular_expressions(tmp_path: Path) -> None:
    """Each block takes a tenth of a second, in which nothing could be interrupted."""
    backend = byte_level()
    split = pre_tokenizers.Split(Regex("(a+)+!"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )  # type: ignore[assignment]
    write(backend, tmp_path)
    answers: list[httpx.Response] = []
    with mock_process(tmp_path, server={"port": 0, "lame_duck_seconds": 0.0}) as server:
        server.wait_until_ready()

        def ask(text: str) -> httpx.Response:
            return httpx.post(
                f"{server.http}/completions", json={"prompt": text, "max_tokens": 2}, timeout=60
            )

        assert ask("The quick").json()["usage"]["prompt_tokens"] == len(
            Tokenizer.load(tmp_path).encode("The quick")
        )
        threads = [
            threading.Thread(target=lambda: answers.append(ask(("a" * 21 + " ") * 300))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        assert httpx.get(f"{server.http[:-3]}/health", timeout=60).status_code == 200
        assert not answers
        for thread in threads:
            thread.join()
        for answer in answers:
            assert answer.status_code == 400 and "processor time" in answer.text
        answer = ask("a" * 60)
        assert answer.status_code == 400 and "tokenizer fails on this text" in answer.text
        assert ask("b").status_code == 200


def test_which_patterns_are_known(tmp_path: Path) -> None:
    backend = byte_level()
    assert unknown_patterns(backend) == []
    for pattern, known in ((LLAMA3, True), (QWEN2, True), ("a+", False)):
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated")])  # type: ignore[assignment]
        assert unknown_patterns(backend) == ([] if known else [pattern])
    backend.normalizer = normalizers.Replace(Regex("b+"), "b")  # type: ignore[assignment]
    assert unknown_patterns(backend) == ["a+", "b+"] or unknown_patterns(backend) == ["b+", "a+"]


def test_reading_a_template_does_not_run_it() -> None:
    assert ChatTemplate(BOMB + "{{ tools }}", {}).names == {"tools"}
