"""Estimated times compared with arithmetic by hand, and parsing of XLA's text."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.capacity.planning.estimate import CAUSES, Assumptions, Estimate, Step, estimate, longer, together
from jengine.capacity.planning.hlo import Instruction, parse
from jengine.devices.device_spec import DeviceSpec
from pallas_kernels.compilation.thunks import leaves, parsed

DEVICE = DeviceSpec("D", "9.0", 1, 1e12, {"bfloat16": 1e15, "int8": 2e15}, 1e11, "link", 100)
EXACT = Assumptions(
    bandwidth=1.0, products=1.0, block_bandwidth=1e10, kernel=1e-6, launch=2e-6, turn=5e-6, exchange=3e-6
)
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
    assert found.seconds == pytest.approx(
        {**expected, "links": 3e-6 + 8 * 128 * 2 / 1e11, "launches": 3e-6 + 3 * 2e-6}
    )
    slow = dataclasses.replace(DEVICE, rates={"bfloat16": 1e9})
    assert estimate(program, Step(8, 1), slow, launches=3, devices=2, assumed=EXACT).seconds[
        "weights"
    ] == pytest.approx(131072 / 1e9)


DECODE = """
ENTRY %main (q: bf16[256,128]) -> bf16[256,128] {
  %q = bf16[256,128]{1,0} parameter(0)
  %k = bf16[100,4,64,128]{3,2,1,0} parameter(1)
  %v = bf16[100,4,64,128]{3,2,1,0} parameter(2)
  %tables = s32[8,64]{1,0} parameter(3)
  %lengths = s32[8]{0} parameter(4)
  %first = s32[21,2]{1,0} parameter(5)
  %items = s32[51,8]{1,0} parameter(6)
  %joins = s32[20,6]{1,0} parameter(7)
  %signals = s32[20]{0} parameter(8)
  ROOT %one = (bf16[256,128]{1,0}, f32[38,8,128]{2,1,0}, f32[38,64]{1,0}, s32[20]{0}) custom-call(%q, %k, %v, %tables, %lengths, %first, %items, %joins, %signals), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/paged_attention_decode/mpmd_map"}
}
"""


@pytest.mark.parametrize(
    ("rows", "context", "busy", "most"), [(8, 1024, 20, 26), (1, 1024, 16, 4), (1, 10, 1, 4)]
)
def test_decode_draws_what_its_blocks_with_work_do(rows: int, context: int, busy: int, most: int) -> None:
    """Of 20 blocks, each of which has `most` tiles at most."""
    found = estimate(parse(HEAD + DECODE), Step(rows, context), DEVICE, launches=1, assumed=EXACT)
    parts = busy - 1 + min(busy - 1, rows * 4)
    size = rows * context * 2 * 4 * 128 * 2 + 2 * rows * 32 * 128 * 2 + 2 * parts * 8 * 128 * 4
    assert found.bytes == size
    tiles = rows * 4 * -(-context // 64)
    assert found.seconds["cache"] == pytest.approx(
        size / (1e10 * tiles / most) + (EXACT.join if parts else 0)
    )


@pytest.mark.parametrize(("together", "reads"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_decode_reads_the_pages_of_a_sequence_once(together: int, reads: int) -> None:
    """In a step of 8 rows, `together` of each sequence."""
    step = Step(8, 1024, together)
    found = estimate(parse(HEAD + DECODE), step, DEVICE, launches=1, assumed=EXACT)
    busy = min(20, reads * 4 * 16 // 4)
    parts = busy - 1 + min(busy - 1, reads * 4)
    size = reads * 1024 * 2 * 4 * 128 * 2 + 2 * 8 * 32 * 128 * 2 + 2 * parts * together * 8 * 128 * 4
    assert found.moved == {cause: size if cause == "cache" else 0 for cause in found.moved}


LATENT = """
ENTRY %main (q: bf16[8,128,576]) -> bf16[8,128,512] {
  %q = bf16[8,128,576]{2,1,0} parameter(0)
  %pages = bf16[100,1,64,576]{3,2,1,0} parameter(1)
  %tables = s32[8,64]{1,0} parameter(2)
  %lengths = s32[8]{0} parameter(3)
  %first = s32[21]{0} parameter(4)
  %items = s32[51,6]{1,0} parameter(5)
  ROOT %one = (bf16[8,128,512]{2,1,0}, f32[38,64,512]{2,1,0}, f32[38,64]{1,0}) custom-call(%q, %pages, %tables, %lengths, %first, %items), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/latent_attention_decode/mpmd_map"}
}
"""


@pytest.mark.parametrize(("rows", "context", "busy"), [(8, 1024, 20), (1, 1024, 8), (1, 10, 1)])
def test_latent_decode_reads_a_token_once_and_multiplies_for_64_rows(
    rows: int, context: int, busy: int
) -> None:
    """Two blocks of heads read the same tokens, the second at best from a cache."""
    found = estimate(parse(HEAD + LATENT), Step(rows, context), DEVICE, launches=1, assumed=EXACT)
    parts = busy - 1 + min(busy - 1, 2 * rows)
    assert found.bytes == rows * context * 576 * 2 + rows * 128 * (576 + 512) * 2 + 2 * parts * 64 * 512 * 4
    assert found.operations == 2 * 64 * 2 * rows * context * (576 + 512)
    most = -(-2 * rows * -(-context // 64) // busy)
    assert found.seconds["cache"] == pytest.approx(
        found.bytes / (1e10 * 2 * rows * -(-context // 64) / most) + (EXACT.join if parts else 0)
    )


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
    found = estimate(parse(HEAD + PREFILL), Step(1, 1000), DEVICE, launches=1, assumed=EXACT)
    queries = 2 * 64 * 32 * 128
    assert (found.kernels, found.operations) == (1, 4 * queries * (1000 - 32))
    assert found.bytes == 2 * 1000 * 2 * 8 * 128 * 2 + 2 * 2 * queries
    assert found.seconds["cache"] == pytest.approx(found.bytes / 1e12 + EXACT.fill)


GROUPED = """
ENTRY %main (x: bf16[520,256]) -> bf16[520,512] {
  %x = bf16[520,256]{1,0} parameter(0)
  %w = s8[EXPERTS,OUT,256]{2,1,0} parameter(1)
  %group = s32[BLOCKS]{0} parameter(2)
  %scale = f32[EXPERTS,OUTSCALES]{2,1,0} parameter(3)
  ROOT %one = bf16[520,OUT]{1,0} custom-call(%x, %w, %group, %scale), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/grouped_product/mpmd_map"}
}
"""


def grouped(
    met: float, *, experts: int = 128, out: int = 512, blocks: int = 200, scales: str = ""
) -> Estimate:
    sizes = {"EXPERTS": experts, "OUTSCALES": f"{out}{scales}", "OUT": out, "BLOCKS": blocks}
    text = GROUPED
    for name, size in sizes.items():
        text = text.replace(name, str(size))
    return estimate(parse(HEAD + text), Step(8, 1), DEVICE, launches=1, met=met, assumed=EXACT)


def test_only_experts_that_tokens_meet_are_read() -> None:
    few, all_of = (grouped(met).bytes for met in (16, 128))
    assert all_of - few == (128 - 16) * 512 * 256


def test_scales_by_group_of_inputs_are_read_too() -> None:
    assert grouped(1, experts=1, scales=",2").bytes - grouped(1, experts=1).bytes == 4 * 512 * 2


def test_few_outputs_are_divided_among_more_thread_blocks() -> None:
    few, many = (grouped(1, experts=1, out=out, blocks=1).seconds["weights"] for out in (1024, 128 * 132))
    assert few / (2 * 520 * (256 + 1024) + 1024 * 256) == pytest.approx(1 / (16 * EXACT.block_bandwidth))
    assert many / (2 * 520 * (256 + 128 * 132) + 128 * 132 * 256) == pytest.approx(
        1 / min(132 * EXACT.block_bandwidth, 1e12)
    )


FOUR_BITS = """
ENTRY %main (x: bf16[128,1024]) -> f32[2,128,512] {
  %x = bf16[128,1024]{1,0} parameter(0)
  %w = s32[GROUPS,512,128]{2,1,0} parameter(1)
  %scale = f32[GROUPS,512,8]{2,1,0} parameter(2)
  %group = s32[4]{0} parameter(3)
  %start = s32[4]{0} parameter(4)
  %length = s32[4]{0} parameter(5)
  %offset = f32[GROUPS,512,8]{2,1,0} parameter(6)
  %sums = f32[8,128]{1,0} parameter(7)
  ROOT %one = f32[2,128,512]{2,1,0} custom-call(%x, %w, %scale, %group, %start, %length, %offset, %sums), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/int4_product/mpmd_map"}
}
"""


def test_four_bit_weights_are_read_with_scales_and_offsets_and_unpacked_for_each_block_of_rows() -> None:
    """A weight of 512 x 1024 takes half a byte a number, and two float32 for each group of 128."""
    weight, others = 512 * 1024 // 2 + 2 * 512 * 8 * 4, (128 * 1024 * 2) + 2 * 128 * 512 * 4
    dense = estimate(
        parse(HEAD + FOUR_BITS.replace("GROUPS", "1")), Step(8, 1), DEVICE, launches=1, assumed=EXACT
    )
    assert (dense.bytes, dense.operations) == (weight + others, 2 * 128 * 1024 * 512)
    experts = parse(HEAD + FOUR_BITS.replace("GROUPS", "16"))
    few, all_of = (
        estimate(experts, Step(8, 1), DEVICE, launches=1, met=met, assumed=EXACT).bytes for met in (4, 16)
    )
    assert (few, all_of) == (4 * weight + others, 16 * weight + others)
    slow = dataclasses.replace(EXACT, unpacked=1e6)
    unpacked = estimate(
        parse(HEAD + FOUR_BITS.replace("GROUPS", "1")), Step(8, 1), DEVICE, launches=1, assumed=slow
    ).seconds["weights"]
    assert unpacked == pytest.approx(4 * dense.bytes / (DEVICE.cores * 1e6 / 2)), "four blocks of rows"


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
    one, two = (
        estimate(parse(HEAD + text), Step(1, 1), DEVICE, launches=1, assumed=EXACT) for text in (LOOP, DECODE)
    )
    assert together([one, two]).total == pytest.approx(one.total + two.total)
    assert longer(one, together([one, two]), 5).seconds == pytest.approx(
        {c: one.seconds[c] + 4 * two.seconds[c] for c in CAUSES}
    )


def test_what_xla_writes_is_read() -> None:
    """Reads a program for the CPU, whose text has the same form."""
    table, ids, w = np.zeros((1000, 64), np.float32), np.zeros(8, np.int32), np.zeros((64, 32), np.float32)
    text = jax.jit(lambda table, ids, w: jnp.tanh(table[ids] @ w)).lower(table, ids, w).compile().as_text()
    assert text is not None
    program = parse(text)
    inside: list[Instruction] = [one for one, _, _ in program.kernels()]
    assert inside and all(one.results for one in inside)
    assert sum(program.bytes_of(one, where) for one, _, where in program.kernels()) < 1000 * 64 * 4, (
        "of the table only what is looked up"
    )


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
