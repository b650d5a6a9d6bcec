"""Products and attention with AMX: emulated, executed on a processor that has it, and compiled for one."""

from __future__ import annotations

import ctypes
import re
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.cpu import attention
from pallas_kernels.attention.cpu.form import Form
from pallas_kernels.llvm import amx, calls, native
from pallas_kernels.llvm.formats import processor
from pallas_kernels.products import choice
from pallas_kernels.products import weight as forms
from pallas_kernels.products.cpu import products, tiles
from pallas_kernels.products.cpu.int4 import TABLES
from pallas_kernels.products.weight import form_key, forms_of
from pallas_kernels.products.weights import product, stored
from pallas_kernels.quantization.formats import INT4, INT4_BY_INT8, INT8, INT8_BY_INT8, WeightFormat
from pallas_kernels.quantization.hadamard import transform
from pallas_kernels.quantization.int4 import pack, wide
from pallas_kernels.quantization.quantized import quantize
from tests.kernels.test_attention_decode import BOTH
from tests.kernels.test_cpu_attention import Case, check_prefill

AMX = (
    "+sse2,+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512bf16,+avx512vnni,"
    "+amx-tile,+amx-bf16,+amx-int8"
)
SAPPHIRE_RAPIDS = native.Target("x86_64-unknown-linux-gnu", "sapphirerapids", AMX)
BFLOAT16, FLOAT32 = WeightFormat("bfloat16", 16), WeightFormat("float32", 32)


class Tiles:
    """Eight registers of 16 rows by 64 bytes, as LLVM's intrinsics see them; each thread has its own."""

    def __init__(self) -> None:
        self.configs: dict[int, bytes] = {}
        self.of_threads: dict[int, np.ndarray[Any, Any]] = {}

    @property
    def registers(self) -> np.ndarray[Any, Any]:
        return self.of_threads.setdefault(threading.get_ident(), np.zeros((8, 16, 64), np.uint8))

    def configure(self, place: int) -> None:
        config = self.configs[threading.get_ident()] = ctypes.string_at(place, 64)
        assert config[0] == 1 and set(config[48:56]) == {16} and set(config[16:32:2]) == {64}
        self.registers[:] = 0

    def load(self, register: int, place: int, stride: int) -> None:
        assert threading.get_ident() in self.configs
        for row in range(16):
            self.registers[register, row] = np.frombuffer(
                ctypes.string_at(place + row * stride, 64), np.uint8
            )

    def store(self, register: int, place: int, stride: int) -> None:
        for row in range(16):
            ctypes.memmove(place + row * stride, self.registers[register, row].tobytes(), 64)

    def zero(self, register: int) -> None:
        assert threading.get_ident() in self.configs
        self.registers[register] = 0

    def dot_pairs(self, into: int, left: int, right: int) -> None:
        a, b = (
            (self.registers[n].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            for n in (left, right)
        )
        b = b.reshape(16, 16, 2).transpose(0, 2, 1).reshape(32, 16)
        self.registers[into] = (
            (self.registers[into].view(np.float32) + a @ b).astype(np.float32).view(np.uint8)
        )

    def dot_bytes(self, into: int, left: int, right: int) -> None:
        a, b = (self.registers[n].view(np.int8).astype(np.int32) for n in (left, right))
        b = b.reshape(16, 16, 4).transpose(0, 2, 1).reshape(64, 16)
        self.registers[into] = (self.registers[into].view(np.int32) + a @ b).view(np.uint8)

    def release(self) -> None:
        del self.configs[threading.get_ident()]


HELD = Tiles()
I8, I64, PTR = ctypes.c_uint8, ctypes.c_int64, ctypes.c_void_p
INTRINSICS: dict[str, tuple[Any, ...]] = {
    "ldtilecfg": (HELD.configure, PTR),
    "tileloadd64": (HELD.load, I8, PTR, I64),
    "tilestored64": (HELD.store, I8, PTR, I64),
    "tilezero": (HELD.zero, I8),
    "tdpbf16ps": (HELD.dot_pairs, I8, I8, I8),
    "tdpbssd": (HELD.dot_bytes, I8, I8, I8),
    "tilerelease": (HELD.release,),
}
CALLBACKS = {
    name: ctypes.CFUNCTYPE(None, *kinds)(function) for name, (function, *kinds) in INTRINSICS.items()
}


def emulated(text: str) -> str:
    """A module that calls Python for instructions that this processor lacks."""
    for name, callback in CALLBACKS.items():
        kinds = {I8: "i8", I64: "i64", PTR: "ptr"}
        args = ", ".join(f"{kinds[kind]} %a{n}" for n, kind in enumerate(INTRINSICS[name][1:]))
        text = re.sub(rf'declare void @"llvm\.x86\.{name}"\([^)]*\)', "", text).replace(
            f'@"llvm.x86.{name}"', f"@emulated_{name}"
        )
        address = ctypes.cast(callback, ctypes.c_void_p).value
        text += (
            f"\ndefine void @emulated_{name}({args}) {{ call void inttoptr (i64 {address} to ptr)({args})\n"
            " ret void }\n"
        )
    return text


@pytest.fixture(params=["emulated", "executed"])
def with_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "executed":
        if not amx.permitted():
            pytest.skip("this processor has no AMX")
        return
    monkeypatch.setattr(amx, "permitted", lambda: True)
    monkeypatch.setattr(native, "_objects", None)  # the code has addresses of this process
    for module, name in ((tiles, "tiles_module"), (tiles, "int4_tiles_module"), (attention, "source")):
        made = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, made=made, **options: emulated(made(*args, **options))
        )
    for module in (products, attention):
        monkeypatch.setattr(module, "register", lambda name, make: calls.register(f"{name}_emulated", make))
    form = attention.form
    monkeypatch.setattr(attention, "form", lambda *args, **options: by_tiles(form(*args, **options)))


def by_tiles(form: Form) -> Form:
    """The form that a processor with tiles has."""
    pairs = form.pair_keys or processor(native.host()).pairs
    return (
        form
        if form.decode or not pairs
        else replace(form, strip=amx.SIDE, pair_keys=True, pair_values=True, tiles=True)
    )


@pytest.mark.parametrize(("head_dim", "kind", "further"), [(40, None, None), (72, "int8", 7)])
def test_attention_of_prompts(head_dim: int, kind: str | None, further: int | None, with_tiles: None) -> None:
    if not processor(native.host()).pairs:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    check_prefill(Case(head_dim, 1, 3, 16, "bfloat16", kind, BOTH), 20, [0, 57], [20, 17], further)


@pytest.mark.parametrize(
    ("x_dtype", "kind"), [("bfloat16", "bfloat16"), ("bfloat16", "w8a8"), ("float32", "w8a8")]
)
@pytest.mark.parametrize(
    "shape",
    [
        (17, 100, 45),
        (18, 192, 45),
        (18, 1100, 45),  # more inputs than are packed at a time
        *(
            pytest.param(shape, marks=pytest.mark.full)
            for shape in ((1, 32, 32), (16, 31, 33), (50, 130, 64), (300, 1100, 33))
        ),
    ],
)
def test_the_product(x_dtype: str, kind: str, shape: tuple[int, int, int], with_tiles: None) -> None:
    rows, size, outs = shape
    x, plain = (jax.random.normal(jax.random.key(n), (n, size)) for n in (rows, outs))
    hadamard = 64 if size % 64 == 0 else 1
    weight: Any = (
        quantize(plain, "int8", inputs=True, hadamard=hadamard) if kind == "w8a8" else plain.astype(kind)
    )
    x = x.astype(x_dtype)
    for dtype in ("float32", "bfloat16"):
        got = {}
        for form in ("amx", "xla"):
            given = stored(weight).with_forms(forms_of({form_key(rows, x_dtype, kind): form}))
            lowered = jax.jit(product, static_argnums=2).lower(x, given, dtype)
            assert ("jengine_tiles" in lowered.as_text()) == (form == "amx")
            got[form] = np.asarray(lowered.compile()(x, given), np.float64)
        if kind == "w8a8" and hadamard > 1:  # sums in another order may round a byte otherwise
            np.testing.assert_allclose(got["amx"], got["xla"], atol=0.2)
        elif kind == "w8a8":
            np.testing.assert_array_equal(got["amx"], got["xla"])
        else:
            exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
            rounding = 2.0**-8 if dtype == "bfloat16" else 0
            assert (np.abs(got["amx"] - exact) <= rounding * np.abs(exact) + 2e-6 * np.abs(exact).max()).all()


@pytest.mark.parametrize(
    ("kind", "group", "offset", "hadamard"),
    [("int4", 32, False, 1), ("int4", 128, True, 1), ("e2m1", 16, False, 1), ("int4", 64, False, 64)],
)
@pytest.mark.parametrize("shape", [(3, 128, 32), (40, 1216, 45)])
def test_four_bits_become_bfloat16(
    kind: str, group: int, offset: bool, hadamard: int, shape: tuple[int, int, int], with_tiles: None
) -> None:
    rows, size, outs = shape
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, size)), jnp.bfloat16)
    numbers = jnp.asarray(rng.choice(TABLES[kind], (outs, size)), jnp.int8)
    scale, offsets = (jnp.asarray(rng.uniform(0.5, 2, (outs, -(-size // group))), jnp.float32) for _ in "so")
    inputs = hadamard > 1
    weight = pack(
        numbers, scale, offsets if offset else None, group=group, kind=kind, hadamard=hadamard, inputs=inputs
    )
    given = stored(weight)
    given = given.with_forms(forms_of({form_key(rows, "bfloat16", given.format.name): "amx"}))
    lowered = jax.jit(product, static_argnums=2).lower(x, given, "float32")
    assert "jengine_tiles" in lowered.as_text()
    got = np.asarray(lowered.compile()(x, given), np.float64)
    rounded = transform(x, hadamard).astype(jnp.bfloat16)
    exact = np.asarray(rounded, np.float64) @ np.asarray(wide(weight).astype(jnp.bfloat16), np.float64).T
    # the order in which numbers are transformed may round some otherwise
    allowed = 2e-6 if hadamard == 1 else 1e-3
    assert np.abs(got - exact).max() <= allowed * np.abs(exact).max()


def test_weights_too_small_for_a_tile_take_the_other_kernel() -> None:
    x, weight = jnp.ones((4, 64), jnp.bfloat16), jnp.ones((31, 64), jnp.bfloat16)
    given = stored(weight).with_forms(forms_of({form_key(4, "bfloat16", "bfloat16"): "amx"}))
    text = jax.jit(product).lower(x, given).as_text()
    assert "jengine_product_bfloat16_bfloat16" in text and "jengine_tiles" not in text


@pytest.mark.parametrize("of_bytes", [False, True])
def test_the_compiler_makes_tiles_of_it_and_spills_none(of_bytes: bool) -> None:
    text = native.assembly(
        tiles.tiles_module(SAPPHIRE_RAPIDS, "bfloat16", of_bytes=of_bytes), SAPPHIRE_RAPIDS
    )
    block = text[text.index("block_2:") : text.index("multiply:")]
    dot = "tdpbssd" if of_bytes else "tdpbf16ps"
    assert len(re.findall("tilestored", block)) == 4
    loops = re.findall(r"\.LBB\d+_\d+:.*?\bj\w+", block, re.S)
    inner = [part for part in loops if dot in part]
    for part in inner:
        assert part.count(dot) == part.count("tileloadd") and part.count(dot) % 4 == 0
        assert "tilestored" not in part and not re.search(r"zmm", part)  # sums stay where they are
    assert inner
    whole = text[text.index("multiply:") :]
    assert whole.count("ldtilecfg") == 1 and whole.count("tilerelease") == 1


def test_what_is_measured() -> None:
    with_amx, without = (
        processor(SAPPHIRE_RAPIDS),
        processor(native.Target("x86_64-unknown-linux-gnu", features=AMX.split(",+amx")[0])),
    )
    assert with_amx.tiles and not without.tiles
    assert choice.candidates(with_amx, "bfloat16", BFLOAT16, 8) == ("kernel", "amx", "xla")
    assert (
        choice.candidates(with_amx, "bfloat16", BFLOAT16, 1)
        == choice.candidates(without, "bfloat16", BFLOAT16, 8)
        == ("kernel",)
    )
    assert choice.candidates(without, "float32", INT8_BY_INT8, 256) == ("panels", "xla")
    assert choice.candidates(without, "float32", FLOAT32, 256) == ("kernel", "xla")
    assert choice.candidates(with_amx, "bfloat16", INT8, 256) == ("float32",)
    assert choice.candidates(with_amx, "bfloat16", BFLOAT16, 32) == ("float32", "amx", "xla")
    assert choice.candidates(with_amx, "bfloat16", INT4, 256) == ("kernel", "amx")
    assert choice.candidates(with_amx, "float32", INT4_BY_INT8, 256) == ("panels",)
    assert choice.candidates(with_amx, "bfloat16", INT4, 1) == ("row",)
    assert choice.candidates(without, "bfloat16", INT4, 8) == ("kernel",)
    assert choice.candidates(without, "bfloat16", INT4_BY_INT8, 8) == ("kernel", "panels")


def test_a_choice_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_fastest", lambda able, *_: able[-1])
    first, *_ = choice.candidates(processor(native.host()), "float32", INT8_BY_INT8, 256)
    found = choice.forms("float32", [FLOAT32, INT8_BY_INT8], (64, 32), {"float32 * w8a8, more rows": first})
    assert found["float32 * float32, more rows"] == "xla" and found["float32 * w8a8, more rows"] == first
    assert set(found.values()) <= {"kernel", "panels", "xla", "amx"}
    assert len(found) == 2 * (len(forms.ROW_CLASSES) + 1)
    monkeypatch.undo()
    assert choice.forms("float32", [FLOAT32], (64, 32), {})["float32 * float32, more rows"] in (
        "kernel",
        "xla",
    )
