"""Occurrences of tokens in sequences, for penalties."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jengine.execution.batch import BatchLayout
from jengine.execution.device_state import ALLOCATE_COUNTS, DeviceState
from jengine.execution.kinds.kind import CallKind, DeviceCall, Kind, Program, ints
from jengine.execution.logits import COUNT_CHUNK, count_chunks, count_tokens
from jengine.execution.spec import ExecutionSpec
from jengine.scheduling.step_plan import StepPlan
from jengine.table.ready_programs import ReadyPrograms


class AllocateCounts(Kind[str]):
    """Allocates the counts when a request first needs them."""

    name, while_serving = ALLOCATE_COUNTS, False
    everywhere = False

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        counts = spec.counts
        return Program(
            "allocate_counts",
            lambda: jnp.zeros(counts.shape, counts.dtype),
            (),
            PartitionSpec(),
            by_shard=False,
        )

    def run(self, state: DeviceState, key: str, array: None) -> None:
        state.counts = state.get_counts()


class Count(Kind[str]):
    """Counts a chunk of a sequence's tokens; see logits.count_tokens."""

    name = "count"
    everywhere = False

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        return Program(
            "count_tokens", count_tokens, (spec.counts, ints(spec, 3 + COUNT_CHUNK)), PartitionSpec(), (0,)
        )

    def run(self, state: DeviceState, key: str, array: np.ndarray) -> None:
        state.counts = state.programs[key](state.get_counts(), state.put(array))

    def calls(self, spec: ExecutionSpec, layout: BatchLayout, plan: StepPlan) -> Iterator[DeviceCall]:
        for reset in plan.resets:
            if reset.counted is not None:
                for chunk in count_chunks(
                    reset.slot, reset.counted, reset.prompt_len, spec.model.config.vocab_size
                ):
                    yield DeviceCall(self.name, chunk)

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[str, DeviceCall]:
        [chunk] = count_chunks(0, [0], 1, spec.model.config.vocab_size)
        return {self.name: DeviceCall(self.name, chunk)}


class Forget(CallKind[str]):
    """Frees the counts."""

    name = "forget"
    everywhere = False

    def run(self, state: DeviceState, key: str, array: None) -> None:
        state.counts = None  # allocated again when needed
