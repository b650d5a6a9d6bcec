"""Fragments, against products of whole matrices. PTX ISA's formulas are written once more, by number."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.ptx_machine.fragments import BITS, accumulators, decode, loaded, operand, results, stored

NUMPY = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}


def random(kind: str, *shape: int) -> np.ndarray:
    values = np.random.default_rng(1).integers(0 if kind == "u8" else -7, 8, shape)
    return values.astype(NUMPY[kind])


def words(matrix: np.ndarray) -> np.ndarray:
    """Neighbours along the last axis, packed in 32 bits."""
    return np.ascontiguousarray(matrix).view(np.uint32)


def a_registers(a: np.ndarray, per: int) -> list[np.ndarray]:
    """mma.m16n8k16 and others: a0 and a1 (8 rows on) in the first half of K, a2 and a3 in the second."""
    packed, half = words(a), 4  # of K, in words
    out = []
    for columns in range(a.shape[1] // (4 * per)):
        for rows in (0, 8):
            out.append(np.array([packed[lane // 4 + rows, lane % 4 + half * columns] for lane in range(32)]))
    return out


def b_registers(b: np.ndarray, per: int) -> list[np.ndarray]:
    """b [K, 8]: b0 in the first half of K, b1 in the second."""
    packed = words(b.T)
    return [
        np.array([packed[lane // 4, lane % 4 + 4 * part] for lane in range(32)])
        for part in range(b.shape[0] // (4 * per))
    ]


SHAPES = [
    ("bf16", 16),
    ("f16", 16),
    ("f16", 8),
    ("bf16", 8),
    ("e4m3", 32),
    ("e5m2", 32),
    ("s8", 32),
    ("u8", 16),
]


@pytest.mark.parametrize(("kind", "k"), SHAPES)
def test_a_product_of_fragments_is_the_product_of_the_matrices(kind: str, k: int) -> None:
    a, b = random(kind, 16, k), random(kind, k, 8)
    per = 32 // BITS[kind]
    got = operand(a_registers(a, per), kind, 16) @ operand(b_registers(b, per), kind, 8).T
    want = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_array_equal(got, want)
    registers = results(got)
    for lane in range(32):  # c0 and c1 in the lane's row, c2 and c3 8 rows further
        row, column = lane // 4, 2 * (lane % 4)
        block = want[[row, row, row + 8, row + 8], [column, column + 1] * 2]
        np.testing.assert_array_equal(registers[:, lane].view(np.float32), block)
    np.testing.assert_array_equal(accumulators([*registers], np.float32), want)


@pytest.mark.parametrize("columns", [8, 64, 256])
def test_accumulators_of_wgmma(columns: int) -> None:
    """PTX ISA, wgmma.m64nNk16: d[i] of a lane has row 16 (warp % 4) + lane / 4 (+ 8 if i / 2 is odd), column
    8 (i / 4) + 2 (lane % 4) + i % 2.
    """
    matrix = np.random.default_rng(0).standard_normal((16, columns)).astype(np.float32)
    registers = results(matrix)
    assert registers.shape == (columns // 2, 32)
    for i in range(columns // 2):
        for lane in range(32):
            row = lane // 4 + (8 if i // 2 % 2 else 0)
            column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
            assert registers[i, lane] == matrix[row, column].view(np.uint32)
    np.testing.assert_array_equal(accumulators([*registers], np.float32), matrix)
    np.testing.assert_array_equal(accumulators([*registers], np.int32), matrix.view(np.int32))


@pytest.mark.parametrize("columns", [8, 64])
def test_accumulators_of_16_bits_are_packed(columns: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((16, columns)).astype(np.float16)
    registers = results(matrix, packed=True)
    assert registers.shape == (columns // 4, 32)
    for i in range(columns // 4):
        for lane in range(32):
            row, column = lane // 4 + 8 * (i % 2), 8 * (i // 2) + 2 * (lane % 4)
            assert registers[i, lane] == words(matrix[row, column : column + 2])[0]
    np.testing.assert_array_equal(accumulators([*registers], np.float16, packed=True), matrix)


@pytest.mark.parametrize("kind", NUMPY)
def test_every_number_is_decoded(kind: str) -> None:
    bits = 1 << BITS[kind]
    raw = np.arange(bits, dtype=np.uint8 if bits == 256 else np.uint16)
    with np.errstate(invalid="ignore"):  # signaling NaN
        want = raw.view(NUMPY[kind]).astype(np.float32)
        np.testing.assert_array_equal(decode(raw, kind), want)
        np.testing.assert_array_equal(decode(raw.view(np.uint32), kind), want)


def test_numbers_of_four_bits_and_tf32() -> None:
    raw = np.array([0x10, 0x32, 0x98, 0xFE], np.uint8)
    assert decode(raw, "u4").tolist() == [0, 1, 2, 3, 8, 9, 14, 15]
    assert decode(raw, "s4").tolist() == [0, 1, 2, 3, -8, -7, -2, -1]
    assert decode(np.array([[0x3F801FFF]], np.uint32), "tf32").tolist() == [[1.0]]
    with pytest.raises(NotImplementedError, match=r"\.e2m1"):
        decode(raw, "e2m1")


@pytest.mark.parametrize("count", [1, 2, 4])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000))
def test_ldmatrix_and_stmatrix(count: int, seed: int) -> None:
    """A lane gets the two numbers of row lane / 4 from column 2 (lane % 4) on, of the transpose if .trans."""
    matrices = np.random.default_rng(seed).integers(0, 1 << 16, (count, 8, 8)).astype(np.uint16)
    rows = words(matrices).reshape(8 * count, 4)
    for transposed in (False, True):
        registers = loaded(rows, transposed)
        for j, matrix in enumerate(matrices):
            for lane in range(32):
                row, column = lane // 4, 2 * (lane % 4)
                pair = [matrix[column + i, row] if transposed else matrix[row, column + i] for i in (0, 1)]
                assert registers[j, lane] == int(pair[0]) | int(pair[1]) << 16
        np.testing.assert_array_equal(stored([*registers], transposed), rows)


def test_ldmatrix_fills_the_fragments_of_mma() -> None:
    """Four matrices of 8 x 8 are A; .trans makes B of rows along K."""
    a, b = random("bf16", 16, 16), random("bf16", 16, 8)
    quarters = [a[r : r + 8, c : c + 8] for c in (0, 8) for r in (0, 8)]
    registers = loaded(np.concatenate([words(q) for q in quarters]), False)
    np.testing.assert_array_equal(operand([*registers], "bf16", 16), a.astype(np.float32))
    registers = loaded(words(b), True)
    np.testing.assert_array_equal(operand([*registers], "bf16", 8), b.T.astype(np.float32))
