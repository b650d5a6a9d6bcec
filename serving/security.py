"""Who may ask: TLS from files, and API keys known by their hashes. `python -m serving.security NAME` makes a line of a key file."""

from __future__ import annotations

import argparse
import getpass
import hashlib
import hmac
import ipaddress
import logging
import re
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc

from jengine import InvalidArgument
from serving.config import ServerConfig

MIN_KEY_LENGTH = 20
OPEN_SERVICES = ("/grpc.health.v1.Health/",)  # what an orchestrator asks before it knows any key

# The name of the key that the request being handled came with; None where no keys are asked for.
key_name: ContextVar[str | None] = ContextVar("key_name", default=None)

log = logging.getLogger("serving")


# --- TLS ------------------------------------------------------------------------------------------


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """For TLS, or mutual TLS; None where it is off.

    Raises:
        InvalidArgument: a file that cannot be read, is no PEM of its kind, or a key that is not the certificate's.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    cert, key = _read("tls_cert", config.tls_cert), _read("tls_key", config.tls_key)
    ca = None if config.tls_client_ca is None else _read("tls_client_ca", config.tls_client_ca)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)  # reads as gRPC will, but says at once what is wrong
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")  # an encrypted key is refused, not asked for on a terminal
    except (ssl.SSLError, ValueError) as wrong:
        raise InvalidArgument("tls_key", str(config.tls_key), f"no PEM pair with tls_cert={str(config.tls_cert)!r}: {wrong}") from None
    if ca is not None:
        try:
            context.load_verify_locations(cadata=ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as wrong:
            raise InvalidArgument("tls_client_ca", str(config.tls_client_ca), f"no PEM certificates: {wrong}") from None
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)


def warn_of_plaintext(config: ServerConfig) -> None:
    """Once, at the start: what is served without TLS beyond this machine."""
    if config.tls_cert is None and not _is_loopback(config.host):
        what = "requests and answers" if config.api_keys is None else "API keys, requests and answers"
        log.warning("serving plaintext on %s: the network can read %s; set tls_cert and tls_key to turn TLS on", config.host, what)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _read(field: str, path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as wrong:
        raise InvalidArgument(field, str(path), f"cannot be read: {wrong.strerror}") from None


# --- API keys -------------------------------------------------------------------------------------


class ApiKeys:
    """The keys that are let in, by their SHA-256.

    A plain, fast hash is right here: keys are long and random, so nobody can guess his way back from a hash, which is what slow
    hashes are for with passwords; and one is computed for every request. `hash_line` refuses short keys for that reason.
    """

    def __init__(self, names: dict[bytes, str]) -> None:
        self._names = names  # by digest

    @classmethod
    def load(cls, path: str | Path) -> ApiKeys:
        """From a file: on each line a hash in hexadecimal digits and, after a space, the key's name; # begins a comment.

        Raises:
            InvalidArgument: the file cannot be read, has another kind of line, or no key.
        """
        try:
            lines = _read("api_keys", path).decode().splitlines()
        except UnicodeDecodeError:
            raise InvalidArgument("api_keys", str(path), "is no UTF-8 text") from None
        names: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            entry = line.partition("#")[0].split(maxsplit=1)
            if not entry:
                continue
            if not re.fullmatch(r"[0-9a-fA-F]{64}", entry[0]):
                limit = (
                    f"line {number} does not begin with a SHA-256 in hexadecimal digits (not the key itself: python -m serving.security)"
                )
                raise InvalidArgument("api_keys", str(path), limit)
            names[bytes.fromhex(entry[0])] = entry[1].strip() if len(entry) == 2 else f"line {number}"
        if not names:
            raise InvalidArgument("api_keys", str(path), "holds no key: every request would be rejected")
        return cls(names)

    def name_of(self, key: str) -> str | None:
        """The key's name; None for an unknown key. Takes the same time wherever in the file the key is."""
        presented = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, presented):
                found = name
        return found


def hash_line(key: str, name: str = "") -> str:
    """The line of a key file for this key.

    Raises:
        InvalidArgument: a key that is too short to be random.
    """
    if len(key) < MIN_KEY_LENGTH:
        limit = f"at least {MIN_KEY_LENGTH} characters, made at random: openssl rand -hex 32"
        raise InvalidArgument("key", f"({len(key)} characters)", limit)
    return f"{hashlib.sha256(key.encode()).hexdigest()} {name}".rstrip()


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Lets no request pass without a known key in its `authorization: Bearer KEY` metadata, but for health checks."""

    def __init__(self, keys: ApiKeys) -> None:
        self.keys = keys

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], call: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(call)
        if handler is None or call.method.startswith(OPEN_SERVICES):
            return handler  # of methods that do not exist gRPC says so: which ones do is no secret
        key = _bearer(call.invocation_metadata)
        name = None if key is None else self.keys.name_of(key)
        if name is None:
            return _refuse_missing if key is None else _refuse_wrong
        key_name.set(name)
        return handler


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            scheme, _, key = value.partition(" ")
            return key.strip() if scheme.lower() == "bearer" else None
    return None


def _refuser(message: str) -> grpc.RpcMethodHandler:
    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    # As a streaming method, whatever was called: it answers before it has read, or parsed, any message.
    return grpc.stream_stream_rpc_method_handler(refuse)


_refuse_missing = _refuser("an API key is needed, as metadata: authorization: Bearer KEY")
_refuse_wrong = _refuser("the API key is not known")


def main() -> int:
    """Read a key from stdin, print its line."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.security", description="Read an API key from stdin and print its line for the api_keys file."
    )
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="whose key it is")
    options = parser.parse_args()
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    try:
        print(hash_line(key.strip(), options.name))
    except InvalidArgument as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
