"""Number of CPU threads for computation."""

from __future__ import annotations

import os

from jax._src import xla_bridge  # to see whether a backend exists: JAX has no public way

from jengine.base.errors import InvalidArgument
from jengine.devices.device_defaults import CORES

XLA_THREADS = "NPROC"  # XLA reads it when JAX starts its CPU backend, and then keeps that number of threads
TOKENIZER_THREADS = "RAYON_NUM_THREADS"  # read when the first text is tokenized


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
