"""API keys, TLS and mutual TLS: over sockets, by a server of two methods."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from jengine import InvalidArgument
from jengine.client import Client
from jengine.serving.config import ServerConfig
from jengine.serving.grpc.client_messages import Retries, ServerError
from jengine.serving.guards.access import Authenticator, KeyInterceptor, Tls, warn_of_plaintext
from jengine.serving.guards.security import ApiKeys, Key, current_key, hash_line
from tests.serving.certificates import Authority

KEY, OTHER = "k" * 32, "o" * 32
DIGEST = hash_line(KEY)
OTHER_NAME = f"sha256-{hash_line(OTHER)[:8]}"  # it has none in the file
WHO, HEALTH = "/test.Service/Who", "/grpc.health.v1.Health/Check"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(
        f"# who may ask\n\n{hash_line(KEY, 'anna b')}  # on the first floor\n{hash_line(OTHER).upper()}\n"
    )
    return file


# --- key files ------------------------------------------------------------------------------------


def test_names_of_keys(keys: Path) -> None:
    known = ApiKeys.load(keys)
    assert known.find(KEY) == Key("anna b") and known.find(OTHER) == Key(OTHER_NAME)
    assert [known.find(key) for key in ("", KEY + " ", KEY[:-1], "\udcff" * 32)] == [None] * 4


@pytest.mark.parametrize(
    "content, limit",
    [
        (b"# no keys\n", "has no key"),
        (b"", "has no key"),
        (b"\n" + KEY.encode(), "line 2 does not begin with a SHA-256 in hexadecimal digits"),
        (b"\xff", "is not UTF-8 text"),
        (
            f"{KEY} anna".encode(),
            (
                "if it is the key itself, replace it by what `python -m jengine.serving.guards.security NAME`"
                " prints"
            ),
        ),
        (
            f"{DIGEST} anna max_stream=3".encode(),
            (
                "line 1: unknown setting 'max_stream'; the settings are max_streams, tokens_per_minute,"
                " min_priority, admin"
            ),
        ),
        (f"{DIGEST} anna admin=yes".encode(), "line 1: admin=yes: must be 0 or 1"),
        (
            f"{DIGEST} anna max_streams=0".encode(),
            "line 1: max_streams=0: must be a whole number, at least 1",
        ),
        (f"{DIGEST} anna min_priority=low".encode(), "line 1: min_priority=low: must be a whole number"),
        (f"{DIGEST} max_streams=1 max_streams=2".encode(), "'max_streams' is given twice"),
        (f"{DIGEST} an\0na".encode(), "is not printable"),
        (
            f"{DIGEST} anna\n{'0' * 64} anna max_streams=1".encode(),
            "line 2: 'anna' has other settings on an earlier line",
        ),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_key_files_that_would_let_nobody_or_anybody_in(
    tmp_path: Path, content: bytes | None, limit: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidArgument, match=limit) as refused:
        ApiKeys.load(file)
    assert refused.value.field == "api_keys" and KEY not in str(refused.value)


def test_settings_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    settings = ("max_streams=8", "tokens_per_minute=20000", "min_priority=-3", "admin=1")
    file.write_text(
        f"{hash_line(KEY, 'anna b', *settings)}  # a comment\n{hash_line(OTHER, '', 'max_streams=1')}\n"
    )
    known = ApiKeys.load(file)
    assert known.find(KEY) == Key("anna b", max_streams=8, tokens_per_minute=20000, min_priority=-3, admin=1)
    assert known.find(OTHER) == Key(OTHER_NAME, max_streams=1)
    with pytest.raises(InvalidArgument, match="unknown setting 'max_stream'"):
        hash_line(KEY, "anna", "max_stream=1")


def test_two_keys_of_one_name_are_one_client(tmp_path: Path) -> None:
    """This allows replacing a key without an interruption."""
    file = tmp_path / "keys"
    file.write_text(
        f"{hash_line(KEY, 'anna', 'max_streams=1')}\n{hash_line(OTHER, 'anna', 'max_streams=1')}\n"
    )
    known = ApiKeys.load(file)
    assert known.find(KEY) == known.find(OTHER) == Key("anna", max_streams=1)


def test_a_key_that_was_not_hashed_is_recognized(tmp_path: Path) -> None:
    raw = "0123456789abcdef" * 4  # as `openssl rand -hex 32` makes them
    (tmp_path / "keys").write_text(f"{raw} anna\n")
    known = ApiKeys.load(tmp_path / "keys")
    assert known.find(raw) is None and known.stored_raw(raw) == Key("anna") and known.stored_raw(KEY) is None


def test_lines_are_made_from_stdin() -> None:
    command = [sys.executable, "-m", "jengine.serving.guards.security", "anna b"]
    done = subprocess.run(command, input=f"{KEY}\n", capture_output=True, text=True, check=True)
    assert done.stdout == hash_line(KEY, "anna b") + "\n"
    short = subprocess.run(command, input="password\n", capture_output=True, text=True)
    assert (
        (short.returncode, short.stdout) == (2, "")
        and "at least 20 characters" in short.stderr
        and "password" not in short.stderr
    )


# --- over sockets ---------------------------------------------------------------------------------


def _name() -> str:
    key = current_key.get()
    return "None" if key is None else key.name


async def _who(request: bytes, context: Any) -> bytes:
    return _name().encode()


async def _whos(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    yield _name().encode()


@asynccontextmanager
async def serving(
    keys: Path | None = None,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> AsyncIterator[str]:
    """The address of a server whose methods answer with the name of the key that they were called with."""
    server = grpc.aio.server(
        interceptors=interceptors if keys is None else [KeyInterceptor(Authenticator(ApiKeys.load(keys)))]
    )
    unary = {
        "Who": grpc.unary_unary_rpc_method_handler(_who),
        "Whos": grpc.stream_stream_rpc_method_handler(_whos),
    }
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler("test.Service", unary),
            grpc.method_handlers_generic_handler(HEALTH.split("/")[1], {"Check": unary["Who"]}),
        ]
    )
    address = "127.0.0.1:0"
    port = (
        server.add_insecure_port(address)
        if credentials is None
        else server.add_secure_port(address, credentials)
    )
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ask(channel: grpc.aio.Channel, method: str = WHO, *metadata: tuple[str, str]) -> str:
    """The answer, or the status code's name."""
    try:
        return (await channel.unary_unary(method)(b"", metadata=metadata, timeout=20)).decode()
    except grpc.aio.AioRpcError as error:
        assert KEY not in (error.details() or "")
        return error.code().name


def test_only_known_keys_pass(keys: Path) -> None:
    async def run() -> None:
        async with serving(keys) as address, grpc.aio.insecure_channel(address) as channel:
            assert await ask(channel, WHO, ("authorization", f"Bearer {KEY}")) == "anna b"
            assert await ask(channel, WHO, ("authorization", f"bearer  {OTHER}")) == OTHER_NAME
            for wrong in (KEY[:-1], "", f"Bearer {KEY}x", "Bearer ", f"Basic {KEY}", KEY):
                assert await ask(channel, WHO, ("authorization", wrong)) == "UNAUTHENTICATED"
            assert await ask(channel) == "UNAUTHENTICATED"
            assert await ask(channel, HEALTH) == "None", (
                "health is open, and no name is left of the request before"
            )
            assert await ask(channel, "/test.Service/Missing") == "UNIMPLEMENTED"
            for authorization, expected in ((f"Bearer {KEY}", "anna b"), ("Bearer wrong", "UNAUTHENTICATED")):
                call = channel.stream_stream("/test.Service/Whos")(
                    metadata=(("authorization", authorization),), timeout=20
                )
                try:  # nothing is sent: a refusal must not wait for a message
                    assert (await call.read()).decode() == expected
                except grpc.aio.AioRpcError as error:
                    assert error.code().name == expected

    asyncio.run(run())


def test_tls(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    pair, stranger = ours.sign("server"), others.sign("stranger")

    async def run() -> None:
        async with serving(
            credentials=Tls(ServerConfig(tls_cert=pair.cert, tls_key=pair.key)).credentials
        ) as address:
            for ca, expected in ((ours, "None"), (others, "UNAVAILABLE")):
                async with grpc.aio.secure_channel(
                    address, grpc.ssl_channel_credentials(ca.cert.read_bytes())
                ) as channel:
                    assert await ask(channel) == expected
            async with grpc.aio.insecure_channel(address) as channel:
                assert await ask(channel) == "UNAVAILABLE"
            hint = r"if the server has TLS, connect with tls \(--tls\)"
            with (
                Client(address, retries=Retries(attempts=1)) as plain,
                pytest.raises(ServerError, match=hint),
            ):
                await asyncio.to_thread(plain.model)

        config = ServerConfig(tls_cert=pair.cert, tls_key=pair.key, tls_client_ca=ours.cert)
        client = ours.sign("client")
        async with serving(credentials=Tls(config).credentials) as address:
            for mine, expected in ((client, "None"), (stranger, "UNAVAILABLE"), (None, "UNAVAILABLE")):
                own = () if mine is None else (mine.key.read_bytes(), mine.cert.read_bytes())
                async with grpc.aio.secure_channel(
                    address, grpc.ssl_channel_credentials(ours.cert.read_bytes(), *own)
                ) as channel:
                    assert await ask(channel) == expected

    asyncio.run(run())


def test_tls_files_are_checked_before_anything_is_served(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    pair, other, sealed = ours.sign("server"), ours.sign("other"), ours.sign("sealed", password=b"secret")
    nothing = tmp_path / "nothing"
    nothing.write_text("nothing")
    for field, files in {
        "tls_cert": {"tls_cert": tmp_path / "missing", "tls_key": pair.key},
        "tls_key": {"tls_cert": pair.cert, "tls_key": other.key},
        "tls_client_ca": {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": nothing},
    }.items():
        with pytest.raises(InvalidArgument) as refused:
            Tls(ServerConfig(**files))  # type: ignore[arg-type]
        assert refused.value.field == field
    for files in (
        {"tls_cert": nothing, "tls_key": pair.key},
        {"tls_cert": sealed.cert, "tls_key": sealed.key},
    ):
        with pytest.raises(InvalidArgument, match="no PEM pair with tls_cert"):
            Tls(ServerConfig(**files))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "host, told",
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("[::1]", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("::", True),
        ("box", True),
    ],
)
def test_plaintext_beyond_this_machine_is_told(
    host: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jengine.serving"):
        warn_of_plaintext(ServerConfig(host=host))
        assert [f"serving plaintext on {host}" in record.getMessage() for record in caplog.records] == [
            True
        ] * told
        caplog.clear()
        warn_of_plaintext(ServerConfig(host=host, tls_cert="c", tls_key="k"))
        assert caplog.records == []
