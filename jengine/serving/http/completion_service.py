"""/v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from jengine import AsyncLLM, CompletionOutput, InvalidArgument, RequestOutput
from jengine.serving.calls.named_model import NamedModel
from jengine.serving.calls.portions import Parts, Portions, array, encoded, with_members
from jengine.serving.http import replies
from jengine.serving.http.bodies import COMPLETION, Body
from jengine.serving.http.calls import HttpCall, id_headers
from jengine.serving.http.parameters import completion_params
from jengine.serving.http.replies import Chain, CompletionLogprobs, Position, TokenTexts
from jengine.serving.http.service import (
    HttpService,
    StreamUsage,
    level_of,
    stop_reason,
    transfer_facts,
)
from jengine.serving.requests.answers import Answer
from jengine.serving.requests.service import ParsedRequest, check_ids
from jengine.serving.requests.tracking import TrackedRequest, tokens_of
from jengine.spi import GenerationParams, OutputKind

MOST_PROMPTS = 2048  # in a request
Prompt = str | list[int]


class Task(NamedTuple):
    """A validated request.

    Attributes:
        hides_output: whether only the prompt is shown (echo with max_tokens=0).
        head: the members that all events of a stream share.
    """

    body: Body
    params: GenerationParams
    prompts: list[Prompt]
    llm: AsyncLLM
    model: NamedModel
    hides_output: bool
    head: Parts

    def reply(self, choices: Iterable[Parts], usage: dict[str, Parts]) -> Parts:
        """`usage`: as the member of this name, or none."""
        facts = transfer_facts(self.body, self.model)
        return with_members(self.head, {"choices": array(choices), **facts, **usage})


class CompletionService(HttpService):
    """Continues texts and tokens."""

    PATH = "/v1/completions"

    async def _create(self, call: HttpCall, json_body: dict[str, Any]) -> None:
        with ExitStack() as stack:
            first = stack.enter_context(self._tracked(call, json_body))
            task = await self._task(call, json_body, first)
            places = self._admission.places(len(task.prompts), task.params.n, call)
            tracked = self._track_all(first, places, call, stack)
            respond = self._stream if task.body.get("stream") else self._whole
            await respond(call, task, tracked)

    async def _task(self, call: HttpCall, json_body: dict[str, Any], tracked: TrackedRequest) -> Task:
        body, model = await self._read(COMPLETION, json_body, call, tracked)
        llm = model.llm
        prompts = listed("prompt", body.get("prompt"), model)
        default = self._bounds.default(llm.get_default_sampling_params())
        params = self._bounds.params(completion_params(body, default))
        hides = bool(body.get("echo")) and body.sampling.get("max_tokens") == 0
        head = encoded(
            {
                "id": f"cmpl-{tracked.request_id}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": model.name,
            }
        )
        return Task(body, params, prompts, llm, model, hides, head)

    async def _queue_all(
        self, call: HttpCall, task: Task, kind: OutputKind, tracked: list[TrackedRequest], stack: ExitStack
    ) -> list[tuple[Answer, _Pieces]]:
        """Queues all prompts."""
        out = []
        repeats = bool(task.body.get("echo") or task.body.get("return_token_ids"))
        for index, (prompt, request) in enumerate(zip(task.prompts, tracked, strict=True)):
            read: Callable[[], Prompt] = partial(_ids, task, prompt)
            parsed = ParsedRequest(task.params, read, call.size, **level_of(task.body), repeats=repeats)
            answer = await self._submit(task.model, parsed, kind, call, request, "asked for", first=not index)
            pieces = _Pieces(task, index * task.params.n, prompt, self._shared.portions)
            out.append((stack.enter_context(answer), pieces))
        return out

    async def _whole(self, call: HttpCall, task: Task, tracked: list[TrackedRequest]) -> None:
        choices: list[Parts] = []
        used: list[replies.Usage] = []
        with ExitStack() as stack:
            for answer, pieces in await self._queue_all(call, task, "final", tracked, stack):
                output = await answer.next()
                choices += await pieces.choices(output)
                used.append(pieces.usage(output))
        usage = {"usage": encoded(replies.usage_sum(used))}
        await call.answer(200, task.reply(choices, usage), id_headers(tracked[0].request_id))

    async def _stream(self, call: HttpCall, task: Task, tracked: list[TrackedRequest]) -> None:
        usage = StreamUsage(task.body)
        with ExitStack() as stack:
            answers = await self._queue_all(call, task, "delta", tracked, stack)
            await call.start_events(id_headers(tracked[0].request_id))

            async def follow(answer: Answer, pieces: _Pieces) -> replies.Usage:
                while True:
                    output = await answer.next()
                    # one at a time, since many clients read only the first
                    for choice in await pieces.choices(output):
                        now = usage.during(partial(pieces.usage, output))
                        await call.event(task.reply([choice], now))
                    if output.finished:
                        return pieces.usage(output)

            if len(answers) == 1:
                used = [await follow(*answers[0])]
            else:
                used = await _together([follow(*pair) for pair in answers])
        if usage.final:
            await call.event(task.reply([], {"usage": encoded(replies.usage_sum(used))}))
        await call.end_events()


class _Pieces:
    """One prompt's completions as choices, complete or streamed.

    Args:
        first: the index of the first choice.
    """

    def __init__(self, task: Task, first: int, prompt: Prompt, portions: Portions) -> None:
        self._task, self._first, self._prompt, self._portions = task, first, prompt, portions
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun, self._ended, self._tokens = False, set[int](), 0

    def usage(self, output: RequestOutput) -> replies.Usage:
        return replies.usage(output, 0 if self._task.hides_output else self._tokens)

    async def choices(self, output: RequestOutput) -> list[Parts]:
        """The new parts of this output."""
        self._tokens += tokens_of(output)
        begins, self._begun = not self._begun, True
        choices = [await self._choice(output, completion, begins) for completion in output.outputs]
        return [choice for choice in choices if choice is not None]

    async def _choice(
        self, output: RequestOutput, completion: CompletionOutput, begins: bool
    ) -> Parts | None:
        body, index = self._task.body, completion.index
        hidden = self._task.hides_output
        text, ids = ("", []) if hidden else (completion.text, completion.token_ids)
        positions: Sequence[Position] | Chain = [] if hidden else (completion.logprobs or [])
        if begins and body.get("echo"):
            text, ids = self._prompt_text(output) + text, [*output.prompt_token_ids, *ids]
            prompt = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
            positions = Chain(prompt, [] if hidden else (completion.logprobs or []))
        ended = completion.finish_reason is not None and index not in self._ended
        if not (text or ids or ended):
            return None
        more: dict[str, Parts] = {}
        if body.get("logprobs") is not None:
            if index not in self._logprobs:
                self._logprobs[index] = self._new_logprobs(output)
            more["logprobs"] = await self._logprobs[index].add(self._portions, ids, positions)
        if begins and output.prompt_logprobs is not None and "prompt_logprobs" in body.sampling:
            more["prompt_logprobs"] = await replies.prompt_logprobs(self._portions, output.prompt_logprobs)
        if body.get("return_token_ids"):
            more["token_ids"] = encoded([] if hidden else completion.token_ids)
            more["weights_versions"] = encoded(completion.weights_versions)
            if begins:
                more["prompt_token_ids"] = encoded(output.prompt_token_ids)
        choice: dict[str, Any] = {"index": self._first + index, "text": text, "finish_reason": None}
        if ended:
            self._ended.add(index)
            choice |= {"finish_reason": completion.finish_reason, **stop_reason(completion)}
        return with_members(encoded(choice), more)

    def _new_logprobs(self, output: RequestOutput) -> CompletionLogprobs:
        body, tokenizer = self._task.body, self._task.llm.tokenizer
        texts = TokenTexts(tokenizer, body.get("return_tokens_as_token_ids", False))
        before = () if body.get("echo") else output.prompt_token_ids
        text = tokenizer.detokenizer(self._task.params.skip_special_tokens, before)
        return CompletionLogprobs(body.get("logprobs"), texts, text.push)

    def _prompt_text(self, output: RequestOutput) -> str:
        if isinstance(self._prompt, str):
            return self._prompt
        return self._task.llm.tokenizer.decode(output.prompt_token_ids, self._task.params.skip_special_tokens)


def listed(name: str, prompts: Any, model: NamedModel) -> list[Prompt]:
    """A text, token ids, or a list of either, in the field of this name.

    Raises:
        InvalidArgument: something else, or more ids than the model can take.
    """
    if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and type(prompts[0]) is int):
        prompts = [prompts]
    if not isinstance(prompts, list) or not prompts:
        raise InvalidArgument(
            name, prompts, "must be text, token ids, or a list of texts or of lists of token ids"
        )
    if len(prompts) > MOST_PROMPTS:
        raise InvalidArgument(name, f"{len(prompts)} prompts", f"at most {MOST_PROMPTS}")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str | list):
            raise InvalidArgument(f"{name}[{i}]", prompt, "must be text or token ids")
    for prompt in prompts:
        if isinstance(prompt, list):
            check_ids(name, len(prompt), model)
    return prompts


async def _together[T](work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all of these; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _ids(task: Task, prompt: Prompt) -> Prompt:
    """Tokenizes a prompt. Thread-safe."""
    if isinstance(prompt, str) and not task.body.get("add_special_tokens", True):
        return task.llm.tokenizer.encode(prompt, add_special_tokens=False)
    return prompt
