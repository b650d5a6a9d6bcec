"""A worker of Dynamo: `python -m jengine.integrations.dynamo.worker MODEL` registers a model, and answers
tokens with tokens. Dynamo's frontend has the clients' APIs, the tokenizer, the chat template and the router.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from functools import partial
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.llm import ModelInput
from dynamo.llm.exceptions import EngineShutdown
from dynamo.llm.exceptions import InvalidArgument as Refused

from jengine import AsyncLLM, EngineDead, InvalidArgument, JengineError, Load, TokensPrompt
from jengine import EngineConfig as Options
from jengine.checkpoints import resolve
from jengine.commands.flags import add_engine, engine_fields
from jengine.integrations.dynamo.requests import chunk, params_of

SNAPSHOT_SECONDS = 0.25
DRAIN_SECONDS = 20.0
CONTROLS = ("pause", "reset_prefix_cache", "resume", "sleep", "wake_up")


class JengineEngine(LLMEngine):  # type: ignore[misc]  # Dynamo's types are not read
    """An engine for Dynamo's Worker.

    Args:
        served_model_name: None: the model's.
        options: EngineConfig's. Unless kv_events_config says where, page events go to an address of the
            machine's own, where Dynamo's Worker reads them.
    """

    def __init__(self, model: str, served_model_name: str | None = None, **options: Any) -> None:
        self.model, self.served_model_name = model, served_model_name
        self._folder = tempfile.TemporaryDirectory(prefix="jengine-dynamo-")
        events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{self._folder.name}/events"}
        caching = options.get("enable_prefix_caching", True)
        self._options = {"kv_events_config": events if caching else None, **options}
        self._events_at = Options.of(model, self._options).page_events
        self._llm: AsyncLLM | None = None
        self._loop: asyncio.AbstractEventLoop
        self._snapshots: Future[None] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[JengineEngine, WorkerConfig]:
        """The engine and its worker from flags: Dynamo's, and those of `jengine serve` for engines."""
        parser = argparse.ArgumentParser(prog="jengine.integrations.dynamo.worker", allow_abbrev=False)
        parser.add_argument("model", help="a folder, a GGUF file, or a hub id")
        parser.add_argument("--served-model-name", help="the name that clients ask for")
        DynamoRuntimeArgGroup().add_arguments(parser)
        add_engine(parser)
        arguments = parser.parse_args(argv)
        config = DynamoRuntimeConfig.from_cli_args(arguments)
        config.validate()
        endpoint = config.endpoint or f"dyn://{config.namespace}.backend.generate"
        config.namespace, config.component, config.endpoint = parse_endpoint(endpoint)
        try:
            engine = cls(arguments.model, arguments.served_model_name, **engine_fields(arguments))
        except InvalidArgument as wrong:
            parser.error(str(wrong))
        name = arguments.served_model_name or arguments.model
        folder = await asyncio.to_thread(resolve, engine.model, getattr(arguments, "revision", None))
        return engine, WorkerConfig.from_runtime_config(
            config, model_name=str(folder), served_model_name=name, model_input=ModelInput.Tokens
        )

    @property
    def llm(self) -> AsyncLLM:
        """Raises EngineShutdown before `start` and after `cleanup`."""
        if self._llm is None:
            raise EngineShutdown("the engine is not running")
        return self._llm

    async def start(self, worker_id: int) -> EngineConfig:
        """Loads the model, and compiles the programs that every request may need."""
        make = partial(AsyncLLM, self.model, progress=False, **self._options)
        self._loop, self._llm = asyncio.get_running_loop(), await asyncio.to_thread(make)
        limits = self._llm.backend.limits
        room = limits.sequence
        return EngineConfig(
            model=str(self._llm.started.folder),
            served_model_name=self.served_model_name or self.model,
            llm=LlmRegistration(
                context_length=room.max_model_len,
                kv_cache_block_size=room.page_size,
                total_kv_blocks=room.pages,
                max_num_seqs=limits.max_num_seqs,
                data_parallel_size=1,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """The chunks of one request, as its tokens come.

        Raises:
            InvalidArgument, EngineShutdown: Dynamo's.
        """
        llm, ended = self.llm, set[int]()
        try:
            params = params_of(request, llm.get_default_sampling_params())
            prompt: TokensPrompt = {"prompt_token_ids": [*request["token_ids"]]}
            async with llm.submit(prompt, params, request_id=context.id(), output_kind="delta") as handle:
                async for output in handle:
                    for completion in output.outputs:
                        if completion.finish_reason == "error":
                            output.require_answer()
                        if (completion.finish_reason, completion.stop_reason) == ("abort", "shutdown"):
                            raise EngineShutdown("the worker is shutting down")
                        ends = completion.finish_reason is not None and completion.index not in ended
                        if not (completion.token_ids or ends):
                            continue
                        if completion.finish_reason is not None:
                            ended.add(completion.index)
                        yield chunk(handle.output, completion)
        except InvalidArgument as wrong:
            raise Refused(str(wrong)) from None
        except EngineDead as dead:
            raise EngineShutdown(str(dead)) from None

    async def abort(self, context: Any) -> None:
        """Ends a request whose client has left."""
        if self._llm is not None and context.id() is not None:
            await self._llm.abort(context.id())

    async def drain(self) -> None:
        """Accepts no further requests, and waits until all running ones have ended, at most 20 s."""
        await self._close(DRAIN_SECONDS)

    async def cleanup(self) -> None:
        """Ends the engine. May be called repeatedly, and after a failed `start`."""
        await self._close(0.0)
        self._folder.cleanup()

    async def _close(self, drain: float) -> None:
        if self._snapshots is not None:
            self._snapshots.cancel()
            self._snapshots = None
        if self._llm is not None:
            await self._llm.close(drain)
            self._llm = None

    async def is_quiescent(self) -> bool | None:
        """Whether nothing runs or waits."""
        return self._llm is None or not ((load := self._llm.load).running or load.waiting)

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Where page events are published; none with enable_prefix_caching=False."""
        at = self._events_at
        if at is None:
            return []
        return [ZmqSource(at.endpoint.replace("//*:", "//127.0.0.1:"), at.topic)]

    async def health_check_payload(self) -> dict[str, Any] | None:
        """A request of one token, for idle times."""
        tokens = self.llm.backend.limits.eos_token_ids
        payload: dict[str, Any] = build_health_check_payload(tokens[0] if tokens else 1)
        return payload

    # --- load ---------------------------------------------------------------------------------------

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Publishes the use of the cache, a few times a second, when it changes."""
        self._snapshots = asyncio.run_coroutine_threadsafe(self._publish(publisher), self._loop)

    async def _publish(self, publisher: Any) -> None:
        last: Load | None = None
        while True:
            if (load := self.llm.load) != last:
                publisher.publish(0, snapshot(load))
                last = load
            await asyncio.sleep(SNAPSHOT_SECONDS)

    # --- controls -------------------------------------------------------------------------------------

    def supported_controls(self) -> set[str]:
        return {*CONTROLS}

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """Does one of CONTROLS: the method of AsyncLLM with this name, whose arguments are in the body."""
        if control not in CONTROLS:
            return {"status": "error", "message": f"{control} is not one of {', '.join(CONTROLS)}"}
        try:
            answer = await getattr(self.llm, control)(**body)
        except (JengineError, TypeError) as wrong:
            return {"status": "error", "message": str(wrong)}
        return {"status": "ok", "answer": answer}


def snapshot(load: Load) -> ComponentSnapshot:
    """The use of the cache, as Dynamo's router takes it."""
    used = load.pages - load.free_pages
    hits = load.prefix_hits / load.prefix_queries if load.prefix_queries else None
    return ComponentSnapshot(used, load.pages, used / load.pages, 0, hits)


def main() -> None:
    """Runs a worker until SIGTERM."""
    run(JengineEngine)


if __name__ == "__main__":
    main()
