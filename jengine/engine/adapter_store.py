"""Loaded LoRA adapters in host memory, ready to be written to the devices."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from jengine.base.errors import InvalidArgument
from jengine.checkpoints.lora import read_lora
from jengine.core.lora import LoraInfo, LoraLimits, LoraSource
from jengine.execution.adapters import AdapterShapes
from jengine.scheduling.requests.adapters import Adapters


class AdapterStore:
    """Reads adapters, and keeps each in the form in which a program takes it.

    Adapters are loaded in any thread, one at a time; everything else is called in the engine's.

    Attributes:
        packed: by number, see `AdapterShapes.pack`.
    """

    def __init__(self, shapes: AdapterShapes, limits: LoraLimits) -> None:
        self._shapes, self.limits = shapes, limits
        self.packed: dict[int, np.ndarray] = {}
        self._infos: dict[int, LoraInfo] = {}
        self._loading = threading.Lock()

    def load(self, adapters: Adapters, source: LoraSource, *, load_inplace: bool = False) -> LoraInfo:
        """See operations.LoadLora."""
        with self._loading:
            self._check(adapters, source.name, load_inplace)
            model = self._shapes.model
            weights = read_lora(source, self._shapes.modules, model.prefix, self.limits.max_lora_rank)
            number, packed = adapters.next_number(), self._shapes.pack(weights)
            info = LoraInfo(
                name=source.name,
                path=source.path,
                rank=weights.rank,
                modules=tuple(sorted({name.rpartition(".")[2] for name in weights.factors})),
                bytes=packed.nbytes,
            )
            self.packed[number], self._infos[number] = packed, info
            adapters.load(source.name, number)
            return info

    def list(self, adapters: Adapters) -> list[LoraInfo]:
        """See operations.ListLoras."""
        return [
            replace(
                self._infos[adapter.number],
                on_device=adapter.place > 0,
                running=adapter.running,
                waiting=adapter.users - adapter.running,
            )
            for adapter in adapters
        ]

    def forget(self, numbers: list[int]) -> None:
        """Frees the memory of adapters that nothing uses any more."""
        for number in numbers:
            del self.packed[number], self._infos[number]

    def _check(self, adapters: Adapters, name: str, load_inplace: bool) -> None:
        if name in adapters.by_name and not load_inplace:
            raise InvalidArgument(
                "lora_name", name, "an adapter of this name is loaded; load_inplace replaces it"
            )
        most, loaded = self.limits.max_cpu_loras, len(self.packed)
        if most is not None and loaded >= most:
            raise InvalidArgument(
                "lora_name", name, f"max_cpu_loras={most} adapters are loaded; unload_lora makes room"
            )
