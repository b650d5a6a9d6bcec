"""Steps of the engine's own programs, without requests: any number of rows or tiles, at any context
length.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jengine.checkpoints import load, read_config
from jengine.execution.cache_folders import cache_root
from jengine.execution.kernels import product_forms, with_forms
from jengine.execution.programs import lower
from jengine.execution.spec import ExecutionSpec
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from jengine.scheduling.step_plan import Sample, Span, StepPlan
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey
from pallas_kernels.quantization.formats import INT4

PAGE_SIZE = 16


class Model:
    """A model's weights on the device, for steps of several shapes.

    Args:
        quantization, group_size: as in the engine's options quantization and quantization_group_size.
        calibrated: whether four-bit weights have the form of calibrated ones; they are rounded to nearest.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        quantization: str | None = None,
        *,
        group_size: int = INT4.group,
        calibrated: bool = False,
    ) -> None:
        self.config, self.mesh, self.quantization = read_config(folder), make_mesh(1), quantization
        self.model = build(
            self.config,
            dtype,
            self.config.max_position,
            quantization,
            group_size=group_size,
            calibrated=calibrated,
        )
        self.params = load(folder, self.model, self.mesh, progress=False)

    def step(
        self, *, rows: int = 0, context: int = 0, tiles: int = 0, tile_size: int = 256, past: int = 0
    ) -> Step:
        """Rows that read one token each after `context` others, or tiles of one prompt, the first after
        `past` of its tokens.
        """
        return Step(self, rows, context, tiles, tile_size, past)


class Step:
    """A compiled trunk with its greedy sampler, and their inputs.

    Attributes:
        programs: (trunk, sampler), jax.stages.Compiled.
        tokens: length of the token axis, padding included.
    """

    def __init__(self, model: Model, rows: int, context: int, tiles: int, tile_size: int, past: int) -> None:
        length = max(context + 1, past + tiles * tile_size)
        width = -(-length // PAGE_SIZE)
        slots = max(rows, 1)
        padded = rows if rows == 1 else max(8, rows)
        table = ProgramTable((padded,), (padded,), (max(tiles, 1),), tile_size)
        key = TrunkKey(padded, tiles)
        spec = ExecutionSpec(
            model=model.model,
            mesh=model.mesh,
            table=table,
            max_model_len=width * PAGE_SIZE,
            max_slots=slots,
            page_size=PAGE_SIZE,
            num_pages=1 + slots * width,
        )
        spec = with_forms(spec, product_forms(spec, cache_root(None)))
        self.tokens = table.tokens(key)
        sampler = SamplerKey(table.sample_rows(key), "greedy")
        self.programs: tuple[Any, Any] = (lower(spec, key).compile(), lower(spec, sampler).compile())
        self._params = tuple(jax.tree.leaves(model.params))
        self._cache, self._slots = _state(spec)
        self._spec, self._keys = spec, (key, sampler)
        prompt = [Span(1, 1, past, tiles * tile_size, [*range(tile_size)] * tiles)] if tiles else []
        self._send([*_decoding(rows, context), *prompt])

    def decode(self, rows: int, context: int) -> None:
        """Decodes fewer rows, after fewer tokens, from now on."""
        self._send(_decoding(rows, context))

    def decode_one(self, rows: int, context: int, *, apart: bool = False) -> None:
        """Decodes consecutive tokens of one sequence from now on, the last of them after `context` others.

        Args:
            apart: the last token comes first, so that attention takes each row for itself.
        """
        starts = range(context - rows + 1, context + 1)
        self._send([Span(1, 1, start, known=1) for start in (reversed(starts) if apart else starts)])

    def _send(self, spans: list[Span]) -> None:
        plan = StepPlan(
            *self._keys,
            spans,
            [Sample(i, span.length - 1, span.seq, span.slot) for i, span in enumerate(spans)],
        )
        self._packed = jax.device_put(self._spec.layout(plan.trunk).pack(plan), self._spec.replicated)

    def trunk(self) -> Any:
        """Starts the trunk. Returns the sampler's input."""
        self._cache, self._slots, to_sample, _ = self.programs[0](
            self._params, (), self._cache, self._slots, self._packed, (), ()
        )
        return to_sample

    def sample(self, to_sample: Any) -> None:
        """Runs the sampler and waits for it."""
        self._sampler(to_sample).block_until_ready()

    def _sampler(self, to_sample: Any) -> jax.Array:
        """Starts the sampler. Returns the tokens."""
        last, sampled = self.programs[1](self._params, (), self._slots.last, self._slots.sampling, to_sample)
        self._slots = self._slots._replace(last=last)
        tokens: jax.Array = sampled.tokens
        return tokens

    def seconds(self) -> float:
        """Seconds of one step, from its dispatch to its tokens."""
        start = time.perf_counter()
        self.sample(self.trunk())
        return time.perf_counter() - start

    def seconds_ahead(self, steps: int = 10) -> float:
        """Seconds per step if each is dispatched before the tokens of the previous one are read, as in the
        engine.
        """
        start = time.perf_counter()
        tokens = self._sampler(self.trunk())
        for _ in range(steps - 1):
            following = self._sampler(self.trunk())
            tokens.block_until_ready()
            tokens = following
        tokens.block_until_ready()
        return (time.perf_counter() - start) / steps


def least(runs: dict[Any, Callable[[], float]], budget: float) -> dict[Any, float]:
    """The minimum of each run's seconds. Runs take turns, for `budget` seconds in total and at least three
    times each.
    """
    best = {name: run() for name, run in runs.items()}
    end, taken = time.monotonic() + budget, 1
    while taken < 3 or time.monotonic() < end:
        best = {name: min(best[name], run()) for name, run in runs.items()}
        taken += 1
    return best


def _decoding(rows: int, context: int) -> list[Span]:
    """A row of each of so many sequences."""
    return [Span(slot, slot, context, known=slot) for slot in range(1, rows + 1)]


def _state(spec: ExecutionSpec) -> tuple[Any, Any]:
    """A cache of random numbers with each sequence's pages scattered, and slots that own all pages."""
    rng = np.random.default_rng(0)
    filler = rng.standard_normal(1 << 16, np.float32)

    def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.resize(filler, x.shape).astype(x.dtype), x.sharding)

    cache = jax.tree.map(fill, spec.cache)
    slots = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), spec.slots)
    slots.block_table[0, 1:] = (1 + rng.permutation(spec.num_pages - 1)).reshape(spec.max_slots, -1)
    return cache, jax.tree.map(lambda x: jax.device_put(x, spec.replicated), slots)
