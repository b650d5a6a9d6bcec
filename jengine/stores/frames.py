"""Messages between a store's server and its clients: a handshake, then frames. A frame is a length and a
msgpack array.

Each side proves that it has the token without sending it: it answers the other side's random number with an
HMAC (SHA-256). What follows is neither encrypted nor signed: the network must be private.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from jengine.base.errors import InvalidArgument
from jengine.stores.memory import MAX_PAGE, StoreError

MAX_FRAME = MAX_PAGE + (1 << 20)  # bytes
HELLO = b"jengine pages 1\n"
NONCE_BYTES = 32
GREETING_SECONDS = 5.0
FIRST = 1 << 20  # bytes of memory that a message gets before any of it has come


class StoreMessage(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base class of messages."""


class Find(StoreMessage):
    """Asks which pages there are. Answered by Found."""

    names: list[bytes]
    wait: float = 0.0


class Load(StoreMessage):
    """Asks for pages. Answered by a Loaded for each."""

    names: list[bytes]


class Keep(StoreMessage):
    """Sends a page. Answered by Kept."""

    name: bytes
    page: bytes


class Found(StoreMessage):
    there: list[bool]


class Loaded(StoreMessage):
    page: bytes | None


class Kept(StoreMessage):
    kept: bool


Question = Find | Load | Keep
Answer = Found | Loaded | Kept
_encoder = msgspec.msgpack.Encoder()


class Frames[T]:
    """Messages of a kind over a socket, of which each end has one.

    Raises StoreError, also for a connection that was closed, and OSError.
    """

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self.connection = connection
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def send(self, message: StoreMessage) -> None:
        """Sends a message."""
        data = _encoder.encode(message)
        if len(data) > MAX_FRAME:
            raise StoreError(f"a message of {len(data)} bytes; at most {MAX_FRAME}")
        self.connection.sendall(len(data).to_bytes(4, "big"))
        self.connection.sendall(data)

    def receive(self) -> T:
        """Waits for a message."""
        size = int.from_bytes(read(self.connection, 4), "big")
        if size > MAX_FRAME:
            raise StoreError(f"a message of {size} bytes; at most {MAX_FRAME}")
        try:
            return self._decoder.decode(read(self.connection, size))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreError(f"invalid message: {error}") from None


def read(connection: socket.socket, size: int, until: float | None = None) -> bytearray:
    """Reads so many bytes. Memory is taken as they come. until: when all must have come, on `time.monotonic`;
    None: the connection's timeout is for each part.
    """
    data, at = bytearray(min(size, FIRST)), 0
    while at < size:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0.0:
                raise StoreError("the other side is too slow")
            connection.settimeout(left)
        if at == len(data):
            data += bytes(min(size - at, at))
        with memoryview(data) as view:
            more = connection.recv_into(view[at:])
        if not more:
            raise StoreError("the connection was closed")
        at += more
    return data


def greet(
    connection: socket.socket, token: bytes, *, server: bool, seconds: float = GREETING_SECONDS
) -> None:
    """The handshake, on both sides, which takes at most so many seconds. A server sends its proof only after
    it has checked the client's.

    Raises:
        StoreError: the other side has another token, is too slow, or is something else.
    """
    until = time.monotonic() + seconds
    connection.settimeout(seconds)
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(HELLO + nonce)
    hello = read(connection, len(HELLO) + NONCE_BYTES, until)
    if hello[: len(HELLO)] != HELLO:
        raise StoreError("the other side is no store of pages of this version")
    their_nonce = bytes(hello[len(HELLO) :])
    of_server, of_client = (nonce, their_nonce) if server else (their_nonce, nonce)

    def proof(side: bytes) -> bytes:
        return hmac.digest(token, side + of_server + of_client, hashlib.sha256)

    mine, theirs = (b"server", b"client") if server else (b"client", b"server")
    if not server:
        connection.sendall(proof(mine))
    answer = bytes(read(connection, hashlib.sha256().digest_size, until))
    if not hmac.compare_digest(answer, proof(theirs)):
        raise StoreError("the token is wrong")
    if server:
        connection.sendall(proof(mine))


TOKEN = "JENGINE_KV_TOKEN"  # an environment variable
FEWEST_BYTES = 16


def read_token(file: Path | None, field: str = "token_file") -> bytes:
    """The contents of a file or, without one, of the environment variable TOKEN.

    Raises:
        InvalidArgument: there is no token, it is too short, or the file cannot be read.
    """
    if file is None:
        token, field = os.environ.get(TOKEN, "").strip().encode(), TOKEN
    else:
        try:
            token = file.read_bytes().strip()
        except OSError as error:
            raise InvalidArgument(field, str(file), f"cannot be read: {error}") from None
    if len(token) < FEWEST_BYTES:
        limit = f"must hold a token of at least {FEWEST_BYTES} bytes; or set token_file"
        raise InvalidArgument(field, "a short token" if token else "", limit)
    return token
