"""Makes an engine from weights and programs that are ready: its scheduler, and what travels in and out."""

from __future__ import annotations

import dataclasses

from jengine.devices.device_defaults import sizes
from jengine.engine.loop.engine import Engine
from jengine.engine.loop.engine_parts import EngineParts
from jengine.engine.loop.first_use import FirstUse
from jengine.engine.loop.live_weights import FixedWeights, LiveWeights
from jengine.engine.loop.lora_store import LoraStore
from jengine.engine.page_event_publisher import PageEventPublisher
from jengine.engine.page_events import EventMaker, Group
from jengine.engine.page_stores import make_stores
from jengine.engine.page_transfer import PageTransfer
from jengine.engine.setup.prepare import EngineSetup
from jengine.engine.setup.program_set import WarmedUp
from jengine.execution.background import BackgroundPrograms
from jengine.execution.runner import Runner
from jengine.execution.spec import ExecutionSpec
from jengine.execution.worker import Worker
from jengine.insight.recording.recorder import TraceRecorder
from jengine.models.cache import paged
from jengine.models.config import ModelConfig
from jengine.scheduling.pages.block_table import GroupPages
from jengine.scheduling.requests.images import Images
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.shape import BatchLimits, CacheShape
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
        spec, scheduler = runner.spec, self._scheduler(runner.spec)
        model = _with_eos_token(spec.model.config, started.tokenizer)
        if started.tokenizer is not None:
            started.tokenizer.model_eos_token_ids = model.eos_token_ids
        parts = EngineParts(
            overlap=config.overlap,
            seed=config.seed + rank,
            num_programs=started.programs,
            programs=None if others is None else self._first_use(others, runner),
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

    def _first_use(self, others: BackgroundPrograms, runner: Runner) -> BackgroundPrograms | FirstUse:
        return others if runner.on_host else FirstUse(others, runner, self._warmed_up.used)

    def _scheduler(self, spec: ExecutionSpec) -> Scheduler:
        config = self._setup.config
        cache = CacheShape(
            page_size=spec.page_size,
            num_pages=spec.num_pages,
            groups=[GroupPages(group.window, group.pool) for group in paged(spec.groups)],
            num_states=spec.num_states,
            draft_states=spec.draft_states,
            prefix_caching=config.enable_prefix_caching,
            host_pages=spec.host_pages,
            staged=spec.staged,
        )
        limits = BatchLimits(
            max_num_seqs=spec.max_slots,
            max_num_batched_tokens=sizes(config, spec.mesh.devices.flat[0].platform).max_num_batched_tokens,
            max_model_len=spec.max_model_len,
            max_loras=0 if spec.lora is None else spec.lora.max_loras,
            stages=len(spec.stages),
            through_host=config.num_processes > 1,
        )
        images = None
        if spec.images is not None:
            vocab = spec.model.config.vocab_size
            images = Images(spec.images.rows, vocab, turns=spec.turns, ahead=spec.ahead)
        options = config.scheduling
        scheduler = Scheduler(
            spec.table, cache, limits, options=options, costs=self._warmed_up.costs, images=images
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
        stores, page = make_stores(options), runner.spec.page
        return PageTransfer(options, stores, names, scheduler, runner, lambda: weights.version, page)


def _with_eos_token(model: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """Adds the tokenizer's end-of-sequence token, as vLLM does, since a model's configuration may lack it."""
    token, known = None if tokenizer is None else tokenizer.eos_token_id, model.eos_token_ids
    if token is None or token >= model.vocab_size or token in known:
        return model
    return dataclasses.replace(model, eos_token_ids=(token, *known))
