"""How many pages the cache has, and what a program may take beside it."""

from __future__ import annotations

import jax
import numpy as np

from jengine.config import EngineConfig, ModelConfig, parse_bytes
from jengine.errors import OutOfMemory
from jengine.execution.kv_cache import page_bytes
from jengine.execution.spec import ExecutionSpec
from jengine.program_table import SamplerKey, TrunkKey

CPU_DEFAULT = 1 << 30  # bytes
PAGE_GRID = 64  # pages: a count rounded down to this is likelier to be the same at the next start


def pages_for(
    config: EngineConfig, model: ModelConfig, *, page_size: int, max_model_len: int, dtype: np.dtype, device: jax.Device, weights: int
) -> int:
    """Pages of the cache, the null page included.

    A number in the config wins, then a size in bytes. Otherwise a CPU gets what max_num_seqs sequences of
    max_model_len take, at most 1 GiB, and a GPU gets `gpu_memory_utilization` of its memory less the weights and a
    margin for programs.

    Raises:
        OutOfMemory: no room for one sequence's first page.
    """
    if config.num_pages is not None:
        return config.num_pages
    each = page_bytes(model, page_size, dtype)
    everyone = 1 + config.max_num_seqs * -(-max_model_len // page_size)
    given = parse_bytes("kv_cache_memory", config.kv_cache_memory)
    if given is not None:
        count = given // each
    elif device.platform == "cpu":
        count = min(everyone, CPU_DEFAULT // each)
    else:
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)
        programs = limit // 20  # temporaries and code; a program's own bound is far below
        count = min(everyone, int(limit * config.gpu_memory_utilization - weights - programs) // each // PAGE_GRID * PAGE_GRID)
    if count < 2:
        raise OutOfMemory(f"no room for the KV cache: a page of {page_size} tokens takes {each / 2**20:.1f} MiB, and 2 are needed at least")
    return count


def temporaries_bound(spec: ExecutionSpec, key: TrunkKey | SamplerKey) -> int:
    """Bytes a program's temporaries may take: some activations of its own token axis, in float32; never the cache.

    The factors count the arrays that live at once in a layer (or in a sampler, over the vocabulary), generously; what
    matters is what is missing: the number of pages, and the number of layers.
    """
    model, table = spec.model.config, spec.table
    if isinstance(key, SamplerKey):
        return 4 * key.rows * (8 * model.vocab_size + 16 * model.hidden_size) + (1 << 16)
    tokens = table.tokens(key)
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    scores = 4 * 8 * model.num_heads * table.tile_size * max(spec.page_size, 128)
    width = key.pages * spec.page_size * model.num_kv_heads * model.head_dim * 4 * 4 * max(key.rows, 1)
    return 4 * tokens * (8 * model.hidden_size + 6 * heads + 4 * model.intermediate_size) + 4 * scores + width + (1 << 20)
