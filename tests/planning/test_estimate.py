"""Estimated times compared with arithmetic by hand, and parsing of XLA's text."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.devices.device_spec import DeviceSpec
from jengine.planning.estimate import CAUSES, Assumptions, Step, estimate, longer, together
from jengine.planning.hlo import Instruction, parse
from pallas_kernels.thunks import leaves, parsed

DEVICE = DeviceSpec("D", "9.0", 1, 1e12, {"bfloat16": 1e15, "int8": 2e15}, 1e11, "link", 100)
EXACT = Assumptions(bandwidth=1.0, products=1.0, block_bandwidth=1e10, empty_block=1e-6, kernel=1e-6, launch=2e-6, turn=5e-6, exchange=3e-6)
HEAD = "HloModule jit_trunk_8_0_0, is_scheduled=true\n\n"
PROGRAM = (
    HEAD
    + """
%fused_gather (param_0: bf16[1000,64], param_1: s32[8]) -> bf16[8,64] {
  %param_0 = bf16[1000,64]{1,0} parameter(0)
  %param_1 = s32[8]{0} parameter(1)
  ROOT %gather.1 = bf16[8,64]{1,0} gather(%param_0, %param_1), offset_dims={1}, metadata={op_name="jit(f)/gather"}
}

ENTRY %main.9 (table: bf16[1000,64], ids: s32[8]) -> bf16[8,128] {
  %table = bf16[1000,64]{1,0} parameter(0)
  %ids = s32[8]{0} parameter(1)
  %w = bf16[128,64]{1,0} parameter(2)
  %fusion.1 = bf16[8,64]{1,0} fusion(%table, %ids), kind=kLoop, calls=%fused_gather
  %gemm = (bf16[8,128]{1,0}, s8[4194304]{0}) custom-call(%fusion.1, %w), custom_call_target="__cublas$lt$matmul", backend_config={"a":"(b)"}
  %out = bf16[8,128]{1,0} get-tuple-element(%gemm), index=0
  ROOT %all-reduce.1 = bf16[8,128]{1,0} all-reduce(%out), to_apply=%add
}
"""
)


def test_each_kernel_takes_its_launch_and_the_slower_of_bytes_and_operations() -> None:
    program = parse(PROGRAM)
    assert program.name == "jit_trunk_8_0_0" and program.entry == "main.9"
    assert [one.name for one, _, _ in program.kernels()] == ["fusion.1", "gemm", "all-reduce.1"]
    found = estimate(program, Step(8, 1), DEVICE, launches=3, devices=2, assumed=EXACT)
    gathered, multiplied = 8 * 64 * 2 * 2 + 8 * 4, (8 * 64 + 128 * 64 + 8 * 128) * 2
    assert (found.kernels, found.bytes, found.operations) == (3, gathered + multiplied, 2 * 8 * 64 * 128)
    expected = {"weights": multiplied / 1e12, "cache": 0.0, "activations": gathered / 1e12}
    assert found.seconds == pytest.approx({**expected, "links": 3e-6 + 8 * 128 * 2 / 1e11, "launches": 3e-6 + 3 * 2e-6})
    slow = dataclasses.replace(DEVICE, rates={"bfloat16": 1e9})
    assert estimate(program, Step(8, 1), slow, launches=3, devices=2, assumed=EXACT).seconds["weights"] == pytest.approx(131072 / 1e9)


DECODE = """
ENTRY %main (q: bf16[8,4,8,128]) -> f32[2,8,4,8,128] {
  %q = bf16[8,4,8,128]{3,2,1,0} parameter(0)
  %k = bf16[100,4,64,128]{3,2,1,0} parameter(1)
  %v = bf16[100,4,64,128]{3,2,1,0} parameter(2)
  %tables = s32[8,64]{1,0} parameter(3)
  ROOT %one = (f32[2,8,4,8,128]{4,3,2,1,0}, f32[2,8,4,8]{3,2,1,0}) custom-call(%q, %k, %v, %tables), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/paged_attention_decode/mpmd_map"}
}
"""  # noqa: E501


@pytest.mark.parametrize(("rows", "drawn"), [(8, 2 * 4 * 8 * 1e10), (1, 2 * 4 * 1e10)])
def test_few_rows_leave_blocks_of_threads_without_work(rows: int, drawn: float) -> None:
    found = estimate(parse(HEAD + DECODE), Step(rows, 1000), DEVICE, launches=1, assumed=EXACT)
    size = rows * 1000 * 2 * 4 * 128 * 2 + 8 * 4 * 8 * 128 * 2 + 2 * 8 * 4 * 8 * (128 + 1) * 4
    assert found.bytes == size
    assert found.seconds["cache"] == pytest.approx(size / drawn + 2 * 4 * (8 - rows) / (2 * DEVICE.cores) * 1e-6)


GROUPED = """
ENTRY %main (x: bf16[520,256]) -> bf16[520,512] {
  %x = bf16[520,256]{1,0} parameter(0)
  %w = s8[128,512,256]{2,1,0} parameter(1)
  ROOT %one = bf16[520,512]{1,0} custom-call(%x, %w), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/grouped_product/mpmd_map"}
}
"""  # noqa: E501


def test_only_experts_that_tokens_meet_are_read() -> None:
    few, all_of = (estimate(parse(HEAD + GROUPED), Step(8, 1), DEVICE, launches=1, met=met, assumed=EXACT).bytes for met in (16, 128))
    assert all_of - few == (128 - 16) * 512 * 256


LOOP = """
%body (p: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %p = (s32[], f32[1000]{0}) parameter(0)
  %x = f32[1000]{0} get-tuple-element(%p), index=1
  %y = f32[1000]{0} copy(%x)
  ROOT %t = (s32[], f32[1000]{0}) tuple(%x, %y)
}

ENTRY %main (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %w = (s32[], f32[1000]{0}) while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"32"}}
  ROOT %r = f32[1000]{0} get-tuple-element(%w), index=1
}
"""


def test_a_loop_counts_as_often_as_it_turns() -> None:
    found = estimate(parse(HEAD + LOOP), Step(1, 1), DEVICE, launches=1, assumed=EXACT)
    assert (found.kernels, found.bytes) == (32, 32 * 8000)
    assert found.seconds["launches"] == pytest.approx(32 * 1e-6 + 2e-6 + 32 * 5e-6)


def test_programs_follow_each_other_and_layers_are_alike() -> None:
    one, two = (estimate(parse(HEAD + text), Step(1, 1), DEVICE, launches=1, assumed=EXACT) for text in (LOOP, DECODE))
    assert together([one, two]).total == pytest.approx(one.total + two.total)
    assert longer(one, together([one, two]), 5).seconds == pytest.approx({c: one.seconds[c] + 4 * two.seconds[c] for c in CAUSES})


def test_what_xla_writes_is_read() -> None:
    """Reads a program for the CPU, whose text has the same form."""
    table, ids, w = np.zeros((1000, 64), np.float32), np.zeros(8, np.int32), np.zeros((64, 32), np.float32)
    text = jax.jit(lambda table, ids, w: jnp.tanh(table[ids] @ w)).lower(table, ids, w).compile().as_text()
    assert text is not None
    program = parse(text)
    inside: list[Instruction] = [one for one, _, _ in program.kernels()]
    assert inside and all(one.results for one in inside)
    assert sum(program.bytes_of(one, where) for one, _, where in program.kernels()) < 1000 * 64 * 4, "of the table only what is looked up"


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
    assert [(thunk.name, thunk.blocks, thunk.threads) for thunk in first.nested] == [("kCopy", 0, 0), ("loop_add_fusion", 1002, 256)]
    assert [thunk.name for thunk in leaves([loop])] == ["loop_compare_fusion", "loop_select_fusion"]
