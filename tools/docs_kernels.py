"""Tables for the documentation: which kernel serves each operation on each card, with what evidence, and how
fast products can be.

A kernel's name comes from the tables that choose it. Its evidence comes from benchmarks/results: measured on
such a card; executed, its PTX for such a card, or the same PTX for another one, on a CPU; or compiled for it,
by the tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jengine.devices.device_spec import device_spec
from pallas_kernels.attention.dispatch import DECODE, PREFILL
from pallas_kernels.attention.latent import LATENT_DECODE, LATENT_PREFILL
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.dispatch import KV_WRITE, PAGE_COPY
from pallas_kernels.cache.qkv import Qkv
from pallas_kernels.products.quantize_rows import ROW_QUANTIZATION
from pallas_kernels.products.weights import abstract, stored
from pallas_kernels.quantization.formats import FP8, FP8_BY_FP8, INT8, WeightFormat
from pallas_kernels.quantization.quantized import movable, quantize
from pallas_kernels.targets import Table, explain

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
CARDS = {  # by compute capability: names, and the target that kernels are compiled for
    "8.0": ("A100", "a100"),
    "8.6": ("RTX 30, A10, A40", "rtx3090"),
    "8.9": ("RTX 40, L4, L40S", "l4"),
    "9.0": ("H100, H200", "h200"),
    "10.0": ("B200", "b200"),
    "12.0": ("RTX 50", "rtx5090"),
}


@dataclass(frozen=True)
class Operation:
    """A row of the table.

    Attributes:
        name: of the operation and its format.
        table, call: what chooses its kernel.
        cases: by the kernel's generation: its name, and words of which one is in the names of its cases.
        measured: beginnings of the cases that an H100's suite has.
    """

    name: str
    table: Table
    call: tuple[Any, ...]
    cases: dict[str, tuple[str, tuple[str, ...]]]
    measured: tuple[str, ...] = ()


def operations() -> Iterator[Operation]:
    q, tiles = _shape(1, 8, 64), _shape(1, 16, 8, 64)
    pages, vectors, rows = _shape(2, 2, 16, 64), _shape(2, 1, 64, 576), _shape(1, 128)
    plain = AttentionOptions(1.0)
    optional = AttentionOptions(1.0, window=8, soft_cap=3.0, sinks=_shape(8))
    narrow = {
        kind: jax.eval_shape(lambda kind=kind: movable(quantize(jnp.zeros(pages.shape), kind)))
        for kind in ("int8", FP8)
    }
    decode = {"Hopper": ("paged_attention_decode", ("",)), "Ampere": ("paged_attention", ("decode, head",))}
    yield Operation(
        "decode attention, cache in 16 bits",
        DECODE,
        (q, pages, pages, plain),
        decode,
        ("decode: bfloat16 1x",),
    )
    some = {name: (kernel, ("cap", "sinks")) for name, (kernel, _) in decode.items()}
    yield Operation(
        "the same, window, cap and sinks", DECODE, (q, pages, pages, optional), some, ("decode: ",)
    )
    for kind, word in ("int8", "int8"), (FP8, "fp8"):
        yield Operation(
            f"decode attention, cache in {word}",
            DECODE,
            (q, *[narrow[kind]] * 2, plain),
            {
                "Hopper": ("paged_attention_decode", (word,)),
                "Ampere": ("paged_attention", (f"decode, {word}",)),
            },
            (f"decode: bfloat16 in {kind}",),
        )
    prompts = {
        "Hopper": ("paged_attention_prefill", ("",)),
        "Ampere": ("paged_attention", ("prefill, head",)),
        "Blackwell": ("paged_attention_prefill", ("group",)),
    }
    yield Operation(
        "prompts, cache in 16 bits", PREFILL, (tiles, pages, pages, plain, False), prompts, ("prefill: ",)
    )
    for kind, word in ("int8", "int8"), (FP8, "fp8"):
        yield Operation(
            f"prompts, cache in {word}",
            PREFILL,
            (tiles, *[narrow[kind]] * 2, plain, False),
            {
                "Hopper": ("paged_attention_prefill", (word,)),
                "Ampere": ("paged_attention", (f"prefill, {word}",)),
                "Blackwell": ("paged_attention_prefill", (word,)),
            },
            (f"prefill: bfloat16 in {kind}",),
        )
    yield Operation(
        "latent attention, decode",
        LATENT_DECODE,
        (_shape(1, 8, 576), vectors, plain, 512),
        {"Hopper": ("latent_attention_decode", ("",)), "Ampere": ("paged_attention", ("latent decode",))},
        ("latent: ",),
    )
    yield Operation(
        "latent attention, prompts",
        LATENT_PREFILL,
        (_shape(1, 16, 8, 576), vectors, plain, 512),
        {"Ampere": ("paged_attention", ("latent prefill",))},
    )
    keys = _shape(1, 2, 64)
    for title, kernel, table, call in (
        ("cache writes", "kv_write", KV_WRITE, (Qkv(q, keys, keys),)),
        ("page copies", "copy_pages", PAGE_COPY, ()),
    ):
        for name, cache, word, measured in (
            ("16 bits", pages, ("rotated, two", "16 bits", "bfloat16"), "bfloat16 2x1"),
            ("int8", narrow["int8"], ("int8",), "bfloat16 in int8"),
            ("fp8", narrow[FP8], ("fp8",), f"bfloat16 in {FP8}"),
        ):
            cases = dict.fromkeys(("Hopper", "Ampere"), (kernel, word))
            ran = (f"{kernel}: {measured}",)
            yield Operation(f"{title}, {name}", table, (cache, cache, *call), cases, ran)
    yield Operation("row quantization", ROW_QUANTIZATION, (rows,), {"Hopper": ("quantize_rows", ("",))})
    for name, form, *words, measured in FORMATS:
        hopper = "int4_product" if form.bits == 4 else "grouped_product"
        kernels = ("Hopper", hopper, words[0]), ("Ampere", "product", words[1])
        dense, experts = (
            {
                by: (kernel, of[place : place + 1])
                for by, kernel, of in (*kernels, ("Blackwell", "grouped_product", words[1]))
            }
            for place in range(2)
        )
        weight = stored(abstract(_shape(128, 512), form))
        yield Operation(
            f"products, {name}", weight.table(grouped=False), (_shape(16, 512), weight), dense, measured
        )
        weight, ran = stored(abstract(_shape(2, 128, 512), form)), (f"experts: {name} weights",)
        yield Operation(
            f"experts, {name}", weight.table(grouped=True), (_shape(64, 512), weight), experts, ran
        )


FP8_GROUPS, INT4 = WeightFormat(FP8, 8, 128), WeightFormat("int4", 4, 128, offset=True)
MXFP4 = WeightFormat("e2m1", 4, 32)
# words in the names of cases of dense products and of experts, of Hopper and of the others; what was measured
FORMATS: tuple[tuple[str, WeightFormat, tuple[str, str], tuple[str, str], tuple[str, ...]], ...] = (
    ("bfloat16", WeightFormat("bfloat16", 16), ("bfloat16",) * 2, ("", "experts, bfloat16"), ()),
    ("int8", INT8, ("int8",) * 2, ("int8", "experts, int8"), ("int8 weights",)),
    ("int8 by int8", replace(INT8, inputs="int8"), ("both int8", "int8"), ("", "experts, int8"), ()),
    ("fp8", WeightFormat(FP8, 8), ("fp8",) * 2, ("fp8", "experts, fp8,"), ()),
    ("fp8 by fp8", FP8_BY_FP8, ("both fp8", "fp8,"), ("fp8 by fp8", "experts, fp8,"), ()),
    ("fp8 in groups of 128", FP8_GROUPS, ("by group",) * 2, ("fp8 by group", "experts, fp8 by group"), ()),
    ("int4 (AWQ, GPTQ)", INT4, ("offsets", "experts, offsets"), ("int4", "experts, int4"), ("int4 ",)),
    ("MXFP4", MXFP4, ("MXFP4", "experts, MXFP4"), ("MXFP4", "experts, MXFP4"), ("MXFP4 weights",)),
    ("NVFP4", replace(MXFP4, group=16), ("", ""), ("NVFP4", "experts, NVFP4"), ()),
)


def cards() -> str:
    """Kernel and evidence of each operation on each card."""
    executed = _results("executed_kernels")["kernels"]
    suite = _results("gpu_suite_h100")
    measured = [row["case"] for part in ("correctness", "products") for row in suite[part]["rows"]]
    measured += [f"experts: {row['case']}" for row in suite["experts"]["rows"]]
    titles = [f"{names} ({capability})" for capability, (names, _) in CARDS.items()]
    lines = ["| | " + " | ".join(titles) + " |", "| --- |" + " --- |" * len(CARDS)]
    for operation in operations():
        cells = [_cell(operation, capability, executed, measured) for capability in CARDS]
        lines.append(f"| {operation.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(operation: Operation, capability: str, executed: list[dict[str, Any]], measured: list[str]) -> str:
    device: Any = SimpleNamespace(platform="gpu", device_kind="GPU", compute_capability=capability)
    name = explain(operation.table, device, *operation.call).name
    if name == "XLA":
        return name
    kernel, words = operation.cases[name]
    if capability == "9.0" and any(
        case.startswith(operation.measured) for case in measured if operation.measured
    ):
        return f"{name}, measured"
    target = CARDS[capability][1]
    cases = [row["case"] for row in executed if (row["kernel"], row["target"]) == (kernel, target)]
    ran = any(word in case for case in cases for word in words)
    return f"{name}, {'executed' if ran else 'compiled'}"


OUT, SIZE, ROWS = 4096, 14336, 8  # the last weight of a layer of Llama 8B, and rows
# data sheets' names, the target of the machine code, and cycles a second of the boost clock
MACHINES = {
    "a100": ("a100", 1.41e9),
    "rtx3090": ("rtx3090", 1.695e9),
    "rtx4090": ("l4", 2.52e9),
    "l4": ("l4", 2.04e9),
    "b200": ("b200", 1.965e9),
    "rtx5090": ("rtx5090", 2.407e9),
}


def predictions() -> str:
    """Lower bounds of the time of a product, in microseconds: by the bytes, and by the instructions."""
    specs = {name: device_spec(name) for name in MACHINES}
    titles = [spec.name.removeprefix("NVIDIA ").removeprefix("GeForce ") for spec in specs.values()]
    lines = [
        "| | Instructions a tile | " + " | ".join(titles) + " |",
        "| --- | ---: |" + " ---: |" * len(specs),
    ]
    floor = " | ".join(f"{2 * OUT * SIZE / spec.bandwidth * 1e6:.0f}" for spec in specs.values())
    lines.append(f"| bfloat16 by cuBLAS, bytes alone | | {floor} |")
    compiled = _results("compiled_kernels")["targets"]
    rows = {target: {row["case"]: row for row in of_target} for target, of_target in compiled.items()}
    for case, first in rows["a100"].items():
        if not case.endswith(f", {ROWS} rows") or "instructions" not in first:
            continue
        cells = []
        for name, (target, clock) in MACHINES.items():
            row, tiles = rows[target][case], OUT // 64 * SIZE // 128
            by_bytes = tiles * row["bytes"] / specs[name].bandwidth * 1e6
            by_issue = tiles * row["instructions"] / (specs[name].cores * clock) * 1e6
            cells.append(f"{by_bytes:.0f}, {by_issue:.0f}")
        lines.append(f"| {case.rpartition(', ')[0]} | {first['instructions']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _shape(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
