"""Foreign functions of XLA (its typed FFI, xla/ffi/api/c_api.h, whose structures are words of eight bytes), computed by several threads.

A kernel is a function of (frame, part, parts), written in LLVM's terms: it reads its arguments from XLA's call frame and
writes its part of the results to where they belong. No part may need what another writes; what does is a second function, which is called
for its parts when all of the first are done.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.cpu import native, team

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
# Into how many parts the next call is cut: as its kernel says, if it does.
PARTS = """  %f{n} = inttoptr i64 {parts} to ptr
  %p{n} = call i64 %f{n}(i64 %frame, i64 {most})
"""

_registered: set[str] = set()
_lock = threading.RLock()  # programs are traced by several threads


def call(name: str, out: Any, *args: jax.Array) -> Any:
    """The results of a registered function, of these shapes and dtypes. Arrays come row-major."""
    function: Callable[..., Any] = jax.ffi.ffi_call(name, out)
    return function(*args)


def register(name: str, make: Callable[[], Sequence[int | tuple[int, int]]]) -> str:
    """Make a kernel known to XLA under this name, once in a process: before a program that calls it is loaded or run.

    Args:
        make: gives the addresses of functions, each called for all of its parts before the next. One may be a pair; the second
            function, int64 of (frame, most), says then into how many parts this call is cut.
    """
    with _lock:
        if name not in _registered:
            (address,) = native.compiled(HANDLER.format(run=team.runner(), calls=_calls(make())), "handler")
            function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
            _registered.add(name)
    return name


def _calls(functions: Sequence[int | tuple[int, int]]) -> str:
    out, most = "", team.parts()
    for n, function in enumerate(functions):
        address, parts = function if isinstance(function, tuple) else (function, 0)
        out += PARTS.format(n=n, parts=parts, most=most) if parts else ""
        out += f"  call void %run(i64 {address}, i64 %frame, i64 {f'%p{n}' if parts else most})\n"
    return out
