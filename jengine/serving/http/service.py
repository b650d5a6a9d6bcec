"""Common parts of the services of OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from jengine import CompletionOutput, InvalidArgument, RequestOutput, Tokenizer
from jengine.serving.calls.errors import Busy
from jengine.serving.calls.named_model import NamedModel, named_model
from jengine.serving.calls.portions import Parts, encoded
from jengine.serving.grpc.conversions import MAX_TOOLS_BYTES, check_messages
from jengine.serving.guards.admission import Place, allowed_priority, client_of
from jengine.serving.http.bodies import Body, BodyFields, most_bytes
from jengine.serving.http.calls import BadBody, HttpCall, json_object
from jengine.serving.http.endpoint import Handler, while_connected
from jengine.serving.http.parameters import names_of
from jengine.serving.http.replies import Usage
from jengine.serving.parsers.formats import AnswerFormat
from jengine.serving.requests.service import ParsedRequest, Service, Shared
from jengine.serving.requests.tracking import TrackedRequest
from jengine.serving.requests.transfer import NAME as KV_TRANSFER
from jengine.serving.requests.transfer import answer_of

TEMPLATE_OPTIONS = (  # fields for the chat template
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
    "mm_processor_kwargs",
)  # fmt: skip
LEVEL = ("cache_salt", "priority", "timeout", "ttft_ms", "tpot_ms", "kv_transfer_params")


class HttpService(Service):
    """Base class of services.

    Attributes:
        PATH: of requests that need the engine, for logs.
        create: answers these.
    """

    PATH: str

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._formats: WeakKeyDictionary[Tokenizer, AnswerFormat] = WeakKeyDictionary()
        self.create = self.handler(self._create)

    async def _json(self, call: HttpCall) -> dict[str, Any]:
        """A request's body.

        Requires the content type: a web page could make a browser send other types to a server on its user's
        machine without asking.
        """
        kind = (call.header(b"content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise BadBody(415, f"content-type must be application/json, not {kind[:100] or 'missing'}")
        encoding = (call.header(b"content-encoding") or "identity").strip().lower()
        if encoding != "identity":
            raise BadBody(415, f"content-encoding must be identity, not {encoding[:100]}")
        raw = await call.body(self._config.max_message_bytes)
        call.size = len(raw)
        return await self._work(call, lambda: json_object(raw, most_bytes))

    async def _work[T](self, call: HttpCall, work: Callable[[], T]) -> T:
        """Works on a request's body, in a thread if it is long."""
        return await self._text_work.run(client_of(call), call.size, work)

    async def _read(
        self,
        form: BodyFields,
        json_body: dict[str, Any],
        call: HttpCall,
        tracked: TrackedRequest | None = None,
    ) -> tuple[Body, NamedModel]:
        """The validated body, and the model that it names."""
        body = form.read(json_body)
        call.names = names_of(body)
        return await self._accepted(body, call, tracked)

    async def _accepted(
        self, body: Body, call: HttpCall, tracked: TrackedRequest | None = None
    ) -> tuple[Body, NamedModel]:
        """The body, if the client may ask for its priority, and the model that it names."""
        if priority := allowed_priority(body.get("priority")):
            body.fields["priority"] = priority
        if body.get("stream_options") is not None and not body.get("stream"):
            raise InvalidArgument("stream_options", body.get("stream_options"), "needs stream=true")
        if body.get("stream") and (body.get(KV_TRANSFER) or {}).get("do_remote_decode"):
            raise InvalidArgument(f"{KV_TRANSFER}.do_remote_decode", True, "needs stream=false")
        model = await named_model(body.get("model", ""), self._models, call)
        if tracked is not None:
            tracked.uses(model)
        return body, model

    async def _answer_format(self, tokenizer: Tokenizer) -> AnswerFormat:
        """The answer format of a tokenizer's chat templates. The first call may import transformers, in a
        thread.
        """
        form = self._formats.get(tokenizer)
        if form is None:
            parsers = self._config.tool_call_parser, self._config.reasoning_parser
            form = await asyncio.to_thread(AnswerFormat, tokenizer, *parsers)
            self._formats[tokenizer] = form
        return form

    def handler(self, work: Callable[[HttpCall, dict[str, Any]], Awaitable[None]]) -> Handler:
        """A handler that works on the body while the client is connected."""

        async def handle(call: HttpCall) -> None:
            await while_connected(call, work(call, await self._json(call)))

        return handle

    async def _create(self, call: HttpCall, json_body: dict[str, Any]) -> None:
        """Answers a request that needs the engine."""
        raise NotImplementedError

    @contextmanager
    def _tracked(self, call: HttpCall, json_body: dict[str, Any]) -> Iterator[TrackedRequest]:
        """A context in which a request that needs the engine is answered."""
        name = json_body.get("request_id")
        request_id = name if isinstance(name, str) else ""
        with self._tracker.track(f"POST {self.PATH}", request_id, call) as tracked:
            self._admission.stream(call)
            yield tracked

    def _track_all(
        self, first: TrackedRequest, places: list[Place], call: HttpCall, stack: ExitStack, start: int = 0
    ) -> list[TrackedRequest]:
        """Tracks each prompt of a request, from the one at `start` on, with its place; the first of all is
        tracked already.
        """
        for place in places:
            stack.enter_context(place)
        tracked = []
        for part, place in enumerate(places, start):
            request = first
            if part:
                tracker = self._tracker.track(f"POST {self.PATH}", first.request_id, call, part)
                request = stack.enter_context(tracker)
                request.model, request.adapter = first.model, first.adapter
            request.place = place
            tracked.append(request)
        return tracked

    async def _outputs(
        self,
        call: HttpCall,
        model: NamedModel,
        first: TrackedRequest,
        parsed: Sequence[Callable[[], Awaitable[ParsedRequest]]],
        field: str,
    ) -> list[RequestOutput]:
        """The outputs of prompts without generated text. More prompts than the client may have at once are
        answered in portions, one after the other.

        Args:
            parsed: functions that are awaited when their prompts are queued.
            field: the field of the request that holds the prompts.
        """
        outputs: list[RequestOutput] = []
        size = self._admission.portion(len(parsed))
        for start in range(0, len(parsed), size):
            part = parsed[start : start + size]
            with ExitStack() as stack:
                places = await self._later_places(len(part), call, field, wait=start > 0)
                answers = []
                tracked = self._track_all(first, places, call, stack, start)
                for make, record in zip(part, tracked, strict=True):
                    request, begins = await make(), record is first
                    answer = await self._submit(model, request, "final", call, record, first=begins)
                    answers.append(stack.enter_context(answer))
                outputs += [await answer.next() for answer in answers]
        return outputs

    async def _later_places(self, count: int, call: HttpCall, field: str, wait: bool) -> list[Place]:
        """Places for so many prompts. `wait`: until there are some, as the request has begun."""
        while True:
            try:
                return self._admission.places(count, 1, call, field)
            except Busy as busy:
                if not wait:
                    raise
                await asyncio.sleep(busy.retry_seconds)


def transfer_facts(body: Body, model: NamedModel) -> dict[str, Parts]:
    """Where the pages of the prompt are, in an answer to a request that another server will answer."""
    answer = answer_of(body.get(KV_TRANSFER), model.provider.info.pages)
    return {} if answer is None else {KV_TRANSFER: encoded(answer)}


def level_of(body: Body) -> dict[str, Any]:
    """Scheduling parameters of a request, for ParsedRequest."""
    return {name: body.fields[name] for name in LEVEL if name in body.fields}


def check_conversation(body: Body) -> None:
    """Limits the parts of a conversation that make templates slow, before it is processed.

    Raises:
        InvalidArgument: more than MAX_MESSAGES messages, or MAX_TOOLS_BYTES of tools or of a template's
            variables.
    """
    if isinstance(messages := body.get("messages"), list):
        check_messages(messages)
    for name in ("tools", "chat_template_kwargs"):
        if (size := len(msgspec.json.encode(body.get(name)))) > MAX_TOOLS_BYTES:
            raise InvalidArgument(name, f"{size} bytes", f"at most {MAX_TOOLS_BYTES}")


class StreamUsage:
    """The usage reported in a stream: none, at its end, or in every event."""

    def __init__(self, body: Body) -> None:
        options = body.get("stream_options") or {}
        self.final = bool(options.get("include_usage"))
        self.always = bool(options.get("continuous_usage_stats"))

    def during(self, usage: Callable[[], Usage]) -> dict[str, Parts]:
        """The member `usage` of an event before the last: null if the last has it, as in OpenAI's API."""
        if self.always:
            return {"usage": encoded(usage())}
        return {"usage": encoded(None)} if self.final else {}


def stop_reason(completion: CompletionOutput) -> dict[str, Any]:
    """The stop token or string, or the reason for an abort, for a choice's fields."""
    return {} if completion.stop_reason is None else {"stop_reason": completion.stop_reason}


def present(**fields: Any) -> dict[str, Any]:
    """The fields that are not empty."""
    return {name: value for name, value in fields.items() if value}
