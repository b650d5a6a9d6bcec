"""XLA's text of compiled programs and its list of launches, as tests of programs for GPUs read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.execution.hlo import parse
from tests.execution.thunks import leaves, parsed

PREFILL = """
%address_computation (p0: bf16[136,32,128], p1: bf16[100,8,64,128], p2: bf16[100,8,64,128], p3: s32[2,16]) -> bf16[2,64,32,128] {
  %p0 = bf16[136,32,128]{2,1,0} parameter(0)
  %p1 = bf16[100,8,64,128]{3,2,1,0} parameter(1)
  %p2 = bf16[100,8,64,128]{3,2,1,0} parameter(2)
  %p3 = s32[2,16]{1,0} parameter(3)
  %slice.1 = bf16[128,32,128]{2,1,0} slice(%p0), slice={[8:136], [0:32], [0:128]}
  %tiles = bf16[2,64,32,128]{3,2,1,0} bitcast(%slice.1)
  ROOT %one = bf16[2,64,32,128]{3,2,1,0} custom-call(%tiles, %p3, %p1, %p2), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/paged_attention_prefill/mpmd_map"}
}

ENTRY %main (q: bf16[136,32,128]) -> bf16[2,64,32,128] {
  %q = bf16[136,32,128]{2,1,0} parameter(0)
  %k = bf16[100,8,64,128]{3,2,1,0} parameter(1)
  %v = bf16[100,8,64,128]{3,2,1,0} parameter(2)
  %tables = s32[2,16]{1,0} parameter(3)
  ROOT %fusion = bf16[2,64,32,128]{3,2,1,0} fusion(%q, %k, %v, %tables), kind=kCustom, calls=%address_computation
}
"""


def test_a_kernel_that_xla_wraps_with_slices_of_its_operands_is_that_kernel() -> None:
    [kernel] = parse(PREFILL).kernels()
    assert kernel.target == "mosaic_gpu_v2" and "/paged_attention_prefill/" in kernel.source
    assert kernel.results[0].shape == (2, 64, 32, 128)


def test_what_xla_writes_is_read() -> None:
    """Reads a program for the CPU, whose text has the same form."""
    table, ids, w = np.zeros((1000, 64), np.float32), np.zeros(8, np.int32), np.zeros((64, 32), np.float32)
    text = jax.jit(lambda table, ids, w: jnp.tanh(table[ids] @ w)).lower(table, ids, w).compile().as_text()
    kernels = parse(text).kernels()
    assert kernels and all(kernel.results for kernel in kernels)


THUNKS = """
000: kCommandBuffer [source       | next=003 (1)]
    001: kCopy         [source       | sink        ] kCopy
    002: kCustomKernel [prev=001 (1) | sink        ] loop_add_fusion grid: [501, 2, 1] threads: [256, 1, 1]  shared_memory: 0 bytes
003: kWhile         [prev=000 (1) | sink        ]
condition:
    004: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source | sink]
        005: kCustomKernel [source       | next=006 (1)] loop_select_fusion grid: [1, 1, 1] threads: [120, 1, 1]  shared_memory: 0 bytes
"""


def test_thunks_are_nested_as_they_are_indented() -> None:
    first, loop = parsed(THUNKS)
    assert (first.kind, loop.kind) == ("kCommandBuffer", "kWhile")
    assert [(thunk.name, thunk.blocks, thunk.threads) for thunk in first.nested] == [
        ("kCopy", 0, 0),
        ("loop_add_fusion", 1002, 256),
    ]
    assert [thunk.name for thunk in leaves([loop])] == ["loop_compare_fusion", "loop_select_fusion"]
