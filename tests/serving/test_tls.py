"""Certificates are checked when they are read, and can be replaced while connections are served."""

from __future__ import annotations

import asyncio
import datetime
import logging
import shutil
import ssl
from pathlib import Path

import grpc
import pytest

from jengine import InvalidArgument
from jengine.serving.config import ServerConfig
from jengine.serving.guards.access import Access, Tls
from jengine.serving.guards.security import hash_line
from jengine.serving.metrics.server_metrics import Metrics
from tests.serving.certificates import Authority, Pair
from tests.serving.test_security import KEY, OTHER, WHO, ask, serving

DAY = 86400.0


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def config_of(pair: Pair, **options: object) -> ServerConfig:
    return ServerConfig(tls_cert=pair.cert, tls_key=pair.key, **options)  # type: ignore[arg-type]


def test_a_certificate_that_is_not_valid_now_is_an_error(ours: Authority) -> None:
    for begins, ends, limit in (
        (-2 * DAY, -DAY, "the certificate of CN=old expired on 20"),
        (DAY, 2 * DAY, "is not valid before 20"),
    ):
        with pytest.raises(InvalidArgument, match=limit) as refused:
            Tls(config_of(ours.sign("old", begins=begins, ends=ends)))
        assert refused.value.field == "tls_cert"
    old = ours.sign("ca", begins=-2 * DAY, ends=-DAY)
    with pytest.raises(InvalidArgument, match=r"tls_client_ca=.* expired on"):
        Tls(config_of(ours.sign("server"), tls_client_ca=old.cert))


def test_an_expired_authority_beside_a_valid_one_is_warned_of(
    ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair, bundle = ours.sign("server", ends=30 * DAY), ours.folder / "bundle.pem"
    valid, old = ours.sign("valid", ends=30 * DAY), ours.sign("old", begins=-2 * DAY, ends=-DAY)
    bundle.write_bytes(old.cert.read_bytes() + valid.cert.read_bytes())
    with caplog.at_level(logging.WARNING, "jengine.serving"):
        Tls(config_of(pair, tls_client_ca=bundle))
    [record] = caplog.records
    assert "tls_client_ca" in record.getMessage() and "CN=old expired on" in record.getMessage()


def test_any_certificate_of_a_chain_counts(ours: Authority) -> None:
    pair, old = ours.sign("server"), ours.sign("intermediate", begins=-2 * DAY, ends=-DAY)
    pair.cert.write_bytes(pair.cert.read_bytes() + old.cert.read_bytes())
    with pytest.raises(InvalidArgument, match="the certificate of CN=intermediate expired"):
        Tls(config_of(pair))


def test_what_is_warned_of(ours: Authority, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jengine.serving"):
        good = Tls(config_of(ours.sign("good", ends=30 * DAY)))
        assert not caplog.records
        left = good.expires - datetime.datetime.now(datetime.UTC)
        assert 29.9 < left.total_seconds() / DAY < 30.1
        soon = ours.sign("soon", ends=3 * DAY)
        soon.key.chmod(0o644)
        Tls(config_of(soon))
    ending, readable = (record.getMessage() for record in caplog.records)
    assert "the certificate of CN=soon expires on" in ending
    assert "soon.key: other users may read it (mode 644): chmod 600" in readable


def test_a_writable_keys_file_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(hash_line(KEY))
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING, "jengine.serving"):
        Access(ServerConfig(api_keys=file), Metrics())
        assert not caplog.records
        file.chmod(0o664)
        Access(ServerConfig(api_keys=file), Metrics())
    assert "other users may write it (mode 664)" in caplog.text


def test_certificates_are_replaced(ours: Authority, caplog: pytest.LogCaptureFixture) -> None:
    pair, new = ours.sign("server", ends=30 * DAY), ours.sign("new", ends=60 * DAY)
    access = Access(config_of(pair), metrics := Metrics())
    expiry = metrics.certificate_expiry()

    async def run() -> None:
        async with serving(credentials=access.credentials) as address:
            first = await asyncio.to_thread(seen, address)
            async with channel_to(address, ours) as before:
                assert await ask(before) == "None"
                for of, to in ((new.cert, pair.cert), (new.key, pair.key)):
                    shutil.copy(of, to)
                assert await asyncio.to_thread(seen, address) == first, "not before it is asked to"
                with caplog.at_level(logging.INFO, "jengine.serving"):
                    access.reload()
                second = await asyncio.to_thread(seen, address)
                assert first != second == ssl.PEM_cert_to_DER_cert(new.cert.read_text())
                assert await asyncio.to_thread(seen, address) == second
                assert await ask(before) == "None", "what is open goes on"
            pair.cert.write_text("broken")
            access.reload()
            assert await asyncio.to_thread(seen, address) == second, "the old one stays"
            async with channel_to(address, ours) as after:
                assert await ask(after) == "None"

    asyncio.run(run())
    after = metrics.certificate_expiry()
    assert expiry is not None and after is not None and 29 * DAY < after - expiry < 31 * DAY
    levels = [record.levelname for record in caplog.records if record.name == "jengine.serving"]
    assert levels == ["INFO", "ERROR"] and "the old files stay in use: tls_key=" in caplog.text


def channel_to(address: str, authority: Authority) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(
        address, grpc.ssl_channel_credentials(authority.cert.read_bytes()), options
    )


def seen(address: str) -> bytes:
    """The certificate that a new connection receives."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    import socket

    with (
        socket.create_connection((host, int(port)), timeout=20) as plain,
        context.wrap_socket(plain) as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


def test_keys_are_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(hash_line(KEY, "anna"))
    access = Access(ServerConfig(api_keys=file), Metrics())

    async def run() -> None:
        async with (
            serving(interceptors=access.interceptors) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):

            async def answers() -> list[str]:
                return [await ask(channel, WHO, ("authorization", f"Bearer {key}")) for key in (KEY, OTHER)]

            assert await answers() == ["anna", "UNAUTHENTICATED"]
            file.write_text(hash_line(OTHER, "otto"))
            access.reload()
            assert await answers() == ["UNAUTHENTICATED", "otto"]
            for broken in ("nonsense", ""):
                file.write_text(broken)
                access.reload()
                assert await answers() == ["UNAUTHENTICATED", "otto"], "the old ones stay"
            file.unlink()
            access.reload()
            assert await answers() == ["UNAUTHENTICATED", "otto"]

    with caplog.at_level(logging.INFO, "jengine.serving"):
        asyncio.run(run())
    reloads = [record.getMessage() for record in caplog.records if "reload" in record.getMessage()]
    assert (
        reloads[0] == "reloaded 1 API keys"
        and [line.startswith("reload failed") for line in reloads[1:]] == [True] * 3
    )
    assert "cannot be read: No such file" in reloads[-1]


def test_nothing_to_reload() -> None:
    assert not Access(ServerConfig(), Metrics()).reloads
