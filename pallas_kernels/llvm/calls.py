"""Foreign functions for XLA (typed FFI, xla/ffi/api/c_api.h, whose structures consist of eight-byte words),
run by several threads.

A kernel is a function of (frame, part, parts) in LLVM's terms. It reads its arguments from XLA's call frame,
and writes its part of the results in place. Parts must not depend on each other's output. Work that does is a
second function, whose parts are run after all parts of the first.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.llvm import native, team

# XLA first asks for the version of this interface, by an extension of the frame; the answer is 0.3. Other
# calls compute. Addresses differ between processes, so they are data: the code can be kept.
HANDLER = """
@addresses = global [{count} x i64] zeroinitializer
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
  %run = load ptr, ptr @addresses
{calls}  ret i64 0
}}
"""
ADDRESS = """  %at{n} = getelementptr i64, ptr @addresses, i64 {n}
  %a{n} = load {type}, ptr %at{n}
"""
# The number of parts of the next call, if its kernel has a function for this.
PARTS = ADDRESS + "  %p{n} = call i64 %a{n}(i64 %frame, i64 {most})\n"

_registered: set[str] = set()
_lock = threading.RLock()  # several threads trace programs


def call(name: str, out: Any, *args: jax.Array) -> Any:
    """Calls a registered function. Results have these shapes and dtypes; arrays are row-major."""
    function: Callable[..., Any] = jax.ffi.ffi_call(name, out)
    return function(*args)


def register(name: str, make: Callable[[], Sequence[int | tuple[int, int]]]) -> str:
    """Registers a kernel with XLA under this name, once per process. Must precede loading or running a
    program that calls it.

    Args:
        make: returns the addresses of functions; all parts of one are called before the next. An item may be
            a pair; its second function, int64 of (frame, most), returns the number of parts for this call.
    """
    if name in _registered:  # without waiting for another kernel's compilation
        return name
    with _lock:
        if name not in _registered:
            pairs = [item if isinstance(item, tuple) else (item, 0) for item in make()]
            source = _handler([parts != 0 for _, parts in pairs])
            digest = hashlib.sha256(source.encode()).hexdigest()[:16]
            handler, place = native.compiled(lambda: source, "handler", "addresses", name=f"handler_{digest}")
            addresses: list[ctypes.c_int64 | int] = [team.runner(), *itertools.chain(*pairs)]
            (ctypes.c_int64 * len(addresses)).from_address(place)[:] = addresses
            function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(handler)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
            _registered.add(name)
    return name


def functions(
    name: str, text: Callable[[], str], *wanted: str | tuple[str, str]
) -> list[int | tuple[int, int]]:
    """Addresses of functions of a module, for `register`; see `native.compiled`. Of a pair, the second one
    says how many parts the first one has.
    """
    pairs = [(each,) if isinstance(each, str) else each for each in wanted]
    compiled = iter(native.compiled(text, *itertools.chain(*pairs), name=name))
    return [next(compiled) if len(pair) == 1 else (next(compiled), next(compiled)) for pair in pairs]


def _handler(divided: Sequence[bool]) -> str:
    """The source for so many functions; divided: whether each has a function for the number of parts."""
    calls, max_parts = "", team.parts()
    for n, divides in zip(range(1, 2 * len(divided), 2), divided, strict=True):
        calls += PARTS.format(n=n + 1, type="ptr", most=max_parts) if divides else ""
        calls += ADDRESS.format(n=n, type="i64")
        calls += f"  call void %run(i64 %a{n}, i64 %frame, i64 {f'%p{n + 1}' if divides else max_parts})\n"
    return HANDLER.format(count=1 + 2 * len(divided), calls=calls)
