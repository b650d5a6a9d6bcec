"""The playground: its pages, access, and the content of its events. In a browser:
test_playground_browser.py.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from jengine import InvalidArgument
from jengine.serving.calls.errors import Busy
from jengine.serving.config import ServerConfig
from jengine.serving.guards.security import hash_line
from jengine.serving.http.endpoint import is_own
from jengine.serving.playground import app
from jengine.serving.playground.app import (
    MOST_EVENTS,
    MOST_VIEWERS,
    SHOWN_STEPS,
    EngineView,
    LiveFeed,
    Viewer,
    assets,
    percentiles,
    queue_event,
)
from jengine.spi import Readers
from tests.mocks.mock_engine import MockEngine
from tests.observe.virtual import TILE, make_virtual
from tests.serving.certificates import Authority
from tests.serving.conftest import MakeServer
from tests.serving.processes import mock_process

PAGE: dict[str, Any] = {"metrics_port": 0, "page": True}
SCRIPTS = {path: body.decode() for path, (body, _) in assets().items() if path.endswith(".js")}
HTML = assets()["/"][0].decode()


# --- files --------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(HTML)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.seen and self.seen[-1][0] in ("script", "style"):
            self.inline += data.strip()


def test_nothing_is_inline_or_from_elsewhere() -> None:
    """The content security policy would block inline code, and a wheel would lack external files."""
    page = Tags()
    assert page.inline == "" and not [tag for tag, _ in page.seen if tag == "style"]
    for tag, attributes in page.seen:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], (
            tag,
            attributes,
        )
        for name in ("src", "href"):
            assert attributes.get(name, "/") in assets(), (tag, attributes)
    text = "".join(body.decode() for body, _ in assets().values())
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|//cdn|@import|url\(", text)


def test_text_never_becomes_html() -> None:
    unsafe = (
        r"(?:inner|outer)HTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\b|new"
        r" Function"
    )
    stored = r"localStorage|sessionStorage|indexedDB|cookie"
    for path, script in SCRIPTS.items():
        assert not re.findall(f"{unsafe}|{stored}", script), path


def test_scripts_fit_together() -> None:
    """Modules and the names that they import exist, as do the elements that they ask for."""
    ids = {attributes["id"] for _, attributes in Tags().seen if "id" in attributes}
    for path, script in SCRIPTS.items():
        for names, module in re.findall(r'^import \{ (.+) \} from "\./(.+)";$', script, re.M):
            exported = re.findall(
                r"^export (?:async )?(?:function\*?|class|const) (\w+)", SCRIPTS[f"/page/{module}"], re.M
            )
            assert {*names.split(", ")} <= {*exported}, (path, module)
        assert {*re.findall(r'\$\("([\w-]+)"\)', script)} <= ids, path
    assert ids >= {
        attributes["for"] for tag, attributes in Tags().seen if tag == "label" and "for" in attributes
    }


def test_the_page_and_its_headers(make_server: MakeServer) -> None:
    with make_server(server=PAGE) as server, httpx.Client(base_url=server.page) as client:
        for path, (body, kind) in assets().items():
            answer = client.get(path)
            assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, body, kind)
            policy = answer.headers["content-security-policy"].split("; ")
            assert {
                "default-src 'none'",
                "script-src 'self'",
                "frame-ancestors 'none'",
                "base-uri 'none'",
            } <= {*policy}
            assert (
                "unsafe" not in answer.headers["content-security-policy"]
                and answer.headers["x-content-type-options"] == "nosniff"
            )
        assert "jengine:engine_up" in client.get("/metrics").text and client.get("/healthz").text == "ok\n"
        for path in ("/page/", "/page/../live", "/page/%2e%2e/app.py", "/page/index.html"):
            assert client.get(path).status_code == 404
        assert client.post("/").status_code == 405


def test_the_chat_is_openais_api(make_server: MakeServer) -> None:
    body = {
        "model": "mock",
        "messages": [{"role": "user", "content": "<b>hi</b>"}],
        "stream": True,
        "max_tokens": 3,
    }
    with make_server(server=PAGE) as server, httpx.Client(base_url=server.page) as client:
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        assert client.post("/v1/chat/completions", content=json.dumps(body)).status_code == 415, (
            "another site's form cannot ask"
        )


# --- who may ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, message",
    [
        ({"page": True}, "page=True: needs metrics_port"),
        ({"page": "yes", "metrics_port": 0}, "page='yes': must be True or False"),
    ],
)
def test_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        ServerConfig(**given)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9090", "[::1]:9090", "10.1.2.3", "localhost:9090", "jengine", "a.localhost:1"]
)
def test_own_names(host: str) -> None:
    assert is_own(host)


@pytest.mark.parametrize(
    "host", ["evil.example:9090", "127.0.0.1.evil.example", "localhost.evil.example", "", ":9090"]
)
def test_names_that_others_may_own(host: str) -> None:
    assert not is_own(host)


def test_domains_are_rejected_without_keys(make_server: MakeServer, tmp_path: Path) -> None:
    evil = {"host": "evil.example:9090"}
    with make_server(server=PAGE) as server, httpx.Client(base_url=server.page, headers=evil) as client:
        for path in ("/", "/page/live", "/v1/models"):
            assert client.get(path).status_code == 421
        assert client.get("/metrics").status_code == client.get("/readyz").status_code == 200
    (tmp_path / "keys").write_text(hash_line("a" * 32, "anna") + "\n")
    with (
        make_server(server={**PAGE, "api_keys": tmp_path / "keys"}) as server,
        httpx.Client(base_url=server.page, headers=evil) as client,
    ):
        assert client.get("/").status_code == 200 and client.get("/v1/models").status_code == 401


def test_keys(make_server: MakeServer, tmp_path: Path) -> None:
    """The page itself is public. The chat needs a key; the engine's records need a key that may see all
    clients.
    """
    (tmp_path / "keys").write_text(
        f"{hash_line('a' * 32, 'anna')}\n{hash_line('b' * 32, 'root', 'admin=1')}\n"
    )
    with (
        make_server(server={**PAGE, "api_keys": tmp_path / "keys"}) as server,
        httpx.Client(base_url=server.page) as client,
    ):
        anna, root = ({"authorization": f"Bearer {key * 32}"} for key in "ab")
        assert client.get("/").status_code == 200
        assert client.get("/page/live").status_code == client.get("/v1/models").status_code == 401
        refused = client.get("/page/live", headers=anna)
        assert refused.status_code == 403 and "admin=1" in refused.json()["error"]["message"]
        assert client.get("/v1/models", headers=anna).status_code == 200
        assert first_event(client, root)["state"] == "serving"


def test_with_tls_the_port_speaks_tls(tokenizer_folder: Path, tmp_path: Path) -> None:
    """It also requires a client certificate if the other ports do, so its chat does not bypass them."""
    ours = Authority(tmp_path, "ours")
    pair, mine = ours.sign("server"), ours.sign("mine")
    options = {**PAGE, "tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(ours.cert)}
    with mock_process(tokenizer_folder, server=options) as server:
        server.wait_until_ready()
        assert server.page.startswith("https://") and server.metrics.startswith("https://")
        strangers, friends = (
            ssl.create_default_context(cafile=ours.cert),
            ssl.create_default_context(cafile=ours.cert),
        )
        friends.load_cert_chain(mine.cert, mine.key)
        assert httpx.get(server.page, verify=friends).text == HTML
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.page, verify=strangers)
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.page.replace("https", "http"))


# --- events -----------------------------------------------------------------------------------------


def first_event(client: httpx.Client, headers: dict[str, str] | None = None) -> dict[str, Any]:
    with client.stream("GET", "/page/live", headers=headers) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), (
            answer.read()
        )
        for line in answer.iter_lines():
            if line:
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return event
    raise AssertionError("no event")


def test_events_over_http(make_server: MakeServer) -> None:
    with make_server(server=PAGE) as server, httpx.Client(base_url=server.page) as client:
        event = first_event(client)
        assert (
            event["state"] == "serving"
            and event["model"]["name"] == "mock"
            and event["model"]["chat"] is True
        )
        assert event["pages"] == {"all": 1024, "owned": 0, "cached": 0, "holders": [], "others": 0}
        assert (event["running"], event["waiting"], event["engine"]) == (0, 0, 1)
        until = time.monotonic() + 30
        while "playground" in server.run(task_names()):
            assert time.monotonic() < until, "no page is open, and it still reads"


async def task_names() -> list[str]:
    await asyncio.sleep(0.01)
    return [task.get_name() for task in asyncio.all_tasks()]


def test_a_view_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual, view = make_virtual(monkeypatch), EngineView()
    load = MockEngine().load
    assert view.event(load) == {} and view.window() is None
    virtual.ask(3 * TILE, 5)
    virtual.ask(TILE, 400, at=0.05)
    while len(virtual.engine.records.requests) < 1:
        virtual.turn()
    for _ in range(3):
        virtual.turn()
    view.add(virtual.engine.trace())
    event = view.event(load)
    steps = event["steps"]
    assert [step["n"] for step in steps] == [*range(len(steps))] and event["skipped"] == 0
    assert steps[0]["prompt_tokens"] + steps[0]["padded_tokens"] == steps[0]["all_tiles"] * TILE
    assert steps[1]["measured"] == pytest.approx(steps[1]["predicted"], rel=0.1)
    [(number, pages)] = event["pages"]["holders"]
    assert number == 1 and pages >= TILE // 16
    assert (
        event["latency"]["requests"] == 1
        and event["latency"]["first_token"][0] <= event["latency"]["whole"][0]
    )
    first = len(steps)
    for _ in range(200):
        virtual.turn()
    view.add(virtual.engine.trace())
    event = view.event(load)
    assert len(event["steps"]) == SHOWN_STEPS and event["skipped"] > 0, "bounded"
    assert event["steps"][0]["n"] == first + event["skipped"], "each step comes once"
    assert event["tokens_per_second"] > 0
    window = view.window()
    assert window is not None and len(window.steps) == len(virtual.engine.trace().steps), (
        "overlapping traces are joined"
    )
    text = json.dumps(event)
    assert "r0" not in text and "r1" not in text and "request_id" not in text and "client" not in text


def test_percentiles() -> None:
    assert percentiles([]) is None and percentiles([0.002]) == [2.0, 2.0, 2.0]
    assert percentiles([i / 1000 for i in range(101)]) == [50.0, 90.0, 99.0]


def test_a_viewer_that_does_not_read_keeps_the_newest() -> None:
    async def run() -> None:
        viewer = Viewer(MOST_EVENTS)
        for i in range(100):
            queue_event(viewer, b"%d" % i)
        assert [await viewer.get() for _ in range(MOST_EVENTS)] == [
            b"%d" % i for i in range(100 - MOST_EVENTS, 100)
        ]

    asyncio.run(run())


def test_viewers_are_bounded_and_events_say_that_no_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "INTERVAL", 0.01)

    class Gone:
        """A ModelProvider whose first engine still starts."""

        @property
        def info(self) -> Any:
            raise app.EngineDead("the first engine is still starting")

        llm = info
        retry_seconds = 1.0

    async def run() -> None:
        feed = LiveFeed(Gone(), Readers, lambda: "starting: the engine is not ready yet")
        watching = [feed.watch() for _ in range(MOST_VIEWERS)]
        viewers = [one.__enter__() for one in watching]
        with pytest.raises(Busy, match=f"^{MOST_VIEWERS} pages already show the engine"), feed.watch():
            pass
        for viewer in viewers:
            event = json.loads(await viewer.get())
            assert (event["state"], event["why"]) == ("waiting", "starting: the engine is not ready yet")
        for one in watching:
            one.__exit__(None, None, None)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
