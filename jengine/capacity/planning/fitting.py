"""Settings with which a model fits a GPU, for plans that do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jengine.base.errors import JengineError
from jengine.core.config import EngineConfig

LEAST_TOKENS = 2048  # of the cache, or max_model_len: less is not worth a start
BUDGETS = 4096, 2048, 1024, 512  # values of max_num_batched_tokens
QUANTIZATIONS = "int8", "int4"
FEW_SEQUENCES, SHORTER, MORE_MEMORY = 32, 8192, 0.95
DEVICES = 2, 4, 8


@dataclass(frozen=True, slots=True)
class Room:
    """Attributes: cache: bytes on each device, 0 if it does not fit; tokens: that it holds."""

    cache: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Fitting:
    """Options that make a model fit, and the cache that they leave."""

    options: dict[str, Any]
    room: Room

    def __str__(self) -> str:
        """Such as --max-num-batched-tokens 1024 (2.5 GiB of cache, 20,416 tokens)."""
        flags = {f"--{name.replace('_', '-')}": value for name, value in self.options.items()}
        changes = " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)
        without = "".join(f"no {flag}" for flag, value in flags.items() if value is None)
        where = " on each device" if "tensor_parallel_size" in self.options else ""
        return (
            f"{changes or without} ({self.room.cache / 2**30:.1f} GiB of cache{where}, {self.room.tokens:,}"
            " tokens)"
        )


def what_fits(
    config: EngineConfig, room: Callable[[EngineConfig], Room], *, most_tokens: int, weights_fit: bool
) -> list[Fitting]:
    """The cheapest settings of each kind that make the model fit: fewer tokens a step, then also fewer
    sequences and more memory; shorter sequences; quantized weights; more devices. Empty if none does.

    Args:
        room: the cache that a configuration leaves; raises JengineError where the model or the device does
            not support it.
        most_tokens: max_model_len.
        weights_fit: whether the weights alone fit; if not, no smaller step helps.
    """
    enough = min(LEAST_TOKENS, most_tokens)

    def first(kind: Iterator[dict[str, Any]]) -> Iterator[Fitting]:
        for options in kind:
            try:
                fits = room(dataclasses.replace(config, **options))
            except JengineError:
                continue
            if fits.tokens >= enough:
                yield Fitting(options, fits)
                return

    unset = {name: None for name in ("num_pages", "kv_cache_memory") if getattr(config, name) is not None}
    if unset and (fits := [*first(iter([unset]))]):  # otherwise it is not only this
        return fits
    smaller = [*first(_smaller(config)), *first(_shorter(most_tokens))] if weights_fit else []
    return [*smaller, *first(_quantized(config)), *first(_shared(config))]


def _smaller(config: EngineConfig) -> Iterator[dict[str, Any]]:
    """Options that change no result. The largest budgets first."""
    budgets = [budget for budget in BUDGETS if budget < (config.max_num_batched_tokens or 2 * BUDGETS[0])]
    rows = config.max_num_seqs or 256
    for budget in budgets:
        if budget >= rows + config.tile_size:
            yield {"max_num_batched_tokens": budget}
    few: dict[str, Any] = {"max_num_batched_tokens": BUDGETS[-1]} | (
        {"max_num_seqs": FEW_SEQUENCES} if rows > FEW_SEQUENCES else {}
    )
    yield few
    if config.gpu_memory_utilization < MORE_MEMORY:
        yield few | {"gpu_memory_utilization": MORE_MEMORY}


def _shorter(most_tokens: int) -> Iterator[dict[str, Any]]:
    """Without jengine's kernels, temporaries grow with the longest sequence."""
    if most_tokens > SHORTER:
        yield {"max_model_len": SHORTER}


def _quantized(config: EngineConfig) -> Iterator[dict[str, Any]]:
    """Fewer bytes of weights, the most exact first; then with a smaller step, too."""
    if config.quantization is not None:
        return
    for smaller in ({}, {"max_num_batched_tokens": 1024}):
        for quantization in QUANTIZATIONS:
            yield {"quantization": quantization, **smaller}


def _shared(config: EngineConfig) -> Iterator[dict[str, Any]]:
    for count in DEVICES:
        if count > config.tensor_parallel_size:
            yield {"tensor_parallel_size": count}
