"""jengine as an engine of Ray Serve LLM: its LLMEngine over AsyncLLM and OpenAI's API.

from ray.serve.llm import LLMConfig, build_openai_app
config = LLMConfig(
    model_loading_config={"model_id": "qwen", "model_source": "Qwen/Qwen3-0.6B"},
    server_cls="jengine.integrations.ray.llm_server.JengineServer",
    engine_kwargs={"max_num_seqs": 64},
)
serve.run(build_openai_app({"llm_configs": [config]}))
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial, partialmethod
from http import HTTPStatus
from typing import Any

from ray.llm._internal.serve.core.engine.protocol import LLMEngine

from jengine import AsyncLLM, EngineConfig, InvalidArgument, SamplingParams
from jengine.serving.http.embedded import EmbeddedApi, embedded_config

MODELS = (
    "ray.llm._internal.serve.core.configs.openai_api_models"  # needs vLLM or SGLang, whose types these are
)
RPC = ("update_weights",)  # methods of AsyncLLM that collective_rpc may call


class JengineEngine(LLMEngine):  # type: ignore[misc]  # ray ships no types
    """An engine of Ray Serve LLM. Ray's LLMServer calls it.

    Args:
        llm_config: Ray's LLMConfig. engine_kwargs are options of LLM; the key `server` holds those of a
            server that are EMBEDDED.
        make_llm: makes the engine, instead of the default.

    Raises:
        InvalidArgument: an option is invalid, or lora_config is set.
    """

    def __init__(self, llm_config: Any, make_llm: Callable[..., AsyncLLM] = AsyncLLM) -> None:
        if llm_config.lora_config is not None:
            raise InvalidArgument("lora_config", type(llm_config.lora_config).__name__, "must not be set")
        options, loading = dict(llm_config.engine_kwargs), llm_config.model_loading_config
        # replicas, of which Ray may start several, do not share responses
        self._server = embedded_config(options.pop("server", {}), response_store_bytes=0)
        source = loading.model_source or loading.model_id
        if not isinstance(source, str):
            raise InvalidArgument("model_source", type(source).__name__, "must be a folder or a hub id")
        self.config = EngineConfig.of(source, options)
        self._make, self._name = partial(make_llm, source, progress=False, **options), loading.model_id
        self._llm: AsyncLLM | None = None
        self._api: EmbeddedApi | None = None

    @property
    def llm(self) -> AsyncLLM:
        """The engine, once it has started."""
        if self._llm is None:
            raise RuntimeError("the engine has not started")
        return self._llm

    async def start(self) -> None:
        self._llm = await asyncio.to_thread(self._make)
        self._api = EmbeddedApi(self._llm, self._name, self._server)

    async def shutdown(self) -> None:
        """Ends the engine. May be called repeatedly."""
        if self._api is not None:
            self._api.close()
        if self._llm is not None:
            await self._llm.close()
        self._llm = self._api = None

    async def check_health(self) -> None:
        """Raises EngineDead if the engine has failed. Ray then replaces the replica."""
        with suppress(InvalidArgument):  # of a model that only embeds
            async with self.llm.submit({"prompt_token_ids": [1]}, SamplingParams(max_tokens=1)):
                pass  # leaving the block aborts the request

    def routing_stats(self) -> dict[str, Any]:
        """Where a router that knows caches finds page events, if they are published."""
        events = self.config.page_events
        if events is None:
            return {}
        import ray

        node, room = ray.util.get_node_ip_address(), self.llm.backend.limits.sequence
        addresses = {
            name: None if address is None else address.replace("//*:", f"//{node}:")
            for name, address in (("endpoint", events.endpoint), ("replay_endpoint", events.replay_endpoint))
        }
        return {"kv_event_metadata": {**addresses, "block_size": room.page_size, "dp_rank": 0}}

    async def resolve_lora(self, lora_model: Any) -> None:
        raise NotImplementedError("lora_config must not be set: this engine serves no adapters on Ray")

    # --- OpenAI's API -----------------------------------------------------------------------------------

    async def _asked(
        self, path: str, kind: str, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any]:
        """Events of a stream as text, or one of Ray's types: an answer of this kind, or an ErrorResponse."""
        assert self._api is not None, "the engine has not started"
        body = request.model_dump_json(exclude_unset=True, exclude_none=True).encode()
        sent = {} if raw_request_info is None else raw_request_info.headers
        headers = {name.lower(): value for name, value in sent.items()}
        headers = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        answer = self._api.answer("POST", path, {**headers, "content-type": "application/json"}, body)
        try:
            status, got = await anext(answer)
            if status == HTTPStatus.OK and got["content-type"].startswith("text/event-stream"):
                async for part in answer:
                    yield part.decode()
                return
            whole = json.loads(b"".join([part async for part in answer]))
        finally:
            await answer.aclose()
        if status == HTTPStatus.OK:
            yield _model(kind).model_validate(whole)
        else:
            error = whole["error"]
            yield _refused(error["message"], status, error["type"], error.get("param"))

    chat = partialmethod(_asked, "/v1/chat/completions", "ChatCompletionResponse")
    completions = partialmethod(_asked, "/v1/completions", "CompletionResponse")
    embeddings = partialmethod(_asked, "/v1/embeddings", "EmbeddingResponse")
    score = partialmethod(_asked, "/v1/score", "ScoreResponse")
    tokenize = partialmethod(_asked, "/tokenize", "TokenizeResponse")
    detokenize = partialmethod(_asked, "/detokenize", "DetokenizeResponse")

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any]:
        yield _refused("this engine does not read audio", HTTPStatus.NOT_IMPLEMENTED)

    async def build_asgi_app(self) -> Any:
        """The API as an application of FastAPI, for Ray's direct streaming."""
        from fastapi import FastAPI

        app = FastAPI()
        app.mount("/", self._api)
        return app

    # --- control ----------------------------------------------------------------------------------------

    async def _control(self, method: str, **kwargs: Any) -> Any:
        """Calls a method of AsyncLLM, which takes these keywords; see LLM."""
        return await getattr(self.llm, method)(**kwargs)

    reset_prefix_cache = partialmethod(_control, "reset_prefix_cache")
    sleep = partialmethod(_control, "sleep")
    wakeup = partialmethod(_control, "wake_up")
    is_sleeping = partialmethod(_control, "is_sleeping")
    pause = partialmethod(_control, "pause")
    resume = partialmethod(_control, "resume")
    is_paused = partialmethod(_control, "is_paused")

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of the engine, which is one worker however many devices it has.

        Raises:
            NotImplementedError: the method is not among RPC.
        """
        if method not in RPC:
            raise NotImplementedError(f"{method}: must be one of {', '.join(RPC)}")
        async with asyncio.timeout(timeout):
            return [await getattr(self.llm, method)(*args, **(kwargs or {}))]


def _model(name: str) -> Any:
    """One of Ray's types of OpenAI's API."""
    from importlib import import_module

    return getattr(import_module(MODELS), name)


def _refused(message: str, status: int, kind: str = "invalid_request_error", param: Any = None) -> Any:
    error = _model("ErrorInfo")(message=message, type=kind, param=param, code=int(status))
    return _model("ErrorResponse")(error=error)
