"""Makes the engines of a server, as its options say."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from functools import partial

from jengine import EngineConfig, EngineDead, InvalidArgument
from jengine.serving.config import KV_TOKEN, ServerConfig
from jengine.serving.processes.disaggregated_engine import DisaggregatedEngine, OnSent
from jengine.serving.processes.engine_process import EngineProcess
from jengine.serving.processes.places import Place, places
from jengine.serving.processes.replicated_engine import ReplicatedEngine

OnEnd = Callable[[EngineDead | None], None]
EngineOfServer = EngineProcess | ReplicatedEngine | DisaggregatedEngine


def maker(server: ServerConfig, engine: EngineConfig) -> Callable[[OnEnd | None], EngineOfServer]:
    """A function that makes an engine, which is not started, of one process or of several replicas.

    Raises:
        InvalidArgument: the options do not go together, or there are not enough GPUs.
    """
    count = 1 if engine.enable_expert_parallel else engine.data_parallel_size
    prefill = server.prefill_engines
    if count == 1 and not prefill:
        return lambda on_end: EngineProcess.of(engine, on_end, server.watchdog_seconds)
    name, given, wanted = ("prefill_engines", prefill, 0) if prefill else ("data_parallel_size", count, 1)
    for option in ("enable_lora", "weight_updates"):
        if getattr(engine, option):
            limit = f"must be {wanted} with {option}: a replica that is replaced would lack what was loaded"
            raise InvalidArgument(name, given, limit)
    if engine.page_events is not None:
        raise InvalidArgument(name, given, f"must be {wanted} with kv_events_config")
    if engine.num_processes > 1:
        raise InvalidArgument(name, given, f"must be {wanted} with num_processes")
    if engine.kv_transfer is not None and engine.kv_transfer.connector == "sockets":
        raise InvalidArgument(name, given, f"must be {wanted} with kv_connector=sockets, which has one port")
    if not engine.enable_expert_parallel:  # each is an engine by itself
        engine = dataclasses.replace(engine, data_parallel_size=1)
    where = places(count + prefill, engine.layout.devices)
    if prefill:
        return _disaggregated(server, engine, count, where)
    return lambda on_end: ReplicatedEngine(_processes(server, engine, where), count, on_end)


def _disaggregated(
    server: ServerConfig, engine: EngineConfig, count: int, where: Sequence[Place]
) -> Callable[[OnEnd | None], EngineOfServer]:
    for option, limit in (("kv_transfer_config", "None"), ("enable_prefix_caching", "True")):
        if str(getattr(engine, option)) != limit:
            raise InvalidArgument(option, getattr(engine, option), f"must be {limit} with prefill_engines")
    if not engine.swap_space:
        limit = "must be above 0 with prefill_engines: pages pass through host memory"
        raise InvalidArgument("swap_space", engine.swap_space, limit)
    common = {"kv_connector": "sockets"}
    producer = {"kv_role": "kv_producer", "kv_port": 0, "kv_buffer_size": engine.swap_space * 2**30}
    consumer = {"kv_role": "kv_consumer", "kv_connector_extra_config": {"peers": ["127.0.0.1:*"]}}
    computing = dataclasses.replace(engine, kv_transfer_config=common | producer)
    generating = dataclasses.replace(engine, kv_transfer_config=common | consumer)
    token = {KV_TOKEN: secrets.token_hex(32)}
    where = [place._replace(variables={**place.variables, **token}) for place in where]

    def prefill(on_sent: OnSent, on_end: OnEnd) -> ReplicatedEngine:
        make = _processes(server, computing, where[count:])
        return ReplicatedEngine(make, server.prefill_engines, on_end, on_sent=on_sent)

    decode = partial(ReplicatedEngine, _processes(server, generating, where[:count]), count)
    return lambda on_end: DisaggregatedEngine(prefill, decode, on_end)


def _processes(
    server: ServerConfig, engine: EngineConfig, where: Sequence[Place]
) -> Callable[[int, OnEnd], EngineProcess]:
    def one(index: int, on_end: OnEnd) -> EngineProcess:
        return EngineProcess.of(engine, on_end, server.watchdog_seconds, where[index])

    return one
