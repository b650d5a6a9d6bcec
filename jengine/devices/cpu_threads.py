"""How many threads of a CPU compute at once."""

from __future__ import annotations

import os

from jax._src import xla_bridge  # whether a backend exists: JAX has no public way to ask

from jengine.devices.device_defaults import CORES
from jengine.errors import InvalidArgument

XLA_THREADS = "NPROC"  # XLA reads it when JAX starts its CPU backend, which keeps that many threads from then on
TOKENIZER_THREADS = "RAYON_NUM_THREADS"  # read when the first text is tokenized


def cpu_threads() -> int:
    """Threads of JAX's CPU backend in this process, which has started or is going to."""
    try:
        return max(int(os.environ[XLA_THREADS]), 1)
    except (KeyError, ValueError):
        return CORES


def limit_cpu_threads(threads: int | None) -> None:
    """Let XLA and the tokenizer have this many threads; None leaves them as they are. Call it before JAX starts.

    The limit holds for the process and, by its environment, for those that it starts.

    Raises:
        InvalidArgument: there are fewer cores, or JAX has started with another number of threads.
    """
    if threads is None:
        return
    if threads > CORES:
        raise InvalidArgument("cpu_threads", threads, f"must be at most {CORES}, the cores that this process may use")
    if xla_bridge.backends_are_initialized() and cpu_threads() != threads:
        limit = f"must be {cpu_threads()}: JAX has started its threads in this process, and cannot change how many; use a new process"
        raise InvalidArgument("cpu_threads", threads, limit)
    os.environ[XLA_THREADS] = os.environ[TOKENIZER_THREADS] = str(threads)
