"""Requests as agents send them: the server accepts all, and the model sees each mark."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.agents.requests import REQUESTS
from tests.agents.scripted_engine import MARK, answers
from tests.agents.templates import TEMPLATES
from tests.serving.processes import mock_process
from tests.text.conftest import byte_level, write


@pytest.fixture(scope="module", params=TEMPLATES)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write(byte_level(), tmp_path_factory.mktemp("agents"))
    (folder / "chat_template.jinja").write_text(TEMPLATES[request.param])
    engine = "tests.agents.scripted_engine:scripted_engine"
    models = [("mock", {"tokenizer_folder": str(folder), "max_model_len": 4096, "pages": 1024})]
    with mock_process(folder, engine=engine, server={"port": 0}, models=models) as server:
        server.wait_until_ready()
        yield server.http


@pytest.mark.parametrize("name", REQUESTS)
def test_the_model_sees_all(name: str, url: str) -> None:
    path, body = REQUESTS[name]
    shown = httpx.post(url + path, json={"model": "mock", **body}, timeout=60)
    assert shown.status_code == 200, shown.text
    wanted = set(MARK.findall(json.dumps({**body, "tools": []}).replace("\\n", " ")))
    assert wanted == set(MARK.findall(text_of(path, shown))), shown.text


def text_of(path: str, shown: httpx.Response) -> str:
    """The answer's text, or the arguments of its calls, streamed or not."""
    if not shown.headers["content-type"].startswith("text/event-stream"):
        return str(shown.json()["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in shown.text.splitlines() if line.startswith("data: {")]
    if path == "/messages":
        return "".join(event["delta"].get("text", "") for event in events if "delta" in event)
    if path == "/responses":
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    return "".join([delta.get("content") or "" for delta in deltas] + [call["arguments"] for call in calls])


CALL = 'CALL {"name": "look", "arguments": {}}'
USER, ANSWER = "<|im_start|>user\n", "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "prompt, expected",
    [
        (f"{USER}mark-a {ANSWER}", "<think>\nHm.\n</think>\n\nI have seen mark-a."),
        (f"{USER}mark-a {ANSWER}<think>\n\n</think>\n\n", "I have seen mark-a."),
        (f'{{"name": "look"}}{USER}{CALL} {ANSWER}', '"name": "look"'),
        (f"{USER}{CALL} {ANSWER}", "I have seen ."),  # there is no such tool
        (f"{USER}{CALL} {ANSWER}ok{USER}<tool_response>mark-b</tool_response>", "I have seen mark-b."),
        (f"{USER}ENDLESS{ANSWER}", "On and on. On and on."),
        (f'{{"name": "final_answer"}}{USER}mark-a', '{"answer": "I have seen mark-a."}'),
    ],
)
def test_the_script(prompt: str, expected: str) -> None:
    assert expected in "".join(answers(prompt)[:2])
