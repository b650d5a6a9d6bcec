"""Starts an engine from its options: finds and loads the model, gets its programs, warms them up."""

from __future__ import annotations

import dataclasses
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jengine.base.compiles import compile_count
from jengine.base.display import counted
from jengine.base.errors import InvalidArgument, OutOfMemory
from jengine.base.progress import Progress, begin
from jengine.checkpoints import read_reranker, read_sampling_defaults, read_text, resolve
from jengine.checkpoints.converted import is_converted
from jengine.checkpoints.own_tree import own_names
from jengine.core.config import EngineConfig
from jengine.core.pooling import Embedder, Reranker
from jengine.core.request import SamplingParams
from jengine.core.scheduling_options import SchedulingOptions
from jengine.devices.device_defaults import sizes
from jengine.engine.adapter_store import AdapterStore
from jengine.engine.devices import Devices, connect
from jengine.engine.early_compilation import EarlyCompilation, make_children
from jengine.engine.engine import Engine
from jengine.engine.first_use import FirstUse
from jengine.engine.live_weights import FixedWeights, LiveWeights, warm, why_not_updatable
from jengine.engine.model_source import ModelSource
from jengine.engine.page_event_publisher import PageEventPublisher
from jengine.engine.page_events import EventMaker, Group
from jengine.engine.page_names import PageNames
from jengine.engine.page_stores import check_transfer, make_stores, weights_digest
from jengine.engine.page_transfer import PageTransfer
from jengine.engine.pipeline_shapes import refuse_stages
from jengine.engine.program_set import ProgramSet, WarmedUp, given_programs
from jengine.engine.rank_start import check_ranks, check_spec, prepare_ranks
from jengine.engine.ranks import AnyEngine, RankedEngine
from jengine.engine.shapes import spec_of, with_expected_pages, with_pages
from jengine.execution.background import BackgroundPrograms
from jengine.execution.cache_folders import cache_limit
from jengine.execution.executor import make_worker
from jengine.execution.host_store import check_host_memory
from jengine.execution.kernels import described, implementations, kernels_refused
from jengine.execution.memory import claim_gpu_memory
from jengine.execution.pipeline import Pipeline, answers
from jengine.execution.programs import open_cache
from jengine.execution.ranks import RanksRunner
from jengine.execution.results import ResultSender
from jengine.execution.runner import Runner
from jengine.execution.spec import ExecutionSpec
from jengine.execution.worker import Worker, decode
from jengine.insight.recording.engines import engines
from jengine.insight.recording.recorder import TraceRecorder
from jengine.models.cache import paged
from jengine.models.config import ModelConfig
from jengine.parallel.link import END, Follower, Leader, Link
from jengine.scheduling.pages.block_table import GroupPages
from jengine.scheduling.requests.images import Images
from jengine.scheduling.scheduler import Scheduler
from jengine.text.tokenizer import Tokenizer, has_tokenizer
from jengine.vision.reader import ImageReader

log = logging.getLogger("jengine")


@dataclass(slots=True)
class Started:
    """Results of the start.

    Attributes:
        folder: the model's folder.
        tokenizer_folder: the folder of its tokenizer.
        tokenizer: None if that folder has none.
        default_sampling_params: for requests that set none.
        embedder: how the model embeds; None: there are no programs for embeddings.
        reranker: how the model scores pairs of texts, if its folder says so.
        dtype: of weights, activations and cache, unless they are quantized.
        quantization: number format of quantized weights, see `Model.quantized`; "" if they are not quantized.
        logprobs_mode: see EngineConfig.
        devices: their kind and number.
        programs: number of programs in the table. With warm_up="progressive", some are not ready yet.
        kernels: which implementation serves each operation, and why not the newest one for such devices.
        seconds: duration of each part of the start, in order.
        longest_step: seconds of the most expensive measured step, at short contexts.
    """

    folder: Path
    tokenizer_folder: Path
    tokenizer: Tokenizer | None = None
    default_sampling_params: SamplingParams = field(default_factory=SamplingParams)
    embedder: Embedder | None = None
    reranker: Reranker | None = None
    dtype: str = ""
    quantization: str = ""
    logprobs_mode: str = "raw_logprobs"
    devices: str = ""
    programs: int = 0
    kernels: str = ""
    programs_compiled: int = 0
    programs_loaded: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    longest_step: float = 0.0

    def require_tokenizer(self) -> Tokenizer:
        """Raises ModelError if there is no tokenizer."""
        return Tokenizer.load(self.tokenizer_folder) if self.tokenizer is None else self.tokenizer


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
        with ExitStack() as undo, jax.set_mesh(None):  # the caller's context may have another mesh
            started = _start(config, mesh, params, progress, offline, undo)
            undo.pop_all()
            return started
    except OutOfMemory as full:
        if not others:
            raise
        what = (
            f"{counted(others, 'other engine')} of this process may hold memory of the device: close() it"
            " first"
        )
        raise OutOfMemory(f"{full}; {what}") from full


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
        _, runner, programs, *_ = _prepare(config, link, None, None, progress, undo, offline=False)
        undo.pop_all()
    programs.obtain_others(link)
    worker, sender = runner.worker, ResultSender(link.send_result)
    for number, frame in enumerate(iter(link.heard, END), 1):
        call = decode(frame)
        result = worker.execute(call)
        if isinstance(worker, Pipeline) and worker.sends_results and answers(call):
            sender.put(number, result)


def _start(
    config: EngineConfig,
    mesh: Mesh | None,
    params: Any,
    progress: Progress,
    offline: bool,
    undo: ExitStack,
) -> tuple[AnyEngine, Started]:
    if config.process_id > 0:
        raise InvalidArgument(
            "process_id", config.process_id, "only process 0 takes requests; the others call jengine.follow"
        )
    for name, given in (("mesh", mesh), ("params", params)):
        if given is not None and config.num_processes > 1:
            raise InvalidArgument(
                name, type(given).__name__, f"must be None with num_processes={config.num_processes}"
            )
    check_ranks(config, mesh)
    link = connect(config)
    config, runner, programs, started, shared, names = _prepare(
        config, link, mesh, params, progress, undo, offline=offline
    )
    worker, spec = runner.worker, runner.spec
    weights = (
        LiveWeights(started.folder, spec, worker.state, shared=shared)
        if config.weight_updates and isinstance(worker, Worker)
        else FixedWeights(spec.params, shared=shared)
    )
    clock = time.perf_counter()
    warmed_up = programs.warm_up(runner, progress)
    started.seconds["warm-up"] = time.perf_counter() - clock
    started.longest_step = warmed_up.costs.longest_step
    begin_engine = partial(_engine, config, started, warmed_up, weights, names, programs.obtain_others(link))
    if isinstance(runner, RanksRunner):
        return RankedEngine(
            [begin_engine(one, rank) for rank, one in enumerate(runner.runners)], runner
        ), started
    return begin_engine(runner), started


def _engine(
    config: EngineConfig,
    started: Started,
    warmed_up: WarmedUp,
    weights: FixedWeights,
    names: PageNames | None,
    others: BackgroundPrograms | None,
    runner: Runner,
    rank: int = 0,
) -> Engine:
    """The engine of a rank, or of all devices.

    Args:
        others: programs that are not ready yet.
    """
    spec, scheduler = runner.spec, _scheduler(config, runner.spec, warmed_up)
    model = _with_eos_token(spec.model.config, started.tokenizer)
    if started.tokenizer is not None:
        started.tokenizer.model_eos_token_ids = model.eos_token_ids
    return Engine(
        model,
        runner,
        scheduler,
        overlap=config.overlap,
        seed=config.seed + rank,
        num_programs=started.programs,
        programs=others if others is None or runner.on_host else FirstUse(others, runner, warmed_up.used),
        save_costs=warmed_up.save_costs if rank == 0 else None,
        recorder=None if config.record_trace is None else TraceRecorder(config.record_trace),
        embedder=started.embedder,
        reranker=started.reranker,
        weights=weights,
        adapters=None
        if spec.adapters is None or spec.lora is None
        else AdapterStore(spec.adapters, spec.lora, scheduler.registry.adapters),
        page_events=_page_events(config, spec, scheduler, started.tokenizer),
        pages=_page_transfer(config, names, runner, scheduler, weights),
    )


def _prepare(
    config: EngineConfig,
    link: Link,
    mesh: Mesh | None,
    params: Any,
    progress: Progress,
    undo: ExitStack,
    *,
    offline: bool,
) -> tuple[EngineConfig, Runner, ProgramSet, Started, bool, PageNames | None]:
    """Prepares weights and programs on this process's devices. Returns the completed options first, and last
    whether the caller may hold the same arrays, and names of pages if these travel.

    Args:
        undo: gets what must be done if the start fails.
    """
    compile_count()  # starts counting
    clock = time.perf_counter()
    seconds = dict[str, float]()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name], clock = now - clock, now

    begin(progress, "reading the configuration")
    given, config = given_programs(config)
    source, limit = ModelSource.find(config, params), cache_limit(config.cache_max_size)
    if params is not None or is_converted(source.folder):
        refuse_stages(config, "params" if params is not None else "a converted folder")
    claim_gpu_memory(config.gpu_memory_utilization)
    devices = Devices.take(config, link, mesh)
    config, shapes = spec_of(config, source, devices, given, offline=offline)
    check_spec(config, shapes)
    started = _facts(config, source, shapes, seconds)
    if given is not None:
        # before reading the weights, which may take minutes
        given.check(with_pages(config, shapes, devices).identity())
    lap("configuration")
    early = _compile_early(config, shapes, devices, limit)
    if early is not None:
        undo.callback(early.close)
    if config.process_id == 0 and has_tokenizer(started.tokenizer_folder):
        # before the weights, so that errors show early
        started.tokenizer = Tokenizer.load(started.tokenizer_folder, config.chat_template)
    if shapes.images is not None and (tokenizer := started.tokenizer) is not None:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        how = config.max_images, config.image_rows, config.image_processing
        tokenizer.images = ImageReader.of(started.folder, encode, *how)
    lap("tokenizer")
    begin(progress, "loading weights")
    text = (
        None
        if config.calibration_data is None
        else read_text(config.calibration_data, started.require_tokenizer())
    )
    weights = [source.load(stage, text, progress) for stage in shapes.local_stages]
    draft, encoder = source.load_draft(shapes, weights[0], progress), source.load_encoder(shapes)
    if config.weight_updates:
        why = why_not_updatable(shapes.model, source, config.num_processes)
        if why is not None:
            raise InvalidArgument("weight_updates", True, why)
        warm(shapes)
    lap("weights")
    begin(progress, "loading programs")
    spec = with_pages(config, shapes, devices, None if early is None else early.num_pages)
    link.agree(f"{spec.fingerprint()} {spec.host_pages}", _same)
    ranks: RanksRunner | None = None
    if spec.ranks > 1:
        ranks, programs = prepare_ranks(config, spec, weights, limit, progress, early)
    else:
        programs = ProgramSet(config, spec, given, limit, progress, early=early)
    started.programs, started.programs_compiled, started.programs_loaded = (
        len(programs.keys),
        programs.compiled,
        programs.loaded,
    )
    lap("programs")
    names = None
    if config.kv_transfer is not None:
        check_transfer(config, config.kv_transfer, source, spec)
        names = PageNames(spec, weights_digest(config, source))
    if spec.host_pages:
        for stage in spec.local_stages:
            check_host_memory(config.swap_space, stage)
    runner = ranks or Runner(make_worker(spec, programs.programs, weights, draft, encoder), link)
    devices.agree(None)  # wait until all are ready
    if isinstance(link, Leader):
        link.watch()
    shared = source.params is not None and own_names(spec.model, source.params)
    return config, runner, programs, started, shared, names


def _compile_early(
    config: EngineConfig, shapes: ExecutionSpec, devices: Devices, max_bytes: int
) -> EarlyCompilation | None:
    """Begins to compile in other processes; None: this process will compile.

    Args:
        max_bytes: of the cache of programs.
    """
    children = make_children(config, [one for mesh in devices.stages for one in mesh.devices.flat])
    if children is None:
        return None
    try:
        spec = with_expected_pages(config, shapes, devices)
    except OutOfMemory:  # the weights decide
        return None
    return EarlyCompilation(config, spec, children, open_cache(spec, devices.root, max_bytes))


def _same(values: list[str]) -> str:
    for process, value in enumerate(values):
        if value != values[0]:
            reason = f"process {process} differs from process 0: options, versions or models differ"
            raise InvalidArgument("config", value, reason)
    return values[0]


def _facts(
    config: EngineConfig, source: ModelSource, spec: ExecutionSpec, seconds: dict[str, float]
) -> Started:
    """What is known before the weights are read."""
    started = Started(
        source.folder,
        source.folder if config.tokenizer is None else resolve(config.tokenizer),
        logprobs_mode=config.logprobs_mode,
        seconds=seconds,
    )
    if config.generation_config == "auto":
        started.default_sampling_params = read_sampling_defaults(source.folder)
    started.reranker, started.embedder = _reranker(config, source), source.embedder
    count = sum(stage.mesh.size for stage in spec.stages)
    started.devices = f"{count} {spec.mesh.devices.flat[0].device_kind}"
    started.kernels = described(implementations(spec))
    if config.process_id == 0:
        slow = spec.mesh.devices.flat[0].platform != "cpu" and kernels_refused(spec) is not None
        log.log(logging.WARNING if slow else logging.INFO, "kernels: %s", started.kernels)
    started.dtype, started.quantization = str(spec.model.dtype), spec.model.quantized
    return started


def _scheduler(config: EngineConfig, spec: ExecutionSpec, warmed_up: WarmedUp) -> Scheduler:
    scheduler = Scheduler(
        spec.table,
        page_size=spec.page_size,
        num_pages=spec.num_pages,
        max_num_seqs=spec.max_slots,
        max_num_batched_tokens=sizes(config, spec.mesh.devices.flat[0].platform).max_num_batched_tokens,
        max_model_len=spec.max_model_len,
        groups=[GroupPages(group.window, group.pool) for group in paged(spec.groups)],
        num_states=spec.num_states,
        draft_states=spec.draft_states,
        prefix_caching=config.enable_prefix_caching,
        host_pages=spec.host_pages,
        staged=spec.staged,
        stages=len(spec.stages),
        through_host=config.num_processes > 1,
        max_loras=0 if spec.lora is None else spec.lora.max_loras,
        images=None
        if spec.images is None
        else Images(
            spec.images.rows,
            spec.model.config.vocab_size,
            turns=spec.turns,
            ahead=spec.ahead,
        ),
        options=SchedulingOptions.of(config),
        costs=warmed_up.costs,
    )
    scheduler.predictor.ready = warmed_up.ready
    return scheduler


def _page_events(
    config: EngineConfig, spec: ExecutionSpec, scheduler: Scheduler, tokenizer: Tokenizer | None
) -> PageEventPublisher | None:
    how = config.page_events
    if how is None:
        return None
    images = None if tokenizer is None else tokenizer.images
    token = 0 if images is None else images.vision.row_token
    publisher = PageEventPublisher(how, EventMaker(spec.page_size, [*map(Group.of, spec.groups)], token))
    scheduler.blocks.watch(publisher.note)
    return publisher


def _page_transfer(
    config: EngineConfig, names: PageNames | None, runner: Runner, scheduler: Scheduler, weights: FixedWeights
) -> PageTransfer | None:
    how = config.kv_transfer
    if how is None or names is None:
        return None
    stores = make_stores(how)
    return PageTransfer(how, stores, names, scheduler, runner, lambda: weights.version, runner.spec.page)


def _reranker(config: EngineConfig, source: ModelSource) -> Reranker | None:
    found, processed = read_reranker(source.folder), config.logprobs_mode == "processed_logprobs"
    return None if found is None else dataclasses.replace(found, processed_logprobs=processed)


def _with_eos_token(model: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """Adds the tokenizer's end-of-sequence token, as vLLM does, since a model's configuration may lack it."""
    token, known = None if tokenizer is None else tokenizer.eos_token_id, model.eos_token_ids
    if token is None or token >= model.vocab_size or token in known:
        return model
    return dataclasses.replace(model, eos_token_ids=(token, *known))
