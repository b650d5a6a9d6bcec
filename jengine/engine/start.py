"""Starts an engine from its options, or repeats the calls of another process's engine."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import jax
from jax.sharding import Mesh

from jengine.base.display import counted
from jengine.base.errors import InvalidArgument, OutOfMemory
from jengine.base.process import uncollected
from jengine.base.progress import Progress
from jengine.core.config import EngineConfig
from jengine.engine.rank_start import check_ranks
from jengine.engine.ranks import AnyEngine, RankedEngine
from jengine.engine.setup.assemble import EngineMaker
from jengine.engine.setup.devices import connect
from jengine.engine.setup.prepare import prepare
from jengine.engine.setup.started import Started
from jengine.execution.pipeline import Pipeline, answers
from jengine.execution.ranks import RanksRunner
from jengine.execution.results import ResultSender
from jengine.execution.worker import decode
from jengine.insight.recording.engines import engines
from jengine.parallel.link import END, Follower


def start_engine(
    config: EngineConfig,
    *,
    mesh: Mesh | None = None,
    params: Any = None,
    progress: Progress = True,
    offline: bool = False,
) -> tuple[AnyEngine, Started]:
    """Does everything that comes before the first request. The tokenizer's end-of-sequence token ends
    sequences too, beside those that the model's files name.

    Args:
        mesh: the devices to use, tensor_parallel_size of them: at most one axis may have more than one. None:
            the first ones.
        params: weights in place of the folder's, which then needs only the configuration and the tokenizer.
            Numpy or JAX arrays: a mapping by name, nested or not, an nnx.State or nnx.Module, or an iterator
            of (name, array). Names are those of a checkpoint's tensors, or of `LLM.abstract_params`.
            By a checkpoint's names, the arrays are copied, one parameter at a time, and may be deleted
            afterwards: JAX arrays on the devices, where each device briefly holds the parameter's whole
            tensors; numpy arrays, experts that are stacked in one tensor and tensors of a quantized
            checkpoint through the host.
            By the names of abstract_params, a JAX array with the declared shape, dtype and sharding is used
            without a copy. The caller and the engine then share it: it must not be deleted, nor donated to
            a jitted function, until other weights have taken its place.
        progress: whether to show progress bars on a terminal; a function is called with the progress as well.
        offline: requests come together, so that a burst keeps none waiting; see num_scheduler_steps.

    Raises:
        InvalidArgument: the model or device does not support an option.
        ModelError: the model cannot be read, or is not supported.
        OutOfMemory: the device is too small.
        EngineDead: another process of the engine ended.
    """
    others = len(engines())
    try:
        with ExitStack() as undo, uncollected(), jax.set_mesh(None):  # the caller may use another mesh
            started = _start(config, undo, mesh=mesh, params=params, progress=progress, offline=offline)
            undo.pop_all()
            return started
    except OutOfMemory as full:
        if not others:
            raise
        reason = f"{counted(others, 'other engine')} of this process may hold memory of the device"
        raise OutOfMemory(f"{full}; {reason}: close() it first") from full


def follow(config: EngineConfig, *, progress: Progress = True) -> None:
    """Runs every process but the first: repeats the calls of process 0 until that ends.

    Raises:
        EngineDead: process 0 ended unexpectedly.
        Others: as start_engine.
    """
    if not 0 < config.process_id < config.num_processes:
        raise InvalidArgument("process_id", config.process_id, "process 0 takes requests and cannot follow")
    link = connect(config)
    assert isinstance(link, Follower)
    with ExitStack() as undo:
        setup = prepare(config, link, undo, progress=progress)
        undo.pop_all()
    setup.programs.obtain_others(link)
    worker, sender = setup.runner.worker, ResultSender(link.send_result)
    for number, frame in enumerate(iter(link.heard, END), 1):
        call = decode(frame)
        result = worker.execute(call)
        if isinstance(worker, Pipeline) and worker.sends_results and answers(call):
            sender.put(number, result)


def _start(
    config: EngineConfig,
    undo: ExitStack,
    *,
    mesh: Mesh | None,
    params: Any,
    progress: Progress,
    offline: bool,
) -> tuple[AnyEngine, Started]:
    if config.process_id > 0:
        raise InvalidArgument(
            "process_id", config.process_id, "only process 0 takes requests; the others call jengine.follow"
        )
    for name, value in (("mesh", mesh), ("params", params)):
        if value is not None and config.num_processes > 1:
            limit = f"must be None with num_processes={config.num_processes}"
            raise InvalidArgument(name, type(value).__name__, limit)
    check_ranks(config, mesh)
    link = connect(config)
    setup = prepare(config, link, undo, mesh=mesh, params=params, progress=progress, offline=offline)
    runner, started = setup.runner, setup.started
    clock = time.perf_counter()
    warmed_up = setup.programs.warm_up(runner, progress)
    started.seconds["warm-up"] = time.perf_counter() - clock
    started.longest_step = warmed_up.costs.longest_step
    make_engine = EngineMaker(setup, warmed_up, setup.programs.obtain_others(link))
    if isinstance(runner, RanksRunner):
        ranks = [make_engine(rank_runner, rank) for rank, rank_runner in enumerate(runner.runners)]
        return RankedEngine(ranks, runner), started
    return make_engine(runner), started
