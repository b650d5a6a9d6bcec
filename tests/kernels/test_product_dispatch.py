"""Which products are taken by GPUs' kernels, which by XLA, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import devices
from pallas_kernels.products import dispatch as product_dispatch
from pallas_kernels.products import weight as products
from pallas_kernels.products.eight_bits import EightBits
from pallas_kernels.products.groups import grouped
from pallas_kernels.products.weights import product, stored
from pallas_kernels.quantization.int4 import Int4, pack
from pallas_kernels.quantization.quantized import quantize
from tests.kernels.interpreted import normal

HOPPER: Any = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
AMPERE: Any = SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")
TURING: Any = SimpleNamespace(device_kind="Tesla T4", compute_capability="7.5")
NO_TURING = (
    "device=Tesla T4: the kernel is for GPUs of compute capability 9.0; GPUs of compute capability 8.x"
    ", and 10.0 and newer"
)
NO_TURING_IN_EIGHT_BITS = NO_TURING.replace("for GPUs", "for GPUs of compute capability 10.0; GPUs", 1)
BLACKWELL: Any = SimpleNamespace(device_kind="NVIDIA B200", compute_capability="10.0", platform="gpu")


def test_what_the_grouped_product_takes_and_why_not() -> None:
    x, weight = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((2, 32, 2, 64), jnp.bfloat16)
    for experts in weight, quantize(weight, "int8"), quantize(weight, "float8_e4m3fn"):
        assert product_dispatch.why_product_unsupported(x, experts, grouped=True, device=HOPPER) is None
    refusals: list[tuple[Any, Any, str]] = [
        ((x, weight), TURING, NO_TURING_IN_EIGHT_BITS),
        ((x, weight), AMPERE, "in=64: the kernel takes multiples of 128"),
        ((x.astype(jnp.float32), weight), HOPPER, "dtype=float32: the kernel takes bfloat16 and float16"),
        (
            (x, weight.astype(jnp.float16)),
            HOPPER,
            "weight=float16: the kernel takes x's dtype, bfloat16, or a quantized weight",
        ),
        ((x, weight[:, :24]), HOPPER, "out=48: the kernel takes multiples of 64"),
        ((x[:, :32], weight[..., :32]), HOPPER, "in=32: the kernel takes multiples of 64"),
    ]
    for arrays, device, reason in refusals:
        assert product_dispatch.why_product_unsupported(*arrays, grouped=True, device=device) == reason
    with pytest.raises(ValueError, match=r"impl='mosaic': device=.*compute capability 9\.0"):
        stored(weight).grouped_product(x, grouped(jnp.zeros(1, jnp.int32), 2), impl="mosaic")


def test_experts_of_eight_bits_take_rows_in_their_dtype() -> None:
    """Also if rows are transformed, which makes them float32, before they are rounded."""
    x, weight = normal((8, 128), 0, "bfloat16"), normal((2, 32, 2, 128), 1)
    groups = grouped(jnp.arange(8, dtype=jnp.int32) % 2, 2)
    for kind, options in ("int8", {"hadamard": 128}), ("int8", {}), ("float8_e4m3fn", {"by_group": True}):
        experts = EightBits(quantize(weight, kind, inputs=True, **options))
        assert experts.rounded(x).dtype == jnp.bfloat16  # what kernels multiply
        y = experts.grouped_product(x[groups.row], groups, impl="xla")[groups.place]
        want = jnp.einsum("ri,roui->rou", x.astype(jnp.float32), weight[jnp.arange(8) % 2])
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(y, np.float64), want, atol=0.06 * float(jnp.abs(want).max()))


def four_bits(*shape: int, group: int = 32, **how: Any) -> Int4:
    """A weight of zeros."""
    scale = jnp.ones((*shape[:-1], shape[-1] // group))
    return pack(jnp.zeros(shape, jnp.int8), scale, None, group=group, **how)


def test_what_quantized_products_take_and_why_not() -> None:
    x, weight = jnp.zeros((8, 192), jnp.bfloat16), four_bits(64, 192)
    assert product_dispatch.why_product_unsupported(x, weight, grouped=False, device=HOPPER) is None
    experts = four_bits(3, 32, 2, 96)
    assert product_dispatch.why_product_unsupported(x, experts, grouped=True, device=HOPPER) is None
    eight_bits = quantize(jnp.zeros((64, 192)), "int8")
    assert product_dispatch.why_product_unsupported(x, eight_bits, grouped=False, device=HOPPER) is None
    groups_of_16 = four_bits(64, 192, group=16)  # Ampere's kernel serves on Hopper, too
    assert product_dispatch.why_product_unsupported(x, groups_of_16, grouped=False, device=HOPPER) is None
    halves = four_bits(64, 192, parts=2)
    refusals: list[tuple[Any, Any, Any, str]] = [
        (x, weight, TURING, NO_TURING.replace("8.x, and 10.0 and newer", "8.0 and newer")),
        (x, eight_bits, AMPERE, "in=192: the kernel takes multiples of 128"),
        (
            x,
            quantize(jnp.zeros((64, 192)), "int8", inputs=True),
            AMPERE,
            "inputs=int8: XLA multiplies these without converting them",
        ),
        (x.astype(jnp.float32), weight, HOPPER, "dtype=float32: the kernel takes bfloat16 and float16"),
        (x, weight[:48], HOPPER, "out=48: the kernel takes multiples of 64"),
        (x, halves, HOPPER, "parts=2: the kernel takes inputs in one part"),
        (
            x,
            quantize(jnp.zeros((64, 192)), "int8", inputs=True),
            HOPPER,
            "size=192: the kernel takes multiples of 128",
        ),
        (
            jnp.zeros((513, 192), jnp.bfloat16),
            eight_bits,
            HOPPER,
            "rows=513: the kernel for eight-bit weights takes at most 512",
        ),
        (x[:, :96], quantize(jnp.zeros((64, 96)), "int8"), HOPPER, "in=96: the kernel takes multiples of 64"),
    ]
    for rows, refused, device, reason in refusals:
        assert product_dispatch.why_product_unsupported(rows, refused, grouped=False, device=device) == reason
    assert (
        product_dispatch.why_product_unsupported(x, experts[:, :24], grouped=True, device=HOPPER)
        == "out=48: the kernel takes multiples of 64"
    )
    both = quantize(jnp.zeros((64, 128)), "float8_e4m3fn", inputs=True, by_group=True)
    for inputs, reason, temporaries in (
        (True, None, 64 * 128 // 4),
        (False, "rows=2048: the kernel for eight-bit weights takes at most 512", 4 * 64 * 128),
    ):
        sides = replace(both, inputs=inputs)
        call: Any = jnp.zeros((2048, 128), jnp.bfloat16), sides
        assert product_dispatch.why_product_unsupported(*call, grouped=False, device=HOPPER) == reason
        assert stored(sides).converted_bytes("bfloat16", grouped=False, device=HOPPER) == temporaries
    with pytest.raises(ValueError, match=r"impl='mosaic': device=.*compute capability 9\.0"):
        stored(weight).on_gpu(x, x.dtype, impl="mosaic")
    np.testing.assert_array_equal(stored(weight).on_gpu(x, jnp.dtype("float32")), np.zeros((8, 64)))


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic infers no layouts for it")
def test_what_blackwells_kernel_takes_and_what_falls_to_an_older_one() -> None:
    weight, fp8 = jnp.zeros((4, 128, 256), jnp.bfloat16), "float8_e4m3fn"
    few = "up to 8 of a matrix cost mma.sync as few instructions"
    calls: list[tuple[Any, int, Any, Any]] = [
        (quantize(weight[0], "int8"), 9, "Blackwell", None),
        (quantize(weight[0], fp8), 512, "Blackwell", None),
        (quantize(weight[0], fp8), 8, "Ampere", f"rows=8: {few}"),
        (quantize(weight[0], fp8, inputs=True, by_group=True), 1, "Blackwell", None),
        (quantize(weight[0], fp8, by_group=True), 100, "Blackwell", None),
        (quantize(weight[0, :64], "int8"), 16, "Ampere", "out=64: the kernel takes multiples of 128"),
        (
            quantize(weight[0], "int8"),
            513,
            "XLA",
            "rows=513: the kernel for eight-bit weights takes at most 512",
        ),
        (
            quantize(weight[0], "int8", inputs=True),
            16,
            "XLA",
            "inputs=int8: XLA multiplies these without converting them",
        ),
        (weight, 40, "Blackwell", None),
        (quantize(weight, "int8"), 40, "Blackwell", None),
        (quantize(weight, "int8"), 16, "Ampere", f"rows=16: {few}"),
        (quantize(weight, fp8, inputs=True, by_group=True), 16, "Blackwell", None),
    ]
    for parameter, rows, name, why in calls:
        x: Any = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16)
        grouped_or_not = len(parameter.shape) == 3
        choice = product_dispatch.explain_product(x, parameter, grouped=grouped_or_not, device=BLACKWELL)
        assert choice == (name, why), (parameter.shape, rows)


def test_quantized_weights_are_read_as_they_lie_by_kernels_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Any] = []

    def kernel(x: jax.Array, *arrays: Any, dtype: Any, **how: Any) -> jax.Array:
        taken.append((x.shape, str(x.dtype), dtype))
        return jnp.zeros((len(x), 64))

    monkeypatch.setattr("pallas_kernels.products.hopper.int4_product.int4_product", kernel)
    monkeypatch.setattr("pallas_kernels.products.hopper.grouped_product.grouped_product", kernel)
    monkeypatch.setattr("pallas_kernels.products.ampere.product", kernel)
    x, eight_bits = jnp.zeros((9, 192), jnp.bfloat16), quantize(jnp.zeros((64, 192)), "int8")
    for capability in "9.0", "8.0":
        device = SimpleNamespace(
            device_kind="GPU", platform="gpu", compute_capability=capability, core_count=132
        )
        for module in devices, products:
            monkeypatch.setattr(module, "traced_for", lambda device=device: device)
        for weight in four_bits(64, 192, hadamard=64), eight_bits:
            assert product(x, weight, jnp.float32).shape == (9, 64)
    rows = ((9, 192), "bfloat16", jnp.float32)
    # transformed, and for Hopper's eight bits padded to a block; Ampere's take a multiple of 128 inputs
    assert taken == [rows, ((16, 192), "bfloat16", jnp.float32), rows]
