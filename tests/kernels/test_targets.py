"""The tables of implementations, for devices that are not there."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels.attention.dispatch import DECODE, PREFILL
from pallas_kernels.attention.latent import LATENT_DECODE, LATENT_PREFILL
from pallas_kernels.attention.options import PLAIN
from pallas_kernels.cache.dispatch import KV_WRITE, PAGE_COPY
from pallas_kernels.cache.qkv import Qkv
from pallas_kernels.devices import differentiable
from pallas_kernels.products.dispatch import explain_product
from pallas_kernels.products.quantize_rows import ROW_QUANTIZATION
from pallas_kernels.quantization.int4 import quantize_int4
from pallas_kernels.quantization.quantized import quantize
from pallas_kernels.targets import (
    AMPERE,
    CPU,
    HOPPER,
    Choice,
    Implementation,
    Table,
    capability,
    choose,
    explain,
    why_none,
)


def gpu(version: str) -> Any:
    return SimpleNamespace(platform="gpu", device_kind=f"GPU {version}", compute_capability=version)


PROCESSOR: Any = SimpleNamespace(platform="cpu", device_kind="cpu")
MMA = [
    "8.0",
    "8.6",
    "8.7",
    "8.9",
    "10.0",
    "10.3",
    "11.0",
    "12.0",
]  # with products of warps, not of warpgroups
NO_KERNELS = ["7.5", "9.1", "gfx942"]
Q, TILES = jnp.zeros((1, 8, 64), jnp.bfloat16), jnp.zeros((1, 16, 8, 64), jnp.bfloat16)
PAGES, VECTORS = jnp.zeros((2, 2, 16, 64), jnp.bfloat16), jnp.zeros((2, 1, 64, 576), jnp.bfloat16)
ROWS = jnp.zeros((1, 128), jnp.bfloat16)
CALLS: dict[str, tuple[Table, tuple[Any, ...]]] = {
    "decode": (DECODE, (Q, PAGES, PAGES, PLAIN)),
    "prefill": (PREFILL, (TILES, PAGES, PAGES, PLAIN, False)),
    "latent decode": (LATENT_DECODE, (jnp.zeros((1, 8, 576), jnp.bfloat16), VECTORS, PLAIN, 512)),
    "latent prefill": (LATENT_PREFILL, (jnp.zeros((1, 16, 8, 576), jnp.bfloat16), VECTORS, PLAIN, 512)),
    "write": (KV_WRITE, (PAGES, PAGES, Qkv(Q, Q[:, :2], Q[:, :2]))),
    "copy": (PAGE_COPY, (PAGES, PAGES)),
    "rows": (ROW_QUANTIZATION, (ROWS,)),
}


def chosen(device: Any) -> dict[str, Choice]:
    return {name: explain(table, device, *call) for name, (table, call) in CALLS.items()}


@pytest.mark.parametrize("version", MMA)
def test_a_gpu_without_kernels_of_its_generation_takes_those_of_an_older_one(version: str) -> None:
    device = gpu(version)
    names = {name: choice.name for name, choice in chosen(device).items()}
    own = {"prefill": "Blackwell"} if version == "10.0" and jax.__version_info__ >= (0, 12) else {}
    assert names == dict.fromkeys(CALLS, "Ampere") | {"rows": "XLA"} | own
    newer = f"device=GPU {version}: the kernel is for GPUs of compute capability 9.0"
    reasons = {name: choice.why for name, choice in chosen(device).items() if name not in own}
    assert all(chosen(device)[name].why is None for name in own)
    assert reasons.pop("latent prefill") is None and set(reasons.values()) == {newer}


def test_hopper_takes_its_own() -> None:
    choices = chosen(gpu("9.0"))
    assert choices.pop("latent prefill").name == "XLA"
    assert set(choices.values()) == {Choice("Hopper", None)}


@pytest.mark.parametrize("version", NO_KERNELS)
def test_other_devices_take_xla(version: str) -> None:
    for name, choice in chosen(gpu(version)).items():
        assert choice.name == "XLA", name
        assert str(choice.why).startswith(f"device=GPU {version}: the kernel is for GPUs of"), name
    assert str(chosen(gpu(version))["decode"].why).endswith(f"{HOPPER.devices}; {AMPERE.devices}")


def test_a_cpu_has_kernels_for_attention_alone() -> None:
    assert {choice.why for choice in chosen(PROCESSOR).values()} == {None}
    names = {name: choice.name for name, choice in chosen(PROCESSOR).items()}
    attention = ("decode", "prefill", "latent decode", "latent prefill")
    assert names == dict.fromkeys(CALLS, "XLA") | dict.fromkeys(attention, "CPU")


def test_a_reason_of_the_call_comes_after_the_device_and_before_an_older_generation() -> None:
    q = Q.astype(jnp.float32)
    assert explain(DECODE, gpu("9.0"), q, PAGES, PAGES, PLAIN) == Choice(
        "XLA", "dtype=float32: the kernel takes bfloat16 and float16"
    )
    assert str(why_none(DECODE, gpu("7.5"), q, PAGES, PAGES, PLAIN)).startswith("device=GPU 7.5")
    assert str(why_none(DECODE, gpu("12.0"), q, PAGES, PAGES, PLAIN)).startswith("dtype=float32")


def test_the_first_implementation_that_supports_the_call_is_chosen() -> None:
    new = Implementation(AMPERE, lambda size: "size: too large" if size > 8 else None, lambda: "new")
    old = Implementation(AMPERE, lambda size: None if size < 99 else "size: too large, too", lambda: "old")
    table, device = (Implementation(HOPPER, lambda size: None, lambda: "hopper"), new, old), gpu("10.0")
    assert choose(table, "auto", device, 8) is choose(table, "mosaic", device, 8) is new
    assert choose(table, "auto", device, 9) is old
    assert choose(table, "xla", device, 8) is choose(table, "auto", device, 99) is None
    why = "size: too large; size: too large, too"
    assert why_none(table, device, 99) == why
    for impl, said in ("mosaic", why), ("llvm", "the operation has no such kernel"), ("ptx", "one of 'auto'"):
        with pytest.raises(ValueError, match=f"impl='{impl}': {said}"):
            choose(table, impl, device, 99)  # type: ignore[arg-type]


def test_kernels_have_no_derivatives() -> None:
    table = [Implementation(target, lambda: None, lambda: None) for target in (AMPERE, CPU)]
    for device in gpu("12.0"), PROCESSOR:
        assert choose(table, "auto", device) is not None
        with differentiable():
            assert choose(table, "auto", device) is None
            assert why_none(table, device) == "kernels have no derivatives"


@pytest.mark.parametrize(
    ("version", "wanted"), [("8.9", (8, 9)), ("12.0", (12, 0)), ("gfx942", None), ("gfx9.0", None)]
)
def test_compute_capabilities(version: str, wanted: tuple[int, int] | None) -> None:
    assert capability(gpu(version)) == wanted
    assert capability(PROCESSOR) is None


def test_products_by_format() -> None:
    plain = jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16)
    weights = {"bfloat16": plain, "int8": quantize(plain, "int8"), "int4": quantize_int4(plain)}
    for version, by in ("9.0", "Hopper"), ("8.0", "Ampere"), ("12.0", "Ampere"), ("7.5", "XLA"):
        for name, weight in weights.items():
            choice = explain_product(ROWS, weight, grouped=False, device=gpu(version))
            assert choice.name == ("XLA" if name == "bfloat16" else by)
            assert (choice.why is None) == (version == "9.0" or name == "bfloat16")
        experts = explain_product(ROWS, plain[None], grouped=True, device=gpu(version))
        assert experts.name == by


@pytest.mark.parametrize("wrapped", [lambda function: function, jax.jit], ids=["traced", "compiled"])
def test_transformations_of_a_kernel_name_the_function(wrapped: Any) -> None:
    pages, tables, lengths = jnp.ones((3, 1, 16, 64)), jnp.array([[1]]), jnp.array([9])
    q = jnp.ones((1, 2, 64))

    def attend(q: jax.Array, **keywords: Any) -> jax.Array:
        return pallas_kernels.paged_attention_decode(q, pages, pages, tables, lengths, PLAIN, **keywords)

    def kernel(q: jax.Array) -> jax.Array:
        return attend(q, impl="llvm")

    def by_xla(q: jax.Array) -> jax.Array:
        return attend(q, impl="xla", pages=1)

    assert jnp.allclose(wrapped(kernel)(q), by_xla(q), atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"^paged_attention_decode: jax.vmap cannot .* impl='xla'"):
        wrapped(jax.vmap(kernel))(q[None])
    with pytest.raises(NotImplementedError, match=r"^paged_attention_decode: the kernel has no gradient; "):
        wrapped(jax.grad(lambda q: kernel(q).sum()))(q)
    with pytest.raises(NotImplementedError, match=r"^paged_attention_decode: the kernel has no gradient; "):
        wrapped(lambda q: jax.jvp(kernel, (q,), (q,)))(q)
    stopped = wrapped(jax.grad(lambda q: kernel(jax.lax.stop_gradient(q)).sum() + q.sum()))
    assert jnp.array_equal(stopped(q), jnp.ones_like(q))
    # what the errors recommend
    assert jax.vmap(by_xla)(q[None]).shape == (1, *q.shape)
    assert jax.grad(lambda q: by_xla(q).sum())(q).shape == q.shape


def test_public_names_and_their_types_agree() -> None:
    stub = ast.parse(Path(pallas_kernels.__file__).with_suffix(".pyi").read_text())
    typed = {
        name.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert list(typed) and set(typed) == set(pallas_kernels.__all__)
    for name, module in typed.items():
        value = getattr(pallas_kernels, name)
        assert value is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="'no_such_kernel'"):
        _ = pallas_kernels.no_such_kernel
