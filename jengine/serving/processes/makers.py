"""Makes the engines of a server, as its options say."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable

from jengine import EngineConfig, InvalidArgument
from jengine.serving.config import KV_TOKEN, ServerConfig
from jengine.serving.processes.engine_fleet import EngineFleet, OnEnd
from jengine.serving.processes.engine_process import EngineProcess
from jengine.serving.processes.places import places

EngineOfServer = EngineProcess | EngineFleet


def maker(server: ServerConfig, engine: EngineConfig) -> Callable[[OnEnd | None], EngineOfServer]:
    """A function that makes an engine, which is not started, of one process or of several.

    Raises:
        InvalidArgument: the options do not go together, or there are not enough GPUs.
    """
    count = 1 if engine.enable_expert_parallel else engine.data_parallel_size
    prefill = server.prefill_engines
    if count == 1 and not prefill:
        return lambda on_end: EngineProcess.of(engine, on_end, server.watchdog_seconds)
    name, value, alone = ("prefill_engines", prefill, 0) if prefill else ("data_parallel_size", count, 1)
    for option in ("enable_lora", "weight_updates"):
        if getattr(engine, option):
            limit = f"must be {alone} with {option}: a replica that is replaced would lack what was loaded"
            raise InvalidArgument(name, value, limit)
    if engine.page_events is not None:
        raise InvalidArgument(name, value, f"must be {alone} with kv_events_config")
    if engine.num_processes > 1:
        raise InvalidArgument(name, value, f"must be {alone} with num_processes")
    if engine.kv_transfer is not None and engine.kv_transfer.connector == "sockets":
        raise InvalidArgument(name, value, f"must be {alone} with kv_connector=sockets, which has one port")
    if not engine.enable_expert_parallel:  # each is an engine by itself
        engine = dataclasses.replace(engine, data_parallel_size=1)
    where = places(count + prefill, engine.layout.devices)
    engines = [engine] * count
    if prefill:
        generating, computing = _exchanging(engine)
        engines = [generating] * count + [computing] * prefill
        token = {KV_TOKEN: secrets.token_hex(32)}
        where = [place._replace(variables={**place.variables, **token}) for place in where]

    def make(index: int, on_end: OnEnd) -> EngineProcess:
        return EngineProcess.of(engines[index], on_end, server.watchdog_seconds, where[index])

    return lambda on_end: EngineFleet(make, count, prefill, on_end)


def _exchanging(engine: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """Options of the engines that generate, and of those that compute prompts for them.

    Raises:
        InvalidArgument: pages cannot be exchanged with these options.
    """
    for option, limit in (("kv_transfer_config", "None"), ("enable_prefix_caching", "True")):
        if str(getattr(engine, option)) != limit:
            raise InvalidArgument(option, getattr(engine, option), f"must be {limit} with prefill_engines")
    if not engine.swap_space:
        limit = "must be above 0 with prefill_engines: pages pass through host memory"
        raise InvalidArgument("swap_space", engine.swap_space, limit)
    common = {"kv_connector": "sockets"}
    consumer = {"kv_role": "kv_consumer", "kv_connector_extra_config": {"peers": ["127.0.0.1:*"]}}
    producer = {"kv_role": "kv_producer", "kv_port": 0, "kv_buffer_size": engine.swap_space * 2**30}
    return (
        dataclasses.replace(engine, kv_transfer_config=common | consumer),
        dataclasses.replace(engine, kv_transfer_config=common | producer),
    )
