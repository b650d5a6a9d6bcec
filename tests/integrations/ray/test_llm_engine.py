"""Ray Serve LLM's engine protocol, with Ray's own LLMServer and LLMConfig around it."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jengine import AsyncLLM, InvalidArgument, Tokenizer
from jengine.api.backend import EngineThread
from tests.extras import of_extra
from tests.integrations.ray import openai_types
from tests.mocks.mock_engine import MockEngine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ray's own
    of_extra("ray", "ray")
    of_extra("ray", "pandas")  # of ray's extra llm, which also needs vLLM
    openai_types.install()
    from ray.llm._internal.serve.core.configs import openai_api_models as api
    from ray.llm._internal.serve.core.engine.protocol import LLMEngine
    from ray.llm._internal.serve.core.protocol import RawRequestInfo
    from ray.serve.llm import LLMConfig

    from jengine.integrations.ray.llm_engine import JengineEngine
    from jengine.integrations.ray.llm_server import JengineServer

pytestmark = pytest.mark.filterwarnings("ignore")


def mock(folder: Path, source: str, progress: bool, seconds: float = 0.0, **options: Any) -> AsyncLLM:
    assert (source, progress, options) == ("mock", False, {"max_num_seqs": 4})
    engine = MockEngine(vocab_size=501, embedding_size=8, seconds=seconds)
    return AsyncLLM.over(EngineThread(engine), Tokenizer.load(folder))


def config(**kwargs: Any) -> Any:
    return LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": "mock"},
        engine_kwargs={"max_num_seqs": 4, **kwargs},
        experimental_configs={"stream_batching_interval_ms": 0},
    )


def served(folder: Path, work: Callable[[Any, JengineEngine], Awaitable[None]], seconds: float = 0.0) -> None:
    """Runs a function with Ray's server, and the engine in it."""

    async def main() -> None:
        make = partial(mock, folder, seconds=seconds)
        server = JengineServer.sync_init(config(), engine_cls=partial(JengineEngine, make_llm=make))
        await server.start()
        assert isinstance(server.engine, LLMEngine)
        try:
            await work(server, server.engine)
        finally:
            await server.engine.shutdown()
            await server.engine.shutdown()

    asyncio.run(main())


async def got(answers: Awaitable[Any]) -> list[Any]:
    return [answer async for answer in await answers]


def test_openais_api(model: Path) -> None:
    async def work(server: Any, engine: JengineEngine) -> None:
        ids = engine.llm.tokenizer.encode("hello")
        text = engine.llm.tokenizer.decode(ids[:3])
        asked = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "request_id": "r1"}
        info = RawRequestInfo(headers={"traceparent": "x", "accept": "*/*"})
        [whole] = await got(server.completions(api.CompletionRequest(**asked), info))
        assert isinstance(whole, api.CompletionResponse) and whole.choices[0]["text"] == text
        assert whole.id == "cmpl-r1"
        parts = await got(server.completions(api.CompletionRequest(**asked, stream=True)))
        events = "".join(part for batch in parts for part in batch).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        made = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
        assert "".join(made) == text
        say = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        [chat] = await got(server.chat(api.ChatCompletionRequest(**say)))
        assert isinstance(chat, api.ChatCompletionResponse) and chat.choices[0]["message"]["content"]
        [vector] = await got(server.embeddings(api.EmbeddingCompletionRequest(model="tiny", input="hello")))
        assert len(vector.data[0]["embedding"]) == 8
        [tokens] = await got(server.tokenize(api.TokenizeCompletionRequest(model="tiny", prompt="hello")))
        assert tokens.tokens == ids
        [back] = await got(server.detokenize(api.DetokenizeRequest(model="tiny", tokens=ids)))
        assert back.prompt.endswith("hello")
        for answers, code in (
            (server.completions(api.CompletionRequest(**{**asked, "max_tokens": 0})), 400),
            (server.chat(api.ChatCompletionRequest(**{**say, "model": "other"})), 404),
            (server.transcriptions(api.CompletionRequest(**asked)), 501),
        ):
            [error] = await got(answers)
            assert isinstance(error, api.ErrorResponse) and error.error.code == code and error.error.message

    served(model, work)


def test_control(model: Path) -> None:
    async def work(server: Any, engine: JengineEngine) -> None:
        await server.check_health()
        await server.reset_prefix_cache()
        assert await server.record_routing_stats() == {}
        with pytest.raises(NotImplementedError, match="must be one of update_weights"):
            await server.collective_rpc("start_profile")
        with pytest.raises(NotImplementedError, match="lora_config"):
            await engine.resolve_lora(None)
        app = await engine.build_asgi_app()
        assert app.routes
        stream = await server.completions(
            api.CompletionRequest(model="tiny", prompt="hello", max_tokens=900, stream=True)
        )
        await anext(stream)
        await stream.aclose()  # the client has gone
        while engine.llm.load.running:
            await asyncio.sleep(0.01)

    served(model, work, seconds=0.01)


def test_options() -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}
    engine = JengineEngine(config(kv_events_config=events, server={"max_tokens_limit": 9}))
    assert engine.config.page_events is not None and engine._server.max_tokens_limit == 9
    assert engine._server.response_store_bytes == 0, "replicas share none"
    for options, message in (
        ({"nonsense": 1}, "nonsense"),
        ({"server": {"max_tokens_limit": 0}}, "max_tokens_limit"),
        ({"server": {"api_key": "secret"}}, "server.api_key"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            JengineEngine(config(**options))
    options = JengineServer.get_deployment_options(config())
    assert options["ray_actor_options"] == {"runtime_env": {}}
