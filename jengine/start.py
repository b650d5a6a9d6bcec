"""From options to a running engine: find the model, load it, get its programs, warm them up."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jengine.checkpoints import load, read_config, resolve
from jengine.config import EngineConfig, ModelConfig
from jengine.engine import Engine
from jengine.errors import InvalidArgument
from jengine.execution.memory import claim_gpu_memory, pages_that_fit, pages_to_use
from jengine.execution.program_store import default_root, saved_page_counts
from jengine.execution.programs import Programs, open_store
from jengine.execution.runner import Runner
from jengine.execution.spec import ExecutionSpec
from jengine.models import Model, build
from jengine.observe.compiles import compile_count
from jengine.parallel.mesh import make_mesh
from jengine.precision import CACHE_DTYPES, check_formats, choose_dtype
from jengine.program_table import ProgramTable
from jengine.scheduling.costs import StepCosts
from jengine.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class Started:
    """What the start found and took.

    Attributes:
        folder: the model's.
        tokenizer_folder: where its tokenizer is.
        dtype: of weights, activations and cache, where they are not quantized.
        devices: how many of which kind.
        seconds: by part, in order.
    """

    folder: Path
    tokenizer_folder: Path
    dtype: str = ""
    devices: str = ""
    programs_compiled: int = 0
    programs_loaded: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def start_engine(config: EngineConfig, *, progress: bool = True) -> tuple[Engine, Started]:
    """Everything that comes before the first request.

    Raises:
        InvalidArgument: an option that this model or device cannot meet.
        ModelError: the model cannot be read, or is not supported.
        OutOfMemory: the device is too small.
    """
    compile_count()  # starts counting
    clock = time.perf_counter()
    folder = resolve(config.model, config.revision)
    started = Started(folder, folder if config.tokenizer is None else resolve(config.tokenizer))

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        started.seconds[name], clock = now - clock, now

    facts = read_config(started.folder)
    claim_gpu_memory(config.gpu_memory_utilization)
    mesh = make_mesh(config.tensor_parallel_size)
    max_model_len = _max_model_len(config, facts)
    started.devices = f"{mesh.devices.size} {mesh.devices.flat[0].device_kind}"
    root = Path(config.cache_dir) if config.cache_dir is not None else default_root()
    device = mesh.devices.flat[0]
    check_formats(config, device)
    dtype = choose_dtype(config.dtype, facts, device, root)
    model = build(facts, dtype, max_model_len, config.quantization, config.tensor_parallel_size)
    started.dtype = str(model.dtype)
    lap("configuration")
    params = load(started.folder, model, mesh, progress=progress)
    lap("weights")
    spec = _spec(config, model, mesh, max_model_len, root)
    programs = Programs(spec, open_store(spec, root), threads=config.compile_threads, progress=progress)
    started.programs_compiled, started.programs_loaded = programs.compiled, programs.loaded
    lap("programs")
    runner = Runner(spec, programs, params)
    if programs.compiled:
        runner.warm_up(progress=progress)
        programs.save()
    else:
        runner.check()
    lap("warm-up")
    scheduler = Scheduler(
        spec.table,
        page_size=spec.page_size,
        num_pages=spec.num_pages,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=config.policy,
        costs=StepCosts(runner.trunk_costs()),
    )
    return Engine(facts, runner, scheduler, overlap=config.overlap, seed=config.seed), started


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_position
    longest, rope = float(model.max_position), model.rope_scaling
    if rope is not None:
        longest = math.inf if rope.kind == "dynamic" else max(longest, rope.factor * rope.original_max_position)
    if config.max_model_len > longest:
        raise InvalidArgument("max_model_len", config.max_model_len, f"the model's positions end at {longest:.0f}")
    return config.max_model_len


def _spec(config: EngineConfig, model: Model, mesh: jax.sharding.Mesh, max_model_len: int, root: Path) -> ExecutionSpec:
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    page_size = config.page_size or (16 if on_cpu else 64)
    table = ProgramTable.build(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tile_size=config.tile_size,
        page_buckets=(0,) if on_cpu else page_buckets(-(-max_model_len // page_size)),
    )
    spec = ExecutionSpec(
        model=model,
        mesh=mesh,
        table=table,
        max_model_len=max_model_len,
        max_slots=config.max_num_seqs,
        page_size=page_size,
        num_pages=0,
        kv_cache_dtype=CACHE_DTYPES[config.kv_cache_dtype],
    )
    fit = pages_that_fit(config, spec)
    chosen = config.num_pages is not None or config.kv_cache_memory is not None or on_cpu
    return dataclasses.replace(spec, num_pages=fit if chosen else pages_to_use(fit, saved_page_counts(root, spec.fingerprint())))


def page_buckets(width: int) -> tuple[int, ...]:
    """Static page counts for XLA attention on a GPU: fourfold steps up to the table's width."""
    buckets = [width]
    while buckets[-1] > 32:
        buckets.append(-(-buckets[-1] // 4))
    return tuple(reversed(buckets))
