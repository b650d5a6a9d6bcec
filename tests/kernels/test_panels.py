"""Products by panels of packed weights: exact for every shape, however many threads share them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels.llvm import calls, native, team
from pallas_kernels.llvm.formats import processor
from pallas_kernels.llvm.kinds import INPUTS
from pallas_kernels.products import choice
from pallas_kernels.products import weight as forms
from pallas_kernels.products.cpu import panels, products
from pallas_kernels.products.cpu.int4 import in_pairs
from pallas_kernels.products.cpu.int4_panels import int4_bytes_panels_module
from pallas_kernels.products.weights import stored
from pallas_kernels.quantization.formats import INT4, INT4_BY_INT8, INT8, INT8_BY_INT8, WeightFormat
from pallas_kernels.quantization.hadamard import block_of
from pallas_kernels.quantization.int4 import GROUPS, KINDS, Int4, pack
from pallas_kernels.quantization.quantized import quantize
from tests.kernels.interpreted import normal
from tests.kernels.test_int4 import packed, quantizing, wide_values
from tests.kernels.test_masked import SETS, runs_here

HOST = native.host()
# Intel's processors have the instructions that only AMD's multiply fast by
AS_AMD = replace(HOST, cpu="znver4") if processor(HOST).pairs and HOST.architecture == "x86" else HOST
AT = processor(AS_AMD)
BFLOAT16 = WeightFormat("bfloat16", 16)
PAIRS, BYTES = (panels.serves(AT, "bfloat16", weight) for weight in (BFLOAT16, INT8_BY_INT8))
needs_pairs = pytest.mark.skipif(not PAIRS, reason="needs AVX-512's products of bfloat16 pairs")
needs_bytes = pytest.mark.skipif(not BYTES, reason="needs AVX2")
fewer, few = (
    settings(max_examples=examples, deadline=None, phases=[Phase.generate])  # each is compiled
    for examples in (2, 6)
)
rows, chunks, outs = st.integers(1, 2 * panels.ROWS + 9), st.integers(1, 60), st.integers(panels.OUTS, 300)
STEP = panels.inputs_at_once(BFLOAT16)
DEPTH = panels.WORDS * panels.WORD // 2  # inputs that are packed at a time
FOUR_BITS = INT4, INT4_BY_INT8
MORE_ROWS = "bfloat16 * bfloat16, more rows"


@pytest.fixture(autouse=True)
def as_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are those of AMD's processors, and have names of their own."""
    if AS_AMD != HOST:
        monkeypatch.setattr(native, "host", lambda: AS_AMD)
        monkeypatch.setattr(products, "register", lambda name, make: calls.register(f"{name}_amd", make))


def multiplied(x: jax.Array, weight: Any, dtype: Any, name: str, form: str = "panels") -> Any:
    """In this form, which calls a kernel whose name begins so."""
    given = stored(weight)
    given = given.with_forms(((forms.form_key(len(x), str(x.dtype), given.format.name), form),))
    lowered = jax.jit(lambda x, weight: weight.product(x, dtype)).lower(x, given)
    assert name in lowered.as_text()
    got = lowered.compile()(x, given)
    assert got.dtype == dtype
    return np.asarray(got, np.float64)


def arrays(rows: int, size: int, outs: int, x: str = "bfloat16") -> tuple[jax.Array, jax.Array]:
    return normal((rows, size), rows, x), normal((outs, size), outs, "bfloat16")


def exact(x: jax.Array, weight: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


def assert_close(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], dtype: Any) -> None:
    rounding = 2.0**-8 if dtype == "bfloat16" else 0
    assert (np.abs(got - want) <= rounding * np.abs(want) + 2e-6 * np.abs(want).max()).all()


@needs_pairs
@few
@given(rows=rows, chunks=chunks, outs=outs, dtype=st.sampled_from(INPUTS))
def test_the_product_of_pairs(rows: int, chunks: int, outs: int, dtype: str) -> None:
    x, weight = arrays(rows, chunks * STEP, outs)
    assert_close(multiplied(x, weight, dtype, "jengine_panels"), exact(x, weight), dtype)


@needs_bytes
@few
@given(rows=rows, chunks=chunks, outs=outs, x=st.sampled_from(INPUTS), dtype=st.sampled_from(INPUTS))
def test_products_of_bytes_are_those_of_the_other_kernel(
    rows: int, chunks: int, outs: int, x: str, dtype: str
) -> None:
    """To the last bit. That one is compared with exact products in test_products.py."""
    size = chunks * panels.inputs_at_once(INT8_BY_INT8)
    inputs, weight = arrays(rows, size, outs, x)
    given = quantize(weight, "int8", inputs=True, hadamard=block_of(size))
    np.testing.assert_array_equal(
        multiplied(inputs, given, dtype, "jengine_panels"),
        multiplied(inputs, given, dtype, "jengine_product", "kernel"),
    )


@needs_bytes
@pytest.mark.parametrize("number", [2.0, -2.0])
def test_the_largest_sums_of_bytes_are_exact(number: float) -> None:
    size = 2 * panels.WORDS * panels.WORD + panels.inputs_at_once(INT8_BY_INT8)
    weight = quantize(jnp.full((70, size), number), "int8", inputs=True)
    for x in 1.0, -1.0:
        got = multiplied(jnp.full((3, size), x), weight, "float32", "jengine_panels")
        np.testing.assert_allclose(got, np.full((3, 70), x * number * size), rtol=1e-6)


def four_bits(outs: int, size: int, group: int, *, offset: bool, inputs: bool, hadamard: int = 1) -> Int4:
    how: dict[str, Any] = {"group": group, "hadamard": hadamard, "inputs": inputs}
    made = quantizing(normal((outs, size), outs), **how)
    return replace(made, offset=2 * jnp.abs(made.scale)) if offset else made


@needs_bytes
@pytest.mark.parametrize("group", GROUPS)
@fewer
@given(
    rows=rows,
    chunks=chunks,
    outs=outs,
    x=st.sampled_from(INPUTS),
    dtype=st.sampled_from(INPUTS),
    offset=st.booleans(),
    transformed=st.booleans(),
)
def test_products_of_bytes_and_four_bits(
    group: int, rows: int, chunks: int, outs: int, x: str, dtype: str, offset: bool, transformed: bool
) -> None:
    """The other kernel scales and adds in another order. The last group may have fewer inputs."""
    size = chunks * panels.inputs_at_once(INT4_BY_INT8)
    block = block_of(size) if transformed else 1
    inputs = normal((rows, size), rows, x)
    weight = four_bits(outs, size, group, offset=offset, inputs=True, hadamard=block)
    got = multiplied(inputs, weight, dtype, "jengine_panels")
    want = multiplied(inputs, weight, "float32", "jengine_product", "kernel")
    assert_close(got, want, dtype)
    if not transformed:
        assert_close(got, multiplied(inputs, weight, "float32", "", "xla"), dtype)
        of_bytes = quantize(inputs, "int8")
        scales = np.asarray(of_bytes.scale, np.float64)[:, None]
        assert_close(got, exact(of_bytes.values, wide_values(weight)) * scales, dtype)


@needs_bytes
@pytest.mark.parametrize("number, byte", [(7, 127.0), (7, -127.0), (-8, 127.0)])
@pytest.mark.parametrize("group", GROUPS)
def test_sums_within_a_group_are_exact(number: int, byte: float, group: int) -> None:
    """Codes and bytes are the largest, and scales powers of two."""
    size = 3 * panels.WORDS * panels.WORD + panels.inputs_at_once(INT4_BY_INT8)
    numbers = jnp.full((70, size), number, jnp.int8)
    scale = jnp.full((70, -(-size // group)), 0.5)
    weight = pack(numbers, scale, None, group=group, inputs=True)
    got = multiplied(jnp.full((3, size), byte), weight, "float32", "jengine_panels")
    np.testing.assert_array_equal(got, np.full((3, 70), byte * number * 0.5 * size))


@pytest.mark.parametrize("name", ["avx2", "avxvnni", "avx512"])
@pytest.mark.parametrize("kind", ["w4a8", "w8a8"])
def test_other_processors_get_what_the_other_kernel_gives(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strips of every height, several chunks of inputs, and several panels."""
    target = native.Target(SETS[name][0], features=SETS[name][1])
    if not runs_here(target):
        pytest.skip(f"this processor lacks {name}")
    monkeypatch.setattr(native, "host", lambda: target)
    monkeypatch.setattr(products, "register", lambda known, make: calls.register(f"{known}_{name}", make))
    long, wide = (panels.WORDS * panels.WORD + 64, 70, 32), (192, 3 * panels.OUTS - 1, 128)
    for rows, (size, outs, group) in (1, wide), (15, long), (17, long), (panels.LEAST + 10, wide):
        x, weight = arrays(rows, size, outs)
        if kind == "w8a8":
            given: Any = quantize(weight, "int8", inputs=True)
            got = multiplied(x, given, "float32", "jengine_panels")
            np.testing.assert_array_equal(got, multiplied(x, given, "float32", "jengine_product", "kernel"))
        else:
            given = four_bits(outs, size, group, offset=group > 32, inputs=True)
            got = multiplied(x, given, "float32", "jengine_panels")
            assert_close(got, multiplied(x, given, "float32", "jengine_product", "kernel"), "float32")


@pytest.mark.parametrize("name", ["avx2", "avxvnni", "avx512"])
def test_no_instruction_is_compiled_that_a_processor_lacks(name: str) -> None:
    triple, features, *_, lacking = SETS[name]
    target = native.Target(triple, features=features)
    text = native.assembly(int4_bytes_panels_module(target, "bfloat16", 64, True), target)
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith((".", "#", "//")))
    assert re.search("vpdpbusd" if name == "avxvnni" else "vpmaddubsw", code) and not re.search(lacking, code)


@needs_pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [16, *GROUPS])
@fewer
@given(rows=rows, chunks=chunks, outs=outs, dtype=st.sampled_from(INPUTS), offset=st.booleans())
def test_products_of_four_bits(
    group: int, kind: str, rows: int, chunks: int, outs: int, dtype: str, offset: bool
) -> None:
    """Weights are rounded to bfloat16, as the other kernel rounds them."""
    size = -(-chunks * panels.inputs_at_once(INT4) // group) * group
    weight, wide = packed(outs, size, group, offset=offset, kind=kind)
    x = normal((rows, size), rows, "bfloat16")
    want = exact(x, jnp.asarray(wide, jnp.float32).astype("bfloat16"))
    assert_close(multiplied(x, weight, dtype, "jengine_panels_" + kind), want, dtype)
    assert_close(multiplied(x, weight, dtype, "jengine_product", "kernel"), want, dtype)


@needs_pairs
def test_inputs_of_four_bits_are_transformed() -> None:
    x = normal((70, 160), 1, "bfloat16")
    weight = four_bits(70, 160, 128, offset=True, inputs=False, hadamard=block_of(160))
    got = multiplied(x, weight, "float32", "jengine_panels_int4")
    assert_close(got, multiplied(x, weight, "float32", "jengine_product", "kernel"), "float32")


@needs_pairs
@pytest.mark.parametrize("rows", [5, panels.LEAST, panels.LEAST + 7, 4 * panels.LEAST + 1, panels.ROWS + 1])
def test_many_threads_divide_the_rows_too(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parts as for 64 threads."""
    monkeypatch.setattr(team, "parts", lambda: 64 * team.PARTS)
    code = native.compiled(lambda: panels.pairs_module(native.host()), "multiply", "parts")
    name = calls.register("panels_of_many_threads", lambda: [(code[0], code[1])])
    monkeypatch.setattr(products, "register_panels", lambda: name)
    x, weight = arrays(rows, DEPTH + STEP, 3 * panels.OUTS - 1)
    assert_close(multiplied(x, weight, "float32", name), exact(x, weight), "float32")


@needs_pairs
@pytest.mark.parametrize("size, outs", [(STEP + 2, panels.OUTS), (STEP, panels.OUTS - 1)])
def test_other_sizes_take_the_other_kernel(size: int, outs: int) -> None:
    x, weight = arrays(70, size, outs)
    assert_close(multiplied(x, weight, "float32", "jengine_product"), exact(x, weight), "float32")


@pytest.mark.parametrize(
    "inputs", [pytest.param(False, marks=needs_pairs), pytest.param(True, marks=needs_bytes)]
)
def test_kernels_of_fused_weights_are_registered_before_programs_are_loaded(
    inputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates and their factors lie side by side, so the second axis has two outputs."""
    names: list[str] = []
    monkeypatch.setattr(products, "register", lambda name, make: names.append(name) or name)
    flat = replace(four_bits(80, 128, 32, offset=False, inputs=inputs), dtype="bfloat16")
    weight = stored(flat.map(lambda array: array.reshape(40, 2, -1)))
    weight.prepare()
    prepared = {*names}
    x = normal((70, 128), 0, "bfloat16")
    for form in "panels", "kernel":
        key = forms.form_key(len(x), str(x.dtype), weight.format.name)
        jax.jit(lambda x, weight: weight.product(x)).trace(x, weight.with_forms(((key, form),)))
    assert {*names} == prepared and any("panels" in name for name in prepared)


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("size, outs", [(130, panels.OUTS), (128, panels.OUTS - 1)])
def test_other_sizes_of_four_bits_take_the_other_kernel(size: int, outs: int, inputs: bool) -> None:
    x, weight = normal((70, size), 1, "bfloat16"), four_bits(outs, size, 32, offset=True, inputs=inputs)
    multiplied(x, weight, "float32", "jengine_product")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("bfloat16", marks=needs_pairs),
        pytest.param("int4", marks=needs_pairs),
        pytest.param("w4a8", marks=needs_bytes),
    ],
)
def test_a_row_is_the_same_among_any_others(kind: str) -> None:
    x, weight = arrays(200, 96, 70)
    if kind != "bfloat16":
        weight = four_bits(70, 96, 64, offset=True, inputs=kind == "w4a8")
    every = multiplied(x, weight, "float32", "jengine_panels")
    for first, end in ((0, 1), (3, 9), (7, 200)):
        np.testing.assert_array_equal(
            multiplied(x[first:end], weight, "float32", "jengine_panels"), every[first:end]
        )


def test_prompts_take_panels_where_the_processor_has_the_instructions() -> None:
    wide = native.Target("x86_64-unknown-linux-gnu", features="+avx512f,+avx512bw,+avx512vl,+avx512dq")
    pairs, slow_pairs, bytes_ = (
        processor(native.Target(wide.triple, cpu, f"{wide.features},+{name}"))
        for cpu, name in (("znver4", "avx512bf16"), ("sapphirerapids", "avx512bf16"), ("", "avx512vnni"))
    )
    narrow = processor(native.Target(wide.triple, features="+avx2,+fma,+f16c"))
    for at, weight, first in (
        (narrow, BFLOAT16, "kernel"),
        (narrow, INT4, "kernel"),
        (narrow, INT8_BY_INT8, "panels"),
        (narrow, INT4_BY_INT8, "panels"),
        (pairs, BFLOAT16, "panels"),
        (pairs, INT4, "panels"),
        (pairs, INT8_BY_INT8, "panels"),
        (pairs, INT4_BY_INT8, "panels"),
        (slow_pairs, BFLOAT16, "float32"),
        (slow_pairs, INT8, "float32"),
        (slow_pairs, INT4, "kernel"),
        (bytes_, BFLOAT16, "kernel"),
        (bytes_, INT4, "kernel"),
        (bytes_, INT8_BY_INT8, "panels"),
        (bytes_, INT4_BY_INT8, "panels"),
    ):
        assert choice.candidates(at, "bfloat16", weight, 256)[0] == first
        assert choice.candidates(at, "bfloat16", weight, 64) == (
            first if weight == INT4_BY_INT8 or first == "float32" else "kernel",
        )
        measured = weight == INT4_BY_INT8 and first == "panels"
        assert choice.candidates(at, "bfloat16", weight, 16) == ("kernel", *(["panels"] if measured else []))


def test_panels_are_not_used_where_all_rows_must_be_summed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "candidates", lambda *_: ("panels", "xla"))
    monkeypatch.setattr(choice, "_fastest", lambda able, *_: able[0])
    assert choice.forms("bfloat16", [BFLOAT16], (64, 32), {})[MORE_ROWS] == "panels"
    for known in ({}, {MORE_ROWS: "panels"}):
        found = choice.forms("bfloat16", [BFLOAT16], (64, 32), known, by_place=False)
        assert {*found.values()} == {"kernel"}


def test_forms_of_four_bits_unless_another_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_fastest", lambda able, *_: able[0])
    found = choice.forms("bfloat16", FOUR_BITS, (64, 32), {})
    for weight, rows in (INT4, "more rows"), (INT4_BY_INT8, "more rows"), (INT4_BY_INT8, "64 rows"):
        expected = "panels" if panels.serves(AT, "bfloat16", weight) else "kernel"
        assert found.pop(f"bfloat16 * {weight.name}, {rows}") == expected
    assert found.pop(f"bfloat16 * {INT4.name}, 1 rows") == ("kernel" if in_pairs(AT, "bfloat16") else "row")
    assert {*found.values()} == {"kernel"}
    assert {*choice.forms("bfloat16", FOUR_BITS, (64, 32), {}, by_place=False).values()} == {"kernel"}
