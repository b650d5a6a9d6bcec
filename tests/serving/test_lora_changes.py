"""/v1/load_lora_adapter and /v1/unload_lora_adapter: who may, from where, and what cannot be loaded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest

from jengine import InvalidArgument, Tokenizer
from jengine.serving.calls.errors import Refusal
from jengine.serving.calls.model_provider import Adapters
from jengine.serving.config import ServerConfig
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.guards.security import hash_line
from jengine.serving.options import LoraModule
from jengine.serving.requests.lora_changes import allowed_path
from tests.serving.adapters import change, load, options, write_adapter
from tests.serving.conftest import MakeServer, MockServer, serve_mock
from tests.serving.test_refusals import refused

ADMIN, OTHER = "a" * 32, "b" * 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lora_dir, and next to it a folder that nothing may be loaded from."""
    root = tmp_path_factory.mktemp("root")
    folder = root / "adapters"
    write_adapter(folder / "sql")
    write_adapter(folder / "team" / "sql")
    write_adapter(root / "outside")
    write_adapter(root / "adapters-of-others")
    (folder / "out").symlink_to(root / "outside")
    (folder / "in").symlink_to(folder / "sql")
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "file").write_text("")
    write_adapter(folder / "leaks")
    (folder / "leaks" / "adapter_model.safetensors").symlink_to("/etc/passwd")
    write_adapter(folder / "wide", rank=64)
    (folder / "empty").mkdir()
    write_adapter(folder / "pipe")
    os.mkfifo(folder / "pipe" / "adapter_model.safetensors")
    write_adapter(folder / "large")
    with (folder / "large" / "tokenizer.json").open("wb") as file:
        file.truncate(2**27 + 1)
    write_adapter(folder / "tokens", added_tokens={"<|im_end|>": 501})
    write_adapter(folder / "ids", added_tokens={"<tool>": 7})
    write_adapter(folder / "template", chat_template="{% for")
    return folder


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path, folder: Path) -> Iterator[MockServer]:
    with serve_mock(tokenizer_folder, server=options(folder), max_loras=1, max_cpu_loras=3) as server:
        yield server


def test_web_pages_are_no_administrators(tokenizer_folder: Path, folder: Path) -> None:
    """Without API keys, also those that may use the API."""
    page = {"origin": "https://chat.example.com"}
    more = options(folder, allowed_origins="https://chat.example.com")
    with serve_mock(tokenizer_folder, server=more, max_loras=1) as server:
        load(server, "sql")
        for how, body in (
            ("load", {"lora_name": "team", "lora_path": "team/sql"}),
            ("unload", {"lora_name": "sql"}),
        ):
            answer = httpx.post(f"{server.http}/{how}_lora_adapter", json=body, headers=page)
            assert answer.status_code == 403 and "web pages may not" in answer.text
        body = {"model": "sql", "prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{server.http}/completions", json=body, headers=page).status_code == 200


def wrong(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_loading_and_unloading(server: MockServer, folder: Path) -> None:
    load(server, "a", "sql")
    load(server, "b", str(folder / "team" / ".." / "sql"))
    load(server, "c", "in")
    status, field, message = wrong(change(server, "load", lora_name="d", lora_path="sql"))
    assert (status, field) == (400, "lora_name") and "max_cpu_loras=3" in message
    status, field, message = wrong(change(server, "load", lora_name="a", lora_path="sql"))
    assert (status, field) == (400, "lora_name") and "has already been loaded" in message
    load(server, "a", "team/sql", load_inplace=True)
    listed = httpx.get(f"{server.http}/models").json()["data"]
    assert [(one["id"], one["root"]) for one in listed[1:]] == [
        ("a", "team/sql"),
        ("b", str(folder / "team" / ".." / "sql")),
        ("c", "in"),
    ]
    # the numbers of vLLM's lora_int_id
    status, field, message = wrong(change(server, "unload", lora_name="a", lora_int_id=2))
    assert (status, field) == (400, "lora_int_id") and "'b'" in message
    for body, name in (
        ({"lora_name": "a", "lora_int_id": 1}, "a"),
        ({"lora_int_id": 2}, "b"),
        ({"lora_name": "c"}, "c"),
    ):
        answer = change(server, "unload", **body)
        assert (answer.status_code, answer.text) == (
            200,
            f"Success: LoRA adapter '{name}' removed successfully.",
        )
    assert change(server, "unload", lora_int_id=2).status_code == 404
    assert not server.llm.loras.by_name


@pytest.mark.parametrize(
    "path, status, says",
    [
        ("../outside", 400, "must be below lora_dir"),
        ("sql/../../outside", 400, "must be below lora_dir"),
        ("/etc", 400, "must be below lora_dir"),
        ("/", 400, "must be below lora_dir"),
        ("..", 400, "must be below lora_dir"),
        ("../adapters-of-others", 400, "must be below lora_dir"),
        ("out", 400, "must be below lora_dir"),
        ("out/../sql/../../outside", 400, "must be below lora_dir"),
        ("leaks", 400, "adapter_model.safetensors is a link to a place outside of lora_dir"),
        ("pipe", 400, "adapter_model.safetensors is no regular file"),
        ("large", 400, "tokenizer.json has 134217729 bytes; at most 134217728"),
        ("circle", 400, "cannot be used"),
        ("a\0b", 400, "cannot be used"),
        ("x" * 300, 400, "cannot be used"),
        ("~", 404, "there is no such folder in lora_dir"),
        ("~root", 404, "there is no such folder in lora_dir"),
        ("file", 404, "there is no such folder in lora_dir"),
        ("nothing", 404, "there is no such folder in lora_dir"),
        ("file:///etc", 404, "there is no such folder in lora_dir"),
        ("https://example.com/a", 404, "there is no such folder in lora_dir"),
        ("owner/name", 400, "loads none from the hub"),
        ("empty", 400, "adapter_config.json: cannot be read"),
        (".", 400, "is a link to a place outside of lora_dir"),
        ("wide", 400, "module q_proj has rank 64, above max_lora_rank=16"),
        ("tokens", 400, "added token '<|im_end|>' with id 501, but the model's tokenizer lacks it"),
        ("ids", 400, "added token '<tool>' with id 7, but it is 399 for the model"),
        ("template", 400, "is not a valid Jinja template"),
    ],
)
def test_paths_that_cannot_be_loaded(server: MockServer, path: str, status: int, says: str) -> None:
    answer = change(server, "load", lora_name="x", lora_path=path)
    found, field, message = wrong(answer)
    assert found == status and says in message, message
    assert field == "lora_path" or status == 404
    assert server.llm.loras.by_name == {} and change(server, "unload", lora_name="x").status_code == 404


@pytest.mark.parametrize(
    "how, body, field, says",
    [
        ("load", {}, "lora_name", "must be given"),
        ("load", {"lora_name": "x"}, "lora_path", "must be given"),
        ("load", {"lora_name": "", "lora_path": "sql"}, "lora_name", "must be given"),
        ("load", {"lora_name": 5, "lora_path": "sql"}, "lora_name", "valid string"),
        ("load", {"lora_name": "x" * 257, "lora_path": "sql"}, "lora_name", "1 to 256 characters"),
        ("load", {"lora_name": "mock", "lora_path": "sql"}, "lora_name", "is the name of the model itself"),
        ("load", {"lora_name": "x", "lora_path": "sql", "load_inplace": 1}, "load_inplace", "valid boolean"),
        ("load", {"lora_name": "x", "lora_path": "sql", "is_3d_lora_weight": True}, "is_3d_lora_weight", ""),
        ("unload", {}, "lora_name", "must be given"),
        ("unload", {"lora_name": "x", "lora_int_id": "1"}, "lora_int_id", "valid integer"),
        ("unload", {"lora_path": "sql"}, "lora_path", "there is no such field"),
    ],
)
def test_bodies_that_are_refused(
    server: MockServer, how: str, body: dict[str, Any], field: str, says: str
) -> None:
    status, found, message = wrong(change(server, how, **body))
    assert (status, found) == (400, field) and says in message, message


def test_only_administrators(make_server: MakeServer, folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{hash_line(ADMIN, 'ops', 'admin=1')}\n{hash_line(OTHER, 'anna')}\n")
    with make_server(server=options(folder, api_keys=keys), max_loras=1) as server:
        body = {"lora_name": "sql", "lora_path": "sql"}
        for how in ("load", "unload"):
            assert change(server, how, **body).status_code == 401
            status, _, message = wrong(change(server, how, OTHER, **body))
            assert status == 403 and "admin=1" in message
        assert change(server, "load", ADMIN, **body).status_code == 200
        with server.stub(OTHER) as stub:
            request = pb.GenerateRequest(text="a", model="sql")
            assert stub.Generate(request).model == "sql"  # every key may use every adapter
            code, _, _ = refused(lambda: stub.Do(do_unload("sql")))
            assert code is grpc.StatusCode.PERMISSION_DENIED
        with server.stub(ADMIN) as stub:
            assert stub.Do(do_unload("sql")).answer_json == "null"
            code, _, [details] = refused(lambda: stub.Do(do_unload("sql")))
            assert (code, details.resource_name) == (grpc.StatusCode.NOT_FOUND, "sql")
            code, _, [details] = refused(lambda: stub.Generate(request))
            assert (code, details.resource_name) == (grpc.StatusCode.NOT_FOUND, "sql")


def do_unload(name: str) -> pb.DoRequest:
    return pb.DoRequest(operation="UnloadLora", arguments_json=f'{{"name": "{name}"}}')


def test_it_is_off_unless_allowed(make_server: MakeServer) -> None:
    with make_server(server={"port": 0}, max_loras=1) as server:
        for how in ("load", "unload"):
            status, _, message = wrong(change(server, how, lora_name="x", lora_path="x"))
            assert status == 403 and "--lora-dir" in message
        with server.stub() as stub:
            code, message, _ = refused(lambda: stub.Do(do_unload("x")))
            assert code is grpc.StatusCode.PERMISSION_DENIED and "lora_dir" in message
            load = pb.DoRequest(operation="LoadLora", arguments_json='{"name": "x", "path": "/etc"}')
            code, message, _ = refused(lambda: stub.Do(load))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "operation='LoadLora'" in message


def test_an_engine_without_adapters(make_server: MakeServer, folder: Path) -> None:
    with make_server(server=options(folder)) as server:
        status, field, message = wrong(change(server, "load", lora_name="sql", lora_path="sql"))
        assert (status, field) == (400, "lora_name") and "needs an engine with enable_lora=True" in message


def test_many_at_once(make_server: MakeServer, folder: Path) -> None:
    """One of those that load the same name succeeds; requests go on meanwhile."""

    async def main(server: MockServer) -> None:
        async with httpx.AsyncClient(base_url=server.http, timeout=60) as client:
            body = {"lora_name": "sql", "lora_path": "sql"}
            asked = [client.post("/load_lora_adapter", json=body) for _ in range(10)]
            asked += [client.post("/completions", json={"prompt": "a"}) for _ in range(10)]
            codes = [answer.status_code for answer in await asyncio.gather(*asked)]
            assert sorted(codes[:10]) == [200] + [400] * 9 and codes[10:] == [200] * 10
            asked = [client.post("/unload_lora_adapter", json={"lora_name": "sql"}) for _ in range(10)]
            codes = [answer.status_code for answer in await asyncio.gather(*asked)]
            assert sorted(codes) == [200] + [404] * 9

    with make_server(server=options(folder), max_loras=1) as server:
        asyncio.run(main(server))
        server.wait_until_idle()


def test_a_load_whose_caller_has_gone_is_done_whole(tokenizer_folder: Path, folder: Path) -> None:
    """Otherwise the engine would have an adapter that the server does not list, and cannot unload."""

    async def main() -> None:
        asked, may, adapters = asyncio.Event(), asyncio.Event(), Adapters()

        async def load(request: Any, *, load_inplace: bool) -> None:
            asked.set()
            await may.wait()

        llm: Any = SimpleNamespace(
            tokenizer=Tokenizer.load(tokenizer_folder), loras=SimpleNamespace(load=load)
        )
        task = asyncio.create_task(adapters.load(llm, LoraModule("sql", str(folder / "sql")), "mock"))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may.set()
        async with asyncio.timeout(60):
            while adapters.get("sql") is None:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_hub_ids(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id is no path: not one that a folder in lora_dir or in the working directory answers to."""
    both = ServerConfig(lora_dir=folder, allow_lora_hub=True)
    hub = ServerConfig(allow_lora_hub=True)
    assert allowed_path("owner/name", both) == allowed_path("owner/name", hub) == "owner/name"
    assert allowed_path("team/sql", both) == str(folder / "team" / "sql")
    for path in ("sql", "/etc/ssl", "../outside", "./sql", "a/b/c", ".owner/name", "owner/..", "\ud800/a"):
        with pytest.raises(Refusal, match="no such folder"):
            allowed_path(path, hub)
    monkeypatch.chdir(tmp_path)
    os.makedirs("owner/name")
    with pytest.raises(InvalidArgument, match="is a hub id, but also a path on the server"):
        allowed_path("owner/name", hub)


def test_a_folder_of_very_many_files(tmp_path: Path) -> None:
    write_adapter(tmp_path / "full")
    for i in range(1000):
        (tmp_path / "full" / str(i)).touch()
    with pytest.raises(InvalidArgument, match="more than 1000 files"):
        allowed_path("full", ServerConfig(lora_dir=tmp_path))
