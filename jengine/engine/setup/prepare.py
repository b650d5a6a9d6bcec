"""Finds and loads the model, gets its programs, and takes the devices, on every process of an engine."""

from __future__ import annotations

import dataclasses
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jengine.base.compiles import compile_count
from jengine.base.errors import InvalidArgument, OutOfMemory
from jengine.base.progress import Progress, begin
from jengine.checkpoints import read_reranker, read_sampling_defaults, read_text, resolve
from jengine.checkpoints.converted import is_converted
from jengine.checkpoints.in_memory import own_names
from jengine.core.config import EngineConfig
from jengine.core.model_options import sampling_overrides
from jengine.core.pooling import Embedder, Reranker
from jengine.core.request import SamplingParams
from jengine.engine.loop.live_weights import warm, why_not_updatable
from jengine.engine.page_events import PageNames, files_digest
from jengine.engine.page_stores import check_transfer
from jengine.engine.setup.devices import Devices, process_root
from jengine.engine.setup.model_source import ModelSource, load_weights
from jengine.engine.setup.program_set import EarlyCompilation, ProgramSet, given_programs, make_children
from jengine.engine.setup.shapes import spec_of, with_pages
from jengine.engine.setup.stages_and_ranks import prepare_ranks, refuse_stages
from jengine.execution.cache_folders import cache_limit
from jengine.execution.device_state import check_host_memory
from jengine.execution.executor import make_worker
from jengine.execution.kernels import described, fastest_formats, implementations, kernels_refused
from jengine.execution.memory import claim_gpu_memory
from jengine.execution.programs import open_cache
from jengine.execution.ranks import RanksRunner
from jengine.execution.runner import Runner
from jengine.execution.spec import ExecutionSpec
from jengine.hub.files import TOKENIZER_FILES
from jengine.parallel.link import Leader, Link
from jengine.text.tokenizer import Tokenizer, has_tokenizer
from jengine.vision.reader import ImageReader


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
        advice: the fastest quantization for the processor, see `fastest_formats`.
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
    advice: str = ""
    programs_compiled: int = 0
    programs_loaded: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    longest_step: float = 0.0

    def require_tokenizer(self) -> Tokenizer:
        """Raises ModelError if there is no tokenizer."""
        return Tokenizer.load(self.tokenizer_folder) if self.tokenizer is None else self.tokenizer


log = logging.getLogger("jengine")


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """A process's share of an engine, before its programs have run.

    Attributes:
        config: the options, completed.
        link: connects the engine's processes.
        shared: whether the caller may hold the same arrays of weights.
        page_names: names of pages, if these travel.
    """

    config: EngineConfig
    link: Link
    runner: Runner | RanksRunner
    programs: ProgramSet
    started: Started
    shared: bool
    page_names: PageNames | None


def prepare(
    config: EngineConfig,
    link: Link,
    undo: ExitStack,
    *,
    mesh: Mesh | None = None,
    params: Any = None,
    progress: Progress = True,
    offline: bool = False,
) -> EngineSetup:
    """Prepares weights and programs on this process's devices.

    Args:
        undo: gets what must be done if the start fails.
        mesh, params, progress, offline: as for `start_engine`.
    """
    compile_count()  # starts counting
    clock = time.perf_counter()
    seconds = dict[str, float]()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name], clock = now - clock, now

    begin(progress, "reading the configuration")
    prebuilt, config = given_programs(config)
    source, limit = ModelSource.find(config, params), cache_limit(config.cache_max_size)
    if params is not None or is_converted(source.folder):
        refuse_stages(config, "params" if params is not None else "a converted folder")
    claim_gpu_memory(config.gpu_memory_utilization)
    devices = Devices.take(config, link, mesh)
    config, shapes = spec_of(config, source, devices, prebuilt, offline=offline)
    if shapes.ranks > 1 and shapes.images is not None:
        raise config.refused(f"with data_parallel_size={shapes.ranks}")
    started = _facts(config, source, shapes, seconds)
    if prebuilt is not None:
        # before reading the weights, which may take minutes
        prebuilt.check(with_pages(config, shapes, devices).identity())
    lap("configuration")
    early = _compile_early(config, shapes, devices, limit)
    if early is not None:
        undo.callback(early.close)
    if config.process_id == 0 and has_tokenizer(started.tokenizer_folder):
        # before the weights, so that errors show early
        started.tokenizer = Tokenizer.load(started.tokenizer_folder, config.chat_template)
    if shapes.images is not None and (tokenizer := started.tokenizer) is not None:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        tokenizer.images = ImageReader.of(
            started.folder, encode, config.max_images, config.image_rows, config.image_processing
        )
    lap("tokenizer")
    begin(progress, "loading weights")
    text = (
        None
        if config.calibration_data is None
        else read_text(config.calibration_data, started.require_tokenizer())
    )
    root = process_root(config)
    weights = [load_weights(source, stage, text, root, limit, progress) for stage in shapes.local_stages]
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
        programs = ProgramSet(config, spec, prebuilt, limit, progress, early=early)
    started.programs = len(programs.keys)
    started.programs_compiled, started.programs_loaded = programs.compiled, programs.loaded
    lap("programs")
    names = None
    if config.kv_transfer is not None:
        check_transfer(config, config.kv_transfer, source, spec)
        calibration = [] if config.calibration_data is None else [Path(config.calibration_data)]
        names = PageNames(spec, files_digest(source.folder, calibration))
    if spec.host_pages:
        for stage in spec.local_stages:
            check_host_memory(config.swap_space, stage)
    runner = ranks or Runner(make_worker(spec, programs.programs, weights, draft, encoder), link)
    devices.agree(None)  # wait until all are ready
    if isinstance(link, Leader):
        link.watch()
    shared = source.params is not None and own_names(spec.model, source.params)
    return EngineSetup(config, link, runner, programs, started, shared, names)


def _compile_early(
    config: EngineConfig, shapes: ExecutionSpec, devices: Devices, max_bytes: int
) -> EarlyCompilation | None:
    """Begins to compile in other processes; None: this process will compile. max_bytes: of the cache of
    programs.
    """
    used = [device for mesh in devices.stages for device in mesh.devices.flat]
    children = make_children(config, used, shapes.model)
    if children is None:
        return None
    try:
        spec = with_pages(config, shapes, devices, loaded=False)
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
        source.folder if config.tokenizer is None else resolve(config.tokenizer, files=TOKENIZER_FILES),
        logprobs_mode=config.logprobs_mode,
        seconds=seconds,
    )
    if config.generation_config == "auto":
        started.default_sampling_params = read_sampling_defaults(source.folder)
    overrides = sampling_overrides(config.override_generation_config)
    started.default_sampling_params = started.default_sampling_params.clone(**overrides)
    started.reranker, started.embedder = _reranker(config, source), source.embedder
    count = sum(stage.mesh.size for stage in spec.stages)
    started.devices = f"{count} {spec.mesh.devices.flat[0].device_kind}"
    started.kernels, started.advice = described(implementations(spec)), fastest_formats(spec)
    if config.process_id == 0:
        slow = spec.mesh.devices.flat[0].platform != "cpu" and kernels_refused(spec) is not None
        log.log(logging.WARNING if slow else logging.INFO, "kernels: %s", started.kernels)
        if started.advice:
            log.info("%s", started.advice)
    started.dtype, started.quantization = str(spec.model.dtype), spec.model.quantized
    return started


def _reranker(config: EngineConfig, source: ModelSource) -> Reranker | None:
    reranker, processed = read_reranker(source.folder), config.logprobs_mode == "processed_logprobs"
    return None if reranker is None else dataclasses.replace(reranker, processed_logprobs=processed)
