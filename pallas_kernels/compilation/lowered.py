"""Mosaic kernels lowered once: a program takes the module of a kernel that another program has lowered.

Lowering a kernel takes Python seconds, and each program lowers all of its kernels again. A module depends on
the kernel's jaxpr, shapes, grid and parameters, on the compute capability, and on versions and sources. All
of these are in its name (`name_of`), so equal names mean equal modules, in other programs and processes too.
A kernel with something in it that has no name of its own is lowered as always.

Pallas offers no place for this. `reused` replaces Pallas's function that lowers a kernel, unless it is not
the one that this file knows; then kernels are lowered as always. Outside of `reused`, nothing changes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import io
import json
import logging
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from pallas_kernels.devices import traced_for

log = logging.getLogger("jengine")

KNOWN = ("gpu_mesh", "jax_mesh", "jaxpr", "in_shapes", "out_shapes", "params")  # the function's parameters
RESULT = ("module", "grid", "block", "new_out_shapes", "profiler_spec", "gmem_scratch_shapes")
LENGTH = 8  # bytes that say how long a saved module's facts are


class Store(Protocol):
    """Bytes by name, beyond this process."""

    def load(self, name: str) -> bytes | None: ...

    def save(self, name: str, code: bytes) -> None: ...


class _Modules:
    """Modules of this process, and those of a store.

    Attributes:
        lowered, taken: numbers of kernels that were lowered here, and that were there.
    """

    def __init__(self) -> None:
        self.store: Store | None = None
        self.lowered = self.taken = 0
        self._known: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        data = self._known.get(name) or (self.store.load(name) if self.store else None)
        if data is not None:
            self._known[name] = data
        return data

    def add(self, name: str, data: bytes) -> None:
        self._known[name] = data
        self.lowered += 1
        if self.store:
            self.store.save(name, data)


modules = _Modules()
_REUSED = ContextVar("reused", default=False)


def keep_modules(store: Store | None) -> None:
    """Keeps modules of this process in a store, and takes those that are there."""
    modules.store = store


@contextmanager
def reused() -> Iterator[None]:
    """Within, each kernel is lowered once."""
    _replace()
    before = _REUSED.set(True)
    try:
        yield
    finally:
        _REUSED.reset(before)


@functools.cache
def _replace() -> None:
    """Puts `_reusing` in the place of Pallas's function, once in a process."""
    try:
        from jax._src.pallas.mosaic_gpu import lowering

        function = lowering.lower_unpipelined_jaxpr_to_module
        names = tuple(inspect.signature(function).parameters)[: len(KNOWN)]
        fields = tuple(field.name for field in dataclasses.fields(lowering.LoweringResult))
    except (ImportError, AttributeError, TypeError) as error:
        log.info("each program lowers its kernels: this version of Pallas is not known (%s)", error)
        return
    if (names, fields) != (KNOWN, RESULT):
        log.info("each program lowers its kernels: this version of Pallas is not known")
        return
    lowering.lower_unpipelined_jaxpr_to_module = _reusing(function, lowering.LoweringResult)


def _reusing(function: Callable[..., Any], result: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def lower(
        gpu_mesh: Any, jax_mesh: Any, jaxpr: Any, inputs: Any, outputs: Any, params: Any, **options: Any
    ) -> Any:
        name = None
        if _REUSED.get() and not params.profile_space and not any(map(_dumps, os.environ)):
            name = name_of(gpu_mesh, jax_mesh, jaxpr, inputs, outputs, params)
        data = modules.get(name) if name is not None else None
        if data is not None:
            try:
                taken = result(*_unpacked(data))
                modules.taken += 1
                return taken
            except (ir.MLIRError, ValueError, KeyError) as error:
                log.warning("a lowered kernel cannot be read and is lowered again: %s", error)
        done = function(gpu_mesh, jax_mesh, jaxpr, inputs, outputs, params, **options)
        if name is not None:
            modules.add(name, _packed(done))
        return done

    return lower


def _dumps(variable: str) -> bool:
    """Whether this variable makes Mosaic note in a module what it dumps of it."""
    return variable.startswith("MOSAIC_GPU_DUMP")


def _packed(done: Any) -> bytes:
    code = io.BytesIO()
    done.module.operation.write_bytecode(code)
    facts = {
        "grid": done.grid,
        "block": done.block,
        "outputs": [(shape.shape, str(jnp.dtype(shape.dtype))) for shape in done.new_out_shapes],
        "scratch": [(shape.shape, str(jnp.dtype(shape.dtype))) for shape in done.gmem_scratch_shapes],
    }
    head = json.dumps(facts).encode()
    return len(head).to_bytes(LENGTH, "little") + head + code.getvalue()


def _unpacked(data: bytes) -> tuple[Any, ...]:
    """The fields of a LoweringResult."""
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    facts = json.loads(data[LENGTH:end])
    outputs, scratch = (
        tuple(jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)) for shape, dtype in facts[which])
        for which in ("outputs", "scratch")
    )
    module = ir.Module.parse(data[end:])
    return module, tuple(facts["grid"]), tuple(facts["block"]), outputs, None, scratch


# --- names ------------------------------------------------------------------------------------------


class Nameless(Exception):
    """Something has no name that is the same in every process and different from all others."""


def name_of(gpu_mesh: Any, jax_mesh: Any, jaxpr: Any, inputs: Any, outputs: Any, params: Any) -> str | None:
    """A digest of all that a kernel's module depends on; None: something in it has no name."""
    words = hashlib.sha256()
    # of a mesh of devices only collectives depend, which know their axes
    axes = None if jax_mesh is None else (tuple(jax_mesh.shape.items()), jax.process_count())
    try:
        writer = _Writer(words.update)
        for part in (_versions(), traced_for().compute_capability, axes, gpu_mesh, inputs, outputs, params):
            writer.write(part)
        writer.write(jaxpr.debug_info.func_name)
        writer.write(jaxpr)
    except Nameless as error:
        log.debug("%s is lowered for each program: %s", jaxpr.debug_info.func_name, error)
        return None
    return words.hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    """Functions are named, not described, so their sources count too."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest(), version("jax"), version("jaxlib")


class _Writer:
    """Writes values so that different ones differ. Variables are numbered as they occur."""

    def __init__(self, put: Callable[[bytes], object]) -> None:
        from jax.extend import core

        self._core, self._put = core, put
        self._numbers: dict[Any, int] = {}

    def write(self, value: Any) -> None:
        core, kind = self._core, type(value)
        self._word(f"{kind.__module__}.{kind.__qualname__}")
        if value is None or isinstance(value, str | bytes | bool | int | float | complex | np.dtype):
            self._word(repr(value))
        elif isinstance(value, enum.Enum):
            self._word(value.name)
        elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._all([value.__func__, value.__self__])
        elif isinstance(value, functools.partial):
            self._all([value.func, value.args, value.keywords])
        elif isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            self._jaxpr(value)
        elif isinstance(value, core.Literal):
            self._all([value.aval, value.val])
        elif isinstance(value, core.Var):
            self._all([self._numbers.setdefault(value, len(self._numbers)), value.aval])
        elif isinstance(value, jax.core.Tracer):  # a reference that an inner jaxpr takes from outside
            self.write(value.aval)
        elif isinstance(value, np.ndarray | np.generic | jax.Array):
            array = np.asarray(value)
            self._word(f"{array.dtype} {array.shape}")
            self._put(array.tobytes())
        elif isinstance(value, Mapping):
            self._all([len(value), *(part for item in value.items() for part in item)])
        elif isinstance(value, set | frozenset):
            self._all(sorted(map(self._text, value)))
        elif isinstance(value, tuple | list):
            self._all([len(value), *value])
        elif dataclasses.is_dataclass(value):
            self._all([getattr(value, field.name) for field in dataclasses.fields(value)])
        elif isinstance(value, jax.core.ShapedArray):
            self._word(f"{value.dtype} {value.shape} {value.weak_type}")
        else:
            self._word(self._text(value))

    def _all(self, parts: Any) -> None:
        for part in parts:
            self.write(part)

    def _word(self, text: str) -> None:
        data = text.encode()
        self._put(len(data).to_bytes(LENGTH, "little") + data)

    def _text(self, value: Any) -> str:
        text = repr(value)
        if " at 0x" in text:
            raise Nameless(text)
        return text

    def _function(self, function: Any) -> None:
        """By its name and what it closes over: sources and versions are known."""
        self._word(f"{function.__module__}.{function.__qualname__}")
        cells = getattr(function, "__closure__", None) or ()
        self._all([cell.cell_contents for cell in cells])
        self._all([getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)])
        code = getattr(function, "__code__", None)
        self._word("" if code is None else str(code.co_firstlineno))

    def _jaxpr(self, jaxpr: Any) -> None:
        whole = getattr(jaxpr, "jaxpr", jaxpr)  # of a closed one; jax 0.12 has one type for both
        self._all([getattr(jaxpr, "consts", ()), whole.constvars, whole.invars])
        for equation in whole.eqns:
            self._word(equation.primitive.name)
            self.write(equation.invars)
            self.write({name: value for name, value in equation.params.items() if name not in NOTES})
            self.write(equation.outvars)
        self.write(whole.outvars)
        # those of references follow from the equations
        self._word(" ".join(sorted({type(effect).__qualname__ for effect in whole.effects})))


NOTES = ("debug_info", "name_stack", "source_info")  # for people
