"""The engine's trunks compiled for GPUs that are not there."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from jengine.checkpoints.hugging_face import model_config
from jengine.config import EngineConfig
from jengine.execution.kernels import kernels_refused
from jengine.execution.memory import temporaries_bound
from jengine.execution.programs import lower
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.mesh import make_mesh
from jengine.shapes import describe
from pallas_kernels import ahead_of_time
from tests.golden.weights import VARIANTS

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra aot: pip install '.[aot]'")
if os.environ.get("JAX_PLATFORMS") != "cpu":
    pytest.skip("needs JAX_PLATFORMS=cpu: the plugin looks for all of CUDA otherwise", allow_module_level=True)

LAYERS = 2
MODEL = {**VARIANTS["llama_gqa"], "head_dim": 64, "hidden_size": 256, "num_attention_heads": 8, "dtype": "bfloat16"}


def described(target: str, devices: int = 1, **options: Any) -> ExecutionSpec:
    mesh = make_mesh(devices, ahead_of_time.devices(target, devices))
    small = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 72, "tensor_parallel_size": devices}
    spec = describe(EngineConfig.of("MODEL", {**small, **options}), model_config(MODEL), mesh, Path())
    return dataclasses.replace(spec, num_pages=4096)


def loops_of_unknown_length(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.search(r"\bwhile\(", line) and "known_trip_count" not in line]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.full)])
def test_on_hopper_kernels_do_all_that_touches_the_cache(devices: int) -> None:
    spec = described("h200", devices)
    assert kernels_refused(spec) is None and spec.table.page_buckets == (0,)
    for key in spec.table.trunks():
        compiled = lower(spec, key).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        kernels = 3 if key.tiles else 2  # a layer writes, attends from rows, and from tiles
        assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == kernels * LAYERS
        assert not re.search(r"\b(while|conditional)\(", text)
        assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == (2 * LAYERS + 1 if devices > 1 else 0)
        assert memory.alias_size_in_bytes >= spec.cache_bytes + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(spec.slots))
        assert memory.temp_size_in_bytes <= temporaries_bound(spec, key)


@pytest.mark.full
@pytest.mark.parametrize("target", ["a100", "l4"])
def test_where_no_kernel_serves_loops_have_known_lengths(target: str) -> None:
    spec = dataclasses.replace(described(target), kv_cache_dtype="int8")
    for key in spec.table.trunks():
        compiled = lower(spec, key).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        assert not loops_of_unknown_length(text) and not re.search(r"\bconditional\(", text)
        assert memory.alias_size_in_bytes >= spec.cache_bytes
        assert memory.temp_size_in_bytes <= temporaries_bound(spec, key)
