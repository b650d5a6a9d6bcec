"""The engine processes of a server: one, or several that serve as one, and which devices each uses."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from jengine import EngineConfig, EngineDead, InvalidArgument
from jengine.serving.calls.model_provider import EngineInfo, PagesInfo
from jengine.serving.config import KV_TOKEN, ServerConfig
from jengine.serving.processes.engine_process import ANYWHERE, EngineProcess, OnEnd, Place, StartProgress
from jengine.spi import BackOff, EngineState, Fleet

VISIBLE = "CUDA_VISIBLE_DEVICES"
NODES = Path("/sys/devices/system/node")  # of memory, on Linux


def places(count: int, devices: int) -> list[Place]:
    """Places for so many engines. Each gets its own GPUs or, without GPUs, an equal share of the CPUs, if
    there are enough: those of one memory node, or of several, as far as the shares allow. An engine's weights
    and cache then lie in the memory of its node, since Linux takes memory from the node of the thread that
    first writes to it.

    Args:
        devices: GPUs of an engine.

    Raises:
        InvalidArgument: there are GPUs, but not enough.
    """
    if count == 1:
        return [ANYWHERE]
    if gpus := _gpus():
        if len(gpus) < count * devices:
            needed = f"with {devices} GPUs for each it needs {count * devices}"
            raise InvalidArgument("data_parallel_size", count, f"{needed}; {len(gpus)} are visible")
        each = [gpus[i * devices : (i + 1) * devices] for i in range(count)]
        return [Place({VISIBLE: ",".join(names)}) for names in each]
    cpus = _by_node(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(cpus) // count
    return [Place(cpus=frozenset(cpus[i * share : (i + 1) * share])) for i in range(count)]


def _gpus() -> list[str]:
    """NVIDIA's GPUs that JAX may use."""
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return []
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    return [str(i) for i in range(len([*Path("/dev").glob("nvidia[0-9]*")]))]


def _by_node(cpus: Collection[int]) -> list[int]:
    """The CPUs, those of a memory node together: numbers alternate between nodes on many machines."""
    nodes: dict[int, int] = {}
    for number, file in enumerate(sorted(NODES.glob("node[0-9]*/cpulist"))):
        for first, _, last in (part.partition("-") for part in file.read_text().strip().split(",") if part):
            nodes |= dict.fromkeys(range(int(first), int(last or first) + 1), number)
    return sorted(cpus, key=lambda cpu: (nodes.get(cpu, 0), cpu))


class EngineFleet:
    """A jengine.Fleet of engines in child processes. One that ends is started again while the others answer.

    Args:
        make: creates the process of an engine that is not started, and calls its second argument when that
            ends; see EngineProcess. The first argument is the engine's index in [*decode, *prefill].
        decode, prefill: numbers of engines that generate, and that compute prompts for them.
        on_end: as EngineProcess's, when the last engine that generates has ended.
        back_off: see Fleet.

    Attributes:
        info: of the first engine; available when `start` has returned.
    """

    info: EngineInfo

    def __init__(
        self,
        make: Callable[[int, OnEnd], EngineProcess],
        decode: int,
        prefill: int = 0,
        on_end: OnEnd | None = None,
        back_off: Callable[[], BackOff] = BackOff,
    ) -> None:
        self.on_end, self.back_off = on_end, back_off
        self._make, self._decode = make, decode
        self._first = [make(i, partial(self._ended, i)) for i in range(decode + prefill)]
        self._fleet: Fleet[EngineProcess] | None = None
        self._lock, self._over = threading.Lock(), False

    @property
    def backend(self) -> Fleet[EngineProcess]:
        """What answers, when `start` has returned."""
        assert self._fleet is not None, "the engines have not started"
        return self._fleet

    @property
    def processes(self) -> list[EngineProcess]:
        """The engines' processes: those that generate, and then the others."""
        return self._first if self._fleet is None else self._fleet.backends

    @property
    def progress(self) -> StartProgress:
        """Progress of the first engine's start; the others load the programs that it saves."""
        return self._first[0].progress

    @property
    def pid(self) -> int | None:
        """The first engine's process."""
        return self.processes[0].pid

    def spawn(self) -> None:
        """Starts the first engine's process; see EngineProcess."""
        self._first[0].spawn()

    def start(self) -> None:
        """Starts the first engine, and then the others at the same time; as EngineProcess's."""
        first, *others = self._first
        first.start()
        with ThreadPoolExecutor(len(others) or 1, "engine-start") as pool:
            for _ in pool.map(EngineProcess.start, others):
                pass
        self.info = first.info
        if len(self._first) > self._decode:  # clients do not choose where pages come from
            self.info = msgspec.structs.replace(first.info, pages=PagesInfo())
        self._fleet = Fleet(
            self._first[: self._decode],
            self._first[self._decode :],
            address=lambda process: process.info.pages.at,
            make=self._started,
            back_off=self.back_off,
        )

    def quit(self, wait: bool = True) -> None:
        """Ends all engines; as EngineProcess's."""
        if self._fleet is not None:
            self._fleet.quit(wait)
            return
        for process in self._first:
            process.quit(wait=False)
        for process in self._first if wait else ():
            process.quit()

    def _started(self, index: int) -> EngineProcess:
        process = self._make(index, partial(self._ended, index))
        process.start()
        return process

    def _ended(self, index: int, error: EngineDead | None) -> None:
        """A process has ended, after its callers were told; without an error, since all were to quit."""
        with self._lock:
            if index >= self._decode or self._over or (error is not None and self.backend.lives):
                return
            self._over = True
        if self.on_end is not None:
            self.on_end(error)


EngineOfServer = EngineProcess | EngineFleet


def maker(server: ServerConfig, engine: EngineConfig) -> Callable[[OnEnd | None], EngineOfServer]:
    """A function that makes an engine, which is not started, of one process or of several.

    Raises:
        InvalidArgument: the options do not go together, or there are not enough GPUs.
    """
    count = 1 if engine.enable_expert_parallel else engine.data_parallel_size
    prefill = server.prefill_engines
    state = EngineState()
    if count == 1 and not prefill:
        return lambda on_end: EngineProcess.of(engine, on_end, server.watchdog_seconds, state=state)
    name, value, alone = ("prefill_engines", prefill, 0) if prefill else ("data_parallel_size", count, 1)
    if engine.enable_lora:
        limit = f"must be {alone} with enable_lora: a replica that is replaced would lack what was loaded"
        raise InvalidArgument(name, value, limit)
    if prefill and engine.weight_updates:
        limit = "must be 0 with weight_updates: pages of new weights serve only the engine that computed them"
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
        return EngineProcess.of(engines[index], on_end, server.watchdog_seconds, where[index], state)

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
