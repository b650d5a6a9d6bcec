"""Records requests' lengths and times for `jengine simulate`, without texts, tokens or names."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
import weakref
from array import array
from pathlib import Path

from jengine.base.errors import InvalidArgument
from jengine.scheduling.requests.sequence import Sequence

VERSION = 1
BLOCK = 64  # prompt tokens per hash
HEADER = 4096  # maximum bytes of the first line
DIGEST = 6  # bytes of a hash


class TraceRecorder:
    """Appends a line of JSON for each finished request.

    Hashes show which prompts have a common prefix: each covers a block and everything before it. They are
    keyed by a random number that is not stored. So texts cannot be guessed from them, and an engine that
    starts later produces other hashes.

    Raises:
        InvalidArgument: the file cannot be written, or is not such a recording.
    """

    def __init__(self, path: str | Path) -> None:
        self._key = secrets.token_bytes(32)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            self._close = weakref.finalize(self, os.close, self._file)
            if not os.fstat(self._file).st_size:
                self._write({"jengine_trace": VERSION, "block": BLOCK, "begin": time.time()})
            begin = float(json.loads(os.pread(self._file, HEADER, 0).split(b"\n")[0])["begin"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(
                "record_trace", str(path), f"cannot be written as a trace: {error!r}"
            ) from None
        # start of the recording, on the clock of arrivals
        self._begin = begin - time.time() + time.monotonic()

    def ended(self, sequence: Sequence) -> None:
        """Records a request and its number of tokens."""
        request = sequence.request
        line: dict[str, object] = {
            "arrival": round(request.arrival - self._begin, 6),
            "prompt_tokens": sequence.prompt_len,
            "output_tokens": len(sequence.tokens) - sequence.prompt_len,
            "prefix": self._prefix(request.cache_salt, sequence.keys[: sequence.prompt_len]),
        }
        for name, value in (
            ("priority", request.priority),
            ("ttft_ms", request.ttft_ms),
            ("tpot_ms", request.tpot_ms),
        ):
            if value:
                line[name] = value
        for name, text in (("client", request.client), ("lora", request.lora_name)):
            if text:
                line[name] = self._digest(text.encode())
        self._write(line)

    def close(self) -> None:
        """Stops recording. May be called repeatedly."""
        self._close()

    def _write(self, fields: dict[str, object]) -> None:
        """Writes one line at once."""
        os.write(self._file, (json.dumps(fields, separators=(",", ":")) + "\n").encode())

    def _prefix(self, salt: str | None, keys: list[int]) -> list[str]:
        """A hash for each whole block and everything before it. keys: see Sequence.keys."""
        chain, hashes = (salt or "").encode(), []
        for start in range(0, len(keys) - BLOCK + 1, BLOCK):
            block = array("q", keys[start : start + BLOCK]).tobytes()
            chain = hashlib.blake2b(chain + block, key=self._key, digest_size=32).digest()
            hashes.append(chain[:DIGEST].hex())
        return hashes

    def _digest(self, text: bytes) -> str:
        return hashlib.blake2b(text, key=self._key, digest_size=DIGEST).hexdigest()
