"""Default sizes of an engine by kind of device."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from jengine.core.config import EngineConfig
from jengine.core.scheduling_options import check_budget


@dataclass(frozen=True, slots=True)
class Sizes:
    """The options of EngineConfig with these names, for one kind of device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    compile_threads: int


# available to this process
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# tokens of a batch-invariant table's only prefill program: enough to be compute-bound
PROMPT_TOKENS = {"cpu": 64, "gpu": 1024}
DEFAULTS = {
    "cpu": Sizes(max_num_seqs=32, max_num_batched_tokens=512, page_size=16, compile_threads=2),
    "gpu": Sizes(max_num_seqs=256, max_num_batched_tokens=8192, page_size=64, compile_threads=CORES),
}


def sizes(config: EngineConfig, platform: str) -> Sizes:
    """The given options, with the defaults of the platform ("cpu" or "gpu") for the others.

    The default token budget grows with max_num_seqs.

    Raises:
        InvalidArgument: a step cannot hold max_num_seqs rows and a tile.
    """
    default = asdict(DEFAULTS[platform])
    if config.max_num_seqs is not None:
        default["max_num_batched_tokens"] = max(
            default["max_num_batched_tokens"], config.max_num_seqs + config.tile_size
        )
    if config.cpu_threads is not None:
        default["compile_threads"] = min(default["compile_threads"], config.cpu_threads)
    chosen = Sizes(
        **{
            name: default[name] if getattr(config, name) is None else getattr(config, name)
            for name in default
        }
    )
    check_budget(chosen.max_num_seqs, chosen.max_num_batched_tokens, config.tile_size)
    return chosen
