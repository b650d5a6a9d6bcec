"""Loaded LoRA adapters in host memory, ready to be written to the devices."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace

import numpy as np

from jengine.base.errors import InvalidArgument
from jengine.checkpoints.lora import read_lora
from jengine.core.lora import LoraInfo, LoraLimits, LoraSource
from jengine.core.updates import LoraLoad
from jengine.execution.adapters import AdapterShapes
from jengine.scheduling.requests.adapters import Adapters


class AdapterStore:
    """Reads adapters, and keeps each in the form in which a program takes it.

    `load` is called in any thread. Everything else is called in the engine's
    thread, also `settle`, which makes read adapters known to the scheduler.

    Args:
        adapters: those that the scheduler knows.

    Attributes:
        packed: by number, see `AdapterShapes.pack`.
    """

    def __init__(self, shapes: AdapterShapes, limits: LoraLimits, adapters: Adapters) -> None:
        self._shapes, self.limits, self._adapters = shapes, limits, adapters
        self.packed: dict[int, np.ndarray] = {}
        self._infos: dict[int, LoraInfo] = {}
        self._read: deque[int] = deque()  # numbers of adapters that the scheduler does not know yet
        self._loading = threading.Lock()

    def load(self, source: LoraSource, *, load_inplace: bool, evict: bool) -> LoraInfo:
        """See operations.LoadLora."""
        self._check(source.name, load_inplace, evict)
        shapes, rank = self._shapes, self.limits.max_lora_rank
        model = shapes.model
        # not under the lock: a slow disk delays this adapter alone
        weights = read_lora(source, shapes.modules, model.prefix, rank, shapes.fused, model.dtype)
        packed = shapes.pack(weights)
        with self._loading:
            self._check(source.name, load_inplace, evict)
            number = self._adapters.next_number()
            info = LoraInfo(
                name=source.name,
                path=source.path,
                rank=weights.rank,
                modules=tuple(sorted({name.rpartition(".")[2] for name in weights.factors})),
                bytes=packed.nbytes,
            )
            self.packed[number], self._infos[number] = packed, info
            self._read.append(number)
            return info

    def settle(self) -> None:
        """Tells the scheduler about new adapters, and forgets those that nothing uses any more."""
        adapters = self._adapters
        while self._read:
            number = self._read.popleft()
            adapters.load(self._infos[number].name, number)
            idle = adapters.idle(but=number)
            if (
                self.limits.max_cpu_loras is not None
                and idle
                and len(self._infos) - len(adapters.dropped) > self.limits.max_cpu_loras
            ):
                adapters.unload(idle.name)
        if adapters.dropped:
            dropped, adapters.dropped = adapters.dropped, []
            for number in dropped:
                del self.packed[number], self._infos[number]

    def unload(self, name: str) -> None:
        """See operations.UnloadLora."""
        self.settle()
        self._adapters.unload(name)
        self.settle()

    @property
    def use(self) -> LoraLoad:
        """What Load says of adapters. Thread-safe."""
        return LoraLoad(self.limits.max_loras, len(self.packed), *self._adapters.in_use)

    def list_loaded(self) -> list[LoraInfo]:
        """See operations.ListLoras."""
        self.settle()
        return [
            replace(
                self._infos[adapter.number],
                on_device=adapter.place > 0,
                running=adapter.running,
                waiting=adapter.users - adapter.running,
            )
            for adapter in self._adapters
        ]

    def _check(self, name: str, load_inplace: bool, evict: bool) -> None:
        coming = {self._infos[number].name for number in [*self._read]}
        loaded = self._adapters.by_name.get(name)
        if (loaded or name in coming) and not load_inplace:
            raise InvalidArgument(
                "lora_name", name, "an adapter of this name is loaded; load_inplace replaces it"
            )
        most = self.limits.max_cpu_loras
        makes_room = (evict and self._adapters.idle()) or (loaded and not loaded.users)
        if most is not None and len(self._infos) >= most and not makes_room:
            why = "that of this name is in use" if loaded else "unload one to make room"
            why = "all of them are in use" if evict else why
            raise InvalidArgument("lora_name", name, f"max_cpu_loras={most} adapters are loaded; {why}")
