"""Images that clients name by an address: which may be opened, and how they are read."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import ssl
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit
from weakref import WeakValueDictionary

from jengine import InvalidArgument
from jengine.serving.guards.admission import take
from jengine.spi import MOST_IMAGE_BYTES

if TYPE_CHECKING:
    import httpcore2

SECONDS = 10.0  # of a fetch, from the first place in line to the last byte
MOST_REDIRECTS = 3
FETCHES, FETCHES_OF_CLIENT = 32, 2  # at a time
LOOKUPS, LOOKUPS_OF_CLIENT = 32, 2  # threads that wait for names, which nothing can end
PORTS = 80, 443  # of hosts that are listed without one
REDIRECTS = 301, 302, 303, 307, 308
# Not on the public internet, though not all versions of `ipaddress` know it.
PRIVATE = [
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "100.64.0.0/10",
        "168.63.129.16/32",  # Azure's hosts
        "192.0.0.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "240.0.0.0/4",
        "2001::/23",  # Teredo, benchmarks, ORCHID
        "2001:db8::/32",
        "2002::/16",  # stands for an IPv4 address
        "3fff::/20",
    )
]
GLOBAL = ipaddress.ip_network("2000::/3")  # all public IPv6 addresses
WHERE = "--allowed-media-domains"


class Target(NamedTuple):
    """The parts of an address. `listed`: its host by name, rather than by a pattern."""

    scheme: str
    host: str
    port: int
    path: str
    listed: bool


class Refused(Exception):
    """Why an address is not opened, as a limit of InvalidArgument."""


class Media:
    """Fetches images over HTTP, and reads those of files. Belongs to one event loop.

    An address is split once, and its host is looked up once: the connection is made to an IP address that
    was checked, so a second look-up cannot give another one. Proxies of the environment are not used, since
    they would look up names themselves.

    Args:
        domains: hosts that may be opened: names or IP addresses, perhaps with a port; *.NAME for all names
            below one, * for all. Those of private networks, and this machine, must be listed by name or by
            address.
        folder: the folder of files that may be read; None: none.
    """

    def __init__(self, domains: Iterable[str] = (), folder: Path | None = None) -> None:
        self._domains = frozenset(domains)
        if folder is not None and not folder.is_dir():
            raise InvalidArgument("allowed_local_media_path", str(folder), "must be a folder")
        self._folder = None if folder is None else folder.resolve()
        self._all = asyncio.Semaphore(FETCHES)
        self._clients: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._lookups = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="lookup")
        self._looking: Counter[str] = Counter()  # look-ups that have not ended, by client

    async def read(self, client: str, address: str, field: str) -> bytes:
        """The bytes of a file at an http, https or file URL.

        Raises:
            InvalidArgument: it may not be opened, or cannot be read.
        """
        try:
            if address[:5].lower() == "file:":
                return await asyncio.to_thread(self._file, address)
            self._target(address)  # no place for what is refused anyway
            mine = self._clients.get(client) or asyncio.Semaphore(FETCHES_OF_CLIENT)
            self._clients[client] = mine
            async with asyncio.timeout(SECONDS), mine, self._all:
                return await self._fetch(client, address)
        except Refused as why:
            limit = str(why)
        except TimeoutError:
            limit = f"could not be fetched within {SECONDS:g} s"
        raise InvalidArgument(field, address[:200], limit)

    def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)

    # --- addresses ---------------------------------------------------------------------------------

    def _target(self, address: str) -> Target:
        """Raises Refused if it is not one that may be opened."""
        if not self._domains:
            raise Refused(f"must be a data URL: this server opens no addresses, see {WHERE}")
        if not re.fullmatch(r"[!-~]+", address) or "\\" in address:
            raise Refused("must be a URL in ASCII, without spaces and backslashes")
        try:
            url = urlsplit(address)
            scheme, host, port = url.scheme.lower(), (url.hostname or "").rstrip("."), url.port
        except ValueError as wrong:
            raise Refused(f"is not a URL: {wrong}") from None
        if scheme not in ("http", "https") or not host or "%" in host:
            raise Refused("must be an http or https URL with a host")
        if "@" in url.netloc:
            raise Refused("must not have a name or a password before its host")
        parents = {"*." + host[at + 1 :] for at, character in enumerate(host) if character == "."}
        port = port or (443 if scheme == "https" else 80)
        with_port = f"{_bracketed(host)}:{port}"
        listed = host in self._domains or with_port in self._domains
        if not listed and not self._domains & (parents | {"*"}):
            raise Refused(f"the host {host[:100]} is not one of {WHERE}")
        if port not in PORTS and with_port not in self._domains:
            raise Refused(f"{with_port[:100]} is not one of {WHERE}, which lists ports other than 80 and 443")
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        return Target(scheme, host, port, path, listed)

    async def _addresses(self, client: str, host: str, port: int, listed: bool) -> list[str]:
        """The IP addresses of a host. Raises Refused if one of them is not public, and the host not
        listed.
        """
        if self._looking[client] >= LOOKUPS_OF_CLIENT:
            raise Refused("this client's other hosts are still being looked up")
        loop = asyncio.get_running_loop()

        def looked_up(_: object) -> None:  # or the look-up was cancelled while it waited for a thread
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(take, self._looking, client, 1)

        lookup = self._lookups.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        self._looking[client] += 1
        lookup.add_done_callback(looked_up)
        try:
            resolved = await asyncio.wrap_future(lookup)
        except (OSError, UnicodeError):
            raise Refused(f"the host {host[:100]} is not known") from None
        addresses = [str(entry[4][0]) for entry in resolved]
        if not listed and not all(map(is_public, addresses)):
            raise Refused(f"the host {host[:100]} is in a private network, and not listed in {WHERE}")
        return addresses

    # --- reading -----------------------------------------------------------------------------------

    async def _fetch(self, client: str, address: str) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            data, further = await self._answer(client, self._target(address))
            if further is None:
                return data
            try:
                address = urljoin(address, further)
            except ValueError as wrong:
                raise Refused(f"its server names an address that is no URL: {wrong}") from None
        raise Refused(f"more than {MOST_REDIRECTS} redirects")

    async def _answer(self, client: str, target: Target) -> tuple[bytes, str | None]:
        """The image, or the address of a redirect."""
        try:
            import httpcore2
        except ImportError as error:
            raise InvalidArgument.needs_extra("image_url", "an address", "images", error) from None
        addresses = await self._addresses(client, target.host, target.port, target.listed)
        url = httpcore2.URL(
            scheme=target.scheme, host=_bracketed(target.host), port=target.port, target=target.path
        )
        default = target.port == (443 if target.scheme == "https" else 80)
        host = _bracketed(target.host) + ("" if default else f":{target.port}")
        errors = OSError, httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException
        headers = {"Host": host, "Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "jengine"}
        try:
            async with (
                httpcore2.AsyncConnectionPool(self._tls, network_backend=_backend(addresses)) as pool,
                pool.stream("GET", url, headers=[*headers.items()]) as response,
            ):
                return await _body(response)
        except errors as error:
            raise Refused(f"cannot be fetched: {type(error).__name__}") from None

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def _file(self, address: str) -> bytes:
        if self._folder is None:
            raise Refused("must be a data URL: this server reads no files, see --allowed-local-media-path")
        try:
            url = urlsplit(address)
            if url.netloc not in ("", "localhost") or "\0" in unquote(url.path):
                raise Refused("must be a URL such as file:///folder/image.png")
            path = Path(unquote(url.path)).resolve()
            if not path.is_relative_to(self._folder):
                raise Refused("is not within --allowed-local-media-path")
            if not path.is_file():
                raise Refused("is not a file")
            with path.open("rb") as file:
                data = file.read(MOST_IMAGE_BYTES + 1)
        except OSError as error:
            raise Refused(f"cannot be read: {error.strerror}") from None
        except (ValueError, RuntimeError) as wrong:  # no URL, or links in a circle
            raise Refused(f"cannot be read: {type(wrong).__name__}") from None
        if len(data) > MOST_IMAGE_BYTES:
            raise Refused(f"at most {MOST_IMAGE_BYTES} bytes")
        return data


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip not in GLOBAL:
            return False
    if any(ip in network for network in PRIVATE):
        return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _backend(addresses: list[str]) -> httpcore2.AsyncNetworkBackend:
    """Connects to these addresses, whatever host is asked for."""
    import httpcore2

    class Backend(httpcore2.AnyIOBackend):
        async def connect_tcp(self, host: str, port: int, *args: Any, **options: Any) -> Any:
            error: Exception | None = None
            for address in addresses:
                try:
                    return await super().connect_tcp(address, port, *args, **options)
                except httpcore2.ConnectError as wrong:
                    error = wrong
            raise error or httpcore2.ConnectError("no address")

    return Backend()


async def _body(response: httpcore2.Response) -> tuple[bytes, str | None]:
    """An image, or a redirect's address. Raises Refused if the answer is neither."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
    if response.status in REDIRECTS and "location" in headers:
        return b"", headers["location"]
    if response.status != 200:
        raise Refused(f"its server answered with status {response.status}")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.startswith("image/"):
        raise Refused(f"must be an image: its server says {kind[:100] or 'no content-type'}")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused("its server compresses it, though it was asked not to")
    data = bytearray()
    async for piece in response.aiter_stream():
        data += piece
        if len(data) > MOST_IMAGE_BYTES:
            raise Refused(f"at most {MOST_IMAGE_BYTES} bytes")
    return bytes(data), None
