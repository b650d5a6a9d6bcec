"""Makes the engines of a server, as its options say."""

from __future__ import annotations

from collections.abc import Callable

from jengine import EngineConfig, EngineDead, InvalidArgument
from jengine.serving.config import ServerConfig
from jengine.serving.processes.engine_process import EngineProcess
from jengine.serving.processes.places import places
from jengine.serving.processes.replicated_engine import ReplicatedEngine

OnEnd = Callable[[EngineDead | None], None]
EngineOfServer = EngineProcess | ReplicatedEngine


def maker(server: ServerConfig, engine: EngineConfig) -> Callable[[OnEnd | None], EngineOfServer]:
    """A function that makes an engine, which is not started, of one process or of several replicas.

    Raises:
        InvalidArgument: the options do not go together, or there are not enough GPUs.
    """
    count = server.data_parallel_size
    if count == 1:
        return lambda on_end: EngineProcess.of(engine, on_end, server.watchdog_seconds)
    for name in ("enable_lora", "weight_updates"):
        if getattr(engine, name):
            limit = f"must be 1 with {name}: a replica that is replaced would lack what was loaded"
            raise InvalidArgument("data_parallel_size", count, limit)
    if engine.page_events is not None:
        raise InvalidArgument("data_parallel_size", count, "must be 1 with kv_events_config")
    if engine.num_processes > 1:
        raise InvalidArgument("data_parallel_size", count, "must be 1 with num_processes")
    where = places(count, engine.tensor_parallel_size)

    def one(index: int, on_end: OnEnd) -> EngineProcess:
        return EngineProcess.of(engine, on_end, server.watchdog_seconds, where[index])

    return lambda on_end: ReplicatedEngine(one, count, on_end)
