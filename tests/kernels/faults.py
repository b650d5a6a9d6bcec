"""Faults planted in kernels, to see how the machine reports them."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import jax
import numpy as np

from tests.kernels.executed import Executed, as_bytes, is_wrong
from tests.kernels.shipped import (
    E4M3,
    INT4,
    INT8,
    PLAIN,
    Check,
    ampere_copy,
    ampere_decode,
    ampere_prefill,
    decode,
    eight_bits,
    inputs_split,
    int4,
    mma,
    prefill,
    tcgen05,
    tensor_dense,
    tensor_sides,
)
from tools.ptx_machine.capture import Compiled
from tools.ptx_machine.findings import Finding
from tools.ptx_machine.schedules import Schedule

VICTIMS: dict[str, Check] = {
    # items of one row and of several
    "decode": decode(128, 1, 4, 64, 3, "bfloat16", PLAIN, longest=330, counts=(1, 3, 1, 1, 1, 2, 1)),
    "prefill": prefill(128, 1, 2, 64, 64, "bfloat16", PLAIN),
    "product": inputs_split("int8", 3, 64, 1536, 1),  # more stages than there is memory for
    "scaled product": eight_bits(E4M3, 8, 64, 1280, by_group=True),  # here, too
    "MXFP4 product": int4(64, 64, 1408, 32, False, "e2m1", "bfloat16"),  # and here
    "int4 product": int4(8, 64, 1408, 64, True, "int4", "bfloat16"),
    "Ampere": ampere_decode(128, 1, 9, 64, 2, "bfloat16", PLAIN),
    "Ampere, int8 cache": ampere_decode(128, 1, 4, 64, 2, "bfloat16", PLAIN, kind="int8"),
    "Ampere, latent prompts": ampere_prefill(192, 1, 3, 16, 2, "bfloat16", PLAIN, rank=128),
    "Ampere page copy": ampere_copy("int8", "float16", 64, 1, 128),
    "Ampere product": mma(9, 64, 1280, INT4, "bfloat16"),
    "Blackwell prompts": tcgen05(128, 1, 4, 64, 64, "bfloat16", PLAIN),
    # here, too, more stages than there is memory for
    "Blackwell product": tensor_dense(20, 128, 1280, INT8, "bfloat16"),
    "Blackwell scaled product": tensor_sides(E4M3, 8, 128, 1280, by_group=True),
}
ON_AMPERE = tuple(name for name in VICTIMS if name.startswith("Ampere"))
ON_BLACKWELL = tuple(name for name in VICTIMS if name.startswith("Blackwell"))
# The first that tells of a fault counts.
SCHEDULES = (
    Schedule(seed=0, order="random", garbage="nan"),
    Schedule(seed=1, order="late", garbage="random"),
    Schedule(seed=2, order="slow_producer", garbage="random"),
    Schedule(seed=3, order="slow_consumer", garbage="nan"),
)

# Regular expressions for PTX as Mosaic writes it: a wait for an mbarrier, the phase that it waits for, a
# fence, a barrier of threads, a fence between two of these; in the host function, the innermost size of a
# box; again in PTX, a descriptor for wgmma, a difference, registers of a product's left side, bytes of
# two numbers, masks.
WAIT = r"mbarrier\.try_wait\.parity[^\n]*\n\t@P1 bra\.uni DONE; \n\tbra\.uni +LAB_WAIT; "
PHASE = r"and\.b32 \t(%r\d+), (%r\d+), 1;(?=[^{]*\{\n\t\.reg \.pred +P1; )"
FENCE = r"fence\.proxy\.async\.shared::cta;"
BAR = r"bar\.sync [^\n;]*;"
LANDED = rf"(cp\.async\.wait_group \t0;[^{{]*?){BAR}"
PAIR = rf"{BAR}([^;]*){FENCE}([^;]*){BAR}"
BOX = r"store i64 64, (ptr %\d+, align \d+(?:(?!store)[\s\S])*?call void @mosaic_gpu_init_tma_desc)"

DESCRIPTOR = r"(or\.b64 \t%rd\d+, %rd\d+, )(46116\d+);"
DIFFERENCE = r"sub\.f32 \t(%r\d+), (%r\d+), (%r\d+);"
FRAGMENT = r"\{(%r\d+),(%r\d+),(%r\d+),(%r\d+)\}, (%rd\d+), p"
SPREAD = r"(prmt\.b32 both, %r\d+, 0), 0x4140;"
# coordinates of a copy of scales, arrivals at its barrier, and a load of scales before their slot is released
SCALES = r"(2d\.shared::cta\.global[^\n]*\{)(%r\d+),(%r\d+)\}"
ARRIVALS = r"(mov\.b32 \t%r\d+), 384;"
ARRIVALS4 = r"(mov\.b32 \t%r\d+), 512;"
# of the tensor cores: a wait for products, and the descriptor of the columns after the first 64
AWAITED = r"(wgmma\.wait_group\.sync\.aligned) 0"
COLUMNS = r"(add\.s64 x, %rd\d+), 64;"
RELEASED = r"(ld\.shared\.v2\.b32[^\n]*\n)([\s\S]*?)(mbarrier\.arrive\.release[^\n]*\n)"
# of products with four-bit weights: the shift of a nibble, a right side, scales of a row
NIBBLE = r"(shr\.u32 \t%r\d+, %r\d+), 4;(?=\s[^;]*\slop3)"
INPUTS = r"(mma\.sync\S* \{[^}]*\}, *\{[^}]*\}, *)\{(%r\d+),(%r\d+)\}"
SCALES_OF_ROW = r"(ld\.v4\.b32 \t)\{(%r\d+), (%r\d+)"
# of attention to an int8 cache: bytes of words, values to be transposed, scores times two tokens' scales
BYTES = r"(shr\.u32 \t%r\d+, %r\d+), 8;(?=\s[^;]*\slop3)"
TRANSPOSED = r"(ldmatrix\.sync\.aligned\.m8n8\.x4)\.trans"
SCALED = r"(mul\.f32 \t%r\d+, )(%r\d+)(, %r\d+;\s*mul\.f32 \t%r\d+, \2, %r\d+;\s*mul\.f32 \t%r\d+, )(%r\d+),"
# of prompts, three heads to a query; of page copies, copies of padding, and tokens of a part of a page
THIRD = r"(mul\.hi\.u32 \t%r\d+, %r\d+,) -1431655765;"
DESTINATION = r"(setp\.lt\.s64 \t%p\d+, %rd\d+,) 1;"
TOKEN = r"or\.b32 \t(%r\d+), (%r\d+), %r3;(?=[^;]*mul\.wide\.u32)"
# of products in tensor memory: a product and its commit, waits for products, fences of threads, descriptors
COMMIT = r"tcgen05\.commit[^\n]*"
EARLY = rf"(tcgen05\.mma[\s\S]*?)({COMMIT})"
MULTIPLIED = rf"{WAIT}(?=[^{{]*tcgen05\.fence)"
BEFORE, AFTER = r"tcgen05\.fence::before_thread_sync;", rf"({BAR}[^;]*)tcgen05\.fence::after_thread_sync;"
STRIDE = r"(mov\.b64 b_desc, \{b_desc_low, )1073741952"
FORM = r"(mov\.b32 \t%r\d+), (13\d{7});"
# the same of products: a thread's arrival, bytes of a pair, a barrier after loads, and scales of rows
ARRIVED = r"@%p\d+ mbarrier\.arrive\.release[^\n]*"
PAIR_OF_BYTES = r"(prmt\.b32 %r\d+, %r\d+, 0), 0x4140;"
LOADED = rf"({BEFORE}[^;]*){BAR}"
ROW_SCALES = r"(ld\.shared\.v2\.b64[^\n]*\n)([\s\S]*?)(mbarrier\.arrive\.release[^\n]*\n)"
MASKS = r"setp\.lt\.s32 \t(%p\d+, %r\d+, %r\d+;)(?=\n\tsetp\.lt)"


@dataclass(frozen=True)
class Fault:
    """A change of a kernel.

    Attributes:
        name: of the fault.
        kernel: of VICTIMS.
        old, new: a regular expression in the PTX, and what replaces it.
        told: by findings of this kind, or by "other results" alone.
        at: which of the matches is replaced; None: all.
        host: the change is in the host function instead.
    """

    name: str
    kernel: str
    old: str
    new: str | Callable[[re.Match[str]], str]
    told: str
    at: int | None = 0
    host: bool = False

    def plant(self, kernel: Compiled) -> Compiled:
        text = kernel.host if self.host else kernel.ptx
        found = list(re.finditer(self.old, text))
        for match in reversed(found if self.at is None else [found[self.at]]):
            new = match.expand(self.new) if isinstance(self.new, str) else self.new(match)
            text = text[: match.start()] + new + text[match.end() :]
        return replace(kernel, host=text) if self.host else replace(kernel, ptx=text)


@dataclass(frozen=True)
class Report:
    """What tells of a fault: the findings of the first schedule with any, or none but other results."""

    fault: Fault
    findings: list[Finding]
    schedule: Schedule

    @property
    def told(self) -> set[str]:
        return {finding.kind for finding in self.findings} or {"other results"}


class Victim:
    """A kernel, compiled once, for faults."""

    def __init__(self, name: str, target: str = "h200") -> None:
        executed = Executed(SCHEDULES[:1], target)
        VICTIMS[name](runner=executed.runner)
        self.emulation, self.args, self.right = executed.calls[0]
        self.kernel = self.emulation.kernels[0]

    def report(self, fault: Fault) -> Report | None:
        """None: nothing tells of it."""
        self.emulation.replace(0, fault.plant(self.kernel))
        for schedule in SCHEDULES:
            got = self.emulation(*self.args, schedule=schedule)
            findings = [x for run in self.emulation.runs for x in run.result.findings if is_wrong(x)]
            same = jax.tree.map(lambda a, b: np.array_equal(as_bytes(a), as_bytes(b)), got, self.right)
            if findings or not all(jax.tree.leaves(same)):
                return Report(fault, findings, schedule)
        return None


def reports_of(name: str, faults: Sequence[Fault], target: str) -> list[Report | None]:
    victim = Victim(name, target)
    return [victim.report(fault) for fault in faults]


def reports_elsewhere(name: str, faults: Sequence[Fault], target: str) -> list[Report | None]:
    """In a new process, which compiles for another compute capability."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(reports_of, name, faults, target).result()


def double_stride(match: re.Match[str]) -> str:
    """Of a descriptor for wgmma: bits 32 to 45."""
    number = int(match[2])
    return f"{match[1]}{number + (number & (0x3FFF << 32))};"


def other_format(match: re.Match[str]) -> str:
    """Of an instruction descriptor of tcgen05: A in float16, not bfloat16."""
    return f"{match[1]}, {int(match[2]) ^ 1 << 7};"


FAULTS = (
    Fault("missing wait", "decode", WAIT, "\n\n", "race", at=1),
    Fault("wrong phase", "decode", PHASE, r"not.b32 \1, \2; and.b32 \1, \1, 1;", "fault"),
    Fault("missing arrival", "decode", r"mbarrier\.arrive\.release[^\n]*", "", "fault"),
    Fault("wrong descriptor", "decode", DESCRIPTOR, double_stride, "race"),
    Fault("swapped operands", "decode", DIFFERENCE, r"sub.f32 \t\1, \3, \2;", "other results", at=None),
    Fault("missing fence", "decode", FENCE, "", "proxy"),
    Fault("wrong box", "decode", BOX, r"store i64 32, \1", "fault", host=True),
    Fault("swapped fragment", "decode", FRAGMENT, r"{\1,\3,\2,\4}, \5, p", "other results"),
    Fault("length off by one", "decode", MASKS, r"setp.le.s32 \t\1", "other results", at=None),
    Fault("missing pair of barriers", "prefill", PAIR, rf"\1{FENCE}\2".replace("\\.", "."), "race"),
    Fault("products not awaited", "prefill", AWAITED, r"\1 1", "race"),
    Fault("stores not awaited", "prefill", r"(cp\.async\.bulk\.wait_group\.read) \t0", r"\1 \t1", "race"),
    Fault("sums not awaited", "product", WAIT, "\n\n", "race", at=1),
    Fault("swapped bytes", "product", SPREAD, r"\1, 0x4041;", "other results"),
    Fault("stages not awaited", "product", WAIT, "\n\n", "race"),
    Fault("stages copied early", "product", WAIT, "\n\n", "race", at=3),
    Fault("arrivals for other warps missing", "product", r"mbarrier\.arrive\.noComplete[^\n]*", "", "fault"),
    Fault("scales of other inputs", "scaled product", SCALES, r"\1\2,\2}", "other results", at=1),
    Fault("arrivals of scales not counted", "scaled product", ARRIVALS, r"\1, 256;", "fault"),
    Fault("scales released early", "scaled product", RELEASED, r"\2\3\1", "race"),
    Fault("tiles not awaited", "MXFP4 product", WAIT, "\n\n", "race", at=None),
    Fault("arrivals of a tile's scales not counted", "MXFP4 product", ARRIVALS, r"\1, 256;", "fault"),
    Fault("columns of another product", "MXFP4 product", COLUMNS, r"\1, 62;", "other results"),
    Fault("tiles' products not awaited", "MXFP4 product", AWAITED, r"\1 1", "race", at=None),
    Fault("factor of another nibble", "MXFP4 product", r"\{h0, h0\}", r"{h1, h1}", "other results", at=None),
    Fault("arrivals of offsets not counted", "int4 product", ARRIVALS4, r"\1, 384;", "fault"),
    Fault(
        "zero of another group",
        "int4 product",
        r"term, \{h0, h0\}",
        r"term, {h1, h1}",
        "other results",
        at=None,
    ),
    Fault("copies not awaited", "Ampere", r"(cp\.async\.wait_group) \t0", r"\1 \t1", "race"),
    Fault("a tile too few awaited", "Ampere product", r"(cp\.async\.wait_group) \t2", r"\1 \t4", "race"),
    Fault(
        "barrier after the last tile missing",
        "Ampere product",
        LANDED,
        r"\1",
        "race",
    ),
    Fault("another nibble", "Ampere product", NIBBLE, r"\1, 8;", "other results"),
    Fault("swapped inputs", "Ampere product", INPUTS, r"\1{\3,\2}", "other results"),
    Fault("scales of another group", "Ampere product", SCALES_OF_ROW, r"\1{\3,\2", "other results"),
    Fault("other bytes", "Ampere, int8 cache", BYTES, r"\1, 16;", "other results"),
    Fault("values not transposed", "Ampere, int8 cache", TRANSPOSED, r"\1", "other results"),
    Fault("scale of another token", "Ampere, int8 cache", SCALED, r"\1\4\3\4,", "other results"),
    Fault("missing barrier", "Ampere", LANDED, r"\1", "race"),
    Fault("barrier of a tile missing", "Ampere, latent prompts", LANDED, r"\1", "race"),
    Fault("position of another query", "Ampere, latent prompts", THIRD, r"\1 1431655765;", "other results"),
    Fault("null page copied", "Ampere page copy", DESTINATION, r"\1 0;", "race"),
    Fault("product not committed", "Blackwell prompts", COMMIT, "", "fault"),
    Fault("product committed too early", "Blackwell prompts", EARLY, r"\2\1", "race"),
    Fault("scores not awaited", "Blackwell prompts", MULTIPLIED, "\n\n", "race"),
    Fault("weights not awaited", "Blackwell prompts", r"tcgen05\.wait::st[^\n]*", "", "race"),
    Fault(
        "scores overwritten before they are loaded",
        "Blackwell prompts",
        r"tcgen05\.wait::ld[^\n]*",
        "",
        "race",
    ),
    Fault("fence before a barrier missing", "Blackwell prompts", BEFORE, "", "race"),
    Fault("fence after a barrier missing", "Blackwell prompts", AFTER, r"\1", "race"),
    Fault(
        "wrong descriptor of keys", "Blackwell prompts", STRIDE, r"\g<1>1073741888", "other results", at=None
    ),
    Fault("wrong descriptor of a product", "Blackwell prompts", FORM, other_format, "other results", at=None),
    Fault("tensor memory kept", "Blackwell prompts", r"tcgen05\.dealloc[^\n]*", "", "exit"),
    Fault("stages not awaited by threads", "Blackwell product", WAIT, "\n\n", "race"),
    Fault("weights overwritten early", "Blackwell product", MULTIPLIED, "\n\n", "race"),
    Fault("weights not stored", "Blackwell product", r"tcgen05\.wait::st[^\n]*", "", "race"),
    Fault("stages not released by threads", "Blackwell product", ARRIVED, "", "fault"),
    Fault("stage's product not committed", "Blackwell product", COMMIT, "", "fault"),
    Fault("stage's product committed too early", "Blackwell product", EARLY, r"\2\1", "race"),
    Fault("sums of all stages not awaited", "Blackwell product", MULTIPLIED, "\n\n", "race", at=2),
    Fault("bytes of a pair swapped", "Blackwell product", PAIR_OF_BYTES, r"\1, 0x4041;", "other results"),
    Fault("weights in another format", "Blackwell product", FORM, other_format, "other results", at=None),
    Fault("sums of a stage not awaited", "Blackwell scaled product", MULTIPLIED, "\n\n", "race"),
    Fault("sums of a stage not loaded", "Blackwell scaled product", r"tcgen05\.wait::ld[^\n]*", "", "race"),
    Fault("barrier after loads missing", "Blackwell scaled product", LOADED, r"\1", "race"),
    Fault("stage released before its scales", "Blackwell scaled product", ROW_SCALES, r"\2\3\1", "race"),
    Fault("arrivals of rows' scales not counted", "Blackwell scaled product", ARRIVALS, r"\1, 256;", "fault"),
    Fault("scales of other tokens", "Ampere page copy", TOKEN, r"mov.b32 \t\1, \2;", "other results"),
)
