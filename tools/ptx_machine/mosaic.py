"""Executes the host function of a Mosaic GPU kernel, which makes its tensor maps and says how it is launched.

Mosaic compiles this function, LLVM IR without branches, along with the kernel. So what is launched here is
what a GPU would get. MOSAIC_GPU_DUMP_HOST_LLVM prints it.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from tools.ptx_machine.launch import Launch
from tools.ptx_machine.tensor_maps import TensorMap

# bytes of an element, by the code of its type in mosaic_gpu_init_tma_desc; 0, four bits, is not supported
ELEMENT_BYTES = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 9: 4, 10: 8}
MAP_BYTES = 128  # of a tensor map
ARGUMENTS = 1 << 16  # address of the array of the kernel's buffers
STACK = 1 << 20  # address of the first local variable
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "mul": operator.mul,
    "sub": operator.sub,
}
CASTS = ("ptrtoint", "inttoptr", "sext", "zext", "trunc")


# its arguments: a place for the result or a stream, and last the array of the addresses of its buffers
FUNCTION = re.compile(
    r"^define \w+ @(?!_mlir_ciface_)(\w+)_mosaic_gpu\((.*?)\)[^\n]*\{\n(.*?)\n\}", re.DOTALL | re.MULTILINE
)


class UnknownHostFunction(Exception):
    """A host function that does what Mosaic's did not do when this was written."""


def launch_of(module: str, arrays: Sequence[int]) -> Launch:
    """The launch of a kernel.

    Args:
        module: LLVM IR with one function NAME_mosaic_gpu.
        arrays: addresses of the kernel's inputs, then its outputs.

    Raises:
        UnknownHostFunction: the function has instructions or calls that are not known here.
    """
    found = FUNCTION.search(module)
    if not found:
        raise UnknownHostFunction("no function NAME_mosaic_gpu")
    *others, arguments = (name.split()[-1] for name in found[2].split(","))
    host = _Host(arrays)
    host.values |= dict.fromkeys(others, 0) | {arguments: ARGUMENTS}
    for line in filter(str.strip, found[3].splitlines()):
        host.step(re.sub(r", !.*$", "", line.strip()))
    if host.launch is None:
        raise UnknownHostFunction("it builds no kernel specification")
    return host.launch


class _Host:
    """The function's values, and its memory, by address: each number lies where it was stored, in one piece.

    A value is an integer; a dictionary from indices, such as "3, 0", to integers for a struct or array; or
    tensor maps, for their bytes.
    """

    def __init__(self, arrays: Sequence[int]) -> None:
        self.values: dict[str, Any] = {}
        self.memory: dict[int, Any] = {ARGUMENTS + 8 * i: address for i, address in enumerate(arrays)}
        self.top = STACK
        self.launch: Launch | None = None

    def step(self, line: str) -> None:
        found = re.match(r"(?:(%\w+) = )?(\w+)\s*(.*)$", line)
        if not found or line.endswith(":"):
            raise UnknownHostFunction(line)
        target, op, rest = found.groups()
        if op == "call":  # the result, a status, is not used
            self.call(rest)
        elif (value := self.value(op, split(rest), line)) is not None and target:
            self.values[target] = value

    def value(self, op: str, args: list[str], line: str) -> Any:
        match op:
            case "ret":
                return None
            case "load":
                return self.loaded(self.get(args[1]), line)
            case "store":
                self.memory[self.get(args[1])] = self.get(args[0])
                return None
            case "alloca":
                count = self.get(args[1]) if len(args) > 1 and not args[1].startswith("align") else 1
                place = self.top
                self.top += (count * size_of(args[0]) // MAP_BYTES + 2) * MAP_BYTES  # with a gap
                return place
            case "getelementptr":
                kind = re.sub(r"^(?:inbounds|nuw|nusw)\s+", "", re.sub(r"^inbounds nuw\s+", "", args[0]))
                base, first, *inner = (self.get(arg) for arg in args[1:])
                return base + first * size_of(kind) + offset_in(kind, inner)
            case "insertvalue":
                return dict(self.get(args[0])) | {", ".join(args[2:]): self.get(args[1])}
            case "extractvalue":
                return self.get(args[0])[", ".join(args[1:])]
            case _ if op in CASTS:
                return self.get(args[0].rpartition(" to ")[0])
            case _ if op in ARITHMETIC:
                return ARITHMETIC[op](self.get(args[0]), self.get(args[1]))
        raise UnknownHostFunction(line)

    def get(self, operand: str) -> Any:
        """The value of an operand; its type may stand before it."""
        word = operand.rpartition(" ")[2]
        if word in ("undef", "poison", "zeroinitializer", "null"):
            return {} if word != "null" else 0
        return int(word) if re.fullmatch(r"-?\d+", word) else self.values[word]

    def call(self, rest: str) -> None:
        found = re.match(r"\w+ @(\w+)\((.*)\)", rest)
        name, args = (found[1], [self.get(arg) for arg in split(found[2])]) if found else ("", [])
        match name:
            case "mosaic_gpu_init_tma_desc":
                place, base, kind, rank, sizes, strides, swizzle, box = args
                self.memory[place] = self.tensor_map(base, kind, rank, sizes, strides, swizzle, box)
            case "mosaic_gpu_build_kernel_spec" | "mosaic_gpu_launch_kernel":  # jax 0.12 and 0.11
                self.launch = self.specification(args)
            case _:
                raise UnknownHostFunction(f"call {rest}")

    def tensor_map(
        self, base: int, kind: int, rank: int, sizes: int, strides: int, swizzle: int, box: int
    ) -> TensorMap:
        """Mosaic lists dimensions outermost first and strides in elements; tensor maps, the other way and in
        bytes.
        """
        if kind not in ELEMENT_BYTES:
            raise UnknownHostFunction(f"a tensor map of elements of type {kind}")
        size = ELEMENT_BYTES[kind]

        def innermost_first(place: int) -> tuple[int, ...]:
            return tuple(self.memory[place + 8 * i] for i in reversed(range(rank)))

        in_bytes = tuple(stride * size for stride in innermost_first(strides))
        return TensorMap(base, size, innermost_first(sizes), in_bytes, innermost_first(box), swizzle)

    def specification(self, args: list[Any]) -> Launch:
        grid, cluster, block, shared, params = args[1:4], args[4:7], args[7:10], args[10], args[13]
        return Launch(
            grid=(grid[0], grid[1], grid[2]),
            cluster=(cluster[0], cluster[1], cluster[2]),
            block=(block[0], block[1], block[2]),
            shared=shared,
            params=tuple(self.loaded(place) for place in self.following(params, 8)),
        )

    def loaded(self, place: int, line: str = "") -> Any:
        """What lies there: tensor maps all together."""
        if place not in self.memory:
            raise UnknownHostFunction(
                f"{line}: it reads a buffer that was not given, such as Mosaic's scratch"
            )
        found = self.memory[place]
        return tuple(self.following(place, MAP_BYTES)) if isinstance(found, TensorMap) else found

    def following(self, place: int, size: int) -> list[Any]:
        """What lies there and after it, one for each `size` bytes."""
        places = itertools.takewhile(self.memory.__contains__, itertools.count(place, size))
        return [self.memory[at] for at in places]


def split(text: str) -> list[str]:
    """Operands, or fields of a type: what commas separate outside of brackets."""
    parts, depth, start = list[str](), 0, 0
    for at, letter in enumerate(text):
        depth += letter in "<([{"
        depth -= letter in ">)]}"
        if letter == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()] if text.strip() else []


def size_of(kind: str) -> int:
    """Bytes of a type, aligned as in C."""
    return _round_up(*_size_and_alignment(kind))


def offset_in(kind: str, indices: Sequence[int]) -> int:
    """Bytes from the start of a struct or array to a part of it."""
    if not indices:
        return 0
    first, *others = indices
    if array := _ARRAY.fullmatch(kind):
        return first * size_of(array[2]) + offset_in(array[2], others)
    fields, at = split(kind[1:-1]), 0
    for field in fields[:first]:
        size, alignment = _size_and_alignment(field)
        at = _round_up(at, alignment) + size
    return _round_up(at, _size_and_alignment(fields[first])[1]) + offset_in(fields[first], others)


_ARRAY = re.compile(r"\[(\d+) x (.*)\]")


def _round_up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _size_and_alignment(kind: str) -> tuple[int, int]:
    kind = kind.strip()
    if kind == "ptr":
        return 8, 8
    if integer := re.fullmatch(r"i(\d+)", kind):
        return -(-int(integer[1]) // 8), -(-int(integer[1]) // 8)
    if array := _ARRAY.fullmatch(kind):
        size, alignment = _size_and_alignment(array[2])
        return int(array[1]) * _round_up(size, alignment), alignment
    if kind.startswith("{"):
        at, most = 0, 1
        for field in split(kind[1:-1]):
            size, alignment = _size_and_alignment(field)
            at, most = _round_up(at, alignment) + size, max(most, alignment)
        return _round_up(at, most), most
    raise UnknownHostFunction(f"type {kind}")
