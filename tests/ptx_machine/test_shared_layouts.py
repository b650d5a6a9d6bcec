"""Swizzles, matrix descriptors and tensor maps, against copies that are written out number by number."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.ptx_machine.descriptors import MatrixDescriptor, decoded
from tools.ptx_machine.swizzle import period, swizzled
from tools.ptx_machine.tensor_maps import TensorMap

SOME = settings(max_examples=15, deadline=None)


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@SOME
@given(st.integers(0, 1 << 18))
def test_a_swizzle_permutes_chunks_of_16_bytes_within_a_line(width: int, address: int) -> None:
    # PTX ISA, "Swizzling modes": in row i of the pattern (of 128 bytes), chunk j is found at j xor i, for the
    # 8 chunks of 128-byte mode; with 64 and 32 bytes in pairs and fours of rows.
    row, chunk = address // 128 % 8, address // 16 % 8
    moved = {16: chunk, 32: chunk ^ row % 2, 64: chunk ^ row % 4, 128: chunk ^ row}[width]
    want = address // 128 * 128 + moved * 16 + address % 16
    assert swizzled(address, width) == want
    assert swizzled(want, width) == address
    assert swizzled(address + period(width) * 3, width) == want + period(width) * 3
    np.testing.assert_array_equal(swizzled(np.array([address]), width), [want])


def test_the_pattern_of_128_bytes_from_the_isa() -> None:
    rows = [[swizzled(128 * row + 16 * chunk, 128) // 16 % 8 for chunk in range(8)] for row in range(8)]
    assert rows[0] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert rows[1] == [1, 0, 3, 2, 5, 4, 7, 6]
    assert rows[2] == [2, 3, 0, 1, 6, 7, 4, 5]
    assert rows[7] == [7, 6, 5, 4, 3, 2, 1, 0]


def encoded(start: int, leading: int, stride: int, mode: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def test_fields_of_a_descriptor() -> None:
    assert decoded(encoded(0x1400, 16, 1024, 1)) == MatrixDescriptor(0x1400, 16, 1024, 0, 128)
    assert decoded(encoded(32, 4096, 512, 2) | 3 << 49) == MatrixDescriptor(32, 4096, 512, 3, 64)
    assert [decoded(mode << 62).swizzle for mode in range(4)] == [16, 128, 64, 32]
    with pytest.raises(NotImplementedError, match="base offset 1"):
        decoded(1 << 49).addresses(np.arange(8), 16, 2)


def tensor_core_operand(matrix: np.ndarray, width: int, start: int) -> np.ndarray:
    """Shared memory after a TMA load of a matrix in boxes of one line's width, one after the other."""
    rows, columns = matrix.shape
    per = width // matrix.itemsize
    memory = np.zeros(start + matrix.nbytes, np.uint8)
    raw = np.frombuffer(matrix.tobytes(), np.uint8)
    for number, column in enumerate(range(0, columns, per)):
        tensor = TensorMap(
            0,
            matrix.itemsize,
            (columns, rows),
            (matrix.itemsize, columns * matrix.itemsize),
            (per, rows),
            width,
        )
        source, inside = tensor.bytes((column, 0))
        assert inside is None
        memory[tensor.places(start + number * rows * width)] = raw[source]
    return memory


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(("mode", "width"), [(1, 128), (2, 64), (3, 32)])
def test_an_operand_along_k_is_what_tma_loaded(mode: int, width: int, itemsize: int) -> None:
    rows, k = 64, 2 * width // itemsize
    matrix = np.arange(rows * k).astype(f"u{itemsize}").reshape(rows, k)
    memory = tensor_core_operand(matrix, width, 2048)
    step = 32 // itemsize  # K of an instruction
    for at in range(0, k, step):
        box, within = divmod(at * itemsize, width)
        descriptor = encoded(2048 + box * rows * width + within, 16, 8 * width, mode)
        places = decoded(descriptor).addresses(np.arange(rows), step, itemsize)
        np.testing.assert_array_equal(
            memory.view(matrix.dtype)[places // itemsize], matrix[:, at : at + step]
        )
        some = decoded(descriptor).addresses(np.arange(16, 32), step, itemsize)
        np.testing.assert_array_equal(some, places[16:32])


@pytest.mark.parametrize(("mode", "width"), [(1, 128), (2, 64), (3, 32)])
def test_an_operand_along_n_is_what_tma_loaded(mode: int, width: int) -> None:
    k, n = 64, 2 * width // 2  # two lines along N
    matrix = np.arange(k * n).astype(np.uint16).reshape(k, n)
    memory = tensor_core_operand(matrix, width, 1024)
    for at in range(0, k, 16):
        descriptor = encoded(1024 + at * width, k * width, 8 * width, mode)
        places = decoded(descriptor).addresses(np.arange(n), 16, 2, transposed=True)
        np.testing.assert_array_equal(memory.view(np.uint16)[places // 2], matrix[at : at + 16].T)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_operand_without_swizzle_is_core_matrices(transposed: bool) -> None:
    """Core matrices are 8 lines of 16 bytes; `leading` and `stride` lie between them."""
    k, n, memory = 16, 32, np.zeros(1 << 14, np.uint16)
    matrix = np.arange(n * k).astype(np.uint16).reshape(n, k)
    leading, stride = (512, 128) if not transposed else (128, 1024)
    for (i, j), number in np.ndenumerate(matrix):
        if transposed:
            at = i // 8 * stride + j // 8 * leading + j % 8 * 16 + i % 8 * 2
        else:
            at = i // 8 * stride + j // 8 * leading + i % 8 * 16 + j % 8 * 2
        memory[(256 + at) // 2] = number
    places = decoded(encoded(256, leading, stride, 0)).addresses(np.arange(n), k, 2, transposed)
    np.testing.assert_array_equal(memory[places // 2], matrix)


@SOME
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    box=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    corner=st.lists(st.integers(-5, 10), min_size=4, max_size=4),
    itemsize=st.sampled_from([1, 2, 4]),
)
def test_a_box_is_copied_number_by_number(
    sizes: list[int], box: list[int], corner: list[int], itemsize: int
) -> None:
    rank = len(sizes)
    array = np.arange(1, np.prod(sizes) + 1).astype(f"u{itemsize}").reshape(sizes[::-1])
    tensor = TensorMap(0, itemsize, tuple(sizes), array.strides[::-1], tuple(box[:rank]))
    source, inside = tensor.elements(corner[:rank])
    got = [
        int(array.reshape(-1)[at // itemsize]) if inside is None or inside[i] else 0
        for i, at in enumerate(source.tolist())
    ]
    want = []
    for index in itertools.product(*(range(b) for b in reversed(tensor.box))):
        where = [i + c for i, c in zip(index, reversed(corner[:rank]), strict=True)]
        valid = all(0 <= w < size for w, size in zip(where, array.shape, strict=True))
        want.append(int(array[tuple(where)]) if valid else 0)
    assert got == want
    assert tensor.size == len(want) * itemsize
    bytes_, byte_inside = tensor.bytes(corner[:rank])
    assert bytes_[::itemsize].tolist() == source.tolist()
    assert (bytes_.reshape(-1, itemsize) - source[:, None] == np.arange(itemsize)).all()
    assert byte_inside is None if inside is None else byte_inside[::itemsize].tolist() == inside.tolist()


def test_a_box_over_the_edges_of_a_tensor() -> None:
    tensor = TensorMap(0, 2, (10, 6), (2, 32), (8, 4))
    for corner, want in {
        (-3, 0): [i >= 3 for _ in range(4) for i in range(8)],
        (0, -1): [j >= 1 for j in range(4) for _ in range(8)],
        (5, 4): [i < 5 and j < 2 for j in range(4) for i in range(8)],
        (10, 0): [False] * 32,
    }.items():
        _, inside = tensor.elements(corner)
        assert inside is not None and inside.tolist() == want
    assert tensor.elements((2, 2))[1] is None
    assert tensor.size == 64  # also of boxes that are partly outside


def test_a_box_lies_densely_in_shared_memory_and_its_swizzle_follows_the_address() -> None:
    tensor = TensorMap(0, 2, (64, 4), (2, 128), (64, 4), 128)
    assert sorted(tensor.places(1024)) == [*range(1024, 1536)]
    first = tensor.places(1024 + 512)  # row 4 of the pattern
    assert first[0] == 1536 + 4 * 16
    assert TensorMap(0, 2, (64, 4), (2, 128), (64, 4)).places(128).tolist() == [*range(128, 640)]


def test_what_the_driver_would_refuse() -> None:
    good = {
        "base": 1 << 32,
        "itemsize": 2,
        "sizes": (128, 7),
        "strides": (2, 256),
        "box": (64, 4),
        "swizzle": 128,
    }
    assert TensorMap(**good).problems() == []
    bad = {
        "base": (1 << 32) + 8,
        "itemsize": 3,
        "sizes": (0, 7),
        "strides": (2, 100),
        "box": (64, 257),
        "swizzle": 48,
    }
    for name, value in bad.items():
        assert any(name in problem for problem in TensorMap(**good | {name: value}).problems())
    assert "the swizzle 64" in TensorMap(**good | {"swizzle": 64}).problems()[0]
    assert "10 bytes" in TensorMap(**good | {"box": (5, 4)}).problems()[0]
    assert "rank" in TensorMap(**good | {"box": (64,)}).problems()[0]
    with pytest.raises(ValueError, match="3 coordinates for a tensor map of rank 2"):
        TensorMap(**good).elements((0, 0, 0))
