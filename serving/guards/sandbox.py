"""Runs work that could crash, block or exhaust a process in disposable processes, so that it only affects one
request.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jengine import (
    MOST_IMAGE_BYTES,
    CutImage,
    ImageReader,
    InvalidArgument,
    StructuredOutputs,
    Tokenizer,
    check_structure,
    shown_value,
)
from jengine.serving.guards import image_worker, sandbox_worker
from jengine.serving.guards.workers import WORKERS, Workers
from jengine.serving.processes.wire import Done, Job, part_of

MOST_VERDICTS = 1024  # maximum number of remembered results
MOST_SOURCE = MOST_IMAGE_BYTES * 4 // 3 + 1024  # bytes of a data URL; the worker is more exact


class Verdict(NamedTuple):
    """The result of a check: None if the grammar is good, and the processor seconds that it took."""

    error: InvalidArgument | None
    seconds: float


class Sandbox:
    """Checks grammars, renders conversations and reads images in worker processes. Belongs to one event loop.

    Images have separate processes, so that they and grammars do not delay each other.

    Args:
        workers: maximum number of processes of each kind.
        module, image_module: the modules that they run.
        charge: called with the client and the processor seconds of each of its jobs, in the context of the
            request.
    """

    def __init__(
        self,
        workers: int = WORKERS,
        module: str = sandbox_worker.__name__,
        image_module: str = image_worker.__name__,
        charge: Callable[[str, float], None] = lambda client, seconds: None,
    ) -> None:
        self.texts = Workers(module, "grammars and templates", sandbox_worker.CPU_SECONDS, workers, charge)
        self.images = Workers(image_module, "images", image_worker.CPU_SECONDS, workers, charge)
        self._charge = charge
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    async def check(self, client: str, what: object, tokenizer: Tokenizer) -> None:
        """Checks a grammar. Returns immediately if it is not a StructuredOutputs, or has been checked before.

        A known grammar is charged what its check took, since the engine compiles it once more.

        Raises:
            InvalidArgument: it exceeds a limit, is invalid, or crashes the process that reads it.
            Refusal: too many jobs are waiting, or processes are killed.
        """
        if not isinstance(what, StructuredOutputs):
            return
        check_structure(what)
        arguments = json.dumps({field.name: getattr(what, field.name) for field in dataclasses.fields(what)})
        key = hashlib.sha256(arguments.encode(errors="surrogatepass")).digest()
        if (verdict := self._verdicts.get(key)) is None:
            done = await self._text(client, tokenizer, Job("check", "structured_outputs", arguments))
            verdict = Verdict(
                InvalidArgument(done.field, done.value or shown_value(what), done.limit)
                if done.limit
                else None,
                done.seconds,
            )
            self._verdicts[key] = verdict
            if len(self._verdicts) > MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        else:
            self._charge(client, verdict.seconds)
            self._verdicts.move_to_end(key)
        if (error := verdict.error) is not None:
            raise InvalidArgument(error.field, error.value, error.limit)

    async def render(
        self, client: str, messages: list[dict[str, Any]], options: dict[str, Any], tokenizer: Tokenizer
    ) -> list[int]:
        """Renders a conversation with the chat template in ChatOptions. Returns token ids. Raises as
        `check`.
        """
        arguments = json.dumps({"messages": messages, **options})
        done = await self._text(client, tokenizer, Job("render", "chat_template", arguments))
        done.check()
        return done.token_ids

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
        job = Job(kind, field, json.dumps(dict(processing or {})), data)
        done, pictures = await self.images.run(client, arguments, job)
        done.check()
        return CutImage(tuple(part_of(picture) for picture in pictures))

    def close(self) -> None:
        """Ends the workers; running jobs fail."""
        self.texts.close()
        self.images.close()

    async def _text(self, client: str, tokenizer: Tokenizer, job: Job) -> Done:
        assert tokenizer.folder is not None
        return (await self.texts.run(client, (str(tokenizer.folder),), job)).done
