"""Foreign functions of XLA (its typed FFI, xla/ffi/api/c_api.h, whose structures are words of eight bytes), computed by several threads.

A kernel is a function of (frame, part, parts), in Numba's Python or in LLVM's terms: it reads its arguments from XLA's call frame and
writes its part of the results to where they belong. No part may need what another writes; what does is a second function, which is called
for its parts when all of the first are done.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.extending import intrinsic, overload

from pallas_kernels.cpu import native, team

FAST = {"reassoc", "contract", "nsz", "arcp", "nnan", "ninf"}  # sums in any order; what a kernel reads is finite
BFLOAT16 = 16  # XLA's number of the dtype
LINE = 64  # bytes of a cache line

# XLA asks once which version of the interface this is, by an extension of the frame: 0.3. Otherwise it calls.
HANDLER = """
define i64 @handler(i64 %frame) {{
  %base = inttoptr i64 %frame to ptr
  %place = getelementptr i64, ptr %base, i64 1
  %extension = load ptr, ptr %place
  %asks = icmp ne ptr %extension, null
  br i1 %asks, label %answer, label %compute
answer:
  %metadata_place = getelementptr i64, ptr %extension, i64 3
  %metadata = load ptr, ptr %metadata_place
  %version = getelementptr i64, ptr %metadata, i64 3
  store i64 12884901888, ptr %version
  ret i64 0
compute:
  %run = inttoptr i64 {run} to ptr
{calls}  ret i64 0
}}
"""

_registered: dict[str, Any] = {}  # Numba's functions, which must live as long as programs may call them
_lock = threading.RLock()  # programs are traced by several threads


def call(name: str, out: Any, *args: jax.Array) -> Any:
    """The results of a registered function, of these shapes and dtypes. Arrays come row-major."""
    return jax.ffi.ffi_call(name, out)(*args)


def register(name: str, make: Callable[[], Sequence[Any]]) -> str:
    """Make a kernel known to XLA under this name, once in a process: before a program that calls it is loaded or run.

    Args:
        make: gives functions, each called for all of its parts before the next: what `compiled` gives, or addresses.
    """
    with _lock:
        if name not in _registered:
            _registered[name] = made = make()
            addresses = [function if isinstance(function, int) else function.address for function in made]
            calls = "".join(f"  call void %run(i64 {address}, i64 %frame, i64 {team.parts()})\n" for address in addresses)
            (address,) = native.compiled(HANDLER.format(run=team.runner(), calls=calls), "handler")
            function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return name


options: dict[str, Any] = {"fastmath": FAST, "error_model": "numpy"}
kernel = njit(**options)
inlined = njit(inline="always", **options)


class _Cache(FunctionCache):
    """Numba's, which by itself compares a function's own file alone."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), native.SOURCE)


def compiled(function: Callable[[int, int, int], None]) -> Any:
    """What `register` takes: a function of (frame, part, parts), compiled by Numba or taken from its cache on disk."""
    made = CFunc(function, ((types.intp,) * 3, types.void), {}, options)
    with contextlib.suppress(RuntimeError):  # there is no folder to keep it in
        made._cache = _Cache(function)
    made.compile()
    return made


@inlined
def share(count: int, part: int, parts: int) -> tuple[int, int]:
    """Which of so many items are this part's: first, end."""
    return count * part // parts, count * (part + 1) // parts


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
def argument(frame: int, index: int) -> tuple[int, int]:
    """Addresses of an argument's data and of its shape."""
    buffer = words(words(words(frame, 10)[9], index + 1)[index], 6)
    return buffer[3], buffer[5]


@inlined
def result(frame: int, index: int) -> tuple[int, int]:
    """Addresses of a result's data and of its shape."""
    buffer = words(words(words(frame, 15)[14], index + 1)[index], 6)
    return buffer[3], buffer[5]


@inlined
def result_is_bfloat16(frame: int, index: int) -> bool:
    """Or else float32."""
    return words(words(words(frame, 15)[14], index + 1)[index], 3)[2] & 0xFFFFFFFF == BFLOAT16


@intrinsic
def bits_of_float(_typing: Any, number: Any) -> Any:
    """float32 -> int32"""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), build


@kernel
def rounded(number):
    """float32 to the bits of bfloat16, to nearest even, as XLA does."""
    bits = np.uint32(bits_of_float(number))
    if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


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
