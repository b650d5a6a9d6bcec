"""vLLM's LLMEngine: the caller adds requests, and steps the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from jengine.api.embeddings import EmbeddingRequestOutput
from jengine.api.prompts import Prompt
from jengine.api.request_handle import OutputKind, lengths, snapshot
from jengine.api.shared_engine import ThreadCall
from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.lora import LoRARequest
from jengine.core.pooling import PoolingParams
from jengine.core.request import RequestOutput, SamplingParams
from jengine.core.service_level import ServiceLevel
from jengine.vllm.translate import accepts

if TYPE_CHECKING:
    from jengine.api.llm import LLM


class _Added(NamedTuple):
    """A request. `shown`: what its outputs have had so far, if they are deltas."""

    call: ThreadCall
    kind: OutputKind
    shown: dict[int, tuple[int, int]]


class LLMEngine:
    """A model that the caller steps, for scripts written for vLLM. Use it in one thread.

    Args:
        llm: the model. Its other methods may be used, too: all requests share batches.

    Examples:
        >>> engine = LLMEngine.from_engine_args(EngineArgs(model="demo"))
        >>> engine.add_request("0", "def fib(n):", SamplingParams(temperature=0.0))
        >>> while engine.has_unfinished_requests():
        ...     for output in engine.step():
        ...         print(output.outputs[0].text)
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._added: dict[str, _Added] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **more: Any) -> Self:
        """Load the model of these options. Raises as LLM.from_engine_args."""
        from jengine.api.llm import LLM

        return cls(LLM.from_engine_args(engine_args, **more))

    @accepts
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        lora_request: LoRARequest | str | None = None,
        priority: int = 0,
    ) -> None:
        """Queue one prompt.

        Args:
            request_id: of its outputs, and for `abort_request`; must not be in use.
            prompt, lora_request, priority: as for LLM.generate.
            params: SamplingParams; PoolingParams for an embedding. None is the LLM's default. Their
                output_kind says what `step` returns: everything so far, what is new, or the end only.

        Raises:
            InvalidArgument: as LLM.generate. Nothing has been queued.
        """
        if request_id in self._added:
            raise InvalidArgument("request_id", request_id, "is in use")
        [adapter] = self.llm.loras.names(lora_request, 1)
        pooling, sampling = (params, None) if isinstance(params, PoolingParams) else (None, params)
        level = ServiceLevel(priority=priority)
        requests = self.llm._requests.make_one(prompt, sampling, level, pooling=pooling, lora_name=adapter)
        added = _Added(ThreadCall(each_token=True), getattr(params, "output_kind", None) or "cumulative", {})
        self.llm._shared.open(added.call, [requests])
        self._added[request_id] = added

    def step(self) -> list[RequestOutput | EmbeddingRequestOutput]:
        """Step the engine until a request has got tokens. Returns the outputs of those that have; they do not
        change later. Without requests, returns at once.

        Raises:
            EngineDead: the engine has failed, or was closed.
        """
        added, shared = [*self._added.items()], self.llm._shared
        if added:
            shared.step_until(lambda: any(request.call.news for _, request in added))
        outputs: list[RequestOutput | EmbeddingRequestOutput] = []
        for request_id, (call, kind, shown) in added:
            for output in shared.take(call) if call.news else ():
                news = snapshot(output, shown)
                news.request_id = request_id
                if kind == "delta":
                    shown |= lengths(output)
                if output.finished:
                    self.abort_request(request_id)
                if output.finished or kind != "final":
                    outputs.append(news if news.embedding is None else EmbeddingRequestOutput.of(news))
        return outputs

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests, which have no further output. Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else [*request_id]:
            if (request := self._added.pop(name, None)) is not None:
                self.llm._shared.close(request.call)

    def has_unfinished_requests(self) -> bool:
        return bool(self._added)

    def get_num_unfinished_requests(self) -> int:
        return len(self._added)
