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
from jengine.execution.loras import LoraShapes
from jengine.scheduling.requests.loras import LoraPlaces

Keep = tuple[str, ...] | None  # see operations.LoadLora


class LoraStore:
    """Reads adapters, and keeps each in the form in which a program takes it.

    `load` is called in any thread. Everything else is called in the engine's
    thread, also `settle`, which makes read adapters known to the scheduler.

    Args:
        loras: those that the scheduler knows.

    Attributes:
        packed: by number, see `LoraShapes.pack`.
    """

    def __init__(self, shapes: LoraShapes, limits: LoraLimits, loras: LoraPlaces) -> None:
        self._shapes, self.limits, self._loras = shapes, limits, loras
        self.packed: dict[int, np.ndarray] = {}
        self._infos: dict[int, LoraInfo] = {}
        # adapters that the scheduler does not know yet, and names of those that must not make room for them
        self._read: deque[tuple[int, Keep]] = deque()
        self._loading = threading.Lock()

    def load(self, source: LoraSource, *, load_inplace: bool, keep: Keep) -> LoraInfo:
        """Loads an adapter, as operations.LoadLora asks."""
        self._check(source.name, load_inplace, keep)
        shapes, rank = self._shapes, self.limits.max_lora_rank
        model = shapes.model
        # not under the lock: a slow disk delays this adapter alone
        weights = read_lora(source, shapes.modules, model, rank, shapes.fused, model.dtype)
        packed = shapes.pack(weights)
        with self._loading:
            self._check(source.name, load_inplace, keep)
            number = self._loras.next_number()
            info = LoraInfo(
                name=source.name,
                path=source.path,
                rank=weights.rank,
                modules=tuple(sorted({name.rpartition(".")[2] for name in weights.factors})),
                bytes=packed.nbytes,
                lora_int_id=source.lora_int_id,
            )
            self.packed[number], self._infos[number] = packed, info
            self._read.append((number, keep))
            return info

    def settle(self, wanted: str | None = None) -> None:
        """Tells the scheduler about new adapters, and forgets those that nothing uses any more.

        Args:
            wanted: an adapter that is about to get a request, and must not make room.
        """
        loras, limit = self._loras, self.limits.max_cpu_loras
        while self._read:
            number, keep = self._read.popleft()
            name = self._infos[number].name
            loras.load(name, number)
            idle = loras.idle((name, wanted or name, *(keep or ())))
            while (
                limit is not None and idle and len(self._infos) - len(loras.dropped) - len(self._read) > limit
            ):
                loras.unload(idle.pop(0).name)
        if loras.dropped:
            dropped, loras.dropped = loras.dropped, []
            for number in dropped:
                del self.packed[number], self._infos[number]

    def unload(self, name: str) -> None:
        """Forgets an adapter."""
        self.settle()
        self._loras.unload(name)
        self.settle()

    @property
    def use(self) -> LoraLoad:
        """What Load says of adapters. Thread-safe."""
        return LoraLoad(self.limits.max_loras, len(self.packed), *self._loras.in_use)

    def list_loaded(self) -> list[LoraInfo]:
        """The loaded adapters, in the order in which they were loaded."""
        self.settle()
        return [
            replace(
                self._infos[lora.number],
                on_device=lora.place > 0,
                running=lora.running,
                waiting=lora.users - lora.running,
            )
            for lora in self._loras
        ]

    def _check(self, name: str, load_inplace: bool, keep: Keep) -> None:
        coming = {self._infos[number].name for number, _ in [*self._read]}
        loaded = self._loras.by_name.get(name)
        if (loaded or name in coming) and not load_inplace:
            raise InvalidArgument(
                "lora_name", name, "an adapter of this name is loaded; load_inplace replaces it"
            )
        limit = self.limits.max_cpu_loras
        idle = 0 if keep is None else len(self._loras.idle(keep))  # those that were read take one each
        replaces = loaded and not loaded.users
        if limit is not None and len(self._infos) - idle >= limit and not replaces:
            why = "that of this name is in use" if loaded else "unload one to make room"
            why = "all of them are in use" if keep is not None else why
            raise InvalidArgument("lora_name", name, f"max_cpu_loras={limit} adapters are loaded; {why}")
