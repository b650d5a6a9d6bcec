"""Adapters of an engine without a model; see mock_engine.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from jengine import InvalidArgument, LoadLora, LoraInfo, LoraLimits, LoraLoad, ModelError, Request

MAX_RANK = 16


def shift_of(name: str | None) -> int:
    """What an adapter adds to each token's id: the sum of its name's bytes."""
    return 0 if name is None else sum(name.encode("utf-8", "surrogatepass"))


class MockLoras:
    """Loaded adapters by name."""

    def __init__(self, limits: LoraLimits | None) -> None:
        self._limits, self._loaded = limits, dict[str, LoraInfo]()

    @property
    def listed(self) -> list[LoraInfo]:
        return [*self._loaded.values()]

    def load(self, running: Iterable[Request], waiting: Iterable[Request]) -> LoraLoad | None:
        if self._limits is None:
            return None
        used = (
            tuple(sorted({request.lora_name for request in of if request.lora_name is not None}))
            for of in (running, waiting)
        )
        return LoraLoad(self._limits.max_loras, len(self._loaded), *used)

    def check(self, request: Request) -> None:
        if request.lora_name is not None and request.lora_name not in self._loaded:
            raise InvalidArgument("lora_request", request.lora_name, "is not loaded")

    def add(self, asked: LoadLora) -> LoraInfo:
        """Raises as LoadLora."""
        assert self._limits is not None
        if asked.name in self._loaded and not asked.load_inplace:
            raise InvalidArgument("lora_name", asked.name, "is loaded already")
        most = self._limits.max_cpu_loras
        if most is not None and len(self._loaded.keys() - {asked.name}) >= most:
            raise InvalidArgument("lora_name", asked.name, f"max_cpu_loras={most} adapters are loaded")
        file = Path(asked.path) / "adapter_config.json"
        try:
            rank = int(json.loads(file.read_bytes())["r"])
        except (OSError, ValueError, KeyError, TypeError) as wrong:
            raise ModelError(f"cannot be read: {wrong!r}", file=file) from None
        if rank > MAX_RANK:
            raise ModelError(f"module q_proj has rank {rank}, above max_lora_rank={MAX_RANK}", file=file)
        info = LoraInfo(name=asked.name, path=asked.path, rank=rank, modules=("q_proj",), bytes=0)
        self._loaded[asked.name] = info
        return info

    def remove(self, name: str) -> None:
        """Raises as UnloadLora."""
        if self._loaded.pop(name, None) is None:
            raise InvalidArgument("lora_name", name, "is not loaded")
