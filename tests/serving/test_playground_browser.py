"""The playground in headless Chromium, over a real server: it streams an answer, shows steps, survives a
restart, keeps its key to itself.

Needs Playwright (`pip install playwright`) and a Chromium on the PATH.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from jengine.serving.guards.security import hash_line
from tests.golden.images import picture, write_image_model
from tests.serving.processes import ServerProcess, mock_process, process
from tests.vision.test_images import encoded

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
BROWSERS = "chromium", "chromium-browser", "google-chrome"
SECONDS = 120_000  # milliseconds, for anything to happen: machines that run tests are busy
PROMPT = "def fibonacci(n):"
NASTY = '<img src=x onerror="document.title=1"><b>bold</b>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)} on the PATH")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str) -> Iterator[Any]:
    """A page. Errors reported by the browser fail the test, except for requests that the server rejects."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(SECONDS)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto(url)
    yield page
    context.close()
    assert [text for text in wrong if not text.startswith("Failed to load resource")] == []


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = [
        "--port=none",
        "--grpc-port=0",
        "--metrics-port=0",
        "--page",
        "--lame-duck-seconds=0",
        "--max-num-seqs=8",
        "--max-num-batched-tokens=136",
    ]
    with process([sys.executable, "-m", "jengine.cli", "serve", "demo", *flags]) as server:
        server.wait_until_ready()
        yield server
        server.send(signal.SIGTERM)
        assert server.wait() == (0, "")


def serving(page: Any) -> None:
    page.wait_for_selector("#state[data-state=serving]")


def ask(page: Any, text: str, number: int) -> str:
    """Sends a text and waits for the answer. number: of answers before it."""
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    page.wait_for_function("n => document.querySelectorAll('.note:not(:empty)').length > n", arg=number)
    answer: str = page.locator(".message .text").last.text_content()
    return answer


def coloured(page: Any, canvas: str) -> int:
    """Number of colours in a drawing."""
    script = """id => {
      const canvas = document.getElementById(id), seen = new Set();
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) seen.add(data.slice(i, i + 3).join());
      return seen.size;
    }"""
    colours: int = page.evaluate(script, canvas)
    return colours


def test_it_streams_shows_steps_and_survives_a_restart(browser: Any, server: ServerProcess) -> None:
    with opened(browser, server.page) as page:
        serving(page)
        assert page.locator("input[value=chat]").is_disabled(), "the model has no chat template"
        page.click("summary")
        page.fill("#sampling-temperature", "0")
        page.fill("#sampling-max_tokens", "60")
        page.evaluate("""() => {
          window.grown = 0;
          const log = document.getElementById("log");
          new MutationObserver(() => window.grown++).observe(log, { childList: true, subtree: true });
        }""")
        body = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 60}
        expected = httpx.post(f"{server.page}v1/completions", json=body, timeout=100).json()["choices"][0][
            "text"
        ]
        assert ask(page, PROMPT, 0) == PROMPT + expected
        assert page.evaluate("window.grown") > 5, "it came in pieces"

        page.wait_for_selector("#steps[aria-label*='used']")
        assert coloured(page, "steps") >= 2 and coloured(page, "times") >= 2 and coloured(page, "pages") >= 2
        assert re.search(r"\d+ in use.*, [1-9]\d* cached, \d+ free", page.text_content("#owners"))
        page.wait_for_function("() => parseInt(document.getElementById('ended').textContent) >= 2")
        page.wait_for_function("() => /bound by/.test(document.getElementById('bound').textContent)")
        page.focus("#steps")
        page.keyboard.press("ArrowLeft")
        assert re.match(r"Step \d+: 1 of \d+ rows", page.text_content("#step"))

        assert ask(page, NASTY, 1).startswith(NASTY) and page.locator("#log img, #log b").count() == 0

        [engine] = server.children()
        os.kill(engine, signal.SIGKILL)
        page.wait_for_selector("#state[data-state=waiting]")
        assert "does not answer" in page.text_content("#notice")
        serving(page)
        page.wait_for_function("() => /was restarted/.test(document.getElementById('notice').textContent)")
        assert ask(page, PROMPT, 2) == PROMPT + expected


def test_answers_are_markdown_and_empty_drawings_say_so(browser: Any, tokenizer_folder: Path) -> None:
    """The mock engine repeats the prompt, in which the message is."""
    with mock_process(tokenizer_folder, server={"metrics_port": 0, "page": True}) as server:
        server.wait_until_ready()
        with opened(browser, server.page) as page:
            serving(page)
            assert all(coloured(page, drawing) for drawing in ("steps", "times", "queue"))
            ask(page, f"\n# Title\n**bold** {NASTY}\n- item\n\n```\ncode\n```\n[x](javascript:alert(1))\n", 0)
            answer = page.locator(".message.assistant .marked")
            for tag, text in (("h3", "Title"), ("strong", "bold"), ("li", "item"), ("pre code", "code")):
                assert answer.locator(tag).first.text_content().startswith(text), tag
            assert NASTY in answer.text_content() and page.locator("#log img, #log b, #log a").count() == 0
            assert page.title() != "1"


def test_pictures_are_chosen_pasted_and_dropped(browser: Any, tmp_path: Path) -> None:
    """A model that reads images is asked with three pictures, of which one is taken away again."""
    write_image_model(tmp_path, "smolvlm")
    flags = [
        "--port=none",
        "--grpc-port=0",
        "--metrics-port=0",
        "--page",
        "--lame-duck-seconds=0",
        "--max-num-seqs=2",
    ]
    flags += ["--max-model-len=256", "--max-num-batched-tokens=128", "--served-model-name=sees"]
    with process([sys.executable, "-m", "jengine.cli", "serve", str(tmp_path), *flags]) as server:
        server.wait_until_ready()
        with opened(browser, server.page) as page:
            serving(page)
            page.wait_for_selector("#picture:not([hidden])")
            page.click("summary")
            page.fill("#sampling-temperature", "0")
            page.fill("#sampling-max_tokens", "8")
            image = encoded(picture("page", (60, 20)))
            page.set_input_files("#file", {"name": "chosen.png", "mimeType": "image/png", "buffer": image})
            page.wait_for_selector("#pictures canvas[aria-label='chosen.png']")
            given = """([how, type, bytes]) => {
              const data = new DataTransfer();
              data.items.add(new File([new Uint8Array(bytes)], how + ".png", { type }));
              const both = { dataTransfer: data, clipboardData: data, bubbles: true, cancelable: true };
              if (how === "drop") document.getElementById("log").dispatchEvent(new DragEvent(how, both));
              else document.getElementById("prompt").dispatchEvent(new ClipboardEvent(how, both));
            }"""
            for number, how in enumerate(("paste", "drop"), start=2):
                page.evaluate(given, [how, "image/png", [*image]])
                page.wait_for_function(
                    "n => document.querySelectorAll('#pictures canvas').length === n", arg=number
                )
            page.click("#pictures button[aria-label='Remove drop.png']")
            with page.expect_request("**/v1/chat/completions") as asked:
                answer = ask(page, "What?", 0)
            body = json.loads(asked.value.post_data)
            [message] = body["messages"]
            url = "data:image/png;base64," + base64.b64encode(image).decode()
            one = {"type": "image_url", "image_url": {"url": url}}
            assert message["content"] == [one, one, {"type": "text", "text": "What?"}]
            body |= {"stream": False}
            del body["stream_options"]
            reply = httpx.post(f"{server.page}v1/chat/completions", json=body, timeout=100).json()
            assert answer == reply["choices"][0]["message"]["content"]
            assert page.locator(".message.user canvas").count() == 2
            assert page.locator("#pictures").is_hidden() and page.locator("img").count() == 0

            broken = {"name": "broken.png", "mimeType": "image/png", "buffer": image[:30]}
            page.set_input_files("#file", broken)
            page.wait_for_selector("#pictures .error")
            page.click("input[value=complete]", force=True)
            page.wait_for_selector("#picture", state="hidden")
        server.send(signal.SIGTERM)
        assert server.wait()[0] == 0


def test_it_reconnects_to_another_server(browser: Any, tokenizer_folder: Path) -> None:
    """The process is stopped and started again on its port, as by an orchestrator."""
    options: dict[str, Any] = {"metrics_port": 0, "page": True, "drain_seconds": 0}
    with mock_process(tokenizer_folder, server=options) as server:
        server.wait_until_ready()
        address = server.page
        port = int(address.rstrip("/").rpartition(":")[2])
        context = browser.new_context()
        context.set_default_timeout(SECONDS)
        page = context.new_page()
        page.goto(address)
        serving(page)
    page.wait_for_selector("#state[data-state=lost]")
    assert "No connection" in page.text_content("#notice")
    with mock_process(tokenizer_folder, server={**options, "metrics_port": port}) as server:
        server.wait_until_ready()
        serving(page)
        assert page.locator("#notice").is_hidden()
        context.close()


def test_a_key_is_asked_for_and_kept_in_memory(browser: Any, tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(
        f"{hash_line('a' * 32, 'anna')}\n{hash_line('b' * 32, 'root', 'admin=1')}\n"
    )
    options = {"metrics_port": 0, "page": True, "api_keys": str(tmp_path / "keys")}
    with mock_process(tokenizer_folder, server=options) as server:
        server.wait_until_ready()
        with opened(browser, server.page) as page:
            page.wait_for_selector("#key-form:not([hidden])")
            page.fill("#key", "a" * 32)
            page.keyboard.press("Enter")
            page.wait_for_function("() => /admin=1/.test(document.getElementById('notice').textContent)")
            assert "2" in ask(page, "1234", 0), "the chat works with this key"
            page.fill("#key", "b" * 32)
            page.keyboard.press("Enter")
            serving(page)
            assert page.locator("#key-form").is_hidden() and page.input_value("#key") == ""
            assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [
                0,
                0,
                "",
            ]
            page.reload()
            page.wait_for_selector("#key-form:not([hidden])")
