"""Specs of tiny models, from configurations alone: programs are compiled without weights."""

from __future__ import annotations

import dataclasses

from jengine.checkpoints.hugging_face import model_config
from jengine.engine.draft_model import build_draft
from jengine.execution.kinds import Key, kind_of
from jengine.execution.spec import ExecutionSpec
from jengine.models import DRAFT_HEADS, build
from jengine.parallel.mesh import make_mesh
from jengine.table.program_table import ProgramTable
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
) -> ExecutionSpec:
    """draft: variant of a draft model, or name of the variant's head; it proposes four tokens."""
    # one of each kind, all with samplers of 16 rows
    table = ProgramTable((16,), (8,), (1,), 32, page_buckets, drafts=4 if draft else 0)
    model = build(model_config(VARIANTS[variant]), dtype, 192, quantization, devices)
    spec = ExecutionSpec(
        model=model,
        mesh=make_mesh(devices),
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
    if draft in DRAFT_HEADS:
        fields = {**VARIANTS[variant], "model_type": draft}
        return dataclasses.replace(spec, draft=build_draft(model_config(fields, "", DRAFT_HEADS), spec))
    return dataclasses.replace(spec, draft=build_draft(model_config(VARIANTS[draft]), spec))
