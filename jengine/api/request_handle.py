"""A request that AsyncLLM has queued: iterate over its outputs, abort it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Literal, Self

from jengine.base.errors import EngineDead
from jengine.core.request import CompletionOutput, RequestMetrics, RequestOutput
from jengine.core.service_level import LevelOptions

OutputKind = Literal["cumulative", "delta", "final"]


class RequestOutputKind(StrEnum):
    """vLLM's names of OUTPUT_KINDS."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final"


class RequestOptions(LevelOptions, total=False):
    """How a request runs, and what its outputs have.

    Attributes:
        priority, ttft_ms, tpot_ms, client: see ServiceLevel.
        timeout: seconds; then the request ends with finish_reason "abort" and stop_reason "timeout".
        output_kind: cumulative (the default, unless the sampling parameters have another): everything so far;
            delta: only the new text, tokens and logprobs of every completion, even if there are none; final:
            everything, in one output at the end.
    """

    timeout: float | None
    output_kind: OutputKind | None


class RequestHandle:
    """An iterator over the outputs of a request, made by AsyncLLM.submit. Use it in the event loop, with one
    reader at a time.

    Closing it, or leaving its `async with`, aborts an unfinished request and frees its id. Reading it to its
    end frees the id, too.

    Attributes:
        request_id: for AsyncLLM.abort.
        llm: the AsyncLLM, which lives at least as long as its handles.

    Examples:
        >>> async with llm.submit("def fib(n):", output_kind="delta") as handle:
        ...     async for output in handle:
        ...         print(output.outputs[0].text, end="")
    """

    def __init__(
        self,
        output: RequestOutput,
        kind: OutputKind,
        end: Callable[[str | None], bool],
        forget: Callable[[RequestHandle], None],
        settle: Callable[[], None],
        interval: int = 1,
    ) -> None:
        self.request_id, self._output, self._kind, self._interval = output.request_id, output, kind, interval
        self._settle = settle
        self.llm: object = None
        self._tokens = 0  # in the outputs so far
        self._end, self._forget = end, forget
        # for deltas, by index of the completion: tokens and characters shown
        self._shown: dict[int, tuple[int, int]] = {}
        self._grown = asyncio.Event()
        self._error: BaseException | None = None
        self._closed = False
        self._due = 0.0  # earliest time of the next output, on the event loop's clock; see pause
        self._pause: asyncio.TimerHandle | None = None
        self.timer: asyncio.TimerHandle | None = None  # cancelled when the handle is closed

    @property
    def output(self) -> RequestOutput:
        """Everything generated so far. It grows; its text is complete as of this call."""
        self._settle()
        return self._output

    @property
    def finished(self) -> bool:
        """Whether the request has ended; its last output may still be unread."""
        return self._output.finished

    def abort(self, why: str | None = None) -> bool:
        """End the request, with finish_reason "abort" and this stop_reason. False: it has ended already."""
        if not self._end(why):
            return False
        self._grown.set()
        return True

    def close(self) -> None:
        """Abort the request if it has not finished, and forget it. May be called again."""
        self._closed = True
        for timer in (self.timer, self._pause):
            if timer is not None:
                timer.cancel()
        self._end(None)
        self._forget(self)
        self._grown.set()  # for a task that reads

    def pause(self, until: float) -> None:
        """Delays the next output until this time of the event loop's clock, unless it is the last. Tokens
        that arrive meanwhile are combined."""
        self._due = until

    def grow(self) -> None:
        """Announces that the output has grown. AsyncLLM calls this."""
        if self._output.finished:
            self._grown.set()
        elif self._pause is not None or self._kind == "final" or self._grown.is_set():
            return
        elif self._interval == 1 or self._is_due():
            loop = asyncio.get_running_loop()
            if loop.time() >= self._due:
                self._grown.set()
            else:
                self._pause = loop.call_at(self._due, self._pause_over)

    def _is_due(self) -> bool:
        """Whether there are enough tokens for another output."""
        return not self._tokens or tokens_of(self._output) - self._tokens >= self._interval

    def _pause_over(self) -> None:
        self._pause = None
        self._grown.set()

    def fail(self, error: BaseException) -> None:
        """Announces that the engine has failed and no output follows. AsyncLLM calls this."""
        self._error = error
        self._grown.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. Cancelling this loses nothing.

        Raises:
            EngineDead: the engine has failed, or was closed.
        """
        if self._closed:
            raise StopAsyncIteration
        ready = False
        while not ready:
            await self._grown.wait()
            if self._closed:
                raise StopAsyncIteration
            self._grown.clear()
            ended = self._output.finished
            if self._error is not None and not ended:
                self.close()
                raise EngineDead(f"the engine has stopped: {self._error!r}") from self._error
            ready = ended or self._kind != "final"
        if self._interval > 1:
            self._tokens = tokens_of(self._output)
        news = snapshot(self.output, self._shown)
        if self._kind == "delta":
            self._shown = lengths(self._output)
        if ended:
            self.close()
        return news

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def tokens_of(output: RequestOutput) -> int:
    """Number of tokens in all completions."""
    return sum([len(completion.token_ids) for completion in output.outputs])


def lengths(output: RequestOutput) -> dict[int, tuple[int, int]]:
    """Tokens and characters of each completion, by index."""
    return {part.index: (len(part.token_ids), len(part.text)) for part in output.outputs}


def snapshot(output: RequestOutput, shown: dict[int, tuple[int, int]]) -> RequestOutput:
    """A copy that does not grow, with what follows the tokens and characters in `shown`."""
    parts, times = [], output.metrics
    # field by field, since copy.copy takes four times as long, for every streamed token
    for completion in output.outputs:
        tokens, characters = shown.get(completion.index, (0, 0))
        part = CompletionOutput(
            index=completion.index,
            text=completion.text[characters:],
            token_ids=completion.token_ids[tokens:],
            logprobs=None if completion.logprobs is None else completion.logprobs[tokens:],
            cumulative_logprob=completion.cumulative_logprob,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            weights_versions=[*completion.weights_versions],
        )
        parts.append(part)
    return RequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        outputs=parts,
        # with deltas, they came before the first token
        prompt_logprobs=None if shown else output.prompt_logprobs,
        finished=output.finished,
        metrics=RequestMetrics(
            arrival=times.arrival,
            scheduled=times.scheduled,
            first_token=times.first_token,
            finished=times.finished,
            preemptions=times.preemptions,
        ),
        num_cached_tokens=output.num_cached_tokens,
        embedding=output.embedding,
    )
