"""The prefix cache from the client's view: usage in answers, sharing between clients, and permission to reset
it. Over sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from jengine import InvalidArgument
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client import AsyncClient, Client, Retries, ServerError
from jengine.serving.guards.admission import is_loopback
from jengine.serving.guards.security import Key, current_key, hash_line, salted
from jengine.spi import Request
from tests.serving.conftest import MakeServer, MockServer
from tests.serving.leaks import wait_until
from tests.serving.test_refusals import refused

ANNA, BERTA, ADMIN = "a" * 32, "b" * 32, "r" * 32
IDS = list(range(1, 50))  # three pages of the mock's, and a token
SHORT = pb.SamplingParams(max_tokens=2)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "keys"
    file.write_text(
        "\n".join((hash_line(ANNA, "anna"), hash_line(BERTA, "berta"), hash_line(ADMIN, "root", "admin=1")))
    )
    return {"api_keys": file}


def cached(client: Client, salt: str | None = None) -> int:
    """Number of cached prompt tokens of IDS."""
    output = client.generate(IDS, max_tokens=2, cache_salt=salt)
    assert output.usage is not None and output.num_cached_tokens == output.usage.cached_prompt_tokens
    return output.usage.cached_prompt_tokens


def salts_of(server: MockServer) -> list[str | None]:
    """Salts of the requests that the engine receives from now on."""
    seen: list[str | None] = []
    add = server.engine.add

    def watched(*requests: Request) -> None:
        seen.extend(request.cache_salt for request in requests)
        add(*requests)

    server.engine.add = watched  # type: ignore[method-assign]
    return seen


# --- what an answer says -----------------------------------------------------------------------------


def test_usage(make_server: MakeServer, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    with (
        make_server(server={"request_log": file}) as server,
        Client(server.address) as client,
        server.stub() as stub,
    ):
        assert [cached(client), cached(client)] == [0, 48]
        assert client.generate(IDS[:33], max_tokens=2).num_cached_tokens == 32
        assert client.generate(IDS[:32], max_tokens=2).num_cached_tokens == 16, "a token at least is computed"
        *news, end = client.stream({"prompt_token_ids": IDS}, max_tokens=2)
        assert end.usage == (49, 2, 48) and all(output.num_cached_tokens is None for output in news)
        assert client.generate(IDS, max_tokens=2, prompt_logprobs=0).num_cached_tokens == 0
        load = stub.GetLoad(pb.GetLoadRequest())
        assert (load.cached_pages, load.prefix_queries, load.prefix_hits) == (
            3,
            3 * 49 + 33 + 32,
            2 * 48 + 32 + 16,
        )
        assert dict(load.hit_pages) == {"full": load.prefix_hits // 16}
        assert (
            server.metrics.models["mock"].prompt_tokens,
            server.metrics.models["mock"].cached_prompt_tokens,
        ) == (
            4 * 49 + 33 + 32,
            load.prefix_hits,
        )
        server.wait_until_idle()
        wait_until(lambda: file.read_text().count("\n") == 6)
    assert [json.loads(line)["cached_prompt_tokens"] for line in file.read_text().splitlines()] == [
        0,
        48,
        32,
        16,
        48,
        0,
    ]


# --- who shares with whom ----------------------------------------------------------------------------


def test_without_keys_all_share_but_for_their_salts(make_server: MakeServer) -> None:
    with make_server() as server, Client(server.address) as client:
        seen = salts_of(server)
        assert [cached(client, salt) for salt in (None, "s", "t", "s", None)] == [0, 0, 0, 48, 48]
        assert seen == [None, "s", "t", "s", None]
        assert (
            client.generate({"prompt_token_ids": IDS, "cache_salt": "t"}, max_tokens=2).num_cached_tokens
            == 48
        )
        assert client.generate({"prompt": "x", "cache_salt": "t"}, max_tokens=2).finished
        client.chat([{"role": "user", "content": "x"}], max_tokens=2, cache_salt="u")
        list(client.chat_stream([{"role": "user", "content": "x"}], max_tokens=2))
        assert seen[-4:] == ["t", "t", "u", None]
        server.wait_until_idle()


def test_keys_share_nothing(make_server: MakeServer, keys: dict[str, Any]) -> None:
    """Neither an equal salt nor the engine's internal salt makes them share pages."""
    with (
        make_server(server={**keys, "client_chat_templates": True}) as server,
        Client(server.address, api_key=ANNA) as anna,
        Client(server.address, api_key=BERTA) as berta,
    ):
        seen = salts_of(server)
        assert [cached(client, salt) for salt in (None, "s") for client in (anna, berta)] == [0] * 4
        assert [cached(client, salt) for salt in (None, "s") for client in (anna, berta)] == [48] * 4
        assert len(set(seen)) == 4 and seen[:4] == seen[4:] and None not in seen
        assert [cached(berta, salt) for salt in (seen[0], seen[2])] == [0, 0]
        messages = [{"role": "user", "content": "x"}]
        anna.chat(messages, max_tokens=2, cache_salt="s")
        anna.chat(messages, max_tokens=2, cache_salt="s", chat_template="{{ messages[0].content }}")
        assert seen[-2:] == [seen[2]] * 2, "of every form of prompt"
        server.wait_until_idle()


def test_long_texts_too(make_server: MakeServer, keys: dict[str, Any]) -> None:
    """Long texts are tokenized in another thread, which does not know the key."""
    with (
        make_server(server=keys, max_model_len=100_000, pages=20_000) as server,
        Client(server.address, api_key=ANNA) as anna,
    ):
        seen = salts_of(server)
        for prompt in ("x", "long " * 4000):
            anna.generate(prompt, max_tokens=2)
        assert seen[0] == seen[1] is not None
        server.wait_until_idle()


def salt_with(name: str | None, salt: str | None) -> str | None:
    token = current_key.set(None if name is None else Key(name, max_streams=3))
    try:
        return salted(salt)
    finally:
        current_key.reset(token)


def test_salts_of_keys_cannot_be_forged() -> None:
    """Different pairs of name and salt give different results, even if their concatenations are equal."""
    names, salts = ("a", "ab", "abc", "\x07", "key anna", "é"), (None, "a", "b", "bc", "c", "\0", "é" * 256)
    made = [salt_with(name, salt) for name in names for salt in salts]
    assert len(set(made)) == len(names) * len(salts) and all(salt and len(salt) == 64 for salt in made)
    assert made == [salt_with(name, salt) for name in names for salt in salts], "the same tomorrow"
    assert [salt_with(None, salt) for salt in salts] == list(salts)
    for name in (None, "a"):
        for wrong in ("", "s" * 257):
            with pytest.raises(InvalidArgument, match="cache_salt"):
                salt_with(name, wrong)


def test_what_is_no_salt_is_refused(make_server: MakeServer, keys: dict[str, Any]) -> None:
    with make_server(server=keys) as server, server.stub(ANNA) as stub:
        requests: list[Any] = [
            pb.GenerateRequest(text="x"),
            pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")]),
        ]
        for request in requests:
            call = stub.Generate if isinstance(request, pb.GenerateRequest) else stub.Chat
            for wrong in ("", "secret" * 60):
                request.cache_salt = wrong
                code, message, [details] = refused(lambda: call(request))  # noqa: B023 (called at once)
                assert (
                    code is grpc.StatusCode.INVALID_ARGUMENT
                    and details.field_violations[0].field == "cache_salt"
                )
                assert "text of 1 to 256 characters" in message and "secret" not in message
        server.wait_until_idle()


# --- resetting it ------------------------------------------------------------------------------------


def test_reset(make_server: MakeServer) -> None:
    with make_server() as server, Client(server.address) as client:
        assert [cached(client), cached(client)] == [0, 48]
        assert client.reset_prefix_cache() is True
        assert client.load().cached_pages == 0 and cached(client) == 0

        async def main() -> bool:
            async with AsyncClient(server.address) as other:
                return await other.reset_prefix_cache()

        assert asyncio.run(main()) is True and cached(client) == 0
        server.wait_until_idle()


def test_only_admins_may_reset_and_see_counters(make_server: MakeServer, keys: dict[str, Any]) -> None:
    once = Retries(attempts=1)
    with (
        make_server(server=keys) as server,
        Client(server.address, api_key=ANNA, retries=once) as anna,
        Client(server.address, api_key=ADMIN, retries=once) as admin,
        Client(server.address, retries=once) as stranger,
    ):
        assert [cached(anna), cached(anna)] == [0, 48]
        for client, code in ((anna, "PERMISSION_DENIED"), (stranger, "UNAUTHENTICATED")):
            with pytest.raises(ServerError, match=code) as failed:
                client.reset_prefix_cache()
        with pytest.raises(ServerError, match="admin=1"):
            anna.reset_prefix_cache()
        assert failed.value is not None and cached(anna) == 48
        assert (anna.load().prefix_queries, anna.load().prefix_hits, dict(anna.load().hit_pages)) == (
            0,
            0,
            {},
        )
        assert (admin.load().prefix_queries, admin.load().prefix_hits, dict(admin.load().hit_pages)) == (
            3 * 49,
            96,
            {"full": 6},
        )
        assert anna.load().cached_pages == admin.load().cached_pages == 3
        assert admin.reset_prefix_cache() and cached(anna) == 0
        server.wait_until_idle()


@pytest.mark.parametrize(
    "peer, local",
    [
        ("ipv4:127.0.0.1:5005", True),
        ("ipv4:127.1.2.3:1", True),
        ("ipv6:%5B::1%5D:5005", True),
        ("ipv6:[::1]:5005", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:5005", True),
        ("ipv4:10.0.0.1:5005", False),
        ("ipv4:128.127.0.1:127", False),
        ("ipv6:%5B::2%5D:5005", False),
        ("ipv6:%5Bfe80::1%25eth0%5D:5005", False),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5005", False),
        ("unix:127.0.0.1:5", False),
        ("127.0.0.1", False),
        ("", False),
        ("unknown", False),
    ],
)
def test_what_this_machine_is(peer: str, local: bool) -> None:
    assert is_loopback(peer) is local


def test_without_keys_only_this_machine_may_reset(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "jengine.serving.guards.admission.is_loopback", lambda peer: not peer.startswith("ipv4:127.")
    )
    with make_server() as server, server.stub() as stub:
        code, message, _ = refused(lambda: stub.Do(pb.DoRequest(operation="ResetPrefixCache")))
        assert code is grpc.StatusCode.PERMISSION_DENIED and "the server's machine" in message
        assert stub.GetLoad(pb.GetLoadRequest()).hit_pages, (
            "its counters are no secret there: all clients share their pages"
        )
