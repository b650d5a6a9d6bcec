"""The parts that an engine is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jengine.core.pooling import Embedder, Reranker
from jengine.engine.loop.live_weights import FixedWeights
from jengine.engine.loop.lora_store import LoraStore
from jengine.engine.page_events import PageEventPublisher
from jengine.engine.page_transfer import PageTransfer
from jengine.insight.recording.recorder import TraceRecorder


class Arrivals(Protocol):
    """Programs that become ready while the engine runs; see execution/background.py and first_use.py."""

    @property
    def ready(self) -> int: ...

    def usable(self) -> list[Any]: ...

    def wait(self, timeout: float | None = None) -> bool: ...

    def prefer(self, keys: Sequence[Any]) -> None: ...

    def stop(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class EngineParts:
    """What an engine may have beside its model, runner and scheduler.

    Attributes:
        overlap: whether to dispatch a step before the previous one's tokens are read.
        seed: seeds the random seeds of requests that set none.
        num_programs: number of programs in the table, of all kinds.
        programs: programs that become ready later; None: all are ready.
        save_costs: called once, when the engine is closed or garbage-collected.
        recorder: records each finished request.
        embedder: how the model embeds; None: the table has no programs for embeddings.
        reranker: how the model scores pairs of texts; None: its folder does not say.
        weights: the weights, which may be replaced.
        loras: loaded LoRA adapters; None: the table has no programs for them.
        page_events: publishes what the prefix cache holds.
        pages: gives pages to a store, and loads them from there.
    """

    overlap: bool = True
    seed: int = 0
    num_programs: int = 0
    programs: Arrivals | None = None
    save_costs: Callable[[], None] | None = None
    recorder: TraceRecorder | None = None
    embedder: Embedder | None = None
    reranker: Reranker | None = None
    weights: FixedWeights = field(default_factory=FixedWeights)
    loras: LoraStore | None = None
    page_events: PageEventPublisher | None = None
    pages: PageTransfer | None = None


def programs_ready(later: Arrivals | None, number: int) -> tuple[int, int]:
    """Number of programs that are ready, and of all. Thread-safe."""
    return number if later is None else later.ready, number
