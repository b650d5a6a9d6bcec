"""Starts an engine from its options: finds and loads the model, gets its programs, warms them up."""

from __future__ import annotations

import atexit
import dataclasses
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jengine.checkpoints import (
    Reranker,
    choose_embedder,
    has_output_head,
    kept_format,
    load,
    load_calibrated,
    read_config,
    read_reranker,
    read_sampling_defaults,
    read_text,
    resolve,
)
from jengine.config import EngineConfig
from jengine.devices.cpu_threads import limit_cpu_threads
from jengine.devices.device_defaults import sizes
from jengine.display import counted
from jengine.engine.engine import Engine
from jengine.engine.measure import measure
from jengine.engine.precision import choose_dtype
from jengine.engine.saved_costs import SavedCosts
from jengine.engine.shapes import describe
from jengine.errors import InvalidArgument, OutOfMemory
from jengine.execution.background import BackgroundPrograms
from jengine.execution.cache_folders import cache_limit, cache_root, saved_page_counts
from jengine.execution.host_store import check_host_memory
from jengine.execution.kernel_objects import keep_kernels
from jengine.execution.memory import check_room, claim_gpu_memory, pages_that_fit, pages_to_use
from jengine.execution.prebuilt_programs import PrebuiltPrograms
from jengine.execution.product_forms import product_forms, with_forms
from jengine.execution.programs import Programs, first_keys, open_cache, program_keys, running
from jengine.execution.runner import Runner
from jengine.execution.spec import ExecutionSpec
from jengine.execution.worker import Worker, decode
from jengine.model_config import ModelConfig
from jengine.models.cache import paged
from jengine.observe.compiles import compile_count
from jengine.observe.engines import engines
from jengine.observe.progress import Progress, begin
from jengine.observe.recorder import TraceRecorder
from jengine.parallel.link import Follower, Leader, Link, SingleProcess, host_of, join
from jengine.parallel.mesh import make_mesh
from jengine.pooling import Embedder
from jengine.request import SamplingParams
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.options import SchedulingOptions
from jengine.scheduling.pages.block_table import GroupPages
from jengine.scheduling.scheduler import Scheduler
from jengine.table.ready_programs import ReadyPrograms
from jengine.text.tokenizer import Tokenizer, has_tokenizer
from pallas_kernels.devices import cpu_refused


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
        devices: their kind and number.
        programs: number of programs in the table. With warm_up="progressive", some are not ready yet.
        kernels: on a CPU, the form of the programs' products, by dtypes and number of rows.
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
    devices: str = ""
    programs: int = 0
    kernels: dict[str, str] = field(default_factory=dict)
    programs_compiled: int = 0
    programs_loaded: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    longest_step: float = 0.0

    def require_tokenizer(self) -> Tokenizer:
        """Raises ModelError if there is no tokenizer."""
        return Tokenizer.load(self.tokenizer_folder) if self.tokenizer is None else self.tokenizer


def start_engine(config: EngineConfig, *, progress: Progress = True) -> tuple[Engine, Started]:
    """Does everything that comes before the first request. Adds the tokenizer's end-of-sequence token to the model's.

    Args:
        progress: whether to show progress bars on a terminal; a function is called with the progress as well.

    Raises:
        InvalidArgument: the model or device does not support an option.
        ModelError: the model cannot be read, or is not supported.
        OutOfMemory: the device is too small.
        EngineDead: another process of the engine ended.
    """
    others = len(engines())
    try:
        return _start(config, progress)
    except OutOfMemory as full:
        if not others:
            raise
        what = f"{counted(others, 'other engine')} of this process may hold memory of the device: close() it first"
        raise OutOfMemory(f"{full}; {what}") from full


def _start(config: EngineConfig, progress: Progress) -> tuple[Engine, Started]:
    if config.process_id > 0:
        raise InvalidArgument("process_id", config.process_id, "only process 0 takes requests; the others call jengine.follow")
    link = _connected(config)
    worker, started = _prepare(config, link, progress)
    spec, programs = worker.spec, worker.programs
    runner = Runner(worker, link)
    clock = time.perf_counter()
    keys = program_keys(spec)
    ready = ReadyPrograms(spec.table, [key for key in keys if key in programs and not isinstance(key, str)])
    saved = SavedCosts(process_root(config), spec.fingerprint())
    costs = saved.load(spec.table) or StepCosts(spec.table)
    unmeasured = any(key not in costs.known for key in ready.trunks()) or (spec.host_pages and costs.swaps is None)
    if programs.compiled or unmeasured:
        runner.warm_up(ready, progress=progress, ran=measure(runner, ready, costs, progress=progress))
        saved.save(costs)
    else:
        runner.check(ready)
    started.seconds["warm-up"] = time.perf_counter() - clock
    started.longest_step = costs.longest_step
    scheduler = Scheduler(
        spec.table,
        page_size=spec.page_size,
        num_pages=spec.num_pages,
        max_num_seqs=spec.max_slots,
        max_num_batched_tokens=sizes(config, spec.mesh.devices.flat[0].platform).max_num_batched_tokens,
        max_model_len=spec.max_model_len,
        groups=[GroupPages(group.window, group.pool) for group in paged(spec.groups)],
        num_states=spec.num_states,
        prefix_caching=config.enable_prefix_caching,
        host_pages=spec.host_pages,
        staged=spec.staged,
        options=SchedulingOptions.of(config),
        costs=costs,
    )
    scheduler.predictor.ready = ready
    model = _with_eos_token(spec.model.config, started.tokenizer)
    coming = _others(programs, link, config) if len(keys) > started.programs_compiled + started.programs_loaded else None
    engine = Engine(
        model,
        runner,
        scheduler,
        overlap=config.overlap,
        seed=config.seed,
        num_programs=len(keys),
        programs=coming,
        save_costs=partial(saved.update, costs),
        recorder=None if config.record_trace is None else TraceRecorder(config.record_trace),
        embedder=started.embedder,
    )
    return engine, started


def process_root(config: EngineConfig) -> Path:
    """The root folder of the cache. If an engine has several processes, each has its own."""
    root = cache_root(config.cache_dir)
    return root / f"process-{config.process_id}-of-{config.num_processes}" if config.num_processes > 1 else root


def _others(programs: Programs, link: Link, config: EngineConfig) -> BackgroundPrograms:
    """Obtains the programs that are not ready yet, in the background."""
    threads = sizes(config, programs.spec.mesh.devices.flat[0].platform).compile_threads
    return BackgroundPrograms(programs, program_keys(programs.spec), link, threads=max(threads // 2, 1))


def _with_eos_token(model: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """Adds the tokenizer's end-of-sequence token, as vLLM does, since a model's configuration may lack it."""
    token, known = None if tokenizer is None else tokenizer.eos_token_id, model.eos_token_ids
    if token is None or token >= model.vocab_size or token in known:
        return model
    return dataclasses.replace(model, eos_token_ids=(token, *known))


def follow(config: EngineConfig, *, progress: Progress = True) -> None:
    """Runs every process but the first: repeats the calls of process 0 until that ends.

    Raises:
        EngineDead: process 0 ended unexpectedly.
        Others: as start_engine.
    """
    if not 0 < config.process_id < config.num_processes:
        raise InvalidArgument("process_id", config.process_id, "process 0 takes requests and cannot follow")
    link = _connected(config)
    assert isinstance(link, Follower)
    worker, started = _prepare(config, link, progress)
    if started.programs > started.programs_compiled + started.programs_loaded:
        _others(worker.programs, link, config)
    while frame := link.heard():
        worker.execute(decode(frame))


def _connected(config: EngineConfig) -> Link:
    limit_cpu_threads(config.cpu_threads)
    if config.num_processes == 1:
        return SingleProcess()
    assert config.coordinator is not None  # as EngineConfig checks
    claim_gpu_memory(config.gpu_memory_utilization)
    join(config.coordinator, config.num_processes, config.process_id)
    if jax.device_count() != config.tensor_parallel_size:
        limit = f"must be {jax.device_count()}, all devices of the {config.num_processes} processes"
        raise InvalidArgument("tensor_parallel_size", config.tensor_parallel_size, limit)
    host = host_of(config.coordinator)
    link = Leader(host, config.num_processes) if config.process_id == 0 else Follower(host, config.process_id)
    atexit.register(link.close)
    return link


def _prepare(config: EngineConfig, link: Link, progress: Progress) -> tuple[Worker, Started]:
    """Prepares weights and programs on this process's devices."""
    compile_count()  # starts counting
    clock = time.perf_counter()
    begin(progress, "reading the configuration")
    folder = resolve(config.model, config.revision)
    started = Started(folder, folder if config.tokenizer is None else resolve(config.tokenizer))

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        started.seconds[name], clock = now - clock, now

    given = None if config.programs is None else PrebuiltPrograms(Path(config.programs))
    config = config if given is None else given.complete(config)
    if config.generation_config == "auto":
        started.default_sampling_params = read_sampling_defaults(started.folder)
    started.reranker = read_reranker(started.folder)
    claim_gpu_memory(config.gpu_memory_utilization)
    root, limit = process_root(config), cache_limit(config.cache_max_size)
    config, started.embedder, shapes = _describe(config, started.folder, link, given)
    mesh = shapes.mesh
    started.devices = f"{mesh.devices.size} {mesh.devices.flat[0].device_kind}"
    started.kernels = dict(shapes.product_forms)
    started.dtype, started.quantization = str(shapes.model.dtype), shapes.model.quantized
    if given is not None:
        given.check(_with_pages(config, shapes, root, link).identity())  # before reading the weights, which may take minutes
    lap("configuration")
    if config.process_id == 0 and has_tokenizer(started.tokenizer_folder):
        started.tokenizer = Tokenizer.load(started.tokenizer_folder, config.chat_template)  # before the weights, so that errors show early
    lap("tokenizer")
    begin(progress, "loading weights")
    if config.calibration_data is None:
        params = load(started.folder, shapes.model, mesh, progress=progress)
    else:
        params = load_calibrated(
            started.folder, shapes.model, mesh, read_text(config.calibration_data, started.require_tokenizer()), progress
        )
    lap("weights")
    begin(progress, "loading programs")
    spec = _with_pages(config, shapes, root, link)
    link.agree(f"{spec.fingerprint()} {spec.host_pages}", partial(_same, "config", "options, versions or models differ"))
    store = given or open_cache(spec, root, limit, wait=config.num_processes == 1)
    threads = sizes(config, mesh.devices.flat[0].platform).compile_threads
    first = first_keys(spec) if config.warm_up == "progressive" and given is None else None
    programs = Programs(spec, store, threads=threads, progress=progress, first=first)
    started.programs, started.programs_compiled, started.programs_loaded = len(program_keys(spec)), programs.compiled, programs.loaded
    if given is not None:
        check_room(spec, running(programs.memory))
    lap("programs")
    if spec.host_pages:
        check_host_memory(config.swap_space, spec)
    worker = Worker(spec, programs, params)
    link.agree(None, _first)  # wait until all are ready
    if isinstance(link, Leader):
        link.watch()
    return worker, started


def _describe(
    config: EngineConfig, folder: Path, link: Link, given: PrebuiltPrograms | None
) -> tuple[EngineConfig, Embedder | None, ExecutionSpec]:
    """The options with a dtype, how the model embeds, and everything that programs depend on except the number of pages."""
    model, mesh, root = read_config(folder), make_mesh(config.tensor_parallel_size), process_root(config)
    if mesh.local_devices[0].platform == "cpu" and cpu_refused() is None:
        keep_kernels(root)
    embedder = choose_embedder(config.embeddings, folder, model.hidden_size)
    if embedder is not None and not has_output_head(folder, model):
        embedder = dataclasses.replace(embedder, generates=False)
        model = dataclasses.replace(model, tie_embeddings=True)  # tokens sampled for embedding requests are not used
    quantization: Any = kept_format(config.quantization, folder)
    config = dataclasses.replace(config, embeddings=embedder is not None, quantization=quantization)
    dtype: Any = link.agree(str(jnp.dtype(choose_dtype(config.dtype, model, mesh.local_devices[0], root))), _first)
    config = dataclasses.replace(config, dtype=dtype)
    shapes = describe(config, model, mesh, root)
    forms = dict(link.agree(product_forms(shapes, root) if given is None else given.product_forms, _first))
    return config, embedder, with_forms(shapes, forms)


def describe_engine(config: EngineConfig) -> tuple[EngineConfig, ExecutionSpec]:
    """The options with a dtype, and everything that programs depend on except the number of pages. Loads and
    compiles nothing.

    Raises the errors of `start_engine`.
    """
    limit_cpu_threads(config.cpu_threads)
    given = None if config.programs is None else PrebuiltPrograms(Path(config.programs))
    config = config if given is None else given.complete(config)
    config, _, spec = _describe(config, resolve(config.model, config.revision), SingleProcess(), given)
    return config, spec


def saved_costs(config: EngineConfig, spec: ExecutionSpec) -> StepCosts | None:
    """Step costs that engines with these options have measured on this machine; None if there are none.

    Args:
        config, spec: as returned by `describe_engine`.
    """
    return SavedCosts(process_root(config), spec.fingerprint()).load(spec.table)


def _first(values: list[Any]) -> Any:
    return values[0]


def _same(field: str, reason: str, values: list[Any]) -> Any:
    for process, value in enumerate(values):
        if value != values[0]:
            raise InvalidArgument(field, value, f"process {process} differs from process 0: {reason}")
    return values[0]


def _with_pages(config: EngineConfig, spec: ExecutionSpec, root: Path, link: Link) -> ExecutionSpec:
    fit = pages_that_fit(config, spec)
    chosen = config.num_pages is not None or config.kv_cache_memory is not None or spec.mesh.devices.flat[0].platform == "cpu"
    wanted = fit if chosen else pages_to_use(fit, saved_page_counts(root, spec.fingerprint()))
    return dataclasses.replace(spec, num_pages=link.agree(wanted, min))
