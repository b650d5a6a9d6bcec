"""The pages of the API's port beside OpenAI's API, and web pages of other origins."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from jengine import InvalidArgument, __version__
from jengine.serving.config import ServerConfig
from jengine.serving.guards.security import hash_line
from tests.serving.conftest import serve_mock

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


def test_pages(tokenizer_folder: Path) -> None:
    with (
        serve_mock(tokenizer_folder, name="<demo>", server={"port": 0}) as server,
        httpx.Client(base_url=server.http[:-3]) as client,
    ):
        root = client.get("/")
        assert (
            root.headers["content-type"].startswith("text/html")
            and "<b>&lt;demo&gt;</b>" in root.text
            and "/v1/models" in root.text
        )
        assert client.get("/version").json() == {"version": __version__}
        facts = {"dtype": "float32", "quantization": "", "devices": "1 mock", "mesh": {"tensor": 1}}
        assert client.get("/info").json() == {"name": "<demo>", **facts, "kernels": "none"}
        assert client.get("/ping").status_code == 200
        health = client.get("/health")
        assert health.status_code == 200
        assert 0 < health.json()["programs_ready"] <= health.json()["programs"]
        metrics = client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain") and "# TYPE jengine:" in metrics.text
        assert "access-control-allow-origin" not in client.get("/version", headers={"origin": PAGE}).headers


def test_origins(tokenizer_folder: Path) -> None:
    options = {"port": 0, "allowed_origins": f"http://127.0.0.1:3000, {PAGE}"}
    with (
        serve_mock(tokenizer_folder, server=options) as server,
        httpx.Client(base_url=server.http[:-3]) as client,
    ):
        asked = client.options("/v1/chat/completions", headers={"origin": PAGE, **PREFLIGHT})
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE
        assert (
            "POST" in asked.headers["access-control-allow-methods"]
            and "authorization" in asked.headers["access-control-allow-headers"]
        )
        body = {"model": "mock", "prompt": "a", "max_tokens": 1}
        assert (
            client.post("/v1/completions", json=body, headers={"origin": PAGE}).headers[
                "access-control-allow-origin"
            ]
            == PAGE
        )
        assert (
            client.options(
                "/v1/completions", headers={"origin": "https://other.example", **PREFLIGHT}
            ).status_code
            == 400
        )
        other = client.post("/v1/completions", json=body, headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origins", ["chat.example.com", "https://chat.example.com/path", "", f"{PAGE},"])
def test_wrong_origins(origins: str) -> None:
    with pytest.raises(InvalidArgument, match="must be such as https://"):
        ServerConfig(port=0, allowed_origins=origins)


def test_origins_need_the_api() -> None:
    with pytest.raises(InvalidArgument, match="needs port"):
        ServerConfig(port=None, allowed_origins="*")
    assert (
        ServerConfig(port=0, allowed_origins='["https://a.example", "https://b.example"]').origins[1]
        == "https://b.example"
    )
    applications = ["chrome-extension://abcdef", "tauri://localhost", "app://obsidian.md"]
    assert ServerConfig(port=0, allowed_origins=",".join(applications)).origins == applications
    assert ServerConfig(port=0, allowed_origins="*").origins == ["*"] and ServerConfig().origins == []


def test_metrics_need_an_administrator(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(
        "\n".join((hash_line("a" * 32, "anna"), hash_line("b" * 32, "root", "admin=1")))
    )
    with serve_mock(tokenizer_folder, server={"port": 0, "api_keys": tmp_path / "keys"}) as server:
        got = {
            key: httpx.get(f"{server.http[:-3]}/metrics", headers={"authorization": f"Bearer {key}"})
            for key in ("a" * 32, "b" * 32, "c")
        }
        assert [answer.status_code for answer in got.values()] == [403, 200, 401] and "admin=1" in got[
            "a" * 32
        ].text
        assert [
            httpx.get(f"{server.http[:-3]}{path}").status_code for path in ("/", "/ping", "/version")
        ] == [200, 200, 401]
