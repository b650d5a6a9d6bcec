"""Programs compiled for absent GPUs, as a basis for estimates."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jengine.capacity.planning.estimate import Estimate, Step, estimate
from jengine.capacity.planning.hlo import HloProgram, parse
from jengine.capacity.planning.roofline import experts_met
from jengine.devices.device_spec import DeviceSpec
from jengine.execution.kinds import Key
from jengine.execution.memory import ProgramMemory
from jengine.execution.programs import UNTUNED, compile_all, memory_of
from jengine.execution.spec import ExecutionSpec
from jengine.table.program_table import SamplerKey, TrunkKey
from pallas_kernels.compilation.thunks import dumped, dumping


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled program.

    Attributes:
        seconds: compilation time.
        launches: launches by the host; a command buffer is one launch.
    """

    key: Key
    seconds: float
    memory: ProgramMemory
    program: HloProgram
    launches: int

    @property
    def rows(self) -> int:
        """Maximum number of rows that it decodes or samples."""
        return self.key.rows if isinstance(self.key, TrunkKey | SamplerKey) else 0

    def estimate(self, spec: ExecutionSpec, device: DeviceSpec, step: Step) -> Estimate:
        """Estimates this step. Padding rows are equal, so together they meet the experts of a single
        token.
        """
        tokens = (
            spec.table.tokens(self.key) - max(0, self.rows - step.rows - 1)
            if isinstance(self.key, TrunkKey)
            else 0
        )
        met = experts_met(spec.model, tokens)
        return estimate(self.program, step, device, launches=self.launches, met=met, devices=spec.mesh.size)


def compiled(spec: ExecutionSpec, keys: list[Key], *, threads: int, progress: bool) -> list[Compiled]:
    """Compiles programs for the spec's devices. Their memory does not depend on the number of pages."""
    provisional = dataclasses.replace(spec, num_pages=2)
    with tempfile.TemporaryDirectory() as folder:
        options = {**UNTUNED, **dumping(Path(folder))}
        built = [*compile_all(provisional, keys, threads=threads, progress=progress, options=options)]
        thunks = dumped(Path(folder))
    found = []
    for one in built:
        program = parse(one.program.as_text())
        found.append(
            Compiled(one.key, one.seconds, memory_of(one.program), program, len(thunks[program.name]))
        )
    return found
