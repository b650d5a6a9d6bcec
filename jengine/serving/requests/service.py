"""Common parts of all services, for any protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from jengine import InvalidArgument, PromptTooLong, SamplingParams, Tokenizer, TokensPrompt
from jengine.serving.calls.call import Call, NamedImage
from jengine.serving.calls.errors import Busy, in_use
from jengine.serving.calls.model_provider import NotReady, ServedModels
from jengine.serving.calls.named_model import NamedModel, no_model
from jengine.serving.calls.portions import Portions
from jengine.serving.config import ServerConfig
from jengine.serving.guards.admission import RequestBounds, ServerAdmission, client_of
from jengine.serving.guards.media import Media
from jengine.serving.guards.sandbox import Sandbox
from jengine.serving.guards.security import salted, scoped
from jengine.serving.logs import RequestLog
from jengine.serving.metrics.server_metrics import Metrics
from jengine.serving.options import variables_of
from jengine.serving.requests.answers import Aborts, Answer, Pace
from jengine.serving.requests.tracking import RequestTracker, Spans, TrackedRequest
from jengine.serving.requests.transfer import pages_from
from jengine.spi import (
    MAX_CLIENT,
    CutImage,
    GenerationParams,
    ImageReader,
    OutputKind,
    PreparedPrompt,
    chat_tokens,
    given_images,
    image_reader,
    images_apart,
    with_parts,
)

# minimum bytes for using a thread: the work takes milliseconds, and would delay other requests
LONG_TEXT = 10_000
THREADS = 2  # for all clients; they compete with the event loop and the engine for CPU time
MAX_BYTES = 2**28  # maximum total size of waiting and running requests
MAX_CLIENT_BYTES = 2**26  # the same per client


@dataclass(slots=True)
class _Client:
    requests: int = 0  # that wait or run; some have no bytes
    bytes: int = 0  # of these
    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))


class TextWork:
    """Runs at most THREADS tasks at a time, and one per client, so that clients take turns. Belongs to one
    event loop.

    Args:
        waits: whether tokenizing small texts, too, takes a thread.

    A thread cannot be interrupted. If a client disconnects, its task keeps its place until it is done. So the
    number of busy threads is bounded, whatever clients cancel.
    """

    def __init__(self, waits: Callable[[], bool] = lambda: False) -> None:
        self._waits = waits
        self._clients: dict[str, _Client] = {}
        self._threads = asyncio.Semaphore(THREADS)
        self._bytes = 0

    async def run[T](self, client: str, size: int, work: Callable[[], T]) -> T:
        """Runs `work` on `size` bytes and returns its result; runs it directly if `size` is small.

        Raises:
            Busy: too much work is waiting.
        """
        if size < LONG_TEXT and not self._waits():
            return work()
        mine = self._clients.get(client) or _Client()
        if mine.bytes + size > MAX_CLIENT_BYTES or self._bytes + size > MAX_BYTES:
            waiting = f"{mine.bytes} bytes of this client's text wait to be processed, {self._bytes} in all"
            raise Busy(waiting, cause="text_work")
        self._clients[client] = mine
        mine.requests += 1
        mine.bytes += size
        self._bytes += size
        turns: list[asyncio.Semaphore] = []
        try:
            for turn in (mine.turn, self._threads):
                await turn.acquire()
                turns.append(turn)
        except BaseException:
            self._done(client, size, turns)
            raise
        future = asyncio.get_running_loop().run_in_executor(None, work)

        def done(future: asyncio.Future[T]) -> None:
            _ = future.cancelled() or future.exception()  # retrieved, even if the client has gone
            self._done(client, size, turns)

        future.add_done_callback(done)
        return await asyncio.shield(future)

    def _done(self, client: str, size: int, turns: list[asyncio.Semaphore]) -> None:
        for turn in turns:
            turn.release()
        mine = self._clients[client]
        mine.requests -= 1
        mine.bytes -= size
        self._bytes -= size
        if not mine.requests:
            del self._clients[client]


Conversation = tuple[list[dict[str, Any]], dict[str, Any]]  # messages, and ChatOptions
PROCESSING = "mm_processor_kwargs"
UNKNOWN_TOKENS = 256  # reserved for a completion without max_tokens


class RequestImages:
    """
    Args:
        media: where images with an address are; closed with this.
    """

    def __init__(self, sandbox: Sandbox, media: Media) -> None:
        self._sandbox, self._media = sandbox, media

    def close(self) -> None:
        self._media.close()

    async def in_messages(
        self, client: str, messages: Any, tokenizer: Tokenizer, processing: Mapping[str, Any] | None
    ) -> Any:
        """A copy of a conversation in which each image is a CutImage.

        Raises:
            InvalidArgument: an image may not be opened or cannot be read, there are too many, or the model
                reads none.
            Refusal: too many images are waiting.
        """
        images = given_images(messages)
        if not images:
            return messages
        sources = [
            image.source if isinstance(image.source, NamedImage) else NamedImage(image.source, image.field)
            for image in images
        ]
        read = await self.read(client, sources, tokenizer, "messages", processing)
        return with_parts(messages, images, [{"type": "image", "image": image} for image in read])

    async def read(
        self,
        client: str,
        sources: list[NamedImage],
        tokenizer: Tokenizer,
        field: str,
        processing: Mapping[str, Any] | None,
    ) -> list[CutImage]:
        """The images of a prompt, one after the other. Raises as `in_messages`.

        Args:
            field: of them together.
        """
        reader = image_reader(tokenizer, sources[0].field)
        reader.check_count(len(sources), field)
        reader.adjusted(processing)  # raises, if they are wrong
        return [await self._one(client, *source, reader, processing) for source in sources]

    async def _one(
        self, client: str, source: Any, field: str, reader: ImageReader, processing: Mapping[str, Any] | None
    ) -> CutImage:
        if isinstance(source, str):
            scheme = source[:10].partition(":")[0].lower()
            if scheme in ("http", "https", "file"):
                source = await self._media.read(client, source, field)
            elif scheme != "data":
                limit = "must be a data URL, such as data:image/png;base64,... or an http or https URL"
                raise InvalidArgument(field, source[:200], limit)
        elif not isinstance(source, bytes):
            raise InvalidArgument(field, type(source).__name__, "must be a URL")
        return await self._sandbox.read_image(client, source, field, reader, processing)


class Shared(NamedTuple):
    """Parts of a server that services share.

    Attributes:
        sandbox: checks grammars, renders conversations, and reads images.
        images: of requests.
        text_work: tokenizes long texts.
        portions: of large answers.
        chat_template_kwargs: variables for chat templates, unless a request sets them.
    """

    config: ServerConfig
    models: ServedModels
    admission: ServerAdmission
    tracker: RequestTracker
    bounds: RequestBounds
    sandbox: Sandbox
    images: RequestImages
    text_work: TextWork
    pace: Pace
    portions: Portions
    chat_template_kwargs: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        config: ServerConfig,
        models: ServedModels,
        metrics: Metrics,
        request_log: RequestLog | None = None,
        spans: Spans | None = None,
    ) -> Shared:
        """Must be called in the server's event loop. Close it after the server has stopped."""
        admission = ServerAdmission(config, models, metrics)
        sandbox = Sandbox(charge=admission.charge_work)
        media = Media(config.media_domains, config.media_folder)
        return cls(
            config,
            models,
            admission,
            RequestTracker(metrics, request_log, spans),
            RequestBounds(config),
            sandbox,
            RequestImages(sandbox, media),
            TextWork(lambda: _any_waits(models)),
            Pace(),
            Portions(),
            variables_of(config.default_chat_template_kwargs),
        )

    def close(self) -> None:
        """Ends the sandbox's processes, and threads that wait for names."""
        self.sandbox.close()
        self.images.close()


def _any_waits(models: ServedModels) -> bool:
    try:
        return any(llm.tokenizer.waits for llm in models.running())
    except NotReady:
        return False


class ParsedRequest(NamedTuple):
    """A parsed request.

    Attributes:
        prompt: called once, in a thread if the request is long.
        bytes: size of the request.
        embedding: arguments of AsyncLLM.prepare_embedding, for an embedding instead of tokens.
        repeats: whether the answer repeats the prompt, for each completion.
        kv_transfer_params: see transfer.py.
    """

    params: GenerationParams
    prompt: Callable[[], str | list[int] | TokensPrompt | dict[str, Any]]
    bytes: int
    cache_salt: str | None = None
    priority: int = 0
    timeout: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    embedding: dict[str, Any] | None = None
    repeats: bool = False
    kv_transfer_params: dict[str, Any] | None = None


class Service:
    """Base class of services. Every method may fail with the statuses of jengine.serving.calls.errors."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._models, self._admission = shared.models, shared.admission
        self._tracker, self._bounds = shared.tracker, shared.bounds
        self._sandbox, self._text_work = shared.sandbox, shared.text_work
        self._pace, self._config = shared.pace, shared.config

    async def _submit(
        self,
        model: NamedModel,
        parsed: ParsedRequest,
        kind: OutputKind,
        call: Call,
        tracked: TrackedRequest,
        aborts: Aborts = "none",
        *,
        first: bool = True,
    ) -> Answer:
        """Validates and queues a prompt, which has a place. Slow work runs in threads, dangerous work in the
        sandbox's processes.

        Args:
            aborts: those that the API shows.
            first: whether this is the request's first prompt; its grammar is checked once.
        """
        client, params, llm, longest = client_of(call), parsed.params, model.llm, model.max_model_len
        place = tracked.place
        assert place is not None
        source = pages_from(parsed.kv_transfer_params, model.provider.info.pages)
        salt = salted(parsed.cache_salt)  # computed here, since threads do not know the key
        if first:
            await self._sandbox.check(client, params.structured_outputs, llm.tokenizer)
        else:
            await asyncio.sleep(0)  # lets other requests run between the prompts of a long list

        def prepare() -> PreparedPrompt:
            prompt_body: Any = parsed.prompt()
            if not isinstance(prompt_body, dict):
                prompt_body = {"prompt" if isinstance(prompt_body, str) else "prompt_token_ids": prompt_body}
            prompt: Any = {**prompt_body, "cache_salt": salt}
            if parsed.embedding is None:
                return llm.prepare(prompt, params)
            return llm.prepare_embedding(prompt, **parsed.embedding)

        prepared = await self._text_work.run(client, parsed.bytes, prepare)
        for request in prepared.requests:
            request.pages_from = source
        prompt_tokens = len(prepared.requests[0].prompt_token_ids)
        place.hold(*_logprobs(parsed, prompt_tokens, longest))
        place.reserve(prompt_tokens, _output_tokens(parsed, prompt_tokens, longest), first)
        timeout = self._bounds.timeout(parsed.timeout)
        try:
            handle = llm.submit(
                prepared,
                request_id=scoped(tracked.request_id),
                priority=parsed.priority,
                ttft_ms=parsed.ttft_ms,
                tpot_ms=parsed.tpot_ms,
                client=client[:MAX_CLIENT],
                timeout=timeout,
                output_kind=kind,
                lora_request=model.lora,
            )
        except InvalidArgument as wrong:
            if wrong.field == "lora_request":  # it was unloaded meanwhile
                raise no_model(model.name, self._models) from None
            if wrong.field == "request_id":
                raise in_use(tracked.request_id, wrong.limit) from None
            raise
        return Answer(handle, tracked, self._pace if kind == "delta" else None, aborts)

    async def _render(
        self, model: NamedModel, read: Callable[[], Conversation], template: str | None, size: int, call: Call
    ) -> TokensPrompt:
        """Renders a conversation's prompt.

        Args:
            read: returns the conversation; called in a thread if the request, of `size` bytes, is long.
            template: the client's template, which is also among the options.
        """
        client, tokenizer = client_of(call), model.tokenizer
        work = partial(self._text_work.run, client, size)
        if template is not None and not self._config.client_chat_templates:
            raise InvalidArgument(
                "chat_template", template, "this server does not accept templates from clients"
            )
        messages, options = await work(read)
        options["max_model_len"] = model.max_model_len
        if defaults := self._shared.chat_template_kwargs:
            options["chat_template_kwargs"] = {**defaults, **options.get("chat_template_kwargs", {})}
        processing = options.pop(PROCESSING, None)
        if template is not None and given_images(messages):
            raise InvalidArgument("chat_template", template, "must be absent from conversations with images")
        messages = await self._shared.images.in_messages(client, messages, tokenizer, processing)
        messages, images = await work(partial(images_apart, tokenizer, messages, processing))
        # templates of adapters come from others than the model
        trusted = template is None and tokenizer is model.llm.tokenizer
        text, ids = await self._sandbox.render(client, messages, options, tokenizer, trusted=trusted)
        return chat_tokens(tokenizer, text, ids, images)


def check_ids(field: str, count: int, model: NamedModel) -> None:
    """Checks the number of ids before they are copied. Raises PromptTooLong."""
    if count > (longest := model.max_model_len):
        limit = f"{count} ids; at most max_model_len = {longest}"
        raise PromptTooLong(field, f"{count} ids", limit, count, longest)


def check_vocabulary(field: str, ids: Sequence[int], model: NamedModel) -> None:
    """Checks that the model has tokens with these ids."""
    size = model.llm.backend.limits.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        wrong = next(token for token in ids if not 0 <= token < size)
        raise InvalidArgument(field, wrong, f"ids must be in [0, {size})")


def _output_tokens(parsed: ParsedRequest, prompt_tokens: int, max_model_len: int) -> int:
    """Tokens to reserve for each completion from a key's tokens a minute."""
    max_tokens = UNKNOWN_TOKENS if parsed.params.max_tokens is None else parsed.params.max_tokens
    return 0 if parsed.embedding is not None else min(max_tokens, max_model_len - prompt_tokens)


def _logprobs(parsed: ParsedRequest, prompt_tokens: int, max_model_len: int) -> tuple[int, int]:
    """The most log probabilities of the prompt and of the output in the answer. A repeated prompt token
    counts as one.
    """
    params = parsed.params
    if parsed.embedding is not None or not isinstance(params, SamplingParams):
        return 0, 0
    each = parsed.repeats + (0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs)
    room = max_model_len - prompt_tokens
    tokens = (
        0 if params.logprobs is None else room if params.max_tokens is None else min(params.max_tokens, room)
    )
    return params.n * each * prompt_tokens, params.n * tokens * (1 + (params.logprobs or 0))
