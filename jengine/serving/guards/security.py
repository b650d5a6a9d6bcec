"""API keys, stored as hashes, and the rights of each key. `python -m jengine.serving.guards.security NAME`
prints a line of a keys file.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import hmac
import re
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path

from jengine import InvalidArgument
from jengine.spi import check_cache_salt

MIN_KEY_LENGTH = 20


@dataclass(frozen=True, slots=True)
class Key:
    """The rights of a key. Keys with the same name, such as an old one and its replacement, are one client.

    Attributes:
        name: name in logs and metrics; printable.
        max_streams: maximum concurrent completions of the client; None: the server's max_streams_per_client.
        tokens_per_minute: prompt and generated tokens together; None: unlimited.
        min_priority: the lowest priority value that its requests may have. Lower runs first.
        admin: 1 for a client that may reset the prefix cache, read its counters, and do other things that
            affect all clients.
    """

    name: str
    max_streams: int | None = None
    tokens_per_minute: int | None = None
    min_priority: int = 0
    admin: int = 0


SETTINGS = tuple(field.name for field in fields(Key) if field.name != "name")

# The key of the current call; None if no keys are used.
current_key: ContextVar[Key | None] = ContextVar("current_key", default=None)

# --- request ids ------------------------------------------------------------------------------------

_SEPARATOR = "\0"  # not printable, so in no key's name: ids of two keys never collide


def scoped(request_id: str) -> str:
    """The engine's id for a client's request. Each key has separate ids; without keys, all clients share
    them.
    """
    key = current_key.get()
    return request_id if key is None else f"{key.name}{_SEPARATOR}{request_id}"


def salted(cache_salt: str | None) -> str | None:
    """The engine's cache salt for a client's request.

    It depends on the key's name, so that no client finds pages of another key, whose prompts it could guess
    from response times. Without keys, it is the client's own salt.

    Raises:
        InvalidArgument: the salt is invalid.
    """
    check_cache_salt(cache_salt)
    key = current_key.get()
    if key is None:
        return cache_salt
    name, salt = (text.encode("utf-8", "surrogatepass") for text in (key.name, cache_salt or ""))
    # With the length, so that no name can be continued by a salt.
    return hashlib.sha256(len(name).to_bytes(8, "big") + name + salt).hexdigest()


# --- the keys file ----------------------------------------------------------------------------------


class ApiKeys:
    """The accepted keys, by SHA-256.

    A fast hash is appropriate here: keys are long and random, so they cannot be guessed from their hashes
    (slow hashes are for passwords), and a hash is computed for every call. `hash_line` rejects short keys for
    this reason.
    """

    def __init__(self, keys: dict[bytes, Key]) -> None:
        self._keys = keys  # keyed by digest

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def of(cls, path: str | Path | None, keys: Iterable[str]) -> ApiKeys:
        """The keys of a file, and the given ones. Each given key is a separate client.

        Raises:
            InvalidArgument: as `load`.
        """
        known = {} if path is None else cls.load(path)._keys
        digests = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys]
        return cls({digest: Key(_default_name(digest.hex())) for digest in digests} | known)

    @classmethod
    def load(cls, path: str | Path) -> ApiKeys:
        """Loads a file with a key per line: its hash in hexadecimal, its name, and settings. # begins a
        comment.

            5e88...1542 anna b  max_streams=8 tokens_per_minute=20000 min_priority=-1

        Name and settings are optional; the name may contain spaces. The settings are fields of Key.

        Raises:
            InvalidArgument: the file cannot be read, has an invalid line, or has no key.
        """

        def wrong(limit: str) -> InvalidArgument:
            return InvalidArgument("api_keys", str(path), limit)

        try:
            lines = Path(path).read_bytes().decode().splitlines()
        except OSError as error:
            if _may_be_a_key(str(path)):
                limit = "there is no such file; a key itself is given as JENGINE_API_KEY or --api-key"
                raise InvalidArgument("api_keys", "(not shown)", limit) from None
            raise wrong(f"cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise wrong("is not UTF-8 text") from None
        keys: dict[bytes, Key] = {}
        by_name: dict[str, Key] = {}
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if not re.fullmatch(r"[0-9a-fA-F]{64}", words[0]):  # not quoted, since it may be a key
                raise wrong(
                    f"line {number} does not begin with a SHA-256 in hexadecimal digits; if it is the key"
                    " itself, replace it by what `python -m jengine.serving.guards.security NAME` prints,"
                    " which reads the key from stdin"
                )
            try:
                key = _key_of(words[1:], _default_name(words[0]))
            except ValueError as error:
                raise wrong(f"line {number}: {error}") from None
            if by_name.setdefault(key.name, key) != key:
                raise wrong(
                    f"line {number}: {key.name!r} has other settings on an earlier line; keys of one name are"
                    " one client"
                )
            keys[bytes.fromhex(words[0])] = key
        if not keys:
            raise wrong("has no key: every request would be rejected")
        return cls(keys)

    def find(self, presented: str) -> Key | None:
        """The key, or None if it is unknown. Constant-time with respect to the key's position in the file."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        match = None
        for known, key in self._keys.items():
            if hmac.compare_digest(known, digest):
                match = key
        return match

    def stored_raw(self, presented: str) -> Key | None:
        """The key whose line contains this key itself instead of its hash: the output of `openssl rand -hex
        32` looks like a hash.
        """
        return (
            self._keys.get(bytes.fromhex(presented)) if re.fullmatch(r"[0-9a-fA-F]{64}", presented) else None
        )


def _default_name(digest: str) -> str:
    return f"sha256-{digest[:8].lower()}"


def _key_of(words: list[str], default_name: str) -> Key:
    """Parses the words after a hash: a name, then settings. Raises ValueError."""
    settings: dict[str, int] = {}
    while words and "=" in words[-1]:
        name, _, value = words.pop().partition("=")
        if name not in SETTINGS or name in settings:
            raise ValueError(
                f"{name!r} is given twice"
                if name in settings
                else f"unknown setting {name!r}; the settings are {', '.join(SETTINGS)}"
            )
        if name == "admin" and value not in ("0", "1"):
            raise ValueError(f"admin={value}: must be 0 or 1")
        if not re.fullmatch(r"-?\d{1,18}", value) or (
            int(value) < 1 and name not in ("min_priority", "admin")
        ):
            raise ValueError(
                f"{name}={value}: must be a whole number{'' if name == 'min_priority' else ', at least 1'}"
            )
        settings[name] = int(value)
    name = " ".join(words) or default_name
    if not name.isprintable():
        raise ValueError(f"the name {name!r} is not printable")
    return Key(name, **settings)


def _may_be_a_key(path: str) -> bool:
    """Whether text that names no file is rather a key than a mistyped path."""
    folder, slash, name = path.rpartition("/")
    return not re.search(r"\.[a-z]{2,5}$", name) and not (slash and Path(folder or "/").is_dir())


def hash_line(key: str, *words: str) -> str:
    """The keys file's line for this key, with a name and settings.

    Raises:
        InvalidArgument: the key is too short to be random, or a setting is unknown.
    """
    if len(key) < MIN_KEY_LENGTH:
        limit = f"at least {MIN_KEY_LENGTH} characters, made at random: openssl rand -base64 32"
        raise InvalidArgument("key", f"({len(key)} characters)", limit)
    try:
        _key_of(" ".join(words).split(), "")
    except ValueError as error:
        raise InvalidArgument("key", " ".join(words), str(error)) from None
    return " ".join([hashlib.sha256(key.encode()).hexdigest(), *filter(None, words)])


def main() -> int:
    """Reads a key from stdin and prints its line."""
    parser = argparse.ArgumentParser(
        prog="python -m jengine.serving.guards.security",
        description="Reads an API key from stdin, prints its line for the keys file (--api-keys).",
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?", default="", help="the client's name in logs and metrics"
    )
    parser.add_argument("settings", metavar="SETTING=N", nargs="*", help=f"of {', '.join(SETTINGS)}")
    options = parser.parse_args()
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    try:
        print(hash_line(key.strip(), options.name, *options.settings))
    except InvalidArgument as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
