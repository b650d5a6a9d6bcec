"""Tensor memory and tcgen05: small kernels of one warpgroup, in all orders; and each kind of fault."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ptx_machine.kernels import run
from tools.ptx_machine.machine import Result
from tools.ptx_machine.memory import Array
from tools.ptx_machine.schedules import ORDERS, Schedule
from tools.ptx_machine.tensor import DEPTH, LANES

N = 16
FORM = 1 << 4 | 1 << 7 | 1 << 10 | N >> 3 << 17 | LANES >> 4 << 24  # float32 from bfloat16
NEXT = "\n"
FENCED = NEXT.join(("tcgen05.fence::before_thread_sync;", "bar.sync 0;", "tcgen05.fence::after_thread_sync;"))
WORDS = ", ".join(f"%r{10 + i}" for i in range(DEPTH // 4))
OUT = ", ".join(f"%r{20 + i}" for i in range(N))
RIGHT_AT = 1024  # of B in shared memory; the mbarrier is at 0, the address of tensor memory at 8


def _kept(i: int) -> str:
    """Stores words of a row of B."""
    return f"st.shared.b32 [%r5+{RIGHT_AT + i // 4 * 128 + i % 4 * 4}], %r6;"


# A thread stores its row of A to tensor memory, and thread 0 multiplies by B in shared memory.
ALLOCATE = """
setp.lt.u32 %p4, %r0, 32;
@!%p4 bra allocated;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [memory+8], 64;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
allocated:
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [memory], 1;
bar.sync 0;
ld.shared.b32 %r3, [memory+8];
add.u32 %r4, %r3, 32;
"""
LEFT = f"""
mad.wide.u32 %d3, %r0, {DEPTH}, %d0;
{NEXT.join(f"ld.global.b32 %r{10 + i}, [%d3+{4 * i}];" for i in range(DEPTH // 4))}
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r4], {{{WORDS}}};
tcgen05.wait::st.sync.aligned;
"""
# rows of 16 bytes, without swizzle: 128 bytes between neighbours along K, 256 between groups of 8 rows
RIGHT = f"""
setp.lt.u32 %p3, %r0, {N};
@!%p3 bra copied;
mad.wide.u32 %d4, %r0, {DEPTH}, %d1;
mov.b32 %r5, memory;
and.b32 %r6, %r0, 7;
shr.u32 %r7, %r0, 3;
mad.lo.u32 %r5, %r6, 16, %r5;
mad.lo.u32 %r5, %r7, 256, %r5;
{NEXT.join(f"ld.global.b32 %r6, [%d4+{4 * i}];{NEXT}{_kept(i)}" for i in range(DEPTH // 4))}
copied:
fence.proxy.async.shared::cta;
"""
PRODUCT = f"""
@!%p1 bra multiplied;
mov.b32 %r7, memory;
add.u32 %r7, %r7, {RIGHT_AT};
shr.u32 %r7, %r7, 4;
cvt.u64.u32 %d5, %r7;
or.b64 %d5, %d5, {128 >> 4 << 16 | 256 >> 4 << 32 | 1 << 46};
setp.ne.u32 %p5, 0, 0;
tcgen05.mma.cta_group::1.kind::f16 [%r3], [%r4], %d5, {FORM}, %p5;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [memory];
multiplied:
"""
AWAIT = """
wait:
mbarrier.try_wait.parity.shared.b64 %p2, [memory], 0;
@!%p2 bra wait;
tcgen05.fence::after_thread_sync;
"""
LOAD = f"""
tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{OUT}}}, [%r3];
tcgen05.wait::ld.sync.aligned;
mad.wide.u32 %d6, %r0, {4 * N}, %d2;
{NEXT.join(f"st.global.b32 [%d6+{4 * i}], %r{20 + i};" for i in range(N))}
"""
FREE = f"""
{FENCED}
@!%p4 bra freed;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 64;
freed:
"""


def execute(
    body: str, schedule: Schedule, dtype: Any = ml_dtypes.bfloat16, sums: Any = np.float32
) -> tuple[Result, Any, Any]:
    """The run of a kernel, its result, and A @ B.T in float64."""
    rng, depth = np.random.default_rng(3), DEPTH // np.dtype(dtype).itemsize
    a, b = ((9 * rng.normal(size=(rows, depth))).astype(dtype) for rows in (LANES, N))
    arrays = Array("a", a), Array("b", b), Array("out", np.zeros((LANES, N), sums), False)
    result = run(body, *arrays, threads=128, schedule=schedule)
    return result, result.arrays["out"], a.astype(np.float64) @ b.astype(np.float64).T


WHOLE = NEXT.join((ALLOCATE, LEFT, RIGHT, FENCED, PRODUCT, AWAIT, LOAD, FREE))


@pytest.mark.parametrize("order", ORDERS)
def test_a_product_from_tensor_memory(order: Any) -> None:
    result, got, want = execute(WHOLE, Schedule(seed=5, order=order, garbage="random"))
    assert not result.errors
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-4)


KINDS: dict[str, tuple[Any, Any, int]] = {  # numbers, sums, and what the descriptor of the product says
    "f8f6f4": (ml_dtypes.float8_e4m3fn, np.float32, 1 << 4),
    "i8": (np.int8, np.int32, 2 << 4 | 1 << 7 | 1 << 10),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_of_eight_bits(kind: str) -> None:
    dtype, sums, types = KINDS[kind]
    form = FORM & ~0x1FF0 | types
    body = WHOLE.replace("kind::f16", f"kind::{kind}").replace(f", {FORM},", f", {form},")
    result, got, want = execute(body, Schedule(seed=4, order="late"), dtype, sums)
    assert not result.errors
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-4)
    with pytest.raises(NotImplementedError, match="instruction descriptor"):
        execute(body.replace(f", {form},", f", {form ^ 3 << 4},"), Schedule(seed=4), dtype, sums)


def test_a_product_adds_to_what_is_there() -> None:
    twice = PRODUCT.replace(
        "tcgen05.commit", NEXT.join(("setp.eq.u32 %p5, 0, 0;", _line(PRODUCT, "mma"), "tcgen05.commit"))
    )
    result, got, want = execute(WHOLE.replace(PRODUCT, twice), Schedule(seed=1, order="late"))
    assert not result.errors  # products with one accumulator and shape happen in order
    np.testing.assert_allclose(got, 2 * want, rtol=1e-6, atol=1e-4)


def _line(text: str, name: str) -> str:
    [line] = [line for line in text.splitlines() if f"tcgen05.{name}" in line]
    return line


FAULTS = {
    "stores not awaited": ("tcgen05.wait::st.sync.aligned;", "", "race", "may not be written yet"),
    "no fence before": ("tcgen05.fence::before_thread_sync;", "", "race", "may not be written yet"),
    "no fence after": ("tcgen05.fence::after_thread_sync;", "", "race", "may not be written yet"),
    "product not awaited": (AWAIT, "", "race", "may not be written yet"),
    "no commit": (_line(PRODUCT, "commit"), "", "fault", "deadlock"),
    "loads not awaited": (
        "tcgen05.wait::ld.sync.aligned;",
        f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r3], {{{OUT}}};",
        "race",
        "may still be read",
    ),
    "no proxy fence": ("fence.proxy.async.shared::cta;", "", "proxy", "without fence.proxy.async"),
    "other columns": ("add.u32 %r4, %r3, 32;", "add.u32 %r4, %r3, 60;", "fault", "not allocated"),
    "overlapping operands": ("add.u32 %r4, %r3, 32;", "add.u32 %r4, %r3, 8;", "race", "tensor memory"),
    "lanes of another warp": (f"{{{OUT}}}, [%r3]", f"{{{OUT}}}, [%r3+2097152]", "fault", "a warp has lanes"),
    "memory kept": (_line(FREE, "dealloc"), "", "exit", "without tcgen05.dealloc"),
    "other size freed": ("b32 %r3, 64;", "b32 %r3, 32;", "fault", "not allocated like this"),
    "no power of two": ("[memory+8], 64;", "[memory+8], 48;", "fault", "a power of two"),
    "eight columns": (f", {FORM},", f", {FORM - (8 >> 3 << 17)},", "fault", "a multiple of 16"),
    "many threads multiply": ("@!%p1 bra multiplied;", "", "fault", "threads execute tcgen05.mma"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str) -> None:
    old, new, kind, message = FAULTS[name]
    assert WHOLE.count(old) >= 1
    found = execute(WHOLE.replace(old, new), Schedule(seed=2, order="late"))[0].errors
    assert any(x.kind == kind and message in x.message for x in found), found
