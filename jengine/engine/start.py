"""Starts an engine from its options, or repeats the calls of another process's engine."""

from __future__ import annotations

import dataclasses
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
from jengine.engine.loop.engine import Engine
from jengine.engine.loop.engine_parts import EngineParts, FirstUse
from jengine.engine.loop.live_weights import FixedWeights, LiveWeights
from jengine.engine.loop.lora_store import LoraStore
from jengine.engine.page_events import EventMaker, Group, PageEventPublisher
from jengine.engine.page_stores import Stores
from jengine.engine.page_transfer import PageTransfer
from jengine.engine.ranks import AnyEngine, RankedEngine
from jengine.engine.setup.devices import connect
from jengine.engine.setup.prepare import EngineSetup, Started, prepare
from jengine.engine.setup.program_set import WarmedUp
from jengine.engine.setup.shapes import scheduler_shapes
from jengine.engine.setup.stages_and_ranks import check_ranks
from jengine.execution.background import BackgroundPrograms
from jengine.execution.executor import Pipeline, ResultSender, Worker, answers, decode
from jengine.execution.ranks import RanksRunner
from jengine.execution.runner import Runner
from jengine.execution.spec import ExecutionSpec
from jengine.insight.recording.engines import engines
from jengine.insight.recording.recorder import TraceRecorder
from jengine.models.config import ModelConfig
from jengine.parallel.link import END, Follower
from jengine.scheduling.requests.images import Images
from jengine.scheduling.scheduler import Scheduler
from jengine.text.tokenizer import Tokenizer


class EngineMaker:
    """Makes the engine of all devices, or of each rank.

    Args:
        others: programs that are not ready yet.
    """

    def __init__(self, setup: EngineSetup, warmed_up: WarmedUp, others: BackgroundPrograms | None) -> None:
        self._setup, self._warmed_up, self._others = setup, warmed_up, others
        spec, worker = setup.runner.spec, setup.runner.worker
        self._weights = (
            LiveWeights(setup.started.folder, spec, worker.state, shared=setup.shared)
            if setup.config.weight_updates and isinstance(worker, Worker)
            else FixedWeights(spec.params, shared=setup.shared)
        )

    def __call__(self, runner: Runner, rank: int = 0) -> Engine:
        config, started, others = self._setup.config, self._setup.started, self._others
        spec, scheduler, used = runner.spec, self._scheduler(runner.spec), self._warmed_up.used
        model = _with_eos_token(spec.model.config, started.tokenizer)
        if started.tokenizer is not None:
            started.tokenizer.model_eos_token_ids = model.eos_token_ids
        parts = EngineParts(
            overlap=config.overlap,
            seed=config.seed + rank,
            num_programs=started.programs,
            programs=others if others is None or runner.on_host else FirstUse(others, runner, used),
            save_costs=self._warmed_up.save_costs if rank == 0 else None,
            recorder=None if config.record_trace is None else TraceRecorder(config.record_trace),
            embedder=started.embedder,
            reranker=started.reranker,
            weights=self._weights,
            page_events=self._page_events(spec, scheduler),
            pages=self._page_transfer(runner, scheduler),
        )
        if spec.adapters is not None and spec.lora is not None:
            parts.loras = LoraStore(spec.adapters, spec.lora, scheduler.registry.loras)
        return Engine(model, runner, scheduler, parts)

    def _scheduler(self, spec: ExecutionSpec) -> Scheduler:
        config = self._setup.config
        images = None
        if spec.images is not None or spec.ahead:
            images = Images(
                0 if spec.images is None else spec.images.rows,
                spec.model.config.vocab_size,
                turns=spec.turns,
                ahead=spec.ahead,
                prefix=spec.model.config.prefix_lm,
                embeddings=config.enable_prompt_embeds,
            )
        shapes, options = scheduler_shapes(config, spec), config.scheduling
        scheduler = Scheduler(
            spec.table, *shapes, options=options, costs=self._warmed_up.costs, images=images
        )
        scheduler.predictor.ready = self._warmed_up.ready
        return scheduler

    def _page_events(self, spec: ExecutionSpec, scheduler: Scheduler) -> PageEventPublisher | None:
        options, tokenizer = self._setup.config.page_events, self._setup.started.tokenizer
        if options is None:
            return None
        images = None if tokenizer is None else tokenizer.images
        token = 0 if images is None else images.vision.row_token
        events = EventMaker(spec.page_size, [*map(Group.of, spec.groups)], token)
        publisher = PageEventPublisher(options, events)
        scheduler.blocks.watch(publisher.note)
        return publisher

    def _page_transfer(self, runner: Runner, scheduler: Scheduler) -> PageTransfer | None:
        options, names, weights = self._setup.config.kv_transfer, self._setup.page_names, self._weights
        if options is None or names is None:
            return None
        return PageTransfer(
            options, Stores(options), names, scheduler, runner, lambda: weights.version, runner.spec.page
        )


def _with_eos_token(model: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """Adds the tokenizer's end-of-sequence token, as vLLM does, since a model's configuration may lack it."""
    token, known = None if tokenizer is None else tokenizer.eos_token_id, model.eos_token_ids
    if token is None or token >= model.vocab_size or token in known:
        return model
    return dataclasses.replace(model, eos_token_ids=(token, *known))


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
        InvalidArgument, ModelError, OutOfMemory: as in LLM.
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
