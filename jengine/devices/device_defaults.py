"""Default sizes of an engine by kind of device, and the number of threads on a CPU."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from jax._src import xla_bridge  # to see whether a backend exists: JAX has no public way

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.scheduling_options import check_budget

XLA_THREADS = "NPROC"  # XLA reads it when JAX starts its CPU backend, and then keeps that number of threads
TOKENIZER_THREADS = "RAYON_NUM_THREADS"  # read when the first text is tokenized


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


def cpu_threads() -> int:
    """Number of threads of this process's CPU backend, which may not have started yet."""
    try:
        return max(int(os.environ[XLA_THREADS]), 1)
    except (KeyError, ValueError):
        return CORES


def limit_cpu_threads(threads: int | None) -> None:
    """Limits the threads of XLA and the tokenizer; None leaves them unchanged. Must be called before JAX
    starts.

    The limit applies to this process and, through its environment, to its child processes.

    Raises:
        InvalidArgument: there are fewer cores, or JAX has already started with another number of threads.
    """
    if threads is None:
        return
    if threads > CORES:
        raise InvalidArgument(
            "cpu_threads", threads, f"must be at most {CORES}, the cores that this process may use"
        )
    if xla_bridge.backends_are_initialized() and cpu_threads() != threads:
        limit = (
            f"must be {cpu_threads()}: JAX has already started this number of threads in this process; use a"
            " new process"
        )
        raise InvalidArgument("cpu_threads", threads, limit)
    os.environ[XLA_THREADS] = os.environ[TOKENIZER_THREADS] = str(threads)
