"""Kernels lowered once: equal kernels share a module, in other programs and processes too; others do not."""

from __future__ import annotations

import multiprocessing
import types
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu import lowering

from pallas_kernels.attention.hopper.decode import paged_attention_decode
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.hopper_write import kv_write
from pallas_kernels.cache.page_copy import copy_pages
from pallas_kernels.cache.qkv import Qkv
from pallas_kernels.compilation import ahead_of_time, lowered
from pallas_kernels.compilation.lowered import keep_modules, reused
from tests.extras import compiler_for_gpus

compiler_for_gpus()


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype=jnp.int32)


def text_of(function: Any, *args: Any, target: str = "h200") -> str:
    return str(ahead_of_time.lower_for(ahead_of_time.device(target), function, *args).as_text())


def copies(pages: int = 8, heads: int = 2, dtype: Any = jnp.bfloat16, more: float = 0.0) -> tuple[Any, ...]:
    """A program with two equal kernels, and its arguments; `more` is no part of them."""

    def program(k: Any, v: Any, sources: Any, destinations: Any) -> Any:
        k, v = copy_pages(k, v, sources, destinations)
        return copy_pages(k + more, v, sources, destinations)

    page = array(pages, heads, 64, 64, dtype=dtype)
    return program, page, page, ints(4), ints(4)


class Kept:
    """A store in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def load(self, name: str) -> bytes | None:
        return self.files.get(name)

    def save(self, name: str, code: bytes) -> None:
        self.files[name] = code


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process, apart from the function of Pallas that has been replaced."""
    monkeypatch.setattr(lowered, "modules", lowered._Modules())
    yield


def counts() -> tuple[int, int]:
    return lowered.modules.lowered, lowered.modules.taken


def test_a_kernel_is_lowered_once() -> None:
    usual = text_of(*copies())
    assert counts() == (0, 0), "outside of reused, nothing changes"
    with reused():
        first, again = text_of(*copies()), text_of(*copies(more=1.0))
    assert counts() == (1, 3) and first == usual and again != first


@pytest.mark.parametrize(
    "other",
    [copies(pages=9), copies(heads=4), copies(dtype=jnp.float16)],
    ids=["pages", "heads", "dtype"],
)
def test_others_are_lowered(other: tuple[Any, ...]) -> None:
    with reused():
        for program in copies(), other:
            text_of(*program)
    assert counts() == (2, 2)


def test_the_compute_capability_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with reused():
        for target in "h200", "h100":
            text_of(*copies(), target=target)
        assert counts() == (1, 3)
        other = types.SimpleNamespace(compute_capability="9.1")
        monkeypatch.setattr(lowered, "traced_for", lambda: other)
        text_of(*copies())
    assert counts() == (2, 4)


def decode(scale: float = 0.1, window: int | None = None, pages: int = 8, rows: int = 8) -> Any:
    def program(q: Any, k: Any, v: Any, tables: Any, lengths: Any) -> Any:
        options = AttentionOptions(scale=scale, window=window)
        return paged_attention_decode(q, k, v, tables, lengths, options=options)

    page = array(pages, 2, 64, 64)
    return program, array(rows, 4, 64), page, page, ints(rows, 4), ints(rows)


def write(tokens: int = 8) -> Any:
    def program(k: Any, v: Any, q: Any, own: Any, pages: Any, offsets: Any) -> Any:
        return kv_write(k, v, Qkv(q, own, own), pages, offsets, rows=tokens)

    page, own = array(8, 2, 64, 64), array(tokens, 2, 64)
    return program, page, page, array(tokens, 4, 64), own, ints(tokens), ints(tokens)


def test_what_a_kernel_closes_over_counts() -> None:
    """Attention with other options has other modules, though its shapes are equal."""
    with reused():
        first = text_of(*decode())
        assert counts() == (1, 0)
        assert text_of(*decode(scale=0.2)) != first and text_of(*decode(window=9)) != first
        assert counts() == (3, 0)
        text_of(*write())
        assert counts() == (4, 0)
        assert text_of(*decode()) == first
    assert counts() == (4, 1)


def names(_: int) -> list[str]:
    keep_modules(kept := Kept())
    with reused():
        for program in copies(), decode(), write():
            text_of(*program)
    return sorted(kept.files)


def test_names_are_the_same_in_every_process() -> None:
    """A process takes what another has stored, whatever its hashes of strings and addresses are."""
    kept = Kept()
    lowered.modules.store = kept
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        there = pool.submit(names, 0)
        with reused():
            for program in copies(), decode(), write():
                text_of(*program)
        assert sorted(kept.files) == there.result() and len(kept.files) == 3
    lowered.modules = lowered._Modules()
    lowered.modules.store = kept
    with reused():
        for program in copies(), decode(), write():
            text_of(*program)
    assert counts() == (0, 4)


def test_a_damaged_module_is_lowered_again(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    lowered.modules.store = kept
    with reused():
        text = text_of(*copies())
        [(name, data)] = kept.files.items()
        lowered.modules = lowered._Modules()
        lowered.modules.store = kept
        kept.files[name] = data[:-9]
        assert text_of(*copies()) == text
    assert counts() == (1, 1) and kept.files[name] != data[:-9] and "cannot be read" in caplog.text


def test_what_has_no_name_is_lowered_always(monkeypatch: pytest.MonkeyPatch) -> None:
    class Something:
        pass

    monkeypatch.setattr(lowered, "_versions", lambda: (Something(),))
    with reused():
        text_of(*copies())
    assert counts() == (0, 0)


def test_another_pallas_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(mesh: Any, jaxpr: Any) -> None: ...

    monkeypatch.setattr(lowering, "lower_unpipelined_jaxpr_to_module", other)
    lowered._replace.__wrapped__()
    assert lowering.lower_unpipelined_jaxpr_to_module is other
