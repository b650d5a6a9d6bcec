"""The offline face: a model as a library import."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Unpack

from jengine.chat import ChatOptions, Conversation, chat_prompt, conversations
from jengine.config import EngineConfig
from jengine.display import counted, table_html
from jengine.errors import InvalidArgument
from jengine.observe.progress import progress_bar
from jengine.outputs import LiveOutputs
from jengine.prompts import Prompt, TokensPrompt, listed, make_requests
from jengine.request import Request, RequestOutput, SamplingParams
from jengine.start import start_engine
from jengine.text.tokenizer import Tokenizer


class LLM:
    """A model, loaded and compiled, ready for prompts.

    Args:
        model: `demo`, a folder in Hugging Face's layout, or a hub id.
        progress: show bars while loading and compiling.
        options: fields of EngineConfig.

    Raises:
        InvalidArgument: an unknown option, or a value out of range.
        ModelError: the model cannot be read, or is not supported.
        OutOfMemory: the device is too small.

    Example:
        >>> llm = LLM("demo")
        >>> llm.generate("def fib(n):", SamplingParams(temperature=0.0))[0].outputs[0].text
    """

    def __init__(self, model: str | Path = "demo", *, progress: bool = True, **options: Any) -> None:
        config = EngineConfig.of(str(model), options)
        self.model = config.model
        self.engine, self.started = start_engine(config, progress=progress)
        started = time.perf_counter()
        self.tokenizer = Tokenizer.load(self.started.tokenizer_folder)
        self.engine.add_eos_token(self.tokenizer.eos_token_id)
        self.started.seconds["tokenizer"] = time.perf_counter() - started
        self._live = LiveOutputs(self.tokenizer)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results in the order of the prompts.

        Args:
            prompts: text, token ids, {"prompt_token_ids": ids}, or a list of such.
            sampling_params: one for all prompts, or one each; None is SamplingParams().

        Raises:
            InvalidArgument: a prompt or parameter that can never be answered. Nothing has been run then.
        """
        each = listed(prompts)
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(each)
        if len(params) != len(each):
            raise InvalidArgument("sampling_params", len(params), f"must be one, or as many as prompts ({len(each)})")
        work = [self._requests(prompt, p) for prompt, p in zip(each, params, strict=True)]
        outputs = [self._submit(requests) for requests in work]
        try:
            with progress_bar(total=len(work), desc="generating", unit="request", show=use_tqdm) as bar:
                self._finish(outputs, bar)
        finally:
            self._abandon(outputs)
        return outputs

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[RequestOutput]:
        """Complete one prompt, yielding the same output object, grown, after each step that gave it tokens.

        Closing the iterator early aborts the request.

        Raises:
            InvalidArgument: at the call, if the prompt or a parameter can never be answered.
        """
        return self._follow(self._requests(prompt, sampling_params))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer every conversation, by the model's chat template; results in the order of the conversations.

        Args:
            messages: dicts with "role" and "content", or a list of such conversations.
            sampling_params: one for all, or one each; None is SamplingParams().
            options: how a conversation becomes a prompt; see ChatOptions.

        Raises:
            InvalidArgument: a message, option or parameter that can never be answered. Nothing has been run then.
            ModelError: the model has no chat template.
        """
        prompts = [self.chat_prompt(conversation, **options) for conversation in conversations(messages)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Conversation, **options: Unpack[ChatOptions]) -> TokensPrompt:
        """What `chat` completes for one conversation; to be streamed, or counted. Raises as `chat`."""
        return chat_prompt(self.tokenizer, messages, **options)

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may have, prompt and output together."""
        return self.engine.limits.sequence.max_model_len

    @property
    def stats(self) -> dict[str, Any]:
        """What the start took, in seconds and compilations, and what has been compiled since (always 0, or it is a bug)."""
        return {
            "programs_compiled": self.started.programs_compiled,
            "programs_loaded": self.started.programs_loaded,
            "compiles_since_start": self.engine.compiles_since_start,
            "start_seconds": dict(self.started.seconds),
            "preemptions": self.engine.scheduler.num_preemptions,
        }

    def __repr__(self) -> str:
        return f"LLM({self.model!r}, {', '.join(value for _, value in self._facts()[1:])})"

    def _repr_html_(self) -> str:
        return table_html(self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        scheduler, started = self.engine.scheduler, self.started
        return [
            ("model", self.model),
            ("numbers", started.dtype),
            ("devices", started.devices),
            ("programs", counted(started.programs_compiled + started.programs_loaded, "program")),
            ("cache", f"{counted(scheduler.pool.capacity, 'page')} of {scheduler.page_size} tokens"),
            ("limits", f"{scheduler.max_num_seqs} sequences at once, {self.max_model_len} tokens each"),
        ]

    def _requests(self, prompt: Prompt, params: SamplingParams | None) -> list[Request]:
        """A prompt's requests, checked."""
        requests = make_requests(self.tokenizer, prompt, params, str(next(self._ids)))
        for request in requests:
            self.engine.check(request)
        return requests

    def _submit(self, requests: list[Request]) -> RequestOutput:
        self.engine.add(*requests)
        return self._live.open(requests)

    def _advance(self) -> list[RequestOutput]:
        """One step of the engine. Returns the outputs that grew."""
        grown = self._live.take(self.engine.step())
        self._pass_on()
        return grown

    def _pass_on(self) -> None:
        """Tell the engine what has ended."""
        for ended in self._live.ended:
            self.engine.end(*ended)
        self._live.ended.clear()

    def _finish(self, outputs: list[RequestOutput], bar: Any) -> None:
        """Work until all of these have ended."""
        mine = {output.request_id for output in outputs}
        tokens, start = 0, time.perf_counter()
        while mine:
            for output in self._advance():
                if output.finished and output.request_id in mine:
                    mine.remove(output.request_id)
                    tokens += _tokens(output)
                    bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
                    bar.update()

    def _follow(self, requests: list[Request]) -> Generator[RequestOutput]:
        """Yield a prompt's output whenever it has grown, whoever made it grow: other calls advance it too."""
        output, seen, ended = self._submit(requests), 0, False
        try:
            while not ended:
                if output.finished or _tokens(output) > seen:
                    seen, ended = _tokens(output), output.finished
                    yield output
                else:
                    self._advance()
        finally:
            self._abandon([output])

    def _abandon(self, outputs: list[RequestOutput]) -> None:
        """What nobody waits for any more is aborted, and what was dispatched for it is read."""
        for output in outputs:
            self._live.abort(output.request_id)
        self._pass_on()
        while self.engine.has_work and not self.engine.scheduler.has_work:
            self._advance()


def _tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)
