"""Addresses of images: which are opened, over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jengine import InvalidArgument
from jengine.serving.config import ServerConfig
from jengine.serving.guards import media as media_module
from jengine.serving.guards.media import Media, is_public
from jengine.spi import MOST_IMAGE_BYTES

IMAGE = b"\x89PNG of a test"


class Origin:
    """An HTTP server that answers each path in its own way, and keeps the heads of its requests."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        answers = {
            "/image.png?a=1": self._whole("image/png", IMAGE),
            "/page": self._whole("text/html", b"<html>"),
            "/compressed": self._whole("image/png", IMAGE, "Content-Encoding: gzip"),
            "/untyped": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
            "/here": self._to("/image.png?a=1"),
            "/round": self._to("/round"),
            "/private": self._to(self.url("/image.png?a=1", "localhost")),
            "/metadata": self._to("http://169.254.169.254/latest"),
            "/file": self._to("file:///etc/passwd"),
            "/nowhere": self._to("http://[/"),
            "/garbage": b"SSH-2.0-OpenSSH_9.6\r\n",
        }
        path = head.split()[1]
        try:
            if path == "/slow":
                await reader.read()
            if path == "/endless":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
                while True:
                    writer.write(bytes(2**20))
                    await writer.drain()
            writer.write(answers.get(path, b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"))
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def _whole(self, kind: str, body: bytes, more: str = "X: y") -> bytes:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n\r\n"
        return head.encode() + body

    def _to(self, address: str) -> bytes:
        return f"HTTP/1.1 302 Found\r\nLocation: {address}\r\nContent-Length: 0\r\n\r\n".encode()


def against(work: Callable[[Origin], Awaitable[None]]) -> None:
    async def main() -> None:
        origin = Origin()
        async with origin.serving():
            await work(origin)

    asyncio.run(main())


async def refused(media: Media, address: str, limit: str) -> None:
    with pytest.raises(InvalidArgument, match=limit) as wrong:
        await media.read("client", address, "input[0].content[1].image_url")
    assert wrong.value.field == "input[0].content[1].image_url"
    assert wrong.value.value == address[:200]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names that were looked up. They all belong to this machine."""
    looked_up: list[str] = []

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield looked_up


def test_images_are_fetched(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From listed hosts, through redirects to these, by the address that was checked; without a proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def work(origin: Origin) -> None:
        media = Media((f"127.0.0.1:{origin.port}", f"images.test:{origin.port}"))
        assert await media.read("a", origin.url("/image.png?a=1"), "image") == IMAGE
        assert await media.read("a", origin.url("/here"), "image") == IMAGE
        names.clear()
        assert await media.read("a", origin.url("/image.png?a=1", "Images.test."), "image") == IMAGE
        assert names == ["images.test"], "one look-up: a second one could have another answer"
        assert f"host: images.test:{origin.port}\r\n" in origin.heads[-1].lower()
        assert "gzip" not in origin.heads[-1]
        media.close()

    against(work)


def test_answers_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_module, "SECONDS", 0.5)

    async def work(origin: Origin) -> None:
        media = Media((f"127.0.0.1:{origin.port}",))
        for path, limit in {
            "/none": "its server answered with status 404",
            "/page": "must be an image: its server says text/html",
            "/untyped": "no content-type",
            "/compressed": "compresses it",
            "/round": "more than 3 redirects",
            "/private": "the host localhost is not one of --allowed-media-domains",
            "/metadata": "the host 169.254.169.254 is not one of",
            "/file": "must be an http or https URL",
            "/nowhere": "names an address that is no URL",
            "/garbage": "cannot be fetched",
        }.items():
            await refused(media, origin.url(path), limit)
        slow = asyncio.create_task(refused(media, origin.url("/slow"), r"not be fetched within 0\.5 s"))
        assert await media.read("other", origin.url("/image.png?a=1"), "image") == IMAGE, "no one waits"
        await slow
        monkeypatch.setattr(media_module, "SECONDS", 60.0)
        await refused(media, origin.url("/endless"), f"at most {MOST_IMAGE_BYTES} bytes")
        media.close()

    against(work)


def test_private_networks_are_opened_only_by_name(names: list[str]) -> None:
    async def work(origin: Origin) -> None:
        media = Media(("*.images.test", "*"))
        for address in (
            "http://a.images.test/image.png",
            "http://2130706433/image.png",
            "http://[::1]/image.png",
        ):
            await refused(media, address, "is in a private network, and not listed")
        assert not origin.heads, "no connection was made"
        media.close()

    against(work)


@pytest.mark.parametrize(
    ("address", "limit"),
    [
        ("http://user@images.test/", "must not have a name"),
        ("http://images.test\\@evil.test/", "without spaces and backslashes"),
        ("http://evil.test#images.test/", "the host evil.test is not one of"),
        ("http://notimages.test/", "the host notimages.test is not one of"),
        ("http://a.images.test/", "the host a.images.test is not one of"),
        ("http://images.test:port/", "is not a URL"),
        ("http://images.test /", "without spaces"),
        ("http:///images.test", "with a host"),
        ("http://[images.test/", "is not a URL"),
        ("file:///etc/passwd", "reads no files"),
        ("http://images.test:22/", "images.test:22 is not one of --allowed-media-domains, which lists ports"),
    ],
)
def test_addresses_that_are_refused(address: str, limit: str, names: list[str]) -> None:
    asyncio.run(refused(Media(("images.test",)), address, limit))
    assert not names


def test_names_that_no_server_answers_for_fill_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends a look-up: a client waits for its own, and others do not."""
    answered, looked_up = threading.Event(), list[str]()

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        looked_up.append(host)
        if host.startswith("slow"):
            answered.wait(60)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(media_module, "SECONDS", 0.2)

    async def work() -> None:
        media = Media(("*",))
        slow = [media.read("a", f"http://slow{i}.test/", "image") for i in range(2)]
        for found in await asyncio.gather(*slow, return_exceptions=True):
            assert "could not be fetched within" in str(found)
        with pytest.raises(InvalidArgument, match="other hosts are still being looked up"):
            await media.read("a", "http://slow2.test/", "image")
        with pytest.raises(InvalidArgument, match="is not known"):
            await media.read("b", "http://fast.test/", "image")
        answered.set()
        while media._looking:
            await asyncio.sleep(0.01)
        with pytest.raises(InvalidArgument, match="is not known"):
            await media.read("a", "http://fast.test/", "image")
        media.close()

    asyncio.run(work())
    assert looked_up == ["slow0.test", "slow1.test", "fast.test", "fast.test"]


def test_lookups_that_time_out_in_the_queue_fill_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        answered.wait(60)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(media_module, "SECONDS", 0.2)
    monkeypatch.setattr(media_module, "LOOKUPS", 1)

    async def work() -> None:
        media = Media(("*",))
        names = "a0", "b0", "a1", "b1"
        reads = [media.read(name[0], f"http://{name}.test/", "image") for name in names]
        for error in await asyncio.gather(*reads, return_exceptions=True):
            assert "could not be fetched within" in str(error)
        answered.set()
        async with asyncio.timeout(60):
            while media._looking:
                await asyncio.sleep(0.01)
        with pytest.raises(InvalidArgument, match="is not known"):
            await media.read("b", "http://b2.test/", "image")
        media.close()

    asyncio.run(work())


def test_by_default_nothing_is_opened(names: list[str]) -> None:
    asyncio.run(refused(Media(), "https://example.com/a.png", "this server opens no addresses"))
    assert not names


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.1.1", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "240.0.0.1", "::1", "::", "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1",
     "2002:7f00:1::", "ff02::1", "192.0.0.192", "168.63.129.16", "192.88.99.1", "fec0::1", "::127.0.0.1",
     "::ffff:0:127.0.0.1", "3fff::1", "5f00::1", "64:ff9b:1::a00:1"],
)  # fmt: skip
def test_addresses_of_private_networks(address: str) -> None:
    assert not is_public(address)
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1::1")


def test_files(tmp_path: Path) -> None:
    """Those in one folder, and no others through links or dots."""
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a b.png").write_bytes(IMAGE)
    (tmp_path / "secret.png").write_bytes(IMAGE)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "circle").symlink_to(folder / "circle")
    with (folder / "large.png").open("wb") as file:
        file.truncate(MOST_IMAGE_BYTES + 1)

    async def work() -> None:
        media = Media(folder=folder)
        assert await media.read("a", f"file://{folder}/a%20b.png", "image") == IMAGE
        await refused(media, f"file://{folder}/link.png", "is not within --allowed-local-media-path")
        await refused(media, f"file://{folder}/../secret.png", "is not within")
        await refused(media, f"file://{folder}/%2e%2e/secret.png", "is not within")
        await refused(media, f"file://evil.test{folder}/a%20b.png", "must be a URL such as file:///")
        await refused(media, f"file://{folder}/pipe.png", "is not a file")
        await refused(media, f"file://{folder}/none.png", "is not a file")
        await refused(media, f"file://{folder}/{'a' * 5000}.png", "cannot be read")
        await refused(media, f"file://{folder}/circle/a.png", "cannot be read")
        await refused(media, "file://[::1", "cannot be read")
        await refused(media, f"file://{folder}/large.png", "at most")

    asyncio.run(work())


def test_options(tmp_path: Path) -> None:
    config = ServerConfig(allowed_media_domains="Images.example.com, *.example.org")
    assert config.media_domains == ("images.example.com", "*.example.org")
    listed = ("a.test:8080", "::1", "[::1]:80", "10.0.0.1:81")
    given = ["a.test:8080", "[::1]", "[::1]:80", "10.0.0.1:81"]
    assert ServerConfig(allowed_media_domains=given).media_domains == listed
    for wrong in ("https://a.test", "*:80", "*.a.test:80", "a.*", "", "a.test/b", "a.test:", "[::1"):
        with pytest.raises(InvalidArgument, match="allowed_media_domains"):
            ServerConfig(allowed_media_domains=[wrong])
    with pytest.raises(InvalidArgument, match=r"allowed_local_media_path=.*must be a folder"):
        Media(folder=tmp_path / "none")
