"""Samplers: final hidden states to tokens."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jengine.execution.batch import BatchLayout
from jengine.execution.device_state import DeviceState, start_host_copy
from jengine.execution.kinds.kind import DeviceCall, Kind, Program, head_lora_of, of_leaves
from jengine.execution.logits import COUNT_CHUNK, count_chunks, count_tokens, mask_words
from jengine.execution.memory import sampler_temporaries
from jengine.execution.sampler import Sampled, SampledLogprobs, make_sampler
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import ToSample
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import VARIANTS, SamplerKey
from jengine.table.ready_programs import ReadyPrograms


class Sampler(Kind[SamplerKey]):
    """Samples the last trunk's rows, with a token mask as of logits.mask_words; None: all are allowed."""

    name, key = "sample", SamplerKey
    everywhere = False
    each_step = True

    def program(self, spec: ExecutionSpec, key: SamplerKey) -> Program:
        full, last, adapt = key.variant == "full", spec.slots.last, head_lora_of(spec)
        state = (last, spec.counts) if full else last
        args = spec.leaves, spec.head_stacks, state, spec.slots.sampling, to_sample(spec, key)
        sampler = make_sampler(spec.model, key.variant, processed=spec.processed_logprobs, adapt=adapt)
        masks = (mask(spec, key),) if full else ()
        name = f"sampler_{key.rows}_{key.variant}"
        return Program(name, of_leaves(spec, sampler), (*args, *masks), PartitionSpec(), (2,))

    def run(self, state: DeviceState, key: SamplerKey, array: np.ndarray | None) -> Sampled | SampledLogprobs:
        program, slots = state.programs[key], state.slots
        weights = state.leaves, state.head_stacks
        if key.variant == "full":
            before = slots.last, state.get_counts()
            allowed = state.all_allowed(key.rows) if array is None else state.put(array)
            (last, state.counts), sampled = program(
                *weights, before, slots.sampling, state.to_sample, allowed
            )
        else:
            last, sampled = program(*weights, slots.last, slots.sampling, state.to_sample)
        state.slots = slots._replace(last=last)
        result: Sampled | SampledLogprobs = start_host_copy(sampled)
        return result

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[SamplerKey, StepPlan]:
        table = spec.table
        smallest = {
            table.sample_rows(key): key for key in sorted(ready.trunks(), key=table.tokens, reverse=True)
        }
        return {key: StepPlan(smallest[key.rows], key) for key in ready.samplers() if key.rows in smallest}

    def heaviest(self, spec: ExecutionSpec) -> SamplerKey:
        return SamplerKey(spec.table.max_rows, VARIANTS[-1])

    def temporaries(self, spec: ExecutionSpec, key: SamplerKey) -> int:
        return sampler_temporaries(spec, key.rows)

    def compile_effort(self, spec: ExecutionSpec, key: SamplerKey) -> tuple[int, int]:
        return 3 if key.variant == VARIANTS[-1] else 0, key.rows


def to_sample(spec: ExecutionSpec, key: SamplerKey) -> ToSample:
    """The abstract result of a trunk for this sampler."""
    hidden = spec.whole(spec.model.dtype, key.rows, spec.model.config.hidden_size)
    return ToSample(hidden, *[spec.whole(np.int32, key.rows)] * 3)  # type: ignore[arg-type]


def mask(spec: ExecutionSpec, key: SamplerKey) -> jax.ShapeDtypeStruct:
    """An abstract token mask."""
    return spec.whole(np.uint32, key.rows, mask_words(spec.model.config.vocab_size))


class Count(Kind[str]):
    """Counts a chunk of a sequence's tokens; see logits.count_tokens."""

    name = "count"
    everywhere = False

    def program(self, spec: ExecutionSpec, key: str) -> Program:
        return Program(
            "count_tokens",
            count_tokens,
            (spec.counts, spec.whole(np.int32, 3 + COUNT_CHUNK)),
            PartitionSpec(),
            (0,),
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
