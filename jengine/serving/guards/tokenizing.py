"""Tokenizers whose files have regular expressions of others."""

from __future__ import annotations

import threading

import msgspec

from jengine import InvalidArgument, Tokenizer
from jengine.serving.guards import chat_worker
from jengine.serving.guards.workers import Workers
from jengine.serving.processes.wire import Job
from jengine.spi import unknown_patterns

AT_ONCE = 4  # processes: `text_work` has two threads, and images need markers


class Tokenizing:
    """Processes that turn text into tokens, with limits on time and memory; for all models."""

    def __init__(self) -> None:
        self._workers = Workers(chat_worker.__name__, "texts", AT_ONCE)
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        self.close = self._workers.close

    def guarded(self, tokenizer: Tokenizer) -> Tokenizer:
        """This tokenizer, if all its regular expressions are well known; otherwise a proxy whose texts are
        encoded in these processes.
        """
        if not unknown_patterns(tokenizer.backend):
            return tokenizer
        remote = RemoteTokenizer(tokenizer.backend, tokenizer.special_tokens, tokenizer.folder)
        vars(remote).update(vars(tokenizer))
        remote.processes = self
        return remote

    def encode(self, folder: str, text: str, add_special_tokens: bool) -> list[int]:
        """Waits in the calling thread. Raises as RemoteTokenizer."""
        try:
            arguments = msgspec.json.encode([text, add_special_tokens]).decode()
        except (TypeError, UnicodeEncodeError):
            raise InvalidArgument("prompt", text, "must be text that UTF-8 can encode") from None
        seconds = chat_worker.CPU_SECONDS + len(text) // chat_worker.BYTES_A_SECOND
        with self._turns:
            done = self._workers.do((folder,), Job("encode", "prompt", arguments, seconds)).done
        done.check()
        return done.token_ids


class RemoteTokenizer(Tokenizer):
    """Turns text into tokens in a process with limits."""

    waits = True
    processes: Tokenizing

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenizer.encode in another process.

        Raises:
            InvalidArgument: also if it takes too much time or memory.
            Refusal: processes are killed.
        """
        return self.processes.encode(str(self.folder), text, add_special_tokens)
