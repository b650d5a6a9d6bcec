"""Derives the shapes of every program from options, a model and devices."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jengine.base.errors import InvalidArgument, ModelError
from jengine.checkpoints.calibration import check_stateless, check_unconverted
from jengine.core.config import EngineConfig
from jengine.core.device_options import check_pipeline
from jengine.core.scheduling_options import BURST_STEPS
from jengine.core.speculation import AUTO, NAME, Speculation
from jengine.devices.device_defaults import PROMPT_TOKENS, Sizes, limit_cpu_threads, sizes
from jengine.engine.setup.devices import Devices
from jengine.engine.setup.model_source import ModelSource, build_draft, with_draft
from jengine.engine.setup.precision import CACHE_DTYPES, check_formats, choose_dtype, multiplies_fp8
from jengine.engine.setup.program_set import given_programs
from jengine.engine.setup.stages_and_ranks import with_stages
from jengine.execution.cache_folders import saved_page_counts
from jengine.execution.images import ImageShapes
from jengine.execution.kernels import decode_refused, kernels_refused, product_forms, with_forms
from jengine.execution.memory import device_bytes, pages_that_fit, pages_to_use
from jengine.execution.program_store import PrebuiltPrograms
from jengine.execution.spec import ExecutionSpec, why_not_batch_invariant
from jengine.models import FAMILIES, Model, build
from jengine.models.cache import paged
from jengine.models.config import ModelConfig
from jengine.models.quantized import format_of
from jengine.parallel.collectives import TENSOR
from jengine.parallel.link import SingleProcess
from jengine.scheduling.shape import BatchLimits, CacheShape
from jengine.table.program_table import ProgramTable
from jengine.vision.declared import Encoder
from jengine.vision.family import RowEncoder
from pallas_kernels.devices import cpu_refused
from pallas_kernels.products.dispatch import why_product_unsupported
from pallas_kernels.products.quantize_rows import ROW_QUANTIZATION
from pallas_kernels.products.weights import abstract
from pallas_kernels.quantization.formats import FP8
from pallas_kernels.quantization.int4 import GROUPS, TILE
from pallas_kernels.targets import why_none

MOST_ROWS = 16384  # embeddings in the pool, unless the options say otherwise
FEWEST_PATCHES = 256  # of a bucket, unless no part has as many
PACKED = 4  # parts of a bucket, if all parts have the same size
log = logging.getLogger("jengine")
SNAPSHOTS = 4  # running sequences per snapshot
FEWEST_SNAPSHOTS = 16
DRAFTED = 8  # running sequences per state for drafts
FEWEST_DRAFTED = 16
SLACK = 1  # percent of the weights' bytes that devices may need beside them


def with_images(config: EngineConfig, spec: ExecutionSpec, vision: RowEncoder) -> ExecutionSpec:
    """The spec with the encoder's programs.

    Raises:
        InvalidArgument: an option does not work with images, or with the model, or the pool is too small.
    """
    if spec.draft is not None:
        what = 'images; limit_mm_per_prompt={"image": 0} serves text alone'
        what = "enable_prompt_embeds" if config.enable_prompt_embeds else what
        raise InvalidArgument(NAME, spec.draft.config.family, f"no draft model or head with {what}")
    if config.enable_prompt_embeds and not spec.model.takes_embeddings:
        limit = f"must be False: {type(spec.model.module).__name__} does not set takes_embeddings, see Model"
        raise InvalidArgument("enable_prompt_embeds", True, limit)
    part, rows = vision.largest // vision.patches_per_row, config.image_pool_rows
    if rows is not None and rows < part:
        raise InvalidArgument("image_pool_rows", rows, f"must be at least {part}, as the largest part has")
    if rows is None:
        rows = max(min(spec.max_model_len, MOST_ROWS), min(vision.most_rows, MOST_ROWS), part)
    encoder, model = Encoder.of(vision, spec.model.dtype), spec.model
    if model.text_part is not None and not config.enable_prompt_embeds:
        model = dataclasses.replace(model, text_part=dataclasses.replace(model.text_part, why=""))
    buckets = encoder_buckets(vision.smallest, vision.largest, single=config.batch_invariant)
    table = dataclasses.replace(spec.table, encoders=buckets)
    return dataclasses.replace(
        spec,
        model=model,
        table=with_whole(config, spec, table, part) if vision.ahead else table,
        images=ImageShapes(encoder, spec.mesh, rows, model.config.hidden_size),
    )


def with_whole(config: EngineConfig, spec: ExecutionSpec, table: ProgramTable, rows: int) -> ProgramTable:
    """The table for images, or prompts, whose tokens see each other: a step can hold `rows` of them.

    Raises:
        InvalidArgument: it cannot.
    """
    size = table.tile_size
    tiles, name = -(-rows // size), "max_num_batched_tokens"
    least, budget = (
        spec.max_slots + tiles * size,
        getattr(sizes(config, spec.mesh.devices.flat[0].platform), name),
    )
    if budget < least:
        limit = f"must be at least {least}: {spec.max_slots} rows, and the {rows} tokens of an image in tiles"
        raise InvalidArgument(name, budget, f"{limit} of {size}, since they see each other")
    if table.batch_invariant:
        table = dataclasses.replace(table, tile_buckets=(max(tiles, table.max_tiles),))
    return dataclasses.replace(table, whole_tiles=tiles)


def with_prefix(config: EngineConfig, spec: ExecutionSpec) -> ExecutionSpec:
    """The spec of a model whose prompts' tokens see each other (prefix-LM): a step can hold as long a prompt
    as the budget allows.

    Raises:
        InvalidArgument: an option does not work with such a model.
        ModelError: attention of its layers cannot see later tokens.
    """
    model, size = spec.model, spec.table.tile_size
    refused = {
        "pipeline_parallel_size": config.pipeline_parallel_size > 1,
        "data_parallel_size": config.data_parallel_size > 1,
        NAME: spec.draft is not None,
    }
    for name in filter(refused.get, refused):
        raise InvalidArgument(name, getattr(config, name), f"not with {model.config.family}, a prefix-LM")
    slopes = any(getattr(layer.attention, "slopes", False) for layer in model.module.layers)
    if slopes or any(group.kind in ("latent", "state") for group in model.groups):
        kinds = "latent attention, recurrent states or ALiBi"
        raise ModelError(f"{model.config.family}: prefix_lm does not work with {kinds}")
    budget = sizes(config, spec.mesh.devices.flat[0].platform).max_num_batched_tokens
    rows = min(spec.max_model_len, (budget - spec.max_slots) // size * size)
    return dataclasses.replace(spec, table=with_whole(config, spec, spec.table, rows))


def encoder_buckets(smallest: int, largest: int, *, single: bool) -> tuple[int, ...]:
    """Patches of the encoder's programs, ascending: multiples of the smallest part, each at least twice the
    one before. The last one holds the largest part.

    Args:
        single: whether one program encodes everything, so that it always rounds equally.
    """
    if single:
        return (largest,)
    if smallest == largest:
        return smallest, PACKED * smallest
    buckets = [min(-(-FEWEST_PATCHES // smallest) * smallest, largest)]
    while buckets[-1] < largest:
        buckets.append(min(2 * buckets[-1], largest))
    return tuple(buckets)


def describe_engine(config: EngineConfig) -> tuple[EngineConfig, ExecutionSpec]:
    """The options with a dtype, and everything that programs depend on except the number of pages. Loads and
    compiles nothing.

    Raises the errors of `start_engine`.
    """
    limit_cpu_threads(config.cpu_threads)
    prebuilt, config = given_programs(config)
    return spec_of(config, ModelSource.find(config), Devices.take(config, SingleProcess()), prebuilt)


def spec_of(
    config: EngineConfig,
    source: ModelSource,
    devices: Devices,
    prebuilt: PrebuiltPrograms | None,
    *,
    offline: bool = False,
) -> tuple[EngineConfig, ExecutionSpec]:
    """The completed options and the spec, for a model and devices.

    Args:
        prebuilt: programs that the user gave.
        offline: see `start_engine`.
    """
    if config.pipeline_parallel_size > 1:
        check_pipeline(config)
        config = dataclasses.replace(config, speculative_config="none")
    device, config = devices.local, source.complete(config)
    config = _with_bursts(config, device.platform, offline=offline)
    dtype: Any = devices.agree(
        str(jnp.dtype(choose_dtype(config.dtype, source.config, device, devices.root)))
    )
    config = dataclasses.replace(config, dtype=dtype)
    shapes = describe(
        config, source.config, devices.mesh, devices.root, source.draft_config, vision=source.vision
    )
    shapes = with_stages(config, shapes, devices.stages)
    forms = devices.agree(product_forms(shapes, devices.root) if prebuilt is None else prebuilt.product_forms)
    return config, with_forms(shapes, dict(forms))


def _with_bursts(config: EngineConfig, platform: str, *, offline: bool) -> EngineConfig:
    """The options with bursts where they only gain, if num_scheduler_steps is not given."""
    if config.num_scheduler_steps is not None:
        return config
    devices = config.pipeline_parallel_size, config.data_parallel_size, config.num_processes
    refused = config.batch_invariant or config.draft_tokens or config.tile_size < BURST_STEPS
    gains = offline and platform == "cpu" and config.programs is None
    steps = "auto" if gains and not refused and max(devices) == 1 else 1
    return dataclasses.replace(config, num_scheduler_steps=steps)


def with_pages(
    config: EngineConfig,
    spec: ExecutionSpec,
    devices: Devices,
    expected: int | None = None,
    *,
    loaded: bool = True,
) -> ExecutionSpec:
    """The spec with the number of pages that fit on the devices.

    Args:
        expected: number of pages for which programs are being compiled, if any: taken if it is about as many.
        loaded: whether the devices hold the weights; if not, about as many, rather fewer, as will fit beside
            them.
    """
    fit = sys.maxsize
    for stage in spec.local_stages:
        if stage.page_bytes:
            encoder = () if stage.images is None else stage.images.leaves
            weights = 0 if loaded else device_bytes((stage.weights, encoder)) * (100 + SLACK) // 100
            fit = min(fit, pages_that_fit(config, stage, weights))
    options = config.num_pages is not None or config.kv_cache_memory is not None
    if not options and spec.mesh.devices.flat[0].platform != "cpu" and len(spec.stages) == 1:
        saved = saved_page_counts(devices.root, spec.fingerprint())
        fit = pages_to_use(fit, [expected] if expected is not None and expected <= fit else saved)
    return dataclasses.replace(spec, num_pages=devices.link.agree(fit, min))


def describe(
    config: EngineConfig,
    model: ModelConfig,
    mesh: Mesh,
    root: Path,
    draft: ModelConfig | None = None,
    vision: RowEncoder | None = None,
) -> ExecutionSpec:
    """Everything that determines the programs' shapes, with 0 as the number of pages. Allocates nothing on a
    device.

    Args:
        draft: configuration of the draft model, if the options name one.
        vision: how the model reads images, or prompts' embeddings; None: it takes token ids alone.

    Raises:
        InvalidArgument: the model or device does not support an option.
        ModelError: the model is not supported.
    """
    device = mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    if config.calibration_data is not None:
        check_unconverted(model, config.calibration_data)
        if mesh.devices.size > 1:
            raise InvalidArgument(
                "tensor_parallel_size", mesh.devices.size, "must be 1 with calibration_data"
            )
    check_formats(config, device)
    max_model_len = _max_model_len(config, model)
    chosen = sizes(config, device.platform)
    table = make_table(config, chosen, device.platform)
    dtype = choose_dtype(config.dtype, model, device, root)
    declared = build(
        _stored(model, str(dtype), device),
        dtype,
        max_model_len,
        config.quantization,
        int(mesh.shape[TENSOR]),
        expert_shards=config.layout.expert_shards,
        group_size=config.quantization_group_size,
        calibrated=config.calibration_data is not None,
    )
    _check_experts(config, declared)
    if declared.unquantized_inputs:
        log.warning(
            "the checkpoint quantizes inputs of products (%s), which no product here does: they stay %s",
            declared.unquantized_inputs,
            dtype,
        )
    elif (
        (stored_format := declared.config.stored) is not None and stored_format.inputs and not _by_row(model)
    ):
        log.warning(
            "the checkpoint quantizes inputs of products (%s); here each row's scale comes from its numbers",
            model.quantized_inputs,
        )
    if config.calibration_data is not None:
        check_stateless(declared, config.calibration_data)
    spec = ExecutionSpec(
        model=declared,
        mesh=mesh,
        table=table,
        max_model_len=max_model_len,
        max_slots=chosen.max_num_seqs,
        page_size=chosen.page_size,
        num_pages=0,
        **states(config, declared, chosen.max_num_seqs, device.platform),
        kv_cache_dtype=CACHE_DTYPES[config.kv_cache_dtype],
        processed_logprobs=config.logprobs_mode == "processed_logprobs",
        lora=config.lora,
    )
    if draft is not None:
        spec = dataclasses.replace(spec, draft=build_draft(_stored(draft, str(dtype), device), spec))
    if vision is not None:
        spec = with_images(config, spec, vision)
    if declared.config.prefix_lm:
        spec = with_prefix(config, spec)
    table = spec.table
    if spec.num_states:
        _check_stateful(config, spec)
    if config.swap_space:
        spec = dataclasses.replace(spec, host_pages=host_pages(config, spec))
    if config.batch_invariant and (reason := why_not_batch_invariant(spec)) is not None:
        raise InvalidArgument("batch_invariant", True, reason)
    if on_cpu or not any(map(kernels_refused, with_draft(spec))):
        return spec
    pages = page_buckets(spec.table_width, config.batch_invariant)
    paged_rows = any(map(decode_refused, with_draft(spec)))
    return dataclasses.replace(
        spec, table=dataclasses.replace(table, page_buckets=pages, paged_rows=paged_rows)
    )


def _by_row(model: ModelConfig) -> bool:
    """Whether the checkpoint quantizes inputs of products as products here do."""
    return model.quantized_inputs.endswith(("dynamic by token", "dynamic by group"))


def _check_experts(config: EngineConfig, model: Model) -> None:
    if config.enable_expert_parallel and not model.elements.experts:
        limit = f"must be False: {FAMILIES[model.config.family].title} has no experts"
        raise InvalidArgument("enable_expert_parallel", True, limit)


def make_table(config: EngineConfig, chosen: Sizes, platform: str) -> ProgramTable:
    """The programs for an engine of these sizes, before page buckets are chosen."""
    shapes: dict[str, Any] = {
        "max_num_seqs": chosen.max_num_seqs,
        "tile_size": config.tile_size,
        "pooling": bool(config.embeddings),
        "drafts": config.draft_tokens,
        "adapters": config.max_loras if config.enable_lora else 0,
    }
    if config.batch_invariant:
        tokens = min(PROMPT_TOKENS[platform], chosen.max_num_batched_tokens)
        return ProgramTable.build_batch_invariant(**shapes, tiles=max(1, tokens // config.tile_size))
    shapes |= {"max_num_batched_tokens": chosen.max_num_batched_tokens, "steps": config.burst_steps}
    if platform == "cpu":
        return ProgramTable.build(**shapes, by_row=cpu_refused() is None)
    return ProgramTable.build_for_gpu(**shapes)


def states(config: EngineConfig, model: Model, max_num_seqs: int, platform: str) -> dict[str, Any]:
    """Numbers of recurrent states, see ExecutionSpec: one for each running sequence, and a few for prefix
    hits and for drafts. A state is as large as thousands of tokens.

    On a GPU, programs that can verify drafts take longer without any, so they must be asked for.
    """
    if not any(group.kind == "state" for group in model.groups):
        return {}
    asked = platform == "cpu" or config.speculative_config != AUTO
    drafting = asked and Speculation.of(config.speculative_config) is not None
    drafts = max(max_num_seqs // DRAFTED, FEWEST_DRAFTED) if drafting else 0
    snapshots = max(max_num_seqs // SNAPSHOTS, FEWEST_SNAPSHOTS)
    return {"num_states": 1 + max_num_seqs + snapshots + drafts, "draft_states": drafts}


def _stored(model: ModelConfig, dtype: str, device: jax.Device) -> ModelConfig:
    """Without a kernel that multiplies by groups of eight-bit numbers, or of 16 four-bit ones, they are
    converted to dtype on load, rather than in each step. Without products of FP8, or without a kernel that
    quantizes rows by group, inputs are not quantized.
    """
    if (stored := model.stored) is None:
        return model
    weight = format_of(stored)
    x: Any = jax.ShapeDtypeStruct((1, TILE), dtype)
    small = weight.group < GROUPS[0] and device.platform != "cpu"
    if weight.group and (weight.bits == 8 or small):
        in_groups = abstract(jax.ShapeDtypeStruct((1, TILE, TILE), dtype), weight)
        if why_product_unsupported(x, in_groups, grouped=True, device=device) is not None:
            return dataclasses.replace(model, stored=None)
    by_group = weight.group and why_none(ROW_QUANTIZATION, device, x) is not None
    if weight.inputs == FP8 and (by_group or not multiplies_fp8(device)):
        stored = dataclasses.replace(stored, inputs=False)
    return dataclasses.replace(model, stored=stored)


def _check_stateful(config: EngineConfig, spec: ExecutionSpec) -> None:
    """Rejects options that do not work with recurrent states."""
    if config.swap_space:
        raise InvalidArgument(
            "swap_space",
            config.swap_space,
            "must be 0: this model's recurrent states are not kept on the host",
        )
    if config.batch_invariant and spec.draft_states and spec.mesh.devices.flat[0].platform != "cpu":
        limit = "must be none with batch_invariant: a GPU computes the states behind drafts side by side"
        raise InvalidArgument("speculative_config", config.speculative_config, limit)


def host_pages(config: EngineConfig, spec: ExecutionSpec) -> int:
    """Pages of each device that fit into its share of host memory."""
    pages = int(config.swap_space * 2**30) // spec.page_bytes
    if not config.enable_prefix_caching:
        raise InvalidArgument(
            "swap_space",
            config.swap_space,
            "must be 0 without enable_prefix_caching: only cached pages are kept on the host",
        )
    if not pages:
        raise InvalidArgument(
            "swap_space",
            config.swap_space,
            f"must be 0 or at least {spec.page_bytes / 2**30:.2g}, the size of a page",
        )
    return pages


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_position
    longest, rope = float(model.max_position), model.rope.scaling
    if rope is not None:
        longest = (
            math.inf if rope.kind == "dynamic" else max(longest, rope.factor * rope.original_max_position)
        )
    if config.max_model_len > longest:
        raise InvalidArgument(
            "max_model_len",
            config.max_model_len,
            f"must be at most {longest:.0f}, the model's number of positions",
        )
    return config.max_model_len


def scheduler_shapes(config: EngineConfig, spec: ExecutionSpec) -> tuple[CacheShape, BatchLimits]:
    """What a scheduler plans for, with the spec's number of pages."""
    cache = CacheShape(
        page_size=spec.page_size,
        num_pages=spec.num_pages,
        windows=[group.window for group in paged(spec.groups)],
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
    return cache, limits


def page_buckets(width: int, batch_invariant: bool = False) -> tuple[int, ...]:
    """Page counts for XLA attention on a GPU, in factors of four up to the table's width, or this alone."""
    buckets = [width]
    while buckets[-1] > 32 and not batch_invariant:
        buckets.append(-(-buckets[-1] // 4))
    return tuple(reversed(buckets))
