"""--lora-modules: its forms, a start that loads adapters, and an engine that is replaced."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from jengine import InvalidArgument, JengineError
from jengine.api.loras import AsyncLoras
from jengine.serving.config import ServerConfig, resolve_config, resolve_models
from jengine.serving.options import LoraModule, read_modules
from jengine.serving.requests.lora_changes import check_folder
from tests.serving.adapters import expected, write_adapter
from tests.serving.leaks import wait_until
from tests.serving.processes import mock_process
from tests.serving.test_supervisor import Watched, run

A, B = LoraModule("a", "x"), LoraModule("b", "y/z", "base")
JSON_B = '{"name": "b", "path": "y/z", "base_model_name": "base"}'
IDS = [70, 71, 72]


@pytest.mark.parametrize(
    "given, found",
    [
        (None, ()),
        ([], ()),
        ("a=x", (A,)),
        (["a=x", JSON_B], (A, B)),
        ("a=x c==", (A, LoraModule("c", "="))),
        (f"[{JSON_B}]", (B,)),
        (JSON_B, (B,)),
        ([{"name": "a", "path": "x"}, B], (A, B)),
        ({"name": "a", "path": "x", "base_model_name": None}, (A,)),
    ],
)
def test_forms(given: Any, found: tuple[LoraModule, ...]) -> None:
    assert read_modules(given) == found
    assert ServerConfig(lora_modules=given).lora_modules == (found or None)
    assert read_modules(ServerConfig(lora_modules=given).lora_modules) == found


@pytest.mark.parametrize(
    "given, says",
    [
        ("a", "must be NAME=PATH, or {"),
        ("=x", "must be NAME=PATH"),
        ("a=", "must be NAME=PATH"),
        (5, "each must be NAME=PATH"),
        ([5], "must be NAME=PATH"),
        ([None], "must be NAME=PATH"),
        ("{", "must be NAME=PATH"),
        ('{"name": "a"}', "must be NAME=PATH"),
        ('{"name": "a", "path": 5}', "must be NAME=PATH"),
        ('{"name": "a", "path": null}', "must be NAME=PATH"),
        ('{"name": "a", "path": "x", "rank": 8}', "must be NAME=PATH"),
        ("a=x a=y", "is given twice"),
        ("a" * 257 + "=x", "1 to 256 characters"),
    ],
)
def test_what_is_no_adapter(given: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        ServerConfig(lora_modules=given)


def test_where_it_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "jengine.toml"
    file.write_text('model = "demo"\nenable_lora = true\nlora_modules = [{name = "a", path = "x"}, "c=d"]\n')
    server, engine = resolve_config({"config": str(file)}, {})
    assert server.lora_modules == (A, LoraModule("c", "d")) and engine.enable_lora
    environ = {"JENGINE_LORA_MODULES": "a=x c=d", "JENGINE_ENABLE_LORA": "1", "JENGINE_MODEL": "demo"}
    assert resolve_config({}, environ)[0].lora_modules == (A, LoraModule("c", "d"))
    for name, value in (("lora_modules", ["a=x"]), ("lora_dir", str(tmp_path)), ("allow_lora_hub", True)):
        with pytest.raises(InvalidArgument, match=rf"{name}=.*needs enable_lora \(command line\)"):
            resolve_models({"model": "demo", name: value}, environ={})
    for folder in ("/nowhere", "~no-such-user/a"):
        with pytest.raises(InvalidArgument, match=f"lora_dir='{folder}': there is no such folder"):
            check_folder(ServerConfig(lora_dir=folder))


def test_a_server_starts_with_adapters_and_replaces_its_engine(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Adapters of both kinds outlive the engine. One that cannot be read again is not found any more."""
    sql, _, gone = (write_adapter(tmp_path / name) for name in ("sql", "haiku", "gone"))
    listed = [f"sql={sql}", {"name": "gone", "path": str(gone), "base_model_name": "parent"}]
    more = {"lora_modules": listed, "lora_dir": str(tmp_path), "port": 0, "metrics_port": 0}
    with mock_process(tokenizer_folder, server=more, max_loras=2) as server:
        server.wait_until_ready()
        with httpx.Client(base_url=server.http, timeout=60) as client:

            def ask(name: str) -> Any:
                body = {"model": name, "prompt": IDS, "max_tokens": 3, "return_token_ids": True}
                answer = client.post("/completions", json=body)
                return answer.json()["choices"][0]["token_ids"] if answer.is_success else answer.status_code

            models = client.get("/models").json()["data"]
            assert [(model["id"], model["root"], model["parent"]) for model in models[1:]] == [
                ("sql", str(sql), "mock"),
                ("gone", str(gone), "parent"),
            ]
            body = {"lora_name": "haiku", "lora_path": "haiku"}
            assert client.post("/load_lora_adapter", json=body).status_code == 200
            assert client.post("/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200
            assert (ask("haiku"), ask("gone"), ask("sql")) == (
                expected(IDS, "haiku", 3),
                expected(IDS, "gone", 3),
                404,
            )
            shutil.rmtree(gone)
            [engine] = server.children()
            os.kill(engine, signal.SIGKILL)
            wait_until(lambda: "the model answers again" in server.log, lambda: server.log)
            assert (ask("haiku"), ask("gone"), ask("sql"), ask("mock")) == (
                expected(IDS, "haiku", 3),
                404,
                404,
                IDS,
            )
            assert "the adapter gone cannot be loaded again, and is not served" in server.log
            assert 'lora_adapters{model_name="mock"} 1.0' in httpx.get(server.metrics).text


def test_an_adapter_that_fails_ends_the_start(tokenizer_folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "wide", rank=64)
    for path, says in (
        ("wide", "module q_proj has rank 64, above max_lora_rank=16"),
        ("./none", "there is no such folder"),
    ):
        more = {"lora_modules": [f"sql={tmp_path / path}"]}
        with mock_process(tokenizer_folder, server=more, max_loras=1) as server:
            code, _ = server.wait()
            assert code == 1 and says in server.log.splitlines()[-1], server.log


def test_a_name_that_is_the_models(tokenizer_folder: Path, tmp_path: Path) -> None:
    more = {"lora_modules": [f"mock={write_adapter(tmp_path / 'sql')}"]}
    with mock_process(tokenizer_folder, server=more, max_loras=1) as server:
        assert server.wait()[0] == 1 and "is the name of the model itself" in server.log


def test_requests_of_an_adapter_wait_until_the_next_engine_has_it(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is not ready before its adapters are, and an engine that dies meanwhile is replaced."""
    watched = Watched(tokenizer_folder, max_loras=1)
    supervisor, folder = watched.supervisor, write_adapter(tmp_path / "sql")

    async def main() -> None:
        await supervisor.start()
        await supervisor.adapters.load(supervisor.llm, LoraModule("sql", str(folder)), "mock")
        loads, load = [], AsyncLoras.load

        async def dying(llm: AsyncLoras, *arguments: Any, **options: Any) -> Any:
            loads.append(supervisor.serving)
            with pytest.raises(JengineError):
                assert supervisor.llm is None  # it raises NotReady
            if len(loads) == 1:
                watched.kill()
            return await load(llm, *arguments, **options)

        monkeypatch.setattr(AsyncLoras, "load", dying)
        watched.kill()
        await watched.until_state(False)
        await watched.until_state(True)
        assert loads == [False, False] and len(watched.engines) == 3
        assert supervisor.llm.loras.by_name.keys() == {"sql"}
        await supervisor.close()

    with caplog.at_level(logging.ERROR):
        run(main)
