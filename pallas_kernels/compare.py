"""Measure decode attention by our kernel and by FlashInfer's on this machine's GPU, and write it to the table
that `fastest` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import jax

from pallas_kernels import dispatch, fastest
from pallas_kernels.dispatch import Impl
from pallas_kernels.fastest import Case
from pallas_kernels.options import AttentionOptions
from pallas_kernels.timing import chain, seconds
from pallas_kernels.tuning import DecodeCase
from pallas_kernels.tuning_cases import arrays

IMPLS: tuple[Impl, ...] = ("mosaic", "flashinfer")
Timer = Callable[[DecodeCase, Impl], float]
Times = dict[str, float]  # microseconds by implementation


def why_not(device: jax.Device, case: DecodeCase) -> str | None:
    """Why there is nothing to compare ours with, or None."""
    q = jax.ShapeDtypeStruct((case.rows, case.heads, case.head_dim), case.dtype)
    pages = jax.ShapeDtypeStruct((2, case.kv_heads, case.page_size, case.head_dim), case.dtype)
    return dispatch.why_flashinfer_unsupported(q, pages, pages, device=device)  # type: ignore[arg-type]


def compare(
    cases: Iterable[DecodeCase], device: jax.Device, file: Path, timer: Timer | None = None
) -> Iterator[tuple[Case, Times]]:
    """Microseconds of a case by implementation, in the file at once; the cases that the file lacks come
    first.

    Args:
        cases: those of quantized caches, which FlashInfer does not take, are left out.
        timer: seconds of a case by an implementation.
    """
    known = fastest.read(file).get(device.device_kind, {})
    plain = [(case, _case(case)) for case in cases if case.cache == case.dtype]
    for case, own in sorted(plain, key=lambda both: both[1].key() in known):
        times: Times = {impl: 1e6 * (timer or total_seconds)(case, impl) for impl in IMPLS}
        file.write_text(fastest.text(fastest.updated(fastest.read(file), device.device_kind, own, times)))
        yield own, times


def total_seconds(case: DecodeCase, impl: Impl) -> float:
    """Of a call with each of the case's loads, on the default device."""
    q, k, v, loads = arrays(case)
    attend = partial(
        dispatch.paged_attention_decode, options=AttentionOptions(case.head_dim**-0.5), impl=impl
    )
    program = chain(lambda q, tables, k, v, lengths: attend(q, k, v, tables, lengths))
    return sum(seconds(program, q, load.tables, k, v, load.lengths) for load in loads)


def row(case: Case, times: Times) -> str:
    return f"| {case.key()} | " + " | ".join(f"{times[impl]:.1f}" for impl in IMPLS) + " |"


def key(case: DecodeCase) -> str:
    """The case's in the table."""
    return _case(case).key()


def _case(case: DecodeCase) -> Case:
    return Case(case.dtype, case.heads, case.kv_heads, case.page_size, case.head_dim, case.rows)
