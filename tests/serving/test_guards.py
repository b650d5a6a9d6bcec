"""Every door that leads to the same act has the same guard; see docs/service/security.md."""

from __future__ import annotations

import ast
from pathlib import Path

import httpx
import pytest

from jengine.serving.http.app import application, rollout_routes
from jengine.serving.http.endpoint import Parts
from tests.serving import conftest
from tests.serving.adapters import options
from tests.serving.conftest import serve_mock

SERVING = Path(conftest.__file__).parents[2] / "jengine" / "serving"
RUN_TEMPLATES = {"chat_prompt", "rendered_chat", "judging_text"}
SANDBOX = {("requests/service.py", "self._sandbox"), ("guards/sandbox.py", "self")}  # which has a `render`
FOR_CLIENTS = {
    "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
    "/v1/responses/compact", "/v1/responses/input_tokens", "/v1/completions",
    "/v1/embeddings",
    "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/tokenize", "/detokenize",
}  # fmt: skip


def test_what_is_not_for_clients_is_refused_to_web_pages(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Parts] = []
    api = conftest.api
    monkeypatch.setattr(conftest, "api", lambda parts: seen.append(parts) or api(parts))
    server = options(tmp_path, rollout_api=True, allowed_origins="https://chat.example.com")
    with serve_mock(tokenizer_folder, server=server, max_loras=1) as mock:
        routes = application(seen[0], rollout_routes(seen[0])).routes
        paths = {route.path for route in routes if "POST" in route.methods}  # type: ignore[attr-defined]
        assert paths > FOR_CLIENTS, "a path has gone"
        assert len(paths - FOR_CLIENTS) >= 8
        for path in paths - FOR_CLIENTS:
            page = {"origin": "https://chat.example.com"}
            answer = httpx.post(mock.http.removesuffix("/v1") + path, json={}, headers=page, timeout=60)
            assert answer.status_code == 403, f"{path} is neither for clients nor guarded"


def test_templates_run_only_in_the_sandbox() -> None:
    for file in SERVING.rglob("*.py"):
        name = file.relative_to(SERVING).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Name):
                assert node.id not in RUN_TEMPLATES or name == "guards/worker.py", f"{name} uses {node.id}"
            if isinstance(node, ast.Attribute) and node.attr in ("render", "compiled", "traits"):
                of = ast.unparse(node.value)
                assert (name, of) in SANDBOX, f"{name} uses {of}.{node.attr}"
