"""Drafts of a draft model."""

from __future__ import annotations

import numpy as np
from jax.sharding import PartitionSpec

from jengine.execution.device_state import DeviceState, start_host_copy
from jengine.execution.draft import draft_words, make_draft
from jengine.execution.kinds.kind import DeviceCall, Kind, Program, ints, of_leaves, partitions
from jengine.execution.memory import sampler_temporaries, trunk_temporaries
from jengine.execution.sampler import Sampled
from jengine.execution.spec import ExecutionSpec
from jengine.table.program_table import DraftKey, TrunkKey
from jengine.table.ready_programs import ReadyPrograms


class Draft(Kind[DraftKey]):
    """Proposes tokens for slots, before the trunk that verifies them; see draft.pack_drafts."""

    name, key = "draft", DraftKey
    each_step = True

    def program(self, spec: ExecutionSpec, key: DraftKey) -> Program:
        assert spec.drafting is not None and spec.draft is not None
        device = spec.mesh.devices.flat[0]
        draft = make_draft(spec.model, spec.draft, key, spec.page_size, device)
        packed = ints(spec, draft_words(key, spec.page_size))
        args = spec.drafting.leaves, spec.cache, spec.slots, packed
        out = partitions(spec.cache), partitions(spec.slots), PartitionSpec()
        name = f"draft_{key.rows}_{key.tokens}_{key.pages}"
        return Program(name, of_leaves(spec.drafting, draft), args, out, (1, 2))

    def run(self, state: DeviceState, key: DraftKey, array: np.ndarray) -> Sampled:
        state.cache, state.slots, drafts = state.programs[key](
            state.draft_leaves, state.cache, state.slots, state.put(array)
        )
        result: Sampled = start_host_copy(drafts)
        return result

    def examples(self, spec: ExecutionSpec, ready: ReadyPrograms) -> dict[DraftKey, DeviceCall]:
        return {
            key: DeviceCall(key, np.zeros(draft_words(key, spec.page_size), np.int32))
            for key in ready.drafts()
        }

    def heaviest(self, spec: ExecutionSpec) -> DraftKey | None:
        return max(self.keys(spec), key=lambda key: (key.rows, key.pages), default=None)

    def temporaries(self, spec: ExecutionSpec, key: DraftKey) -> int:
        """Bytes of a step of the draft model: its trunk and its sampler."""
        assert spec.drafting is not None
        trunk = trunk_temporaries(spec.drafting, TrunkKey(key.rows, 0, key.pages))
        return trunk + sampler_temporaries(spec.drafting, key.rows)

    def compile_effort(self, spec: ExecutionSpec, key: DraftKey) -> tuple[int, int]:
        return 1, key.rows
