"""Specs of tiny models, from configurations alone: programs are compiled without weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from jengine.checkpoints.hugging_face import model_config
from jengine.engine.setup.model_source import build_draft
from jengine.execution.kinds import Key, kind_of
from jengine.execution.spec import ExecutionSpec
from jengine.models import DRAFT_HEADS, build
from jengine.models.config import ModelConfig
from jengine.parallel.layout import Layout
from jengine.parallel.mesh import make_mesh, stage_meshes
from jengine.table.program_table import ProgramTable
from pallas_kernels.products.hopper.grouped_product import splits_of
from pallas_kernels.targets import CORES
from tests.golden.weights import VARIANTS


def temporaries_bound(spec: ExecutionSpec, key: Key) -> int:
    """Upper bound on the bytes of a program's temporaries."""
    return kind_of(key).temporaries(spec, key)


def make_spec(
    variant: str = "llama_gqa",
    *,
    num_pages: int = 64,
    dtype: str = "float32",
    page_buckets: tuple[int, ...] = (0,),
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    devices: int = 1,
    host_pages: int = 0,
    num_states: int = 20,
    draft: str | None = None,
    expert_parallel: bool = False,
    ranks: int = 1,
) -> ExecutionSpec:
    """draft: variant of a draft model, or name of the variant's head; it proposes four tokens."""
    # one of each kind, all with samplers of 16 rows
    table = ProgramTable((16,), (8,), (1,), 32, page_buckets, drafts=4 if draft else 0)
    layout = Layout(data=ranks, tensor=devices, expert_parallel=expert_parallel)
    config = model_config(VARIANTS[variant])
    model = build(config, dtype, 192, quantization, devices, expert_shards=layout.expert_shards)
    spec = ExecutionSpec(
        model=model,
        mesh=make_mesh(devices) if ranks == 1 else stage_meshes(layout)[0],
        table=table,
        max_model_len=192,
        max_slots=16,
        page_size=16,
        num_pages=num_pages,
        num_states=num_states if any(group.kind == "state" for group in model.groups) else 0,
        kv_cache_dtype=kv_cache_dtype,
        host_pages=host_pages,
    )
    if draft is None:
        return spec
    own = draft_config("mtp", VARIANTS[variant]) if draft in DRAFT_HEADS else model_config(VARIANTS[draft])
    return dataclasses.replace(spec, draft=build_draft(own, spec))


def draft_config(head: str | None, model: dict[str, Any]) -> ModelConfig:
    """Of a model's head by its method, from the model's fields; None: of a draft model like it."""
    if head is None:
        return model_config(model)
    if head == "mtp":
        return model_config({**model, "model_type": f"{model['model_type']}_mtp"}, draft_head=True)
    own = {"model_type": "eagle3", "num_hidden_layers": 1, "draft_vocab_size": model["vocab_size"] * 3 // 4}
    own |= {"eagle_aux_hidden_state_layer_ids": [0, 1, model["num_hidden_layers"]]}
    return model_config({**model, **own}, draft_head=True)


def partial_sums(weights: Sequence[Any], rows: int) -> list[int]:
    """Bytes of partial sums, of each product with eight-bit weights whose inputs several blocks share."""
    found = []
    for weight in weights:
        flat: Any = jax.ShapeDtypeStruct(
            (math.prod(weight.shape[:-1]), weight.shape[-1]), weight.values.dtype
        )
        splits = splits_of(rows, flat, flat.dtype if weight.inputs else "bfloat16", CORES)
        found += [4 * splits * rows * flat.shape[0]] if splits > 1 else []
    return found
