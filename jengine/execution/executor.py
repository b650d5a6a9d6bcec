"""What executes the calls of an engine in this process: a worker, or the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jengine.execution.kinds import DeviceCall
from jengine.execution.pipeline import Pipeline, StagePrograms
from jengine.execution.programs import Programs
from jengine.execution.spec import ExecutionSpec
from jengine.execution.worker import Worker
from jengine.models import Params


class Executor(Protocol):
    """What runs calls: a worker, or the stages of a pipeline."""

    spec: ExecutionSpec
    programs: Any

    def execute(self, call: DeviceCall) -> Any: ...

    def await_samples(self, overtakes: int) -> None: ...

    @property
    def caches(self) -> list[Any]: ...

    def memory_parts(self) -> dict[str, int]: ...


def make_worker(
    spec: ExecutionSpec,
    programs: Programs | StagePrograms,
    params: Sequence[Params],
    draft: Params = None,
    encoder: Params = None,
) -> Executor:
    """Args:
    params: of each stage.
    """
    if not isinstance(programs, StagePrograms):
        (whole,) = params
        return Worker(spec, programs, whole, draft, encoder)
    parts = zip(spec.local_stages, programs.stages, params, strict=True)
    return as_one(spec, programs, [Worker(*part) for part in parts])


def as_one(
    spec: ExecutionSpec, programs: Programs | StagePrograms, workers: Sequence[Worker]
) -> Worker | Pipeline:
    """The workers of all stages, or of the only one, as one."""
    if isinstance(programs, StagePrograms):
        return Pipeline(spec, programs, workers)
    (whole,) = workers
    return whole


def by_stage(programs: Programs | StagePrograms) -> Sequence[Programs]:
    """The programs of each stage, or of the only one."""
    return programs.stages if isinstance(programs, StagePrograms) else [programs]
