"""Foreign functions of XLA (its typed FFI, xla/ffi/api/c_api.h, whose structures are words of eight bytes) written in Numba's Python."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

FAST = {"reassoc", "contract", "nsz", "arcp", "nnan", "ninf"}  # sums in any order; what a kernel reads is finite
LINE = 64  # bytes of a cache line
SOURCE = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
WAITING = 8  # operations that XLA leaves to one thread

_registered: dict[str, Any] = {}  # what `handler` gave, which must live as long as programs may call it
_lock = threading.Lock()  # programs are traced by several threads


def parts() -> int:
    """Into how many calls work is split: enough for XLA to spread them over all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if cores == 1 else WAITING * cores


def call(name: str, out: jax.ShapeDtypeStruct, *args: jax.Array) -> jax.Array:
    """The result of a registered function. Arrays come row-major."""
    result: jax.Array = jax.ffi.ffi_call(name, out)(*args)
    return result


def register(name: str, make: Callable[[], Any]) -> str:
    """Make a function known to XLA under this name, once in a process: before a program that calls it is loaded or run.

    Args:
        make: gives what `handler` gives.
    """
    with _lock:
        if name not in _registered:
            _registered[name] = made = make()
            function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(made.address)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return name


options: dict[str, Any] = {"fastmath": FAST, "error_model": "numpy"}
kernel = njit(**options)
inlined = njit(inline="always", **options)


def handler(function: Callable[[int], int]) -> Any:
    """Compile what XLA calls with the address of a call frame, and which returns 0, no error; or take it from Numba's cache on disk."""
    try:
        return cfunc(types.intp(types.intp), cache=True, **options)(function)
    except RuntimeError:  # there is no folder to keep it in
        return cfunc(types.intp(types.intp), **options)(function)


@intrinsic
def pointer(_typing: Any, address: Any) -> Any:
    """intp -> void*"""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), build


@intrinsic
def float_of_bits(_typing: Any, bits: Any) -> Any:
    """int32 -> float32"""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), build


@intrinsic
def prefetch(_typing: Any, array: Any, index: Any) -> Any:
    """Begin to read the cache line of array[index]."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        fetch(builder, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.none(array, types.intp), build


def fetch(builder: Any, place: Any) -> None:
    """The instruction that begins to read the cache line of a place."""
    flag = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, flag, flag, flag])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(place, cgutils.voidptr_t), flag(0), flag(3), flag(1)])  # to read, into every cache, data


@inlined
def words(address: int, count: int) -> Any:
    return carray(pointer(address), count, np.int64)


@inlined
def asked_for_version(frame: int, _source: str) -> bool:
    """Whether XLA asks which version of the interface this is, once, instead of calling; then it has been told: 0.3.

    Args:
        _source: SOURCE, by which Numba's cache tells handlers of other sources apart; it compares a handler's own file alone.
    """
    extension = words(frame, 2)[1]
    if extension == 0:
        return False
    version = words(words(extension, 4)[3], 4)  # of the metadata: struct_size, then the version's struct_size, extension, numbers
    version[3] = 3 << 32
    return True


@inlined
def argument(frame: int, index: int) -> tuple[int, int]:
    """Addresses of an argument's data and of its shape."""
    buffer = words(words(words(frame, 10)[9], index + 1)[index], 6)
    return buffer[3], buffer[5]


@inlined
def result(frame: int, index: int) -> tuple[int, int]:
    """Addresses of a result's data and of its shape."""
    buffer = words(words(words(frame, 15)[14], index + 1)[index], 6)
    return buffer[3], buffer[5]


def wide(stored: Any) -> Any:
    """A stored number as float32: bfloat16 comes as uint16, e4m3 as uint8."""
    raise NotImplementedError("for compiled functions")


@overload(wide)
def _wide(stored):
    if stored == types.uint16:
        return lambda stored: float_of_bits(np.int32(np.uint32(stored) << np.uint32(16)))
    if stored == types.uint8:
        one = np.float32(2.0**-6)  # the smallest normal number: what the next exponent adds to a subnormal one

        def of_e4m3(stored):
            bits = np.uint32(stored & 0x7F) << np.uint32(20)
            small = float_of_bits(np.int32(bits | np.uint32(121 << 23))) - one
            size = small if stored & 0x78 == 0 else float_of_bits(np.int32(bits + np.uint32(120 << 23)))
            return -size if stored & 0x80 else size

        return of_e4m3
    return lambda stored: np.float32(stored)
