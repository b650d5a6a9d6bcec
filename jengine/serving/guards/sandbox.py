"""Runs work that could crash, block or exhaust a process in disposable processes, so that it only affects one
request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from jengine import InvalidArgument, JengineError, StructuredOutputs, Tokenizer
from jengine.serving.guards import worker
from jengine.serving.guards.workers import WORKERS, Workers
from jengine.serving.processes.wire import Done, Job, part_of
from jengine.spi import (
    MOST_IMAGE_BYTES,
    ChatTemplate,
    CutImage,
    ImageReader,
    Judgement,
    check_structure,
    image_marker,
    own_template,
    shown_value,
    unknown_patterns,
)

MOST_VERDICTS = 1024  # maximum number of remembered results
REFUSAL_SECONDS = 60.0  # in which a refused grammar is not checked again
MOST_CHATS = 8192  # conversations that wait; admission bounds them before
CHAT_PROCESSES = 8  # that are kept, for as many models
MOST_SOURCE = MOST_IMAGE_BYTES * 4 // 3 + 1024  # bytes of a data URL; the worker is more exact
AT_ONCE = 4  # processes: `text_work` has two threads, and images need markers


class Verdict(NamedTuple):
    """The result of a check.

    Attributes:
        error: None if the grammar is good.
        seconds: processor time that it took.
        until: when it is checked again: limits on time may refuse, on a busy machine, what is good.
    """

    error: InvalidArgument | None
    seconds: float
    until: float


class RenderedChat(NamedTuple):
    """A conversation as the model reads it."""

    text: str
    token_ids: list[int]


class Sandbox:
    """Checks grammars, renders conversations and reads images in worker processes. Belongs to one event loop.

    Conversations with the models' templates, images, and all else have separate processes, so that they do
    not delay each other.

    Args:
        workers: maximum number of processes of each kind.
        module, image_module: the modules that they run for texts and for images.
        charge: called with the client and the processor seconds of each of its jobs, in the context of the
            request.
    """

    def __init__(
        self,
        workers: int = WORKERS,
        module: str = worker.__name__,
        image_module: str = worker.__name__,
        charge: Callable[[str, float], None] = lambda client, seconds: None,
    ) -> None:
        self.texts = Workers((module, "texts"), "grammars and templates", workers, charge)
        self.images = Workers((image_module, "images"), "images", workers, charge)
        # every conversation needs one of these: clients are not charged
        self.chats = Workers(
            (worker.__name__, "chats"), "conversations", workers, idle=CHAT_PROCESSES, waiting=MOST_CHATS
        )
        self._charge = charge
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    async def check(self, client: str, what: object, tokenizer: Tokenizer) -> None:
        """Checks a grammar. Returns immediately if it is not a StructuredOutputs, or has been checked before.

        A known grammar of a tokenizer is charged what its check took, since the engine compiles it once more.

        Raises:
            InvalidArgument: it exceeds a limit, is invalid, or crashes the process that reads it.
            Refusal: too many jobs are waiting, or processes are killed.
        """
        if not isinstance(what, StructuredOutputs):
            return
        check_structure(what)
        arguments = json.dumps({field.name: getattr(what, field.name) for field in dataclasses.fields(what)})
        folder = _folder(tokenizer)
        key = hashlib.sha256("\0".join((*folder, arguments)).encode(errors="surrogatepass")).digest()
        verdict = self._verdicts.get(key)
        if verdict is None or verdict.until < time.monotonic():
            job = Job("check", "structured_outputs", arguments, worker.TEXT_SECONDS)
            done = (await self.texts.run(client, folder, job)).done
            error = (
                InvalidArgument(done.field, done.value or shown_value(what), done.limit)
                if done.limit
                else None
            )
            until = math.inf if error is None else time.monotonic() + REFUSAL_SECONDS
            verdict = Verdict(error, done.seconds, until)
            self._verdicts[key] = verdict
            if len(self._verdicts) > MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        else:
            self._charge(client, verdict.seconds)
            self._verdicts.move_to_end(key)
        if (error := verdict.error) is not None:
            raise InvalidArgument(error.field, error.value, error.limit)

    async def render(
        self,
        client: str,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any],
        tokenizer: Tokenizer,
        *,
        trusted: bool = False,
    ) -> RenderedChat:
        """Renders a conversation.

        Args:
            messages: see `rendered_chat`.
            options: further arguments of it.
            tokenizer: has the templates, unless the options have one.
            trusted: whether the template is the model's. It may then take as long as a long text needs.

        Raises:
            ModelError: the tokenizer has no template.
            InvalidArgument, Refusal: as `check`.
        """
        template = options.get("chat_template")
        if isinstance(template, str) and template not in tokenizer.chat_templates:
            source = {"template": template, "special_tokens": tokenizer.special_tokens}
        else:
            source = _of(own_template(tokenizer, options.get("tools") is not None, template))
        rest = {name: value for name, value in options.items() if name != "chat_template"}
        arguments = {**rest, **source, "messages": messages, "marker": image_marker(tokenizer)}
        return await self._render("render", client, arguments, tokenizer, trusted)

    async def judge(self, client: str, judgement: Judgement, tokenizer: Tokenizer) -> RenderedChat:
        """Renders a reranker's prompt with the model's template. Raises as `render`."""
        arguments = {**judgement._asdict(), **_of(own_template(tokenizer, False))}
        return await self._render("judge", client, arguments, tokenizer, trusted=True)

    async def warm_up(self, tokenizer: Tokenizer) -> None:
        """Starts a process for the model's conversations, so that the first one does not wait for it."""
        with contextlib.suppress(JengineError):
            await self.render("", [{"role": "user", "content": ""}], {}, tokenizer, trusted=True)

    async def read_image(
        self,
        client: str,
        source: str | bytes,
        field: str,
        reader: ImageReader,
        processing: Mapping[str, Any] | None = None,
    ) -> CutImage:
        """Decodes an image and cuts it for its model.

        Args:
            source: a data URL, or the bytes of a file.
            field: named in errors.
            processing: the request's mm_processor_kwargs.

        Raises:
            InvalidArgument: it exceeds a limit, is invalid, or crashes the process that reads it.
            Refusal: too many images are waiting, or processes are killed.
        """
        if len(source) > MOST_SOURCE:
            raise InvalidArgument(field, f"{len(source)} bytes", f"at most {MOST_IMAGE_BYTES} bytes")
        arguments = str(reader.folder), str(reader.rows), json.dumps(dict(reader.processing))
        kind, data = (
            ("image", source)
            if isinstance(source, bytes)
            else ("data_url", source.encode("utf-8", "replace"))
        )
        job = Job(kind, field, json.dumps(dict(processing or {})), worker.IMAGE_SECONDS, data)
        done, pictures = await self.images.run(client, arguments, job)
        done.check()
        return CutImage(tuple(part_of(picture) for picture in pictures))

    def close(self) -> None:
        """Ends the workers; running jobs fail."""
        self.texts.close()
        self.images.close()
        self.chats.close()

    async def _render(
        self, kind: str, client: str, arguments: dict[str, Any], tokenizer: Tokenizer, trusted: bool
    ) -> RenderedChat:
        try:
            text = msgspec.json.encode(arguments).decode()
        except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
            raise InvalidArgument("messages", None, f"must be plain JSON: {wrong}") from None
        seconds, workers = worker.TEXT_SECONDS, self.texts
        if trusted:
            seconds, workers = seconds + len(text) // worker.BYTES_A_SECOND, self.chats
        done = (await workers.run(client, _folder(tokenizer), Job(kind, "chat_template", text, seconds))).done
        done.check()
        return RenderedChat(done.text, done.token_ids)


def _of(template: ChatTemplate) -> dict[str, Any]:
    """A template as arguments of a job."""
    return {"template": template.source, "special_tokens": template.special_tokens}


def _folder(tokenizer: Tokenizer) -> tuple[str]:
    """The arguments of a process for texts."""
    assert tokenizer.folder is not None
    return (str(tokenizer.folder),)


class Tokenizing:
    """Processes that turn text into tokens, with limits on time and memory; for all models."""

    def __init__(self) -> None:
        self._workers = Workers((worker.__name__, "chats"), "texts", AT_ONCE)
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

    def do(self, folder: str, job: Job) -> Done:
        """Does a job, and waits for it in the calling thread."""
        with self._turns:
            return self._workers.do((folder,), job).done


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
        try:
            arguments = msgspec.json.encode([text, add_special_tokens]).decode()
        except (TypeError, UnicodeEncodeError):
            raise InvalidArgument("prompt", text, "must be text that UTF-8 can encode") from None
        seconds = worker.TEXT_SECONDS + len(text) // worker.BYTES_A_SECOND
        done = self.processes.do(str(self.folder), Job("encode", "prompt", arguments, seconds))
        done.check()
        return done.token_ids
